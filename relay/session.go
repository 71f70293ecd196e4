package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/walrelay/walrelay/event"
)

var (
	// errShutdown ends a session when Postgres shuts down, which must not wait for the relay.
	errShutdown     = errors.New("postgres is shutting down")
	errStopping     = errors.New("stopping")
	errDrainTimeout = errors.New("drain timed out")
	errRedelivery   = errors.New("a dead letter's event is not settled in time")
)

// session is one try: both connections, until one of them fails or the relay is told to stop.
type session struct {
	o      *Options
	log    *slog.Logger
	source Source
	sink   Sink

	ctx    context.Context // ends with the session's failure, not with the relay's context
	cancel context.CancelCauseFunc
	waits  context.Context // ends when the relay is told to stop, too
	wait   sync.WaitGroup
	done   chan struct{} // closed when the loop has ended
	kept   chan struct{} // closed when the ticker has ended after that
	looked chan struct{} // closed when vouch has ended after that

	quiet silence // of the ticker
	news  []any   // attributes of a line not yet logged; of resume, then of the ticker
	again bool    // the session before ended as the one before it

	// Of the loop.
	ev           event.Event
	resumer      resumer
	events       uint64           // appended
	at           event.Checkpoint // the last of them
	last         event.Position   // of the last record read
	alone        bool             // publish the next event alone
	parked       int              // in a row, those of earlier sessions included
	acceptGap    bool             // an operator accepts another server, until it is known to be the same
	diverged     bool             // the last session found another server
	good         uint64           // the first event after the last parked one; 0 when there is none
	redelivering bool             // the event of a dead letter, which is not among events yet

	ledger ledger

	// Of the loop, for the ticker.
	activity atomic.Uint32 // an Activity
	received atomic.Uint64 // as in Tick

	vouched atomic.Uint64 // of vouch: the log is complete up to there

	// Of the ticker while it runs.
	hold      hold
	settled   boundary  // taken from the ledger
	recorded  event.LSN // the newest that a checkpoint covers
	recordAt  time.Time // when the last checkpoint was written
	confirmed event.LSN // last given to source.Confirm
}

// rememberLimit bounds how long a lost Postgres keeps a session.
const rememberLimit = time.Second

// side says where an error comes from.
type side string

const (
	sourceSide side = "postgres"
	sinkSide   side = "nats"
)

// sideError is an error of one of the two connections.
type sideError struct {
	side side
	err  error
}

func (e *sideError) Error() string { return e.err.Error() }
func (e *sideError) Unwrap() error { return e.err }

func onSide(s side, err error) error {
	if err == nil {
		return nil
	}
	return &sideError{s, err}
}

