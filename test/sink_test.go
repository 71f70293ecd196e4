package test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// onCluster puts a cluster of three in the place of the rig's broker.
func onCluster(c **harness.Cluster) rigOptions {
	return rigOptions{
		args: []string{"--stream-replicas", "3"},
		prepare: func(r *rig) {
			*c = harness.RunCluster(r.t, 3, harness.NATSOptions{})
			r.js, r.natsURL = (*c).JetStream(r.t), (*c).URL()
		},
	}
}

// consumer collects what a stream delivers, and acks it.
type consumer struct {
	mu   sync.Mutex
	got  []harness.Stored
	last uint64 // stream sequence
	wake chan struct{}
}

// consume reads the stream through a durable consumer until the test ends.
func (r *rig) consume() *consumer {
	r.t.Helper()
	cons, err := r.js.CreateConsumer(r.t.Context(), stream, jetstream.ConsumerConfig{
		Durable: "worker", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 5 * time.Minute, MaxAckPending: 10_000,
	})
	must(r.t, err)
	c := &consumer{wake: make(chan struct{}, 1)}
	read, err := cons.Consume(func(m jetstream.Msg) {
		meta, err := m.Metadata()
		if err != nil {
			return
		}
		h := m.Headers()
		c.mu.Lock()
		c.got = append(c.got, harness.Stored{
			Seq: meta.Sequence.Stream, Subject: m.Subject(), Payload: slices.Clone(m.Data()),
			ID: h.Get(event.HeaderID), Pos: h.Get(event.HeaderPos), Aggregate: h.Get(event.HeaderAggregateID),
		})
		c.last = meta.Sequence.Stream
		c.mu.Unlock()
		_ = m.Ack() // a lost one shows as a message that stays
		select {
		case c.wake <- struct{}{}:
		default:
		}
	})
	must(r.t, err)
	r.t.Cleanup(read.Stop)
	return c
}

// reach blocks until the consumer has seen a sequence.
func (c *consumer) reach(t testing.TB, seq uint64) {
	t.Helper()
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	for {
		c.mu.Lock()
		last := c.last
		c.mu.Unlock()
		if last >= seq {
			return
		}
		select {
		case <-c.wake:
		case <-limit.C:
			t.Fatalf("consumed up to sequence %d, want %d", last, seq)
		}
	}
}

func (c *consumer) consumed() []harness.Stored {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.got)
}

// state reads the stream's state from its leader.
func (r *rig) state() jetstream.StreamState {
	r.t.Helper()
	var last error
	for range 50 {
		ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Second)
		st, err := r.js.Stream(ctx, stream)
		cancel()
		if err == nil {
			return st.CachedInfo().State
		}
		last = err
	}
	r.t.Fatal(last)
	return jetstream.StreamState{}
}

// Messages leave these streams, by being consumed, by age or by hand, so that
// the place to go on from is not in the last message. Everything is delivered
// once and in order all the same.
func TestStreamsThatMessagesLeave(t *testing.T) {
	for _, c := range []struct {
		name    string
		cluster bool
		edit    func(*jetstream.StreamConfig)
		empty   func(*rig) // makes the messages leave that do not by themselves
	}{
		{name: "work queue", edit: func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy }},
		{name: "work queue on three servers", cluster: true, edit: func(c *jetstream.StreamConfig) {
			c.Retention, c.Replicas = jetstream.WorkQueuePolicy, 3
		}},
		{name: "interest", edit: func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }},
		{name: "purged", empty: func(r *rig) {
			st, err := r.js.Stream(r.t.Context(), stream)
			must(r.t, err)
			must(r.t, st.Purge(r.t.Context()))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			rng := rand.New(rand.NewPCG(seed, 0))
			var o rigOptions
			var cluster *harness.Cluster
			if c.cluster {
				o = onCluster(&cluster)
			}
			o.args = append(o.args, "--window", "512", "--backoff-max", "200ms")
			r := newRig(t, o)
			r.createStream(c.edit)
			worker := r.consume()
			ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Seed: seed, Rows: 20})
			const rounds, events = 8, 1500
			for i := range rounds {
				must(t, ws.Run(t.Context(), events))
				// Half of the relays die before they write a checkpoint.
				status := "20ms"
				if i%2 == 0 {
					status = "1h"
				}
				r.relay.Args = append(r.relay.Args, "--status-interval", status)
				r.relay.MustStart(t)
				at := r.state().LastSeq + 1 + rng.Uint64N(events)
				if left := uint64(ws.Diary.Committed()); at > left {
					at = left
				}
				r.await(time.Minute, fmt.Sprintf("sequence %d", at), func() bool { return r.state().LastSeq >= at })
				must(t, r.relay.Kill())
				if i%4 > 1 { // let no message be left at the restart
					worker.reach(t, r.state().LastSeq)
					if c.empty != nil {
						// What the dead relay had sent may still lie in the server's socket.
						r.await(20*time.Second, "the server has let go of the dead relay", func() bool { return r.clients("walrelay") == 0 })
						worker.reach(t, r.state().LastSeq)
						c.empty(r)
					}
					r.await(20*time.Second, "the stream is empty", func() bool { return r.state().Msgs == 0 })
				}
			}
			r.relay.MustStart(t)
			r.relay.MustAwait(t, 30*time.Second, "msg=streaming")
			worker.reach(t, uint64(ws.Diary.Committed()))
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
			worker.reach(t, r.state().LastSeq)
			res := harness.Compare(ws.Diary, worker.consumed())
			if !res.OK() {
				t.Errorf("consumed and committed disagree: %s", res)
			}
			t.Log(res)
		})
	}
}

