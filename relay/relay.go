package relay

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Options of a Relay. The functions, Mapper and Watcher are required; zero
// values of the others take their defaults.
type Options struct {
	OpenSource func(context.Context) (Source, error)
	// OpenSink opens a publishing session; fail is called at most once when it
	// cannot go on.
	OpenSink func(ctx context.Context, fail func(error)) (Sink, error)
	Mapper   Mapper
	Watcher  Watcher
	// Standby reports whether an error of OpenSource means that another relay
	// holds the slot.
	Standby func(error) bool

	// Sent asks the server, over another connection, how far it has sent the log
	// to the session that holds the slot, 0 when it does not say, and whether
	// there is one. When it is set, a session that hears nothing new for Silence is
	// looked after; 10 s.
	Sent    func(context.Context) (sent event.LSN, held bool, err error)
	Silence time.Duration

	// Vouch looks whether the rows of the tables are sent, and returns the place
	// up to which that is known: the end of the log at the look before, since what
	// is in the log may not be visible yet. Nothing behind it is confirmed. An error
	// that does not pass stops the relay. When it is not set nothing is looked at.
	Vouch func(context.Context) (event.LSN, error)

	Halt           bool          // stop at a poison event instead of parking it
	MaxParkedInRow int           // 100
	StatusInterval time.Duration // between checkpoints and statuses; 1 s
	// ConfirmDelay is how long events are settled before they are confirmed, so
	// that Postgres can send them again while the broker may forget them; 0 is not at all.
	ConfirmDelay time.Duration
	DrainTimeout time.Duration // 10 s
	BackoffMin   time.Duration // 100 ms
	BackoffMax   time.Duration // 5 s

	Observer Observer // nil for none
	Log      *slog.Logger
}

// Relay runs one session after another.
type Relay struct {
	o       Options
	failing side // that the last session failed on
	parked  int  // events in a row, up to the last session's end
	hold    hold // what the last session had not confirmed yet
	// An operator accepts another server, and the last session found one.
	acceptGap, diverged bool
	judged              bool // the last session ended with a verdict

	renewed time.Time // when the backoff last began anew

	report report
	jitter func(time.Duration) time.Duration // below its argument
}

// standbyBackoff is the longest wait between two tries to take over a slot.
const standbyBackoff = 500 * time.Millisecond

// reminder is how often a wait that does not change is logged again.
const reminder = time.Minute

// renewal is how often the backoff may begin anew.
const renewal = 5 * time.Second

// brief sessions are no news, neither their begin nor their end.
const brief = 500 * time.Millisecond

