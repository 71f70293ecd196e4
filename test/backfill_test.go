package test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// newBackfillRig is a rig without a slot, whose relay is to make it.
func newBackfillRig(t *testing.T, args ...string) *rig {
	t.Helper()
	r := &rig{t: t, pg: harness.RunPostgres(t, harness.PostgresOptions{}), nats: harness.RunNATS(t, harness.NATSOptions{}), table: table}
	r.js = r.nats.JetStream(t)
	r.dsn, r.natsURL = r.pg.DSN("postgres"), r.nats.URL()
	r.must("init", "--apply", "--dsn", r.dsn, "--publication", publication)
	r.relay = harness.NewRelay(t, slices.Concat([]string{"run"}, r.flags(), []string{"--create-stream", "--backfill", "--log-format", "text"}, args)...)
	return r
}

// flags are those that name both ends.
func (r *rig) flags() []string {
	return []string{
		"--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table,
		"--slot", slot, "--publication", publication, "--stream", stream,
	}
}

// held is how many the stream holds, 0 without one.
func (r *rig) held() int {
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
	defer cancel()
	st, err := r.js.Stream(ctx, stream)
	if err != nil {
		return 0
	}
	return int(st.CachedInfo().State.Msgs)
}

// exited waits for the relay's end and wants a code and texts in its output.
func (r *rig) exited(t *testing.T, code int, texts ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	got, err := r.relay.Wait(ctx)
	if err != nil {
		t.Fatalf("the relay does not end: %v\n%s", err, r.relay.Output())
	}
	if got != code {
		t.Fatalf("exit code %d, want %d\n%s", got, code, r.relay.Output())
	}
	for _, text := range texts {
		if !strings.Contains(r.relay.Output(), text) {
			t.Errorf("want %q in the output:\n%s", text, r.relay.Output())
		}
	}
}

// Rows are published in the order of seq while more are written, and the relay and
// the broker are killed in it.
func TestBackfillKilledAgainAndAgainLosesAndDoublesNothing(t *testing.T) {
	t.Parallel()
	r := newBackfillRig(t, "--window", "64")
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 4, Seed: 5, Plain: true})
	if err := ws.Run(t.Context(), 15_000); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ws.SetRate(100)
	written := in(func() error { return ws.Run(ctx, -1) })
	for n := range 4 {
		r.relay.MustStart(t)
		goal := r.held() + 1_500
		r.await(60*time.Second, fmt.Sprintf("%d messages stored", goal), func() bool { return r.held() >= goal })
		if n == 2 {
			if err := r.nats.Kill(); err != nil {
				t.Fatal(err)
			}
			r.nats.MustStart(t)
			r.relay.MustAwait(t, 30*time.Second, "trying again")
		}
		if err := r.relay.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 90*time.Second, "backfilled")
	r.relay.MustAwait(t, 30*time.Second, "streaming")
	stop()
	if err := written(); err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	r.drained(ws, time.Minute)
	if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d, want 0\n%s", code, r.relay.Output())
	}
	// The flag may stay where it is.
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 30*time.Second, "streaming")
	r.drained(ws, time.Minute)
}

// A transaction that took its numbers before others and commits after the snapshot
// of an interrupted backfill is not taken for published.
func TestBackfillFindsRowsThatCommitLate(t *testing.T) {
	t.Parallel()
	r := newBackfillRig(t, "--window", "1")
	insert := `insert into outbox (aggregate_type, aggregate_id, event_type, payload) select 'a', '%s', 'e', '{}' from generate_series(1, %d)`
	r.exec(fmt.Sprintf(insert, "early", 3_000))
	r.relay.MustStart(t)
	r.await(60*time.Second, "rows stored", func() bool { return r.held() > 100 })
	if err := r.relay.Kill(); err != nil {
		t.Fatal(err)
	}
	r.exec(`insert into outbox (seq, aggregate_type, aggregate_id, event_type, payload) overriding system value values (-1, 'a', 'late', 'e', '{}')`)
	// What was published may be deleted meanwhile.
	r.exec("delete from outbox where seq between 1 and 10")
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 60*time.Second, "streaming")
	r.exec(fmt.Sprintf(insert, "after", 5))
	r.stored(3_006, 30*time.Second)
	ids := map[string]bool{}
	for _, m := range r.read() {
		ids[m.ID] = true
	}
	if n := len(ids); n != 3_006 {
		t.Errorf("%d different events, want 3006", n)
	}
}

func TestSlotMadeByHandIsNotBackfilled(t *testing.T) {
	t.Parallel()
	r := newBackfillRig(t)
	r.must("slot", "create", slot, "--dsn", r.dsn, "--publication", publication)
	r.relay.MustStart(t)
	r.exited(t, 3, "exists already", "slot drop walrelay")
}