// clients is the number of connections of that name at the broker.
func (r *rig) clients(name string) int {
	r.t.Helper()
	var z struct {
		Connections []struct {
			Name string `json:"name"`
		} `json:"connections"`
	}
	must(r.t, r.nats.Monitor("/connz", &z))
	n := 0
	for _, c := range z.Connections {
		if c.Name == name {
			n++
		}
	}
	return n
}

// tampered is a rig on whose stream 200 events lie, with its relay stopped.
type tampered struct {
	*rig
	t      *testing.T
	ws     *harness.Writers
	before int // events that were committed when the relay stopped
}

// more commits further events.
func (r *tampered) more() { must(r.t, r.ws.Run(r.t.Context(), 100)) }

func (r *tampered) foreign(n int) {
	r.t.Helper()
	for range n {
		_, err := r.js.PublishMsg(r.t.Context(), &nats.Msg{Subject: "outbox.foreign", Data: []byte("not of the relay")})
		must(r.t, err)
	}
}

func (r *tampered) kv() jetstream.KeyValue {
	r.t.Helper()
	kv, err := r.js.KeyValue(r.t.Context(), "walrelay")
	must(r.t, err)
	return kv
}

func TestWhatTheStreamHolds(t *testing.T) {
	const anLSN = `[0-9A-F]+/[0-9A-F]+`
	for _, c := range []struct {
		name   string
		args   []string
		tamper func(r *tampered) // of the stream or the slot; the relay is down
		code   int               // of the next start; 0 when it goes on
		err    string            // regular expression for the whole message
		hint   string            // part of the hint
		logs   string            // part of the log of the start that goes on
		flag   string            // which makes it go on
		lost   func(r *tampered) int
		gone   bool // what was stored before is not in the stream any more
	}{
		{
			name:   "stream deleted and created again",
			tamper: func(r *tampered) { must(r.t, r.js.DeleteStream(r.t.Context(), stream)); r.more() },
			code:   5, err: `stream "OUTBOX" was created anew: its last sequence is 0, the checkpoint's is \d+, and Postgres has dropped the WAL up to ` + anLSN + `: events from the first one up to there are missing`,
			hint: "restore the stream, or go on with --accept-gap: events up to the slot's confirmed LSN stay missing, later ones are published",
			flag: "--accept-gap", logs: "going on after a gap", gone: true,
		},
		{
			name: "checkpoint bucket deleted",
			tamper: func(r *tampered) {
				must(r.t, r.js.DeleteKeyValue(r.t.Context(), "walrelay"))
				r.more()
			},
			code: 5, err: `stream "OUTBOX" has no checkpoint, and slot "walrelay" is confirmed up to ` + anLSN + `, past its last event, sequence \d+ at [0-9A-F:/]+: events between may be missing`,
			hint: "walrelay slot recover walrelay finds the rows that the stream lacks",
			flag: "--accept-gap", logs: "the stream has no checkpoint, resuming after its last message",
		},
		{
			name: "checkpoint bucket deleted and stream purged",
			tamper: func(r *tampered) {
				must(r.t, r.js.DeleteKeyValue(r.t.Context(), "walrelay"))
				st, err := r.js.Stream(r.t.Context(), stream)
				must(r.t, err)
				must(r.t, st.Purge(r.t.Context()))
				r.more()
			},
			code: 3, err: `the last of \d+ messages of stream "OUTBOX" is gone, and it has no checkpoint of walrelay`,
			hint: "--adopt-stream", flag: "--adopt-stream", logs: "adopting the stream", gone: true,
		},
		{
			name: "older checkpoint restored",
			tamper: func(r *tampered) {
				history, err := r.kv().History(r.t.Context(), stream)
				must(r.t, err)
				_, err = r.kv().Put(r.t.Context(), stream, history[0].Value())
				must(r.t, err)
				r.more()
			},
			code: 5, err: `slot "walrelay" is confirmed up to ` + anLSN + `, past the checkpoint of stream "OUTBOX" at ` + anLSN + `: events between may be missing in the stream`,
			hint: "go on with --accept-gap", flag: "--accept-gap",
		},
		{
			name: "older checkpoint restored, but nothing is confirmed past it",
			args: []string{"--confirm-delay", "1h"},
			tamper: func(r *tampered) {
				history, err := r.kv().History(r.t.Context(), stream)
				must(r.t, err)
				_, err = r.kv().Put(r.t.Context(), stream, history[0].Value())
				must(r.t, err)
				r.more()
			},
		},
		{
			name: "another slot on the stream",
			tamper: func(r *tampered) {
				r.must("slot", "create", "second", "--dsn", r.dsn, "--publication", publication)
				r.relay.Args = append(r.relay.Args, "--slot", "second")
				r.more()
			},
			code: 3, err: `stream "OUTBOX" belongs to slot "walrelay" of database "postgres" \(system \d+\), not to slot "second" of database "postgres" \(system \d+\)`,
			hint: "give each slot a stream of its own with --stream", flag: "--adopt-stream", logs: "adopting the stream of another owner",
		},
		{
			name: "foreign history without a trace of walrelay",
			tamper: func(r *tampered) {
				must(r.t, r.js.DeleteStream(r.t.Context(), stream))
				must(r.t, r.js.DeleteKeyValue(r.t.Context(), "walrelay"))
				r.createStream(nil)
				r.foreign(5)
				r.more()
			},
			code: 3, err: `stream "OUTBOX" has 5 messages of another origin and no checkpoint of walrelay`,
			hint: "give walrelay a stream of its own with --stream, or let it go on after sequence 5 with --adopt-stream",
			flag: "--adopt-stream", logs: "adopting the stream", gone: true,
		},
		{
			name:   "foreign message at the end",
			tamper: func(r *tampered) { r.foreign(2); r.more() },
			code:   3, err: `message \d+ of stream "OUTBOX" was not written by walrelay`,
			hint: "stop the other writer", flag: "--adopt-stream", logs: "going on after messages of another client",
		},
		{
			name: "slot advanced by hand",
			tamper: func(r *tampered) {
				r.more()
				r.exec("select pg_replication_slot_advance('" + slot + "', pg_current_wal_lsn())")
			},
			code: 5, err: `slot "walrelay" is confirmed up to ` + anLSN + `, past the checkpoint of stream "OUTBOX" at ` + anLSN + `: events between may be missing in the stream`,
			hint: "if the slot was advanced or created again on purpose, go on with --accept-gap; the events between are not published then",
			flag: "--accept-gap", lost: func(r *tampered) int { return r.ws.Diary.Committed() - r.before },
		},
		{
			name: "slot dropped and created again",
			tamper: func(r *tampered) {
				r.must("slot", "drop", slot, "--yes", "--dsn", r.dsn)
				r.more()
				r.must("slot", "create", slot, "--dsn", r.dsn, "--publication", publication)
			},
			code: 5, err: `slot "walrelay" is confirmed up to ` + anLSN + `, past the checkpoint of stream "OUTBOX" at ` + anLSN + `: events between may be missing in the stream`,
			hint: "--accept-gap", flag: "--accept-gap", lost: func(r *tampered) int { return r.ws.Diary.Committed() - r.before },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := &tampered{rig: newRig(t, rigOptions{args: append([]string{"--status-interval", "100ms"}, c.args...)}), t: t}
			r.ws = harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 7, Plain: true})
			r.relay.MustStart(t)
			must(t, r.ws.Run(t.Context(), 200))
			r.before = r.ws.Diary.Committed()
			r.stored(r.before, 30*time.Second)
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}
			c.tamper(r)
			lost := 0
			if c.lost != nil {
				lost = c.lost(r)
			}
			if c.gone {
				lost += r.before
			}
			if c.code != 0 {
				// Asked again, it says the same.
				for range 2 {
					ran := harness.MustRun(t, nil, r.relay.Args...)
					told(t, ran.Code, ran.Stderr, c.code, c.err, c.hint)
				}
			}
			args := r.relay.Args
			if c.flag != "" {
				r.relay.Args = append(slices.Clone(args), c.flag)
			}
			r.relay.MustStart(t)
			if c.logs != "" {
				r.relay.MustAwait(t, 20*time.Second, c.logs)
			}
			must(t, r.ws.Run(t.Context(), 50))
			r.settled(lost)
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}
			// The flag is for once.
			r.relay.Args = args
			r.relay.MustStart(t)
			r.relay.MustAwait(t, 20*time.Second, "streaming")
			must(t, r.ws.Run(t.Context(), 50))
			r.settled(lost)
		})
	}
}

