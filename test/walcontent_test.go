package test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// A slot with two_phase sends prepared transactions of any table. The relay refuses it, and
// the SQL of the remedy takes two_phase away without losing a row.
func TestSlotWithTwoPhaseIsRefusedWithTheWayOut(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{pg: harness.PostgresOptions{Settings: map[string]string{"max_prepared_transactions": "4"}}})
	r.exec(
		"select pg_drop_replication_slot('walrelay')",
		"select pg_create_logical_replication_slot('walrelay', 'pgoutput', false, true)",
		into+"values ('order', '1', 'one', '{}')",
		"create table other (i int)",
		"begin; insert into other values (1); prepare transaction 'other'",
		"begin; "+into+"values ('order', '1', 'two', '{}'); prepare transaction 'ours'",
		"commit prepared 'ours'",
		into+"values ('order', '1', 'three', '{}')",
	)
	refused(t, refusal{
		code: 3, err: `slot "walrelay" was created with two_phase`, hint: "SELECT pg_copy_logical_replication_slot('walrelay', 'walrelay_one_phase');",
	}, r.relay.Args...)
	refused(t, refusal{code: 3, err: `slot "walrelay" was created with two_phase`, hint: "SELECT pg_copy_logical_replication_slot("},
		"slot", "create", slot, "--if-not-exists", "--dsn", r.dsn, "--publication", publication)
	ran := harness.MustRun(t, nil, "check", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--slot", slot,
		"--publication", publication, "--stream", stream, "--create-stream")
	_, remedy, ok := strings.Cut(ran.Stdout, "→ SELECT pg_copy_logical_replication_slot(")
	if ran.Code != 3 || !ok {
		t.Fatalf("check: exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
	}
	remedy, _, _ = strings.Cut(remedy, "\n")
	for statement := range strings.SplitSeq("SELECT pg_copy_logical_replication_slot("+remedy, "; ") {
		r.exec(statement)
	}
	r.exec("commit prepared 'other'")
	r.relay.MustStart(t)
	if got, want := outline(r.messages(3)), "one two three"; got != want {
		t.Errorf("the stream has %s, want %s", got, want)
	}
	r.await(10*time.Second, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
	r.ends(0)
}

// A column is renamed while rows wait: each row comes with the columns as they were. Under
// either name all is drained, and with both names nothing is parked.
func TestColumnIsRenamedWhileRowsWait(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, alter, then string
		table             string // of the relay
		stream            string
		parked            []string // in the bodies of the dead letters
		warning           string
	}{
		{
			name: "both names", alter: "alter table outbox rename payload to body", then: "body",
			table: "public.outbox,payload=body|payload", stream: "one two three",
		},
		{
			name: "the old name", alter: "alter table outbox rename payload to body", then: "body",
			table: "public.outbox", stream: "one ! !", parked: []string{`"body": "{\"n\": 2}"`, `"body": "{\"n\": 3}"`},
			warning: "the rows that wait in the slot do",
		},
		{
			name: "the new name", alter: "alter table outbox rename payload to body", then: "body",
			table: "public.outbox,payload=body", stream: "! two three", parked: []string{`"payload": "{\"n\": 1}"`},
		},
		{
			name: "the id under its new name", alter: "alter table outbox rename id to event_id", then: "payload",
			table: "public.outbox,id=event_id", stream: "! two three", parked: []string{`"payload": "{\"n\": 1}"`},
		},
		{
			name: "a type that cannot be read", alter: "alter table outbox alter payload type point using null", then: "payload",
			table: "public.outbox", stream: "one ! !", parked: []string{`"payload": "(1,2)"`, `"payload": "(1,3)"`},
			warning: "the rows that wait in the slot do",
		},
		{
			name: "another type", alter: "alter table outbox alter payload type text", then: "payload",
			table: "public.outbox", stream: "one two three",
		},
		{
			name: "dropped", alter: "alter table outbox drop payload, add body jsonb", then: "body",
			table: "public.outbox,payload=body|payload", stream: "one two three",
		},
		{
			name: "added", alter: "alter table outbox add tenant text default 'acme'", then: "payload",
			table: "public.outbox,header=tenant", stream: "! two three", parked: []string{`"payload": "{\"n\": 1}"`},
		},
		{
			name: "another schema and name", alter: "create schema s; alter table outbox set schema s; alter table s.outbox rename to events", then: "payload",
			table: "s.events", stream: "one two three",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: []string{"--max-parked-in-row", "5"}})
			r.exec(into + `values ('order', '1', 'one', '{"n": 1}')`)
			r.exec(c.alter)
			name, _, _ := strings.Cut(c.table, ",")
			for i, event := range []string{"two", "three"} {
				value := fmt.Sprintf(`{"n": %d}`, i+2)
				if strings.Contains(c.alter, "point") {
					value = fmt.Sprintf("(1,%d)", i+2)
				}
				r.exec(fmt.Sprintf("insert into %s (aggregate_type, aggregate_id, event_type, %s) values ('order', '1', '%s', '%s')", name, c.then, event, value))
			}
			r.relay.Args = with(r.relay.Args, "--table", c.table)
			r.relay.MustStart(t)
			if got := outline(r.messages(3)); got != c.stream {
				t.Errorf("the stream has %s, want %s", got, c.stream)
			}
			letters := []*jetstream.RawStreamMsg{}
			if len(c.parked) > 0 {
				letters = r.letters()
			}
			if len(letters) != len(c.parked) {
				t.Fatalf("%d dead letters, want %d", len(letters), len(c.parked))
			}
			for i, want := range c.parked {
				if body := string(letters[i].Data); !strings.Contains(body, want) {
					t.Errorf("dead letter %d has the body %s, want %s in it", i+1, body, want)
				}
				if got := letters[i].Header.Get(event.HeaderReason); !strings.Contains(got, "does not fit the mapping") {
					t.Errorf("dead letter %d is parked for %q", i+1, got)
				}
			}
			if !strings.Contains(r.relay.Output(), c.warning) {
				t.Errorf("no warning %q\n%s", c.warning, r.relay.Output())
			}
			r.await(10*time.Second, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
			r.ends(0)
			if c.warning != "" {
				return // nothing waits that fits
			}
			r.relay.MustStart(t)
			r.relay.MustAwait(t, quick, "msg=streaming")
			r.ends(0)
		})
	}
}

