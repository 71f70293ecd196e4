package publisher

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// again is a replay of a letter at the place of the i-th event.
func again(stream string, i int, l *DeadLetter, run string) *event.Event {
	ev := ofAggregate(stream, i, l.AggregateID)
	ev.ID = []byte(l.ID)
	ev.Headers[0].Value = ev.ID
	ev.MsgID = []byte(l.ID + ":r:" + run)
	ev.Replay = &event.Replay{Run: run, Letter: l.Subject}
	return ev
}

// redeliver wants an event to be stored, or refused for a reason.
func (r *run) redeliver(t *testing.T, ev *event.Event, want event.Reason) {
	t.Helper()
	r.n++
	refused, err := r.Redeliver(t.Context(), ev, nil)
	if err == nil {
		err = r.WaitSettled(t.Context(), r.n)
	}
	got := event.Reason("")
	if refused != nil {
		got = refused.Reason
	}
	if err != nil || got != want {
		t.Fatalf("redelivered %s: refused for %v, error %v, want %q", ev.ID, refused, err, want)
	}
}

func wantLetters(t *testing.T, d *DeadLetters, n int) []*DeadLetter {
	t.Helper()
	letters := all(t, d)
	if len(letters) != n {
		t.Fatalf("%d dead letters, want %d", len(letters), n)
	}
	return letters
}

