package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

// diary is an Observer that writes down what it was told.
type diary struct {
	mu    sync.Mutex
	lines []string
	ticks []Tick
}

func (d *diary) Entered(s Status) {
	line := s.State.String()
	if s.Trying {
		line += " trying"
	}
	if s.Side != "" {
		line += " " + s.Side
	}
	if s.Err != nil {
		line += fmt.Sprintf(" %q", s.Err)
	}
	if s.Pause > 0 {
		line += " paused"
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lines = append(d.lines, line)
}

func (d *diary) Ticked(t Tick) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ticks = append(d.ticks, t)
}

func (d *diary) Parked(r event.Reason) { d.Entered(Status{State: Streaming, Side: string(r)}) }

func (d *diary) Refused(r event.Reason) {
	d.Entered(Status{State: Streaming, Side: "refused " + string(r)})
}

// told returns what was written since the last call.
func (d *diary) told() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	lines := d.lines
	d.lines = nil
	return lines
}

func (d *diary) last() Tick {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.ticks) == 0 {
		return Tick{}
	}
	return d.ticks[len(d.ticks)-1]
}

func TestObserverHearsStates(t *testing.T) {
	story(t, func(b *bench) {
		d := &diary{}
		b.Observer = d
		active := errors.New("slot is active")
		b.Standby = func(err error) bool { return errors.Is(err, active) }
		held := true
		open := b.OpenSource
		b.OpenSource = func(ctx context.Context) (Source, error) {
			if b.is(&held) {
				return nil, active
			}
			return open(ctx)
		}
		want := func(lines ...string) {
			b.Helper()
			if got := d.told(); !slices.Equal(got, lines) {
				b.Errorf("got %q, want %q", got, lines)
			}
		}
		b.run()
		want("connecting trying", `standby postgres "slot is active" paused`)
		b.after(100 * time.Millisecond)
		want(`standby trying postgres "slot is active"`, `standby postgres "slot is active" paused`)
		b.set(func() { held = false })
		b.after(time.Second)
		want(`standby trying postgres "slot is active"`, "streaming")

		b.sink.fail(errors.New("gone"))
		b.after(0)
		want(`waiting nats "gone"`, `waiting nats "gone" paused`)
		b.after(time.Second)
		want(`waiting trying nats "gone"`, "streaming")

		b.set(func() { b.sink.poison["p"] = true })
		b.source.commit("p")
		want("streaming too_large")

		b.sink.ack(1)
		b.source.commit("a")
		b.stop()
		b.after(0)
		want("draining")
		b.sink.ack(1)
		if _, err := b.ended(); err != nil {
			b.Fatal(err)
		}
		want("stopped")
	})
}

func TestObserverHearsWhyTheRelayEnds(t *testing.T) {
	story(t, func(b *bench) {
		d := &diary{}
		b.Observer = d
		b.Halt = true
		b.run()
		d.told()
		b.set(func() { b.sink.poison["p"] = true })
		b.source.commit("p")
		_, err := b.ended()
		if event.ClassOf(err) != event.Halted {
			b.Fatalf("got %v", err)
		}
		if got, want := d.told(), []string{fmt.Sprintf("waiting %q", err), fmt.Sprintf("stopped %q", err)}; !slices.Equal(got, want) {
			b.Errorf("got %q, want %q", got, want)
		}
	})
}

func TestTicksTellWhatTheLoopIsAt(t *testing.T) {
	story(t, func(b *bench) {
		d := &diary{}
		b.Observer = d
		b.window = 2
		b.run()
		want := func(want Tick) {
			b.Helper()
			b.after(tick)
			if got := d.last(); got != want {
				b.Errorf("got %+v, want %+v", got, want)
			}
		}
		want(Tick{Activity: Reading, Recorded: 100})
		beat := b.source.beat()
		b.after(tick) // by then it is recorded
		want(Tick{Activity: Reading, Received: beat, Recorded: beat})
		end := b.source.commit("a", "b", "c")
		want(Tick{Activity: Settling, Received: beat, Recorded: beat})
		b.sink.ack(1)
		want(Tick{Activity: Settling, Received: beat, Recorded: beat, Settled: 1})
		b.sink.ack(2)
		b.after(tick)
		want(Tick{Activity: Reading, Received: end, Recorded: end, Settled: 3})

		gate := make(chan struct{})
		b.set(func() { b.sink.appending = gate })
		b.source.commit("d")
		want(Tick{Activity: Working, Received: end, Recorded: end, Settled: 3})
		close(gate)
		b.after(0)
		b.sink.ack(1)
	})
}
