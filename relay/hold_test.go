package relay

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
)

func checkpointAt(n int) event.Checkpoint {
	lsn := event.LSN(n)
	return event.Checkpoint{Confirm: lsn, Position: event.Position{Timeline: 1, Commit: lsn, Change: lsn}}
}

func TestHoldGoesFromSessionToSession(t *testing.T) {
	const delay = time.Minute
	origin := event.Origin{SystemID: "1", Timeline: 1}
	start := time.Now()
	at := func(s int) time.Time { return start.Add(time.Duration(s) * time.Second) }
	held := func() *hold {
		h := &hold{delay: delay}
		h.resume(origin, event.Position{})
		h.add(checkpointAt(10), at(0))
		h.add(checkpointAt(20), at(10))
		h.add(checkpointAt(30), at(20))
		return h
	}
	due := func(h *hold, seconds ...int) (got []int) {
		for _, s := range seconds {
			got = append(got, int(h.due(at(s))))
		}
		return got
	}
	later := origin
	later.Timeline = 2
	for _, c := range []struct {
		name   string
		origin event.Origin
		after  int
		read   []int // confirmable LSNs that the next session records, at 50 s
		want   []int // due at 59, 60, 70, 80, 109 and 110 s
	}{
		{"all is settled again at once", origin, 30, []int{40}, []int{0, 10, 20, 30, 0, 40}},
		{"what was not read yet waits", origin, 30, []int{20}, []int{0, 10, 20, 0, 0, 0}},
		{"a place between two is as old as the later one", origin, 30, []int{15}, []int{0, 10, 15, 0, 0, 0}},
		{"the sink forgot the last two", origin, 10, []int{30}, []int{0, 10, 0, 0, 0, 30}},
		{"another history", later, 30, []int{30}, []int{0, 0, 0, 0, 0, 30}},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := held()
			h.resume(c.origin, checkpointAt(c.after).Position)
			for _, lsn := range c.read {
				h.add(checkpointAt(lsn), at(50))
			}
			if got := due(h, 59, 60, 70, 80, 109, 110); !slices.Equal(got, c.want) {
				t.Errorf("due %v, want %v", got, c.want)
			}
		})
	}
}

func TestHoldIsBounded(t *testing.T) {
	h := &hold{delay: time.Hour}
	now := time.Now()
	confirmed := 0
	for i := range 20_000 { // sessions of a second
		now = now.Add(time.Second)
		h.resume(event.Origin{}, checkpointAt(i).Position)
		h.add(checkpointAt(i+1), now)
		if lsn := int(h.due(now)); lsn != 0 {
			confirmed = lsn
		}
		if i > 4000 && (confirmed < i-3600-2*3600/historySpan || confirmed > i+1-3600) {
			t.Fatalf("confirmed %d after %d s, want what is an hour old", confirmed, i)
		}
		if n := len(h.queue) + len(h.earlier); n > 2*historySpan+2 {
			t.Fatalf("%d places held after %d sessions", n, i+1)
		}
	}
}

func TestNoPlaceIsHeldWithoutDelay(t *testing.T) {
	h := &hold{}
	now := time.Now()
	h.add(checkpointAt(5), now)
	if got := h.due(now); got != 5 || len(h.queue) != 0 {
		t.Errorf("due %s with %d held, want 0/5 and none", got, len(h.queue))
	}
}

// slow is a source and a sink of which a test needs the end of the way only.
type slow struct {
	Source
	Sink
	recorded  []event.Checkpoint
	confirmed []event.LSN
}

func (s *slow) Settled() uint64 { return 0 }
func (s *slow) Close() error    { return nil }

func (s *slow) Checkpoint(_ context.Context, c event.Checkpoint) error {
	s.recorded = append(s.recorded, c)
	return nil
}

func (s *slow) Confirm(lsn event.LSN) error {
	s.confirmed = append(s.confirmed, lsn)
	return nil
}

// The sink keeps 64 checkpoints. They have to reach back to one that covers
// what is confirmed.
func TestCheckpointsSpanTheConfirmDelay(t *testing.T) {
	for _, delay := range []time.Duration{0, time.Second, 30 * time.Second, 5 * time.Minute} {
		t.Run(delay.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				x := &slow{}
				s := &session{o: &Options{ConfirmDelay: delay, StatusInterval: time.Second}, source: x, sink: x, hold: hold{delay: delay}}
				start := time.Now()
				for i := 1; i <= 1000; i++ {
					<-time.After(time.Second) // of the bubble's clock
					s.ledger.add(event.Checkpoint{Confirm: event.LSN(i)}, 0)
					if err := s.settle(t.Context(), false); err != nil {
						t.Fatal(err)
					}
					confirmed := int(x.confirmed[i-1])
					if age := time.Since(start) - time.Duration(confirmed)*time.Second; confirmed > 0 && (age < delay || age > delay+delay/historySpan+2*time.Second) {
						t.Fatalf("at %s confirmed what is %s old", time.Since(start), age)
					}
					if past := x.recorded[max(len(x.recorded)-64, 0)]; len(x.recorded) > 64 && int(past.Confirm) > confirmed {
						t.Fatalf("at %s the oldest checkpoint has %d, confirmed is %d", time.Since(start), past.Confirm, confirmed)
					}
					if n := len(s.hold.queue); n > historySpan+1 {
						t.Fatalf("%d places held", n)
					}
				}
				if got := x.confirmed[999]; got == 0 {
					t.Fatal("nothing confirmed")
				}
				if err := s.settle(t.Context(), true); err != nil {
					t.Fatal(err)
				}
				if got := x.recorded[len(x.recorded)-1].Confirm; got != 1000 {
					t.Errorf("the last settle recorded %d, want 1000", got)
				}
			})
		})
	}
}