// told checks the exit code, the whole message and a part of the hint.
func told(t testing.TB, code int, output string, want int, msg, hint string) {
	t.Helper()
	if code != want {
		t.Errorf("exit code %d, want %d\n%s", code, want, output)
	}
	if !regexp.MustCompile(`(?m)^error: ` + msg + `$`).MatchString(output) {
		t.Errorf("no line %q in\n%s", "error: "+msg, output)
	}
	_, hints, _ := strings.Cut(output, "\nhint: ")
	if !strings.Contains(hints, hint) {
		t.Errorf("no hint %q in\n%s", hint, output)
	}
}

// settled waits until all but the lost events are stored, and compares. Foreign
// messages are let be.
func (r *tampered) settled(lost int) {
	r.t.Helper()
	var res *harness.Result
	deadline := time.Now().Add(20 * time.Second)
	for {
		all := slices.DeleteFunc(r.read(), func(m harness.Stored) bool { return m.ID == "" })
		if res = harness.Compare(r.ws.Diary, all); len(res.Missing) <= lost || time.Now().After(deadline) {
			break
		}
	}
	missing := res.Missing
	res.Missing = nil
	if !res.OK() {
		r.t.Errorf("stream and table disagree: %s", res)
	}
	if len(missing) != lost {
		r.t.Errorf("%d events missing, want %d: %s", len(missing), lost, res)
	}
}

