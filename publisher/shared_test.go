package publisher

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// The world of the table is that of TestDecide, but that other writers have
// filled the stream up to 200, and the newest event of ours is at 105.
func shared() findings {
	f := usual()
	f.lastSeq, f.last, f.tail = 200, &lastMessage{}, nil
	f.own = &tailMessage{lastMessage{ours: true, position: at(2, 0x4000), id: "own"}, 105}
	f.known = &lastMessage{ours: true, position: at(2, 0x3000), id: "known"}
	return f
}

func TestDecideShared(t *testing.T) {
	proof := &event.Checkpoint{Position: at(2, 0x3000), XID: 7, CommitTime: commitAt, Confirm: 0x3010}
	earlier := func(f *findings) {
		e := *f.checkpoint
		e.Sequence, e.Position, e.Confirm, e.XID = 80, at(2, 0x2800), 0x2810, 80
		f.earlier = []record{e}
	}
	earlierProof := &event.Checkpoint{Position: at(2, 0x2800), XID: 80, CommitTime: commitAt, Confirm: 0x2810}
	for _, c := range []struct {
		name   string
		change func(*findings)
		class  event.Class
		text   string // part of the failure, or of the note when class is not set
		after  event.Position
		id     string
		base   uint64
		proof  *event.Checkpoint
	}{
		{
			name: "events of ours after the checkpoint", change: func(*findings) {},
			after: at(2, 0x4000), id: "own", base: 105, proof: proof,
		},
		{
			name: "only messages of others after the checkpoint", change: func(f *findings) { f.own = nil },
			after: at(2, 0x3000), id: "known", base: 100, proof: proof,
		},
		{
			name: "nothing after the checkpoint", change: func(f *findings) { f.own, f.lastSeq = nil, 100 },
			after: at(2, 0x3000), id: "known", base: 100, proof: proof,
		},
		{
			name: "an old event that a stopped relay published late", change: func(f *findings) { f.own.position = at(2, 0x2F00) },
			after: at(2, 0x3000), id: "known", base: 100, proof: proof,
		},
		{
			name: "messages gone: nothing is counted off", change: func(f *findings) { f.own, f.known, f.gone = nil, nil, true },
			after: at(2, 0x3000), base: 100, proof: proof, text: "Nats-Msg-Id alone",
		},
		{
			name: "the checkpoint's place is that of an earlier event", change: func(f *findings) { f.own, f.known.position = nil, at(2, 0x2F00) },
			after: at(2, 0x3000), base: 100, proof: proof,
		},
		{name: "the newest event was acked to this process, not in the checkpoint", change: func(f *findings) {
			f.acked, f.known = 105, &f.own.lastMessage
		}, after: at(2, 0x4000), id: "own", base: 105, proof: proof},
		{
			name: "tables changed", change: func(f *findings) { f.origin.Fingerprint = "more tables" },
			after: at(2, 0x4000), base: 105,
		},

		{name: "fresh stream", change: func(f *findings) { f.checkpoint, f.own, f.known, f.lastSeq = nil, nil, nil, 0 }},
		{
			name: "no trace of ours among others' messages: needs no --adopt-stream", change: func(f *findings) { f.checkpoint, f.own, f.known = nil, nil, nil },
			base: 200, text: "holds no event of this slot",
		},
		{
			name: "lost bucket, an event of ours is left", change: func(f *findings) { f.checkpoint, f.known = nil, nil },
			after: at(2, 0x4000), base: 105, text: "has no checkpoint, resuming",
		},
		{
			name: "lost bucket, the event is of another history", change: func(f *findings) { f.checkpoint, f.known, f.own.position = nil, nil, at(2, 0xA000) },
			base: 200, text: "holds no event of this slot",
		},
		{
			name: "stream and bucket lost, as this process knows", change: func(f *findings) { f.acked, f.checkpoint, f.own, f.known, f.lastSeq = 110, nil, nil, nil, 0 },
			class: event.Lost, text: "lost acked messages and its checkpoint",
		},
		{name: "claimed, nothing published, others' messages lost", change: func(f *findings) {
			f.checkpoint.Position, f.checkpoint.XID, f.own, f.known, f.lastSeq = event.Position{}, 0, nil, nil, 50
		}, base: 50},

		{name: "other format", change: func(f *findings) { f.checkpoint.Version = 2 }, class: event.Precondition, text: "format version 2"},
		{name: "other owner", change: func(f *findings) { f.origin.Slot = "other" }, class: event.Precondition, text: "belongs to"},
		{name: "other owner, adopted", change: func(f *findings) { f.origin.Slot, f.adopt = "other", true }, base: 200, text: "adopting"},
		{
			name: "new system id, nothing of ours after the checkpoint", change: func(f *findings) { f.origin.SystemID, f.own = "new", nil },
			base: 200, text: "new system identifier",
		},
		{
			name: "new system id, events of ours after the checkpoint", change: func(f *findings) { f.origin.SystemID = "new" },
			class: event.Lost, text: "messages after the last checkpoint",
		},
		{name: "another server, accepted", change: func(f *findings) { f.origin.Diverged = true }, base: 200, text: "not the one"},
		{name: "the server went back in time", change: func(f *findings) { f.origin.WALEnd = 0x3800 }, class: event.Lost, text: "WAL of the server ends"},
		{name: "confirmed past the checkpoint", change: func(f *findings) { f.origin.ConfirmedFlush = 0x3011 }, class: event.Lost, text: "past the checkpoint"},
		{
			name: "the same, accepted", change: func(f *findings) { f.origin.ConfirmedFlush, f.acceptGap = 0x3011, true },
			after: at(2, 0x4000), id: "own", base: 105,
		},

		{
			name: "backfill interrupted before the stream was shared", change: func(f *findings) { f.checkpoint.Backfill = backfillRunning },
			class: event.Lost, text: "backfill of stream \"orders\" was interrupted",
		},
		{name: "a table was out of the publication since", change: func(f *findings) {
			f.checkpoint.Tables = map[string][]string{"public.outbox": {"1/r7@9"}}
			f.origin.Tables = map[string][]string{"public.outbox": {"1/r8@9"}}
		}, class: event.Lost, text: "table public.outbox was made anew"},

		{
			name: "last sequence below the checkpoint: heals", change: func(f *findings) { earlier(f); f.lastSeq, f.own, f.known = 90, nil, nil },
			after: at(2, 0x2800), base: 80, proof: earlierProof, text: "publishing them again",
		},
		{name: "the same, an event of ours after the earlier checkpoint is left", change: func(f *findings) {
			earlier(f)
			f.lastSeq, f.own, f.known = 90, &tailMessage{lastMessage{ours: true, position: at(2, 0x2900)}, 85}, nil
		}, after: at(2, 0x2900), base: 85, proof: earlierProof, text: "publishing them again"},
		{
			name: "lost, and others have filled its place", change: func(f *findings) { earlier(f); f.own, f.known = nil, &lastMessage{} },
			after: at(2, 0x2800), base: 80, proof: earlierProof, text: "publishing them again",
		},
		{name: "lost, and Postgres has dropped the WAL", change: func(f *findings) {
			earlier(f)
			f.own, f.known, f.origin.ConfirmedFlush = nil, &lastMessage{}, 0x2F00
		}, class: event.Lost, text: "sequence 100 is not the event any more"},
		{
			name: "lost, no earlier checkpoint", change: func(f *findings) { f.own, f.known = nil, &lastMessage{} },
			class: event.Lost, text: "events from the first one",
		},
		{
			name: "the same, accepted", change: func(f *findings) { f.own, f.known, f.acceptGap = nil, &lastMessage{}, true },
			base: 200, text: "after a gap",
		},
		{
			name: "lost what only this process knows of", change: func(f *findings) { f.acked, f.lastSeq, f.own, f.known = 210, 205, nil, nil },
			class: event.Lost, text: "sequence 210",
		},
		{
			name: "made anew", change: func(f *findings) { f.created, f.own, f.known = madeAt.Add(time.Hour), nil, nil },
			class: event.Lost, text: "created anew",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := shared()
			c.change(&f)
			d, err := decideShared(f)
			if c.class != 0 || err != nil {
				if err == nil {
					t.Fatalf("got %+v, want an error with %q", d.resume, c.text)
				}
				if got := event.ClassOf(err); got != c.class || !strings.Contains(err.Error(), c.text) || event.HintOf(err) == "" {
					t.Fatalf("got class %d, %q, hint %q; want class %d with %q", got, err, event.HintOf(err), c.class, c.text)
				}
				return
			}
			want := event.Resume{After: c.after, AfterID: c.id, Proof: c.proof}
			if !reflect.DeepEqual(d.resume, want) || d.base != c.base {
				t.Fatalf("got %+v proof %+v base %d\nwant %+v proof %+v base %d", d.resume, d.resume.Proof, d.base, want, want.Proof, c.base)
			}
			if got := fmt.Sprint(d.notes); !strings.Contains(got, c.text) || c.text == "" && len(d.notes) > 0 {
				t.Fatalf("notes %s, want %q", got, c.text)
			}
			// What is claimed leads to the same place again, but what was lost
			// must not count as stored.
			r := claim(f, d, 1)
			if d.lost && r.Confirm > f.origin.ConfirmedFlush {
				t.Fatalf("claims %s though events are lost", r.Confirm)
			}
			f.checkpoint, f.adopt, f.acceptGap, f.origin.Diverged, f.acked, f.known = &r, false, false, false, 0, nil
			if f.own != nil && f.own.sequence <= r.Sequence {
				f.own = nil
			}
			again, err := decideShared(f)
			if err != nil || again.resume.After != d.resume.After {
				t.Fatalf("again: %+v, %v", again.resume, err)
			}
		})
	}
}

