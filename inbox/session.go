package inbox

import (
	"context"
	"errors"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// session is one time of handling events: read brings messages, workers handle
// them, and the goroutine of loop decides. It alone owns the queue.
type session struct {
	*Consumer
	iter jetstream.MessagesContext
	q    *queue

	work   context.Context // of handlers and questions
	cancel context.CancelFunc
	all    sync.WaitGroup

	arrivals chan *item // closed by read at its end
	jobs     chan job
	outcomes chan outcome
	answers  chan answer
	broken   chan error

	asked bool // an answer is on its way
	told  bool // that messages are elsewhere
}

// answer is what the server says of the consumer at one moment.
type answer struct {
	pending   int
	delivered uint64
	err       error
}

// pullBatch is how many messages are asked for at a time.
const pullBatch = 500

// session handles events until ctx ends or the lock is lost. What it has not
// handled by then it gives back to the server, for the next one to have at once.
func (c *Consumer) session(ctx context.Context, lost <-chan struct{}) error {
	iter, err := c.pull(ctx, lost)
	if iter == nil {
		return err
	}
	s := &session{
		Consumer: c, iter: iter, q: newQueue(c.o.Unordered),
		arrivals: make(chan *item), jobs: make(chan job, c.o.Workers), outcomes: make(chan outcome, c.o.Workers),
		answers: make(chan answer, 1), broken: make(chan error, 1),
	}
	s.work, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	defer s.cancel()
	s.all.Go(s.read)
	for range c.o.Workers {
		s.all.Go(func() {
			for j := range s.jobs {
				s.outcomes <- c.do(s.work, j)
			}
		})
	}
	err = s.loop(ctx, lost)
	close(s.jobs)
	s.cancel()
	s.all.Wait()
	s.giveBack()
	return err
}

// pull begins to pull messages; it rides out a broker that is away. nil without
// an error means that there is no time left.
func (c *Consumer) pull(ctx context.Context, lost <-chan struct{}) (jetstream.MessagesContext, error) {
	for n := 1; ; n++ {
		iter, err := c.o.Consumer.Messages(jetstream.PullMaxMessages(min(c.maxAckPending, pullBatch)))
		switch {
		case err == nil:
			return iter, nil
		case errors.Is(err, jetstream.ErrInvalidOption), c.o.JetStream.Conn().IsClosed():
			return nil, event.Fail(event.Unexpected, "", "pull messages: %w", err)
		}
		c.log.Warn("pull messages", "err", err, "try", n)
		t := time.NewTimer(c.o.pause(n))
		select {
		case <-t.C:
		case <-lost:
			return nil, nil
		case <-ctx.Done():
			return nil, nil
		}
	}
}

// read passes messages on until the iterator is drained.
func (s *session) read() {
	defer close(s.arrivals)
	for {
		raw, err := s.iter.Next()
		switch {
		case err == nil:
			s.receive(raw)
		case errors.Is(err, jetstream.ErrMsgIteratorClosed):
			if s.o.JetStream.Conn().IsClosed() {
				s.broken <- event.Fail(event.Unexpected, "", "the connection to NATS was closed: %w", err)
			}
			return
		case errors.Is(err, jetstream.ErrConsumerDeleted), errors.Is(err, jetstream.ErrBadRequest):
			s.broken <- gone(err)
			return
		default:
			// Of a consumer that was deleted while the broker was away nothing is heard.
			if _, err := s.info(s.work); err != nil && event.ClassOf(err) != event.Transient {
				s.iter.Stop()
				s.broken <- err
				return
			}
			s.log.Debug("pull messages", "err", err)
			pause(s.work, 50*time.Millisecond)
		}
	}
}

func (s *session) receive(raw jetstream.Msg) {
	meta, err := raw.Metadata()
	if err != nil {
		s.log.Error("message without metadata is left to the server", "subject", raw.Subject(), "err", err)
		return
	}
	s.arrivals <- &item{
		seq: meta.Sequence.Stream, delivery: meta.Sequence.Consumer, delivered: meta.NumDelivered,
		msg: newMessage(raw, meta), raw: raw,
	}
}

// askEvery is how often the server is asked while messages may be elsewhere.
const askEvery = 100 * time.Millisecond

// loop decides what is done. It returns when nothing runs any more.
func (s *session) loop(ctx context.Context, lost <-chan struct{}) (why error) {
	extend := time.NewTicker(max(s.ackWait/3, 10*time.Millisecond))
	defer extend.Stop()
	ask := time.NewTicker(askEvery)
	defer ask.Stop()
	wake := time.NewTimer(time.Hour)
	defer wake.Stop()
	late := time.NewTimer(time.Hour)
	defer late.Stop()
	arrivals, done, stopping := s.arrivals, ctx.Done(), false
	stop := func() {
		if !stopping {
			stopping, lost, done = true, nil, nil
			s.iter.Drain()
			late.Reset(s.o.DrainTimeout)
		}
	}
	s.ask()
	for {
		for !stopping && s.q.running < s.o.Workers && s.begin() {
		}
		if arrivals == nil && s.q.running == 0 {
			return why
		}
		select {
		case it, ok := <-arrivals:
			if ok {
				s.arrive(it)
				continue
			}
			arrivals = nil
			select {
			case why = <-s.broken: // the reason for which read ended
			default:
			}
			stop()
		case o := <-s.outcomes:
			s.end(o)
			if o.err != nil {
				s.rouse(wake)
			}
		case <-wake.C:
			s.rouse(wake)
		case <-extend.C:
			for _, it := range s.q.items {
				s.say(it, "extend the deadline", it.raw.InProgress)
			}
		case <-ask.C:
			if !stopping {
				s.ask()
			}
		case a := <-s.answers:
			if a.err != nil && event.ClassOf(a.err) != event.Transient && why == nil {
				why = a.err
				stop()
			}
			s.hear(a)
		case <-lost:
			stop()
		case <-done:
			stop()
		case <-late.C:
			if stopping {
				s.log.Warn("handlers did not end in time", "running", s.q.running)
				s.cancel()
			}
		}
	}
}

func (s *session) arrive(it *item) {
	if it.msg.Parked() && s.o.Parked == nil {
		s.q.count(it.delivery)
		s.say(it, "ack", it.raw.Ack)
		return
	}
	it = s.q.add(it, s.lane(it))
	it.suspect = s.o.MaxDeliver > 0 && it.delivered > uint64(s.o.MaxDeliver)
}

func (s *session) lane(it *item) string {
	if s.o.Unordered {
		return it.msg.ID
	}
	return it.msg.aggregate()
}

// begin gives a worker something to do, if there is anything.
func (s *session) begin() bool {
	it := s.q.next()
	if it == nil {
		return false
	}
	j := job{it: it, msg: *it.msg, suspect: it.suspect, failures: it.failures, doomed: it.doomed}
	j.msg.Try = it.failures + 1
	s.jobs <- j
	return true
}

const collisionPause = 20 * time.Millisecond

// end takes in what became of an item. An ack that is lost does no harm: the
// event is delivered again and found to be handled.
func (s *session) end(o outcome) {
	it := o.it
	if o.err == nil {
		if o.doomed != "" {
			s.log.Error("event became a dead letter", "event", it.msg.ID, "seq", it.seq, "subject", s.o.DeadLetter, "reason", o.doomed)
			s.say(it, "terminate", it.raw.Term)
		} else {
			s.say(it, "ack", it.raw.Ack)
		}
		s.q.settle(it)
		return
	}
	it.delays++
	it.doomed = o.doomed
	if o.fault != ofNobody {
		it.failures++
	}
	wait := s.o.pause(it.delays)
	if collided(o.err) {
		wait = min(wait, collisionPause+rand.N(collisionPause))
	}
	s.log.Warn("event is tried again", "event", it.msg.ID, "seq", it.seq, "failures", it.failures, "in", wait, "err", o.err)
	s.q.postpone(it, time.Now().Add(wait))
}

func (s *session) rouse(wake *time.Timer) {
	now := time.Now()
	if next := s.q.wake(now); !next.IsZero() {
		wake.Reset(next.Sub(now))
	}
}

// ask finds out, on the side, whether messages are elsewhere.
func (s *session) ask() {
	if !s.q.unsure || s.asked {
		return
	}
	s.asked = true
	s.all.Go(func() {
		info, err := s.info(s.work)
		if err != nil {
			s.answers <- answer{err: err}
			return
		}
		s.answers <- answer{pending: info.NumAckPending, delivered: info.Delivered.Consumer}
	})
}

func (s *session) hear(a answer) {
	s.asked = false
	if a.err != nil {
		s.log.Debug("look at the consumer", "err", a.err)
		return
	}
	switch elsewhere := s.q.assure(a.pending, a.delivered); {
	case s.q.unsure && !s.told:
		s.log.Info("waiting for events that were delivered to another process or lost on their way", "events", elsewhere, "ack_wait", s.ackWait)
		s.told = true
	case !s.q.unsure && s.told:
		s.log.Info("all events are here")
		s.told = false
	}
}

// giveBack lets the server deliver at once what was not handled, in order.
func (s *session) giveBack() {
	for _, seq := range slices.Sorted(maps.Keys(s.q.items)) {
		it := s.q.items[seq]
		s.say(it, "give back", it.raw.Nak)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := s.o.JetStream.Conn().FlushWithContext(ctx); err != nil {
		s.log.Debug("flush", "err", err)
	}
}

// say sends one of the answers to a delivery. None is waited for.
func (s *session) say(it *item, what string, answer func() error) {
	if err := answer(); err != nil && !errors.Is(err, jetstream.ErrMsgAlreadyAckd) {
		s.log.Debug(what, "event", it.msg.ID, "seq", it.seq, "err", err)
	}
}
