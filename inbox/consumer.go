package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Consumer handles the events of one JetStream consumer.
type Consumer struct {
	o    Options
	log  *slog.Logger
	name string

	stream, durable string
	ackWait         time.Duration
	maxAckPending   int
}

// New checks the options, all mistakes in one Usage failure, and starts nothing.
func New(o Options) (*Consumer, error) {
	if err := o.fill(); err != nil {
		return nil, err
	}
	return &Consumer{o: o}, nil
}

// Run is New and Consumer.Run.
func Run(ctx context.Context, o Options) error {
	c, err := New(o)
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// Run handles events until ctx ends, and then returns nil as soon as the
// handlers that run have come to their end, after Options.DrainTimeout at the latest. It
// blocks. Lost connections are no errors; it returns one when an operator has to
// act: an event.Failure that says what to do. A Consumer runs once.
func (c *Consumer) Run(ctx context.Context) error {
	c.log = c.o.Log
	for n := 1; ; n++ {
		err := c.examine(ctx)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return nil //nolint:nilerr // ended before it began
		}
		if event.ClassOf(err) != event.Transient {
			return err
		}
		c.log.Warn("waiting for the servers", "err", err, "try", n)
		if !pause(ctx, c.o.pause(n)) {
			return nil
		}
	}
	for {
		var lost <-chan struct{}
		free := func() {}
		if !c.o.Unordered {
			var err error
			if lost, free, err = c.own(ctx); err != nil {
				return nil //nolint:nilerr // only ctx ends it
			}
		}
		c.log.Info("handling events", "workers", c.o.Workers)
		err := c.session(ctx, lost)
		free()
		switch {
		case err != nil:
			return err
		case ctx.Err() != nil:
			c.log.Info("drained")
			return nil
		}
		c.log.Warn("lost the lock of the consumer with its connection to postgres")
	}
}

const infoTimeout = 5 * time.Second

// examine looks at everything that events rely on, before one of them fails for it.
func (c *Consumer) examine(ctx context.Context) error {
	info, err := c.info(ctx)
	if err != nil {
		return err
	}
	if err := c.fits(info); err != nil {
		return err
	}
	c.stream, c.durable = info.Stream, info.Name
	c.name = cmp.Or(c.o.Name, info.Stream+"/"+info.Name)
	c.log = c.o.Log.With("consumer", c.name)
	if err := c.examineDeadLetters(ctx); err != nil {
		return err
	}
	tx, err := c.begin(ctx, c.o.Tx)
	if err != nil {
		return err
	}
	defer rollback(tx)
	if err := c.o.Table.check(ctx, tx); err != nil {
		return err
	}
	return c.o.Table.checkRights(ctx, tx)
}

// info asks for the consumer as it is. One that is gone is a Precondition failure.
func (c *Consumer) info(ctx context.Context) (*jetstream.ConsumerInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	info, err := c.o.Consumer.Info(ctx)
	switch {
	case errors.Is(err, jetstream.ErrConsumerNotFound), errors.Is(err, jetstream.ErrConsumerDeleted), errors.Is(err, jetstream.ErrStreamNotFound):
		return nil, gone(err)
	case err != nil:
		return nil, fmt.Errorf("look at the consumer: %w", err)
	}
	return info, nil
}

func gone(err error) error {
	return event.Fail(event.Precondition, "create the consumer again; what it handled is still recorded in the inbox", "look at the consumer: %w", err)
}

// fits tells of settings with which the promises could not be kept.
func (c *Consumer) fits(info *jetstream.ConsumerInfo) error {
	cfg := info.Config
	bad := func(hint, format string, args ...any) error {
		return event.Fail(event.Precondition, hint, "consumer %q of stream %q "+format, append([]any{info.Name, info.Stream}, args...)...)
	}
	switch {
	case cfg.AckPolicy != jetstream.AckExplicitPolicy:
		return bad("create it with AckPolicy explicit", "does not want an ack for every message")
	case cfg.MaxDeliver > 0:
		return bad("set its MaxDeliver to -1, and that of inbox.Options to what you want",
			"gives an event up after %d deliveries without a dead letter", cfg.MaxDeliver)
	case cfg.MaxAckPending <= 0:
		return bad("set its MaxAckPending, such as to 1000: that many events are in memory at most", "has no limit of unacknowledged messages")
	case cfg.HeadersOnly:
		return bad("create it without HeadersOnly", "delivers no payloads")
	}
	c.ackWait = cfg.AckWait
	for _, d := range cfg.BackOff {
		c.ackWait = min(c.ackWait, d)
	}
	if c.ackWait <= 0 {
		c.ackWait = 30 * time.Second // the server's default
	}
	c.maxAckPending = cfg.MaxAckPending
	return nil
}

func (c *Consumer) examineDeadLetters(ctx context.Context) error {
	if c.o.DeadLetter == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	name, err := c.o.JetStream.StreamNameBySubject(ctx, c.o.DeadLetter)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return event.Fail(event.Precondition, "create a stream with that subject", "no stream stores dead letters at %s", c.o.DeadLetter)
	case err != nil:
		return fmt.Errorf("find the stream of dead letters at %s: %w", c.o.DeadLetter, err)
	case name == c.stream:
		return event.Fail(event.Precondition, "choose a subject that another stream binds", "dead letters at %s would go into the stream %q that they come from", c.o.DeadLetter, name)
	}
	return nil
}
