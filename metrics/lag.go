package metrics

import (
	"time"

	"github.com/walrelay/walrelay/event"
)

// Sample is the slot as Postgres shows it at one moment.
type Sample struct {
	At            time.Time // by the clock of this machine
	WALEnd        event.LSN
	Confirmed     event.LSN
	LagBytes      int64
	RetainedBytes int64
	SafeBytes     *int64 // until the slot may be lost; nil without a limit
	Active        bool
	WALStatus     string
}

// Statuses are the values of Sample.WALStatus, as in pg_replication_slots.
var Statuses = []string{"reserved", "extended", "unreserved", "lost"}

// The bases of a lag in seconds.
const (
	// basisEvent: the age of the oldest event that was received and is not
	// stored, or none is.
	basisEvent = "event"
	// basisWAL: the age of the oldest log that was not received or confirmed,
	// whether or not there is an event in it.
	basisWAL = "wal"
)

// history knows when the log had come how far.
type history struct {
	marks []mark // the log at end was there since at; both grow
}

type mark struct {
	at  time.Time
	end event.LSN
}

// historyLimit bounds the marks. Beyond, neighbours are joined.
const historyLimit = 1024

// add takes a sample, of which everything up to done need not be known any more.
func (h *history) add(at time.Time, end, done event.LSN) {
	n := len(h.marks)
	if n > 0 && end < h.marks[n-1].end {
		h.marks = h.marks[:0] // another server, with another log
		n = 0
	}
	if n > 0 && end == h.marks[n-1].end {
		return
	}
	drop := 0
	for drop < n && h.marks[drop].end <= done {
		drop++
	}
	h.marks = append(h.marks[drop:], mark{at, end})
	if len(h.marks) > historyLimit {
		// The earlier time with the later end: the age stays an upper bound.
		joined := h.marks[:0]
		for i := 0; i+1 < len(h.marks); i += 2 {
			joined = append(joined, mark{h.marks[i].at, h.marks[i+1].end})
		}
		if len(h.marks)%2 == 1 {
			joined = append(joined, h.marks[len(h.marks)-1])
		}
		h.marks = joined
	}
}

// since is when the first log after lsn was seen; zero when there is none.
func (h *history) since(lsn event.LSN) time.Time {
	for _, m := range h.marks {
		if m.end > lsn {
			return m.at
		}
	}
	return time.Time{}
}

// lagState is all that the lag in seconds is made of.
type lagState struct {
	streaming bool
	inFlight  uint64
	oldest    time.Time // commit of the first event in flight; zero when unknown
	received  event.LSN // by the session
	recorded  event.LSN // stored and recorded, by any session of this process
	sample    *Sample   // nil when the last read failed
	history   *history
	grace     time.Duration // after which a streaming session should have received what is there
}

// seconds is how far the relay is behind, and on what basis. It is false when
// nothing is known that is not old.
func (l lagState) seconds(now time.Time) (lag time.Duration, basis string, ok bool) {
	age := func(since time.Time) time.Duration {
		if since.IsZero() {
			return 0
		}
		return max(now.Sub(since), 0)
	}
	if l.streaming && l.inFlight > 0 {
		return age(l.oldest), basisEvent, true
	}
	if l.sample == nil {
		return 0, "", false
	}
	done := l.sample.Confirmed
	if l.recorded <= l.sample.WALEnd { // or else another server has taken over
		done = max(done, l.recorded)
	}
	if l.streaming {
		// The server sends the end of its log at once also when there is no event in it.
		if unread := age(l.history.since(max(l.received, done))); unread > l.grace {
			return unread, basisWAL, true
		}
		return 0, basisEvent, true
	}
	return age(l.history.since(done)), basisWAL, true
}
