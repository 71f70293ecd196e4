package test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// guide runs the commands of a section of docs/migration.md, one block after the other.
type guide struct {
	*rig
	blocks [][2]string // language and text
}

var fence = regexp.MustCompile("(?ms)^ *```(sql|sh)\n(.*?)^ *```$")

func newGuide(r *rig, section string) *guide {
	r.t.Helper()
	text, err := os.ReadFile("../docs/migration.md")
	must(r.t, err)
	_, rest, ok := strings.Cut(string(text), "\n## "+section+"\n")
	if !ok {
		r.t.Fatalf("no section %q", section)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	g := &guide{rig: r}
	for _, m := range fence.FindAllStringSubmatch(rest, -1) {
		g.blocks = append(g.blocks, [2]string{m[1], m[2]})
	}
	return g
}

// next runs the next block, which must contain text, and returns what it
// printed or, for SQL, its first value. `walrelay run` becomes the rig's relay.
func (g *guide) next(text string) string {
	g.t.Helper()
	if len(g.blocks) == 0 || !strings.Contains(g.blocks[0][1], text) {
		g.t.Fatalf("no block with %q comes next: %q", text, g.blocks)
	}
	language, block := g.blocks[0][0], g.blocks[0][1]
	g.blocks = g.blocks[1:]
	if language == "sql" {
		conn := g.pg.MustConn(g.t)
		results, err := conn.PgConn().Exec(g.t.Context(), block).ReadAll()
		must(g.t, err)
		for _, res := range results {
			if len(res.Rows) > 0 {
				return string(res.Rows[0][0])
			}
		}
		return ""
	}
	var out strings.Builder
	for line := range strings.Lines(block) {
		args := strings.Fields(strings.ReplaceAll(line, "'", ""))
		if len(args) < 2 || args[0] != "walrelay" {
			g.t.Fatalf("cannot run %q", line)
		}
		env := []string{"WALRELAY_DSN=" + g.dsn, "WALRELAY_NATS_URL=" + g.natsURL}
		if args[1] == "run" {
			g.relay = harness.NewRelay(g.t, append(args[1:], "--log-format", "text")...)
			g.relay.Env = env
			g.relay.MustStart(g.t)
			continue
		}
		ran := harness.MustRun(g.t, env, args[1:]...)
		if ran.Code != 0 {
			g.t.Fatalf("%s: exit code %d\n%s%s", line, ran.Code, ran.Stdout, ran.Stderr)
		}
		out.WriteString(ran.Stdout)
	}
	return out.String()
}

// shop inserts events of some aggregates, each numbered from 0, until it is
// stopped, and returns how many each has.
func (r *rig) shop(insert string) (stop func() []int) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.t.Context()))
	counts := make([]int, 4)
	errs := make(chan error, len(counts))
	var running sync.WaitGroup
	for a := range counts {
		running.Go(func() {
			errs <- func() error {
				conn, err := r.pg.Conn(ctx)
				if err != nil {
					return err
				}
				defer conn.Close(context.WithoutCancel(ctx))
				tick := time.NewTicker(2 * time.Millisecond)
				defer tick.Stop()
				for {
					select {
					case <-ctx.Done():
						return nil
					case <-tick.C:
					}
					if _, err := conn.Exec(context.WithoutCancel(ctx), insert, fmt.Sprint(a), counts[a]); err != nil {
						return err
					}
					counts[a]++
				}
			}()
		})
	}
	return func() []int {
		r.t.Helper()
		cancel()
		running.Wait()
		for range counts {
			must(r.t, <-errs)
		}
		return counts
	}
}

// inStream blocks until the stream has as many events as counts say, after
// those that were sent before, and wants each aggregate's in order.
func (r *rig) inStream(name string, before, counts []int) {
	r.t.Helper()
	want := 0
	for a := range counts {
		want += counts[a] - before[a]
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	if err := harness.AwaitMessages(ctx, r.js, name, want); err != nil {
		r.t.Fatalf("%v\n%s", err, r.relay.Output())
	}
	all, err := harness.ReadStream(ctx, r.js, name)
	must(r.t, err)
	next := slices.Clone(before)
	for _, m := range all {
		var body struct{ N int }
		must(r.t, json.Unmarshal(m.Payload, &body))
		var a int
		fmt.Sscan(m.Aggregate, &a)
		if body.N != next[a] {
			r.t.Fatalf("message %d is event %d of aggregate %d, want %d", m.Seq, body.N, a, next[a])
		}
		next[a]++
	}
	if !slices.Equal(next, counts) {
		r.t.Errorf("aggregates have %v events, want %v", next, counts)
	}
}

func TestMigrationFromAPollingOutbox(t *testing.T) {
	t.Parallel()
	pg, n := harness.RunPostgres(t, harness.PostgresOptions{}), harness.RunNATS(t, harness.NATSOptions{})
	r := &rig{t: t, pg: pg, nats: n, js: n.JetStream(t), dsn: pg.DSN("postgres"), natsURL: n.URL()}
	r.exec(`create table outbox (seq bigint generated always as identity primary key, id uuid not null unique default gen_random_uuid(),
		aggregate_type text not null, aggregate_id text not null, event_type text not null, payload jsonb,
		created_at timestamptz not null default now(), published_at timestamptz)`,
		"create index on outbox (seq) where published_at is null")
	stop := r.shop("insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('order', $1, 'made', jsonb_build_object('n', $2::int))")

	// poll sends what is not sent, in batches, and is done when nothing is left.
	sent := make([]int, 4)
	conn := pg.MustConn(t)
	poll := func(table string) {
		t.Helper()
		for {
			rows, err := conn.Query(t.Context(), "with batch as (update "+table+" set published_at = now() where seq in (select seq from "+table+
				" where published_at is null order by seq limit 50) returning seq, aggregate_id::int a, (payload->>'n')::int n) select a, n from batch order by seq")
			must(t, err)
			batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ A, N int }])
			must(t, err)
			for _, ev := range batch {
				if ev.N != sent[ev.A] {
					t.Fatalf("the poller sends event %d of aggregate %d, want %d", ev.N, ev.A, sent[ev.A])
				}
				sent[ev.A]++
			}
			if len(batch) == 0 {
				return
			}
		}
	}
	waiting := func(table string, n int) {
		t.Helper()
		r.await(10*time.Second, fmt.Sprint(n, " rows of ", table, " wait"), func() bool {
			return query[int](r, "select count(*)::int from "+table+" where published_at is null") >= n
		})
	}
	waiting("outbox", 100)
	poll("outbox")

	g := newGuide(r, "From a polling outbox")
	g.next("CREATE PUBLICATION")
	poll("outbox")
	g.next("walrelay slot create")
	waiting("outbox", 50)
	poll("outbox")
	waiting("outbox", 50) // the poller has stopped
	g.next("RENAME TO outbox_polled")
	waiting("outbox", 50)
	poll("outbox_polled")
	if got := g.next("SELECT count(*)"); got != "0" {
		t.Fatalf("%s rows wait in the old table", got)
	}
	out := g.next("walrelay run")
	if !strings.Contains(out, "nothing to do") || !strings.Contains(out, "outbox.order.made") {
		t.Errorf("init and preview say\n%s", out)
	}
	waiting("outbox", 200)
	g.next("DROP TABLE outbox_polled")
	before := query[int](r, "select count(*)::int from outbox")
	r.await(10*time.Second, "rows come without the column", func() bool {
		return query[int](r, "select count(*)::int from outbox") > before+50
	})
	if len(g.blocks) != 0 {
		t.Errorf("not run: %q", g.blocks)
	}
	r.inStream("SHOP", sent, stop())
	r.ends(0)
}

