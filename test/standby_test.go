package test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// crew is several relays on one slot, the one of the rig among them.
type crew struct {
	*rig
	relays []*harness.Relay
}

func newCrew(t *testing.T, n int, args ...string) *crew {
	t.Helper()
	c := &crew{rig: newRig(t, rigOptions{args: append([]string{"--status-interval", "200ms"}, args...)})}
	c.relays = []*harness.Relay{c.relay}
	for len(c.relays) < n {
		c.relays = append(c.relays, harness.NewRelay(t, c.relay.Args...))
	}
	c.relay.MustStart(t)
	c.relay.MustAwait(t, 20*time.Second, "streaming")
	for _, r := range c.relays[1:] {
		r.MustStart(t)
		r.MustAwait(t, 20*time.Second, "standing by")
	}
	return c
}

// active is the relay that holds the slot, nil when none does.
func (c *crew) active() *harness.Relay {
	i := slices.IndexFunc(c.relays, func(r *harness.Relay) bool {
		return r.Running() && times(r, "msg=streaming") > times(r, "session ended")
	})
	if i < 0 {
		return nil
	}
	return c.relays[i]
}

func times(r *harness.Relay, text string) int { return strings.Count(r.Output(), text) }

// takenOver blocks until another relay than old streams, and returns it.
func (c *crew) takenOver(old *harness.Relay, limit time.Duration) *harness.Relay {
	c.t.Helper()
	var now *harness.Relay
	before := map[*harness.Relay]int{}
	for _, r := range c.relays {
		before[r] = times(r, "msg=streaming")
	}
	begin := time.Now()
	c.await(20*time.Second, "another relay streams", func() bool {
		for _, r := range c.relays {
			if r != old && r.Running() && times(r, "msg=streaming") > before[r] {
				now = r
				return true
			}
		}
		return false
	})
	took := time.Since(begin)
	c.t.Logf("taken over after %s", took.Round(time.Millisecond))
	if took > limit {
		c.t.Errorf("taken over after %s, want %s at most", took, limit)
	}
	return now
}

func TestStandbyRelayTakesOver(t *testing.T) {
	const senderTimeout = 3 * time.Second
	for _, c := range []struct {
		name   string
		frozen bool
		poison bool // an event is parked right before
		limit  time.Duration
	}{
		{name: "killed", limit: 2 * time.Second},
		{name: "killed right after parking", poison: true, limit: 2 * time.Second},
		{name: "frozen", frozen: true, limit: senderTimeout + 2*time.Second},
		{name: "frozen right after parking", frozen: true, poison: true, limit: senderTimeout + 2*time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newCrew(t, 3, "--wal-sender-timeout", senderTimeout.String())
			ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Rate: 300, Seed: 12})
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			writing := in(func() error { return ws.Run(ctx, -1) })
			poisons := 0
			for range 2 {
				at := r.active()
				if at == nil {
					t.Fatal("no relay is active")
				}
				n := ws.Diary.Committed()
				wait, cancel := context.WithTimeout(ctx, 20*time.Second)
				defer cancel()
				must(t, ws.Diary.Await(wait, n+300))
				if c.poison {
					parked := times(at, "parked an event")
					r.exec("insert into outbox (id, aggregate_type, aggregate_id, event_type, payload) values (gen_random_uuid(), 'order', 'p', 'large', to_jsonb(repeat('x', 2000000)))")
					poisons++
					r.await(20*time.Second, "the event is parked", func() bool { return times(at, "parked an event") > parked })
				}
				if c.frozen {
					at.Freeze()
				} else {
					must(t, at.Kill())
				}
				r.takenOver(at, c.limit)
				must(t, ws.Diary.Await(wait, ws.Diary.Committed()+300))
				if c.frozen {
					at.Thaw()
					at.MustAwait(t, 20*time.Second, "standing by")
				} else {
					at.MustStart(t)
					at.MustAwait(t, 20*time.Second, "standing by")
				}
			}
			stop()
			must(t, writing())
			r.settled(30 * time.Second)
			own := slices.DeleteFunc(r.read(), func(m harness.Stored) bool { return m.Marker() })
			res := harness.Compare(ws.Diary, own)
			t.Log(res)
			if !res.OK() {
				t.Error("stream and table disagree")
			}
			if markers := len(r.read()) - len(own); markers != poisons {
				t.Errorf("%d markers, want %d", markers, poisons)
			}
		})
	}
}

// A relay that stands by says so once and asks a few times a second.
func TestStandbyRelayIsQuiet(t *testing.T) {
	t.Parallel()
	const watched = 6 * time.Second
	r := newCrew(t, 2, "--log-level", "debug")
	refused := func() int { return strings.Count(r.pg.Log(), "is active for PID") }
	lines, before, begin := times(r.relays[1], "standing by"), refused(), time.Now()
	r.await(20*time.Second, "time has passed", func() bool { return time.Since(begin) > watched })
	if got := times(r.relays[1], "standing by"); got != lines || lines != 1 {
		t.Errorf("said %d times that it stands by, want once", got)
	}
	tries := refused() - before
	t.Logf("%d tries in %s", tries, watched)
	if tries < 4 || tries > 5*int(watched/time.Second) {
		t.Errorf("%d tries in %s, want a few a second", tries, watched)
	}
	if r.active() != r.relays[0] {
		t.Error("the active relay was disturbed")
	}
}
