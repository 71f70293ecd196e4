package test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// shard is a relay with a slot, a publication and a stream of its own. The
// stream's name is that of the slot in capitals, and its subjects begin with it.
type shard struct {
	*harness.Relay
	name string
}

func (s shard) stream() string { return strings.ToUpper(s.name) }

// source is how the stream of all shards takes this one in: under the subjects
// that a relay without shards would use, and without markers.
func (s shard) source() *jetstream.StreamSource {
	return &jetstream.StreamSource{
		Name:              s.stream(),
		SubjectTransforms: []jetstream.SubjectTransformConfig{{Source: s.name + ".>", Destination: ">"}},
	}
}

// shards makes publications and slots, and relays that do not run yet.
func (r *rig) shards(base string, n int) []shard {
	r.t.Helper()
	r.must("init", "--apply", "--dsn", r.dsn, "--publication", base, "--shards", fmt.Sprint(n))
	all := make([]shard, n)
	for i := range all {
		s := shard{name: fmt.Sprint(base, "_", i)}
		r.must("slot", "create", s.name, "--dsn", r.dsn, "--publication", s.name)
		s.Relay = harness.NewRelay(r.t, append([]string{"run", "--create-stream", "--log-format", "text", "--backoff-min", "20ms"}, r.shardFlags(s)...)...)
		all[i] = s
	}
	return all
}

func (r *rig) shardFlags(s shard) []string {
	return []string{
		"--dsn", r.dsn, "--nats-url", r.natsURL, "--slot", s.name, "--publication", s.name, "--stream", s.stream(),
		"--subject", s.name + ".outbox.{aggregate_type}.{event_type}",
	}
}

// gather makes the stream take in shards, beside those that it has. Theirs have
// to exist: the server tries again for a missing one only after ten seconds and
// more (calculateRetryBackoff in its stream.go).
func (r *rig) gather(shards ...shard) {
	r.t.Helper()
	cfg := jetstream.StreamConfig{Name: stream, Storage: jetstream.FileStorage}
	if st, err := r.js.Stream(r.t.Context(), stream); err == nil {
		cfg = st.CachedInfo().Config
		cfg.Subjects = nil // the shards are all that it takes in
	}
	for _, s := range shards {
		cfg.Sources = append(cfg.Sources, s.source())
	}
	_, err := r.js.CreateOrUpdateStream(r.t.Context(), cfg)
	must(r.t, err)
}

// messagesOf is how many messages a stream holds.
func (r *rig) messagesOf(name string) int {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), name)
	must(r.t, err)
	return int(st.CachedInfo().State.Msgs)
}

// gathered compares the stream of all shards with what was committed. Its
// positions grow within an aggregate, and not from message to message.
func (r *rig) gathered(ws *harness.Writers, limit time.Duration) {
	r.t.Helper()
	must(r.t, ws.Diary.Resolve(r.t.Context(), r.pg.MustConn(r.t), r.table))
	r.stored(ws.Diary.Committed(), limit)
	all := r.read()
	last := map[string]event.Position{}
	for i := range all {
		m := &all[i]
		pos, err := event.ParsePosition(m.Pos)
		must(r.t, err)
		if before := last[m.Aggregate]; pos.Compare(before) <= 0 {
			r.t.Errorf("aggregate %s: position %s after %s", m.Aggregate, pos, before)
		}
		last[m.Aggregate] = pos
		if !strings.HasPrefix(m.Subject, "outbox.order.") {
			r.t.Fatalf("message %d has subject %s", m.Seq, m.Subject)
		}
		m.Pos = event.Position{Commit: event.LSN(i + 1)}.String() // what Compare wants of one slot
	}
	if res := harness.Compare(ws.Diary, all); !res.OK() {
		r.t.Errorf("stream and table disagree: %s", res)
	}
}

// divisible reports whether the server has row filters, which came with Postgres
// 15; before, it has found that shards are refused.
func (r *rig) divisible() bool {
	r.t.Helper()
	if r.major() >= 15 {
		return true
	}
	refused(r.t, refusal{3, "need Postgres 15", "without --shards", nil}, "init", "--apply", "--shards", "2", "--dsn", r.dsn)
	return false
}