// rowsOf writes n events of an aggregate.
func (r *rig) fill(aggregate string, n int) {
	r.t.Helper()
	r.exec(fmt.Sprintf(`insert into outbox (aggregate_type, aggregate_id, event_type, payload) select 'a', '%s', 'e', '{}' from generate_series(1, %d)`, aggregate, n))
}

// once fails unless the stream holds n events, each once.
func (r *rig) once(n int) {
	r.t.Helper()
	r.stored(n, 30*time.Second)
	ids := map[string]int{}
	all := r.read()
	for _, m := range all {
		ids[m.ID]++
	}
	if len(all) != n || len(ids) != n {
		r.t.Errorf("stream has %d messages of %d events, want %d of each", len(all), len(ids), n)
	}
}

func TestLostSlotsEndTheRelayAndAreRecovered(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(r *rig){
		"dropped": func(r *rig) { r.must("slot", "drop", slot, "--yes", "--dsn", r.dsn) },
		"invalidated": func(r *rig) {
			r.exec("alter system set max_slot_wal_keep_size = '1MB'", "alter system set max_wal_size = '32MB'", "select pg_reload_conf()")
			r.exec("create table churn (t text)")
			for range 4 {
				r.exec("insert into churn select repeat('x', 1000) from generate_series(1, 20000)", "select pg_switch_wal()", "checkpoint")
			}
		},
		"idle": func(r *rig) { // from 18 on; a checkpoint looks
			r.exec("alter system set idle_replication_slot_timeout = '1s'", "select pg_reload_conf()")
			r.await(30*time.Second, "the slot is invalidated", func() bool {
				r.exec("checkpoint")
				return query[bool](r, "select coalesce(invalidation_reason, '') = 'idle_timeout' from pg_replication_slots")
			})
			r.exec("alter system reset idle_replication_slot_timeout", "select pg_reload_conf()")
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{})
			if name == "idle" && r.major() < 18 {
				return
			}
			r.relay.MustStart(t)
			r.fill("before", 50)
			r.stored(50, 30*time.Second)
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}
			r.fill("while away", 30)
			lose(r)
			r.fill("after", 20)
			r.relay.MustStart(t)
			r.exited(t, 5, "walrelay slot recover walrelay", "50 rows of the table come after it")
			ran := r.must(append([]string{"slot", "recover"}, r.flags()...)...)
			if !strings.Contains(ran.Stdout, "50 published") || !strings.Contains(ran.Stdout, "table public.outbox: rows with seq > ") {
				t.Errorf("recover says:\n%s", ran.Stdout)
			}
			r.once(100)
			r.relay.MustStart(t)
			r.fill("later", 10)
			r.once(110)
		})
	}
}

// What is not sent is not passed over: the relay stops, and stops again until the
// rows are recovered.
func TestTableLeavesThePublication(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		leave string
		code  int
		text  string
		back  []string
	}{
		"taken out": {"alter publication walrelay drop table outbox", 3, "is not in publication", []string{"alter publication walrelay add table outbox"}},
		"made anew": {"alter table outbox rename to was; create table outbox (like was including all); alter publication walrelay add table outbox", 5, "was made anew", nil},
		"filtered":  {"alter publication walrelay set table outbox where (aggregate_type = 'b')", 5, "its publication was altered", []string{"alter publication walrelay set table outbox"}},
		"no inserts": {
			"alter publication walrelay set (publish = 'update')", 3, "does not publish inserts",
			[]string{"alter publication walrelay set (publish = 'insert')"},
		},
		"publication dropped": {
			"drop publication walrelay", 3, `publication "walrelay"`,
			[]string{"create publication walrelay for table outbox with (publish = 'insert')"},
		},
		"renamed": {"alter table outbox rename to events", 3, `renamed to "public"."events"`, []string{"alter table events rename to outbox"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{})
			if name == "filtered" && r.major() < 15 {
				return // there are no row filters
			}
			r.relay.MustStart(t)
			r.fill("before", 50)
			r.stored(50, 30*time.Second)
			r.exec(c.leave) // in one transaction, so that no look falls in between
			if name == "renamed" {
				r.exec(`insert into events (aggregate_type, aggregate_id, event_type, payload) values ('a', 'x', 'e', '{}')`)
			} else {
				r.fill("unseen", 1)
			}
			r.exited(t, c.code, c.text)
			r.exec(c.back...)
			if name == "renamed" { // the log has every row
				r.relay.MustStart(t)
				r.fill("after", 9)
				r.once(60)
				return
			}
			r.relay.MustStart(t)
			r.exited(t, 5, "walrelay slot recover walrelay")
			if name == "made anew" {
				return // its first rows are in another table
			}
			r.must(append([]string{"slot", "recover", "--yes"}, r.flags()...)...)
			r.once(51)
			r.relay.MustStart(t)
			r.fill("after", 9)
			r.once(60)
		})
	}
}

