package relay

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/walrelay/walrelay/event"
)

// judge is a sink whose Resume fails as the test says.
type judge struct {
	*handSink
	err error
}

func (j judge) Resume(ctx context.Context, o event.Origin) (event.Resume, error) {
	r, err := j.handSink.Resume(ctx, o)
	if j.err != nil {
		err = j.err
	}
	return r, err
}

// A relay that is stopped while it opens a session wakes up with an old look at
// the log and a stream that another relay has filled since.
func TestVerdictCountsTheSecondTimeInARow(t *testing.T) {
	lost := event.Fail(event.Lost, "compare", "the log ends before the stream")
	busy := errors.New("slot in use")
	for _, c := range []struct {
		name     string
		sessions []error // what Resume returns in each; nil goes on
		ends     bool
	}{
		{"once", []error{lost, nil}, false},
		{"twice", []error{lost, lost}, true},
		{"with another end in between", []error{lost, busy, lost, nil}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			story(t, func(b *bench) {
				left := slices.Clone(c.sessions)
				b.OpenSink = func(_ context.Context, fail func(error)) (Sink, error) {
					j := judge{b.newSink(fail), left[0]}
					left = left[1:]
					return j, nil
				}
				b.run()
				b.after(10 * tick)
				if len(left) > 0 {
					t.Fatalf("%d sessions are not opened", len(left))
				}
				if b.running() == c.ends {
					t.Fatalf("running %t, want %t", b.running(), !c.ends)
				}
				if c.ends {
					if _, err := b.ended(); !errors.Is(err, lost) || event.ClassOf(err) != event.Lost || event.HintOf(err) != "compare" {
						t.Errorf("got %v of class %d", err, event.ClassOf(err))
					}
				}
			})
		})
	}
}
