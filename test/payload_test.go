package test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func pgxConnect(ctx context.Context, dsn string) (*pgx.Conn, error) { return pgx.Connect(ctx, dsn) }

// messages reads the stream with headers.
func (r *rig) messages(n int) []*jetstream.RawStreamMsg {
	r.t.Helper()
	r.stored(n, 30*time.Second)
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	var all []*jetstream.RawStreamMsg
	for seq := st.CachedInfo().State.FirstSeq; seq <= st.CachedInfo().State.LastSeq; seq++ {
		m, err := st.GetMsg(r.t.Context(), seq)
		must(r.t, err)
		all = append(all, m)
	}
	if len(all) != n {
		r.t.Fatalf("stream has %d messages, want %d", len(all), n)
	}
	return all
}

func TestPayloadsArriveByteForByte(t *testing.T) {
	t.Parallel()
	// A json column keeps the bytes; jsonb would be written anew by Postgres.
	r := newRig(t, rigOptions{prepare: func(r *rig) {
		r.exec(`create table public.outbox (seq bigint generated always as identity primary key, id uuid not null unique default gen_random_uuid(),
			aggregate_type text not null, aggregate_id text not null, event_type text not null,
			payload json, headers jsonb, schema_version int, created_at timestamptz not null default now())`)
	}})
	big := `{"x":"` + strings.Repeat("ä", 450_000) + `"}`
	payloads := []*string{
		nil,
		ptr(`{"n": 18446744073709551615, "m": 1.10,  "e":1E400}`),
		ptr("{\"a\":1,\n\t\"a\":2}"),
		ptr(`"\u0000"`),
		ptr(`"snow ☃ and 😀"`),
		ptr(`null`),
		&big,
	}
	r.relay.MustStart(t)
	conn := r.pg.MustConn(t)
	for i, p := range payloads {
		_, err := conn.Exec(t.Context(), "insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('order', $1, 'created', $2::text::json)", fmt.Sprint(i), p)
		must(t, err)
	}
	for i, m := range r.messages(len(payloads)) {
		want := ""
		if payloads[i] != nil {
			want = *payloads[i]
		}
		if !bytes.Equal(m.Data, []byte(want)) {
			t.Errorf("payload %d: got %d bytes %.80q, want %d bytes %.80q", i, len(m.Data), m.Data, len(want), want)
		}
		if m.Subject != "outbox.order.created" {
			t.Errorf("payload %d: subject %q", i, m.Subject)
		}
		if got := m.Header.Get(event.HeaderAggregateID); got != fmt.Sprint(i) {
			t.Errorf("payload %d: header %s is %q", i, event.HeaderAggregateID, got)
		}
		if m.Header.Get("Nats-Msg-Id") == "" || m.Header.Get("Nats-Msg-Id") != m.Header.Get(event.HeaderID) {
			t.Errorf("payload %d: Nats-Msg-Id %q, %s %q", i, m.Header.Get("Nats-Msg-Id"), event.HeaderID, m.Header.Get(event.HeaderID))
		}
	}
}

func ptr[T any](v T) *T { return &v }

func TestRoleSettingsDoNotLeakIntoMessages(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		prepare: func(r *rig) {
			r.exec("create role relay login replication superuser",
				"alter role relay set datestyle = 'German'", "alter role relay set timezone = 'Asia/Tokyo'",
				"alter role relay set bytea_output = 'escape'", "alter role relay set intervalstyle = 'sql_standard'",
				`create table public.outbox (seq bigint generated always as identity primary key, id uuid not null unique default gen_random_uuid(),
				aggregate_type text not null, aggregate_id text not null, event_type text not null,
				payload bytea, headers jsonb, schema_version int, created_at timestamptz not null default now())`)
		},
		dsn: func(pg *harness.Postgres) string { return pg.DSNFor("postgres", "relay", "") },
	})
	r.relay.MustStart(t)
	raw := []byte("\x00\x01\\'\xff bytes")
	_, err := r.pg.MustConn(t).Exec(t.Context(), "insert into outbox (aggregate_type, aggregate_id, event_type, payload, created_at) values ('a', '1', 'e', $1, '2024-02-29 23:59:59.123456+00')", raw)
	must(t, err)
	m := r.messages(1)[0]
	if !bytes.Equal(m.Data, raw) {
		t.Errorf("payload %q, want %q", m.Data, raw)
	}
	if got, want := m.Header.Get(event.HeaderTime), "2024-02-29T23:59:59.123456Z"; got != want {
		t.Errorf("%s is %q, want %q", event.HeaderTime, got, want)
	}
}

