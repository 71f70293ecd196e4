package relay

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestNothingIsConfirmedThatNobodyVouchesFor(t *testing.T) {
	story(t, func(b *bench) {
		var seen atomic.Uint64
		b.Vouch = func(context.Context) (event.LSN, error) { return event.LSN(seen.Load()), nil }
		b.run()
		b.source.commit("a", "b")
		end := b.source.commit("c")
		b.sink.ack(3)
		b.after(3 * tick)
		if got := b.source.last(); got != 100 {
			t.Errorf("confirmed %s, want 0/64", got)
		}
		// What lies before the end of a transaction may lie within a record.
		for _, c := range []struct{ vouched, want event.LSN }{{end - 1, 100}, {end, end}, {end + 1000, end}} {
			seen.Store(uint64(c.vouched))
			b.after(2 * tick)
			if got := b.source.last(); got != c.want {
				t.Errorf("vouched for up to %s: confirmed %s, want %s", c.vouched, got, c.want)
			}
		}
	})
}

// On a busy server the newest end is always ahead of the last look.
func TestBoundaryGivesEndsOnlyAndGetsOn(t *testing.T) {
	var b boundary
	ends := map[event.LSN]bool{}
	last := event.LSN(0)
	for i := range event.LSN(1000) {
		end := 100 * (i + 1)
		ends[end] = true
		b.add(event.Checkpoint{Confirm: end})
		good := event.LSN(0)
		if i > 1 {
			good = end - 130 // of a look a tick ago, within a record
		}
		if c := b.good(good).Confirm; c != 0 {
			if !ends[c] || c > good || c < last {
				t.Fatalf("gave %s after %s with the WAL good up to %s", c, last, good)
			}
			last = c
		}
		if i > 10 && end-last > 500 {
			t.Fatalf("%s is settled, and the last given is %s", end, last)
		}
	}
	if c := b.good(^event.LSN(0)).Confirm; c != 100_000 {
		t.Errorf("in the end gave %s", c)
	}
}

func TestRelayStopsWhenATableIsNotSent(t *testing.T) {
	story(t, func(b *bench) {
		var bad atomic.Bool
		b.Vouch = func(context.Context) (event.LSN, error) {
			if bad.Load() {
				return 0, event.Fail(event.Precondition, "add it", "table is not published")
			}
			return 100, nil
		}
		b.run()
		b.after(tick)
		bad.Store(true)
		b.source.commit("a")
		b.sink.ack(1)
		b.after(2 * tick)
		select {
		case err := <-b.result:
			if event.ClassOf(err) != event.Precondition || b.source.last() != 100 {
				t.Errorf("ended with %v, confirmed %s", err, b.source.last())
			}
		default:
			t.Error("the relay goes on")
		}
	})
}

// A look that fails says nothing.
func TestLooksMayFail(t *testing.T) {
	story(t, func(b *bench) {
		var blind atomic.Bool
		blind.Store(true)
		b.Vouch = func(context.Context) (event.LSN, error) {
			if blind.Load() {
				return 0, errors.New("no connection")
			}
			return ^event.LSN(0), nil
		}
		b.run()
		end := b.source.commit("a")
		b.sink.ack(1)
		b.after(40 * tick)
		if got := b.source.last(); got != 100 {
			t.Errorf("confirmed %s, want 0/64", got)
		}
		blind.Store(false)
		b.after(2 * tick)
		if got := b.source.last(); got != end {
			t.Errorf("confirmed %s, want %s", got, end)
		}
	})
}