func TestParseShared(t *testing.T) {
	for _, c := range []struct {
		header, payload string
		sequence        uint64
		duplicate       bool
		text            string // of the surprise
	}{
		{payload: `{"stream":"S","seq":42}`, sequence: 42},
		{payload: `{"stream":"S", "seq":900,"domain":"d"}`, sequence: 900},
		{payload: `{"stream":"S","seq":41}`, text: "not behind 41"},
		{payload: `{"stream":"S","seq":5,"duplicate":true}`, sequence: 5, duplicate: true},
		{payload: `{"stream":"S","seq":43,"duplicate":true}`, sequence: 43, duplicate: true},
		{payload: `{"stream":"S","seq":0,"duplicate":true}`, text: "without a sequence"},
		{payload: `{"stream":"S"}`, text: "sequence"},
		{payload: `{"error":{"code":503,"err_code":10077,"description":"full"}}`, text: "10077"},
		{header: "NATS/1.0 503\r\n\r\n", text: "503"},
		{payload: `?`, text: "no ack"},
	} {
		sequence, duplicate, sup := parseShared(7, 41, []byte(c.header), []byte(c.payload))
		switch {
		case c.text != "":
			if sup == nil || sup.seq != 7 || !strings.Contains(sup.Error(), c.text) {
				t.Errorf("%s: got %v, want %q", c.payload, sup, c.text)
			}
		case sup != nil || sequence != c.sequence || duplicate != c.duplicate:
			t.Errorf("%s: got %d %t %v", c.payload, sequence, duplicate, sup)
		}
	}
}

