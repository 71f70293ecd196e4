package publisher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestSessionStoresEverythingInOrder(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	p := newPublisher(t, optionsFor(n, "order"))
	events := numberedLog("order", 20_000)
	events[9].Payload = nil
	events[10].Payload = []byte("{}\r\n\x00")
	events[11].Payload = make([]byte, 900<<10)
	events[12].Payload = make([]byte, directPayload)
	r := begin(t, p)
	if r.resume.Gone != 0 || !r.resume.After.IsZero() || r.resume.Proof != nil {
		t.Fatalf("resume on an empty stream: %+v", r.resume)
	}
	// The ticker is another goroutine.
	ctx, stop := context.WithCancel(t.Context())
	ticked := make(chan error, 1)
	go func() {
		tick := time.NewTicker(5 * time.Millisecond)
		defer tick.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				ticked <- nil
				return
			case <-tick.C:
			}
			if i%20 == 0 {
				r.Tick()
			}
			if k := int(r.Settled()); k > 0 {
				ev := events[k-1]
				c := event.Checkpoint{Events: uint64(k), Position: ev.Position, XID: ev.XID, CommitTime: ev.CommitTime, Confirm: ev.Position.Commit + 0x20}
				if err := r.Checkpoint(t.Context(), c); err != nil {
					ticked <- err
					return
				}
			}
		}
	}()
	err := r.publish(t.Context(), events)
	stop()
	if err := errors.Join(err, <-ticked); err != nil {
		t.Fatal(err)
	}
	if got := r.Settled(); got != 20_000 {
		t.Fatalf("settled %d", got)
	}
	last := events[len(events)-1]
	if err := r.Checkpoint(t.Context(), event.Checkpoint{Events: 20_000, Position: last.Position, XID: last.XID, CommitTime: last.CommitTime, Confirm: 0x7000000}); err != nil {
		t.Fatal(err)
	}
	r.Close()
	select {
	case err := <-r.fails:
		t.Fatalf("Close is no failure, got %v", err)
	default:
	}
	got := stored(t, n, "order")
	same(t, got, events)
	for i, m := range got {
		if m.Sequence != uint64(i+1) || m.Header.Get(headerMsgID) != string(events[i].MsgID) {
			t.Fatalf("message %d has sequence %d, id %q", i, m.Sequence, m.Header.Get(headerMsgID))
		}
	}

	r = begin(t, p)
	if r.resume.After != last.Position || r.resume.Gone != 0 || r.resume.Proof == nil || r.resume.Proof.XID != last.XID {
		t.Fatalf("second resume: %+v", r.resume)
	}
}

func TestWindowIsBoundedByEventsAndBytes(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	for name, change := range map[string]func(*Options){
		"one":    func(o *Options) { o.Window = 1 },
		"three":  func(o *Options) { o.Window = 3 },
		"events": func(o *Options) { o.Window = 16 },
		"bytes":  func(o *Options) { o.WindowBytes = 10_000 },
	} {
		t.Run(name, func(t *testing.T) {
			o := optionsFor(n, "window-"+name)
			change(&o)
			p := newPublisher(t, o)
			r := begin(t, p)
			for i := 1; i <= 500; i++ {
				ev := numbered(o.Stream, i)
				ev.Payload = make([]byte, i%50*40)
				if err := r.Append(ev); err != nil {
					t.Fatal(err)
				}
				if o.Window > 0 && r.appended-r.acked.Load() > uint64(o.Window) {
					t.Fatal("more in flight than the window")
				}
				if r.Full() {
					if err := r.WaitRoom(t.Context()); err != nil {
						t.Fatal(err)
					}
					if r.Full() {
						t.Fatal("full after WaitRoom")
					}
				}
			}
			if err := r.WaitSettled(t.Context(), 500); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestWaitEndsWithItsContext(t *testing.T) {
	s := deaf(8)
	if err := s.Append(numbered("outbox", 1)); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("enough"))
	for _, err := range []error{s.WaitSettled(ctx, 1), s.WaitRoom(ctx)} {
		if err == nil || err.Error() != "enough" {
			t.Errorf("got %v", err)
		}
	}
}

func TestForeignMessageAtTheEnd(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "foreign-end")
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 10)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:5]); err != nil {
		t.Fatal(err)
	}
	if _, err := n.JetStream(t).Publish(t.Context(), o.Stream+".x", []byte("not ours")); err != nil {
		t.Fatal(err)
	}
	err := r.publish(t.Context(), events[:6])
	var s *surprise
	if !errors.As(err, &s) || s.seq != 6 {
		t.Fatalf("got %v, want a surprise at sequence 6", err)
	}
	if got := r.Settled(); got != 5 {
		t.Fatalf("settled %d, want 5", got)
	}
	r.Close()
	for range 2 { // not only once
		err = refusedResume(t, p)
		if event.ClassOf(err) != event.Precondition || !strings.Contains(err.Error(), "message 6") || !strings.Contains(event.HintOf(err), "--adopt-stream") {
			t.Fatalf("got class %d, %v, hint %q", event.ClassOf(err), err, event.HintOf(err))
		}
	}
	o.Adopt = true
	if k := relay(t, newPublisher(t, o), events, 1); k != 1 {
		t.Fatal(k)
	}
	got := stored(t, n, o.Stream)
	if len(got) != 11 || string(got[5].Data) != "not ours" {
		t.Fatalf("got %d messages, %q", len(got), got[5].Data)
	}
	same(t, append(got[:5:5], got[6:]...), events)
	// Adopted once, it is not asked for again.
	r = begin(t, newPublisher(t, optionsFor(n, o.Stream)))
	if r.resume.After != events[9].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
}