// Two relays with slots of their own cannot share a stream: the second is
// refused and the first does not notice.
func TestSecondSlotOnTheStreamOfARunningRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.must("slot", "create", "second", "--dsn", r.dsn, "--publication", publication)
	r.relay.MustStart(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Rate: 300, Seed: 12})
	writing := in(func() error { return ws.Run(ctx, -1) })
	r.stored(200, 30*time.Second)
	ran := harness.MustRun(t, nil, append(slices.Clone(r.relay.Args), "--slot", "second")...)
	told(t, ran.Code, ran.Stderr, 3, `stream "OUTBOX" belongs to slot "walrelay" of database "postgres" \(system \d+\), not to slot "second" of database "postgres" \(system \d+\)`,
		"give each slot a stream of its own with --stream; to take this one over for good, stop its relay, then use --adopt-stream")
	r.stored(ws.Diary.Committed()+100, 30*time.Second)
	stop()
	must(t, writing())
	t.Log(r.drained(ws, 30*time.Second))
	if out := r.relay.Output(); strings.Contains(out, "session ended") {
		t.Errorf("the first relay was disturbed:\n%s", out)
	}
}

// A client that publishes to the relay's stream while it runs is found out.
func TestForeignWriter(t *testing.T) {
	for _, c := range []struct {
		name string
		rate int // transactions a second
	}{
		{"between two events", 0},
		{"under load", 2000},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := &tampered{rig: newRig(t, rigOptions{}), t: t}
			load := harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 8, Plain: true}
			if c.rate == 0 {
				load.Writers, load.Rows = 1, 1
			}
			r.ws = harness.NewWriters(load)
			r.relay.MustStart(t)
			must(t, r.ws.Run(t.Context(), 200))
			r.stored(r.ws.Diary.Committed(), 30*time.Second)
			if c.rate > 0 {
				ctx, stop := context.WithCancel(t.Context())
				r.ws.SetRate(c.rate)
				writing := in(func() error { return r.ws.Run(ctx, -1) })
				r.stored(r.ws.Diary.Committed()+500, 30*time.Second)
				r.foreign(1)
				<-r.relay.Done()
				stop()
				must(t, writing())
			} else {
				r.foreign(1)
				must(t, r.ws.Run(t.Context(), 1))
			}
			wait, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			code, err := r.relay.Wait(wait)
			must(t, err)
			lost, flag := 0, "--adopt-stream"
			if code == 5 {
				// The event in whose place the message lies is lost, and that is told.
				lost, flag = 1, "--accept-gap"
				told(t, code, r.relay.Output(), 5, `message \d+ of stream "OUTBOX" was not written by walrelay and took the place of an event, which is missing`,
					"stop the other writer, compare the rows between the messages around it with the stream, then go on with --accept-gap")
			} else {
				told(t, code, r.relay.Output(), 3, `message \d+ of stream "OUTBOX" was not written by walrelay`,
					"stop the other writer and leave its message where it is, then go on with --adopt-stream")
			}
			if c.rate == 0 && code != 3 {
				t.Errorf("exit code %d though nothing was in flight, want 3", code)
			}
			args := r.relay.Args
			r.relay.Args = append(slices.Clone(args), flag)
			r.relay.MustStart(t)
			r.settled(lost)
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}
			r.relay.Args = args
			r.relay.MustStart(t)
			r.more()
			r.settled(lost)
		})
	}
}