func TestPlaces(t *testing.T) {
	var p places
	if got := p.upTo(5); got != 0 {
		t.Errorf("got %d without places", got)
	}
	p.add(place{1, 10, 0x100})
	p.add(place{2, 14, 0x100}) // of the same transaction
	p.add(place{3, 17, 0x200})
	for _, c := range []struct{ events, want uint64 }{{1, 0}, {2, 14}, {2, 14}, {9, 17}, {2, 0}, {3, 17}} {
		if got := p.upTo(c.events); got != c.want {
			t.Errorf("up to %d: got %d, want %d", c.events, got, c.want)
		}
	}
	var q places
	for i := range uint64(20 * placesLimit) {
		q.add(place{i + 1, 2 * (i + 1), event.LSN(i + 1)})
		if len(q.queue) > placesLimit {
			t.Fatal("more places than the limit")
		}
	}
	// Never a place behind what was asked for.
	if got := q.upTo(18 * placesLimit); got == 0 || got > 36*placesLimit {
		t.Errorf("got %d", got)
	}
	if got := q.upTo(20 * placesLimit); got != 40*placesLimit {
		t.Errorf("got %d for the last", got)
	}
}

func sharedOptions(n *harness.NATS, stream string) Options {
	o := optionsFor(n, stream)
	o.Shared = true
	o.Subjects = []string{stream + ".order.>"}
	return o
}

