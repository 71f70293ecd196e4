package publisher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// launch starts a server whose clients need connect to be let in.
func launch(t *testing.T, o harness.NATSOptions, connect ...nats.Option) *harness.NATS {
	t.Helper()
	n, err := harness.CreateNATS(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Remove(); err != nil {
			t.Error(err)
		}
	})
	if err := n.Launch(); err != nil {
		t.Fatal(err)
	}
	every := time.NewTicker(10 * time.Millisecond)
	defer every.Stop()
	deadline := time.After(30 * time.Second)
	for {
		err := reachable(n, connect)
		if err == nil {
			return n
		}
		select {
		case <-every.C:
		case <-deadline:
			t.Fatalf("nats-server does not answer: %v\n%s", err, n.Log())
		}
	}
}

func reachable(n *harness.NATS, connect []nats.Option) error {
	nc, err := nats.Connect(n.URL(), append(connect, nats.NoReconnect(), nats.Timeout(time.Second))...)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(time.Second))
	if err != nil {
		return err
	}
	_, err = js.AccountInfo(context.Background())
	return err
}

// optionsFor are those of a relay that may create everything.
func optionsFor(n *harness.NATS, stream string) Options {
	return Options{
		URL: n.URL(), Connect: n.Auth(), Stream: stream, Subjects: []string{stream + ".>"},
		Create: true, Park: true, Bucket: "walrelay",
	}
}

func newPublisher(t *testing.T, o Options) *Publisher {
	t.Helper()
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// run is a session with the way it failed.
type run struct {
	*Session
	resume event.Resume
	fails  chan error
	n      uint64 // counted off or appended
}

func open(t *testing.T, p *Publisher) *run {
	t.Helper()
	r := &run{fails: make(chan error, 8)}
	s, err := p.Open(t.Context(), func(err error) { r.fails <- err })
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	r.Session = s
	t.Cleanup(func() { s.Close() })
	return r
}

// begin opens a session and resumes.
func begin(t *testing.T, p *Publisher) *run {
	t.Helper()
	r := open(t, p)
	var err error
	if r.resume, err = r.Resume(t.Context(), testOrigin()); err != nil {
		t.Fatalf("resume: %v", err)
	}
	return r
}

// refusedResume opens a session that must not resume, and returns why.
func refusedResume(t *testing.T, p *Publisher) error {
	t.Helper()
	r := open(t, p)
	_, err := r.Resume(t.Context(), testOrigin())
	if err == nil {
		t.Fatal("resumed")
	}
	r.Close()
	return err
}

func (r *run) failure(t *testing.T) error {
	t.Helper()
	select {
	case err := <-r.fails:
		return err
	case <-time.After(20 * time.Second):
		t.Fatal("the session did not fail")
		return nil
	}
}

func testOrigin() event.Origin {
	return event.Origin{
		SystemID: "7300000000000000001", Database: "shop", Slot: "walrelay",
		Timeline: 1, WALEnd: 1 << 40, ConfirmedFlush: 0x100, Fingerprint: "f",
	}
}

func positionOfEvent(i int) event.Position {
	commit := event.LSN(0x10000 + 0x100*i)
	return event.Position{Timeline: 1, Commit: commit, Change: commit - 0x80}
}

// numbered is the i-th event of a log, from 1.
func numbered(stream string, i int) *event.Event {
	id := fmt.Appendf(nil, "0d2f7f0e-6a3e-4f55-9b43-%012d", i)
	return &event.Event{
		ID: id, MsgID: id, Subject: fmt.Appendf(nil, "%s.order.%d", stream, i%7), Payload: fmt.Appendf(nil, `{"n": %d, "price": 1.10}`, i),
		Position: positionOfEvent(i), XID: uint32(i), CommitTime: commitAt,
		Headers: []event.Header{{Name: event.HeaderID, Value: id}},
		Table:   "public.outbox",
	}
}

func numberedLog(stream string, n int) []*event.Event {
	events := make([]*event.Event, n)
	for i := range events {
		events[i] = numbered(stream, i+1)
	}
	return events
}

// publish does what the relay does with a log from its beginning.
func (r *run) publish(ctx context.Context, events []*event.Event) error {
	gone := r.resume.Gone
	alone := r.resume.Suspect
	for _, ev := range events {
		if ev.Position.Compare(r.resume.After) <= 0 {
			continue
		}
		if gone > 0 {
			var err error
			if gone, err = r.Recall(ctx, ev); err != nil {
				return err
			}
			if gone == 0 {
				err = r.Resumed(ctx, event.Checkpoint{Position: ev.Position, XID: ev.XID, CommitTime: ev.CommitTime})
			}
			if err != nil {
				return err
			}
			continue
		}
		err := r.Append(ev)
		var poison *event.Poison
		if errors.As(err, &poison) {
			if err = r.WaitSettled(ctx, r.n); err == nil {
				err = r.Park(ctx, ev, poison)
			}
		}
		if err != nil {
			return err
		}
		r.n++
		r.resume.After = ev.Position
		if alone {
			alone = false
			err = r.WaitSettled(ctx, r.n)
		} else if r.Full() {
			err = r.WaitRoom(ctx)
		}
		if err != nil {
			return err
		}
	}
	return r.WaitSettled(ctx, r.n)
}

// relay publishes the log in as many sessions as it takes, up to tries, and
// returns how many it took.
func relay(t *testing.T, p *Publisher, events []*event.Event, tries int) int {
	t.Helper()
	var last error
	for i := 1; i <= tries; i++ {
		s, err := p.Open(t.Context(), func(error) {})
		if err != nil {
			last = err
			continue
		}
		r := &run{Session: s}
		if r.resume, err = s.Resume(t.Context(), testOrigin()); err == nil {
			err = r.publish(t.Context(), events)
		}
		s.Close()
		if err == nil {
			return i
		}
		last = err
	}
	t.Fatalf("not done after %d sessions: %v", tries, last)
	return 0
}

// stored reads a whole stream.
func stored(t *testing.T, n *harness.NATS, stream string) []*jetstream.RawStreamMsg {
	t.Helper()
	return storedVia(t, n.JetStream(t), stream)
}

func storedVia(t *testing.T, js jetstream.JetStream, stream string) []*jetstream.RawStreamMsg {
	t.Helper()
	var all []*jetstream.RawStreamMsg
	for m, err := range harness.Messages(t.Context(), js, stream, jetstream.OrderedConsumerConfig{}) {
		if err != nil {
			t.Fatal(err)
		}
		meta, err := m.Metadata()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, &jetstream.RawStreamMsg{Subject: m.Subject(), Header: m.Headers(), Data: m.Data(), Sequence: meta.Sequence.Stream})
	}
	return all
}

// same fails unless the messages are the events, each once and in order.
func same(t *testing.T, got []*jetstream.RawStreamMsg, want []*event.Event) {
	t.Helper()
	for i := range min(len(got), len(want)) {
		g, w := got[i], want[i]
		if g.Subject != string(w.Subject) || string(g.Data) != string(w.Payload) ||
			g.Header.Get(event.HeaderPos) != w.Position.String() || g.Header.Get(event.HeaderID) != string(w.ID) {
			t.Fatalf("message %d, sequence %d: got %s %s at %s, want %s %s at %s", i, g.Sequence,
				g.Subject, g.Header.Get(event.HeaderID), g.Header.Get(event.HeaderPos), w.Subject, w.ID, w.Position)
		}
	}
	if len(got) != len(want) {
		t.Fatalf("got %d messages, want %d", len(got), len(want))
	}
}

func natsUser(user, password string) nats.Option { return nats.UserInfo(user, password) }
