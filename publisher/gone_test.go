package publisher

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// purged publishes the events in a session of which only the first four are in a
// checkpoint, and purges the stream.
func purged(t *testing.T, n *harness.NATS, o Options, events []*event.Event, opts ...jetstream.StreamPurgeOpt) jetstream.Stream {
	t.Helper()
	r := begin(t, newPublisher(t, o))
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	r.checkpointOf(t, 4)
	r.Close()
	st, err := n.JetStream(t).Stream(t.Context(), o.Stream)
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Purge(t.Context(), opts...); err != nil {
		t.Fatal(err)
	}
	return st
}

func TestGoneEventsAreKnownByTheirIDs(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "gone")
	events := numberedLog(o.Stream, 15)
	purged(t, n, o, events[:10])
	for range 2 {
		r := begin(t, newPublisher(t, o))
		if r.resume.After != events[3].Position || r.resume.Gone != 6 || r.resume.Proof == nil || r.resume.Proof.XID != 4 || r.Settled() != 0 {
			t.Fatalf("got %+v, want 6 gone messages after %s", r.resume, events[3].Position)
		}
		// A session that ends before all are known leaves everything as it is.
		if left, err := r.Recall(t.Context(), events[4]); err != nil || left != 5 {
			t.Fatalf("left %d, %v", left, err)
		}
		r.Close()
	}
	r := begin(t, newPublisher(t, o))
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	got := stored(t, n, o.Stream)
	same(t, got, events[10:])
	if got[0].Sequence != 11 {
		t.Fatalf("sequence %d", got[0].Sequence)
	}
}

func TestEventThatTheServerDoesNotKnowIsNotDropped(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "unknown")
	events := numberedLog(o.Stream, 15)
	purged(t, n, o, events[:10], jetstream.WithPurgeSequence(20))
	r := begin(t, newPublisher(t, o))
	if r.resume.Gone != 15 {
		t.Fatalf("got %+v", r.resume)
	}
	err := r.publish(t.Context(), events)
	wantFailure(t, err, event.Lost, "--accept-gap")
	if want := "9 messages of stream \"unknown\" after sequence 10 are gone"; !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), string(events[10].ID)) {
		t.Errorf("got %v, want %s and the id of the event", err, want)
	}
	if got := stored(t, n, o.Stream); len(got) != 0 {
		t.Errorf("the questions stored %d messages", len(got))
	}
}

// What was committed after the session began was not published before it.
func TestSequencesThatNoEventAccountsFor(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "moved")
	events := numberedLog(o.Stream, 15)
	purged(t, n, o, events[:10], jetstream.WithPurgeSequence(20))
	r := begin(t, newPublisher(t, o))
	for i, ev := range events[4:10] {
		if left, err := r.Recall(t.Context(), ev); err != nil || left != uint64(14-i) {
			t.Fatalf("left %d, %v", left, err)
		}
	}
	last := events[9]
	if err := r.Resumed(t.Context(), event.Checkpoint{Position: last.Position, XID: last.XID, CommitTime: last.CommitTime}); err != nil {
		t.Fatal(err)
	}
	if c := r.current; c.Sequence != 19 || c.Position != last.Position || c.XID != last.XID || c.Proven == nil || *c.Proven != positionOfEvent(4).Commit+0x10 {
		t.Errorf("claimed %+v", c)
	}
	r.resume.Gone, r.resume.After = 0, last.Position
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	if err := r.Checkpoint(t.Context(), event.Checkpoint{Events: 5, Position: events[14].Position, Confirm: events[14].Position.Commit + 0x10}); err != nil {
		t.Fatal(err)
	}
	if r.current.Proven != nil || r.current.Sequence != 24 {
		t.Errorf("after a later event: %+v", r.current)
	}
	same(t, stored(t, n, o.Stream), events[10:])
}