// besides makes a shared stream that binds other subjects, too.
func besides(t *testing.T, n *harness.NATS, o Options, edit func(*jetstream.StreamConfig)) jetstream.Stream {
	t.Helper()
	c := jetstream.StreamConfig{Name: o.Stream, Subjects: []string{o.Stream + ".>", "walrelay.parked." + o.Stream}, Storage: jetstream.FileStorage}
	if edit != nil {
		edit(&c)
	}
	st, err := n.JetStream(t).CreateStream(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// others publishes n messages of other clients.
func others(t *testing.T, n *harness.NATS, stream string, count int) {
	t.Helper()
	js := n.JetStream(t)
	for i := range count {
		if _, err := js.Publish(t.Context(), fmt.Sprintf("%s.other.%d", stream, i), []byte("x")); err != nil {
			t.Fatal(err)
		}
	}
}

func ours(all []*jetstream.RawStreamMsg) (own []*jetstream.RawStreamMsg) {
	for _, m := range all {
		if m.Header.Get(event.HeaderPos) != "" {
			own = append(own, m)
		}
	}
	return own
}

func (r *run) checkpointAt(t *testing.T, ev *event.Event) {
	t.Helper()
	c := event.Checkpoint{Events: r.n, Position: ev.Position, XID: ev.XID, CommitTime: ev.CommitTime, Confirm: ev.Position.Commit + 0x20}
	if err := r.Checkpoint(t.Context(), c); err != nil {
		t.Fatal(err)
	}
}

func TestSharedStreamIsResumedAmongOthersMessages(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := sharedOptions(n, "shared")
	besides(t, n, o, nil)
	others(t, n, o.Stream, 20)
	events := numberedLog(o.Stream, 60)
	for i, ev := range events {
		if i%3 != 0 {
			ev.Position.Commit = events[i-i%3].Position.Commit // transactions of three
			ev.Position.Change = ev.Position.Commit - 0x80 + event.LSN(i%3)
		}
	}
	r := begin(t, newPublisher(t, o)) // needs no --adopt-stream
	for i := range 10 {
		if err := r.publish(t.Context(), events[:3*(i+1)]); err != nil {
			t.Fatal(err)
		}
		others(t, n, o.Stream, 7)
	}
	r.checkpointAt(t, events[29])
	if got, want := r.current.Sequence, uint64(20+30+9*7); got != want {
		t.Fatalf("checkpoint at sequence %d, want %d", got, want)
	}
	if err := r.publish(t.Context(), events[:40]); err != nil {
		t.Fatal(err)
	}
	r.Close()
	others(t, n, o.Stream, 1500) // more than a chunk

	r = begin(t, newPublisher(t, o))
	if r.resume.After != events[39].Position || r.resume.AfterID != string(events[39].ID) || r.resume.Proof == nil || r.resume.Gone != 0 {
		t.Fatalf("resume: %+v", r.resume)
	}
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	r.Close()
	others(t, n, o.Stream+".order", 1100) // on the events' subjects
	if r = begin(t, newPublisher(t, o)); r.resume.After != events[59].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
	got := ours(stored(t, n, o.Stream))
	same(t, got, events)
	for _, m := range got {
		if m.Header.Get(headerExpectedLastSeq) != "" || m.Header.Get(headerMsgID) == "" {
			t.Fatalf("headers %v", m.Header)
		}
	}
}

// With its messages consumed, a new session publishes everything after the
// checkpoint again, and the server knows the ids.
func TestSharedWorkQueueReliesOnIDs(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := sharedOptions(n, "queue")
	st := besides(t, n, o, nil)
	events := numberedLog(o.Stream, 50)
	p := newPublisher(t, o)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:10]); err != nil {
		t.Fatal(err)
	}
	r.checkpointAt(t, events[9])
	if err := r.publish(t.Context(), events[:40]); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if err := st.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	others(t, n, o.Stream, 5)
	r = begin(t, newPublisher(t, o))
	if r.resume.After != events[9].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	same(t, ours(stored(t, n, o.Stream)), events[40:])
}