// copyStore copies a store that may be written to.
func copyStore(from, to string) error {
	return filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		to := filepath.Join(to, rel)
		if e.IsDir() {
			return os.MkdirAll(to, 0o755)
		}
		b, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return os.WriteFile(to, b, 0o644)
	})
}

// forgetful is a broker that can be thrown back to an older state of its disk.
type forgetful struct {
	nodes  []*harness.NATS
	copies []string // of as many of the nodes
}

func (f *forgetful) remember(t testing.TB, n int) {
	t.Helper()
	for _, node := range f.nodes[:n] {
		to := filepath.Join(t.TempDir(), "store")
		must(t, copyStore(node.Store(), to))
		f.copies = append(f.copies, to)
	}
}

// forget kills all and starts those first that forget.
func (f *forgetful) forget(t testing.TB) {
	t.Helper()
	for _, node := range f.nodes {
		must(t, node.Kill())
	}
	for i, from := range f.copies {
		must(t, os.RemoveAll(f.nodes[i].Store()))
		must(t, copyStore(from, f.nodes[i].Store()))
		must(t, f.nodes[i].Launch())
	}
	for i := range f.copies {
		must(t, f.nodes[i].Ready(t.Context()))
	}
}

func (f *forgetful) rest(t testing.TB) {
	t.Helper()
	for _, node := range f.nodes[len(f.copies):] {
		node.MustStart(t)
	}
}

// A broker comes back from a power cut as it was seconds ago.
func TestForgetfulBrokerIsHealed(t *testing.T) {
	for _, c := range []struct {
		name    string
		cluster bool
		restart bool // of the relay meanwhile
		stream  func(*jetstream.StreamConfig)
	}{
		{name: "one server"},
		{name: "one server, and the relay dies, too", restart: true},
		{name: "the majority of three", cluster: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var o rigOptions
			var cluster *harness.Cluster
			if c.cluster {
				o = onCluster(&cluster)
			}
			o.args = append(o.args, "--confirm-delay", "1m", "--status-interval", "100ms", "--backoff-max", "500ms")
			r := newRig(t, o)
			broker := &forgetful{nodes: []*harness.NATS{r.nats}}
			copies := 1
			if c.cluster {
				broker.nodes, copies = cluster.Nodes, 2
			}
			start := r.confirmed()
			r.relay.MustStart(t)
			ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Rate: 400, Seed: 9})
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			writing := in(func() error { return ws.Run(ctx, -1) })
			r.stored(1000, time.Minute)
			broker.remember(t, copies)
			then := r.state().LastSeq
			r.stored(int(then)+1500, time.Minute)
			if got := r.confirmed(); got != start {
				t.Errorf("confirmed %s, then %s, within the delay", start, got)
			}
			if c.restart {
				must(t, r.relay.Kill())
			}
			broker.forget(t)
			if now := r.state().LastSeq; c.restart && now >= then+1500 {
				t.Fatalf("the broker has not forgotten: sequence %d", now)
			}
			if c.restart {
				r.relay.MustStart(t)
			}
			r.stored(int(then)+2000, time.Minute)
			broker.rest(t)
			r.stored(ws.Diary.Committed(), time.Minute)
			stop()
			must(t, writing())
			res := r.drained(ws, time.Minute)
			t.Log(res)
			if !c.restart {
				lost := attribute(t, r.relay.MustAwait(t, time.Second, "publishing them again from the WAL"), "lost")
				if lost < 1000 {
					t.Errorf("%d lost, want more than 1000", lost)
				}
				again := attribute(t, r.relay.MustAwait(t, 5*time.Second, "published again what the stream had lost"), "events")
				if again != lost {
					t.Errorf("%d lost, %d published again", lost, again)
				}
			}
			began := time.Now()
			if code := r.relay.MustStop(t, 20*time.Second); code != 0 || time.Since(began) > 10*time.Second {
				t.Errorf("exit code %d after %s", code, time.Since(began))
			}
		})
	}
}