func TestMigrationFromDebezium(t *testing.T) {
	t.Parallel()
	pg, n := harness.RunPostgres(t, harness.PostgresOptions{}), harness.RunNATS(t, harness.NATSOptions{})
	r := &rig{t: t, pg: pg, nats: n, js: n.JetStream(t), dsn: pg.DSN("postgres"), natsURL: n.URL()}
	// The table of Debezium's documentation, and what its connector makes.
	r.exec(`create table outbox (id uuid not null primary key, aggregatetype varchar(255) not null, aggregateid varchar(255) not null,
		type varchar(255) not null, payload jsonb)`,
		"create publication dbz_publication for all tables",
		"select pg_create_logical_replication_slot('debezium', 'pgoutput')")
	stop := r.shop("insert into outbox values (gen_random_uuid(), 'order', $1, 'made', jsonb_build_object('n', $2::int))")
	// Debezium confirms what it has sent.
	sent := make([]int, 4)
	confirm := func() {
		t.Helper()
		upto := query[string](r, "select pg_current_wal_flush_lsn()::text")
		r.exec("select pg_replication_slot_advance('debezium', '" + upto + "')")
	}
	r.await(10*time.Second, "there are events", func() bool { return query[int](r, "select count(*)::int from outbox") > 100 })
	confirm()

	g := newGuide(r, "From Debezium's outbox event router")
	out := g.next("walrelay init")
	if strings.Contains(out, "created") || strings.Contains(out, "added") || !strings.Contains(out, "outbox.event.order") {
		t.Errorf("init and preview say\n%s", out)
	}
	confirm() // for the last time: the connector stops
	g.next("pg_copy_logical_replication_slot")
	g.next("walrelay run")
	first := query[int](r, "select count(*)::int from outbox")
	r.await(10*time.Second, "there are more events", func() bool { return query[int](r, "select count(*)::int from outbox") > first+100 })
	// Peeking at Debezium's slot tells what it had not sent.
	counts := stop()
	total := 0
	for _, c := range counts {
		total += c
	}
	left := query[int](r, `select count(*)::int from pg_logical_slot_peek_binary_changes('debezium', null, null, 'proto_version', '1', 'publication_names', 'dbz_publication')
		where get_byte(data, 0) = ascii('I')`)
	if left < 100 || left >= total {
		t.Fatalf("Debezium has not sent %d of %d events", left, total)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := harness.AwaitMessages(ctx, r.js, "SHOP", left); err != nil {
		t.Fatalf("%v\n%s", err, r.relay.Output())
	}
	all, err := harness.ReadStream(ctx, r.js, "SHOP")
	must(t, err)
	if len(all) != left {
		t.Errorf("%d events are stored, want the %d that Debezium had not sent", len(all), left)
	}
	// Where the stream begins is where Debezium ended; from there it has no gap.
	for a := range sent {
		sent[a] = -1
	}
	for _, m := range all {
		var a int
		var body struct{ N int }
		fmt.Sscan(m.Aggregate, &a)
		must(t, json.Unmarshal(m.Payload, &body))
		if sent[a] < 0 {
			sent[a] = body.N
		}
	}
	r.inStream("SHOP", sent, counts)
	st, err := r.js.Stream(ctx, "SHOP")
	must(t, err)
	m, err := st.GetMsg(ctx, 1)
	must(t, err)
	if m.Subject != "outbox.event.order" || m.Header.Get("id") == "" || m.Header.Get("id") != m.Header.Get(event.HeaderID) {
		t.Errorf("got %s with %v", m.Subject, m.Header)
	}
	g.next("pg_drop_replication_slot")
	if len(g.blocks) != 0 {
		t.Errorf("not run: %q", g.blocks)
	}
	r.ends(0)
}
