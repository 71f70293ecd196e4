package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
)

const tick = time.Second

func TestConfirmWaitsForEarlierEvents(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		first := b.source.commit("a", "b")
		second := b.source.commit("c")
		for _, step := range []struct {
			ack  int
			want event.LSN
		}{{0, 100}, {1, 100}, {1, first}, {0, first}, {1, second}} {
			b.sink.ack(step.ack)
			b.after(tick)
			if got := b.source.last(); got != step.want {
				t.Errorf("with %d settled: confirmed %s, want %s", b.sink.Settled(), got, step.want)
			}
		}
		want := []event.Checkpoint{
			{Events: 2, Position: event.Position{Timeline: 1, Commit: 200, Change: 152}, XID: 1, Confirm: first},
			{Events: 3, Position: event.Position{Timeline: 1, Commit: 300, Change: 251}, XID: 2, Confirm: second},
		}
		if got := b.sink.kept(); !slices.Equal(got, want) {
			t.Errorf("checkpoints\ngot  %+v\nwant %+v", got, want)
		}
	})
}

func TestKeepaliveWaitsForEventsInFlight(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		idle := b.source.beat()
		b.after(tick)
		if got := b.source.last(); got != idle {
			t.Errorf("idle: confirmed %s, want %s", got, idle)
		}
		b.source.commit("a")
		busy := b.source.beat()
		b.after(tick)
		if got := b.source.last(); got != idle {
			t.Errorf("with an event in flight: confirmed %s, want %s", got, idle)
		}
		b.sink.ack(1)
		b.after(tick)
		if got := b.source.last(); got != busy {
			t.Errorf("with all settled: confirmed %s, want %s", got, busy)
		}
	})
}

func TestRowsOfOtherTablesAreConfirmed(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		end := b.source.commit("alien", "alien")
		b.after(tick)
		if got := b.source.last(); got != end || b.sink.stored() != "[]" {
			t.Errorf("confirmed %s and appended %s, want %s and nothing", got, b.sink.stored(), end)
		}
	})
}

func TestNothingIsConfirmedWithoutItsCheckpoint(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.after(tick)
		src := b.source
		b.set(func() { b.sink.checkpointed = errors.New("bucket is gone") })
		b.source.commit("a")
		b.sink.ack(1)
		b.after(tick)
		if got := src.last(); got != 100 || !isClosed(src.closed) {
			t.Errorf("confirmed %s, closed %v; want only 0/64, and another session", got, isClosed(src.closed))
		}
	})
}

// Until there is progress, the status repeats what Postgres has.
func TestStatusKeepsTheSessionAlive(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.after(5 * tick)
		if want := []event.LSN{100, 100, 100, 100, 100}; !slices.Equal(b.source.confirms, want) {
			t.Errorf("statuses %v, want %v", b.source.confirms, want)
		}
		if len(b.sink.kept()) != 0 {
			t.Error("a checkpoint without progress")
		}
	})
}

func TestStatusAndCheckpointGoOnWithAFullWindow(t *testing.T) {
	story(t, func(b *bench) {
		b.window = 2
		b.run()
		first := b.source.commit("a")
		b.source.commit("b", "c", "d")
		if got := b.sink.stored(); got != "[a b]" {
			t.Fatalf("appended %s into a window of 2", got)
		}
		b.after(3 * tick)
		if n := len(b.source.confirms); n != 3 || b.sink.ticks != 3 {
			t.Errorf("%d statuses and %d ticks in 3 s, want 3", n, b.sink.ticks)
		}
		b.sink.ack(1)
		b.after(tick)
		if got := b.source.last(); got != first {
			t.Errorf("confirmed %s, want %s", got, first)
		}
		if got := b.sink.stored(); got != "[a b c]" {
			t.Errorf("appended %s after an ack", got)
		}
	})
}

func TestEventsAreFlushedBeforeWaitingForMore(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.source.commit("a", "b", "c")
		if b.sink.flushed != 3 {
			t.Errorf("flushed %d of 3", b.sink.flushed)
		}
	})
}

func TestSinkFailureInterruptsABlockedRead(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		src, sink := b.source, b.sink
		b.after(tick / 2)
		sink.breakWith(errors.New("connection lost"))
		synctest.Wait()
		if !isClosed(src.closed) || !isClosed(sink.closed) {
			t.Error("the session goes on")
		}
		if got := b.lines.with("connection lost"); len(got) != 1 || !strings.Contains(got[0], "side=nats") {
			t.Errorf("logged %q", got)
		}
	})
}