// A foreign message takes the place of one event, and the events behind that
// one fit the chain again. The last message is ours then.
func TestForeignMessageInTheMiddle(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "foreign-middle")
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 30)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:5]); err != nil {
		t.Fatal(err)
	}
	if _, err := n.JetStream(t).Publish(t.Context(), o.Stream+".x", []byte("not ours")); err != nil {
		t.Fatal(err)
	}
	err := r.publish(t.Context(), events)
	var s *surprise
	if !errors.As(err, &s) || s.seq != 6 {
		t.Fatalf("got %v, want a surprise at sequence 6", err)
	}
	if got := r.Settled(); got != 5 {
		t.Fatalf("settled %d, want 5", got)
	}
	r.Close()
	// How much of it the server has read when the session hangs up is a matter of chance.
	var got []*jetstream.RawStreamMsg
	for last := -1; len(got) != last; {
		last = len(got)
		if err := n.MustConn(t).Flush(); err != nil {
			t.Fatal(err)
		}
		got = stored(t, n, o.Stream)
	}
	if len(got) < 7 || got[len(got)-1].Header.Get(event.HeaderPos) != events[len(got)-1].Position.String() {
		t.Fatalf("the server has changed: %d messages", len(got))
	}
	// Another process sees it, too.
	for _, p := range []*Publisher{p, newPublisher(t, o)} {
		err = refusedResume(t, p)
		if event.ClassOf(err) != event.Lost || !strings.Contains(err.Error(), "message 6") || !strings.Contains(event.HintOf(err), "--accept-gap") {
			t.Fatalf("got class %d, %v, hint %q", event.ClassOf(err), err, event.HintOf(err))
		}
	}
	o.AcceptGap = true
	r = begin(t, newPublisher(t, o))
	if last := stored(t, n, o.Stream); r.resume.After != events[len(last)-1].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
}

func TestTailIsReadWithinTheWindow(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "tail")
	o.Window = 200
	p := newPublisher(t, o)
	r := begin(t, p)
	if err := r.publish(t.Context(), numberedLog(o.Stream, 1000)); err != nil {
		t.Fatal(err)
	}
	st, err := n.JetStream(t).Stream(t.Context(), o.Stream)
	if err != nil {
		t.Fatal(err)
	}
	for _, seq := range []uint64{801, 900} {
		if err := st.DeleteMsg(t.Context(), seq); err != nil {
			t.Fatal(err)
		}
	}
	tail, err := r.readTail(t.Context(), 801, 1000)
	if err != nil {
		t.Fatal(err)
	}
	if len(tail) != 198 {
		t.Fatalf("got %d messages", len(tail))
	}
	for _, m := range tail {
		if !m.ours || m.position != positionOfEvent(int(m.sequence)) || m.sequence == 900 {
			t.Fatalf("got %+v", m)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.readTail(ctx, 1, 1000); !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	r.Close()
	if r = begin(t, p); r.resume.After != positionOfEvent(1000) {
		t.Fatalf("resumes after %s", r.resume.After)
	}
}

func TestOverdueAckEndsTheSession(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "frozen")
	o.AckTimeout = 50 * time.Millisecond
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 5000)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:10]); err != nil {
		t.Fatal(err)
	}
	n.Freeze()
	ended := make(chan error, 1)
	go func() { ended <- r.publish(t.Context(), events) }()
	tick := time.NewTicker(40 * time.Millisecond) // two unanswered PINGs are not the reason then
	defer tick.Stop()
	var failed error
	for failed == nil {
		select {
		case <-tick.C:
			r.Tick()
		case failed = <-r.fails:
		}
	}
	if event.ClassOf(failed) != event.Transient || !strings.Contains(failed.Error(), "no ack for") || event.HintOf(failed) == "" {
		t.Fatalf("got class %d, %v", event.ClassOf(failed), failed)
	}
	if err := <-ended; !errors.Is(err, failed) {
		t.Fatalf("publish ended with %v", err)
	}
	r.Close()
	n.Thaw()
	relay(t, p, events, 20)
	same(t, stored(t, n, o.Stream), events)
}

