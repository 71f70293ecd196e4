package test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// dlq runs a dlq command and returns how it ended.
func (r *rig) dlq(args ...string) harness.Ran {
	r.t.Helper()
	all := []string{"dlq", args[0], "--nats-url", r.natsURL, "--stream", stream}
	if args[0] == "replay" {
		all = append(all, "--dsn", r.dsn, "--table", r.table, "--slot", slot, "--publication", publication)
	}
	return harness.MustRun(r.t, nil, append(all, args[1:]...)...)
}

func wantExit(t *testing.T, ran harness.Ran, code int, texts ...string) {
	t.Helper()
	all := ran.Stdout + ran.Stderr
	if ran.Code != code {
		t.Fatalf("exit code %d, want %d\n%s", ran.Code, code, all)
	}
	for _, text := range texts {
		if !strings.Contains(all, text) {
			t.Fatalf("%q is not in\n%s", text, all)
		}
	}
}

// resize gives the stream another limit for messages.
func (r *rig) resize(limit int32) {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	c := st.CachedInfo().Config
	c.MaxMsgSize = limit
	_, err = r.js.UpdateStream(r.t.Context(), c)
	must(r.t, err)
}

// limited makes the stream with a limit for messages before the relay starts.
func (r *rig) limited(limit int32) {
	r.createStream(func(c *jetstream.StreamConfig) {
		c.Subjects = []string{"outbox.>", "mended.>", "walrelay.parked." + stream}
		c.MaxMsgSize = limit
	})
}

func large(aggregate, typ string) string {
	return fmt.Sprintf(into+"values ('order', '%s', '%s', to_jsonb(repeat('x', 5000)))", aggregate, typ)
}

func TestDeadLettersAreListedShownAndPurged(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.limited(2000)
	wantExit(t, r.dlq("list"), 0, "0 dead letters")
	r.relay.MustStart(t)
	r.exec(large("a", "one"), into+"values ('invoice', 'b', 'unbound.x', '{}')", large("b", "two"))
	r.exec("insert into outbox (aggregate_type, aggregate_id, event_type, headers) values ('order', 'c', 'list', '[]')")
	r.messages(4)

	var list []struct {
		ID, Reason, Position string
		AggregateID          string `json:"aggregate_id"`
		EventType            string `json:"event_type"`
		Bytes                int
	}
	must(t, json.Unmarshal([]byte(r.dlq("list", "-o", "json").Stdout), &list))
	if len(list) != 3 || list[0].EventType != "one" || list[1].EventType != "two" || list[2].Reason != "headers" || list[0].Bytes != 5002 {
		t.Fatalf("listed %+v", list)
	}
	for args, want := range map[string]int{
		"--reason too_large": 2, "--reason too_large,headers": 3, "--type order/one": 1, "--aggregate order/b": 1, "--aggregate invoice/b": 0,
		"--since 1h": 3, "--until 1h": 0, "--since 2020-01-01 --type list": 1,
	} {
		wantExit(t, r.dlq(append([]string{"list"}, strings.Fields(args)...)...), 0, fmt.Sprintf("%d dead letters", want))
	}
	wantExit(t, r.dlq("list", "--reason", "large"), 2, "too_large")
	wantExit(t, r.dlq("list", "--since", "yesterday"), 2, "is no time")

	for _, id := range []string{list[0].ID, list[0].Position} {
		wantExit(t, r.dlq("show", id), 0, "too_large", "outbox.order.one", event.HeaderEventType+": one", "xxxx")
		wantExit(t, r.dlq("show", id, "-o", "json"), 0, `"body": "\"xxxx`, `"reason": "too_large"`)
	}
	wantExit(t, r.dlq("show", "nobody"), 3, "nobody")
	wantExit(t, r.dlq("show"), 2, "name one dead letter")

	wantExit(t, r.dlq("purge", "--all"), 2, "--yes")
	wantExit(t, r.dlq("purge"), 2, "--all")
	wantExit(t, r.dlq("purge", list[0].ID, "nobody", "--yes"), 3, "nobody")
	wantExit(t, r.dlq("list"), 0, "3 dead letters")
	wantExit(t, r.dlq("purge", list[0].ID, "--yes"), 0, "1 dead letters removed")
	wantExit(t, r.dlq("purge", "--all", "--reason", "headers", "--yes"), 0, "1 dead letters removed")
	wantExit(t, r.dlq("list"), 0, "1 dead letters", list[1].ID)
	r.ends(0)
}

