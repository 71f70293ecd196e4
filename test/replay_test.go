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

// replay is a command line of walrelay replay.
func (r *rig) replay(args ...string) []string {
	return append([]string{
		"replay", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--slot", slot, "--publication", publication, "--stream", stream,
	}, args...)
}

// twice splits the stream into what came by itself and what a run published
// again, each as ids in order.
func (r *rig) twice() (plain, again []string) {
	r.t.Helper()
	for m, err := range harness.Messages(r.t.Context(), r.js, stream, jetstream.OrderedConsumerConfig{HeadersOnly: true}) {
		must(r.t, err)
		id := m.Headers().Get(event.HeaderID)
		if run := m.Headers().Get(event.HeaderReplay); run == "" {
			plain = append(plain, id)
		} else {
			again = append(again, id)
			if got := m.Headers().Get("Nats-Msg-Id"); got != id+":r:"+run {
				r.t.Errorf("Nats-Msg-Id %q of event %s in run %s", got, id, run)
			}
		}
	}
	return plain, again
}

// ids are those of the rows that a condition chooses, in their order.
func (r *rig) ids(cond string) []string {
	r.t.Helper()
	return strings.Fields(query[string](r, "select coalesce(string_agg(id::text, ' ' order by seq), '') from outbox where "+cond))
}

func wantSame(t *testing.T, what string, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	i := 0
	for i < min(len(got), len(want)) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s: got %d, want %d, unlike from number %d on", what, len(got), len(want), i+1)
}

// A day is published again while writers go on: its rows in their order, all else untouched.
func TestDayIsReplayedBesideWriters(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.relay.MustStart(t)
	const day, days = 1500, 3
	r.exec(fmt.Sprintf(`insert into outbox (aggregate_type, aggregate_id, event_type, payload, created_at)
		select 'order', (i %% 50)::text, 'e', jsonb_build_object('i', i), timestamptz '2026-03-01 00:00:00+00' + i * interval '1 day' / %d from generate_series(0, %d) i`, day, day*days-1))
	r.stored(day*days, time.Minute)
	r.exec("delete from outbox where seq % 100 = 7")

	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Plain: true, Rate: 200})
	ctx, stop := context.WithCancel(t.Context())
	written := in(func() error { return ws.Run(ctx, -1) })
	want := r.ids("created_at >= '2026-03-02 00:00:00+00' and created_at < '2026-03-03 00:00:00+00'")
	choice := []string{"--from", "2026-03-02", "--to", "2026-03-03"}
	dry := r.must(r.replay(append(choice, "--dry-run")...)...)
	for _, text := range []string{fmt.Sprintf("%d rows of public.outbox", len(want)), want[0], want[len(want)-1], "subject outbox.order.e", "older events follow"} {
		if !strings.Contains(dry.Stdout, text) {
			t.Errorf("%q is not in\n%s", text, dry.Stdout)
		}
	}
	if _, again := r.twice(); len(again) != 0 {
		t.Errorf("a dry run published %d", len(again))
	}
	ran := r.must(r.replay(append(choice, "--yes", "--run", "march-2")...)...)
	if !strings.Contains(ran.Stdout, fmt.Sprintf("run march-2: %d rows are in the log; the relay publishes them now", len(want))) {
		t.Errorf("told %s", ran.Stdout)
	}
	stop()
	must(t, written())
	conn := r.pg.MustConn(t)
	must(t, ws.Diary.Resolve(t.Context(), conn, r.table))
	all := day*days + ws.Diary.Committed()
	r.stored(all+len(want), time.Minute)
	plain, again := r.twice()
	wantSame(t, "the replayed rows", again, want)
	if len(plain) != all {
		t.Errorf("%d others, want %d", len(plain), all)
	}
	// The writers' own events are untouched: once, and in their order.
	seen := map[string]bool{}
	for _, id := range plain {
		if seen[id] {
			t.Errorf("%s is stored twice", id)
		}
		seen[id] = true
	}
	ran = r.must(r.replay("--run", "march-2")...)
	if !strings.Contains(ran.Stdout, "is complete") {
		t.Errorf("told %s", ran.Stdout)
	}
	r.stored(all+len(want), time.Minute)
	r.ends(0)
}