func TestTickCountsFromTheSend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := deaf(16)
		s.o.AckTimeout = 2 * time.Second
		s.progressTime = time.Now()
		tick := func() {
			<-time.After(time.Second) // of the bubble's clock
			s.w.pings = 0
			s.Tick()
		}
		tick()
		tick()
		<-time.After(990 * time.Millisecond)
		if err := errors.Join(s.Append(numbered("outbox", 1)), s.Flush()); err != nil {
			t.Fatal(err)
		}
		sent := time.Now()
		for s.check(nil) == nil {
			tick()
		}
		if late := time.Since(sent); late < 2*time.Second || late > 4*time.Second {
			t.Fatalf("gave up after %s", late)
		}
	})
}

func TestSilentServerEndsAnIdleSession(t *testing.T) {
	for _, every := range []time.Duration{10 * time.Millisecond, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			s := deaf(16)
			s.o.AckTimeout = time.Minute
			start := time.Now()
			for s.check(nil) == nil {
				s.Tick()
				<-time.After(every) // of the bubble's clock
			}
			if took := time.Since(start); took < 1900*time.Millisecond || took > 3*time.Second {
				t.Errorf("gave up after %s, with a tick every %s", took, every)
			}
			if err := s.check(nil); event.ClassOf(err) != event.Transient || event.HintOf(err) == "" {
				t.Fatalf("got %v", err)
			}
		})
	}
}

// The ticker also keeps the connection to Postgres alive, so it must not hang.
func TestPingDoesNotWaitForAServerThatDoesNotRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mine, its := net.Pipe()
		defer its.Close()
		w := &wire{conn: mine}
		start := time.Now()
		if err := w.ping(); err == nil || time.Since(start) > 2*time.Second {
			t.Fatalf("got %v after %s", err, time.Since(start))
		}
	})
}

func TestServerKilledInFlight(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	p := newPublisher(t, optionsFor(n, "killed"))
	events := numberedLog("killed", 20_000)
	r := begin(t, p)
	reached := make(chan struct{})
	go func() {
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		for r.Settled() < 5000 && t.Context().Err() == nil {
			<-tick.C
		}
		close(reached)
	}()
	ended := make(chan error, 1)
	go func() { ended <- r.publish(t.Context(), events) }()
	<-reached
	if err := n.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := <-ended; err == nil {
		t.Fatal("the server was killed too late")
	}
	r.Close()
	if r.failure(t) == nil {
		t.Fatal("no failure")
	}
	// What was right once is expected to be right again.
	if _, err := p.Open(t.Context(), func(error) {}); err == nil || event.ClassOf(err) != event.Transient {
		t.Fatalf("open while the server is down: %v", err)
	}
	n.MustStart(t)
	relay(t, p, events, 20)
	same(t, stored(t, n, "killed"), events)
}

func TestPoisonFromAppend(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{MaxPayload: 8 << 10})
	js := n.JetStream(t)
	o := optionsFor(n, "poison")
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: o.Stream, Subjects: []string{"poison.>", "walrelay.parked.poison"}, MaxMsgSize: 4 << 10,
	}); err != nil {
		t.Fatal(err)
	}
	r := begin(t, newPublisher(t, o))
	for _, c := range []struct {
		name   string
		change func(*event.Event)
		want   event.Reason
	}{
		{"over max_payload", func(ev *event.Event) { ev.Payload = make([]byte, 8<<10) }, event.ReasonTooLarge},
		{"over max_msg_size", func(ev *event.Event) { ev.Payload = make([]byte, 4<<10) }, event.ReasonTooLarge},
		{"not bound", func(ev *event.Event) { ev.Subject = []byte("poisonous.a") }, event.ReasonSubject},
		{"invalid subject", func(ev *event.Event) { ev.Subject = []byte("poison.a..b") }, event.ReasonSubject},
		{"wildcard", func(ev *event.Event) { ev.Subject = []byte("poison.*") }, event.ReasonSubject},
		{"header too large", func(ev *event.Event) {
			ev.Headers = append(ev.Headers, event.Header{Name: "Big", Value: make([]byte, maxHeaderBytes)})
		}, event.ReasonHeaders},
	} {
		ev := numbered(o.Stream, 1)
		c.change(ev)
		err := r.Append(ev)
		var poison *event.Poison
		if !errors.As(err, &poison) || poison.Reason != c.want || len(poison.Error()) > 300 {
			t.Errorf("%s: got %v, want %s", c.name, err, c.want)
		}
		if r.appended != 0 || len(r.out) != 0 {
			t.Fatalf("%s: something was appended", c.name)
		}
	}
	events := numberedLog(o.Stream, 3)
	events[2].Payload = make([]byte, 4000-300)
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), events)
}