// runSession opens a session and works until it fails or ctx ends. It reports
// whether the session got anywhere: settled an event, or lasted. nil means that
// ctx ended and nothing is in flight.
func (r *Relay) runSession(ctx context.Context) (progress bool, err error) {
	s := &session{o: &r.o, log: r.o.Log, parked: r.parked, hold: r.hold, again: r.report.last.repeats > 0, done: make(chan struct{}), kept: make(chan struct{}), looked: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	defer func() {
		s.cancel(nil)
		s.wait.Wait()
		if s.source != nil {
			s.source.Close()
		}
		if s.sink != nil {
			s.sink.Close()
		}
	}()
	waits, hurry := context.WithCancelCause(s.ctx)
	defer hurry(nil)
	s.waits = waits
	stop := context.AfterFunc(ctx, func() { hurry(errStopping) })
	defer stop()
	s.acceptGap, s.diverged = r.acceptGap, r.diverged
	defer func() {
		r.acceptGap, r.diverged = s.acceptGap, s.diverged || errors.Is(err, errDiverged)
	}()
	if err := s.open(r.failing); err != nil {
		if ctx.Err() != nil {
			return false, nil
		}
		return false, s.ended(err)
	}
	began := time.Now()
	s.o.Observer.Entered(Status{State: Streaming})
	go s.keep()
	if s.o.Vouch != nil {
		go s.vouch()
	} else {
		close(s.looked)
	}
	err = s.work(ctx)
	s.cancel(err)
	if err != nil && ctx.Err() == nil {
		s.o.Observer.Entered(lost(err))
	}
	s.remember(ctx, err)
	s.stopTicker()
	r.parked, r.hold = s.streak(), s.hold
	if err != nil && ctx.Err() != nil && event.ClassOf(err) == event.Transient {
		err = s.left(err)
	}
	return s.sink.Settled() > 0 || time.Since(began) > s.o.BackoffMax, err
}

// open opens both sides and finds out where to go on. The side that failed last
// is tried first, so that the other one is left in peace while it is down.
func (s *session) open(failing side) error {
	openers := []func(context.Context) error{s.openSource, s.openSink}
	if failing == sinkSide {
		openers[0], openers[1] = openers[1], openers[0]
	}
	for _, open := range append(openers, s.resume) {
		if err := open(s.waits); err != nil {
			return err
		}
		if err := context.Cause(s.waits); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) openSource(ctx context.Context) error {
	src, err := s.o.OpenSource(ctx)
	if err != nil {
		return onSide(sourceSide, err)
	}
	s.source = src
	// A blocked read ends with the session. A Postgres that shuts down waits
	// for its walsenders, so that connection is closed there and then.
	context.AfterFunc(s.ctx, func() {
		if errors.Is(context.Cause(s.ctx), errShutdown) {
			src.Close()
		}
		src.Interrupt()
	})
	s.wait.Go(func() {
		if s.o.Watcher.AwaitShutdown(s.ctx) == nil {
			s.cancel(onSide(sourceSide, errShutdown))
		}
	})
	return nil
}

func (s *session) openSink(ctx context.Context) error {
	sink, err := s.o.OpenSink(ctx, func(err error) { s.cancel(onSide(sinkSide, err)) })
	s.sink = sink
	if err != nil {
		s.sink = nil
		return onSide(sinkSide, err)
	}
	return nil
}

func (s *session) resume(ctx context.Context) error {
	origin := s.source.Origin()
	confirmed, err := s.o.Watcher.Confirmed(ctx)
	if err != nil {
		return onSide(sourceSide, fmt.Errorf("read the slot's position: %w", err))
	}
	origin.ConfirmedFlush, origin.Diverged = confirmed, s.diverged
	r, err := s.sink.Resume(ctx, origin)
	if err != nil {
		if event.ClassOf(err) != event.Transient {
			err = &verdict{err}
		}
		return onSide(sinkSide, err)
	}
	s.acceptGap, s.diverged = s.acceptGap || r.AcceptGap, false
	r.AcceptGap = s.acceptGap
	s.resumer = newResumer(r, origin)
	s.alone = r.Suspect
	s.at.Position = r.After
	s.confirmed, s.recorded = confirmed, confirmed
	s.hold.resume(origin, r.After)
	s.news = []any{
		"slot", origin.Slot, "timeline", origin.Timeline, "confirmed", confirmed.String(),
		"wal_end", origin.WALEnd.String(), "after", r.After.String(), "gone", r.Gone,
	}
	if !s.again {
		s.announce()
	}
	return nil
}

// announce says once that the session works. After sessions that ended as soon
// as they began, the ticker does when this one has lasted.
func (s *session) announce() {
	if s.news != nil {
		s.log.Info("streaming", s.news...)
		s.news = nil
	}
}

// work is the loop. It returns nil when ctx ended and everything in flight is settled.
func (s *session) work(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.source.Interrupt)
	defer stop()
	// stopping reports that the relay was told to stop and can still drain.
	stopping := func() bool { return ctx.Err() != nil && !s.sinkFailed() }
	var rec *event.Record
	for {
		rest := !s.source.Buffered()
		if rest {
			if err := s.sink.Flush(); err != nil {
				return s.ended(onSide(sinkSide, err))
			}
			s.rest(rec)
		}
		var err error
		rec, err = s.source.Next()
		if rest {
			s.activity.Store(uint32(Working))
		}
		if err != nil {
			if stopping() {
				return s.drain(ctx)
			}
			return s.ended(onSide(sourceSide, err))
		}
		if err := s.handle(rec); err != nil {
			if event.ClassOf(err) == event.Transient && stopping() {
				return s.drain(ctx)
			}
			return s.ended(err)
		}
	}
}

// rest tells the ticker how far the loop has come, before it waits for the
// network. last is the last record, or nil.
func (s *session) rest(last *event.Record) {
	if last != nil {
		if at := uint64(max(last.Confirm, last.Position.Change)); at > s.received.Load() {
			s.received.Store(at)
		}
	}
	s.activity.Store(uint32(Reading))
}

// settling runs one of the sink's waits for acks.
func (s *session) settling(err func() error) error {
	s.activity.Store(uint32(Settling))
	defer s.activity.Store(uint32(Working))
	return onSide(sinkSide, err())
}

// lost is the state of the relay once a session has ended with err.
func lost(err error) Status {
	st := Status{State: Waiting, Err: err}
	var at *sideError
	if errors.As(err, &at) {
		st.Side = string(at.side)
	}
	return st
}

// sinkFailed reports whether the session has ended on the sink's side.
func (s *session) sinkFailed() bool {
	var at *sideError
	return errors.As(context.Cause(s.ctx), &at) && at.side == sinkSide
}

// ended prefers what ended the session over the error that followed from it.
func (s *session) ended(err error) error {
	if cause := context.Cause(s.ctx); cause != nil {
		return cause
	}
	return err
}

func (s *session) handle(rec *event.Record) error {
	if err := s.resumer.check(rec); err != nil {
		return err
	}
	if s.resumer.Gone > 0 && s.resumer.later(rec) {
		if err := s.resumed(); err != nil {
			return err
		}
	}
	switch rec.Kind {
	case event.Row, event.Message:
		if rec.Position.Compare(s.last) <= 0 {
			return event.Fail(event.Unexpected, "please report this with the versions of Postgres and walrelay",
				"record at %s follows one at %s", rec.Position, s.last)
		}
		s.last = rec.Position
		stored, err := s.stored(rec)
		if err != nil {
			return err
		}
		if !stored {
			if err := s.publish(rec); err != nil {
				return err
			}
		}
	}
	if rec.Confirm != 0 && s.resumer.sound() {
		s.acceptGap = false
		c := s.at
		c.Events, c.Confirm = s.events, rec.Confirm
		s.ledger.add(c, s.sink.Settled())
	}
	return nil
}

// stored reports whether the record's event is in the stream already.
func (s *session) stored(rec *event.Record) (bool, error) {
	if s.resumer.stored(rec.Position) {
		ask := s.resumer.ask(rec.Position)
		last := rec.Kind == event.Message && rec.Position == s.resumer.After
		why := s.resumer.Missing[rec.Position]
		if !ask && !last && why == nil {
			return true, nil
		}
		id, err := s.id(rec)
		if err == nil && why != nil {
			err = onSide(sinkSide, s.sink.Repark(s.waits, &s.ev, why))
		}
		if err == nil && last {
			err = s.release()
		}
		if err != nil || !ask {
			return true, err
		}
		return true, s.resumer.recognise(id)
	}
	stored, ok := s.resumer.Stored[rec.Position]
	if !ok {
		return false, nil
	}
	id, err := s.id(rec)
	same := string(id) == stored
	if err == nil && same && rec.Kind == event.Message {
		err = s.release()
	}
	return same, err
}

// id is that of the record's event; nil when it has none or is of no outbox.
func (s *session) id(rec *event.Record) ([]byte, error) {
	ok, err := s.o.Mapper.Map(rec, &s.ev)
	var poison *event.Poison
	switch {
	case err != nil && !errors.As(err, &poison):
		return nil, err
	case err == nil && !ok:
		s.ev.Replay = nil
		return nil, nil
	case poison != nil && poison.Reason == event.ReasonContent && s.ev.ID == nil:
		// The mapping has changed so that the row's id is not found. Its place has to do.
		if id, ok := s.resumer.Stored[rec.Position]; ok {
			return []byte(id), nil
		}
		return []byte(s.resumer.AfterID), nil
	}
	return s.ev.ID, nil
}

// release finishes what the last session may have begun: of the last event that is
// stored, the dead letter may be left. Of those before, it was removed before
// the next event was appended.
func (s *session) release() error {
	if !s.ev.Redelivered() {
		return nil
	}
	return onSide(sinkSide, s.sink.Release(s.waits, &s.ev))
}

func (s *session) publish(rec *event.Record) error {
	ok, err := s.o.Mapper.Map(rec, &s.ev)
	poison, bad := errors.AsType[*event.Poison](err)
	switch {
	case bad:
	case err != nil:
		return err
	case !ok:
		return nil
	}
	if s.resumer.Gone > 0 {
		return s.recall(rec)
	}
	if s.ev.Redelivered() {
		if err := s.redeliver(poison); err != nil {
			return err
		}
		s.placed(rec)
		return s.onward()
	}
	if poison == nil {
		err := s.sink.Append(&s.ev)
		if poison, bad = errors.AsType[*event.Poison](err); err != nil && !bad {
			return onSide(sinkSide, err)
		}
	}
	switch {
	case poison == nil:
		if s.good == 0 {
			s.good = s.events + 1
		}
	case s.refusable(poison):
		if err := s.refuse(poison); err != nil {
			return err
		}
	default:
		if err := s.poisoned(poison); err != nil {
			return err
		}
	}
	s.placed(rec)
	return s.onward()
}

// recall drops the record's event, which is stored though its message is gone.
func (s *session) recall(rec *event.Record) error {
	left, err := s.sink.Recall(s.waits, &s.ev)
	if err != nil {
		return onSide(sinkSide, err)
	}
	s.at.Position, s.at.XID, s.at.CommitTime = rec.Position, rec.XID, rec.CommitTime
	if left > 0 {
		return nil
	}
	if err := s.release(); err != nil {
		return err
	}
	return s.resumed()
}

// resumed: every event that is stored is known, and the next one is to be published.
func (s *session) resumed() error {
	if err := s.sink.Resumed(s.waits, s.at); err != nil {
		return onSide(sinkSide, err)
	}
	s.resumer.Gone = 0
	return nil
}

// onward makes room for the next event.
func (s *session) onward() error {
	if s.alone {
		s.alone = false
		return s.settling(func() error { return s.sink.WaitSettled(s.waits, s.events) })
	}
	if s.sink.Full() {
		return s.settling(func() error { return s.sink.WaitRoom(s.waits) })
	}
	return nil
}

// placed counts the record's event as the last one.
func (s *session) placed(rec *event.Record) {
	s.events++
	s.at.Position, s.at.XID, s.at.CommitTime = rec.Position, rec.XID, rec.CommitTime
}

// streak is the number of events parked in a row. It goes across sessions, and
// only a settled event ends a row, because a refusal by the server arrives later
// than other events are appended, and ends the session.
func (s *session) streak() int {
	if s.good != 0 && s.sink.Settled() >= s.good {
		s.parked, s.good = 0, 0
	}
	return s.parked
}

// poisoned waits until the event is alone at the head of the chain, then parks
// it or halts.
func (s *session) poisoned(why *event.Poison) error {
	ev := &s.ev
	if err := s.settling(func() error { return s.sink.WaitSettled(s.waits, s.events) }); err != nil {
		return err
	}
	if s.o.Halt {
		return event.Fail(event.Halted,
			"mend the row or the limit and start again, or start with --on-poison park to set such events aside",
			"event %.100q of %s at %s cannot be stored: %w", ev.ID, ev.Table, ev.Position, why)
	}
	// An event that waits for another one says nothing about the configuration, nor
	// does one that an operator has published again.
	held := why.Reason == event.ReasonAggregate || ev.Replay != nil
	if n := s.streak(); n >= s.o.MaxParkedInRow && !held {
		return event.Fail(event.Precondition,
			"so many in a row are rather a fault of the configuration: mend it, or raise --max-parked-in-row",
			"%d events in a row cannot be stored, the last one %.100q of %s at %s: %w", n+1, ev.ID, ev.Table, ev.Position, why)
	}
	if err := s.sink.Park(s.waits, ev, why); err != nil {
		return onSide(sinkSide, err)
	}
	if !held {
		s.parked, s.good = s.parked+1, 0
	}
	s.o.Observer.Parked(why.Reason)
	level := slog.LevelWarn
	if why.Reason == event.ReasonAggregate {
		level = slog.LevelInfo
	}
	s.log.Log(s.ctx, level, "parked an event", "id", fmt.Sprintf("%.100s", ev.ID), "table", ev.Table, "position", ev.Position.String(),
		"reason", string(why.Reason), "detail", why.Detail)
	return nil
}

// refusable reports whether the event has to be published again and is no more
// than passed over when it cannot be: it is stored already, or the relay would
// halt for what an operator tried.
func (s *session) refusable(why *event.Poison) bool {
	r := s.ev.Replay
	return r != nil && (s.o.Halt || r.KeepID && why.Reason == event.ReasonDuplicateID)
}

func (s *session) refuse(why *event.Poison) error {
	if err := s.settling(func() error { return s.sink.WaitSettled(s.waits, s.events) }); err != nil {
		return err
	}
	if err := s.sink.Refuse(s.waits, &s.ev, why); err != nil {
		return s.unmarked(err)
	}
	s.refused(why)
	return nil
}

// redeliver settles a dead letter, alone. A relay that is told to stop finishes
// that before it drains, since the event is not counted until then.
func (s *session) redeliver(why *event.Poison) error {
	if err := s.settling(func() error { return s.sink.WaitSettled(s.waits, s.events) }); err != nil {
		return err
	}
	limit, cancel := context.WithTimeoutCause(s.ctx, s.o.DrainTimeout, errRedelivery)
	defer cancel()
	s.redelivering = true
	var refused *event.Poison
	err := s.settling(func() (err error) {
		refused, err = s.sink.Redeliver(limit, &s.ev, why)
		return err
	})
	if err != nil {
		return s.unmarked(err)
	}
	s.redelivering, s.alone = false, false
	if refused != nil {
		s.refused(refused)
		return nil
	}
	s.log.Info("stored a dead letter's event", "id", fmt.Sprintf("%.100s", s.ev.ID), "table", s.ev.Table,
		"position", s.ev.Position.String(), "run", s.ev.Replay.Run, "dead_letter", s.ev.Replay.Letter)
	return nil
}

// unmarked is a failure to refuse an event. A marker that the stream does not
// take stops the relay, which cannot go on without.
func (s *session) unmarked(err error) error {
	if poison, bad := errors.AsType[*event.Poison](err); bad {
		return event.Fail(event.Precondition, "give the stream the subject walrelay.parked.STREAM, too: markers go there",
			"event %.100q at %s is published again, cannot be stored, and its marker neither: %w", s.ev.ID, s.ev.Position, poison)
	}
	return onSide(sinkSide, err)
}

func (s *session) refused(why *event.Poison) {
	s.o.Observer.Refused(why.Reason)
	s.log.Warn("refused an event that was to be published again", "id", fmt.Sprintf("%.100s", s.ev.ID), "table", s.ev.Table,
		"position", s.ev.Position.String(), "run", s.ev.Replay.Run, "reason", string(why.Reason), "detail", why.Detail)
}

// keep is the ticker: it runs while the loop is blocked, too. After the
// session's failure the sink still gets its ticks until the loop has ended,
// because an overdue ack is what frees a loop that is stuck in a write.
func (s *session) keep() {
	defer close(s.kept)
	t := time.NewTicker(s.o.StatusInterval)
	defer t.Stop()
	began := time.Now()
	for {
		select {
		case <-t.C:
			if time.Since(began) >= brief {
				s.announce()
			}
		case <-s.done:
			return
		}
		s.sink.Tick()
		s.o.Observer.Ticked(Tick{
			Activity: Activity(s.activity.Load()),
			Received: event.LSN(s.received.Load()),
			Recorded: s.recorded,
			Settled:  s.sink.Settled(),
		})
		if s.ctx.Err() != nil {
			continue
		}
		if err := s.settle(s.ctx, false); err != nil {
			s.cancel(err)
		}
		if s.o.Sent == nil {
			continue
		}
		if err := s.listen(time.Now()); err != nil {
			s.cancel(err)
		}
	}
}

// stopTicker returns when the ticker and vouch have ended. Only the loop's goroutine calls it.
func (s *session) stopTicker() {
	select {
	case <-s.done:
	default:
		close(s.done)
	}
	<-s.kept
	<-s.looked
}

// settle records the settled front of the ledger beside the stream, then
// confirms to Postgres what was recorded at least ConfirmDelay ago. Without
// progress it repeats the status, which keeps the session alive. The last
// settle of a session records what there is, however lately it did before.
func (s *session) settle(ctx context.Context, last bool) error {
	if last || time.Since(s.recordAt) >= recordInterval(s.o.ConfirmDelay, s.o.StatusInterval) {
		if c, ok := s.ledger.take(s.sink.Settled()); ok {
			s.settled.add(c)
		}
		if c := s.settled.good(s.vouchedFor()); c.Confirm > s.recorded {
			if err := s.sink.Checkpoint(ctx, c); err != nil {
				return onSide(sinkSide, err)
			}
			s.recorded, s.recordAt = c.Confirm, time.Now()
			s.hold.add(c, s.recordAt)
		}
	}
	s.confirmed = max(s.confirmed, s.hold.due(time.Now()))
	return onSide(sourceSide, s.source.Confirm(s.confirmed))
}

// drain settles what is in flight, after reading has stopped. A Postgres that
// goes away meanwhile does not disturb it.
func (s *session) drain(ctx context.Context) error {
	s.o.Observer.Entered(Status{State: Draining})
	limit, cancel := s.drainLimit(ctx)
	defer cancel()
	err := s.settling(func() error { return s.sink.WaitSettled(limit, s.events) })
	if err == nil {
		if err = s.lastSettle(ctx); err == nil && s.inFlight() > 0 {
			err = errRedelivery
		}
		if err == nil && s.resumer.sound() {
			err = onSide(sinkSide, s.sink.Checkpoint(limit, s.final()))
		}
	} else if s.sinkFailed() {
		err = context.Cause(s.ctx)
	}
	if err != nil {
		return s.left(err)
	}
	s.log.Info("drained", "events", s.events, "confirmed", s.confirmed.String())
	return nil
}

// remember records how far the stream is when Postgres goes away. It may come
// back as a promoted or upgraded server, for which nothing after a checkpoint
// could be counted off. Without success the next session finds out by itself.
func (s *session) remember(ctx context.Context, err error) {
	var at *sideError
	if !errors.As(err, &at) || at.side != sourceSide || ctx.Err() != nil || s.events == 0 ||
		!s.resumer.sound() {
		return
	}
	limit, cancel := context.WithTimeout(ctx, rememberLimit)
	defer cancel()
	if err := s.sink.WaitSettled(limit, s.events); err != nil {
		s.log.Debug("the last events are not acked in time", "err", err)
		return
	}
	s.stopTicker()
	if err := s.sink.Checkpoint(limit, s.final()); err != nil {
		s.log.Debug("the last events are in no checkpoint", "err", err)
	}
}

// final is the checkpoint of a session that has nothing in flight and sends nothing more.
func (s *session) final() event.Checkpoint {
	c := s.at
	c.Events, c.Confirm, c.Drained = s.events, s.recorded, true
	return c
}

// lastSettle takes over from the ticker, which may be at work: what it has
// taken from the ledger it has to finish.
func (s *session) lastSettle(ctx context.Context) error {
	limit, cancel := s.drainLimit(ctx)
	defer cancel()
	stop := context.AfterFunc(limit, func() { s.cancel(onSide(sinkSide, context.Cause(limit))) })
	defer stop()
	s.stopTicker()
	if s.sinkFailed() {
		return context.Cause(s.ctx)
	}
	if s.o.Vouch != nil {
		// The second look vouches for what the first one saw the end of.
		for range 2 {
			if err := s.look(limit); err != nil {
				if event.ClassOf(err) != event.Transient {
					return onSide(sourceSide, err)
				}
				s.log.Debug("cannot see whether the tables are published", "err", err)
				break
			}
		}
	}
	return s.settle(limit, true)
}

// drainLimit makes a context that ends with the drain timeout, or when the sink fails.
func (s *session) drainLimit(ctx context.Context) (context.Context, context.CancelFunc) {
	limit, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), s.o.DrainTimeout, errDrainTimeout)
	stop := context.AfterFunc(s.ctx, func() {
		if s.sinkFailed() {
			cancel()
		}
	})
	return limit, func() {
		stop()
		cancel()
	}
}

// left says how the relay stops when err stands in the way of a clean end.
func (s *session) left(err error) error {
	if event.ClassOf(err) != event.Transient {
		return err
	}
	if n := s.inFlight(); n > 0 {
		return event.Fail(event.Undrained, "they are published by the next start; --drain-timeout gives more time",
			"stopped with %d events in flight: %w", n, err)
	}
	// Everything is stored. The next start reads some of it again and drops it.
	s.log.Warn("stopped without confirming the last events", "err", err, "confirmed", s.confirmed.String())
	return nil
}

// inFlight is the number of events that are not settled.
func (s *session) inFlight() uint64 {
	n := s.events
	if s.redelivering {
		n++
	}
	return n - min(n, s.sink.Settled())
}
