package relay

import (
	"slices"
	"time"

	"github.com/walrelay/walrelay/event"
)

// hold keeps recorded places back until they are old enough to be confirmed.
//
// It goes from session to session: a relay that loses its broker more often
// than once a delay would never confirm anything otherwise. What an earlier
// session held is good again as soon as this one has read and settled that far.
type hold struct {
	delay   time.Duration
	origin  event.Origin
	queue   []held // oldest first
	earlier []held // of earlier sessions, oldest first
}

// held is a place that is settled and recorded since a time.
type held struct {
	confirm  event.LSN
	position event.Position
	since    time.Time
}

// historySpan is the number of checkpoints that are written within a confirm
// delay at most. The sink keeps twice as many, so that its history always
// reaches back to one that covers everything confirmed.
const historySpan = 32

// recordInterval is the time between two checkpoints. It bounds hold, too.
func recordInterval(delay, status time.Duration) time.Duration {
	if d := delay / historySpan; d > status {
		return d
	}
	return 0 // every tick
}

// resume begins a session that goes on after a position. What lies behind it
// was forgotten by the sink, and what was held of another log says nothing.
// Short sessions leave many places, so those that are close together in time
// are thinned out.
func (h *hold) resume(o event.Origin, after event.Position) {
	all := slices.Concat(h.queue, h.earlier)
	if h.origin.SystemID != o.SystemID || h.origin.Timeline != o.Timeline {
		all = nil
	}
	h.origin, h.queue, h.earlier = o, nil, nil
	for i, e := range all {
		if e.position.Compare(after) > 0 {
			break
		}
		if n := len(h.earlier); n > 0 && i+1 < len(all) && all[i+1].since.Sub(h.earlier[n-1].since) < h.delay/historySpan {
			continue
		}
		h.earlier = append(h.earlier, e)
	}
}

// add holds a checkpoint that has just been recorded.
func (h *hold) add(c event.Checkpoint, now time.Time) {
	for len(h.earlier) > 0 && h.earlier[0].confirm <= c.Confirm {
		h.queue = append(h.queue, h.earlier[0])
		h.earlier = h.earlier[1:]
	}
	if n := len(h.queue); n > 0 && h.queue[n-1].confirm == c.Confirm {
		return
	}
	since := now
	if len(h.earlier) > 0 {
		since = h.earlier[0].since // by then it was settled before
	}
	h.queue = append(h.queue, held{c.Confirm, c.Position, since})
}

// due removes what was held for the delay, and returns the newest of it; 0 when there is none.
func (h *hold) due(now time.Time) event.LSN {
	var confirm event.LSN
	for len(h.queue) > 0 && now.Sub(h.queue[0].since) >= h.delay {
		confirm = h.queue[0].confirm
		h.queue = h.queue[1:]
	}
	return confirm
}
