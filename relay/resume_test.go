package relay

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

var proofTime = time.Date(2026, 3, 1, 12, 0, 0, 123456000, time.UTC)

func at(timeline uint32, commit event.LSN) event.Position {
	return event.Position{Timeline: timeline, Commit: commit, Change: commit - 1}
}

func TestProofHasToReappear(t *testing.T) {
	proof := &event.Checkpoint{Position: at(2, 500), XID: 77, CommitTime: proofTime}
	row := func(p event.Position, xid uint32, when time.Time) *event.Record {
		return &event.Record{Kind: event.Row, Position: p, XID: xid, CommitTime: when}
	}
	commit := func(p event.Position, xid uint32) *event.Record {
		p.Change = 0
		return &event.Record{Kind: event.Commit, Position: p, XID: xid, CommitTime: proofTime, Confirm: p.Commit + 8}
	}
	message := func(lsn event.LSN) *event.Record {
		return &event.Record{Kind: event.Message, Position: event.Position{Timeline: 2, Commit: lsn, Change: lsn}}
	}
	beat := func(lsn event.LSN) *event.Record { return &event.Record{Kind: event.Keepalive, Confirm: lsn} }

	for _, c := range []struct {
		name    string
		records []*event.Record
		proven  bool
		lost    string // in the error of the last record
	}{
		{name: "nothing yet", records: []*event.Record{beat(400), row(at(2, 450), 76, proofTime), commit(at(2, 450), 76), beat(460)}},
		{name: "keepalive at its commit", records: []*event.Record{beat(500)}},
		{name: "another timeline before it", records: []*event.Record{row(at(1, 700), 9, proofTime)}},
		{name: "message before it", records: []*event.Record{message(499)}},
		{name: "its row", records: []*event.Record{row(at(2, 500), 77, proofTime)}, proven: true},
		{name: "its row in another zone", records: []*event.Record{row(at(2, 500), 77, proofTime.In(time.FixedZone("", 3600)))}, proven: true},
		{name: "its commit alone", records: []*event.Record{commit(at(2, 500), 77)}, proven: true},
		{name: "and what follows", records: []*event.Record{row(at(2, 500), 77, proofTime), row(at(2, 600), 78, proofTime)}, proven: true},
		{name: "another transaction", records: []*event.Record{row(at(2, 500), 78, proofTime)}, lost: "another transaction is in its place"},
		{name: "another time", records: []*event.Record{row(at(2, 500), 77, proofTime.Add(time.Microsecond))}, lost: "another transaction"},
		{name: "a later row", records: []*event.Record{row(at(2, 501), 78, proofTime)}, lost: "passes it"},
		{name: "a later message", records: []*event.Record{message(510)}, lost: "passes it"},
		{name: "a later keepalive", records: []*event.Record{beat(501)}, lost: "passes it"},
		{name: "its LSN on a later timeline", records: []*event.Record{row(at(3, 500), 77, proofTime)}, lost: "passes it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newResumer(event.Resume{After: proof.Position, Proof: proof}, event.Origin{})
			var err error
			for _, rec := range c.records {
				if err != nil {
					t.Fatalf("too early: %v", err)
				}
				err = r.check(rec)
			}
			if r.proven != c.proven {
				t.Errorf("proven %v, want %v", r.proven, c.proven)
			}
			if c.lost == "" {
				if err != nil {
					t.Errorf("got %v", err)
				}
				return
			}
			if event.ClassOf(err) != event.Lost || event.HintOf(err) == "" || !strings.Contains(err.Error(), c.lost) {
				t.Errorf("got %v, want class Lost and %q", err, c.lost)
			}
			if err != nil && !strings.Contains(err.Error(), "transaction 77, committed at 2026-03-01T12:00:00.123456Z, LSN 0/1F4") {
				t.Errorf("%v does not name the transaction", err)
			}
		})
	}
}

