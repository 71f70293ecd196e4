package publisher

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestChoiceOfMode(t *testing.T) {
	takes := &jetstream.StreamConfig{Name: "S", AllowAtomicPublish: true}
	plain := &jetstream.StreamConfig{Name: "S"}
	for _, c := range []struct {
		name   string
		o      Options
		stream *jetstream.StreamConfig
		want   Mode
		found  event.Level // of the finding, when there is one
		none   bool
	}{
		{name: "default", stream: takes, want: ModeChain, none: true},
		{name: "syncs now and then", o: Options{Sync: SyncInterval}, stream: takes, want: ModeChain, none: true},
		{name: "syncs always", o: Options{Sync: SyncAlways}, stream: takes, want: ModeAtomic, none: true},
		{name: "syncs always, plain stream", o: Options{Sync: SyncAlways}, stream: plain, want: ModeChain, found: event.WARN},
		{name: "chain on a server that syncs always", o: Options{Sync: SyncAlways, Mode: ModeChain}, stream: plain, want: ModeChain, none: true},
		{name: "atomic", o: Options{Mode: ModeAtomic}, stream: takes, want: ModeAtomic, none: true},
		{name: "atomic, plain stream", o: Options{Mode: ModeAtomic}, stream: plain, want: ModeAtomic, found: event.FAIL},
		{name: "sparse is never chosen", o: Options{Mode: ModeSparse}, stream: plain, want: ModeSparse, none: true},
		{name: "shared", o: Options{Shared: true, Sync: SyncAlways}, stream: takes, want: ModeSingle, none: true},
	} {
		c.o.Stream, c.o.Subjects = "S", []string{"s.>"}
		p, err := New(c.o)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := p.o.choose(c.stream); got.Mode != c.want || got.Reason == "" {
			t.Errorf("%s: got %+v, want %s", c.name, got, c.want)
		}
		found := p.o.judgeMode(c.stream)
		if c.none && len(found) > 0 || !c.none && (len(found) != 1 || found[0].Level != c.found || found[0].Remedy == "") {
			t.Errorf("%s: got %+v", c.name, found)
		}
	}
}

func TestModesThatDoNotGoTogether(t *testing.T) {
	for _, o := range []Options{
		{Mode: ModeSparse, Shared: true}, {Mode: ModeAtomic, Shared: true}, {Mode: "fast"}, {Mode: ModeSingle}, {Sync: "never"},
	} {
		o.Stream, o.Subjects = "S", []string{"s.>"}
		if _, err := New(o); err == nil || event.ClassOf(err) != event.Usage || event.HintOf(err) == "" {
			t.Errorf("%s %s: got %v", o.Mode, o.Sync, err)
		}
	}
}

// modes are those besides the chain, each with what makes it so.
func modes(f func(name string, change func(*Options))) {
	f("sparse", func(o *Options) { o.Mode = ModeSparse })
	f("atomic", func(o *Options) { o.Mode = ModeAtomic })
}

// Every event is stored once and in order, whatever its size and however few are flushed at a time.
func TestModesStoreEverythingInOrder(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	modes(func(name string, change func(*Options)) {
		t.Run(name, func(t *testing.T) {
			o := optionsFor(n, "all-"+name)
			change(&o)
			p := newPublisher(t, o)
			events := numberedLog(o.Stream, 10_000)
			events[9].Payload = nil
			events[10].Payload = []byte("{}\r\n\x00")
			events[11].Payload = make([]byte, 900<<10)
			events[12].Payload = make([]byte, directPayload)
			// As large as the server takes: no header of a batch fits in there.
			events[13].Payload = make([]byte, 1<<20-400)
			events[14].Headers = append(events[14].Headers, event.Header{Name: "Large", Value: bytes.Repeat([]byte("x"), maxHeaderBytes-400)})
			r := begin(t, p)
			for i, ev := range events {
				if err := r.Append(ev); err != nil {
					t.Fatal(err)
				}
				if i < 3 || i > 1000 && i%7 == 0 { // lone events, and some together
					if err := r.Flush(); err != nil {
						t.Fatal(err)
					}
				}
				if r.Full() {
					if err := r.WaitRoom(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
			}
			if err := r.WaitSettled(t.Context(), uint64(len(events))); err != nil {
				t.Fatal(err)
			}
			got := stored(t, n, o.Stream)
			same(t, got, events)
			batched := 0
			for _, m := range got {
				if m.Header.Get(headerBatchID) != "" {
					batched++
				}
			}
			if atomic := p.o.Mode == ModeAtomic; atomic != (batched > 9000) || atomic && got[0].Header.Get(headerBatchID) != "" {
				t.Errorf("%d messages came in batches, the first: %v", batched, got[0].Header)
			}
			r.Close()
			if r = begin(t, p); r.resume.After != events[len(events)-1].Position || r.resume.Gone != 0 {
				t.Fatalf("second resume: %+v", r.resume)
			}
		})
	})
}

// When one message of many is refused, what was in flight is published one by
// one, so that the one to be parked is found.
func TestModesFindTheCulprit(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	modes(func(name string, change func(*Options)) {
		t.Run(name, func(t *testing.T) {
			o := optionsFor(n, "poison-"+name)
			change(&o)
			p := newPublisher(t, o)
			events := numberedLog(o.Stream, 300)
			bad := map[int]bool{37: true, 38: true, 200: true}
			events[37].MsgID, events[38].MsgID = events[5].MsgID, events[36].MsgID
			// The stream takes less than the session knows.
			events[200].Payload = make([]byte, 3000)
			r := begin(t, p)
			st, err := n.JetStream(t).Stream(t.Context(), o.Stream)
			if err != nil {
				t.Fatal(err)
			}
			c := st.CachedInfo().Config
			c.MaxMsgSize = 2000
			if _, err := n.JetStream(t).UpdateStream(t.Context(), c); err != nil {
				t.Fatal(err)
			}
			if err := r.publish(t.Context(), events); err == nil {
				t.Fatal("nothing was refused")
			}
			r.Close()
			if p.doubt.IsZero() {
				t.Fatal("no event is in doubt")
			}
			relay(t, p, events, 12)
			got := stored(t, n, o.Stream)
			if len(got) != len(events) {
				t.Fatalf("got %d messages, want %d", len(got), len(events))
			}
			for i, m := range got {
				marker := strings.HasPrefix(m.Subject, harness.ParkedSubject)
				if marker != bad[i] || m.Header.Get(event.HeaderPos) != events[i].Position.String() {
					t.Errorf("message %d: %s at %s, want %s, parked %t", i, m.Subject, m.Header.Get(event.HeaderPos), events[i].Position, bad[i])
				}
			}
			if letters := stored(t, n, o.Stream+"_DLQ"); len(letters) != len(bad) {
				t.Errorf("%d dead letters, want %d", len(letters), len(bad))
			}
		})
	})
}

// A batch that a connection leaves without its end stores nothing, and whoever
// comes next is not kept waiting by it.
func TestBatchLeftBehind(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "left")
	o.Mode = ModeAtomic
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 500)
	r := begin(t, p)
	for _, ev := range events[:200] {
		if err := r.Append(ev); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.write(); err != nil { // all but the event that is held back
		t.Fatal(err)
	}
	r.Close()
	r = begin(t, p)
	if !r.resume.After.IsZero() || r.resume.Gone != 0 {
		t.Fatalf("resume: %+v", r.resume)
	}
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), events)
}

