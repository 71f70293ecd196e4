package test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

func TestEveryCommittedEventIsStoredOnceAndInOrder(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 8, Seed: 1})
	if err := ws.Run(t.Context(), 20_000); err != nil {
		t.Fatal(err)
	}
	res := r.drained(ws, time.Minute)
	t.Log(res)
	if res.Stored < 20_000 || ws.Diary.Count(harness.RolledBack) == 0 {
		t.Errorf("stored %d of at least 20000 events, %d rolled back", res.Stored, ws.Diary.Count(harness.RolledBack))
	}
	if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
	if n := r.unconfirmed(); n > 1<<20 {
		t.Errorf("%d bytes of WAL unconfirmed after a drain", n)
	}
}

func TestKilledRelayLosesAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	const events, kills, window = 100_000, 20, 2048
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, rigOptions{args: []string{"--window", fmt.Sprint(window), "--status-interval", "100ms"}})
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 4, Rows: 50, Seed: seed})
	if err := ws.Run(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	for i := range kills {
		r.relay.MustStart(t)
		at := (i + 1) * events / (kills + 1)
		r.stored(at-events/(kills+1)/2+rng.IntN(events/(kills+1)/2), time.Minute)
		if err := r.relay.Kill(); err != nil {
			t.Fatal(err)
		}
	}
	r.relay.MustStart(t)
	res := r.drained(ws, time.Minute)
	t.Log(res)

	// Refused and repeated publishes are what a kill costs: one window at most.
	in := r.published()
	if in < int64(res.Stored) {
		t.Fatalf("the broker counts %d publishes for %d stored events", in, res.Stored)
	}
	if extra := in - int64(res.Stored); extra > (kills+1)*window {
		t.Errorf("%d publishes for %d events: %d extra, want at most a window of %d for each of %d kills", in, res.Stored, extra, window, kills)
	}
}

// published is the number of messages that the broker received on the stream's subjects.
func (r *rig) published() int64 {
	var accounts struct {
		Accounts []struct {
			Account string `json:"acc"`
			Recv    struct {
				Msgs int64 `json:"msgs"`
			} `json:"received"`
		} `json:"account_statz"`
	}
	if err := r.nats.Monitor("/accstatz?unused=1", &accounts); err != nil {
		r.t.Fatal(err)
	}
	for _, a := range accounts.Accounts {
		if a.Account == "$G" {
			return a.Recv.Msgs
		}
	}
	r.t.Fatalf("no account in %+v", accounts)
	return 0
}

func TestNothingTwiceAfterTheDedupWindow(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--status-interval", "1h"}}) // nothing is confirmed before the kill
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = time.Second })
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 2})
	if err := ws.Run(t.Context(), 2_000); err != nil {
		t.Fatal(err)
	}
	r.relay.MustStart(t)
	r.stored(ws.Diary.Committed(), 30*time.Second)
	if err := r.relay.Kill(); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	if err := ws.Run(t.Context(), 500); err != nil {
		t.Fatal(err)
	}
	r.await(10*time.Second, "the dedup window has passed", func() bool { return time.Since(stopped) > 3*time.Second })
	r.relay.Args = append(r.relay.Args, "--status-interval", "1s")
	r.relay.MustStart(t)
	t.Log(r.drained(ws, 30*time.Second))
}

// createStream makes the stream as --create-stream would, but for edit.
func (r *rig) createStream(edit func(*jetstream.StreamConfig)) {
	r.t.Helper()
	c := jetstream.StreamConfig{
		Name: stream, Subjects: []string{"outbox.>", "walrelay.parked." + stream},
		Storage: jetstream.FileStorage, AllowDirect: true,
	}
	if edit != nil {
		edit(&c)
	}
	if _, err := r.js.CreateStream(r.t.Context(), c); err != nil {
		r.t.Fatal(err)
	}
}