// Generated columns are not sent before Postgres 18. init and check refuse them, and rows
// that lack one are parked.
func TestGeneratedColumnIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--max-parked-in-row", "5"}})
	r.exec(
		into+`values ('order', '1', 'one', '{}')`,
		"create table made (seq bigint generated always as identity primary key, id uuid not null default gen_random_uuid(), aggregate_type text not null,"+
			" aggregate_id text not null, raw text, event_type text not null generated always as (lower(raw)) stored, payload jsonb)",
	)
	refused(t, refusal{code: 3, err: `column "event_type" (event_type) of table public.made is generated (stored)`, hint: "publish_generated_columns"},
		"init", "--apply", "--dsn", r.dsn, "--table", "made", "--publication", publication)
	r.exec("alter publication walrelay add table made",
		"insert into made (aggregate_type, aggregate_id, raw, payload) values ('order', '1', 'TWO', '{\"n\": 2}')")
	args := with(r.relay.Args, "--table", "made")
	refused(t, refusal{code: 3, err: `column "event_type" is generated (stored)`, hint: "publish_generated_columns"}, args...)
	ran := harness.MustRun(t, nil, "check", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", "made", "--slot", slot,
		"--publication", publication, "--stream", stream, "--create-stream")
	if ran.Code != 3 || !strings.Contains(ran.Stdout, `column "event_type" is generated (stored)`) {
		t.Errorf("check: exit code %d\n%s", ran.Code, ran.Stdout)
	}
	// The column is an ordinary one from now on; the row in the WAL still lacks it.
	r.exec("alter table made alter event_type drop expression",
		"insert into made (aggregate_type, aggregate_id, event_type, payload) values ('order', '1', 'three', '{}')")
	r.relay.Args = args
	r.relay.MustStart(t)
	if got, want := outline(r.messages(2)), "! three"; got != want {
		t.Errorf("the stream has %s, want %s", got, want)
	}
	if body := string(r.letters()[0].Data); !strings.Contains(body, `"raw": "TWO"`) || !strings.Contains(body, `"payload": "{\"n\": 2}"`) {
		t.Errorf("the dead letter has %s", body)
	}
	r.ends(0)
}

// A column list that leaves out a mapped column is found before a row is.
func TestColumnListWithoutAMappedColumnIsRefused(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	if query[int](r, "select current_setting('server_version_num')::int") < 150000 {
		return // column lists came with 15
	}
	r.exec("alter publication walrelay set table outbox (id, seq, aggregate_type, aggregate_id, payload)")
	refused(t, refusal{code: 3, err: `column "event_type" is not in the column list`, hint: "column to the publication's list"}, r.relay.Args...)
}