func TestLatin1DatabaseBecomesUTF8(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{pg: harness.PostgresOptions{Encoding: "LATIN1"}})
	r.relay.MustStart(t)
	r.exec("alter role postgres set client_encoding = 'UTF8'") // of the connection below; pgx takes the database's
	_, err := r.pg.MustConn(t).Exec(t.Context(), "insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('a', 'é', 'e', '{\"x\": \"äöü\"}')")
	must(t, err)
	m := r.messages(1)[0]
	if string(m.Data) != `{"x": "äöü"}` || m.Header.Get(event.HeaderAggregateID) != "é" {
		t.Errorf("payload %q, aggregate %q", m.Data, m.Header.Get(event.HeaderAggregateID))
	}
}

func TestNamesThatNeedQuotes(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	nats := harness.RunNATS(t, harness.NATSOptions{})
	r := &rig{t: t, pg: pg, nats: nats, js: nats.JetStream(t)}
	dsn := pg.DSN("postgres")
	pg.MustExec(t, `create schema "My Schema"`)
	const tab, pub, sl = `"My Schema"."Out Box"`, `My-Pub, "x"`, "1select"
	pubFlag := `"My-Pub, ""x"""`
	r.must("init", "--apply", "--dsn", dsn, "--table", tab, "--publication", pubFlag)
	if n := query[int](r, "select count(*)::int from pg_publication where pubname = $1", pub); n != 1 {
		t.Fatalf("publication %q was not made", pub)
	}
	r.must("slot", "create", sl, "--dsn", dsn, "--publication", pubFlag)
	r.relay = harness.NewRelay(t, "run", "--dsn", dsn, "--nats-url", nats.URL(), "--slot", sl, "--publication", pubFlag, "--table", tab, "--create-stream")
	r.relay.MustStart(t)
	pg.MustExec(t, `insert into `+tab+` (aggregate_type, aggregate_id, event_type, payload) values ('order', '1', 'made', '{}')`)
	if m := r.messages(1)[0]; m.Subject != "outbox.order.made" {
		t.Errorf("subject %q", m.Subject)
	}
}

func TestTransactionsOfAllShapes(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	const into = "insert into outbox (aggregate_type, aggregate_id, event_type, payload) "
	conn := r.pg.MustConn(t)
	script := []string{
		"create table other (i int)",
		into + "values ('t', '1', 'first', '{}')",
		"begin", "rollback",
		"insert into other values (1)", // a transaction that is empty for the publication
		"begin", into + "values ('t', '2', 'no', '{}')", "rollback",
		"begin", into + "values ('t', '3', 'before', '{}')", "savepoint a", into + "values ('t', '4', 'no', '{}')", "rollback to a", into + "values ('t', '5', 'after', '{}')", "commit",
		"begin", into + "values ('t', '6', 'deleted', '{}')", "delete from outbox where aggregate_id = '6'", "commit",
		into + "values ('t', '7', 'last', '{}') on conflict do nothing",
		"update outbox set payload = '{\"changed\": true}'", "truncate outbox",
	}
	for _, sql := range script {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	rows := make([][]any, 3_000)
	for i := range rows {
		rows[i] = []any{"copy", fmt.Sprint(i), "copied", "{}"}
	}
	_, err := conn.CopyFrom(t.Context(), pgx.Identifier{"outbox"}, []string{"aggregate_type", "aggregate_id", "event_type", "payload"}, pgx.CopyFromRows(rows))
	must(t, err)
	want := []string{"first", "before", "after", "deleted", "last"}
	r.stored(len(want)+len(rows), 30*time.Second)
	all := r.read()
	for i, w := range want {
		if got := all[i].Subject; got != "outbox.t."+w {
			t.Errorf("message %d has subject %q, want event %q", i+1, got, w)
		}
	}
	var last event.Position
	for i, m := range all {
		pos, err := event.ParsePosition(m.Pos)
		must(t, err)
		if pos.Compare(last) <= 0 {
			t.Fatalf("message %d has position %s after %s", i+1, pos, last)
		}
		last = pos
	}
	for i := range rows {
		if got := all[len(want)+i].Aggregate; got != fmt.Sprint(i) {
			t.Fatalf("copied row %d is of aggregate %q", i, got)
		}
	}
}

func TestHugeTransactionInLittleMemory(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 20*time.Second, "streaming")
	const rows = 200_000
	r.exec(fmt.Sprintf(`insert into outbox (aggregate_type, aggregate_id, event_type, payload)
		select 'bulk', i::text, 'made', jsonb_build_object('i', i, 'pad', repeat('x', 200)) from generate_series(1, %d) i`, rows))
	r.stored(rows, time.Minute)
	rss, err := r.relay.RSS()
	must(t, err)
	t.Logf("%d rows in one transaction, peak RSS %.1f MB", rows, float64(rss)/(1<<20))
	if rss > 64<<20 {
		t.Errorf("peak RSS %d bytes: the transaction is buffered", rss)
	}
	for i, m := range r.read() {
		if m.Aggregate != fmt.Sprint(i+1) {
			t.Fatalf("message %d is of aggregate %q", i+1, m.Aggregate)
		}
	}
}

