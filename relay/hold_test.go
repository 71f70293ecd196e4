package relay

import (
	"slices"
	"testing"
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
