package operate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/walrelay/walrelay/event"
)

// ReplayRows are the rows that are published again, as contents of messages for
// the relay. Places are opaque: nil is before the first row.
type ReplayRows interface {
	// Next returns what follows a place, limit rows at most, and the place of
	// the last of them. Nothing is returned at the end.
	Next(ctx context.Context, after json.RawMessage, limit int) (contents [][]byte, last json.RawMessage, err error)
}

// Emitter writes messages for the relay into the log.
type Emitter interface {
	// Emit writes them in one transaction. It calls ready with the transaction's
	// id before it commits; an error of ready rolls back.
	Emit(ctx context.Context, contents [][]byte, ready func(xid string) error) error
	// Outcome asks what became of a transaction.
	Outcome(ctx context.Context, xid string) (TxOutcome, error)
}

// TxOutcome is what became of a transaction.
type TxOutcome string

// The outcomes, in the words of pg_xact_status. TxUnknown is for a transaction too old
// to know, or one of another server.
const (
	TxCommitted TxOutcome = "committed"
	TxAborted   TxOutcome = "aborted"
	TxOpen      TxOutcome = "in progress"
	TxUnknown   TxOutcome = ""
)

// Run is the record of a replay, kept beside the stream.
type Run struct {
	Version int             `json:"version"`
	ID      string          `json:"id"`
	Begun   time.Time       `json:"begun"`
	Choice  json.RawMessage `json:"choice"` // what was asked for
	Total   int64           `json:"total"`  // rows when it began
	Emitted int64           `json:"emitted"`
	Place   json.RawMessage `json:"place,omitempty"` // of the last row of these
	Pending *Pending        `json:"pending,omitempty"`
	Done    bool            `json:"done"`
}

// RunVersion is the format of a Run.
const RunVersion = 1

// Pending is a transaction that was about to commit.
type Pending struct {
	XID   string          `json:"xid"`
	Rows  int64           `json:"rows"`
	Place json.RawMessage `json:"place"`
}

// Replay has stored rows published again, by messages in the log that the
// relay takes. Its record is written before each commit, so that a run that was cut off
// anywhere goes on with the row after the last one that was emitted.
type Replay struct {
	Rows    ReplayRows
	Emitter Emitter
	Save    func(context.Context, Run) error

	Rate     int            // rows a second; 0 is as fast as it goes
	Progress func(Progress) // nil for nobody
	Log      *slog.Logger   // nil for none
}

const (
	// replayBatch is how many rows a transaction has at most.
	replayBatch = 200
	// openPatience is how long a transaction of a process that is gone may stay open.
	openPatience = 30 * time.Second
	openPoll     = 100 * time.Millisecond
	// savePatience bounds the last record of a run that is told to stop.
	savePatience = 3 * time.Second
)

// errInterrupted stands for the end of a context, which says less.
var errInterrupted = errors.New("interrupted")

// Run works until every row is emitted, or until ctx ends or something fails.
// It returns the record as it is then: another process goes on from it.
func (r *Replay) Run(ctx context.Context, run Run) (Run, error) {
	if r.Progress == nil {
		r.Progress = func(Progress) {}
	}
	if r.Log == nil {
		r.Log = slog.New(slog.DiscardHandler)
	}
	if err := r.settle(ctx, &run); err != nil {
		return run, err
	}
	began, before := time.Now(), run.Emitted
	for !run.Done {
		r.Progress(Progress{Total: run.Total, Seen: run.Emitted, Published: run.Emitted})
		if err := r.pace(ctx, began, run.Emitted-before); err != nil {
			return run, r.interrupted(ctx, run, err)
		}
		if err := r.batch(ctx, &run); err != nil {
			return run, r.interrupted(ctx, run, err)
		}
	}
	r.Progress(Progress{Total: run.Total, Seen: run.Emitted, Published: run.Emitted})
	return run, nil
}

// pace waits until n rows are due.
func (r *Replay) pace(ctx context.Context, began time.Time, n int64) error {
	if r.Rate == 0 {
		return ctx.Err()
	}
	t := time.NewTimer(time.Until(began.Add(time.Duration(float64(n) / float64(r.Rate) * float64(time.Second)))))
	defer t.Stop()
	select {
	case <-t.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (r *Replay) limit() int {
	if r.Rate == 0 {
		return replayBatch
	}
	return min(max(r.Rate/10, 1), replayBatch)
}

func (r *Replay) batch(ctx context.Context, run *Run) error {
	contents, last, err := r.Rows.Next(ctx, run.Place, r.limit())
	if err != nil {
		return err
	}
	if len(contents) == 0 {
		done := *run
		done.Done = true
		if err := r.Save(ctx, done); err != nil {
			return err
		}
		*run = done
		return nil
	}
	pending := &Pending{Rows: int64(len(contents)), Place: last}
	err = r.Emitter.Emit(ctx, contents, func(xid string) error {
		pending.XID = xid
		record := *run
		record.Pending = pending
		if err := r.Save(ctx, record); err != nil {
			return err
		}
		run.Pending = pending
		return nil
	})
	if err != nil {
		return err
	}
	run.take()
	return nil
}

// take counts the pending rows as emitted.
func (run *Run) take() {
	run.Emitted += run.Pending.Rows
	run.Place, run.Pending = run.Pending.Place, nil
}

// settle finds out what became of the transaction that was about to commit.
func (r *Replay) settle(ctx context.Context, run *Run) error {
	if run.Pending == nil {
		return nil
	}
	deadline := time.NewTimer(openPatience)
	defer deadline.Stop()
	poll := time.NewTicker(openPoll)
	defer poll.Stop()
	for {
		outcome, err := r.Emitter.Outcome(ctx, run.Pending.XID)
		switch {
		case err != nil:
			return err
		case outcome == TxCommitted:
			run.take()
			return nil
		case outcome == TxAborted:
			run.Pending = nil
			return nil
		case outcome != TxOpen:
			return event.Fail(event.Lost,
				"see whether the rows of its last batch are in the stream, with the header Outbox-Replay; then begin another run behind them",
				"it cannot be told whether transaction %s of run %s, %d rows, was committed: it is too old, or this is another server", run.Pending.XID, run.ID, run.Pending.Rows)
		}
		select {
		case <-poll.C:
		case <-deadline.C:
			return event.Fail(event.Precondition, "is another process at this run? If not, end its session with pg_terminate_backend and try again",
				"transaction %s of run %s is still open", run.Pending.XID, run.ID)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// interrupted says how to go on. What was committed since the last record is
// written down, as far as that is still possible: without it the next process asks Postgres.
func (r *Replay) interrupted(ctx context.Context, run Run, err error) error {
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), savePatience)
	defer cancel()
	if failed := r.Save(limit, run); failed != nil {
		r.Log.Debug("the run's last record is not written", "run", run.ID, "err", failed)
	}
	again := fmt.Sprintf("go on with walrelay replay --run %s: nothing is emitted twice", run.ID)
	if hint := event.HintOf(err); hint != "" {
		again = hint + "\n" + again
	}
	class := event.ClassOf(err)
	if ctx.Err() != nil {
		class, err = event.Undrained, errInterrupted
	}
	return event.Fail(class, again, "run %s stopped after %d of %d rows: %w", run.ID, run.Emitted, run.Total, err)
}