func TestParkStoresADeadLetterAndAMarker(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "parking")
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 4)
	bad := events[2]
	bad.Subject = []byte("elsewhere\r\n.x")
	bad.Headers = append(bad.Headers, event.Header{Name: "traceparent", Value: []byte("00-ab")})
	why := &event.Poison{Reason: event.ReasonSubject, Detail: "invalid subject"}

	r := begin(t, p)
	for _, ev := range events[:2] {
		if err := r.Append(ev); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.Park(t.Context(), bad, why); err == nil {
		t.Fatal("parked while events before it are in flight")
	}
	if err := r.WaitSettled(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	if _, err := r.storeLetter(t.Context(), bad, why); err != nil {
		t.Fatal(err)
	}
	r.Close() // before the marker is sent
	if got := len(stored(t, n, o.Stream)); got != 2 {
		t.Fatalf("%d messages, want 2", got)
	}

	if k := relay(t, p, events, 1); k != 1 {
		t.Fatal(k)
	}
	letters := stored(t, n, "parking_DLQ")
	if len(letters) != 1 {
		t.Fatalf("%d dead letters, want 1", len(letters))
	}
	l := letters[0]
	for name, want := range map[string]string{
		event.HeaderID: string(bad.ID), event.HeaderPos: bad.Position.String(), event.HeaderTable: "public.outbox",
		event.HeaderSubject: "elsewhere??.x", "traceparent": "00-ab", headerOmitted: "",
	} {
		if got := l.Header.Get(name); got != want {
			t.Errorf("dead letter: %s is %q, want %q", name, got, want)
		}
	}
	if l.Subject != o.deadLetterSubject(bad) || string(l.Data) != string(bad.Payload) ||
		!strings.HasPrefix(l.Header.Get(event.HeaderReason), "subject: ") {
		t.Errorf("dead letter: %+v", l)
	}
	got := stored(t, n, o.Stream)
	if len(got) != 4 {
		t.Fatalf("%d messages, want 4", len(got))
	}
	m := got[2]
	if m.Subject != "walrelay.parked.parking" || len(m.Data) != 0 || m.Header.Get(event.HeaderID) != string(bad.ID) ||
		m.Header.Get(event.HeaderPos) != bad.Position.String() || !strings.HasPrefix(m.Header.Get(event.HeaderReason), "subject: ") {
		t.Errorf("marker: %+v", m)
	}
	same(t, append(got[:2:2], got[3]), append(events[:2:2], events[3]))
}

// Whatever is wrong with an event, its dead letter must be storable: otherwise it stops the others.
func TestParkTakesWhateverIsWrong(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{MaxPayload: 200 << 10})
	o := optionsFor(n, "odd")
	p := newPublisher(t, o)
	long := strings.Repeat("ä", 80<<10)
	own := event.Header{Name: "traceparent", Value: []byte("00-ab")}
	cases := []struct {
		name    string
		change  func(*event.Event)
		omitted string
		own     bool // keeps the event's own headers
	}{
		{"small", func(*event.Event) {}, "", true},
		{"payload over 64 KB", func(ev *event.Event) { ev.Payload = make([]byte, 150<<10) }, "", true},
		{"payload over max_payload", func(ev *event.Event) { ev.Payload = make([]byte, 200<<10) }, "204800", true},
		{"payload and headers", func(ev *event.Event) {
			ev.Payload = make([]byte, 200<<10)
			ev.Headers = append(ev.Headers, event.Header{Name: "Big", Value: []byte(long)})
		}, "204800", false},
		{"headers", func(ev *event.Event) {
			ev.Headers = append(ev.Headers, event.Header{Name: "Big", Value: []byte(long)})
		}, "", false},
		{"header name", func(ev *event.Event) { ev.Headers = append(ev.Headers, event.Header{Name: "a b:c"}) }, "", false},
		{"header value", func(ev *event.Event) {
			ev.Headers = append(ev.Headers, event.Header{Name: "X", Value: []byte("a\r\nNats-Rollup: all\xff")})
		}, "", true},
		{"long id", func(ev *event.Event) { ev.ID, ev.MsgID = []byte(long), []byte(long) }, "", true},
		{"long subject", func(ev *event.Event) { ev.Subject = []byte(long) }, "", true},
		{"nothing but a position", func(ev *event.Event) { *ev = event.Event{Position: ev.Position, Table: ev.Table} }, "", false},
	}
	r := begin(t, p)
	for i, c := range cases {
		ev := numbered(o.Stream, i+1)
		ev.Headers = append(ev.Headers, own)
		c.change(ev)
		if err := r.Park(t.Context(), ev, &event.Poison{Reason: event.ReasonContent, Detail: "test\r\n"}); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if err := r.WaitSettled(t.Context(), uint64(i+1)); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		letters := stored(t, n, "odd_DLQ")
		if len(letters) != i+1 {
			t.Fatalf("%s: %d dead letters, want %d", c.name, len(letters), i+1)
		}
		l := letters[i]
		if got := l.Header.Get(headerOmitted); got != c.omitted || (c.omitted == "") != (len(l.Data) == len(ev.Payload)) {
			t.Errorf("%s: body of %d bytes, omitted %q, want %q", c.name, len(l.Data), got, c.omitted)
		}
		if got := l.Header.Get("traceparent") != ""; got != c.own {
			t.Errorf("%s: own headers kept: %t", c.name, got)
		}
		if l.Header.Get(event.HeaderPos) != ev.Position.String() || l.Header.Get(event.HeaderTable) != ev.Table {
			t.Errorf("%s: %v", c.name, l.Header)
		}
	}
	if got := stored(t, n, o.Stream); len(got) != len(cases) {
		t.Errorf("%d markers, want %d", len(got), len(cases))
	}
}

