package operate

import (
	"context"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Redelivery has the events of dead letters published after all, oldest first,
// and waits until the relay has dealt with each. L is a dead letter.
type Redelivery[L any] struct {
	Letters []L

	// Content makes the message for the relay. Its failure is that of the letter alone when it is an *Unusable.
	Content func(ctx context.Context, l L) ([]byte, error)
	// Emit writes messages for the relay in one transaction.
	Emit func(ctx context.Context, contents [][]byte) error
	// Fate asks what the relay made of a letter.
	Fate func(ctx context.Context, l L) (Fate, error)
	// Relay reports whether a relay reads the slot.
	Relay func(ctx context.Context) (bool, error)

	// Tell is told each letter's fate, in order; nil tells nobody. Progress is told how many are dealt with.
	Tell     func(l L, f Fate)
	Progress func(Progress)
}

// Unusable says why a letter cannot be published: what it lacks is nowhere any more.
type Unusable struct{ Err error }

func (u *Unusable) Error() string { return u.Err.Error() }

// Unwrap returns the cause.
func (u *Unusable) Unwrap() error { return u.Err }

// Fate is what became of a letter.
type Fate struct {
	State  FateState
	Reason string // why it was refused, or cannot be published
}

// FateState is the state of a Fate.
type FateState uint8

// The states.
const (
	Awaited  FateState = iota // no relay has come to it
	Stored                    // its event is in the stream
	Refused                   // the relay left it where it is
	Useless                   // it was not given to the relay
	Vanished                  // the letter was gone before that
)

func (s FateState) String() string {
	switch s {
	case Awaited:
		return "waiting"
	case Stored:
		return "stored"
	case Refused:
		return "refused"
	case Useless:
		return "not possible"
	case Vanished:
		return "gone"
	}
	return "unknown"
}

// Redelivered counts the fates.
type Redelivered struct {
	Stored, Refused, Useless, Vanished, Awaited int
}

const (
	redeliverBatch = 100
	redeliverBytes = 4 << 20

	fatePoll = 20 * time.Millisecond
	// absence is how long there may be no relay before it is no longer waited for.
	absence = 3 * time.Second
)

// Run does it. When there is no relay it returns with letters that are awaited:
// they are in the log, and dealt with when one starts.
func (r Redelivery[L]) Run(ctx context.Context) (Redelivered, error) {
	var done Redelivered
	if r.Tell == nil {
		r.Tell = func(L, Fate) {}
	}
	if r.Progress == nil {
		r.Progress = func(Progress) {}
	}
	var sent []L
	var contents [][]byte
	size := 0
	flush := func() error {
		if len(contents) == 0 {
			return nil
		}
		err := r.Emit(ctx, contents)
		contents, size = contents[:0], 0
		return err
	}
	for _, l := range r.Letters {
		content, err := r.Content(ctx, l)
		if unusable, is := err.(*Unusable); is { //nolint:errorlint // it is never wrapped
			done.Useless++
			r.Tell(l, Fate{Useless, unusable.Error()})
			continue
		}
		if err != nil {
			return done, err
		}
		if content == nil {
			done.Vanished++
			r.Tell(l, Fate{State: Vanished})
			continue
		}
		sent, contents, size = append(sent, l), append(contents, content), size+len(content)
		if len(contents) == redeliverBatch || size >= redeliverBytes {
			if err := flush(); err != nil {
				return done, err
			}
		}
	}
	if err := flush(); err != nil {
		return done, err
	}
	return r.wait(ctx, sent, done)
}

// wait looks at one letter after the other, as the relay does.
func (r Redelivery[L]) wait(ctx context.Context, sent []L, done Redelivered) (Redelivered, error) {
	poll := time.NewTicker(fatePoll)
	defer poll.Stop()
	watch := presence{seen: time.Now()}
	for i, l := range sent {
		r.Progress(Progress{Total: int64(len(sent)), Seen: int64(i), Published: int64(done.Stored)})
		f, err := r.await(ctx, l, poll, &watch)
		if err != nil {
			done.Awaited = len(sent) - i
			return done, r.cut(ctx, done.Awaited, err)
		}
		switch f.State {
		case Awaited:
			done.Awaited = len(sent) - i
			return done, nil
		case Stored:
			done.Stored++
		default:
			done.Refused++
		}
		r.Tell(l, f)
	}
	r.Progress(Progress{Total: int64(len(sent)), Seen: int64(len(sent)), Published: int64(done.Stored)})
	return done, nil
}

// presence is when a relay was asked for, and last seen.
type presence struct{ asked, seen time.Time }

// await returns the fate of a letter once it has one, and Awaited when there is no relay.
func (r Redelivery[L]) await(ctx context.Context, l L, poll *time.Ticker, relay *presence) (Fate, error) {
	for {
		f, err := r.Fate(ctx, l)
		if err != nil || f.State != Awaited {
			return f, err
		}
		if time.Since(relay.asked) > absence/6 {
			relay.asked = time.Now()
			there, err := r.Relay(ctx)
			if err != nil {
				return f, err
			}
			if there {
				relay.seen = time.Now()
			}
			if time.Since(relay.seen) > absence {
				return f, nil
			}
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			return f, ctx.Err()
		}
	}
}

// cut says that nothing is lost by not waiting any longer.
func (r Redelivery[L]) cut(ctx context.Context, n int, err error) error {
	class := event.ClassOf(err)
	if ctx.Err() != nil {
		class, err = event.Undrained, errInterrupted
	}
	return event.Fail(class, "the relay goes on with them; walrelay dlq list shows what is left", "not waiting for %d dead letters any longer: %w", n, err)
}