func TestReplayChoosesRows(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.exec(into + "select case when i % 2 = 0 then 'order' else 'invoice' end, (i % 3)::text, 'e' || i, '{}' from generate_series(1, 12) i")
	yes := func(args ...string) []string { return r.replay(append(args, "--yes")...) }
	// Nobody has made a key yet.
	wantExit(t, harness.MustRun(t, nil, yes("--aggregate", "1")...), 3, "start walrelay run")
	r.relay.MustStart(t)
	r.stored(12, quick)
	// The relay may be away.
	if code := r.relay.MustStop(t, 20*time.Second); code != 0 {
		t.Fatalf("exit code %d", code)
	}
	ran := r.must(yes("--aggregate", "invoice/1")...)
	if !strings.Contains(ran.Stdout, "no relay reads slot walrelay") {
		t.Errorf("told %s", ran.Stdout)
	}
	r.must(yes("--aggregate", "0", "--rate", "100/s")...)
	ids := r.ids("event_type in ('e5', 'e2')")
	r.must(yes("--id", ids[1], "--id", strings.ToUpper(ids[0]))...)
	r.must(yes("--from", "1h", "--to", "2100-01-01")...)
	r.relay.MustStart(t)
	want := slices.Concat(r.ids("aggregate_type = 'invoice' and aggregate_id = '1'"), r.ids("aggregate_id = '0'"), ids, r.ids("true"))
	r.stored(12+len(want), quick)
	_, again := r.twice()
	wantSame(t, "the replayed rows", again, want)

	for _, c := range []struct {
		args []string
		code int
		text string
	}{
		{nil, 2, "which rows"},
		{[]string{"--from", "x"}, 2, "is no time"},
		{[]string{"--from", "2026-01-02", "--to", "2026-01-01"}, 2, "is not before"},
		{[]string{"--aggregate", "a/"}, 2, "names no aggregate"},
		{[]string{"--from", "1h", "--rate", "fast"}, 2, "is no rate"},
		{[]string{"--from", "1h", "--subject", "a..b"}, 2, "subject"},
		{[]string{"--from", "1h", "--subject", "elsewhere.{event_type}"}, 3, "does not take"},
		{[]string{"--run", "nobody-knows"}, 2, "there is no run"},
		{[]string{"--run", "a b"}, 2, "is no name"},
		{[]string{"--from", "1h", "--stream", "OTHER"}, 3, "no relay"},
		{[]string{"--from", "1h", "--order", "nothing"}, 2, "--order"},
	} {
		wantExit(t, harness.MustRun(t, nil, yes(c.args...)...), c.code, c.text)
	}
	wantExit(t, harness.MustRun(t, nil, r.replay("--from", "1h")...), 2, "--yes")
	r.must(yes("--id", "nobody")...)
	r.stored(12+len(want), quick)
	r.ends(0)
}

// A run that is killed anywhere goes on where it was, and nothing is emitted twice.
func TestKilledReplayGoesOn(t *testing.T) {
	t.Parallel()
	const rows = 6000
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, rigOptions{args: impatient})
	r.relay.MustStart(t)
	r.exec(fmt.Sprintf(into+"select 'order', (i %% 50)::text, 'e', '{}' from generate_series(1, %d) i", rows))
	r.stored(rows, time.Minute)
	run := harness.NewRelay(t, r.replay("--from", "1h", "--yes", "--run", "again", "--rate", "8000/s")...)
	resume := r.replay("--run", "again", "--rate", "8000/s")
	kills := 0
	for i := 0; ; i++ {
		if i == 60 {
			t.Fatal("the run does not end")
		}
		run.MustStart(t)
		after := time.Duration(rng.IntN(250+20*i)) * time.Millisecond // a slow machine gets there, too
		timer := time.NewTimer(after)
		select {
		case <-run.Done():
		case <-timer.C:
			must(t, run.Kill())
		}
		timer.Stop()
		code, err := run.Wait(t.Context())
		must(t, err)
		if code == 0 {
			break
		}
		if code > 0 && !strings.Contains(run.Output(), "there is no run") {
			t.Fatalf("seed %d: exit code %d\n%s", seed, code, run.Output())
		}
		if kills++; kills%4 == 0 {
			must(t, r.relay.Kill())
			r.relay.MustStart(t)
		}
		// Before the first record there is nothing to go on with.
		run.Args = resume
		if probe := harness.MustRun(t, nil, r.replay("--run", "again", "--dry-run")...); strings.Contains(probe.Stderr, "there is no run") {
			run.Args = r.replay("--from", "1h", "--yes", "--run", "again", "--rate", "8000/s")
		}
	}
	t.Logf("%d kills", kills)
	r.stored(2*rows, time.Minute)
	_, again := r.twice()
	wantSame(t, fmt.Sprintf("the replayed rows, seed %d", seed), again, r.ids("true"))
	r.ends(0)
}

// Ctrl-C ends a run between two transactions, and tells how to go on.
func TestInterruptedReplayTellsItsName(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.relay.MustStart(t)
	r.exec(into + "select 'order', '1', 'e', '{}' from generate_series(1, 100) i")
	r.stored(100, quick)
	run := harness.RunRelay(t, r.replay("--from", "1h", "--yes", "--run", "slow", "--rate", "20/s")...)
	r.stored(105, quick)
	if code := run.MustStop(t, quick); code != 6 {
		t.Errorf("exit code %d", code)
	}
	if out := run.Output(); !strings.Contains(out, "walrelay replay --run slow") || !strings.Contains(out, "of 100 rows") {
		t.Errorf("told %s", out)
	}
	wantExit(t, harness.MustRun(t, nil, r.replay("--from", "1h", "--run", "slow", "--yes")...), 2, "a choice of its own")
	r.must(r.replay("--run", "slow")...)
	r.stored(200, quick)
	_, again := r.twice()
	wantSame(t, "the replayed rows", again, r.ids("true"))
	r.ends(0)
}

func TestReplayNeedsRights(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.relay.MustStart(t)
	r.exec(into+"values ('order', '1', 'e', '{}')", "create role service login", "create role reader login", "grant select on outbox to reader")
	r.stored(1, quick)
	r.must("init", "--apply", "--dsn", r.dsn, "--emit-grant", "service")
	as := func(role string) harness.Ran {
		args := r.replay("--from", "1h", "--yes")
		args[2] = r.pg.DSNFor("postgres", role, "")
		return harness.MustRun(t, nil, args...)
	}
	wantExit(t, as("reader"), 3, "permission denied for function pg_logical_emit_message", "--emit-grant")
	wantExit(t, as("service"), 3, "permission denied for table outbox", "GRANT SELECT")
	r.exec("grant select on outbox to service")
	wantExit(t, as("service"), 0, "1 rows are in the log")
	r.stored(2, quick)
	r.ends(0)
}
