package metrics

import (
	"time"

	"github.com/walrelay/walrelay/event"
)

// Trend knows the last samples of a slot, and tells from them how fast things
// go and where they lead. The zero value is ready. One goroutine uses it.
type Trend struct {
	points []point // oldest first
}

// point is what was so at one moment.
type point struct {
	at        time.Time
	walEnd    event.LSN
	confirmed event.LSN
	safe      *int64
	published uint64
}

const (
	// trendSpan is how far back a Trend looks.
	trendSpan = time.Minute
	// paceSpan is the time over which what comes and goes quickly is averaged.
	paceSpan = 10 * time.Second
	// trendPoints bounds what is kept when samples come faster than expected.
	trendPoints = 128
)

// Add takes a sample, and how many events were stored by then.
func (t *Trend) Add(s Sample, published uint64) {
	if n := len(t.points); n > 0 {
		last := t.points[n-1]
		// Another server has another log, another process counts anew.
		if s.WALEnd < last.walEnd || s.Confirmed < last.confirmed || published < last.published || !s.At.After(last.at) {
			t.points = t.points[:0]
		}
	}
	drop := 0
	for drop < len(t.points) && (s.At.Sub(t.points[drop].at) > trendSpan || len(t.points)-drop >= trendPoints) {
		drop++
	}
	t.points = append(t.points[drop:], point{s.At, s.WALEnd, s.Confirmed, s.SafeBytes, published})
}

// Estimate is where things lead. A field is nil when nothing can be said.
type Estimate struct {
	EventsPerSecond *float64 `json:"events_per_second"`    // that were stored
	WALPerSecond    *float64 `json:"wal_bytes_per_second"` // that Postgres writes
	DrainSeconds    *float64 `json:"drain_seconds"`        // until everything is confirmed; 0 when it is, null while the lag does not shrink
	LossSeconds     *float64 `json:"loss_seconds"`         // until the slot may be lost; null while it does not come nearer
}

// Estimate tells what the samples of the last seconds lead to.
func (t *Trend) Estimate() Estimate {
	var e Estimate
	if len(t.points) == 0 {
		return e
	}
	last := t.points[len(t.points)-1]
	lag := float64(last.walEnd) - float64(last.confirmed)
	if lag <= 0 {
		e.DrainSeconds = new(float64)
	}
	if p, ok := t.before(last, paceSpan); ok {
		seconds := last.at.Sub(p.at).Seconds()
		events := float64(last.published-p.published) / seconds
		written := float64(last.walEnd-p.walEnd) / seconds
		e.EventsPerSecond, e.WALPerSecond = &events, &written
		if shrinks := float64(last.confirmed-p.confirmed)/seconds - written; lag > 0 && shrinks > 0 {
			left := lag / shrinks
			e.DrainSeconds = &left
		}
	}
	// Checkpoints and restart_lsn move by leaps, so this looks further back.
	if p, ok := t.before(last, trendSpan); ok && last.safe != nil && p.safe != nil {
		if *last.safe <= 0 {
			e.LossSeconds = new(float64)
		} else if shrinks := float64(*p.safe-*last.safe) / last.at.Sub(p.at).Seconds(); shrinks > 0 {
			left := float64(*last.safe) / shrinks
			e.LossSeconds = &left
		}
	}
	return e
}

// before is the oldest point within a span before last. It is false when there
// is none but last itself.
func (t *Trend) before(last point, span time.Duration) (point, bool) {
	for _, p := range t.points[:len(t.points)-1] {
		if last.at.Sub(p.at) <= span {
			return p, true
		}
	}
	return point{}, false
}