// A limit, a mapping or a row that was mended helps; so does what the dead letter
// holds when the row is gone.
func TestDeadLettersAreReplayed(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.limited(2000)
	r.relay.MustStart(t)
	r.exec(
		"insert into outbox (aggregate_type, aggregate_id, event_type, headers) values ('order', 'a', 'row', '[]')",
		large("a", "gone"), large("a", "limit"),
		into+"values ('order', 'a', 'fine', '{}')",
		"delete from outbox where event_type = 'gone'",
	)
	r.messages(4)

	// Nothing is mended yet.
	ran := r.dlq("replay", "--all", "--yes")
	wantExit(t, ran, 3, "0 stored, 3 refused", "headers: the headers are not a JSON object", "too_large")
	r.messages(7)
	if n := len(r.letters()); n != 3 {
		t.Fatalf("%d dead letters, want 3", n)
	}
	wantExit(t, r.dlq("show", r.letters()[0].Header.Get(event.HeaderID)), 0, "last try", "refused")

	r.resize(1 << 20)
	r.exec(`update outbox set headers = '{"x-mended": "yes"}' where event_type = 'row'`)
	wantExit(t, r.dlq("replay", "--all"), 2, "--yes")
	wantExit(t, r.dlq("replay", "--all", "--yes"), 0, "3 stored, 0 refused")
	ms := r.messages(10)
	if got := outline(ms); got != "! ! ! fine ! ! ! row gone limit" {
		t.Fatalf("the stream has %s", got)
	}
	for i, m := range ms[7:] {
		id, run := m.Header.Get(event.HeaderID), m.Header.Get(event.HeaderReplay)
		if id != ms[i].Header.Get(event.HeaderID) || run == "" || m.Header.Get("Nats-Msg-Id") != id+":r:"+run || m.Header.Get(event.HeaderAggregateID) != "a" {
			t.Errorf("message %d: %v", i+8, m.Header)
		}
	}
	if ms[7].Header.Get("x-mended") != "yes" || len(ms[8].Data) != 5002 || ms[8].Subject != "outbox.order.gone" || ms[8].Header.Get(event.HeaderTime) == "" {
		t.Errorf("replayed %v and %v", ms[7].Header, ms[8].Header)
	}
	if n := len(r.letters()); n != 0 {
		t.Errorf("%d dead letters are left", n)
	}
	wantExit(t, r.dlq("replay", "--all", "--yes"), 0, "0 stored, 0 refused")

	// To another subject, and without a relay.
	r.resize(2000)
	r.relay.MustStop(t, 20*time.Second)
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.exec(large("b", "elsewhere"))
	r.messages(11)
	r.resize(1 << 20)
	if code := r.relay.MustStop(t, 20*time.Second); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	wantExit(t, r.dlq("replay", "--all", "--yes", "--subject", "mended.{aggregate_id}"), 6, "1 waiting for a relay", "start walrelay run")
	r.relay.MustStart(t)
	ms = r.messages(12)
	if ms[11].Subject != "mended.b" || ms[11].Header.Get(event.HeaderEventType) != "elsewhere" {
		t.Errorf("replayed to %s: %v", ms[11].Subject, ms[11].Header)
	}
	r.await(quick, "the dead letter is removed", func() bool { return len(r.letters()) == 0 })
	r.ends(0)
}

// What is nowhere any more cannot be published.
func TestOmittedBodyNeedsItsRow(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient, nats: harness.NATSOptions{MaxPayload: 4096}})
	r.limited(-1)
	r.relay.MustStart(t)
	r.exec(large("a", "one"), "delete from outbox")
	r.messages(1)
	wantExit(t, r.dlq("replay", "--all", "--yes"), 3, "1 not possible", "body of 5002 bytes was left out", "public.outbox has no row")
	if n := len(r.letters()); n != 1 {
		t.Errorf("%d dead letters, want 1", n)
	}
	r.ends(0)
}

func TestHeldAggregateIsReplayedInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: append([]string{"--on-poison", "park-aggregate"}, impatient...)})
	r.limited(2000)
	r.relay.MustStart(t)
	r.exec(
		large("a", "a1"), into+"values ('order', 'a', 'a2', '{}'), ('order', 'b', 'b1', '{}')", into+"values ('order', 'a', 'a3', '{}')",
		large("b", "b2"), into+"values ('order', 'b', 'b3', '{}'), ('order', 'c', 'c1', '{}')",
	)
	ms := r.messages(7)
	if got := outline(ms); got != "! ! b1 ! ! ! c1" {
		t.Fatalf("the stream has %s", got)
	}
	r.resize(1 << 20)
	id := func(i int) string { return r.letters()[i].Header.Get(event.HeaderID) }
	wantExit(t, r.dlq("replay", id(1), "--yes"), 3, "an older event of its aggregate is parked")
	wantExit(t, r.dlq("replay", id(0), "--yes"), 0, "1 stored")
	r.exec(into + "values ('order', 'a', 'a4', '{}')") // still held
	r.messages(10)
	wantExit(t, r.dlq("replay", "--all", "--yes"), 0, "5 stored")
	r.exec(into + "values ('order', 'a', 'a5', '{}'), ('order', 'b', 'b4', '{}')")
	ms = r.messages(17)
	if got := outline(ms[7:]); got != "! a1 ! a2 a3 b2 b3 a4 a5 b4" {
		t.Errorf("the stream has %s", got)
	}
	r.ends(0)
}