// attribute reads a number from a log line.
func attribute(t testing.TB, line, name string) int {
	t.Helper()
	m := regexp.MustCompile(` ` + name + `=(\d+)`).FindStringSubmatch(line)
	if m == nil {
		t.Fatalf("no %s in %q", name, line)
	}
	n, err := strconv.Atoi(m[1])
	must(t, err)
	return n
}

func (r *rig) confirmed() event.LSN {
	r.t.Helper()
	lsn, err := event.ParseLSN(query[string](r, "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = $1", slot))
	must(r.t, err)
	return lsn
}

func TestForgetfulBrokerWithoutConfirmDelay(t *testing.T) {
	t.Parallel()
	r := &tampered{rig: newRig(t, rigOptions{args: []string{"--status-interval", "50ms"}}), t: t}
	broker := &forgetful{nodes: []*harness.NATS{r.nats}}
	r.relay.MustStart(t)
	r.ws = harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 10, Plain: true})
	must(t, r.ws.Run(t.Context(), 1000))
	then := r.ws.Diary.Committed()
	r.stored(then, time.Minute)
	broker.remember(t, 1)
	must(t, r.ws.Run(t.Context(), 1000))
	now := r.ws.Diary.Committed()
	r.stored(now, time.Minute)
	wal, err := event.ParseLSN(query[string](r.rig, "select pg_current_wal_lsn()::text"))
	must(t, err)
	r.await(10*time.Second, "everything is confirmed", func() bool { return r.confirmed() >= wal })
	last := r.read()[then-1]
	broker.forget(t)

	wait, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	code, err := r.relay.Wait(wait)
	must(t, err)
	told(t, code, r.relay.Output(), 5, fmt.Sprintf(
		`stream "OUTBOX" lost acked messages: its last sequence is %d, the last one acked is %d, and Postgres has dropped the WAL up to %s: events from %s up to there are missing`,
		then, now, r.confirmed(), regexp.QuoteMeta(last.Pos)),
		"restore the stream, or go on with --accept-gap: events up to the slot's confirmed LSN stay missing, later ones are published")

	// A relay that has not seen the acks only knows what Postgres was told.
	ran := harness.MustRun(t, nil, r.relay.Args...)
	told(t, ran.Code, ran.Stderr, 5, `slot "walrelay" is confirmed up to .*, past the checkpoint of stream "OUTBOX" at .*: events between may be missing in the stream`, "--accept-gap")

	r.relay.Args = append(r.relay.Args, "--accept-gap")
	r.relay.MustStart(t)
	r.more()
	r.settled(now - then)
}

func TestConfirmDelay(t *testing.T) {
	t.Parallel()
	const delay = 3 * time.Second
	r := newRig(t, rigOptions{args: []string{"--confirm-delay", delay.String(), "--status-interval", "100ms"}})
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 20*time.Second, "streaming")
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 11})
	committed := time.Now()
	must(t, ws.Run(t.Context(), 500))
	r.stored(ws.Diary.Committed(), 30*time.Second)
	r.await(2*delay, "confirmed", func() bool { return r.unconfirmed() == 0 })
	if early := time.Since(committed); early < delay {
		t.Errorf("confirmed after %s, want %s at least", early, delay)
	}
	// A stop neither waits nor confirms early, and the next start repeats nothing.
	start := r.confirmed()
	must(t, ws.Run(t.Context(), 500))
	r.stored(ws.Diary.Committed(), 30*time.Second)
	began := time.Now()
	if code := r.relay.MustStop(t, 10*time.Second); code != 0 || time.Since(began) > 2*time.Second {
		t.Errorf("exit code %d after %s, want 0 at once", code, time.Since(began))
	}
	if got := r.confirmed(); got != start {
		t.Errorf("confirmed %s by the stop, want %s still", got, start)
	}
	r.relay.MustStart(t)
	must(t, ws.Run(t.Context(), 10))
	t.Log(r.drained(ws, 30*time.Second))
	r.await(2*delay+5*time.Second, "confirmed", func() bool { return r.unconfirmed() == 0 })
}