// The slot is invalidated under a relay that cannot keep up.
func TestSlotLostWhileStreamingEndsTheRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	r.fill("before", 50)
	r.stored(50, 30*time.Second)
	r.exec("create table churn (t text)", "alter system set max_slot_wal_keep_size = '1MB'", "alter system set max_wal_size = '32MB'", "select pg_reload_conf()")
	r.nats.Freeze()
	r.fill("stuck", 40)
	r.relay.Freeze()
	for range 4 {
		r.exec("insert into churn select repeat('x', 1000) from generate_series(1, 20000)", "select pg_switch_wal()", "checkpoint")
	}
	r.nats.Thaw()
	r.relay.Thaw()
	r.exited(t, 5, `slot "walrelay" is lost`, "max_slot_wal_keep_size", "walrelay slot recover walrelay")
	r.must(append([]string{"slot", "recover"}, r.flags()...)...)
	r.once(90)
}

func TestSlotRecreatedWhileAwayIsAGap(t *testing.T) {
	t.Parallel()
	for plugin, want := range map[string]struct {
		code int
		text string
	}{"pgoutput": {5, "events between may be missing"}, "test_decoding": {3, "plugin test_decoding"}} {
		r := newRig(t, rigOptions{})
		r.relay.MustStart(t)
		r.fill("before", 50)
		r.stored(50, 30*time.Second)
		if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
			t.Fatalf("exit code %d", code)
		}
		r.fill("while away", 5)
		r.exec("select pg_drop_replication_slot('walrelay')", "select pg_create_logical_replication_slot('walrelay', '"+plugin+"')")
		r.relay.MustStart(t)
		r.exited(t, want.code, want.text)
		if want.code == 5 {
			r.must(append([]string{"slot", "recover", "--yes"}, r.flags()...)...)
			r.once(55)
		}
	}
}

// Rows of every partition are events of the one table, from the table and from
// the log, and partitions come and go.
func TestPartitionedOutbox(t *testing.T) {
	t.Parallel()
	for _, span := range []string{"day", "week", "month"} {
		r := newBackfillRig(t)
		r.exec("drop publication walrelay", "drop table outbox")
		ran := r.must("init", "--apply", "--partitioned", span, "--dsn", r.dsn, "--publication", publication)
		if !strings.Contains(ran.Stdout, "5 partitions") {
			t.Errorf("init says:\n%s", ran.Stdout)
		}
		if again := r.must("init", "--apply", "--partitioned", span, "--dsn", r.dsn, "--publication", publication); again.Stdout != "nothing to do\n" {
			t.Errorf("init again says:\n%s", again.Stdout)
		}
		old := `insert into outbox (aggregate_type, aggregate_id, event_type, payload, created_at) values ('a', 'old', 'e', '{}', now() - interval '1 year')`
		r.fill("before", 20)
		r.exec(old)
		r.relay.MustStart(t)
		r.stored(21, 30*time.Second)
		r.fill("after", 20)
		r.exec("create table old partition of outbox for values from ('2001-01-01') to ('2002-01-01')",
			`insert into outbox (aggregate_type, aggregate_id, event_type, payload, created_at) values ('a', 'older', 'e', '{}', '2001-05-05')`,
			"alter table outbox detach partition old", "drop table old", old)
		r.once(43)
		if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
			t.Errorf("exit code %d\n%s", code, r.relay.Output())
		}
	}
}

// A row that lacks a needed column is parked with all that it has; others may come and go.
func TestColumnsChangeUnderTheRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	r.fill("before", 20)
	r.exec("alter table outbox add column note text default 'x'", "alter table outbox drop column schema_version",
		"create table more (id int primary key)", "alter publication walrelay add table more", "alter publication walrelay drop table more")
	r.fill("after", 20)
	r.once(40)
	r.exec("alter table outbox rename column event_type to kind")
	r.exec(`insert into outbox (aggregate_type, aggregate_id, kind, payload) values ('a', 'x', 'e', '{}')`)
	r.await(quick, "it is parked", func() bool { return len(r.letters()) == 1 })
	if body := string(r.letters()[0].Data); !strings.Contains(body, `"kind": "e"`) || !strings.Contains(body, `"payload": "{}"`) {
		t.Errorf("the dead letter has %s", body)
	}
	r.await(quick, "it is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
}