func TestShutdownClosesTheSourceAtOnce(t *testing.T) {
	for _, c := range []struct {
		name string
		busy func(*bench)
	}{
		{"idle", func(b *bench) {}},
		{"backlog", func(b *bench) { b.source.commit("a", "b", "c") }},
		{"full window", func(b *bench) {
			b.set(func() { b.window = 1 })
			b.source.commit("a", "b", "c")
		}},
		{"alone in flight", func(b *bench) { b.source.commit("a", "b") }},
		{"before parking", func(b *bench) {
			b.set(func() { b.sink.poison["b"] = true })
			b.source.commit("a", "b")
		}},
		{"parking", func(b *bench) {
			b.set(func() { b.sink.poison["a"], b.sink.parking = true, make(chan struct{}) })
			b.source.commit("a")
		}},
		{"stuck in a write", func(b *bench) {
			b.set(func() { b.sink.appending = make(chan struct{}) })
			b.source.commit("a")
		}},
		{"stuck in a checkpoint", func(b *bench) {
			b.set(func() { b.sink.saving = make(chan struct{}) })
			b.source.beat()
			b.after(tick)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			story(t, func(b *bench) {
				b.resume.Suspect = c.name == "alone in flight"
				b.run()
				b.after(tick / 2)
				c.busy(b)
				src, sink, from := b.source, b.sink, time.Now()
				close(b.shutdown)
				synctest.Wait()
				if !isClosed(src.closed) || time.Since(from) != 0 {
					t.Error("postgres waits for the relay")
				}
				if sink.appending != nil {
					close(sink.appending)
				}
				b.after(rememberLimit)
				if got := b.lines.with("session ended"); len(got) != 1 || !strings.Contains(got[0], "postgres is shutting down") {
					t.Errorf("logged %q", got)
				}
			})
		})
	}
}

func TestShutdownWhileTheSinkIsOpened(t *testing.T) {
	story(t, func(b *bench) {
		b.OpenSink = func(ctx context.Context, _ func(error)) (Sink, error) {
			<-ctx.Done()
			return nil, context.Cause(ctx)
		}
		b.run()
		src := b.source
		close(b.shutdown)
		synctest.Wait()
		if !isClosed(src.closed) {
			t.Error("postgres waits for the relay")
		}
		if got := b.lines.with("session ended"); len(got) != 1 || !strings.Contains(got[0], "shutting down") {
			t.Errorf("logged %q", got)
		}
	})
}

// A write into a connection that nobody reads ends only when the sink finds an
// ack overdue, so its ticks must not end with the session.
func TestTicksGoOnWhileTheLoopIsStuckInAWrite(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		src, sink := b.source, b.sink
		b.set(func() { sink.appending = make(chan struct{}) })
		sink.onTick = func() {
			if sink.ticks == 4 {
				sink.breakWith(errors.New("no ack"))
				close(sink.appending)
			}
		}
		src.commit("a")
		close(b.shutdown)
		b.after(3 * tick)
		if isClosed(sink.closed) {
			t.Fatal("the loop was not stuck")
		}
		b.after(tick)
		if !isClosed(sink.closed) {
			t.Error("the session does not end")
		}
	})
}

func TestSuspectSessionPublishesTheFirstEventAlone(t *testing.T) {
	story(t, func(b *bench) {
		b.resume = event.Resume{Suspect: true}
		b.run()
		b.source.commit("alien", "a", "b", "c")
		b.after(3 * tick)
		if got := b.sink.stored(); got != "[a]" {
			t.Errorf("appended %s before the first ack, want [a]", got)
		}
		b.sink.ack(1)
		if got := b.sink.stored(); got != "[a b c]" {
			t.Errorf("appended %s after it", got)
		}
	})
}

func TestResumeDropsWhatTheSinkRecalls(t *testing.T) {
	story(t, func(b *bench) {
		b.resume = event.Resume{After: event.Position{Timeline: 1, Commit: 200, Change: 152}, Gone: 2, Suspect: true}
		b.run()
		b.mapErr["d"] = &event.Poison{Reason: event.ReasonContent, Detail: "d"} // parked before, its marker is gone
		b.source.commit("a", "b")
		b.source.commit("c", "alien", "d")
		end := b.source.commit("alien", "e", "f")
		if got := b.sink.stored(); got != "[e]" {
			t.Errorf("appended %s, want [e]", got)
		}
		b.after(tick)
		d := event.Position{Timeline: 1, Commit: 300, Change: 253}
		if got := b.sink.resumed; len(got) != 1 || got[0].Position != d || got[0].XID != 2 {
			t.Errorf("resumed %+v", got)
		}
		if got := b.sink.kept(); len(got) != 1 || got[0].Events != 0 || got[0].Position != d {
			t.Errorf("checkpoints %+v", got)
		}
		b.sink.ack(1)
		b.sink.ack(1)
		b.after(tick)
		if got := b.source.last(); got != end || b.sink.stored() != "[e f]" {
			t.Errorf("confirmed %s, want %s; appended %s", got, end, b.sink.stored())
		}
	})
}