// A server may allow less than the default, which no client can see.
func TestBatchLimitOfTheServer(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{JetStream: "limits { batch { max_msgs: 100 } }"})
	o := optionsFor(n, "limit")
	o.Mode = ModeAtomic
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 5000)
	relay(t, p, events, 12)
	same(t, stored(t, n, o.Stream), events)
	if p.batchMost > 100 || p.batchMost < 50 {
		t.Errorf("batches of %d", p.batchMost)
	}
}

// Another client's message between two batches is noticed as in a chain: what
// is refused is told, and nothing later is stored in its place.
func TestForeignMessageAmongBatches(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "foreign-batch")
	o.Mode = ModeAtomic
	p := newPublisher(t, o)
	events := numberedLog(o.Stream, 600)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:100]); err != nil {
		t.Fatal(err)
	}
	if _, err := n.JetStream(t).Publish(t.Context(), o.Stream+".x", []byte("not ours")); err != nil {
		t.Fatal(err)
	}
	var s *surprise
	if err := r.publish(t.Context(), events); !errors.As(err, &s) {
		t.Fatalf("got %v, want a surprise", err)
	}
	r.Close()
	if err := refusedResume(t, p); event.ClassOf(err) != event.Precondition || !strings.Contains(err.Error(), "message 101 ") {
		t.Fatalf("got class %d, %v", event.ClassOf(err), err)
	}
	if got := stored(t, n, o.Stream); len(got) != 101 {
		t.Fatalf("%d messages", len(got))
	}
}

func TestModesDoNotAllocate(t *testing.T) {
	modes(func(name string, change func(*Options)) {
		s := deaf(2048)
		change(&s.p.o)
		s.mode, s.p.batchMost = s.p.o.Mode, 1000
		s.batch.session = []byte("session-")
		ev := numbered("outbox", 1)
		n := event.LSN(1)
		step := func() {
			n += 100
			ev.Position = event.Position{Timeline: 1, Commit: n, Change: n - 50}
			err := s.Append(ev)
			if err == nil && n%1700 == 1 {
				err = s.Flush()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		for range 2000 {
			step()
		}
		if got := testing.AllocsPerRun(5000, step); got != 0 {
			t.Errorf("%s: %v allocations an event", name, got)
		}
	})
}

// What a write ends with asks for its ack, wherever its frame is in the out-buffer.
func TestEveryWriteOfASparseSessionAsks(t *testing.T) {
	s := deaf(2048)
	s.mode = ModeSparse
	var out bytes.Buffer
	s.w.conn = into{b: &out}
	for i := range 400 {
		ev := numbered("outbox", i+1)
		ev.Payload = bytes.Repeat([]byte("x"), i*3)
		if i%50 == 40 {
			ev.Payload = make([]byte, directPayload)
		}
		out.Reset()
		if err := s.Append(ev); err != nil {
			t.Fatal(err)
		}
		if i%9 == 0 {
			if err := s.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if out.Len() == 0 {
			continue
		}
		frames := strings.Split(out.String(), "HPUB outbox.")
		control, _, _ := strings.Cut(frames[len(frames)-1], "\r\n")
		f := strings.Fields(control)
		if want := fmt.Sprintf("_INBOX.0123456789012345678901.%d", i+1); len(f) != 4 || f[1] != want {
			t.Fatalf("event %d: %q", i+1, control)
		}
	}
}

// into is a connection that keeps what is written.
type into struct {
	discard
	b *bytes.Buffer
}

func (c into) Write(p []byte) (int, error) { return c.b.Write(p) }