func TestBrokerAwayForTenSeconds(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Rate: 300, Seed: 3})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	writing := in(func() error { return ws.Run(ctx, -1) })
	r.stored(500, 30*time.Second)
	if err := r.nats.Kill(); err != nil {
		t.Fatal(err)
	}
	down := time.Now()
	r.await(15*time.Second, "the broker was away for 10 s", func() bool { return time.Since(down) > 10*time.Second })
	r.nats.MustStart(t)
	r.stored(ws.Diary.Committed(), 30*time.Second)
	stop()
	if err := writing(); err != nil {
		t.Fatal(err)
	}
	t.Log(r.drained(ws, 30*time.Second))
}

func TestPostgresStopsAtOnceAndTheRelayComesBack(t *testing.T) {
	for _, c := range []struct {
		name    string
		backlog bool
		args    []string
		fault   func(r *rig)
		mend    func(r *rig)
	}{
		{name: "under load"},
		{name: "with a backlog", backlog: true},
		{name: "with a confirm delay", args: []string{"--confirm-delay", "1h"}},
		{
			name:  "broker down",
			fault: func(r *rig) { must(r.t, r.nats.Kill()) },
			mend:  func(r *rig) { r.nats.MustStart(r.t) },
		},
		{
			name: "window full", backlog: true,
			fault: func(r *rig) { r.nats.Freeze() },
			mend:  func(r *rig) { r.nats.Thaw() },
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: append([]string{"--window", "256", "--ack-timeout", "30s"}, c.args...)})
			load := harness.Workload{DSN: r.pg.DSN("postgres"), Seed: 4, Rows: 20}
			ws := harness.NewWriters(load)
			if c.backlog {
				if err := ws.Run(t.Context(), 50_000); err != nil {
					t.Fatal(err)
				}
			}
			r.relay.MustStart(t)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			ws.SetRate(200)
			writing := in(func() error { return ws.Run(ctx, -1) })
			r.stored(100, 30*time.Second)
			if c.fault != nil {
				c.fault(r)
			}
			took, err := r.pg.Stop(harness.Fast, 20*time.Second)
			if err != nil {
				t.Fatal(err)
			}
			if took > 5*time.Second {
				t.Errorf("Postgres took %s to stop, want 5s at most", took)
			}
			t.Logf("Postgres stopped in %s", took.Round(time.Millisecond))
			r.pg.MustStart(t)
			if c.mend != nil {
				c.mend(r)
			}
			before := ws.Diary.Committed()
			wait, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			if err := ws.Diary.Await(wait, before+500); err != nil {
				t.Fatal(err)
			}
			stop()
			if err := writing(); err != nil {
				t.Fatal(err)
			}
			t.Log(r.drained(ws, time.Minute))
		})
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestIdleOutboxKeepsNoWAL(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{pg: harness.PostgresOptions{Settings: map[string]string{"max_wal_size": "4GB"}}})
	r.exec("create table noise (t text)", "create database other")
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 20*time.Second, "streaming")
	churn := "insert into noise select repeat(md5(i::text), 30) from generate_series(1, 220000) i"
	t.Run("from another table", func(t *testing.T) { r.idle(t, func() { r.exec(churn) }) })
	t.Run("from another database", func(t *testing.T) {
		r.idle(t, func() {
			c, err := pgxConnect(t.Context(), r.pg.DSN("other"))
			must(t, err)
			defer c.Close(t.Context())
			_, err = c.Exec(t.Context(), "create table noise (t text)")
			must(t, err)
			_, err = c.Exec(t.Context(), churn)
			must(t, err)
		})
	})
}

func (r *rig) idle(t *testing.T, churn func()) {
	t.Helper()
	before := query[string](r, "select pg_current_wal_lsn()::text")
	churn()
	if n := query[int64](r, "select (pg_current_wal_lsn() - $1::pg_lsn)::bigint", before); n < 200<<20 {
		t.Fatalf("%d bytes of WAL written, want 200 MB", n)
	}
	r.await(3*time.Second, "less than 1 MB of WAL unconfirmed", func() bool { return r.unconfirmed() < 1<<20 })
	r.exec("checkpoint")
	r.await(3*time.Second, "less than 1 MB of WAL retained", func() bool { return r.retained() < 1<<20 })
}