// With the original id an event is one that the stream has, as long as it remembers.
func TestKeptIDsMeetTheDedupWindow(t *testing.T) {
	t.Parallel()
	const id = "0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d"
	r := newRig(t, rigOptions{
		args: impatient,
		prepare: func(r *rig) {
			r.exec(`create table public.outbox (seq bigint generated always as identity primary key, id uuid not null, aggregate_type text not null,
				aggregate_id text not null, event_type text not null, payload jsonb, headers jsonb, created_at timestamptz not null default now())`)
		},
	})
	r.createStream(func(c *jetstream.StreamConfig) {
		c.Subjects = []string{"outbox.>", "walrelay.parked." + stream}
		c.Duplicates = 4 * time.Second
	})
	r.relay.MustStart(t)
	r.exec("insert into outbox (id, aggregate_type, aggregate_id, event_type, payload) values ('" + id + "', 'order', '1', 'original', '1'), ('" + id + "', 'order', '1', 'twin', '2')")
	r.messages(2)
	last := time.Now()
	wantExit(t, r.dlq("replay", id, "--keep-id", "--yes"), 3, "its id was used before")
	if n := len(r.letters()); n != 1 {
		t.Fatalf("%d dead letters, want 1", n)
	}
	// A row of which the id is known is passed over, and nothing is parked.
	r.exec("insert into outbox (id, aggregate_type, aggregate_id, event_type, payload) values (gen_random_uuid(), 'order', '2', 'young', '1')")
	young := r.messages(4)[3].Header.Get(event.HeaderID)
	r.must(r.replay("--id", young, "--keep-id", "--yes")...)
	r.messages(5)
	if n := len(r.letters()); n != 1 {
		t.Fatalf("%d dead letters, want 1", n)
	}
	r.await(10*time.Second, "the window is over", func() bool { return time.Since(last) > 6*time.Second })
	wantExit(t, r.dlq("replay", id, "--keep-id", "--yes"), 0, "1 stored")
	ms := r.messages(6)
	if got := outline(ms); got != "original ! ! young ! twin" || ms[5].Header.Get("Nats-Msg-Id") != id || string(ms[5].Data) != "2" {
		t.Errorf("the stream has %s, the last %v", got, ms[5].Header)
	}
	r.ends(0)
}

// Logical messages with the prefix of replays, by a role that is nobody.
func TestForgedReplaysAreIgnored(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.relay.MustStart(t)
	r.exec(into + "values ('order', 'a', 'one', '{}')")
	r.messages(1)
	r.exec("create role nobody login")
	conn, err := pgxConnect(t.Context(), r.pg.DSNFor("postgres", "nobody", ""))
	must(t, err)
	defer conn.Close(context.Background())
	for _, sql := range []string{
		"select pg_logical_emit_message(true, 'walrelay.replay', 'nonsense')",
		`select pg_logical_emit_message(true, 'walrelay.replay', repeat('0', 64) || chr(10) ||
			'{"v":1,"run":"r","event":{"id":"1","table":"t","subject":"outbox.order.forged","headers":[],"body":""}}')`,
		"select pg_logical_emit_message(true, 'something else', 'x')",
		"select pg_logical_emit_message(false, 'walrelay.replay', 'nonsense')",
	} {
		_, err := conn.Exec(t.Context(), sql)
		must(t, err)
	}
	r.exec(into + "values ('order', 'a', 'two', '{}')")
	ms := r.messages(2)
	if got := outline(ms); got != "one two" {
		t.Errorf("the stream has %s", got)
	}
	r.relay.MustAwait(t, quick, "no valid signature")
	if n := len(r.letters()); n != 0 {
		t.Errorf("%d dead letters", n)
	}
	r.await(quick, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
	r.ends(0)
}

func TestDeadLettersOfASharedStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: append([]string{"--shared-stream"}, impatient...)})
	r.createStream(func(c *jetstream.StreamConfig) {
		c.Subjects = []string{"outbox.>", "other.>", "walrelay.parked." + stream}
		c.MaxMsgSize = 2000
	})
	r.relay.MustStart(t)
	r.exec(large("a", "one"), large("a", "two"))
	r.messages(2)
	_, err := r.js.Publish(t.Context(), "other.x", nil)
	must(t, err)
	r.resize(1 << 20)
	wantExit(t, r.dlq("replay", "--all", "--yes"), 0, "2 stored, 0 refused")
	_, err = r.js.Publish(t.Context(), "other.x", nil)
	must(t, err)
	r.must(r.replay("--aggregate", "a", "--yes")...)
	if got := outline(r.messages(8)); got != "! !  one two  one two" {
		t.Errorf("the stream has %q", got)
	}
	if n := len(r.letters()); n != 0 {
		t.Errorf("%d dead letters are left", n)
	}
	r.ends(0)
}

