package operate

import (
	"context"
	"iter"

	"github.com/walrelay/walrelay/event"
)

// Snapshot is a temporary slot and the state of the database where it begins.
type Snapshot interface {
	// Origin says which log it is; ConfirmedFlush is where the slot begins.
	Origin() event.Origin
	// Rows begins to read in the snapshot. It may be called again after Close of the last one.
	Rows(ctx context.Context) (Rows, error)
	// Keep makes the slot that stays. Rows cannot be read any more after it.
	Keep(ctx context.Context) error
	// Close drops the temporary slot.
	Close()
}

// Rows are the rows of the outbox tables, always in the same order.
type Rows interface {
	// Since leaves out the rows up to the last of those with the ids, in each
	// table's order, or with lowest up to the first of them. It says for each table
	// which are left, as column > value, and which tables have none of them.
	Since(ctx context.Context, ids []string, lowest bool) (from map[string]string, without []string, err error)
	Count(ctx context.Context) (int64, error)
	// All yields records of which Kind, Relation and Values are set, each valid until the next.
	All(ctx context.Context) iter.Seq2[*event.Record, error]
	Close()
}

// Sink is one publishing session, as in package relay.
type Sink interface {
	Resume(ctx context.Context, origin event.Origin) (event.Resume, error)
	// Stored tells the ids of the events in the stream, in order. limit is the number of messages
	// that are read from the end; 0 is all. It returns the sequence of the first one, 0 without one;
	// the stream's last sequence when the backfill began; and how many messages are gone since.
	Stored(ctx context.Context, limit uint64, tell func(seq uint64, msgID, id, table string)) (first, from, gone uint64, err error)
	Append(ev *event.Event) error
	Full() bool
	WaitRoom(ctx context.Context) error
	WaitSettled(ctx context.Context, n uint64) error
	Park(ctx context.Context, ev *event.Event, why *event.Poison) error
	// CompleteBackfill records that every row up to c is stored.
	CompleteBackfill(ctx context.Context, c event.Checkpoint) error
	Tick()
	Close() error
}