func TestDeadLetterStreamWithASmallLimit(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "tight")
	if _, err := n.JetStream(t).CreateStream(t.Context(), jetstream.StreamConfig{
		Name: "tight_DLQ", Subjects: []string{"walrelay.dlq.tight.>"}, MaxMsgSize: 2000,
	}); err != nil {
		t.Fatal(err)
	}
	r := begin(t, newPublisher(t, o))
	ev := numbered(o.Stream, 1)
	ev.Payload = make([]byte, 10_000)
	if err := r.Park(t.Context(), ev, &event.Poison{Reason: event.ReasonContent, Detail: "test"}); err != nil {
		t.Fatal(err)
	}
	if l := stored(t, n, "tight_DLQ"); len(l) != 1 || l[0].Header.Get(headerOmitted) != "10000" {
		t.Fatalf("got %+v", l)
	}
}

func TestParkLooksAgainAtTheStream(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "again")
	p := newPublisher(t, o)
	r := begin(t, p)
	ev := numbered(o.Stream, 1)
	ev.Subject = []byte("again2.a")
	err := r.Append(ev)
	var poison *event.Poison
	if !errors.As(err, &poison) {
		t.Fatal(err)
	}
	if _, err := n.JetStream(t).UpdateStream(t.Context(), jetstream.StreamConfig{
		Name: o.Stream, Subjects: []string{"again.>", "again2.>", "walrelay.parked.again"}, AllowDirect: true,
	}); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(r.Park(t.Context(), ev, poison), r.WaitSettled(t.Context(), 1)); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), []*event.Event{ev})
	if l := stored(t, n, "again_DLQ"); len(l) != 0 {
		t.Fatalf("%d dead letters", len(l))
	}
}

func TestDuplicateIDIsPoison(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "twins")
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 10)
	events[5].ID, events[5].MsgID = events[1].ID, events[1].MsgID
	r := begin(t, p)
	err := r.publish(t.Context(), events)
	var s *surprise
	if !errors.As(err, &s) || s.seq != 6 || s.duplicate != 2 {
		t.Fatalf("got %v, want a duplicate of 2 at sequence 6", err)
	}
	r.Close()

	r = begin(t, p)
	if r.resume.After != events[4].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
	err = r.Append(events[5])
	var poison *event.Poison
	if !errors.As(err, &poison) || poison.Reason != event.ReasonDuplicateID {
		t.Fatalf("got %v", err)
	}
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	got := stored(t, n, o.Stream)
	if len(got) != 10 || got[5].Subject != "walrelay.parked.twins" {
		t.Fatalf("got %d messages", len(got))
	}
	same(t, append(got[:5:5], got[6:]...), append(events[:5:5], events[6:]...))
	if l := stored(t, n, "twins_DLQ"); len(l) != 1 || l[0].Header.Get(event.HeaderPos) != events[5].Position.String() {
		t.Fatalf("got %d dead letters", len(l))
	}
}

// A cluster may answer for an event before those before it. Which one is meant is
// then not taken from the turn of the reply.
func TestDuplicateAnsweredOutOfTurnCondemnsNobody(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "early")
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 10)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:5]); err != nil {
		t.Fatal(err)
	}
	r.Close()
	// As if the reply for a later event had been taken for one of the fifth.
	p.twin = &twin{position: events[4].Position, sequence: 2, expected: 5}
	r = begin(t, p)
	if p.condemned != nil || p.twin != nil {
		t.Errorf("condemned %+v, twin %+v", p.condemned, p.twin)
	}
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), events)
}

