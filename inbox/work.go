package inbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// job is a message for a worker: a copy of what the queue's item says, which
// belongs to another goroutine.
type job struct {
	it       *item
	msg      Message
	suspect  bool
	failures int
	doomed   string // why it is to become a dead letter, once that is decided
}

// outcome is what became of a job. Without err the message is settled.
type outcome struct {
	it     *item
	fault  fault
	err    error
	doomed string
}

// do handles one message, to the commit or to the dead letter.
func (c *Consumer) do(ctx context.Context, j job) outcome {
	if j.doomed == "" && j.suspect {
		tries, err := c.o.Table.countTry(ctx, c.o.DB, c.name, j.msg.ID)
		if err != nil {
			return outcome{it: j.it, err: err}
		}
		if tries > c.o.MaxDeliver {
			j.doomed = fmt.Sprintf("the process ended without an outcome in each of %d tries", tries-1)
		}
	}
	if j.doomed == "" {
		f, err := c.try(ctx, &j.msg)
		if err == nil {
			return outcome{it: j.it}
		}
		switch {
		case f == ofNobody:
			return outcome{it: j.it, err: err}
		case f == ofEventForGood && c.o.DeadLetter != "", c.o.gives(j.failures + 1):
			j.doomed = err.Error()
		default:
			return outcome{it: j.it, fault: ofEvent, err: err}
		}
	}
	if err := c.bury(ctx, &j.msg, j.doomed, j.failures+1); err != nil {
		return outcome{it: j.it, err: err, doomed: j.doomed}
	}
	return outcome{it: j.it, doomed: j.doomed}
}

const beginTimeout = 30 * time.Second

// begin waits for a connection, but not without a word.
func (c *Consumer) begin(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error) {
	ctx, cancel := context.WithTimeout(ctx, beginTimeout)
	defer cancel()
	tx, err := c.o.DB.BeginTx(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("begin a transaction: %w", err)
	}
	return tx, nil
}

// rollback ends a transaction also when its context is over.
func rollback(tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = tx.Rollback(ctx) // after a commit there is nothing to do, and without a connection Postgres does it
}

// try handles a message in a transaction.
func (c *Consumer) try(ctx context.Context, m *Message) (fault, error) {
	handle := c.o.Handle
	if m.Parked() {
		handle = c.o.Parked
	}
	tx, err := c.begin(ctx, c.o.Tx)
	if err != nil {
		return ofNobody, err
	}
	defer rollback(tx)
	f := ofNobody
	_, err = c.o.Table.Once(ctx, tx, c.name, m.ID, func(ctx context.Context, tx pgx.Tx) error {
		err := guarded(func() error { return handle(ctx, tx, m) }, func(r any) {
			c.log.Error("handler panicked", "event", m.ID, "panic", r, "stack", string(debug.Stack()))
		})
		if err != nil {
			f = blame(ctx, tx, err)
		}
		return err
	})
	if err != nil {
		return f, err
	}
	if err := tx.Commit(ctx); err != nil {
		return commitFault(err), fmt.Errorf("commit: %w", err)
	}
	return ofNobody, nil
}

const publishTimeout = 10 * time.Second

// Headers of a dead letter, beside those of the event.
const (
	headerConsumer    = "Outbox-Consumer"
	headerTries       = "Outbox-Tries"
	headerSequence    = "Outbox-Sequence"
	headerBodyOmitted = "Outbox-Body-Omitted"
)

// bury publishes a dead letter and, when it is stored, records the event as
// handled, so that it is passed over wherever it comes again. After a crash in
// between, the id of the letter keeps it single for the stream's dedup window.
func (c *Consumer) bury(ctx context.Context, m *Message, reason string, tries int) error {
	letter := nats.NewMsg(c.o.DeadLetter)
	for name, values := range m.Header {
		if !strings.HasPrefix(strings.ToLower(name), "nats-") {
			letter.Header[name] = values
		}
	}
	letter.Data = m.Data
	letter.Header.Set(event.HeaderReason, oneLine(reason))
	letter.Header.Set(event.HeaderSubject, m.Subject)
	letter.Header.Set(headerConsumer, oneLine(c.name))
	letter.Header.Set(headerTries, strconv.Itoa(tries))
	letter.Header.Set(headerSequence, strconv.FormatUint(m.Sequence, 10))
	letter.Header.Set(nats.MsgIdHdr, oneLine("inbox:"+c.name+":"+m.ID))
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	_, err := c.o.JetStream.PublishMsg(ctx, letter)
	if tooLarge(err) && len(m.Data) > 0 {
		letter.Data = nil
		letter.Header.Set(headerBodyOmitted, strconv.Itoa(len(m.Data)))
		_, err = c.o.JetStream.PublishMsg(ctx, letter)
	}
	if err != nil {
		return fmt.Errorf("publish a dead letter to %s: %w", c.o.DeadLetter, err)
	}
	return pgx.BeginTxFunc(ctx, c.o.DB, pgx.TxOptions{}, func(tx pgx.Tx) error {
		_, err := c.o.Table.Once(ctx, tx, c.name, m.ID, func(context.Context, pgx.Tx) error { return nil })
		return err
	})
}

const codeTooLarge = 10054

func tooLarge(err error) bool {
	var api *jetstream.APIError
	return errors.Is(err, nats.ErrMaxPayload) || errors.As(err, &api) && api.ErrorCode == codeTooLarge
}

const reasonBytes = 1500

// oneLine is text as a header takes it.
func oneLine(s string) string {
	if len(s) > reasonBytes {
		s = s[:reasonBytes]
	}
	return strings.Map(func(r rune) rune {
		if r < ' ' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(s, "�"))
}