func TestWhatTheSinkCannotRecallEndsTheRelay(t *testing.T) {
	story(t, func(b *bench) {
		b.resume = event.Resume{Gone: 2}
		b.recallErr = map[string]error{"b": event.Fail(event.Lost, "look", "b may be stored")}
		b.run()
		b.source.commit("a")
		b.source.commit("b", "c")
		if _, err := b.ended(); event.ClassOf(err) != event.Lost {
			t.Errorf("got %v", err)
		}
		if got := b.sink.stored(); got != "[]" || len(b.sink.kept()) != 0 || b.source.last() != 0 {
			t.Errorf("appended %s, checkpoints %+v, confirmed %s", got, b.sink.kept(), b.source.last())
		}
	})
}

func TestNothingIsConfirmedBeforeTheProof(t *testing.T) {
	story(t, func(b *bench) {
		b.resume = event.Resume{
			After: event.Position{Timeline: 1, Commit: 300, Change: 251},
			Proof: &event.Checkpoint{Position: event.Position{Timeline: 1, Commit: 300, Change: 251}, XID: 2},
		}
		b.run()
		b.source.commit("a")
		b.after(tick)
		if got := b.source.last(); got != 100 || len(b.sink.kept()) != 0 {
			t.Errorf("confirmed %s with %d checkpoints before the proof", got, len(b.sink.kept()))
		}
		end := b.source.commit("b")
		b.after(tick)
		if got := b.source.last(); got != end {
			t.Errorf("confirmed %s after it, want %s", got, end)
		}
	})
}

func TestWithoutTheProofTheRelayEnds(t *testing.T) {
	story(t, func(b *bench) {
		b.resume = event.Resume{
			After: event.Position{Timeline: 1, Commit: 200, Change: 151},
			Proof: &event.Checkpoint{Position: event.Position{Timeline: 1, Commit: 200, Change: 151}, XID: 9},
		}
		b.run()
		b.source.commit("a")
		_, err := b.ended()
		if event.ClassOf(err) != event.Lost || b.source.last() != 0 || b.sink.stored() != "[]" {
			t.Errorf("got %v, confirmed %s, appended %s", err, b.source.last(), b.sink.stored())
		}
	})
}

func TestRecordsOutOfOrderEndTheRelay(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.source.commit("a")
		b.source.lsn -= 150
		b.source.commit("b")
		if _, err := b.ended(); event.ClassOf(err) != event.Unexpected {
			t.Errorf("got %v, want class Unexpected", err)
		}
	})
}

func TestPoisonIsParkedInItsPlace(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.mapErr["b"] = &event.Poison{Reason: event.ReasonContent, Detail: "not an object"}
		b.sink.poison["c"] = true
		end := b.source.commit("a", "b", "c", "d")
		if got := b.sink.stored(); got != "[a]" {
			t.Errorf("appended %s while a is in flight", got)
		}
		b.sink.ack(1)
		b.sink.ack(1)
		b.sink.ack(1)
		b.sink.ack(1)
		b.after(tick)
		if got := b.sink.stored(); got != "[a !b !c d]" || b.source.last() != end {
			t.Errorf("appended %s, confirmed %s, want %s", got, b.source.last(), end)
		}
		if got := b.lines.with("parked an event"); len(got) != 2 || !strings.Contains(got[0], `id=b table=outbox position=1:0/C8:0/98:0 reason=content detail="not an object"`) {
			t.Errorf("logged %q", got)
		}
	})
}

func TestPoisonHaltsWhenToldSo(t *testing.T) {
	story(t, func(b *bench) {
		b.Halt = true
		b.run()
		b.set(func() { b.sink.poison["b"] = true })
		b.source.commit("a", "b", "c")
		if !b.running() {
			t.Fatal("halts before the events in front are settled")
		}
		b.sink.ack(1)
		_, err := b.ended()
		var p *event.Poison
		if event.ClassOf(err) != event.Halted || event.HintOf(err) == "" || !errors.As(err, &p) {
			t.Errorf("got %v, want class Halted", err)
		}
		if got := b.sink.stored(); got != "[a]" {
			t.Errorf("appended %s", got)
		}
	})
}