func TestSharedStreamWithAnotherWritersID(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	for _, c := range []struct {
		name        string
		late, purge bool // after the session began; gone from the stream
	}{
		{name: "there"},
		{name: "gone", purge: true}, // known by its sequence, up to which nothing is ours
		{name: "late", late: true},
		{name: "late-gone", late: true, purge: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := sharedOptions(n, "stolen-"+c.name)
			st := besides(t, n, o, nil)
			events := numberedLog(o.Stream, 12)
			steal := func() {
				m := nats.NewMsg(o.Stream + ".other.thief")
				m.Header.Set(headerMsgID, string(events[6].MsgID))
				ack, err := n.JetStream(t).PublishMsg(t.Context(), m)
				if err == nil && c.purge {
					err = st.DeleteMsg(t.Context(), ack.Sequence)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if !c.late {
				steal()
			}
			p := newPublisher(t, o)
			r := begin(t, p)
			if err := r.publish(t.Context(), events[:3]); err != nil {
				t.Fatal(err)
			}
			r.checkpointAt(t, events[2])
			if c.late {
				steal()
			}
			var sup *surprise
			if err := r.publish(t.Context(), events); !errors.As(err, &sup) || sup.duplicate == 0 {
				t.Fatalf("got %v, want a duplicate", err)
			}
			r.Close()
			relay(t, p, events, 1)
			got := ours(stored(t, n, o.Stream))
			if len(got) != 12 || got[6].Subject != "walrelay.parked."+o.Stream || got[6].Header.Get(event.HeaderPos) != events[6].Position.String() {
				t.Fatalf("got %d messages, the seventh %+v", len(got), got[min(6, len(got)-1)])
			}
			dead := stored(t, n, o.Stream+"_DLQ")
			if len(dead) != 1 || !strings.Contains(dead[0].Header.Get(event.HeaderReason), string(event.ReasonDuplicateID)) || string(dead[0].Data) != string(events[6].Payload) {
				t.Fatalf("dead letters: %+v", dead)
			}
		})
	}
}

// A relay that was stopped publishes its last message late.
func TestSharedStreamWithALateMessage(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := sharedOptions(n, "late")
	events := numberedLog(o.Stream, 30)
	late := begin(t, newPublisher(t, o))
	if err := late.publish(t.Context(), events[:4]); err != nil {
		t.Fatal(err)
	}
	if err := late.Append(events[4]); err != nil { // and not flushed
		t.Fatal(err)
	}
	p := newPublisher(t, o)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:20]); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := late.WaitSettled(ctx, 5); err != nil {
		t.Fatal(err) // it is told of the original, which has its position
	}
	late.Close()
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), events)
}

func TestSharedStreamTakesWhatAnExclusiveOneRefuses(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := sharedOptions(n, "settings")
	js := n.JetStream(t)
	if _, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "elsewhere", Subjects: []string{"elsewhere.>"}}); err != nil {
		t.Fatal(err)
	}
	besides(t, n, o, func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "elsewhere"}} })
	alone := o
	alone.Shared = false
	if _, err := newPublisher(t, alone).Open(t.Context(), func(error) {}); event.ClassOf(err) != event.Precondition || !strings.Contains(event.HintOf(err), "--shared-stream") {
		t.Fatalf("got %v, hint %q", err, event.HintOf(err))
	}
	// An event of another stream, which a source brings, is not ours.
	m := nats.NewMsg("elsewhere.x")
	m.Header.Set(event.HeaderPos, positionOfEvent(20).String())
	m.Header.Set(headerExpectedStream, "elsewhere")
	if _, err := js.PublishMsg(t.Context(), m); err != nil {
		t.Fatal(err)
	}
	p := newPublisher(t, o)
	if p.o.Window != 1 {
		t.Fatalf("window %d", p.o.Window)
	}
	events := numberedLog(o.Stream, 10)
	relay(t, p, events, 1)
	r := begin(t, newPublisher(t, o))
	if r.resume.After != events[9].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
}

func TestSharedStreamThatForgot(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := sharedOptions(n, "forgot")
	besides(t, n, o, nil)
	events := numberedLog(o.Stream, 20)
	p := newPublisher(t, o)
	r := begin(t, p)
	if err := r.publish(t.Context(), events[:10]); err != nil {
		t.Fatal(err)
	}
	r.checkpointAt(t, events[9])
	// A checkpoint of what the stream never had, as after a power cut, and
	// others have filled the place.
	c := r.current
	c.Sequence, c.Position, c.Confirm, c.XID = 15, events[14].Position, events[14].Position.Commit+0x20, events[14].XID
	if err := r.writeCheckpoint(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	r.Close()
	others(t, n, o.Stream, 20)
	r = open(t, newPublisher(t, o))
	origin := testOrigin()
	origin.ConfirmedFlush = events[9].Position.Commit + 0x10
	var err error
	if r.resume, err = r.Resume(t.Context(), origin); err != nil {
		t.Fatal(err)
	}
	if r.resume.After != events[9].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	same(t, ours(stored(t, n, o.Stream)), events)
	// Postgres has dropped too much for the next one.
	if err := r.writeCheckpoint(t.Context(), c); err != nil {
		t.Fatal(err)
	}
	r.Close()
	r = open(t, newPublisher(t, o))
	origin.ConfirmedFlush = events[19].Position.Commit + 0x20
	if _, err := r.Resume(t.Context(), origin); event.ClassOf(err) != event.Lost {
		t.Fatalf("got %v", err)
	}
}

func TestSharedStreamTakesNoBackfill(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "nobackfill")
	o.Shared = true
	origin := testOrigin()
	origin.Backfill = true
	_, err := open(t, newPublisher(t, o)).Resume(t.Context(), origin)
	wantFailure(t, err, event.Usage, "a stream of its own")
}
