package publisher

import (
	"sync/atomic"
	"time"
)

// The window is as large as it has to be, so that a slow broker has few events
// in flight: then little has to be read back and sent again after a failure, and
// little memory is used. As large as it has to be is what the broker stores in a
// round trip, some more so that its rate can be seen to grow, and what it stores
// while this process does not run, since two cores may be busy with other things.
const (
	windowLeast = 16                    // events; more than one, so that they share writes and reads
	windowPause = 25 * time.Millisecond // what the broker has to go on with while this process does not run

	// windowTrips is the number of round trips that fit. Of batches it is
	// more: they have to grow until the broker's cost of one does not count.
	windowTrips      = 2
	windowTripsBatch = 8

	// baseLife is how long the least round trip is believed. What is in flight
	// makes round trips longer, so a session begins with few events, and after
	// that time it lets the window run empty and begins so again.
	baseLife = 10 * time.Second
)

// pace measures rounds, from one send to the ack of its last event, one at a
// time. It reads the clock twice a round.
//
// The appending goroutine opens a round and stores until last; the one that
// reads acks closes it and clears until. Whoever finds until in its hands has
// all the fields of a round.
type pace struct {
	most  uint64 // of the window; 0 leaves it as it is
	trips int    // round trips that the window is for
	start time.Time

	limit atomic.Uint64 // the window now, but for small
	drain atomic.Bool   // it is to run empty once
	full  atomic.Bool   // it was full in this round
	small bool          // the window is windowLeast; of the appending goroutine

	// The round.
	until  atomic.Uint64 // its last event; 0 when none is open
	began  time.Duration // since start
	before uint64        // events that were acked then
	probe  bool          // nothing else is in flight

	// Of the goroutine that reads acks.
	rate   float64       // events a second, the most of late
	base   time.Duration // the least round trip of late; 0 when none was seen
	baseAt time.Duration // when that was
}

func (p *pace) init(most uint64, m Mode) {
	p.limit.Store(most)
	if m == ModeSingle {
		return
	}
	p.most, p.start, p.trips, p.small = most, time.Now(), windowTrips, true
	if m == ModeAtomic {
		p.trips = windowTripsBatch
	}
	p.limit.Store(min(most, windowLeast))
}

// begin opens a round with the send of events up to last, unless one is open.
func (p *pace) begin(before, last, acked uint64) {
	if p.most == 0 || before == last || p.until.Load() != 0 {
		return
	}
	p.began, p.before, p.probe = time.Since(p.start), acked, p.small && acked == before
	p.full.Store(false)
	p.until.Store(last)
}

// end closes the round when its last event is acked.
func (p *pace) end(acked uint64) {
	until := p.until.Load()
	if until == 0 || acked < until {
		return
	}
	now := time.Since(p.start)
	trip := max(now-p.began, time.Microsecond)
	rate := float64(acked-p.before) / trip.Seconds()
	full := p.full.Load()

	first := p.base == 0
	if p.probe || trip < p.base || first {
		p.base, p.baseAt = trip, now
	} else if full && now-p.baseAt > baseLife {
		p.drain.Store(true)
	}
	full = full && !p.probe // otherwise there was no more to send
	if rate > p.rate {
		p.rate = rate
	} else if full {
		p.rate = (p.rate + rate) / 2
	}
	if full || first {
		lasts := time.Duration(p.trips)*p.base + windowPause
		p.limit.Store(min(max(uint64(p.rate*lasts.Seconds()), windowLeast), p.most))
	}
	p.until.Store(0)
}

// emptying reports whether the window is to run empty before it gets room.
func (p *pace) emptying() bool {
	p.full.Store(true)
	return p.small || p.drain.Load()
}

// emptied goes on after the window has run empty: with few events, or after those as usual.
func (p *pace) emptied() {
	p.small = !p.small
	p.drain.Store(false)
}

// room is the window as it is now.
func (s *Session) room() uint64 {
	if s.pace.small {
		return min(windowLeast, s.pace.most)
	}
	if n := s.pace.limit.Load(); n != 0 {
		return n
	}
	return uint64(s.o.Window)
}
