package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// DB begins transactions. A *pgxpool.Pool is one; it needs a connection for each
// worker, and one more unless Options.Unordered is set.
type DB interface {
	BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error)
}

// Handler handles one event. What it writes with tx is committed together with
// the record that the event was handled; it must neither commit nor roll back.
// Whatever else it does can happen more than once. ctx ends when
// Options.DrainTimeout has passed since Run's ctx ended.
type Handler func(ctx context.Context, tx pgx.Tx, m *Message) error

// Options say what a Consumer reads, what it does, and what it does on failure.
type Options struct {
	JetStream jetstream.JetStream
	Consumer  jetstream.Consumer // durable, with explicit acks, MaxAckPending, and no MaxDeliver
	DB        DB
	Handle    Handler

	// Name is the consumer's name in the inbox table. It must never change, or
	// everything that the stream delivers again is handled again. "" is that of
	// the stream and that of the consumer, with a slash between.
	Name  string
	Table Table
	Tx    pgx.TxOptions // of the transactions of handlers

	Workers int // events that are handled at a time (4)

	// MaxDeliver is how often an event is tried before it becomes a dead letter
	// (5). Below zero it is tried for ever, and what follows in its aggregate waits.
	MaxDeliver int
	// DeadLetter is the subject that dead letters are published to. A stream
	// other than the relay's has to bind it. Needed unless MaxDeliver is below zero.
	DeadLetter string
	// Backoff are the pauses before the second try, the third, and so on; the
	// last one stands for all that follow (200ms, 1s, 5s, 15s).
	Backoff []time.Duration

	// Unordered gives up the order within an aggregate: an event that fails holds
	// up nothing, and several processes can share the work.
	Unordered bool

	// Parked, when set, handles the markers of events that the relay could not
	// publish. They are passed over otherwise.
	Parked Handler

	DrainTimeout time.Duration // longest wait for handlers when Run's ctx ends (10s)
	Log          *slog.Logger  // (slog.Default)
}

func (o *Options) fill() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if o.JetStream == nil {
		bad("JetStream is missing")
	}
	if o.Consumer == nil {
		bad("Consumer is missing")
	}
	if o.DB == nil {
		bad("DB is missing")
	}
	if o.Handle == nil {
		bad("Handle is missing")
	}
	if o.Workers < 0 {
		bad("Workers is %d: want one or more", o.Workers)
	}
	if o.DrainTimeout < 0 {
		bad("DrainTimeout is %s", o.DrainTimeout)
	}
	for _, d := range o.Backoff {
		if d < 0 {
			bad("Backoff has %s", d)
		}
	}
	switch {
	case o.MaxDeliver < 0:
	case o.DeadLetter == "":
		bad("DeadLetter is missing: name a subject for events that fail for good, or set MaxDeliver to -1 to try them for ever")
	case strings.ContainsAny(o.DeadLetter, " \t\r\n*>"):
		bad("DeadLetter %q is no subject to publish to", o.DeadLetter)
	}
	if len(o.Name) > maxID {
		bad("Name is longer than %d bytes", maxID)
	}
	if err := (Schema{Table: o.Table}).Validate(); err != nil {
		errs = append(errs, err)
	}
	if len(errs) > 0 {
		return event.Fail(event.Usage, "", "inbox options: %w", errors.Join(errs...))
	}
	if o.Workers == 0 {
		o.Workers = 4
	}
	if o.MaxDeliver == 0 {
		o.MaxDeliver = 5
	}
	if len(o.Backoff) == 0 {
		o.Backoff = []time.Duration{200 * time.Millisecond, time.Second, 5 * time.Second, 15 * time.Second}
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = 10 * time.Second
	}
	if o.Log == nil {
		o.Log = slog.Default()
	}
	return nil
}

// pause is the wait after n failures in a row, n from 1.
func (o *Options) pause(n int) time.Duration {
	return o.Backoff[min(n, len(o.Backoff))-1]
}

// gives says that an event that was tried so often is given up.
func (o *Options) gives(tries int) bool { return o.MaxDeliver > 0 && tries >= o.MaxDeliver }