// Bytes that are not UTF-8 are parked as the server has them, and do not stop the relay or
// any command that reads the slot or the table.
func TestBytesThatAreNotUTF8AreParked(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		encoding, client string
		bad              string // as SQL of client writes it, in a payload of text
		raw              string
		good, want       string // a payload that is not ASCII, and as it is published
	}{
		{"SQL_ASCII", "SQL_ASCII", `E'\xfc'`, "\xfc", `E'\xc3\xbc'`, "ü"},
		{"WIN1252", "WIN1252", `E'\x81'`, "\x81", `E'\xfc'`, "ü"},
		{"EUC_JIS_2004", "EUC_JIS_2004", `E'\xa2\xb1'`, "", `E'\xa4\xa2'`, "あ"},
	} {
		t.Run(c.encoding, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{
				args: []string{"--backoff-min", "10ms", "--backoff-max", "50ms"},
				prepare: func(r *rig) {
					r.exec("create database encoded encoding '" + c.encoding + "' lc_collate 'C' lc_ctype 'C' template template0")
					r.dsn = r.pg.DSN("encoded")
					conn, err := pgxConnect(t.Context(), r.dsn)
					must(t, err)
					defer conn.Close(t.Context())
					_, err = conn.Exec(t.Context(), `create table public.outbox (seq bigint generated always as identity primary key, id uuid not null unique default gen_random_uuid(),
						aggregate_type text not null, aggregate_id text not null, event_type text not null, payload text, note text)`)
					must(t, err)
				},
			})
			conn, err := pgxConnect(t.Context(), r.dsn)
			must(t, err)
			defer conn.Close(context.Background())
			write := func(typ, payload, note string) {
				t.Helper()
				results := conn.PgConn().Exec(t.Context(), fmt.Sprintf("set client_encoding = '%s'; "+
					"insert into outbox (aggregate_type, aggregate_id, event_type, payload, note) values ('order', '1', '%s', %s, %s)", c.client, typ, payload, note))
				_, err := results.ReadAll()
				must(t, err)
			}
			bad := c.bad
			if c.raw == "" {
				bad = c.good // an encoding without bytes that cannot be converted
			}
			write("one", "'{}'", "null")
			write("two", bad, "null")
			write("three", c.good, "null")
			write("four", "'{}'", bad) // in a column that is not published by name
			ran := r.must("slot", "peek", slot, "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--publication", publication, "--stream", stream)
			if !strings.Contains(ran.Stdout, "four") {
				t.Errorf("peek shows\n%s%s", ran.Stdout, ran.Stderr)
			}
			r.relay.MustStart(t)
			want := "one ! three four"
			if c.raw == "" {
				want = "one two three four"
			}
			ms := r.messages(4)
			if got := outline(ms); got != want {
				t.Errorf("the stream has %s, want %s", got, want)
			}
			if got := string(ms[2].Data); got != c.want {
				t.Errorf("the third message has %q, want %q", got, c.want)
			}
			if c.raw != "" {
				l := r.letters()
				if len(l) != 1 || string(l[0].Data) != c.raw || !strings.Contains(l[0].Header.Get(event.HeaderReason), `column "payload" holds bytes that cannot be converted to UTF-8`) {
					t.Errorf("the dead letters are %+v", l)
				}
			}
			r.ends(0)

			// Both ends are looked at, and the rows of the table.
			ran = harness.MustRun(t, nil, "check", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--slot", slot, "--publication", publication, "--stream", stream)
			if warned := strings.Contains(ran.Stdout, "SQL_ASCII, which checks nothing"); ran.Code != 0 || warned != (c.encoding == "SQL_ASCII") {
				t.Errorf("check: exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
			}
			write("five", bad, "null")
			ran = r.must("slot", "advance", slot, "--to-now", "--yes", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--publication", publication, "--stream", stream)
			if !strings.Contains(ran.Stdout, "five") {
				t.Errorf("advance shows\n%s%s", ran.Stdout, ran.Stderr)
			}
			write("six", bad, "null")
			write("seven", c.good, "null")
			r.must("slot", "drop", slot, "--yes", "--dsn", r.dsn)
			r.must("slot", "recover", slot, "--yes", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--publication", publication, "--stream", stream)
			ms = r.messages(7)
			if got := outline(ms[4:]); c.raw != "" && got != "! ! seven" {
				t.Errorf("after recover the stream has %s, want ! ! seven", got)
			}
			if got := string(ms[len(ms)-1].Data); got != c.want {
				t.Errorf("the last message has %q, want %q", got, c.want)
			}
		})
	}
}