// Relays and the broker are killed while writers commit; the stream of all shards has everything once.
func TestShardsKilledAgainAndAgainLoseAndDoubleNothing(t *testing.T) {
	t.Parallel()
	for _, n := range []int{2, 4} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			r := &rig{t: t, pg: harness.RunPostgres(t, harness.PostgresOptions{}), nats: harness.RunNATS(t, harness.NATSOptions{}), table: table}
			r.js = r.nats.JetStream(t)
			r.dsn, r.natsURL = r.pg.DSN("postgres"), r.nats.URL()
			if !r.divisible() {
				return
			}
			shards := r.shards("walrelay", n)
			for _, s := range shards {
				s.MustStart(t)
				s.MustAwait(t, quick, "streaming")
			}
			r.gather(shards...)
			ws := harness.NewWriters(harness.Workload{DSN: r.dsn, Aggregates: 50, Seed: uint64(n), Rate: 300})
			written := in(func() error { return ws.Run(t.Context(), 5000) })
			rng := rand.New(rand.NewPCG(uint64(n), 7))
			for i := range 8 * n {
				must(t, ws.Diary.Await(t.Context(), i*4500/(8*n)))
				s := shards[rng.IntN(n)]
				must(t, s.Kill())
				if i == 4*n {
					must(t, r.nats.Kill())
					r.nats.MustStart(t)
				}
				s.MustStart(t)
			}
			must(t, written())
			r.gathered(ws, time.Minute)

			// Nothing came after, and each shard has its share.
			total := 0
			for _, s := range shards {
				if code := s.MustStop(t, 20*time.Second); code != 0 {
					t.Errorf("exit code %d of %s", code, s.name)
				}
				share := r.messagesOf(s.stream())
				if share < 5000/n/2 {
					t.Errorf("%s has %d of %d messages", s.stream(), share, ws.Diary.Committed())
				}
				total += share
			}
			if got := r.messagesOf(stream); got != total || got != ws.Diary.Committed() {
				t.Errorf("%d messages in %s, %d in the shards, %d committed", got, stream, total, ws.Diary.Committed())
			}
		})
	}
}

// While writers commit, one relay becomes two, these become four, and these three.
// Consumers of the stream see every event once and in the order of its aggregate.
func TestOneRelayBecomesTwoFourAndThree(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--window", "64"}})
	if !r.divisible() {
		return
	}
	ws := harness.NewWriters(harness.Workload{DSN: r.dsn, Aggregates: 50, Seed: 3, Rate: 200})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	written := in(func() error { return ws.Run(ctx, -1) })
	one := shard{r.relay, slot}
	one.MustStart(t)
	must(t, ws.Diary.Await(t.Context(), 300))

	// Publications and slots are made while the relay runs, then it is stopped.
	two := r.shards("two", 2)
	must(t, ws.Diary.Await(t.Context(), 600))
	split := []string{"slot", "split", slot, "--dsn", r.dsn, "--nats-url", r.natsURL, "--stream", stream}
	refused(t, refusal{3, "in use", "stop", nil}, append(split, "--into", "two_0,two_1")...)
	r.splitInto(one, split, two...)
	r.must(append(split, "--into", "two_0,two_1")...) // again without harm
	total := r.messagesOf(stream)
	for _, s := range two {
		s.MustStart(t)
		s.MustAwait(t, quick, "streaming")
	}
	r.gather(two...)
	r.must("slot", "drop", slot, "--yes", "--with-publication", "--publication", publication, "--dsn", r.dsn, "--nats-url", r.natsURL)
	must(t, ws.Diary.Await(t.Context(), 1200))

	// Shard after shard becomes two.
	four := r.shards("four", 4)
	must(t, ws.Diary.Await(t.Context(), 1500))
	for i, s := range two {
		s.MustAwait(t, quick, "streaming")
		halves := []shard{four[i], four[i+2]}
		split := []string{"slot", "split", s.name, "--dsn", r.dsn, "--nats-url", r.natsURL, "--stream", s.stream(), "--publication", s.name}
		r.splitInto(s, split, halves...)
		// Its last event has to be in before the first of its successors.
		r.await(20*time.Second, s.stream()+" is taken in", func() bool { return r.takenIn(s) })
		for _, h := range halves {
			h.MustStart(t)
			h.MustAwait(t, quick, "streaming")
		}
		r.gather(halves...)
	}
	must(t, ws.Diary.Await(t.Context(), 2500))

	// Four become three while nobody can insert.
	three := r.shards("three", 3)
	lock := r.pg.MustConn(t)
	for _, sql := range []string{"begin", "lock table outbox in share mode"} {
		_, err := lock.Exec(t.Context(), sql)
		must(t, err)
	}
	end := query[string](r, "select pg_current_wal_insert_lsn()::text")
	r.await(quick, "all is confirmed", func() bool {
		return query[int](r, "select count(*) from pg_replication_slots where slot_name like 'four%' and confirmed_flush_lsn >= $1::text::pg_lsn", end) == 4
	})
	for _, s := range four {
		if code := s.MustStop(t, 20*time.Second); code != 0 {
			t.Errorf("exit code %d of %s", code, s.name)
		}
	}
	for _, s := range three {
		r.must(append([]string{"slot", "advance", "--to-now", "--yes"}, r.shardFlags(s)...)...)
	}
	_, err := lock.Exec(t.Context(), "commit")
	must(t, err)
	for _, s := range four {
		r.await(20*time.Second, s.stream()+" is taken in", func() bool { return r.takenIn(s) })
	}
	for _, s := range three {
		s.MustStart(t)
		s.MustAwait(t, quick, "streaming")
	}
	r.gather(three...)
	must(t, ws.Diary.Await(t.Context(), 3500))
	stop()
	must(t, written())
	r.gathered(ws, time.Minute)
	for _, s := range three {
		if code := s.MustStop(t, 20*time.Second); code != 0 {
			t.Errorf("exit code %d of %s", code, s.name)
		}
	}
	// The dedup of the stream would hide events that two shards have.
	for _, s := range slices.Concat(two, four, three) {
		n := r.messagesOf(s.stream())
		if n == 0 {
			t.Errorf("%s is empty", s.stream())
		}
		total += n
	}
	if total != ws.Diary.Committed() {
		t.Errorf("%d messages in the streams of all relays, %d events committed", total, ws.Diary.Committed())
	}
}