func TestDuplicateInAnotherStreamIsNoTwin(t *testing.T) {
	s := deaf(16)
	for i := range 2 {
		ev := numbered("outbox", i+1)
		ev.Subject = []byte("outbox.order.created")
		if err := s.Append(ev); err != nil {
			t.Fatal(err)
		}
	}
	s.err = parseReply("orders", 1, nil, []byte(`{"stream":"other","seq":3,"duplicate":true}`))
	s.bequeath()
	if s.p.twin != nil || !s.p.suspect {
		t.Errorf("twin %+v, suspect %t", s.p.twin, s.p.suspect)
	}
	var sup *surprise
	if !errors.As(s.err, &sup) {
		t.Fatal(s.err)
	}
	sup.alone = true
	s.bequeath()
	if c := s.p.condemned; c == nil || c.position != positionOfEvent(1) || c.why.Reason != event.ReasonSubject {
		t.Errorf("condemned %+v", c)
	}
}

func TestCheckpointOfAnotherWriterIsNotOverwritten(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "cas")
	a := begin(t, newPublisher(t, o))
	begin(t, newPublisher(t, o)) // claims the stream
	ev := numbered(o.Stream, 1)
	err := a.Checkpoint(t.Context(), event.Checkpoint{Position: ev.Position, Confirm: 0x5000})
	if err == nil || !strings.Contains(err.Error(), "wrong last sequence") || event.ClassOf(err) != event.Transient {
		t.Fatalf("got %v", err)
	}
	// And without news nothing is written.
	b := begin(t, newPublisher(t, o))
	before := b.revision
	if err := b.Checkpoint(t.Context(), event.Checkpoint{Confirm: 0x100}); err != nil || b.revision != before {
		t.Fatalf("revision %d, then %d: %v", before, b.revision, err)
	}
}

// The ticker writes checkpoints and looks for overdue acks, so a broker that
// answers neither is told after the ack timeout.
func TestCheckpointWaitsNoLongerThanAnAck(t *testing.T) {
	for ack, want := range map[time.Duration]time.Duration{
		10 * time.Millisecond:   time.Second,
		1500 * time.Millisecond: 1500 * time.Millisecond,
		time.Minute:             apiTimeout,
	} {
		s := &Session{o: &Options{AckTimeout: ack}}
		if got := s.checkpointLimit(); got != want {
			t.Errorf("with an ack timeout of %s: got %s, want %s", ack, got, want)
		}
	}
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "slow")
	o.AckTimeout = 50 * time.Millisecond
	r := begin(t, newPublisher(t, o))
	n.Freeze()
	defer n.Thaw()
	began := time.Now()
	err := r.Checkpoint(t.Context(), event.Checkpoint{Position: positionOfEvent(1), Confirm: 0x5000})
	if took := time.Since(began); took < leastCheckpointLimit {
		t.Errorf("it took %s", took)
	}
	if event.ClassOf(err) != event.Transient || !errors.Is(err, context.DeadlineExceeded) || event.HintOf(err) == "" {
		t.Errorf("got %v", err)
	}
	// When the caller gives up, that is the reason.
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if err := r.Checkpoint(ctx, event.Checkpoint{Position: positionOfEvent(1), Confirm: 0x5000}); err == nil || event.HintOf(err) != "" {
		t.Errorf("got %v", err)
	}
}

func TestCheckpointHistory(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "history")
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 9)
	r := begin(t, p)
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	for _, k := range []int{3, 6, 9} {
		ev := events[k-1]
		if err := r.Checkpoint(t.Context(), event.Checkpoint{Events: uint64(k), Position: ev.Position, XID: ev.XID, CommitTime: ev.CommitTime, Confirm: ev.Position.Commit + 0x20}); err != nil {
			t.Fatal(err)
		}
	}
	rs, err := r.earlierCheckpoints(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var got []uint64
	for _, e := range rs {
		got = append(got, e.Sequence)
		if !e.Created.Equal(r.created) || e.Owner != ownerOf(testOrigin()) || e.Window != 4096 || e.Timeline != 1 {
			t.Errorf("got %+v", e)
		}
	}
	if fmt.Sprint(got) != "[9 6 3 0]" {
		t.Fatalf("got %v", got)
	}
	r.Close()

	js := n.JetStream(t)
	kv, err := js.KeyValue(t.Context(), "walrelay")
	if err != nil {
		t.Fatal(err)
	}
	// Deleted by hand: resumes after the last message.
	if err := kv.Delete(t.Context(), o.Stream); err != nil {
		t.Fatal(err)
	}
	r = begin(t, p)
	if r.resume.After != events[8].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
	r.Close()
	if _, err := kv.PutString(t.Context(), o.Stream, "{"); err != nil {
		t.Fatal(err)
	}
	if err := refusedResume(t, p); event.ClassOf(err) != event.Precondition || !strings.Contains(event.HintOf(err), "nats kv") {
		t.Fatalf("got %v", err)
	}
	// The broker forgot: sequences are behind the checkpoint.
	var rec record
	if err := json.Unmarshal(mustJSON(t, rs[0]), &rec); err != nil {
		t.Fatal(err)
	}
	rec.Sequence = 12
	rec.Position = positionOfEvent(12)
	if _, err := kv.Put(t.Context(), o.Stream, mustJSON(t, rec)); err != nil {
		t.Fatal(err)
	}
	r = begin(t, p)
	if r.resume.After != events[8].Position || r.resume.Gone != 0 {
		t.Fatalf("got %+v", r.resume)
	}
	r.Close()
	// The stream was made anew.
	if err := js.DeleteStream(t.Context(), o.Stream); err != nil {
		t.Fatal(err)
	}
	confirmed := testOrigin()
	confirmed.ConfirmedFlush = positionOfEvent(13).Commit
	r = open(t, p)
	if _, err := r.Resume(t.Context(), confirmed); event.ClassOf(err) != event.Lost || !strings.Contains(err.Error(), "created anew") {
		t.Fatalf("got %v", err)
	}
}