// Whenever the relay dies, a dead letter ends in the stream once or stays a dead letter.
func TestRelayDiesWhileDeadLettersAreReplayed(t *testing.T) {
	t.Parallel()
	for _, queue := range []bool{false, true} {
		t.Run(fmt.Sprint("consumed=", queue), func(t *testing.T) {
			t.Parallel()
			const letters, rounds = 120, 12
			seed := rand.Uint64()
			rng := rand.New(rand.NewPCG(seed, 0))
			r := newRig(t, rigOptions{args: append([]string{"--max-parked-in-row", "0", "--status-interval", "20ms"}, impatient...)})
			r.createStream(func(c *jetstream.StreamConfig) {
				c.Subjects = []string{"outbox.>", "walrelay.parked." + stream}
				c.MaxMsgSize = 2000
				if queue {
					c.Retention = jetstream.WorkQueuePolicy
				}
			})
			r.relay.MustStart(t)
			// Every fifth has a body that stays too large.
			r.exec(fmt.Sprintf(into+"select 'order', i::text, 'e', to_jsonb(repeat('x', case when i %% 5 = 0 then 50000 else 5000 end)) from generate_series(1, %d) i", letters))
			r.await(time.Minute, "all are parked", func() bool { return r.countLetters() == letters })
			got := map[string]int{}
			markers := 0
			stop := r.collect(queue, got, &markers)
			r.resize(10_000)
			done := in(func() error {
				for range 40 {
					ran := r.dlq("replay", "--all", "--yes")
					if ran.Code != 0 && ran.Code != 3 && ran.Code != 6 {
						return fmt.Errorf("exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
					}
					if r.countLetters() == letters/5 && ran.Code == 3 {
						return nil
					}
				}
				return fmt.Errorf("%d dead letters are left", r.countLetters())
			})
			for range rounds {
				pause(t, time.Duration(rng.IntN(400))*time.Millisecond)
				must(t, r.relay.Kill())
				r.relay.MustStart(t)
			}
			if err := done(); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			r.exec(into + "values ('order', 'last', 'last', '{}')")
			r.await(time.Minute, "the last event is stored", stop)
			left := map[string]bool{}
			for _, m := range r.letters() {
				left[m.Header.Get(event.HeaderID)] = true
			}
			for id, n := range got {
				if n != 1 || left[id] {
					t.Errorf("seed %d: event %s is stored %d times, and its dead letter there: %t", seed, id, n, left[id])
				}
			}
			if len(got) != letters-letters/5 || len(left) != letters/5 {
				t.Errorf("seed %d: %d stored and %d left, want %d and %d", seed, len(got), len(left), letters-letters/5, letters/5)
			}
			r.ends(0)
		})
	}
}

func (r *rig) countLetters() int {
	st, err := r.js.Stream(context.Background(), stream+"_DLQ")
	if err != nil {
		return -1
	}
	return int(st.CachedInfo().State.Msgs)
}

// pause waits for a random moment.
func pause(t *testing.T, d time.Duration) {
	t.Helper()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-t.Context().Done():
	}
}

// collect counts the events of a stream by id, markers apart. It consumes them when
// they leave the stream by that. What it returns reads on, and reports whether
// an event of type last was among them.
func (r *rig) collect(queue bool, got map[string]int, markers *int) func() bool {
	r.t.Helper()
	c := jetstream.ConsumerConfig{AckPolicy: jetstream.AckExplicitPolicy}
	if queue {
		c.Durable = "worker"
	}
	cons, err := r.js.CreateOrUpdateConsumer(r.t.Context(), stream, c)
	must(r.t, err)
	found := make(chan struct{})
	running, err := cons.Consume(func(m jetstream.Msg) {
		if meta, err := m.Metadata(); err != nil || meta.NumDelivered > 1 {
			return
		}
		_ = m.DoubleAck(context.Background())
		switch h := m.Headers(); {
		case h.Get(event.HeaderReason) != "":
			*markers++
		case h.Get(event.HeaderEventType) == "last":
			close(found)
		default:
			got[h.Get(event.HeaderID)]++
		}
	})
	must(r.t, err)
	r.t.Cleanup(running.Stop)
	return func() bool {
		select {
		case <-found:
			return true
		default:
			return false
		}
	}
}