func TestManyParkedInARowAreAFaultOfTheConfiguration(t *testing.T) {
	story(t, func(b *bench) {
		b.MaxParkedInRow = 2
		b.run()
		for _, n := range []string{"p1", "p2", "p3", "p4", "p5"} {
			b.mapErr[n] = &event.Poison{Reason: event.ReasonSubject, Detail: n}
		}
		b.source.commit("p1", "p2", "a", "p3", "p4", "p5", "b")
		for range 5 {
			if !b.running() {
				t.Fatal("ends too early")
			}
			b.sink.ack(1)
		}
		_, err := b.ended()
		if event.ClassOf(err) != event.Precondition || event.HintOf(err) == "" || !strings.Contains(err.Error(), "3 events in a row") {
			t.Errorf("got %v, want class Precondition", err)
		}
		if got := b.sink.stored(); got != "[!p1 !p2 a !p3 !p4]" {
			t.Errorf("appended %s", got)
		}
	})
}

// What the server refuses, it refuses with other events behind it, and each
// refusal ends the session.
func TestManyParkedInARowAreCountedAcrossSessions(t *testing.T) {
	story(t, func(b *bench) {
		b.MaxParkedInRow = 2
		b.run()
		lsn := b.source.lsn
		for i := range 3 {
			b.source.lsn = lsn + event.LSN(i)*100
			b.set(func() { b.sink.poison["p"] = true })
			b.source.commit("p")
			if i == 2 {
				break
			}
			b.sink.ack(1)
			b.source.commit("next") // appended, never settled
			b.sink.breakWith(errors.New("not permitted"))
			b.after(10 * tick)
		}
		if _, err := b.ended(); event.ClassOf(err) != event.Precondition {
			t.Errorf("got %v, want class Precondition", err)
		}
	})
}

func TestStopDrains(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.source.commit("a", "b")
		end := b.source.commit("c")
		b.after(tick / 2)
		b.stop()
		synctest.Wait()
		b.source.commit("d") // not read any more
		b.after(4 * tick)
		b.sink.ack(2)
		b.after(tick)
		if !b.running() {
			t.Fatal("ends with an event in flight")
		}
		b.sink.ack(1)
		took, err := b.ended()
		if err != nil || took != 5*tick+tick/2 {
			t.Errorf("got %v after %s, want nil at once after the last ack", err, took)
		}
		if got := b.source.last(); got != end || b.sink.stored() != "[a b c]" {
			t.Errorf("confirmed %s, want %s; appended %s", got, end, b.sink.stored())
		}
		if k := b.sink.kept(); k[len(k)-1].Confirm != end {
			t.Errorf("checkpoints %+v", k)
		}
	})
}

// What the ticker has taken from the ledger when the relay is told to stop
// must not get lost, nor be written half.
func TestDrainLetsTheTickerFinish(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		b.set(func() { b.sink.saving = make(chan struct{}) })
		end := b.source.commit("a")
		b.sink.ack(1)
		b.after(tick) // the ticker is in Checkpoint now
		b.stop()
		b.after(tick)
		if !b.running() {
			t.Fatal("ends during the checkpoint")
		}
		close(b.sink.saving)
		if _, err := b.ended(); err != nil {
			t.Error(err)
		}
		if k := b.sink.kept(); b.source.last() != end || len(k) != 2 || k[0].Drained || !k[1].Drained {
			t.Errorf("confirmed %s with checkpoints %+v, want %s", b.source.last(), k, end)
		}
	})
}

func TestDrainWaitsForACheckpointNoLongerThanItsTimeout(t *testing.T) {
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprintf("ticker busy %v", busy), func(t *testing.T) {
			story(t, func(b *bench) {
				b.run()
				b.set(func() { b.sink.saving = make(chan struct{}) })
				b.source.commit("a")
				b.sink.ack(1)
				if busy {
					b.after(tick)
				}
				from := time.Now()
				b.stop()
				_, err := b.ended()
				// Nothing is in flight, so nothing is wrong; it is told all the same.
				if took := time.Since(from); err != nil || took != 10*time.Second {
					t.Errorf("got %v after %s", err, took)
				}
				if got := b.lines.with("without confirming"); len(got) != 1 {
					t.Errorf("logged %q", got)
				}
			})
		})
	}
}