// New checks the options and starts nothing.
func New(o Options) (*Relay, error) {
	if o.OpenSource == nil || o.OpenSink == nil || o.Mapper == nil || o.Watcher == nil {
		return nil, errors.New("relay: OpenSource, OpenSink, Mapper and Watcher are required")
	}
	if o.Standby == nil {
		o.Standby = func(error) bool { return false }
	}
	if o.MaxParkedInRow == 0 {
		o.MaxParkedInRow = 100
	}
	if o.StatusInterval == 0 {
		o.StatusInterval = time.Second
	}
	if o.ConfirmDelay < 0 {
		return nil, errors.New("relay: ConfirmDelay must not be negative")
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = 10 * time.Second
	}
	if o.BackoffMin == 0 {
		o.BackoffMin = 100 * time.Millisecond
	}
	if o.BackoffMax == 0 {
		o.BackoffMax = 5 * time.Second
	}
	if o.Silence == 0 {
		o.Silence = 10 * time.Second
	}
	if o.Observer == nil {
		o.Observer = Unobserved{}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Relay{o: o, hold: hold{delay: o.ConfirmDelay}, report: report{log: o.Log}, jitter: rand.N[time.Duration]}, nil
}

// Run works until ctx ends, and returns nil when everything in flight was
// settled by then. It rides out every failure that can pass, for as long as it
// takes, and returns the others.
func (r *Relay) Run(ctx context.Context) (err error) {
	defer func() { r.o.Observer.Entered(Status{State: Stopped, Err: err}) }()
	tries := 0
	state := Status{State: Connecting}
	for ctx.Err() == nil {
		state.Trying = true
		r.o.Observer.Entered(state)
		began := time.Now()
		progress, err := r.runSession(ctx)
		if err == nil {
			return nil
		}
		var at *sideError
		if errors.As(err, &at) {
			r.failing = at.side
			if at.side == sourceSide && !errors.Is(err, errShutdown) && ctx.Err() == nil {
				err = r.o.Watcher.Diagnose(ctx, err)
				if ctx.Err() != nil {
					return nil // the question was cut short
				}
			}
		}
		if !r.appeal(err) && event.ClassOf(err) != event.Transient {
			return err
		}
		if progress {
			tries = r.renew(tries)
			if time.Since(began) >= brief {
				r.report.forget()
			}
		}
		standby := r.o.Standby(err)
		r.report.waiting(r.failing, standby, err)
		state = Status{State: Waiting, Err: err, Side: string(r.failing)}
		limit := r.o.BackoffMax
		if standby {
			state.State = Standby
			limit = min(limit, standbyBackoff)
		}
		pause := r.backoff(tries, limit)
		news := state
		news.Pause = pause
		r.o.Observer.Entered(news)
		sleep(ctx, pause)
		tries++
	}
	return nil
}

// verdict is a failure of Sink.Resume that does not pass.
type verdict struct{ error }

func (v *verdict) Unwrap() error { return v.error }

// appeal reports whether err is a verdict that has to be looked at again. The
// two sides are read one after the other: a relay that was stopped in between
// compares its old look at the log with a stream that its successor has filled
// since, and a broker that was stopped may answer with what was true before.
// So a verdict counts when two sessions in a row come to one.
func (r *Relay) appeal(err error) bool {
	var v *verdict
	r.judged = errors.As(err, &v) && !r.judged
	return r.judged
}

// renew is the number of tries that still counts after a session that got
// somewhere: none, unless that was so a moment ago. A stream that is full and
// takes one message at a time would otherwise be tried ten times a second.
func (r *Relay) renew(tries int) int {
	if now := time.Now(); now.Sub(r.renewed) >= renewal {
		r.renewed = now
		return 0
	}
	return min(tries, 2)
}

// backoff doubles from BackoffMin to limit; half of it is jitter, so that
// relays that lost the same server do not come back together.
func (r *Relay) backoff(tries int, limit time.Duration) time.Duration {
	d := r.o.BackoffMin << min(tries, 20)
	if d > limit || d <= 0 {
		d = limit
	}
	return d/2 + r.jitter(d/2+1)
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// report says once a change what the relay waits for. One and the same wait may
// be worded in two ways by turns: a server that resets connections does so
// during the dial or right after it. So the last two are remembered.
type report struct {
	log          *slog.Logger
	last, before told
}

type told struct {
	text    string // without what differs from try to try
	repeats int
	next    time.Time
}

func (r *report) waiting(at side, standby bool, err error) {
	now := time.Now()
	text := outline(err.Error())
	if text != r.last.text {
		r.last, r.before = r.before, r.last
	}
	if text == r.last.text && now.Before(r.last.next) {
		r.last.repeats++
		return
	}
	args := []any{"side", string(at), "err", err.Error()}
	if hint := event.HintOf(err); hint != "" {
		args = append(args, "hint", hint)
	}
	if text == r.last.text {
		args = append(args, "tries", r.last.repeats+1)
	}
	if standby {
		r.log.Info("standing by, another relay holds the slot", args...)
	} else {
		r.log.Warn("session ended, trying again", args...)
	}
	r.last = told{text: text, next: now.Add(reminder)}
}

func (r *report) forget() { r.last, r.before = told{}, told{} }

// outline leaves the numbers out: ports, sequences, times and process ids are
// other ones in each try.
func outline(text string) string {
	return strings.Map(func(c rune) rune {
		if c >= '0' && c <= '9' {
			return -1
		}
		return c
	}, text)
}
