package relay

import (
	"github.com/walrelay/walrelay/event"
)

// resumer drops what the stream holds already when a session starts.
type resumer struct {
	event.Resume
	origin  event.Origin
	proven  bool
	skipped uint64 // events counted off
	dropped uint64 // events dropped by position
	passed  bool   // an event after Resume.After was seen
}

func newResumer(r event.Resume, o event.Origin) resumer {
	return resumer{Resume: r, origin: o, proven: r.Proof == nil}
}

// stored reports whether the event at pos lies at or before the last stored
// position.
func (r *resumer) stored(pos event.Position) bool {
	if r.passed {
		return false
	}
	if pos.Compare(r.After) <= 0 {
		r.dropped++
		return true
	}
	r.passed = true
	return false
}

// count reports whether the next event is one of those that are stored though
// their messages are gone.
func (r *resumer) count() bool {
	if r.skipped < r.Skip {
		r.skipped++
		return true
	}
	return false
}

// check looks for the transaction that has to reappear. Nothing may be
// confirmed before it has.
func (r *resumer) check(rec *event.Record) error {
	if r.proven {
		return nil
	}
	p := r.Proof
	at := rec.Position
	if rec.Kind == event.Keepalive {
		if rec.Confirm <= p.Position.Commit {
			return nil
		}
		return r.diverged("the log passes it without it")
	}
	switch {
	case at.Timeline < p.Position.Timeline, at.Timeline == p.Position.Timeline && at.Commit < p.Position.Commit:
		return nil
	case at.Timeline == p.Position.Timeline && at.Commit == p.Position.Commit:
		if rec.XID == p.XID && rec.CommitTime.Equal(p.CommitTime) {
			r.proven = true
			return nil
		}
		return r.diverged("another transaction is in its place")
	}
	return r.diverged("the log passes it without it")
}

func (r *resumer) diverged(how string) error {
	p := r.Proof
	return event.Fail(event.Lost,
		"this server was restored or is not the one that was read before; compare table and stream, then go on with --accept-gap",
		"the last checkpoint's transaction %d, committed at %s, LSN %s, is not in the server's log: %s",
		p.XID, p.CommitTime.UTC().Format("2006-01-02T15:04:05.000000Z"), p.Position.Commit, how)
}
