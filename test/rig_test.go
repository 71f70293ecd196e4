package test

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// TestMain ends every server and removes every folder, whatever happened.
func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

const (
	slot        = "walrelay"
	publication = "walrelay"
	stream      = "OUTBOX"
	table       = "public.outbox"
)

// rig is a Postgres with an outbox and a slot, a broker, and a relay between them.
type rig struct {
	t     testing.TB
	pg    *harness.Postgres
	nats  *harness.NATS
	js    jetstream.JetStream
	relay *harness.Relay

	dsn     string
	natsURL string
	table   string
}

type rigOptions struct {
	pg      harness.PostgresOptions
	nats    harness.NATSOptions
	dsn     func(pg *harness.Postgres) string // of the relay and of init
	natsURL func(n *harness.NATS) string
	table   string
	args    []string // of run, after the others; a later flag wins
	prepare func(r *rig)
}

func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	r := &rig{t: t, pg: harness.RunPostgres(t, o.pg), nats: harness.RunNATS(t, o.nats), table: o.table}
	r.js = r.nats.JetStream(t)
	r.dsn, r.natsURL = r.pg.DSN("postgres"), r.nats.URL()
	if o.dsn != nil {
		r.dsn = o.dsn(r.pg)
	}
	if o.natsURL != nil {
		r.natsURL = o.natsURL(r.nats)
	}
	if r.table == "" {
		r.table = table
	}
	if o.prepare != nil {
		o.prepare(r)
	}
	r.must("init", "--apply", "--dsn", r.dsn, "--table", r.table, "--publication", publication)
	r.must("slot", "create", slot, "--dsn", r.dsn, "--publication", publication)
	r.relay = harness.NewRelay(t, slices.Concat([]string{
		"run",
		"--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table,
		"--slot", slot, "--publication", publication, "--stream", stream, "--create-stream",
		"--log-format", "text",
	}, o.args)...)
	return r
}

// must runs walrelay to its end and wants exit code 0.
func (r *rig) must(args ...string) harness.Ran {
	r.t.Helper()
	ran := harness.MustRun(r.t, nil, args...)
	if ran.Code != 0 {
		r.t.Fatalf("walrelay %s: exit code %d\n%s%s", strings.Join(args, " "), ran.Code, ran.Stdout, ran.Stderr)
	}
	return ran
}

// stored blocks until the stream holds n messages.
func (r *rig) stored(n int, limit time.Duration) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	if err := harness.AwaitMessages(ctx, r.js, stream, n); err != nil {
		r.t.Fatal(err)
	}
}

// read reads the whole stream.
func (r *rig) read() []harness.Stored {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	all, err := harness.ReadStream(ctx, r.js, stream)
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

// drained blocks until every committed event is stored, then compares the whole
// stream with what the writers saw committed.
func (r *rig) drained(ws *harness.Writers, limit time.Duration) *harness.Result {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	if err := ws.Diary.Resolve(ctx, r.pg.MustConn(r.t), r.table); err != nil {
		r.t.Fatal(err)
	}
	if err := harness.AwaitMessages(ctx, r.js, stream, ws.Diary.Committed()); err != nil {
		r.t.Error(err)
	}
	// A sentinel behind everything else shows that nothing comes after.
	res := harness.Compare(ws.Diary, r.read())
	if !res.OK() {
		r.t.Errorf("stream and table disagree: %s", res)
	}
	return res
}

// exec runs SQL as superuser.
func (r *rig) exec(statements ...string) {
	r.t.Helper()
	r.pg.MustExec(r.t, statements...)
}

// query returns one value.
func query[T any](r *rig, sql string, args ...any) T {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	conn, err := r.pg.Conn(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	defer conn.Close(ctx)
	var v T
	if err := conn.QueryRow(ctx, sql, args...).Scan(&v); err != nil {
		r.t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// await polls until ok, since neither server signals what is waited for.
func (r *rig) await(limit time.Duration, what string, ok func() bool) {
	r.t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			r.t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}

// unconfirmed is the WAL between the slot's confirmed LSN and the end.
func (r *rig) unconfirmed() int64 {
	return query[int64](r, `select (pg_current_wal_lsn() - confirmed_flush_lsn)::bigint from pg_replication_slots where slot_name = $1`, slot)
}

func (r *rig) retained() int64 {
	return query[int64](r, `select (pg_current_wal_lsn() - restart_lsn)::bigint from pg_replication_slots where slot_name = $1`, slot)
}

// in runs fn on its own goroutine and returns what waits for its error.
func in(fn func() error) func() error {
	done := make(chan error, 1)
	go func() { done <- fn() }()
	return func() error { return <-done }
}
