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
		// Every place before a good one is good, whether or not a transaction ends there.
		for _, lsn := range []event.LSN{end - 50, end, end + 1000} {
			seen.Store(uint64(lsn))
			b.after(2 * tick)
			if got, want := b.source.last(), min(lsn, end); got != want {
				t.Errorf("vouched for up to %s: confirmed %s, want %s", lsn, got, want)
			}
		}
	})
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
