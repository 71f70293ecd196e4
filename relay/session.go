package relay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/walrelay/walrelay/event"
)

var (
	// errShutdown ends a session when Postgres shuts down, which must not wait for the relay.
	errShutdown     = errors.New("postgres is shutting down")
	errStopping     = errors.New("stopping")
	errDrainTimeout = errors.New("drain timed out")
)

// session is one try: both connections, until one of them fails or the relay is told to stop.
type session struct {
	o      *Options
	log    *slog.Logger
	source Source
	sink   Sink

	ctx    context.Context // ends with the session's failure, not with the relay's context
	cancel context.CancelCauseFunc
	wait   sync.WaitGroup
	done   chan struct{} // closed when the loop has ended
	kept   chan struct{} // closed when the ticker has ended after that

	// Of the loop.
	waits   context.Context // of its waits: ends when the relay is told to stop, too
	ev      event.Event
	resumer resumer
	events  uint64           // counted off or appended
	at      event.Checkpoint // the last of them
	last    event.Position   // of the last record read
	alone   bool             // publish the next event alone
	parked  int              // in a row, those of earlier sessions included
	good    uint64           // the first event after the last parked one; 0 when there is none

	ledger    ledger
	confirmed event.LSN // last given to source.Confirm; of the ticker while it runs
}

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
	s := &session{o: &r.o, log: r.o.Log, parked: r.parked, done: make(chan struct{}), kept: make(chan struct{})}
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
	if err := s.open(ctx, r.failing); err != nil {
		if ctx.Err() != nil {
			return false, nil
		}
		return false, err
	}
	began := time.Now()
	go s.keep()
	err = s.work(ctx)
	s.cancel(err)
	s.stopTicker()
	r.parked = s.streak()
	if err != nil && ctx.Err() != nil && event.ClassOf(err) == event.Transient {
		err = s.left(err)
	}
	return s.sink.Settled() > s.resumer.Skip || time.Since(began) > s.o.BackoffMax, err
}

