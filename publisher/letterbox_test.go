package publisher

import (
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// A relay that stood still while another one took over leaves no dead letter of what that one stored.
func TestLateDeadLetterIsRemoved(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "late")
	frozen := begin(t, newPublisher(t, o))
	active := begin(t, newPublisher(t, o))
	ev := numbered(o.Stream, 1)
	if err := active.publish(t.Context(), []*event.Event{ev}); err != nil {
		t.Fatal(err)
	}
	if err := frozen.Park(t.Context(), ev, &event.Poison{Reason: event.ReasonTooLarge, Detail: "test"}); err == nil {
		t.Fatal("parked what is stored")
	}
	if letters := all(t, openLetters(t, newPublisher(t, o))); len(letters) != 0 {
		t.Fatalf("%d dead letters, want none", len(letters))
	}
	same(t, stored(t, n, o.Stream), []*event.Event{ev})
}

// What the other one parked, too, keeps its dead letter.
func TestLateDeadLetterOfAParkedEventStays(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "both")
	frozen := begin(t, newPublisher(t, o))
	active := begin(t, newPublisher(t, o))
	ev := numbered(o.Stream, 1)
	active.park(t, ev)
	if err := frozen.Park(t.Context(), ev, &event.Poison{Reason: event.ReasonTooLarge, Detail: "test"}); err == nil {
		t.Fatal("parked twice")
	}
	if letters := all(t, openLetters(t, newPublisher(t, o))); len(letters) != 1 {
		t.Fatalf("%d dead letters, want 1", len(letters))
	}
}

// A row that is read from the table has another position than its event in the
// WAL: its dead letter is found by its id.
func TestBackfilledRowKeepsItsDeadLetter(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "rows")
	p := newPublisher(t, o)
	origin := testOrigin()
	origin.Backfill = true
	open := func() *run {
		s, err := p.Open(t.Context(), func(error) {})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { s.Close() })
		r := &run{Session: s}
		if r.resume, err = s.Resume(t.Context(), origin); err != nil {
			t.Fatal(err)
		}
		return r
	}
	r := open()
	// As if it died before the marker.
	if _, err := r.storeLetter(t.Context(), numbered(o.Stream, 1), &event.Poison{Reason: event.ReasonTooLarge, Detail: "test"}); err != nil {
		t.Fatal(err)
	}
	r.Close()
	r = open()
	again, other := numbered(o.Stream, 1), numbered(o.Stream, 3)
	again.Position = positionOfEvent(2)
	if err := r.publish(t.Context(), []*event.Event{again, other}); err != nil {
		t.Fatal(err)
	}
	ms := stored(t, n, o.Stream)
	if len(ms) != 2 || ms[0].Subject != "walrelay.parked.rows" || ms[0].Header.Get(headerLetter) != "1" || ms[1].Subject != string(other.Subject) {
		t.Fatalf("got %v", ms)
	}
	if letters := all(t, openLetters(t, p)); len(letters) != 1 {
		t.Fatalf("%d dead letters, want 1", len(letters))
	}
}
