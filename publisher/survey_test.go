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
	if moved, err := look.Pass(t.Context(), origin, 0x900); err != nil || moved {
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

	// The messages after the checkpoint are consumed, so which events they were has to be found out.
	st, err := n.JetStream(t).Stream(t.Context(), "survey")
	if err != nil {
		t.Fatal(err)
	}
	if err := st.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	if v, err = look.Survey(t.Context(), origin); err != nil || v.Resume.Gone != 3 || v.Resume.After != positionOfEvent(4) {
		t.Fatalf("got %+v, %v", v, err)
	}
	to := positionOfEvent(10).Commit + 0x10 // past 8, 9 and 10
	_, err = look.Pass(t.Context(), origin, to)
	wantFailure(t, err, event.Lost, "--leave-checkpoint")
	r = begin(t, newPublisher(t, o))
	if err := r.publish(t.Context(), events[:7]); err != nil {
		t.Fatal(err)
	}
	r.Close()
	moved, err := look.Pass(t.Context(), origin, to)
	if err != nil || !moved {
		t.Fatalf("moved %v, %v", moved, err)
	}

	// The slot was advanced, and the next session takes it for intended.
	origin.ConfirmedFlush = to
	next := open(t, newPublisher(t, o))
	if next.resume, err = next.Resume(t.Context(), origin); err != nil || next.resume.Gone != 0 {
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
	if _, err := look.Pass(t.Context(), origin, to); event.ClassOf(err) != event.Lost {
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
	// Without it nothing says that the slot was advanced on purpose.
	if v, err = look.Survey(t.Context(), origin); err != nil || v.Checkpoint != nil || event.ClassOf(v.Err) != event.Lost {
		t.Fatalf("got %+v, %v", v, err)
	}
	origin.ConfirmedFlush = positionOfEvent(20).Commit
	if v, err = look.Survey(t.Context(), origin); err != nil || v.Err != nil || v.Resume.After != positionOfEvent(20) {
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
	if moved, err := look.Pass(t.Context(), testOrigin(), 0x20000); err != nil || !moved {
		t.Fatalf("moved %v, %v", moved, err)
	}
	// The session that was there before finds out.
	ev := numbered("race", 5)
	if err := r.Checkpoint(t.Context(), event.Checkpoint{Events: 5, Position: ev.Position, Confirm: 0x20100}); err == nil {
		t.Fatal("the old session overwrote the checkpoint")
	}
}

// Whoever passes over events has not looked at the publications, so what is
// known of them stays.
func TestPassKeepsWhatIsKnownOfTheTables(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "tables")
	origin := testOrigin()
	origin.Tables = map[string][]string{"public.outbox": {"1/r7@9"}}
	s := open(t, newPublisher(t, o))
	if _, err := s.Resume(t.Context(), origin); err != nil {
		t.Fatal(err)
	}
	s.Close()
	if moved, err := newPublisher(t, o).Pass(t.Context(), testOrigin(), positionOfEvent(10).Commit); err != nil || !moved {
		t.Fatalf("moved %v, %v", moved, err)
	}
	origin.Tables = map[string][]string{"public.outbox": {"1/r8@9"}}
	_, err := open(t, newPublisher(t, o)).Resume(t.Context(), origin)
	wantFailure(t, err, event.Lost, "slot recover walrelay")
}

func TestExamineTellsWhoClaimedTheStream(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "examine")
	p := newPublisher(t, o)
	if v, err := p.Examine(t.Context(), "walrelay", "shop"); err != nil || v.Claimed || v.Sequence != 0 {
		t.Fatalf("nothing there yet: %+v, %v", v, err)
	}
	r := begin(t, newPublisher(t, o))
	if err := r.publish(t.Context(), numberedLog("examine", 3)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	v, err := p.Examine(t.Context(), "walrelay", "shop")
	if err != nil || !v.Claimed || v.Interrupted || v.Sequence != 3 || v.Position != positionOfEvent(3) || v.LastID == "" {
		t.Errorf("got %+v, %v", v, err)
	}
	if v, err := p.Examine(t.Context(), "another", "shop"); err != nil || v.Claimed {
		t.Errorf("of another slot: got %+v, %v", v, err)
	}
}
