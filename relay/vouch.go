package relay

import (
	"context"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Postgres does not say when it stops to send a table's rows: the log just goes
// on without them. So nothing is confirmed before somebody has looked, after
// that place in the log, and found that the rows are sent (Options.Vouch).

const (
	// vouchPatience bounds one look.
	vouchPatience = 5 * time.Second
	// shortestLook is the shortest time between two looks.
	shortestLook = 50 * time.Millisecond
	// longBlind is how long looks may fail before that is told, again and again:
	// nothing is confirmed meanwhile, and Postgres keeps its log.
	longBlind = 30 * time.Second
)

// vouch looks again and again until the session ends. Two looks fit between two ticks.
func (s *session) vouch() {
	defer close(s.looked)
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	go func() {
		select {
		case <-s.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	t := time.NewTicker(max(s.o.StatusInterval/2, shortestLook))
	defer t.Stop()
	good := time.Now()
	for {
		err := s.look(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			good = time.Now()
		case event.ClassOf(err) != event.Transient:
			s.cancel(onSide(sourceSide, err))
			return
		case time.Since(good) >= longBlind:
			s.log.Warn("cannot see whether the tables are published, so nothing is confirmed", "err", err, "hint", event.HintOf(err))
			good = time.Now()
		}
		select {
		case <-t.C:
		case <-ctx.Done():
			return
		}
	}
}

// look asks once up to where the log is complete.
func (s *session) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, vouchPatience)
	defer cancel()
	lsn, err := s.o.Vouch(ctx)
	if err == nil {
		s.vouched.Store(uint64(lsn))
	}
	return err
}

// vouchedFor is the place up to which the log is known to be complete.
func (s *session) vouchedFor() event.LSN {
	if s.o.Vouch == nil {
		return ^event.LSN(0)
	}
	return event.LSN(s.vouched.Load())
}
