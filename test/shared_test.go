package test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// bystander publishes to other subjects of the stream, as fast as the broker
// acks, until the test ends. It rides out a broker that is away.
type bystander struct {
	stored atomic.Int64
	stop   func()
}

func (r *rig) bystander() *bystander {
	b := &bystander{}
	ctx, cancel := context.WithCancel(context.Background())
	wait := in(func() error {
		for i := 0; ctx.Err() == nil; i++ {
			short, cancel := context.WithTimeout(ctx, time.Second)
			_, err := r.js.Publish(short, fmt.Sprintf("other.%d", i%5), []byte("of another writer"))
			cancel()
			if err == nil {
				b.stored.Add(1)
			}
		}
		return nil
	})
	b.stop = sync.OnceFunc(func() { cancel(); _ = wait() })
	r.t.Cleanup(b.stop)
	return b
}

// createShared makes a stream that binds subjects of other writers, too.
func (r *rig) createShared(edit func(*jetstream.StreamConfig)) {
	r.t.Helper()
	r.createStream(func(c *jetstream.StreamConfig) {
		c.Subjects = append(c.Subjects, "other.>")
		if edit != nil {
			edit(c)
		}
	})
}

// own are the messages of the relay.
func own(all []harness.Stored) []harness.Stored {
	return slices.DeleteFunc(all, func(m harness.Stored) bool { return m.ID == "" })
}

// storedOwn blocks until the stream holds n messages of the relay.
func (r *rig) storedOwn(n int, limit time.Duration) {
	r.t.Helper()
	r.await(limit, fmt.Sprintf("%d messages of the relay", n), func() bool {
		ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Second)
		defer cancel()
		st, err := r.js.Stream(ctx, stream)
		if err != nil {
			return false
		}
		total := 0
		for _, filter := range []string{"outbox.>", "walrelay.>"} {
			info, err := st.Info(ctx, jetstream.WithSubjectFilter(filter))
			if err != nil {
				return false
			}
			for _, n := range info.State.Subjects {
				total += int(n)
			}
		}
		return total >= n
	})
}

// sharedAndDrained waits for every event and compares without the others' messages.
func (r *rig) sharedAndDrained(ws *harness.Writers, limit time.Duration) *harness.Result {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	must(r.t, ws.Diary.Resolve(ctx, r.pg.MustConn(r.t), r.table))
	r.storedOwn(ws.Diary.Committed(), limit)
	if code := r.relay.MustStop(r.t, 20*time.Second); code != 0 { // nothing comes after
		r.t.Errorf("exit code %d", code)
	}
	res := harness.Compare(ws.Diary, own(r.read()))
	if !res.OK() {
		r.t.Errorf("stream and table disagree: %s", res)
	}
	return res
}

// Another client publishes all the time. The relay is killed, and so is the
// broker: nothing is missing, within the dedup window nothing is there twice,
// and all is in order.
func TestSharedStream(t *testing.T) {
	t.Run("one server", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, rigOptions{args: []string{"--shared-stream", "--status-interval", "200ms", "--backoff-max", "500ms"}})
		r.sharedUnderFire(nil, func() {
			must(t, r.nats.Kill())
			r.nats.MustStart(t)
		}, 6)
	})
	t.Run("three servers", func(t *testing.T) {
		t.Parallel()
		var cluster *harness.Cluster
		o := onCluster(&cluster)
		o.args = append(o.args, "--shared-stream", "--status-interval", "200ms", "--backoff-max", "500ms")
		r := newRig(t, o)
		r.sharedUnderFire(func(c *jetstream.StreamConfig) { c.Replicas = 3 }, func() {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			st, err := r.js.Stream(ctx, stream)
			must(t, err)
			leader := cluster.Node(st.CachedInfo().Cluster.Leader)
			must(t, leader.Kill())
			must(t, cluster.Start(ctx))
		}, 4)
	})
}

// sharedUnderFire kills the relay rounds times, half of the times before it
// writes a checkpoint, and breaks the broker in between.
func (r *rig) sharedUnderFire(edit func(*jetstream.StreamConfig), breakBroker func(), rounds int) {
	t := r.t
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	r.createShared(edit)
	b := r.bystander()
	r.await(20*time.Second, "a message of another writer", func() bool { return b.stored.Load() > 100 })
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 4, Rate: 150, Seed: seed})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	writing := in(func() error { return ws.Run(ctx, -1) })
	args := r.relay.Args
	for i := range rounds {
		status := "200ms"
		if i%2 == 0 {
			status = "1h"
		}
		r.relay.Args = append(slices.Clone(args), "--status-interval", status)
		r.relay.MustStart(t)
		if i == 0 {
			r.relay.MustAwait(t, 30*time.Second, "streaming") // without --adopt-stream
		}
		r.storedOwn(100+200*i+rng.IntN(100), time.Minute)
		if i%2 == 1 {
			breakBroker()
			r.storedOwn(200+200*i, time.Minute)
		}
		must(t, r.relay.Kill())
	}
	r.relay.Args = args
	r.relay.MustStart(t)
	r.storedOwn(200+200*rounds, time.Minute)
	stop()
	must(t, writing())
	t.Log(r.sharedAndDrained(ws, time.Minute))
	b.stop()
	t.Logf("%d messages of another writer between", b.stored.Load())
}

// The original is another writer's message, so the event is not a duplicate of
// it, and must not be dropped as one.
func TestSharedStreamWithAnotherWritersID(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--shared-stream", "--status-interval", "100ms"}})
	r.createShared(nil)
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 20*time.Second, "streaming")
	const id = "6f1a3c9e-1d53-4c0e-8b9a-7d1f2a3b4c5d"
	_, err := r.js.PublishMsg(t.Context(), &nats.Msg{Subject: "other.1", Header: nats.Header{"Nats-Msg-Id": {id}}, Data: []byte("of another writer")})
	must(t, err)
	insert := func(id string) {
		r.exec("insert into outbox (id, aggregate_type, aggregate_id, event_type, payload) values ('" + id + "', 'order', '42', 'paid', '{\"id\": 42}')")
	}
	const before, after = "00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002"
	insert(before)
	insert(id)
	insert(after)
	r.storedOwn(3, 20*time.Second)
	got := own(r.read())
	if len(got) != 3 || got[0].ID != before || got[1].ID != id || !got[1].Marker() || got[2].ID != after || got[2].Marker() {
		t.Errorf("stored %+v, want an event, a marker, an event", got)
	}
	dead, err := harness.ReadStream(t.Context(), r.js, stream+"_DLQ")
	must(t, err)
	if len(dead) != 1 || dead[0].ID != id || string(dead[0].Payload) != `{"id": 42}` {
		t.Errorf("dead letters %+v", dead)
	}
	line := r.relay.MustAwait(t, 10*time.Second, "parked an event")
	if !strings.Contains(line, "duplicate") || !strings.Contains(line, id) {
		t.Errorf("logged %q", line)
	}
}

// How fast a backlog drains with one message in flight is told, not judged.
func TestSharedStreamThroughput(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--shared-stream"}})
	r.createShared(nil)
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 5, Rows: 50})
	must(t, ws.Run(t.Context(), 10_000))
	began := time.Now()
	r.relay.MustStart(t)
	r.storedOwn(ws.Diary.Committed(), time.Minute)
	took := time.Since(began)
	t.Logf("%d events in %s, %.0f a second", ws.Diary.Committed(), took.Round(time.Millisecond), float64(ws.Diary.Committed())/took.Seconds())
	t.Log(r.sharedAndDrained(ws, time.Minute))
}
