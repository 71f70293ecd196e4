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

// errShutdown ends a session when Postgres shuts down, which must not wait for the relay.
var errShutdown = errors.New("postgres is shutting down")

// session is one try: both connections, until one of them fails or the relay is told to stop.
type session struct {
	o      *Options
	log    *slog.Logger
	source Source
	sink   Sink

	ctx    context.Context // ends with the session's failure, not with the relay's context
	cancel context.CancelCauseFunc
	wait   sync.WaitGroup

	// Of the loop.
	ev      event.Event
	resumer resumer
	events  uint64           // counted off or appended
	at      event.Checkpoint // the last of them
	last    event.Position   // of the last record read
	alone   bool             // publish the next event alone
	parked  int              // in a row

	ledger    ledger
	confirmed event.LSN // last given to source.Confirm; of the ticker
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
// whether the session got anywhere: settled an event, or lasted. nil means drained.
func (r *Relay) runSession(ctx context.Context) (progress bool, err error) {
	s := &session{o: &r.o, log: r.o.Log}
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
	// The side that failed last is tried first, so that the other one is left
	// in peace while it is down.
	openers := []func(context.Context) error{s.openSource, s.openSink}
	if r.failing == sinkSide {
		openers[0], openers[1] = openers[1], openers[0]
	}
	for _, open := range openers {
		if err := open(ctx); err != nil {
			return false, err
		}
	}
	if err := s.resume(ctx); err != nil {
		return false, err
	}
	began := time.Now()
	s.wait.Go(s.keep)
	err = s.work(ctx)
	return s.sink.Settled() > s.resumer.Skip || time.Since(began) > s.o.BackoffMax, err
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
	s.log.Info("streaming", "slot", origin.Slot, "timeline", origin.Timeline,
		"confirmed", confirmed.String(), "wal_end", origin.WALEnd.String(), "after", r.After.String(), "skip", r.Skip)
	return nil
}

// work is the loop. It returns nil when ctx ended and everything in flight is settled.
func (s *session) work(ctx context.Context) error {
	stop := context.AfterFunc(ctx, s.source.Interrupt)
	defer stop()
	for {
		if !s.source.Buffered() {
			if err := s.sink.Flush(); err != nil {
				return s.ended(onSide(sinkSide, err))
			}
		}
		rec, err := s.source.Next()
		switch {
		case err == nil:
		case s.ctx.Err() == nil && ctx.Err() != nil:
			return s.drain(ctx)
		default:
			return s.ended(onSide(sourceSide, err))
		}
		if err := s.handle(rec); err != nil {
			return s.ended(err)
		}
	}
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
	} else {
		s.parked = 0
	}
	s.placed(rec)
	if s.alone {
		s.alone = false
		return onSide(sinkSide, s.sink.WaitSettled(s.ctx, s.events))
	}
	if s.sink.Full() {
		return onSide(sinkSide, s.sink.WaitRoom(s.ctx))
	}
	return nil
}

// placed counts the record's event as the last one.
func (s *session) placed(rec *event.Record) {
	s.events++
	s.at.Position, s.at.XID, s.at.CommitTime = rec.Position, rec.XID, rec.CommitTime
}

// poisoned waits until the event is alone at the head of the chain, then parks
// it or halts.
func (s *session) poisoned(why *event.Poison) error {
	ev := &s.ev
	if err := s.sink.WaitSettled(s.ctx, s.events); err != nil {
		return onSide(sinkSide, err)
	}
	if s.o.Halt {
		return event.Fail(event.Halted,
			"mend the row or the limit and start again, or start with --on-poison park to set such events aside",
			"event %.100q of %s at %s cannot be stored: %w", ev.ID, ev.Table, ev.Position, why)
	}
	if s.parked >= s.o.MaxParkedInRow {
		return event.Fail(event.Precondition,
			"so many in a row are rather a fault of the configuration: mend it, or raise --max-parked-in-row",
			"%d events in a row cannot be stored, the last one %.100q of %s at %s: %w", s.parked+1, ev.ID, ev.Table, ev.Position, why)
	}
	if err := s.sink.Park(s.ctx, ev, why); err != nil {
		return onSide(sinkSide, err)
	}
	s.parked++
	s.log.Warn("parked an event", "id", fmt.Sprintf("%.100s", ev.ID), "table", ev.Table, "position", ev.Position.String(),
		"reason", string(why.Reason), "detail", why.Detail)
	return nil
}

// keep is the ticker: it runs while the loop is blocked, too.
func (s *session) keep() {
	t := time.NewTicker(s.o.StatusInterval)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-s.ctx.Done():
			return
		}
		s.sink.Tick()
		if err := s.settle(s.ctx); err != nil {
			s.cancel(err)
			return
		}
	}
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
	if s.confirmed == 0 {
		// Nothing to say yet, but the server wants to hear from us.
		return onSide(sourceSide, s.source.Confirm(s.resumer.origin.ConfirmedFlush))
	}
	return onSide(sourceSide, s.source.Confirm(s.confirmed))
}

// drain settles what is in flight, after reading has stopped.
func (s *session) drain(ctx context.Context) error {
	limit, cancel := context.WithTimeoutCause(s.ctx, s.o.DrainTimeout, errDrainTimeout)
	defer cancel()
	err := s.sink.WaitSettled(limit, s.events)
	inFlight := s.events - s.sink.Settled()
	if err == nil {
		// The ticker may be at work; the rest of the session is its own.
		s.cancel(errDrained)
		s.wait.Wait()
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.o.DrainTimeout)
		defer cancel()
		if err = s.settle(last); err == nil {
			s.log.Info("drained", "events", s.events, "confirmed", s.confirmed.String())
			return nil
		}
	}
	if cause := context.Cause(s.ctx); cause != nil && !errors.Is(cause, errDrained) {
		err = cause
	}
	return event.Fail(event.Undrained, "they are published by the next start; --drain-timeout gives more time",
		"stopped with %d events in flight: %w", inFlight, err)
}

var (
	errDrainTimeout = errors.New("drain timed out")
	errDrained      = errors.New("drained")
)