// With a confirm delay checkpoints are written less often, but the last one is
// written all the same, and nothing is confirmed before its time.
func TestDrainRecordsWithAConfirmDelay(t *testing.T) {
	story(t, func(b *bench) {
		b.ConfirmDelay = 64 * time.Second
		b.run()
		b.source.commit("a")
		b.sink.ack(1)
		b.after(tick)
		last := b.source.commit("b")
		b.sink.ack(1)
		b.after(tick / 2)
		if n := len(b.sink.kept()); n != 1 {
			t.Errorf("%d checkpoints, want 1", n)
		}
		b.stop()
		if _, err := b.ended(); err != nil {
			t.Error(err)
		}
		if k := b.sink.kept(); len(k) != 3 || k[1].Confirm != last || !k[2].Drained || b.source.last() != 100 {
			t.Errorf("checkpoints %+v, confirmed %s", k, b.source.last())
		}
	})
}

func TestDrainTimeout(t *testing.T) {
	story(t, func(b *bench) {
		b.DrainTimeout = 3 * time.Second
		b.run()
		b.source.commit("a", "b", "c")
		b.sink.ack(1)
		b.stop()
		took, err := b.ended()
		if event.ClassOf(err) != event.Undrained || event.HintOf(err) == "" || took != 3*time.Second {
			t.Errorf("got %v after %s, want class Undrained after 3s", err, took)
		}
		if err == nil || err.Error() != "stopped with 2 events in flight: drain timed out" {
			t.Errorf("got %v", err)
		}
	})
}

func TestSinkFailureDuringDrain(t *testing.T) {
	lost := event.Fail(event.Precondition, "make it", "stream is gone")
	for _, c := range []struct {
		name     string
		inFlight bool
		err      error
		want     event.Class
	}{
		{"in flight", true, errors.New("connection lost"), event.Undrained},
		{"for good", true, lost, event.Precondition},
	} {
		t.Run(c.name, func(t *testing.T) {
			story(t, func(b *bench) {
				b.run()
				b.source.commit("a")
				b.stop()
				synctest.Wait()
				b.sink.breakWith(c.err)
				took, err := b.ended()
				if event.ClassOf(err) != c.want || !errors.Is(err, c.err) || took != 0 {
					t.Errorf("got %v of class %d after %s", err, event.ClassOf(err), took)
				}
			})
		})
	}
}

// The ack of an event in flight is not lost only because Postgres goes away,
// which happens when a whole host is shut down.
func TestPostgresGoesAwayDuringDrain(t *testing.T) {
	for _, how := range []string{"shutdown", "status refused"} {
		t.Run(how, func(t *testing.T) {
			story(t, func(b *bench) {
				b.run()
				b.source.commit("a")
				b.stop()
				synctest.Wait()
				if how == "shutdown" {
					close(b.shutdown)
				} else {
					b.set(func() { b.source.confirmErr = errors.New("broken pipe") })
				}
				b.after(3 * tick)
				if !b.running() {
					t.Fatal("ends with an event in flight")
				}
				b.sink.ack(1)
				if _, err := b.ended(); err != nil {
					t.Error(err)
				}
				if len(b.sink.kept()) != 1 || len(b.lines.with("without confirming")) != 1 {
					t.Errorf("checkpoints %+v", b.sink.kept())
				}
			})
		})
	}
}

func TestStopBeforeAllGoneMessagesAreKnown(t *testing.T) {
	story(t, func(b *bench) {
		b.resume = event.Resume{Gone: 10}
		b.run()
		b.source.commit("a")
		b.stop()
		if _, err := b.ended(); err != nil {
			t.Errorf("got %v; everything read is stored", err)
		}
		if got := b.sink.kept(); len(got) != 0 || b.source.last() != 100 {
			t.Errorf("checkpoints %+v, confirmed %s", got, b.source.last())
		}
	})
}

