package test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// outboxOf is an outbox table with some columns more.
func outboxOf(columns ...string) func(*rig) {
	return func(r *rig) {
		r.exec(`create table public.outbox (seq bigint generated always as identity primary key, id uuid not null unique default gen_random_uuid(),
			aggregate_type text not null, aggregate_id text not null, event_type text not null, payload jsonb, headers jsonb,
			` + strings.Join(append(columns, ""), ", ") + ` created_at timestamptz not null default now())`)
	}
}

func TestRoutesTypesAndHeaderColumns(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		prepare: outboxOf("tenant text", "traceparent text"),
		args: []string{
			"--route-regex", `(?<context>[^-]+)-(?<routedByValue>.+)`, "--subject", "outbox.event.${routedByValue}.$1",
			"--type-subject", "deleted=gone.{aggregate_type}", "--header-column", "tenant:X-Tenant", "--header-column", "traceparent",
			"--cloudevents", "--cloudevents-source", "https://shop.example/orders",
		},
	})
	r.relay.MustStart(t)
	r.exec(`insert into outbox (aggregate_type, aggregate_id, event_type, payload, headers, tenant, traceparent) values
		('eu-order', 'No 1 €', 'made', '{}', '{"tracestate": "a=b", "Nats-Rollup": "all", "Outbox-Id": "x", "STATUS": "1"}', 'acme', '00-0af7-b7-01'),
		('order', '2', 'made', '{}', null, null, null),
		('eu-order', '3', 'deleted', null, null, null, null)`)
	ms := r.messages(3)
	for name, want := range map[string]string{
		"X-Tenant": "acme", "traceparent": "00-0af7-b7-01", "tracestate": "a=b", "Nats-Rollup": "", "STATUS": "",
		"ce-specversion": "1.0", "ce-source": "https://shop.example/orders", "ce-type": "made", "ce-subject": "No%201%20%E2%82%AC",
		"ce-id": ms[0].Header.Get(event.HeaderID), "ce-datacontenttype": "application/json", "ce-traceparent": "00-0af7-b7-01", "ce-tracestate": "a=b",
		"ce-time": ms[0].Header.Get(event.HeaderTime), event.HeaderAggregateID: "No 1 €",
	} {
		if got := ms[0].Header.Get(name); got != want {
			t.Errorf("header %s is %q, want %q", name, got, want)
		}
	}
	for i, want := range []string{"outbox.event.order.eu", "walrelay.parked." + stream, "gone.eu-order"} {
		if got := ms[i].Subject; got != want {
			t.Errorf("message %d has subject %q, want %q", i+1, got, want)
		}
	}
	if got := ms[1].Header.Get(event.HeaderReason); got != `subject: aggregate_type "order" does not match the route's expression` {
		t.Errorf("the second event is parked for %q", got)
	}
	r.ends(0)

	// What preview shows is what was published.
	ran := r.must(append([]string{"events", "preview", "--dsn", r.dsn, "--table", r.table, "-o", "json"}, r.relay.Args[slices.Index(r.relay.Args, "--route-regex"):]...)...)
	var shown []struct {
		ID, Subject string
		Headers     []struct{ Name, Value string }
		Bytes       int
		Body        *string
		Poison      *struct{ Reason, Detail string }
	}
	must(t, json.Unmarshal([]byte(ran.Stdout), &shown))
	if len(shown) != 3 {
		t.Fatalf("preview shows %d events, want 3:\n%s", len(shown), ran.Stdout)
	}
	for i, v := range shown {
		m := ms[i]
		if v.ID != m.Header.Get(event.HeaderID) {
			t.Errorf("event %d: preview shows id %q, want %q", i+1, v.ID, m.Header.Get(event.HeaderID))
		}
		if i == 1 {
			if v.Poison == nil || "subject: "+v.Poison.Detail != m.Header.Get(event.HeaderReason) {
				t.Errorf("preview says %+v", v.Poison)
			}
			continue
		}
		if v.Poison != nil || v.Subject != m.Subject || v.Bytes != len(m.Data) || v.Body == nil || *v.Body != string(m.Data) {
			t.Errorf("event %d: preview shows %+v", i+1, v)
		}
		for _, h := range v.Headers {
			if got := m.Header.Get(h.Name); got != h.Value {
				t.Errorf("event %d: preview shows header %s: %q, published was %q", i+1, h.Name, h.Value, got)
			}
		}
	}
}