func mustJSON(t *testing.T, v any) []byte {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestLostBucket(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "bucket")
	o.Bucket = "bucket-of-its-own"
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 5)
	relay(t, p, events[:3], 1)
	if err := n.JetStream(t).DeleteKeyValue(t.Context(), o.Bucket); err != nil {
		t.Fatal(err)
	}
	relay(t, p, events, 1)
	same(t, stored(t, n, o.Stream), events)
}

// A stream taken over from another source is no place to drop events of this
// one by position, even when nothing was published before the next start.
func TestAdoptedStreamDropsNothing(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "adopted")
	theirs := numberedLog(o.Stream, 8)
	relay(t, newPublisher(t, o), theirs, 1)
	mine := numberedLog(o.Stream, 5) // the same places in another log
	for i, ev := range mine {
		ev.ID = fmt.Appendf(nil, "mine-%d", i)
		ev.MsgID = ev.ID
		ev.Headers[0].Value = ev.ID
	}
	origin := testOrigin()
	origin.Slot = "another"
	resume := func(p *Publisher) (*run, error) {
		r := open(t, p)
		var err error
		r.resume, err = r.Resume(t.Context(), origin)
		return r, err
	}
	r, err := resume(newPublisher(t, o))
	if event.ClassOf(err) != event.Precondition {
		t.Fatalf("got %v", err)
	}
	r.Close()
	o.Adopt = true
	if r, err = resume(newPublisher(t, o)); err != nil {
		t.Fatal(err)
	}
	r.Close()
	o.Adopt = false
	if r, err = resume(newPublisher(t, o)); err != nil {
		t.Fatal(err)
	}
	if err := r.publish(t.Context(), mine); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), append(theirs, mine...))
}

func TestForbiddenSubjectIsPoison(t *testing.T) {
	n := launch(t, harness.NATSOptions{Config: `authorization { users: [
		{user: relay, password: secret, permissions: { publish: { deny: ["perm.forbidden.>"] } } }
	] }`}, natsUser("relay", "secret"))
	o := optionsFor(n, "perm")
	o.Connect = append(o.Connect, natsUser("relay", "secret"))
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 40)
	bad := events[19]
	bad.Subject = []byte("perm.forbidden.a")
	if k := relay(t, p, events, 6); k < 3 {
		t.Fatalf("done after %d sessions: was it ever alone?", k)
	}
	js := n.JetStream(t, natsUser("relay", "secret"))
	got := storedVia(t, js, o.Stream)
	if len(got) != 40 || got[19].Subject != "walrelay.parked.perm" {
		t.Fatalf("got %d messages", len(got))
	}
	same(t, append(got[:19:19], got[20:]...), append(events[:19:19], events[20:]...))
	if l := storedVia(t, js, "perm_DLQ"); len(l) != 1 || !strings.HasPrefix(l[0].Header.Get(event.HeaderReason), "not_authorized: ") {
		t.Fatalf("got %d dead letters", len(l))
	}
}

func TestForbiddenMarkerIsTheOperatorsTask(t *testing.T) {
	n := launch(t, harness.NATSOptions{Config: `authorization { users: [
		{user: relay, password: secret, permissions: { publish: { deny: ["walrelay.parked.>"] } } }
	] }`}, natsUser("relay", "secret"))
	o := optionsFor(n, "marker")
	o.Connect = append(o.Connect, natsUser("relay", "secret"))
	p := newPublisher(t, o)
	r := begin(t, p)
	err := r.Park(t.Context(), numbered(o.Stream, 1), &event.Poison{Reason: event.ReasonContent, Detail: "test"})
	if event.ClassOf(err) != event.Precondition || !strings.Contains(event.HintOf(err), "walrelay.parked.marker") {
		t.Fatalf("got class %d, %v", event.ClassOf(err), err)
	}
	r.Close()
	if p.condemned != nil {
		t.Fatal("condemned an event for the marker's sake")
	}
}

