package relay

import (
	"math/rand/v2"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func entryOf(events uint64, confirm event.LSN) event.Checkpoint {
	return event.Checkpoint{Events: events, Confirm: confirm}
}

func TestLedgerGivesTheSettledFront(t *testing.T) {
	var l ledger
	if c, ok := l.take(9); ok {
		t.Fatalf("an empty ledger gave %+v", c)
	}
	l.add(entryOf(0, 10), 0)
	l.add(entryOf(2, 20), 0)
	l.add(entryOf(3, 30), 0)
	for _, step := range []struct {
		settled uint64
		want    event.LSN // 0: nothing new
	}{{0, 10}, {0, 0}, {1, 0}, {3, 30}, {3, 0}, {9, 0}} {
		c, ok := l.take(step.settled)
		if ok != (step.want != 0) || c.Confirm != step.want {
			t.Errorf("with %d settled: got %s, want %s", step.settled, c.Confirm, step.want)
		}
	}
}

func TestLedgerJoinsEntriesOfTheSameEvents(t *testing.T) {
	var l ledger
	l.add(entryOf(1, 10), 0)
	l.add(entryOf(1, 30), 0)
	l.add(entryOf(1, 20), 0) // of a keepalive that lags
	if len(l.queue) != 1 {
		t.Errorf("%d entries, want 1", len(l.queue))
	}
	if c, _ := l.take(1); c.Confirm != 30 {
		t.Errorf("got %s, want 0/1E", c.Confirm)
	}
	l.add(entryOf(1, 40), 1) // the queue is empty now: a new entry
	if c, ok := l.take(1); !ok || c.Confirm != 40 {
		t.Errorf("got %s %v, want 0/28", c.Confirm, ok)
	}
}

// Between two ticks, hundreds of thousands of transactions may pass.
func TestLedgerKeepsNoMoreThanIsInFlight(t *testing.T) {
	var l ledger
	const inFlight = 10
	for i := range uint64(100_000) {
		settled := uint64(0)
		if i > inFlight {
			settled = i - inFlight
		}
		l.add(entryOf(i, event.LSN(i+1)), settled)
		if n := len(l.queue) - l.head; n > inFlight+2 {
			t.Fatalf("%d entries with %d in flight", n, inFlight)
		}
	}
	if cap(l.queue) > 16*inFlight {
		t.Errorf("room for %d entries with %d in flight", cap(l.queue), inFlight)
	}
	if c, ok := l.take(99_990); !ok || c.Events != 99_990 || c.Confirm != 99_991 {
		t.Errorf("got %+v", c)
	}
}

// TestLedgerAgainstAList compares it with a list that forgets nothing.
func TestLedgerAgainstAList(t *testing.T) {
	for seed := range uint64(300) {
		d := rand.New(rand.NewPCG(seed, 1))
		var l ledger
		var list []event.Checkpoint
		var events, settled uint64
		var lsn, given event.LSN
		for range 200 {
			switch d.IntN(3) {
			case 0:
				events += d.Uint64N(4)
				lsn += 1 + event.LSN(d.IntN(5))
				l.add(entryOf(events, lsn), settled)
				list = append(list, entryOf(events, lsn))
			case 1:
				settled = min(events, settled+d.Uint64N(6))
			case 2:
				want := given
				for _, c := range list {
					if c.Events <= settled {
						want = max(want, c.Confirm)
					}
				}
				if c, ok := l.take(settled); ok {
					given = c.Confirm
				}
				if given != want {
					t.Fatalf("seed %d: %d of %d settled: got %s, want %s", seed, settled, events, given, want)
				}
			}
		}
	}
}