func TestEventsPreview(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	dsn := pg.DSN("postgres")
	r := &rig{t: t, pg: pg, dsn: dsn}
	pg.MustExec(t,
		"create table loose (seq bigint, id text, aggregate_type text, aggregate_id text, event_type text, payload bytea)",
		`insert into loose values (1, 'a', 'order', '1', E'made\x1b[2J', 'text'), (2, null, 'order', '1', 'made', 'x'), (3, 'c', 'order', '1', 'made', '\xff00'),
			(4, 'd', 'order', '1', 'made', null)`,
		"insert into loose select i, 'e' || i, 'order', '1', 'made', convert_to(repeat('ä', 200), 'UTF8') from generate_series(5, 6) i",
	)
	args := []string{"events", "preview", "--dsn", dsn, "--table", "public.loose"}
	out := r.must(args...).Stdout
	for _, want := range []string{
		"poison, null_id: the id is NULL", "outbox.order.made\n  Outbox-Id: c", "body of 2 B, no text", "empty body",
		"body of 400 B: " + strings.Repeat("ä", 100) + "…", "body of 4 B: text", "outbox.order.made%1B[2J", "Outbox-Event-Type: made?[2J",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out = r.must(append(args, "--limit", "2")...).Stdout
	if a, b := strings.Index(out, "Outbox-Id: e5"), strings.Index(out, "Outbox-Id: e6"); a < 0 || b < a || strings.Contains(out, "Outbox-Id: d") {
		t.Errorf("--limit 2 shows\n%s", out)
	}
	out = r.must(append(args, "--id", "a", "--id", "no'ne", "-o", "json")...).Stdout
	if !strings.Contains(out, `"id": "a"`) || strings.Count(out, `"table"`) != 1 {
		t.Errorf("--id a shows\n%s", out)
	}
	if out = r.must(append(args, "--id", "none")...).Stdout; out != "no such rows\n" {
		t.Errorf("got %q", out)
	}
	refused(t, refusal{3, `column "no" (id) is missing`, "map the role", nil}, with(args, "--table", "public.loose,id=no")...)
	refused(t, refusal{3, "does not exist", "--table", nil}, with(args, "--table", "public.none")...)
	refused(t, refusal{2, "--limit is below one", "1 or more", nil}, append(args, "--limit", "0")...)
}

// emits writes transactions that mix rows and messages, each with a number of its own.
func (r *rig) emits(ctx context.Context, conn *pgx.Conn, from, n int, rng *rand.Rand) error {
	for i := from; i < from+n; {
		tx, err := conn.Begin(ctx)
		if err != nil {
			return err
		}
		roll := rng.IntN(5) == 0
		next := i
		for range min(1+rng.IntN(4), from+n-i) {
			sql := "insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('order', '1', 'row', to_jsonb($1::int))"
			switch rng.IntN(3) {
			case 0:
				sql = "select walrelay_emit('order', '1', 'function', to_jsonb($1::int), '{\"traceparent\": \"00-1-2-01\"}')"
			case 1:
				sql = "select pg_logical_emit_message(true, 'walrelay', json_build_object('id', gen_random_uuid(), 'aggregate_type', 'order', 'aggregate_id', '1', 'event_type', 'message', 'payload', $1::int)::text)"
			}
			if _, err := tx.Exec(ctx, sql, next); err != nil {
				return err
			}
			next++
		}
		if roll {
			err = tx.Rollback(ctx)
		} else {
			err = tx.Commit(ctx)
			i = next
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func TestMessagesAndRowsKeepTheirOrder(t *testing.T) {
	t.Parallel()
	const events, kills = 3_000, 4
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, rigOptions{args: []string{"--messages", "--window", "256", "--status-interval", "50ms"}})
	r.must("init", "--apply", "--emit-function", "--dsn", r.dsn)
	conn := r.pg.MustConn(t)
	must(t, r.emits(t.Context(), conn, 0, events/2, rng))
	writing := in(func() error { return r.emits(t.Context(), conn, events/2, events/2, rng) })
	if kills > 0 {
		for i := range kills {
			r.relay.MustStart(t)
			r.stored((i+1)*events/(kills+2), time.Minute)
			must(t, r.relay.Kill())
		}
	}
	must(t, writing())
	r.relay.MustStart(t)
	r.exec("select pg_logical_emit_message(true, 'walrelay', '{\"id\": \"last\", \"aggregate_type\": \"x\", \"event_type\": \"y\", \"payload\": \"end\"}')")
	r.await(time.Minute, "the last event is stored", func() bool {
		last, err := harness.ReadStream(t.Context(), r.js, stream)
		must(t, err)
		return len(last) > 0 && string(last[len(last)-1].Payload) == `"end"`
	})
	all := r.read()
	if got := len(all) - 1; got < events {
		t.Errorf("%d events are stored, want at least %d", got, events)
	}
	for i, m := range all[:len(all)-1] {
		if string(m.Payload) != fmt.Sprint(i) {
			t.Fatalf("message %d is event %s, want %d", i+1, m.Payload, i)
		}
	}
	kinds := map[string]int{}
	for _, m := range all {
		kinds[m.Subject]++
	}
	if kinds["outbox.order.row"] == 0 || kinds["outbox.order.function"] == 0 || kinds["outbox.order.message"] == 0 {
		t.Errorf("not all kinds are there: %v", kinds)
	}
	r.ends(0)
}

func TestMalformedMessagesAreParked(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--messages"}})
	r.relay.MustStart(t)
	emit := func(content string) string {
		return "select pg_logical_emit_message(true, 'walrelay', " + content + ")"
	}
	r.exec(
		emit(`'{"id": "1", "aggregate_type": "a", "event_type": "b"}'`),
		emit(`'no JSON'`),
		emit(`'{"aggregate_type": "a", "event_type": "b"}'`),
		emit(`'{"id": "2", "aggregate_type": "a", "event_typ": "b"}'`),
		emit(`'\xff'::bytea`),
		emit(`'{"id": "3", "aggregate_type": "a", "event_type": "b", "payload_base64": "%"}'`),
		"select pg_logical_emit_message(true, 'other', 'none of ours')",
		"select pg_logical_emit_message(false, 'walrelay', '{\"id\": \"4\", \"aggregate_type\": \"a\", \"event_type\": \"loose\"}')",
		emit(`'{"id": "5", "aggregate_type": "a", "event_type": "b", "payload": {"n": 1.10}}'`),
	)
	ms := r.messages(8)
	for i, want := range []string{
		"", "content: the message is not a JSON object", "null_id: the id is NULL", `content: the message has the unknown key "event_typ"`,
		"content: the message is not UTF-8", `content: "payload_base64" is not base64`, "", "",
	} {
		if got := ms[i].Header.Get(event.HeaderReason); !strings.HasPrefix(got, want) || (want == "") != (got == "") {
			t.Errorf("message %d is parked for %q, want %q", i+1, got, want)
		}
	}
	if ms[6].Subject != "outbox.a.loose" || string(ms[7].Data) != `{"n": 1.10}` {
		t.Errorf("the last messages are %s and %s", ms[6].Subject, ms[7].Data)
	}
	dlq, err := r.js.Stream(t.Context(), stream+"_DLQ")
	must(t, err)
	for i, want := range []string{"no JSON", "", "", "\xff"} {
		m, err := dlq.GetMsg(t.Context(), uint64(i+1))
		must(t, err)
		if want != "" && string(m.Data) != want {
			t.Errorf("dead letter %d has body %q, want %q", i+1, m.Data, want)
		}
	}
	r.ends(0)
}

func TestEmitFunctionAndRights(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{Encoding: "LATIN1"})
	n := harness.RunNATS(t, harness.NATSOptions{})
	r := &rig{t: t, pg: pg, nats: n, js: n.JetStream(t), dsn: pg.DSN("postgres"), table: table}
	r.exec("create role service login", "create role stranger login")
	args := []string{"init", "--dsn", r.dsn, "--table", "none", "--messages", "--emit-function"}
	script := r.must(args...).Stdout
	if !strings.Contains(script, "-- DO $walrelay$") || !strings.Contains(script, "--         EXECUTE format('REVOKE EXECUTE") {
		t.Errorf("the rights are not offered as comments:\n%s", script)
	}
	args = append(args, "--emit-grant", "service")
	conn := pg.MustConn(t)
	for range 2 { // the script is what --apply runs, and may be repeated
		_, err := conn.Exec(t.Context(), r.must(args...).Stdout, pgx.QueryExecModeSimpleProtocol)
		must(t, err)
	}
	if out := r.must(append(args, "--apply")...).Stdout; out != "nothing to do\n" {
		t.Errorf("after the script --apply does\n%s", out)
	}
	r.exec("drop function walrelay_emit", "drop publication walrelay",
		"do $$ declare f regprocedure; begin for f in select oid from pg_proc where proname = 'pg_logical_emit_message' loop execute format('grant execute on function %s to public', f); end loop; end $$")
	out := r.must(append(args, "--apply")...).Stdout
	for _, want := range []string{`publication "walrelay" created, without tables`, `function "public"."walrelay_emit" created`, "REVOKE EXECUTE ON FUNCTION pg_logical_emit_message(boolean,text,text"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	if out := r.must(append(args, "--apply")...).Stdout; out != "nothing to do\n" {
		t.Errorf("the second time init did\n%s", out)
	}
	r.must("slot", "create", slot, "--dsn", r.dsn)
	r.relay = harness.RunRelay(t, "run", "--dsn", r.dsn, "--nats-url", n.URL(), "--table", "none", "--messages", "--create-stream", "--log-format", "text")

	as := func(user, sql string) (id string, err error) {
		c, err := pgxConnect(t.Context(), pg.DSNFor("postgres", user, ""))
		must(t, err)
		defer c.Close(t.Context())
		err = c.QueryRow(t.Context(), sql).Scan(&id)
		return id, err
	}
	id, err := as("service", `select walrelay_emit('order', chr(233), 'paid', '{"total": 19.90}', '{"traceparent": "00-1-2-01"}')::text`)
	must(t, err)
	fixed, err := as("service", `select walrelay_emit('order', '2', 'paid', null, id => '0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d')::text`)
	must(t, err)
	for _, sql := range []string{"select walrelay_emit('order', '1', 'paid', '{}')::text", "select pg_logical_emit_message(true, 'walrelay', '{}')::text"} {
		if _, err := as("stranger", sql); err == nil || !strings.Contains(err.Error(), "permission denied") {
			t.Errorf("%s as a stranger: %v", sql, err)
		}
	}
	for _, sql := range []string{"select walrelay_emit(null, '1', 'paid', '{}')::text", "select walrelay_emit('order', '1', 'paid', '{}', '[]')::text"} {
		if _, err := as("service", sql); err == nil {
			t.Errorf("%s is accepted", sql)
		}
	}
	ms := r.messages(2)
	if ms[0].Header.Get(event.HeaderID) != id || ms[0].Header.Get(event.HeaderAggregateID) != "é" || ms[0].Header.Get("traceparent") != "00-1-2-01" ||
		string(ms[0].Data) != `{"total": 19.90}` || ms[0].Subject != "outbox.order.paid" || ms[0].Header.Get("Nats-Msg-Id") != id {
		t.Errorf("got %s %v %s", ms[0].Subject, ms[0].Header, ms[0].Data)
	}
	if ms[1].Header.Get(event.HeaderID) != fixed || len(ms[1].Data) != 0 {
		t.Errorf("got %v %s", ms[1].Header, ms[1].Data)
	}
	r.ends(0)
}
