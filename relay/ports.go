package relay

import (
	"context"

	"github.com/walrelay/walrelay/event"
)

// Source is one replication session.
type Source interface {
	// Origin says which log is read. ConfirmedFlush is not set.
	Origin() event.Origin

	// Next blocks until the next record. The record and its bytes are valid
	// until the following call. Only one goroutine may call it. A record of no
	// kind says that it would have to wait for the network.
	Next() (*event.Record, error)

	// Buffered reports whether bytes are at hand, so that Next is not expected
	// to wait for the network.
	Buffered() bool

	// Confirm sends a status with the highest LSN it was ever given. It may be
	// called while another goroutine is in Next, and with the same LSN again
	// to keep the session alive.
	Confirm(event.LSN) error

	// Interrupt makes a blocked or later Next return an error soon. It may be
	// called from any goroutine, more than once.
	Interrupt()

	// Close ends the session. It returns after the connection is closed. It may
	// be called from any goroutine, during Next and Confirm and more than once.
	Close() error
}

// Mapper makes events of records.
type Mapper interface {
	// Map fills ev from a Row or Message. It returns false when the record is
	// none of the outbox's. An error that is an *event.Poison is the event's
	// own fault: ev then has at least Position, Table, XID and CommitTime, and
	// whatever else could be read.
	Map(rec *event.Record, ev *event.Event) (bool, error)
}

// Sink is one publishing session: a chain of messages, each naming its
// predecessor's sequence.
type Sink interface {
	// Resume reads what the stream holds and says where to go on. It blocks
	// for a few round trips.
	Resume(ctx context.Context, origin event.Origin) (event.Resume, error)

	// Recall asks whether ev is stored, whose message is gone. While Resume.Gone is set it is
	// called for each event after Resume.After, in order, and nothing is appended.
	// It returns how many gone messages are left to account for, or an error
	// when it cannot be known whether ev is stored. It blocks for a round trip or two.
	Recall(ctx context.Context, ev *event.Event) (left uint64, err error)

	// Resumed ends that: c is the last event that is stored. It blocks until that is recorded.
	Resumed(ctx context.Context, c event.Checkpoint) error

	// Append adds ev to the out-buffer as the next link of the chain. It does
	// not keep ev. When the out-buffer is full it writes, which blocks while
	// the server does not read, until Tick finds that it has been too long. An
	// error that is an *event.Poison says that ev can never be stored; nothing
	// was added then.
	Append(ev *event.Event) error

	// Flush writes what Append added.
	Flush() error

	// Full reports whether the window is used up.
	Full() bool

	// Settled is the number of events of this session, in order, whose acks
	// have arrived. It may be called from any goroutine.
	Settled() uint64

	// WaitSettled blocks until Settled is at least n, or ctx ends. Only the goroutine that
	// calls Append may call it; it flushes first.
	WaitSettled(ctx context.Context, n uint64) error

	// WaitRoom flushes and blocks until Full is false, or ctx ends.
	WaitRoom(ctx context.Context) error

	// Park stores ev as a dead letter, waits for its ack, appends a marker
	// to the chain in its stead, and waits for the marker's ack. Every event before ev must be settled.
	Park(ctx context.Context, ev *event.Event, why *event.Poison) error

	// Repark stores the dead letter of ev again, whose marker is in the chain, and waits
	// for its ack. It is called for the events of Resume.Missing.
	Repark(ctx context.Context, ev *event.Event, why *event.Poison) error

	// Redeliver stores the event of a dead letter after all: it appends ev, waits for
	// its ack and removes the dead letter. When why is set, or ev cannot be stored,
	// it leaves the dead letter, appends a marker to the chain in the event's
	// stead, and returns why. Every event before ev must be settled. It blocks for some
	// round trips.
	Redeliver(ctx context.Context, ev *event.Event, why *event.Poison) (refused *event.Poison, err error)

	// Release removes the dead letter of an event that is stored or refused at ev's
	// place, unless it was refused. Doing so again changes nothing.
	Release(ctx context.Context, ev *event.Event) error

	// Refuse appends a marker to the chain in the stead of an event that is
	// published again and cannot be. Every event before ev must be settled.
	Refuse(ctx context.Context, ev *event.Event, why *event.Poison) error

	// Checkpoint records c beside the stream and blocks until that is acked.
	// It may be called while another goroutine appends.
	Checkpoint(ctx context.Context, c event.Checkpoint) error

	// Tick lets the sink look for overdue acks, which make it fail, and with it
	// every call that is blocked. The relay calls it about once a second, until
	// no call of the other methods is left.
	Tick()

	// Close drops the connection. What was appended but not acked may or may
	// not be stored.
	Close() error
}

// Watcher asks Postgres over an ordinary connection.
type Watcher interface {
	// Confirmed returns the slot's confirmed flush LSN as the server has it now.
	Confirmed(ctx context.Context) (event.LSN, error)

	// AwaitShutdown blocks until the server is seen to shut down, and returns
	// nil then; it returns ctx's error when ctx ends. It rides out lost connections.
	AwaitShutdown(ctx context.Context) error

	// Diagnose reads the state of the slot after a session ended with err and
	// returns err with a class and a hint, or a better error.
	Diagnose(ctx context.Context, err error) error
}