// namesStream lists the sequences of the messages that name the stream they are for.
func namesStream(msgs []*jetstream.RawStreamMsg) (all []uint64) {
	for _, m := range msgs {
		if m.Header.Get(headerExpectedStream) != "" {
			all = append(all, m.Sequence)
		}
	}
	return all
}

func TestFirstMessageOfASubjectNamesTheStream(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	for _, mode := range []Mode{ModeChain, ModeSparse} {
		t.Run(string(mode), func(t *testing.T) {
			o := optionsFor(n, "named-"+string(mode))
			o.Mode = mode
			events := numberedLog(o.Stream, 40) // on seven subjects
			relay(t, newPublisher(t, o), events[:20], 1)
			relay(t, newPublisher(t, o), events, 1)
			got := stored(t, n, o.Stream)
			same(t, got, events)
			if got, want := namesStream(got), []uint64{1, 2, 3, 4, 5, 6, 7, 21, 22, 23, 24, 25, 26, 27}; !slices.Equal(got, want) {
				t.Errorf("the stream is named by %d, want %d", got, want)
			}

			// When the stream gets other writers, the messages without the name are ours all the same.
			// Without a checkpoint there is nothing else to tell by.
			kv, err := n.JetStream(t).KeyValue(t.Context(), o.Bucket)
			if err != nil {
				t.Fatal(err)
			}
			if err := kv.Purge(t.Context(), o.Stream); err != nil {
				t.Fatal(err)
			}
			o.Shared, o.Mode = true, ModeAuto
			more := numberedLog(o.Stream, 45)
			p := newPublisher(t, o)
			if r := begin(t, p); r.resume.After != events[39].Position {
				t.Fatalf("resume: %+v", r.resume)
			}
			relay(t, p, more, 1)
			got = stored(t, n, o.Stream)
			same(t, got, more)
			if got, want := namesStream(got[40:]), []uint64{41, 42, 43, 44, 45}; !slices.Equal(got, want) {
				t.Errorf("on a shared stream it is named by %d, want %d", got, want)
			}
		})
	}
}

func TestSubjectsThatAreTooManyAreNotKept(t *testing.T) {
	var k knownSubjects
	for i := range 2 * subjectsMost {
		s := fmt.Appendf(nil, "outbox.order.%d", i)
		if k.has(s) {
			t.Fatalf("%s is known", s)
		}
		if k.add(s); !k.has(s) {
			t.Errorf("%s is not known, but was the last", s)
		}
	}
	if len(k.known) != subjectsMost || !k.has([]byte("outbox.order.0")) || k.has(fmt.Appendf(nil, "outbox.order.%d", subjectsMost)) {
		t.Errorf("%d subjects are known", len(k.known))
	}
	if k = (knownSubjects{}); k.has(nil) {
		t.Error("no subject is known")
	}
}

// A message that another stream takes, since its last sequence fits by chance, is not taken for stored.
func TestSubjectThatMovesToAnotherStream(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	js := n.JetStream(t)
	o := optionsFor(n, "moved")
	o.Subjects, o.Create = []string{"moved.order.*"}, false
	own := jetstream.StreamConfig{Name: o.Stream, Subjects: []string{"moved.order.*", "moved.bill.*", o.markerSubject()}}
	if _, err := js.CreateStream(t.Context(), own); err != nil {
		t.Fatal(err)
	}
	o.Create = true // of the others
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 6)
	events[2].Subject, events[5].Subject = []byte("moved.bill.1"), []byte("moved.bill.1")
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:5]); err != nil {
		t.Fatal(err)
	}
	own.Subjects = slices.DeleteFunc(own.Subjects, func(s string) bool { return s == "moved.bill.*" })
	if _, err := js.UpdateStream(t.Context(), own); err != nil {
		t.Fatal(err)
	}
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "bills", Subjects: []string{"moved.bill.*"}}); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		if _, err := js.Publish(t.Context(), "moved.bill.0", nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.publish(t.Context(), events[5:]); err == nil || !strings.Contains(err.Error(), `stored in stream "bills"`) || r.Settled() != 5 {
		t.Fatalf("got %v with %d events settled", err, r.Settled())
	}
	r.Close()
	r = begin(t, p)
	if r.resume.After != events[4].Position {
		t.Fatalf("resume: %+v", r.resume)
	}
	if err := r.publish(t.Context(), events[5:]); err != nil {
		t.Fatal(err)
	}
	got := stored(t, n, o.Stream)
	same(t, got[:5], events[:5])
	if len(got) != 6 || got[5].Subject != o.markerSubject() || !strings.HasPrefix(got[5].Header.Get(event.HeaderReason), string(event.ReasonSubject)) {
		t.Errorf("at the end is %+v", got[5])
	}
}
