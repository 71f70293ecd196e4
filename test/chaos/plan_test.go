package chaos

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// plan is all that a seed decides.
type plan struct {
	seed     uint64
	replicas int    // of the stream: one server, or a cluster of three
	relays   int    // on the one slot
	mode     string // --publish-mode

	window, rows, padding, rate int
	status, ack, walSender      time.Duration
	backoff                     time.Duration // longest
	store                       int64         // bytes that a broker has for all its streams; 0 for plenty

	length time.Duration // of the time in which faults begin
	steps  []step
}

// step is one fault of a plan.
type step struct {
	at, hold time.Duration
	fault    *fault
	relay    int           // which one, and its links
	choice   uint64        // whatever else the fault has to choose
	also     time.Duration // beyond hold, where a fault has two parts
}

func pick[T any](rng *rand.Rand, from ...T) T { return from[rng.IntN(len(from))] }

func between(rng *rand.Rand, low, high time.Duration) time.Duration {
	return low + time.Duration(rng.Int64N(int64(high-low)+1))
}

// newPlan makes the same faults in each mode.
func newPlan(seed uint64, replicas int, mode string) *plan {
	rng := rand.New(rand.NewPCG(seed, uint64(replicas)))
	p := &plan{
		seed: seed, replicas: replicas, mode: mode,
		relays:    pick(rng, 1, 1, 2),
		window:    pick(rng, 1, 16, 128, 2048),
		rows:      pick(rng, 1, 5, 40),
		padding:   pick(rng, 10, 200, 2000),
		rate:      pick(rng, 50, 200, 600),
		status:    pick(rng, 50*time.Millisecond, 200*time.Millisecond, time.Second),
		ack:       pick(rng, 500*time.Millisecond, time.Second, 2*time.Second),
		walSender: pick(rng, 3*time.Second, 3500*time.Millisecond),
		backoff:   pick(rng, 300*time.Millisecond, time.Second),
		length:    between(rng, 2*time.Second, 3500*time.Millisecond),
	}
	if p.window == 1 {
		p.rate, p.rows = 50, min(p.rows, 5) // each event takes a round trip
	}
	var able []*fault
	for _, f := range faults {
		if (f.replicas == 0 || f.replicas == replicas) && f.relays <= p.relays {
			able = append(able, f)
		}
	}
	for range 3 + rng.IntN(5) {
		s := step{
			at:     between(rng, 0, p.length),
			fault:  pick(rng, able...),
			relay:  rng.IntN(p.relays),
			choice: rng.Uint64(),
		}
		s.hold = s.fault.hold(p, rng)
		s.also = between(rng, 0, 500*time.Millisecond)
		p.steps = append(p.steps, s)
	}
	slices.SortFunc(p.steps, func(a, b step) int { return int(a.at - b.at) })
	return p
}

func (p *plan) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: mode=%s replicas=%d relays=%d window=%d rows=%d padding=%d rate=%d status=%s ack=%s wal_sender=%s backoff=%s",
		p.seed, p.mode, p.replicas, p.relays, p.window, p.rows, p.padding, p.rate, p.status, p.ack, p.walSender, p.backoff)
	for _, s := range p.steps {
		fmt.Fprintf(&b, "\n  %6s for %6s  %s", s.at.Round(time.Millisecond), s.hold.Round(time.Millisecond), s.fault.name)
		if s.fault.ofRelay {
			fmt.Fprintf(&b, " of relay%d", s.relay)
		}
	}
	return b.String()
}

// again is the command that repeats the schedule.
func (p *plan) again() string {
	return fmt.Sprintf("make chaos SEED=%d N=1 REPLICAS=%d MODE=%s", p.seed, p.replicas, p.mode)
}
