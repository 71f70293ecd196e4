package publisher

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestAnotherServerIsDetected(t *testing.T) {
	promoted := func(f *findings) { // at 0/2800, before the checkpoint
		f.origin.Timeline, f.origin.History = 3, append(f.origin.History, event.Switch{Timeline: 2, End: 0x2800})
	}
	restored := func(f *findings) {
		promoted(f)
		f.origin.History[1].Restored = true
	}
	accept := func(f *findings) { f.acceptGap = true }
	for _, c := range []struct {
		name   string
		change []func(*findings)
		lost   string // "" when it goes on
		after  event.Position
		fresh  bool
		told   string
	}{
		{"promoted", []func(*findings){promoted}, "", at(2, 0x4000), false, "never had"},
		{
			"promoted, and the slot made anew behind that",
			[]func(*findings){promoted, func(f *findings) { f.origin.ConfirmedFlush = 0x2900 }},
			"past the checkpoint of stream \"orders\" at 0/2800",
			event.Position{},
			false, "",
		},
		{"restored", []func(*findings){restored}, "restored to 0/2800 of timeline 2", event.Position{}, false, ""},
		{"restored, accepted", []func(*findings){restored, accept}, "", at(2, 0x4000), false, "never had"},
		{
			"restored behind the last event",
			[]func(*findings){restored, func(f *findings) { f.origin.History[1].End = 0x4800 }},
			"", at(2, 0x4000), false, "",
		},
		{"restored to before another promotion", []func(*findings){func(f *findings) {
			f.origin.Timeline, f.origin.History = 3, []event.Switch{{Timeline: 1, End: 0x0800, Restored: true}}
			f.origin.ConfirmedFlush = 0x700
		}}, "restored to 0/800 of timeline 1", event.Position{}, false, ""},
		{
			"the timeline began elsewhere",
			[]func(*findings){func(f *findings) { f.checkpoint.Begin = 0x0900 }},
			"timeline 2 of the server began at 0/1000, that of the checkpoint of stream \"orders\" at 0/900",
			event.Position{},
			false, "",
		},
		{
			"the timeline began elsewhere, accepted",
			[]func(*findings){func(f *findings) { f.checkpoint.Begin = 0x0900 }, accept},
			"",
			event.Position{},
			true, "whatever it has",
		},
		{"found by the relay", []func(*findings){func(f *findings) { f.origin.Diverged = true }}, "", event.Position{}, true, "whatever it has"},
		{
			"the log ends earlier, accepted",
			[]func(*findings){func(f *findings) { f.origin.WALEnd = 0x3800 }, accept},
			"",
			event.Position{},
			true, "whatever it has",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := usual()
			for _, change := range c.change {
				change(&f)
			}
			d, err := decide(f)
			if c.lost != "" {
				if event.ClassOf(err) != event.Lost || !strings.Contains(err.Error(), c.lost) || !strings.Contains(event.HintOf(err), "--accept-gap") {
					t.Fatalf("got %v, want class Lost and %q", err, c.lost)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d.resume.After != c.after || d.fresh != c.fresh {
				t.Errorf("after %s, fresh %v; want %s, %v", d.resume.After, d.fresh, c.after, c.fresh)
			}
			told := ""
			for _, n := range d.notes {
				told += n.text
			}
			if (c.told == "") != (told == "") || !strings.Contains(told, c.told) {
				t.Errorf("told %q, want %q", told, c.told)
			}
			r := claim(f, d, 1)
			if c.fresh && (r.Confirm != f.origin.ConfirmedFlush || !r.Position.IsZero() || r.XID != 0) {
				t.Errorf("claims %+v, which is of the other server", r)
			}
			if r.Begin != f.origin.Begin() || r.Timeline != f.origin.Timeline {
				t.Errorf("claims timeline %d from %s", r.Timeline, r.Begin)
			}
		})
	}
}

// The old primary was confirmed further than where the new one began: those
// LSNs are used again, so the claim must not take them over.
func TestClaimAfterAPromotionForgetsWhatItDoesNotHave(t *testing.T) {
	f := usual()
	f.origin.Timeline, f.origin.History = 3, append(f.origin.History, event.Switch{Timeline: 2, End: 0x2800})
	d, err := decide(f)
	if err != nil {
		t.Fatal(err)
	}
	if r := claim(f, d, 1); r.Confirm != 0x2800 {
		t.Errorf("claims to be confirmed up to %s, want 0/2800", r.Confirm)
	}
}

func TestIDOfTheLastMessageIsAskedFor(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*findings)
		want   string
	}{
		{"it is resent", func(*findings) {}, "id-9"},
		{"it is confirmed", func(f *findings) { f.origin.ConfirmedFlush, f.checkpoint.Confirm = 0x4001, 0x5000 }, ""},
		{"the tables were changed", func(f *findings) { f.origin.Fingerprint = "more" }, ""},
		{"it is an orphan", func(f *findings) {
			f.origin.Timeline, f.origin.History = 3, append(f.origin.History, event.Switch{Timeline: 2, End: 0x3F00})
		}, ""},
		{"the message is gone", func(f *findings) { f.last = nil }, ""},
		{"no id in the header", func(f *findings) { f.last.id = "" }, ""},
		{"a message of its own", func(f *findings) {
			f.last.position.Change, f.origin.ConfirmedFlush = f.last.position.Commit, 0x3008
		}, "id-9"},
		{"one whose record may begin before", func(f *findings) {
			f.last.position.Change, f.origin.ConfirmedFlush = f.last.position.Commit, 0x3000
		}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := usual()
			f.last.id = "id-9"
			c.change(&f)
			d, err := decide(f)
			if err != nil {
				t.Fatal(err)
			}
			if d.resume.AfterID != c.want {
				t.Errorf("got %q, want %q", d.resume.AfterID, c.want)
			}
		})
	}
}

func TestIDThatMayNotBeTheEventsIsLeftOut(t *testing.T) {
	for id, want := range map[string]string{
		"a": "a", "7": "7", "": "", "wh?t": "", strings.Repeat("x", excerptBytes): "", strings.Repeat("x", excerptBytes-1): strings.Repeat("x", excerptBytes-1),
	} {
		h := "NATS/1.0\r\nOutbox-Pos: " + at(1, 0x100).String() + "\r\nOutbox-Id: " + id + "\r\n\r\n"
		if m := deaf(1).messageOf(&storedMessage{Header: []byte(h)}); !m.ours || m.id != want {
			t.Errorf("%.20q: got %.20q, want %.20q", id, m.id, want)
		}
	}
	if m := deaf(1).messageOf(&storedMessage{Header: []byte("NATS/1.0\r\nOutbox-Id: a\r\n\r\n")}); m.ours || m.id != "" {
		t.Errorf("got %+v of a message without a position", m)
	}
}