// Wherever the relay is when it is told to stop, it stops.
func TestStopAtAnyMoment(t *testing.T) {
	blocked := func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	}
	for _, c := range []struct {
		name  string
		setUp func(*bench)
		busy  func(*bench)
		want  event.Class // Transient for nil
		took  time.Duration
	}{
		{name: "idle"},
		{name: "opening the source", setUp: func(b *bench) {
			b.OpenSource = func(ctx context.Context) (Source, error) { return nil, blocked(ctx) }
		}},
		{name: "opening the sink", setUp: func(b *bench) {
			b.OpenSink = func(ctx context.Context, _ func(error)) (Sink, error) { return nil, blocked(ctx) }
		}},
		{name: "opening, with a hasty diagnosis", setUp: func(b *bench) {
			b.OpenSink = func(ctx context.Context, _ func(error)) (Sink, error) {
				return nil, event.Fail(event.Precondition, "", "connect: %w", blocked(ctx))
			}
		}},
		{name: "resuming", setUp: func(b *bench) {
			b.OpenSink = func(_ context.Context, fail func(error)) (Sink, error) {
				s := b.newSink(fail)
				s.resuming = make(chan struct{})
				return s, nil
			}
		}},
		{name: "diagnosing", setUp: func(b *bench) {
			b.OpenSource = func(context.Context) (Source, error) { return nil, errFault }
			b.diagnose = func(ctx context.Context, err error) error {
				return event.Fail(event.Precondition, "", "read slot: %w", blocked(ctx))
			}
		}},
		{name: "backing off", setUp: func(b *bench) {
			b.BackoffMin, b.BackoffMax = time.Minute, time.Minute
			b.OpenSource = func(context.Context) (Source, error) { return nil, errFault }
		}},
		{name: "backing off after a loss in flight", setUp: func(b *bench) {
			b.BackoffMin, b.BackoffMax = time.Minute, time.Minute
		}, busy: func(b *bench) {
			b.source.commit("a")
			b.sink.breakWith(errFault)
		}},
		{name: "waiting for the window", busy: func(b *bench) {
			b.set(func() { b.window = 1 })
			b.source.commit("a", "b")
		}, want: event.Undrained, took: 10 * time.Second},
		{name: "alone in flight", setUp: func(b *bench) { b.resume.Suspect = true }, busy: func(b *bench) {
			b.source.commit("a", "b")
		}, want: event.Undrained, took: 10 * time.Second},
		{name: "before parking", busy: func(b *bench) {
			b.set(func() { b.sink.poison["b"] = true })
			b.source.commit("a", "b")
		}, want: event.Undrained, took: 10 * time.Second},
		{name: "parking", busy: func(b *bench) {
			b.set(func() { b.sink.poison["a"], b.sink.parking = true, make(chan struct{}) })
			b.source.commit("a")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			story(t, func(b *bench) {
				if c.setUp != nil {
					c.setUp(b)
				}
				b.run()
				if c.busy != nil {
					c.busy(b)
				}
				synctest.Wait()
				b.stop()
				took, err := b.ended()
				if event.ClassOf(err) != c.want || (c.want == event.Transient) != (err == nil) || took != c.took {
					t.Errorf("got %v after %s, want class %d after %s", err, took, c.want, c.took)
				}
			})
		})
	}
}

// The window's acks arrive after all.
func TestStopWithAFullWindowDrains(t *testing.T) {
	story(t, func(b *bench) {
		b.window = 2
		b.run()
		b.source.commit("a", "b", "c")
		b.stop()
		b.after(3 * tick)
		b.sink.ack(2)
		if _, err := b.ended(); err != nil || b.sink.stored() != "[a b]" {
			t.Errorf("got %v, appended %s", err, b.sink.stored())
		}
	})
}

// The broker fails in the moment that the relay is told to stop: what is in
// flight is not settled, whichever is noticed first.
func TestStopAndSinkFailureAtOnce(t *testing.T) {
	for range 50 {
		story(t, func(b *bench) {
			b.window = 2
			b.run()
			b.source.commit("a", "b")
			b.sink.breakWith(errFault)
			b.stop()
			_, err := b.ended()
			// nil when the session had ended before.
			if err != nil && event.ClassOf(err) != event.Undrained {
				t.Errorf("got %v", err)
			}
			if err == nil && len(b.lines.with("session ended")) == 0 {
				t.Error("nil, but the loss is told nowhere")
			}
		})
	}
}

func TestTerminalFailureIsToldEvenWhenStopping(t *testing.T) {
	story(t, func(b *bench) {
		b.Halt = true
		b.run()
		b.set(func() { b.sink.poison["b"] = true })
		b.set(func() { b.sink.appending = make(chan struct{}) })
		b.source.commit("b")
		b.stop()
		synctest.Wait()
		close(b.sink.appending)
		if _, err := b.ended(); event.ClassOf(err) != event.Halted {
			t.Errorf("got %v, want class Halted", err)
		}
	})
}
