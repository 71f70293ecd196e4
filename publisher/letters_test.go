package publisher

import (
	"bytes"
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// all reads the dead letters of a publisher's stream.
func all(t *testing.T, d *DeadLetters) []*DeadLetter {
	t.Helper()
	var letters []*DeadLetter
	for l, err := range d.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		letters = append(letters, l)
	}
	return letters
}

func openLetters(t *testing.T, p *Publisher) *DeadLetters {
	t.Helper()
	d, err := p.OpenDeadLetters(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

func TestDeadLettersAreReadInOrder(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{MaxPayload: 4096})
	o := optionsFor(n, "read")
	p := newPublisher(t, o)
	if got := all(t, openLetters(t, p)); len(got) != 0 {
		t.Fatalf("%d dead letters without a stream", len(got))
	}
	r := begin(t, p)
	full := ofAggregate(o.Stream, 1, "a")
	full.Table = "public.outbox"
	full.EventType = []byte("paid")
	full.Headers = append(full.Headers, event.Header{Name: "x-own", Value: []byte("mine")},
		event.Header{Name: event.HeaderContentType, Value: []byte("application/json")})
	r.park(t, full)
	large := numbered(o.Stream, 2)
	large.Payload = bytes.Repeat([]byte("x"), 5000)
	r.park(t, large)
	r.park(t, ofAggregate(o.Stream, 3, "a"))

	d := openLetters(t, p)
	letters := all(t, d)
	if len(letters) != 3 {
		t.Fatalf("%d dead letters, want 3", len(letters))
	}
	l := letters[0]
	if l.ID != string(full.ID) || l.Table != full.Table || l.Position != full.Position || l.EventSubject != string(full.Subject) ||
		l.AggregateType != "order" || l.AggregateID != "a" || l.EventType != "paid" || !bytes.Equal(l.Body, full.Payload) ||
		l.Reason != event.ReasonContent || l.Detail != "test" || l.Parked.IsZero() || !l.Complete() {
		t.Errorf("the first dead letter is %+v", l)
	}
	var names []string
	for _, h := range l.Headers {
		names = append(names, h.Name)
		if h.Name == event.HeaderPos || h.Name == event.HeaderReason || h.Name == headerExpectedStream {
			t.Errorf("header %s is none of the event's", h.Name)
		}
	}
	if len(names) == 0 {
		t.Error("no headers")
	}
	if l := letters[1]; l.Omitted != 5000 || l.Body != nil || l.Complete() || l.Aggregate() != "" {
		t.Errorf("the large dead letter is %+v", l)
	}
	if a, b := letters[0].Aggregate(), letters[2].Aggregate(); a == "" || a != b {
		t.Errorf("two of one aggregate have the keys %q and %q", a, b)
	}

	for range 2 { // again is no error
		if err := d.Remove(t.Context(), letters[1]); err != nil {
			t.Fatal(err)
		}
	}
	if got := all(t, d); len(got) != 2 || got[1].Position != letters[2].Position {
		t.Errorf("%d dead letters after one was removed", len(got))
	}
}
