package publisher

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// Rows without a dead letter may be deleted only where no dead letter can be missing.
func TestParkedNeedsAllDeadLetters(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	js := n.JetStream(t)
	o := optionsFor(n, "trust")
	p := newPublisher(t, o)
	r := begin(t, p)
	r.park(t, numbered(o.Stream, 1))
	if err := r.WaitSettled(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	if err := r.Checkpoint(t.Context(), event.Checkpoint{Events: 1, Position: positionOfEvent(1), Confirm: positionOfEvent(1).Commit}); err != nil {
		t.Fatal(err)
	}
	found, err := p.Parked(t.Context())
	if err != nil || found.Len() != 1 {
		t.Fatalf("%v, %v", found, err)
	}
	st, err := js.Stream(t.Context(), "trust_DLQ")
	if err != nil {
		t.Fatal(err)
	}
	config := st.CachedInfo().Config
	config.MaxMsgs = 5
	if _, err := js.UpdateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	_, err = p.Parked(t.Context())
	wantFailure(t, err, event.Precondition, "nats stream edit trust_DLQ --discard new, which makes the relay wait instead")
	if err := js.DeleteStream(t.Context(), "trust_DLQ"); err != nil {
		t.Fatal(err)
	}
	_, err = p.Parked(t.Context())
	wantFailure(t, err, event.Lost, "")
	config.MaxMsgs = -1
	if _, err := js.CreateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	_, err = p.Parked(t.Context())
	wantFailure(t, err, event.Lost, "")
}

func TestThrownBack(t *testing.T) {
	created := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	info := func(created time.Time, last uint64) *jetstream.StreamInfo {
		return &jetstream.StreamInfo{Created: created, State: jetstream.StreamState{LastSeq: last}}
	}
	known := &lettersRecord{"D", created, 5}
	for name, c := range map[string]struct {
		known *lettersRecord
		info  *jetstream.StreamInfo
		want  bool
	}{
		"nothing known":       {nil, info(created, 0), false},
		"nothing was there":   {&lettersRecord{"D", created, 0}, info(created.Add(1), 0), false},
		"as it was":           {known, info(created, 5), false},
		"newer":               {known, info(created, 9), false},
		"older":               {known, info(created, 4), true},
		"recreated":           {known, info(created.Add(1), 0), true},
		"recreated and newer": {known, info(created.Add(1), 9), true},
		"gone":                {known, nil, true},
	} {
		if got := c.known.thrownBack(c.info); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// The newest dead letter counts once a checkpoint covers its marker. Those before it had theirs acked before it was stored.
func TestLettersOfACheckpoint(t *testing.T) {
	b := letterbox{stands: lettersRecord{Stream: "D", Sequence: 3}, next: 3}
	b.stored(4, 10)
	b.stored(5, 20)
	for events, want := range map[uint64]uint64{0: 4, 19: 4} {
		if got := b.record(events).Sequence; got != want {
			t.Errorf("after %d events: %d, want %d", events, got, want)
		}
	}
	if got := b.record(20).Sequence; got != 5 {
		t.Errorf("after the marker: %d, want 5", got)
	}
}
