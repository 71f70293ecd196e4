package relay

import (
	"errors"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestLastEventHasToReappear(t *testing.T) {
	after := event.Position{Timeline: 2, Commit: 500, Change: 400, N: 1}
	row := func(commit, change event.LSN, n uint32) *event.Record {
		return &event.Record{Kind: event.Row, Position: event.Position{Timeline: 2, Commit: commit, Change: change, N: n}}
	}
	commit := func(lsn event.LSN) *event.Record {
		return &event.Record{Kind: event.Commit, Position: event.Position{Timeline: 2, Commit: lsn}, Confirm: lsn + 8}
	}
	beat := func(lsn event.LSN) *event.Record { return &event.Record{Kind: event.Keepalive, Confirm: lsn} }

	for _, c := range []struct {
		name    string
		records []*event.Record
		id      string // of the row at the place
		met     bool
		lost    string
	}{
		{name: "nothing yet", records: []*event.Record{beat(400), row(450, 440, 0), commit(450), beat(500), {}}},
		{name: "rows before it", records: []*event.Record{row(500, 300, 5), row(500, 400, 0)}},
		{name: "itself", records: []*event.Record{row(500, 400, 0), row(500, 400, 1), commit(500)}, id: "a", met: true},
		{name: "itself, with spaces that a header loses", records: []*event.Record{row(500, 400, 1)}, id: " a ", met: true},
		{name: "and what follows", records: []*event.Record{row(500, 400, 1), row(500, 400, 2), commit(500), row(600, 590, 0)}, id: "a", met: true},
		{name: "another event", records: []*event.Record{row(500, 400, 1)}, id: "b", lost: "another event is in its place"},
		{name: "an event without id", records: []*event.Record{row(500, 400, 1)}, lost: "another event is in its place"},
		{name: "the next row of the transaction", records: []*event.Record{row(500, 400, 0), row(500, 400, 2)}, lost: "passes it"},
		{name: "the end of the transaction", records: []*event.Record{row(500, 400, 0), commit(500)}, lost: "passes it"},
		{name: "a later transaction", records: []*event.Record{row(510, 300, 0)}, lost: "passes it"},
		{name: "a later commit", records: []*event.Record{commit(510)}, lost: "passes it"},
		{name: "a later keepalive", records: []*event.Record{beat(501)}, lost: "passes it"},
		{name: "a later timeline", records: []*event.Record{{Kind: event.Row, Position: at(3, 400)}}, lost: "passes it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, accept := range []bool{false, true} {
				r := newResumer(event.Resume{After: after, AfterID: "a", AcceptGap: accept}, event.Origin{})
				var err error
				for _, rec := range c.records {
					if err != nil {
						t.Fatalf("too early: %v", err)
					}
					if err = r.check(rec); err == nil && r.ask(rec.Position) {
						err = r.recognise([]byte(c.id))
					}
				}
				switch {
				case r.sound() != c.met:
					t.Errorf("sound %v, want %v", r.sound(), c.met)
				case c.lost == "":
					if err != nil {
						t.Error(err)
					}
				case accept:
					if !errors.Is(err, errDiverged) || event.ClassOf(err) != event.Transient {
						t.Errorf("got %v, want to start afresh", err)
					}
				case event.ClassOf(err) != event.Lost || !strings.Contains(err.Error(), c.lost) || !strings.Contains(event.HintOf(err), "--accept-gap"):
					t.Errorf("got %v, want class Lost and %q", err, c.lost)
				}
			}
		})
	}
}