// open opens both sides and finds out where to go on. The side that failed last
// is tried first, so that the other one is left in peace while it is down.
func (s *session) open(ctx context.Context, failing side) error {
	openers := []func(context.Context) error{s.openSource, s.openSink}
	if failing == sinkSide {
		openers[0], openers[1] = openers[1], openers[0]
	}
	for _, open := range append(openers, s.resume) {
		if err := open(ctx); err != nil {
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
	origin.ConfirmedFlush = confirmed
	r, err := s.sink.Resume(ctx, origin)
	if err != nil {
		return onSide(sinkSide, err)
	}
	s.resumer = newResumer(r, origin)
	s.alone = r.Suspect
	s.at.Position = r.After
	s.confirmed = confirmed
	s.log.Info("streaming", "slot", origin.Slot, "timeline", origin.Timeline,
		"confirmed", confirmed.String(), "wal_end", origin.WALEnd.String(), "after", r.After.String(), "skip", r.Skip)
	return nil
}

// work is the loop. It returns nil when ctx ended and everything in flight is settled.
func (s *session) work(ctx context.Context) error {
	waits, cancel := context.WithCancelCause(s.ctx)
	defer cancel(nil)
	s.waits = waits
	stop := context.AfterFunc(ctx, func() {
		s.source.Interrupt()
		cancel(errStopping)
	})
	defer stop()
	// stopping reports that the relay was told to stop and can still drain.
	stopping := func() bool { return ctx.Err() != nil && !s.sinkFailed() }
	for {
		if !s.source.Buffered() {
			if err := s.sink.Flush(); err != nil {
				return s.ended(onSide(sinkSide, err))
			}
		}
		rec, err := s.source.Next()
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
	switch rec.Kind {
	case event.Row, event.Message:
		if rec.Position.Compare(s.last) <= 0 {
			return event.Fail(event.Unexpected, "please report this with the versions of Postgres and walrelay",
				"record at %s follows one at %s", rec.Position, s.last)
		}
		s.last = rec.Position
		if !s.resumer.stored(rec.Position) {
			if err := s.publish(rec); err != nil {
				return err
			}
		}
	}
	if rec.Confirm != 0 && s.resumer.proven {
		c := s.at
		c.Events, c.Confirm = s.events, rec.Confirm
		s.ledger.add(c, s.sink.Settled())
	}
	return nil
}

func (s *session) publish(rec *event.Record) error {
	ok, err := s.o.Mapper.Map(rec, &s.ev)
	var poison *event.Poison
	switch {
	case errors.As(err, &poison):
	case err != nil:
		return err
	case !ok:
		return nil
	}
	if s.resumer.count() {
		s.placed(rec)
		return nil
	}
	if poison == nil {
		err := s.sink.Append(&s.ev)
		if err != nil && !errors.As(err, &poison) {
			return onSide(sinkSide, err)
		}
	}
	if poison != nil {
		if err := s.poisoned(poison); err != nil {
			return err
		}
	} else if s.good == 0 {
		s.good = s.events + 1
	}
	s.placed(rec)
	if s.alone {
		s.alone = false
		return onSide(sinkSide, s.sink.WaitSettled(s.waits, s.events))
	}
	if s.sink.Full() {
		return onSide(sinkSide, s.sink.WaitRoom(s.waits))
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
	if err := s.sink.WaitSettled(s.waits, s.events); err != nil {
		return onSide(sinkSide, err)
	}
	if s.o.Halt {
		return event.Fail(event.Halted,
			"mend the row or the limit and start again, or start with --on-poison park to set such events aside",
			"event %.100q of %s at %s cannot be stored: %w", ev.ID, ev.Table, ev.Position, why)
	}
	if n := s.streak(); n >= s.o.MaxParkedInRow {
		return event.Fail(event.Precondition,
			"so many in a row are rather a fault of the configuration: mend it, or raise --max-parked-in-row",
			"%d events in a row cannot be stored, the last one %.100q of %s at %s: %w", n+1, ev.ID, ev.Table, ev.Position, why)
	}
	if err := s.sink.Park(s.waits, ev, why); err != nil {
		return onSide(sinkSide, err)
	}
	s.parked, s.good = s.parked+1, 0
	s.log.Warn("parked an event", "id", fmt.Sprintf("%.100s", ev.ID), "table", ev.Table, "position", ev.Position.String(),
		"reason", string(why.Reason), "detail", why.Detail)
	return nil
}

// keep is the ticker: it runs while the loop is blocked, too. After the
// session's failure the sink still gets its ticks until the loop has ended,
// because an overdue ack is what frees a loop that is stuck in a write.
func (s *session) keep() {
	defer close(s.kept)
	t := time.NewTicker(s.o.StatusInterval)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-s.done:
			return
		}
		s.sink.Tick()
		if s.ctx.Err() != nil {
			continue
		}
		if err := s.settle(s.ctx); err != nil {
			s.cancel(err)
		}
	}
}

// stopTicker returns when the ticker has ended. Only the loop's goroutine calls it.
func (s *session) stopTicker() {
	select {
	case <-s.done:
	default:
		close(s.done)
	}
	<-s.kept
}

// settle records the settled front of the ledger beside the stream, then
// confirms it to Postgres. Without progress it repeats the status, which keeps
// the session alive.
func (s *session) settle(ctx context.Context) error {
	if c, ok := s.ledger.take(s.sink.Settled()); ok && c.Confirm > s.confirmed {
		if err := s.sink.Checkpoint(ctx, c); err != nil {
			return onSide(sinkSide, err)
		}
		s.confirmed = c.Confirm
	}
	return onSide(sourceSide, s.source.Confirm(s.confirmed))
}

// drain settles what is in flight, after reading has stopped. A Postgres that
// goes away meanwhile does not disturb it.
func (s *session) drain(ctx context.Context) error {
	limit, cancel := s.drainLimit(ctx)
	defer cancel()
	err := s.sink.WaitSettled(limit, s.events)
	if err == nil {
		err = s.lastSettle(ctx)
	} else if s.sinkFailed() {
		err = context.Cause(s.ctx)
	}
	if err != nil {
		return s.left(err)
	}
	s.log.Info("drained", "events", s.events, "confirmed", s.confirmed.String())
	return nil
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
	return s.settle(limit)
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

// inFlight is the number of events that are not settled. While events are
// counted off, more are settled than were read.
func (s *session) inFlight() uint64 {
	return s.events - min(s.events, s.sink.Settled())
}