func openReplays(t *testing.T, p *Publisher) *Replays {
	t.Helper()
	r, err := p.OpenReplays(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func TestDeadLetterIsStoredAndRemoved(t *testing.T) {
	for _, shared := range []bool{false, true} {
		t.Run(fmt.Sprint("shared=", shared), func(t *testing.T) {
			n := harness.RunNATS(t, harness.NATSOptions{})
			o := optionsFor(n, "again")
			o.Shared = shared
			p := newPublisher(t, o)
			r := begin(t, p)
			r.park(t, ofAggregate(o.Stream, 1, "a"))
			r.park(t, ofAggregate(o.Stream, 2, "b"))
			d, replays := openLetters(t, p), openReplays(t, p)
			letters := wantLetters(t, d, 2)

			r.redeliver(t, again(o.Stream, 3, letters[0], "one"), "")
			wantLetters(t, d, 1)
			f, noted, there, err := replays.Fate(t.Context(), letters[0])
			if err != nil || !noted || there || f.Run != "one" || f.State != FateStored {
				t.Errorf("fate %+v, noted %t, there %t, %v", f, noted, there, err)
			}
			// Another run comes too late, this one may come again: the stream has forgotten it then.
			r.redeliver(t, again(o.Stream, 4, letters[0], "two"), event.ReasonReplayed)
			forgotten := again(o.Stream, 5, letters[0], "one")
			forgotten.MsgID = []byte("forgotten, too")
			r.redeliver(t, forgotten, "")

			refused := again(o.Stream, 6, letters[1], "two")
			refused.Subject = []byte("elsewhere")
			r.redeliver(t, refused, event.ReasonSubject)
			wantLetters(t, d, 1)
			if f, _, there, err := replays.Fate(t.Context(), letters[1]); err != nil || !there || f.State != FateRefused || f.Reason != event.ReasonSubject {
				t.Errorf("fate %+v, there %t, %v", f, there, err)
			}
			// After a crash nobody knows whether it is marker or event that is stored there.
			if err := r.Release(t.Context(), refused); err != nil {
				t.Fatal(err)
			}
			wantLetters(t, d, 1)
			stranger := again(o.Stream, 7, letters[1], "two")
			stranger.Replay.Letter = "walrelay.dlq.other.-.1:0/1:0/1:0"
			r.redeliver(t, stranger, event.ReasonContent)
			if err := r.Release(t.Context(), again(o.Stream, 8, letters[1], "three")); err != nil {
				t.Fatal(err)
			}
			wantLetters(t, d, 0)

			var markers, events int
			for _, m := range stored(t, n, o.Stream) {
				if m.Subject == o.markerSubject() {
					markers++
				} else {
					events++
				}
			}
			if markers != 5 || events != 2 {
				t.Errorf("%d markers and %d events, want 5 and 2", markers, events)
			}
		})
	}
}

func TestOldestOfAHeldAggregateGoesFirst(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "order")
	o.Hold = true
	p := newPublisher(t, o)
	r := begin(t, p)
	r.park(t, ofAggregate(o.Stream, 1, "a"))
	if !r.settleOne(t, ofAggregate(o.Stream, 2, "a")) {
		t.Fatal("the next one is not held")
	}
	letters := wantLetters(t, openLetters(t, p), 2)
	r.redeliver(t, again(o.Stream, 3, letters[1], "r"), event.ReasonAggregate)
	r.redeliver(t, again(o.Stream, 4, letters[0], "r"), "")
	if !r.settleOne(t, ofAggregate(o.Stream, 5, "a")) {
		t.Error("with a dead letter left the aggregate is not held")
	}
	r.redeliver(t, again(o.Stream, 6, letters[1], "r"), "")
	r.redeliver(t, again(o.Stream, 7, wantLetters(t, openLetters(t, p), 1)[0], "r"), "")
	if r.settleOne(t, ofAggregate(o.Stream, 8, "a")) {
		t.Error("without dead letters it is still held")
	}
}

func TestKeyOfReplaysStays(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "key")
	p := newPublisher(t, o)
	origin := testOrigin()
	if _, err := openReplays(t, p).Key(t.Context(), origin.Slot, origin.Database); event.ClassOf(err) != event.Precondition {
		t.Errorf("a key without a relay: %v", err)
	}
	if p.ReplayKey() != nil {
		t.Error("a publisher has a key before it has a session")
	}
	begin(t, p).Close()
	first := p.ReplayKey()
	if len(first) != secretSize {
		t.Fatalf("a key of %d bytes", len(first))
	}
	q := newPublisher(t, o)
	begin(t, q).Close()
	got, err := openReplays(t, q).Key(t.Context(), origin.Slot, origin.Database)
	if err != nil || !bytes.Equal(got, first) || !bytes.Equal(q.ReplayKey(), first) {
		t.Errorf("another relay has another key: %v", err)
	}
	if _, err := openReplays(t, q).Key(t.Context(), "other", origin.Database); event.ClassOf(err) != event.Precondition {
		t.Errorf("the key for another slot: %v", err)
	}
	other := newPublisher(t, optionsFor(n, "other"))
	begin(t, other).Close()
	if bytes.Equal(other.ReplayKey(), first) {
		t.Error("two streams have one key")
	}
}

func TestRunHasOneWriter(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	p := newPublisher(t, optionsFor(n, "runs"))
	begin(t, p).Close()
	a, b := openReplays(t, p), openReplays(t, p)
	if record, rev, err := a.Run(t.Context(), "r1"); record != nil || rev != 0 || err != nil {
		t.Fatalf("a run before it began: %s, %d, %v", record, rev, err)
	}
	rev, err := a.SaveRun(t.Context(), "r1", []byte("one"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.SaveRun(t.Context(), "r1", []byte("two"), 0); event.ClassOf(err) != event.Precondition {
		t.Errorf("a second beginning: %v", err)
	}
	record, seen, err := b.Run(t.Context(), "r1")
	if err != nil || string(record) != "one" || seen != rev {
		t.Fatalf("read %q, %d, %v", record, seen, err)
	}
	if _, err := a.SaveRun(t.Context(), "r1", []byte("three"), rev); err != nil {
		t.Fatal(err)
	}
	if _, err := b.SaveRun(t.Context(), "r1", []byte("four"), seen); event.ClassOf(err) != event.Precondition {
		t.Errorf("an old revision: %v", err)
	}
}