func TestPoisonIsParkedAndTheRestFlows(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{nats: harness.NATSOptions{MaxPayload: 64 << 10}})
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"outbox.good.>", "walrelay.parked." + stream} })
	r.relay.MustStart(t)
	r.insertGoodBadGood()
	ms := r.messages(5)
	subjects := []string{"outbox.good.one", "walrelay.parked." + stream, "outbox.good.two", "walrelay.parked." + stream, "outbox.good.three"}
	for i, want := range subjects {
		if ms[i].Subject != want {
			t.Errorf("message %d has subject %q, want %q", i+1, ms[i].Subject, want)
		}
	}
	dlq, err := r.js.Stream(t.Context(), stream+"_DLQ")
	must(t, err)
	for i, c := range []struct{ reason, subject, id string }{
		{"too_large", "outbox.good.large", ms[1].Header.Get(event.HeaderID)},
		{"subject", "outbox.bad.lost", ms[3].Header.Get(event.HeaderID)},
	} {
		m, err := dlq.GetMsg(t.Context(), uint64(i+1))
		must(t, err)
		if got := m.Header.Get(event.HeaderReason); !strings.HasPrefix(got, c.reason+":") {
			t.Errorf("dead letter %d has reason %q, want %q", i+1, got, c.reason)
		}
		if got := m.Header.Get(event.HeaderSubject); got != c.subject {
			t.Errorf("dead letter %d has subject %q, want %q", i+1, got, c.subject)
		}
		if got := m.Header.Get(event.HeaderID); got == "" || got != c.id {
			t.Errorf("dead letter %d is of event %q, its marker of %q", i+1, got, c.id)
		}
	}
	r.await(5*time.Second, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
}

func (r *rig) insertGoodBadGood() {
	r.exec(
		"insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('good', '1', 'one', '{}')",
		"insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('good', '2', 'large', to_jsonb(repeat('x', 100000)))",
		"insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('good', '1', 'two', '{}'), ('bad', '1', 'lost', '{}')",
		"insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('good', '1', 'three', '{}')",
	)
}

func TestPoisonHaltsWhenAsked(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{nats: harness.NATSOptions{MaxPayload: 64 << 10}, args: []string{"--on-poison", "halt"}})
	r.relay.MustStart(t)
	r.insertGoodBadGood()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	code, err := r.relay.Wait(ctx)
	must(t, err)
	if code != 4 {
		t.Errorf("exit code %d, want 4\n%s", code, r.relay.Output())
	}
	if ms := r.messages(1); ms[0].Subject != "outbox.good.one" {
		t.Errorf("subject %q before the poison event", ms[0].Subject)
	}
	if n := query[int](r, "select count(*)::int from outbox where xmin::text::bigint > 0"); n != 5 {
		t.Errorf("%d rows left", n)
	}
}