func TestLastStoredEventHasToReappear(t *testing.T) {
	after := event.Position{Timeline: 2, Commit: 500, Change: 400, N: 1}
	beat := func(lsn event.LSN) *event.Record { return &event.Record{Kind: event.Keepalive, Confirm: lsn} }
	row := func(p event.Position) *event.Record { return &event.Record{Kind: event.Row, Position: p} }
	commit := func(lsn event.LSN) *event.Record {
		return &event.Record{Kind: event.Commit, Position: event.Position{Timeline: 2, Commit: lsn}}
	}
	for _, c := range []struct {
		name   string
		record *event.Record
		lost   bool
	}{
		{"keepalive before it", beat(500), false},
		{"keepalive behind it", beat(501), true},
		{"earlier row of its transaction", row(event.Position{Timeline: 2, Commit: 500, Change: 400}), false},
		{"its own place", row(after), false},
		{"later row of its transaction", row(event.Position{Timeline: 2, Commit: 500, Change: 400, N: 2}), true},
		{"an earlier commit", commit(400), false},
		{"the commit of its transaction", commit(500), true},
		{"a later commit", commit(600), true},
		{"a row of the timeline before", row(event.Position{Timeline: 1, Commit: 700, Change: 600}), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newResumer(event.Resume{After: after, AfterID: "a"}, event.Origin{})
			if err := r.check(c.record); (err != nil) != c.lost || c.lost && event.ClassOf(err) != event.Lost {
				t.Errorf("got %v, lost should be %v", err, c.lost)
			}
			if r.sound() {
				t.Error("sound without it")
			}
			r.AcceptGap = true
			if err := r.check(c.record); errors.Is(err, errDiverged) != c.lost || event.ClassOf(err) != event.Transient {
				t.Errorf("accepted: got %v", err)
			}
		})
	}
	r := newResumer(event.Resume{After: after, AfterID: "a "}, event.Origin{})
	if r.ask(event.Position{Timeline: 2, Commit: 500, Change: 400}) || !r.ask(after) {
		t.Error("asks for the id of another event")
	}
	if err := r.recognise([]byte("b")); event.ClassOf(err) != event.Lost || r.sound() {
		t.Errorf("another event in its place: got %v", err)
	}
	if err := r.recognise([]byte(" a")); err != nil || !r.sound() {
		t.Errorf("got %v", err)
	}
	if err := r.check(commit(500)); err != nil || r.ask(after) {
		t.Errorf("once it is met: got %v", err)
	}
}

func TestEventsUpToTheLastStoredOneAreDropped(t *testing.T) {
	r := newResumer(event.Resume{After: event.Position{Timeline: 1, Commit: 500, Change: 400, N: 1}}, event.Origin{})
	for _, c := range []struct {
		p    event.Position
		want bool
	}{
		{event.Position{Timeline: 1, Commit: 300, Change: 290}, true},
		{event.Position{Timeline: 1, Commit: 500, Change: 300, N: 9}, true},
		{event.Position{Timeline: 1, Commit: 500, Change: 400}, true},
		{event.Position{Timeline: 1, Commit: 500, Change: 400, N: 1}, true},
		{event.Position{Timeline: 1, Commit: 500, Change: 400, N: 2}, false},
		{event.Position{Timeline: 1, Commit: 510, Change: 100}, false},
	} {
		if got := r.stored(c.p); got != c.want {
			t.Errorf("%s: dropped %v, want %v", c.p, got, c.want)
		}
	}
	fresh := newResumer(event.Resume{}, event.Origin{})
	if fresh.stored(event.Position{Timeline: 1, Commit: 1, Change: 1}) || !fresh.proven {
		t.Error("an empty stream drops events, or asks for a proof")
	}
}

func TestWhatIsLaterThanTheSessionWasNotPublishedBefore(t *testing.T) {
	r := newResumer(event.Resume{Gone: 2}, event.Origin{WALEnd: 500})
	for name, c := range map[string]struct {
		rec  event.Record
		want bool
	}{
		"a row committed before":           {event.Record{Kind: event.Row, Position: event.Position{Timeline: 1, Commit: 499, Change: 400}}, false},
		"a row committed after":            {event.Record{Kind: event.Row, Position: event.Position{Timeline: 1, Commit: 500, Change: 400}}, true},
		"a commit that ends before":        {event.Record{Kind: event.Commit, Position: event.Position{Timeline: 1, Commit: 480}, Confirm: 499}, false},
		"a commit that ends at the end":    {event.Record{Kind: event.Commit, Position: event.Position{Timeline: 1, Commit: 480}, Confirm: 500}, true},
		"a keepalive in the middle":        {event.Record{Kind: event.Keepalive, Confirm: 499}, false},
		"a keepalive at the end":           {event.Record{Kind: event.Keepalive, Confirm: 500}, true},
		"a keepalive within a transaction": {event.Record{Kind: event.Keepalive}, false},
	} {
		if got := r.later(&c.rec); got != c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
	if r.sound() {
		t.Error("events may be confirmed though it is not known which are stored")
	}
}
