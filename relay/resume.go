package relay

import (
	"errors"
	"fmt"
	"strings"

	"github.com/walrelay/walrelay/event"
)

// errDiverged ends a session on another server than the one that was read
// before, when an operator accepts that. The next session starts afresh.
var errDiverged = errors.New("going on with another server, as accepted")

// resumer drops what the stream holds already when a session starts.
type resumer struct {
	event.Resume
	origin event.Origin
	proven bool // Proof has reappeared
	met    bool // the event of AfterID has
	passed bool // an event after Resume.After was seen
}

func newResumer(r event.Resume, o event.Origin) resumer {
	return resumer{Resume: r, origin: o, proven: r.Proof == nil, met: r.AfterID == ""}
}

// stored reports whether the event at pos lies at or before the last stored
// position.
func (r *resumer) stored(pos event.Position) bool {
	if r.passed {
		return false
	}
	if pos.Compare(r.After) <= 0 {
		return true
	}
	r.passed = true
	return false
}

// later reports whether rec and all that follows was committed after the session
// began, so that no earlier session can have published it.
func (r *resumer) later(rec *event.Record) bool {
	return max(rec.Confirm, rec.Position.Commit) >= r.origin.WALEnd
}

// sound reports whether all that has to reappear has, and which events are stored is
// known. Nothing may be confirmed before.
func (r *resumer) sound() bool { return r.proven && r.met && r.Gone == 0 }

// check looks for what has to reappear.
func (r *resumer) check(rec *event.Record) error {
	if err := r.prove(rec); err != nil {
		return err
	}
	return r.expect(rec)
}

// expect fails when the log has passed the place of the last stored event
// without an event there.
func (r *resumer) expect(rec *event.Record) error {
	if r.met {
		return nil
	}
	at := rec.Position
	switch rec.Kind {
	case event.Keepalive:
		if rec.Confirm <= r.After.Commit {
			return nil
		}
	case event.Commit:
		at.Change = ^event.LSN(0) // behind every event of the transaction
		fallthrough
	default:
		if at.Compare(r.After) <= 0 {
			return nil
		}
	}
	return r.missed("the log passes it without it")
}

// ask reports whether the event at pos is the one of AfterID, by its place.
func (r *resumer) ask(pos event.Position) bool { return !r.met && pos == r.After }

// recognise compares that event's id. A header keeps no spaces at its ends.
func (r *resumer) recognise(id []byte) error {
	if strings.TrimSpace(string(id)) != strings.TrimSpace(r.AfterID) {
		return r.missed("another event is in its place")
	}
	r.met = true
	return nil
}

func (r *resumer) missed(how string) error {
	return r.another("the stream's last event %.100q, LSN %s, is not in the server's log: %s", r.AfterID, r.After.Commit, how)
}

// prove looks for the transaction of Proof.
func (r *resumer) prove(rec *event.Record) error {
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
	return r.another("the last checkpoint's transaction %d, committed at %s, LSN %s, is not in the server's log: %s",
		p.XID, p.CommitTime.UTC().Format("2006-01-02T15:04:05.000000Z"), p.Position.Commit, how)
}

func (r *resumer) another(format string, args ...any) error {
	if r.AcceptGap {
		return fmt.Errorf("%w: "+format, append([]any{errDiverged}, args...)...)
	}
	return event.Fail(event.Lost,
		"this server was restored or is not the one that was read before; compare table and stream, then go on with --accept-gap",
		format, args...)
}
