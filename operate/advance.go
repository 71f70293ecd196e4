package operate

import (
	"context"
	"errors"

	"github.com/walrelay/walrelay/event"
)

// Checkpoint is the record beside the stream.
type Checkpoint interface {
	// Pass moves it on, so that the slot may be advanced to an LSN. It reports whether
	// there was one to move.
	Pass(ctx context.Context, to event.LSN) (bool, error)
}

// Slot is the slot to advance.
type Slot interface {
	// Advance moves the confirmed flush LSN and returns where it is then.
	Advance(ctx context.Context, to event.LSN) (event.LSN, error)
}

// Advance passes over everything up to an LSN that the stream does not hold.
type Advance struct {
	Log        Log // nil skips without looking, what cannot be decoded
	Mapper     Mapper
	Checkpoint Checkpoint // nil leaves it, and the next start then needs --accept-gap
	Slot       Slot

	Resume event.Resume
	To     event.LSN

	// Skip is told every event that will be skipped, in order, before anything
	// is changed. Its error ends the job.
	Skip func(*Event) error

	// Sure is asked once all are told. Its error ends the job before anything is changed.
	Sure func(Advanced) error
}

// Advanced is what was done.
type Advanced struct {
	Skipped    int
	Unread     int       // transactions, or changes, that cannot be decoded
	Slot       event.LSN // where the slot is now
	Checkpoint bool      // it was moved, too
}

// Run does it. What is stopped in between can be repeated: the checkpoint moves
// first, and one that is ahead of the slot is what every relay leaves behind.
func (a Advance) Run(ctx context.Context) (Advanced, error) {
	var done Advanced
	var err error
	if a.Log != nil {
		if err = a.tell(ctx, &done); err != nil {
			return done, err
		}
	}
	if err := a.Sure(done); err != nil {
		return done, err
	}
	if a.Checkpoint != nil {
		if done.Checkpoint, err = a.Checkpoint.Pass(ctx, a.To); err != nil {
			return done, err
		}
	}
	done.Slot, err = a.Slot.Advance(ctx, a.To)
	return done, err
}

// tell reads what will be skipped, and counts it.
func (a Advance) tell(ctx context.Context, done *Advanced) error {
	f := filter{resume: a.Resume, mapper: a.Mapper}
	_, err := a.Log.Read(ctx, a.To, 0, func(rec *event.Record) error {
		// A transaction is sent when its commit record begins at the confirmed
		// LSN or later (SnapBuildXactNeedsSkip).
		if rec.Position.Commit >= a.To {
			return errEnough
		}
		ev, poison, err := f.next(rec)
		if ev == nil {
			return err
		}
		done.Skipped++
		return a.Skip(keep(ev, poison))
	}, func(u Unread) error {
		if max(u.Position.Commit, u.Position.Change) >= a.To {
			return nil
		}
		done.Unread++
		return a.Skip(u.event())
	})
	if errors.Is(err, errEnough) {
		err = nil
	}
	return err
}
