package publisher

import (
	"errors"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// ofAggregate is an event of an aggregate.
func ofAggregate(stream string, i int, aggregate string) *event.Event {
	ev := numbered(stream, i)
	ev.AggregateType, ev.AggregateID = []byte("order"), []byte(aggregate)
	return ev
}

// settleOne appends ev, or parks it when it is held, and reports which.
func (r *run) settleOne(t *testing.T, ev *event.Event) (held bool) {
	t.Helper()
	err := r.Append(ev)
	var why *event.Poison
	if errors.As(err, &why) {
		if why.Reason != event.ReasonAggregate {
			t.Fatal(why)
		}
		err, held = r.Park(t.Context(), ev, why), true
	}
	r.n++
	if err := errors.Join(err, r.WaitSettled(t.Context(), r.n)); err != nil {
		t.Fatal(err)
	}
	return held
}

func (r *run) park(t *testing.T, ev *event.Event) {
	t.Helper()
	r.n++
	err := r.Park(t.Context(), ev, &event.Poison{Reason: event.ReasonContent, Detail: "test"})
	if err := errors.Join(err, r.WaitSettled(t.Context(), r.n)); err != nil {
		t.Fatal(err)
	}
}

func TestAggregateIsHeldUntilItsDeadLettersAreGone(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "hold")
	o.Hold = true
	p := newPublisher(t, o)
	r := begin(t, p)
	want := func(i int, aggregate string, held bool) {
		t.Helper()
		if got := r.settleOne(t, ofAggregate(o.Stream, i, aggregate)); got != held {
			t.Fatalf("event %d of aggregate %q: held %t, want %t", i, aggregate, got, held)
		}
	}
	want(1, "a", false)
	r.park(t, ofAggregate(o.Stream, 2, "a"))
	want(3, "a", true)
	want(4, "b", false)
	want(5, "", false)
	r.Close()

	// Another session, and another process, know it from the stream.
	for i, p := range []*Publisher{p, newPublisher(t, o)} {
		r = begin(t, p)
		r.n = 0
		want(6+2*i, "a", true)
		want(7+2*i, "b", false)
		r.Close()
	}

	r = begin(t, p)
	r.n = 0
	dlq, err := n.JetStream(t).Stream(t.Context(), "hold_DLQ")
	if err != nil {
		t.Fatal(err)
	}
	if got := dlq.CachedInfo().State.Msgs; got != 4 {
		t.Fatalf("%d dead letters, want 4", got)
	}
	for seq := uint64(1); seq <= 3; seq++ {
		if err := dlq.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	want(10, "a", true)
	if err := dlq.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	want(11, "a", false)
	want(12, "a", false)
	if got := len(r.hold.held); got != 0 {
		t.Errorf("%d aggregates are still held", got)
	}
}

func TestHoldIsBoundedInMemory(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "many")
	o.Hold = true
	p := newPublisher(t, o)
	r := begin(t, p)
	r.park(t, ofAggregate(o.Stream, 1, "a"))
	for i := range uint64(maxHeld + 10) {
		ev := ofAggregate(o.Stream, 1, fmt.Sprint("x", i))
		r.hold.add(ev)
	}
	if len(r.hold.held) != maxHeld || !r.hold.more {
		t.Fatalf("%d aggregates in memory, more: %t", len(r.hold.held), r.hold.more)
	}
	// What is not in memory is asked for.
	clear(r.hold.held)
	if !r.settleOne(t, ofAggregate(o.Stream, 2, "a")) || r.settleOne(t, ofAggregate(o.Stream, 3, "x1")) {
		t.Error("the stream was not asked")
	}
	if len(r.hold.free) != 1 {
		t.Errorf("%d aggregates are known to be free, want 1", len(r.hold.free))
	}
	r.park(t, ofAggregate(o.Stream, 4, "x1"))
	if !r.settleOne(t, ofAggregate(o.Stream, 5, "x1")) {
		t.Error("an aggregate that was free is not held")
	}
}

func TestManyDeadLettersAreNotRead(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "crowd")
	o.Hold = true
	begin(t, newPublisher(t, o)).Close()
	js := n.JetStream(t)
	for i := range maxLoaded + 1 {
		if _, err := js.PublishAsync(o.deadLetterSubject(ofAggregate(o.Stream, i+1, fmt.Sprint(i))), nil, jetstream.WithStallWait(apiTimeout)); err != nil {
			t.Fatal(err)
		}
	}
	<-js.PublishAsyncComplete()
	r := begin(t, newPublisher(t, o))
	if len(r.hold.held) != 0 || !r.hold.more {
		t.Errorf("%d aggregates held, more: %t", len(r.hold.held), r.hold.more)
	}
	if !r.settleOne(t, ofAggregate(o.Stream, maxLoaded+2, "7")) || r.settleOne(t, ofAggregate(o.Stream, maxLoaded+3, "x")) {
		t.Error("the stream was not asked")
	}
}

func TestAggregatesAreToldApart(t *testing.T) {
	seen := map[string]bool{}
	for _, a := range [][2]string{{"a", "bc"}, {"ab", "c"}, {"", "abc"}, {"1:a", "bc"}, {"a", "b.c"}, {"A", "bc"}} {
		k, ok := keyOf(&event.Event{AggregateType: []byte(a[0]), AggregateID: []byte(a[1])})
		if !ok || seen[k.String()] {
			t.Errorf("%q: %t, %s", a, ok, k)
		}
		seen[k.String()] = true
	}
	if _, ok := keyOf(&event.Event{AggregateType: []byte("a")}); ok {
		t.Error("an aggregate without an id")
	}
}