// splitInto stops a relay and lets others begin where it ended. Stopped within a
// transaction it has to run once more.
func (r *rig) splitInto(s shard, split []string, into ...shard) {
	r.t.Helper()
	names := make([]string, len(into))
	for i, h := range into {
		names[i] = h.name
	}
	for {
		if code := s.MustStop(r.t, 20*time.Second); code != 0 {
			r.t.Fatalf("exit code %d of %s\n%s", code, s.name, s.Output())
		}
		ran := harness.MustRun(r.t, nil, append(slices.Clone(split), "--into", strings.Join(names, ","))...)
		if ran.Code == 0 {
			return
		}
		if ran.Code != 3 || !strings.Contains(ran.Stderr, "holds events behind") && !strings.Contains(ran.Stderr, "is in use") {
			r.t.Fatalf("exit code %d\n%s", ran.Code, ran.Stderr)
		}
		s.MustStart(r.t)
		s.MustAwait(r.t, quick, "streaming")
	}
}

// takenIn reports whether the stream of all shards has all of one.
func (r *rig) takenIn(s shard) bool {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	own, err := r.js.Stream(r.t.Context(), s.stream())
	must(r.t, err)
	last := own.CachedInfo().State.LastSeq
	for seq := st.CachedInfo().State.LastSeq; seq > 0; seq-- {
		m, err := st.GetMsg(r.t.Context(), seq)
		must(r.t, err)
		from := strings.Fields(m.Header.Get("Nats-Stream-Source"))
		if len(from) > 1 && from[0] == s.stream() {
			return from[1] == fmt.Sprint(last)
		}
	}
	return last == 0
}

func TestSplitRefusesHalfATransaction(t *testing.T) {
	t.Parallel()
	const events = 8_000
	r := newRig(t, rigOptions{args: []string{"--window", "16", "--drain-timeout", "10s"}})
	if !r.divisible() {
		return
	}
	shards := r.shards("two", 2)
	r.exec(fmt.Sprintf(into+"select 'order', (i %% 100)::text, 'made', '{}' from generate_series(1, %d) i", events))
	split := []string{"slot", "split", slot, "--dsn", r.dsn, "--nats-url", r.natsURL, "--stream", stream, "--into", "two_0,two_1"}
	refused(t, refusal{3, `slot "two_0" begins at`, "start the relay of walrelay again", nil}, split...)
	r.relay.MustStart(t)
	r.stored(500, 20*time.Second)
	if code := r.relay.MustStop(t, 20*time.Second); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	if n := r.messagesOf(stream); n >= events {
		t.Fatalf("all %d events are stored", n)
	}
	refused(t, refusal{3, "holds events behind", "nothing is behind", nil}, split...)
	r.relay.MustStart(t)
	r.stored(events, time.Minute)
	r.await(quick, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<10 })
	r.ends(0)
	r.must(split...)
	for _, s := range shards {
		s.MustStart(t)
		s.MustAwait(t, quick, "streaming")
	}
	r.gather(shards...)
	r.exec(into + "select 'order', i::text, 'late', '{}' from generate_series(1, 100) i")
	r.stored(events+100, 20*time.Second)

	// What one shard lacks is told by every other.
	check := append([]string{"check"}, r.shardFlags(shards[0])...)
	if ran := r.must(check...); !strings.Contains(ran.Stdout, `publication "two_0" has shard 0 of 0 to 1`) {
		t.Errorf("check says\n%s", ran.Stdout)
	}
	r.exec("drop publication two_1")
	ran := harness.MustRun(t, nil, check...)
	if ran.Code != 3 || !strings.Contains(ran.Stdout, "no publication has shard 1") {
		t.Errorf("check ends with %d and says\n%s", ran.Code, ran.Stdout)
	}
}
