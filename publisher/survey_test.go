package publisher

import (
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// checkpoint records the first n events as settled.
func (r *run) checkpointOf(t *testing.T, n int) {
	t.Helper()
	ev := numbered("x", n)
	err := r.Checkpoint(t.Context(), event.Checkpoint{
		Events: uint64(n), Position: ev.Position, XID: ev.XID, CommitTime: ev.CommitTime, Confirm: ev.Position.Commit + 0x10,
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestSurveyReadsAndPassMovesTheCheckpoint(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "survey")
	look := newPublisher(t, o)
	origin := testOrigin()

	v, err := look.Survey(t.Context(), origin)
	if err != nil || v.Err != nil || v.Exists || v.Checkpoint != nil || !v.Resume.After.IsZero() {
		t.Fatalf("nothing there yet: %+v, %v", v, err)
	}
	if moved, err := look.Pass(t.Context(), origin, event.Checkpoint{}, 0x900); err != nil || moved {
		t.Fatalf("moved %v, %v", moved, err)
	}

	events := numberedLog("survey", 20)
	p := newPublisher(t, o)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:7]); err != nil {
		t.Fatal(err)
	}
	r.checkpointOf(t, 4)

	// While the session goes on.
	v, err = look.Survey(t.Context(), origin)
	if err != nil || v.Err != nil || !v.Exists || v.Sequence != 7 || v.Last != positionOfEvent(7) || v.Resume.After != positionOfEvent(7) {
		t.Fatalf("got %+v, %v", v, err)
	}
	if c := v.Checkpoint; c == nil || c.Sequence != 4 || c.Position != positionOfEvent(4) || c.Slot != "walrelay" || c.Written.IsZero() {
		t.Fatalf("got checkpoint %+v", c)
	}
	r.Close()

	// The messages after the checkpoint are consumed, so they are counted off.
	st, err := n.JetStream(t).Stream(t.Context(), "survey")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v, err = look.Survey(t.Context(), origin); err != nil || v.Resume.Skip != 3 || v.Resume.After != positionOfEvent(4) {
		t.Fatalf("got %+v, %v", v, err)
	}
	to := positionOfEvent(10).Commit + 0x10 // past 8, 9 and 10
	_, err = look.Pass(t.Context(), origin, event.Checkpoint{Events: 2, Position: positionOfEvent(6)}, to)
	wantFailure(t, err, event.Lost, "")
	moved, err := look.Pass(t.Context(), origin, event.Checkpoint{Events: 3, Position: positionOfEvent(7), XID: 7, CommitTime: commitAt}, to)
	if err != nil || !moved {
		t.Fatalf("moved %v, %v", moved, err)
	}

	// The slot was advanced, and the next session takes it for intended.
	origin.ConfirmedFlush = to
	next := open(t, newPublisher(t, o))
	if next.resume, err = next.Resume(t.Context(), origin); err != nil || next.resume.Skip != 0 {
		t.Fatalf("got %+v, %v", next.resume, err)
	}
	if err := next.publish(t.Context(), events[10:]); err != nil {
		t.Fatal(err)
	}
	next.Close()
	same(t, stored(t, n, "survey"), events[10:])

	// Without the checkpoint's move it would be a gap.
	origin.ConfirmedFlush = positionOfEvent(40).Commit
	if v, err = look.Survey(t.Context(), origin); err != nil || event.ClassOf(v.Err) != event.Lost || event.HintOf(v.Err) == "" {
		t.Fatalf("got %+v, %v", v, err)
	}
	if _, err := look.Pass(t.Context(), origin, event.Checkpoint{}, to); event.ClassOf(err) != event.Lost {
		t.Fatalf("got %v", err)
	}

	if _, err := look.Forget(t.Context(), "another", "shop"); event.ClassOf(err) != event.Precondition {
		t.Fatalf("got %v", err)
	}
	for _, want := range []bool{true, false} {
		if gone, err := look.Forget(t.Context(), "walrelay", "shop"); err != nil || gone != want {
			t.Fatalf("got %v, %v, want %v", gone, err, want)
		}
	}
	if v, err = look.Survey(t.Context(), origin); err != nil || v.Checkpoint != nil || v.Resume.After != positionOfEvent(20) {
		t.Fatalf("got %+v, %v", v, err)
	}
}

func TestPassLosesToARelayThatWritesACheckpoint(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	p := newPublisher(t, optionsFor(n, "race"))
	r := begin(t, p)
	if err := r.publish(t.Context(), numberedLog("race", 5)); err != nil {
		t.Fatal(err)
	}
	look := newPublisher(t, optionsFor(n, "race"))
	if moved, err := look.Pass(t.Context(), testOrigin(), event.Checkpoint{}, 0x20000); err != nil || !moved {
		t.Fatalf("moved %v, %v", moved, err)
	}
	// The session that was there before finds out.
	ev := numbered("race", 5)
	if err := r.Checkpoint(t.Context(), event.Checkpoint{Events: 5, Position: ev.Position, Confirm: 0x20100}); err == nil {
		t.Fatal("the old session overwrote the checkpoint")
	}
}
