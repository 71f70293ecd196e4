package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// databases makes a database for each test on one server.
type databases struct {
	pg *harness.Postgres
	n  int
}

func (d *databases) connect(t *testing.T, user, database string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), d.pg.DSNFor(database, user, ""))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func (d *databases) fresh(t *testing.T) *pgx.Conn {
	t.Helper()
	d.n++
	name := fmt.Sprintf("db%d", d.n)
	must(t, d.connect(t, "postgres", "postgres"), "CREATE DATABASE "+name)
	return d.connect(t, "postgres", name)
}

func must(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func ask[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	var v T
	if err := conn.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

func mustApply(t *testing.T, conn *pgx.Conn, s Schema) []string {
	t.Helper()
	changes, err := Apply(t.Context(), conn, s)
	if err != nil {
		t.Fatalf("apply: %v", err)
	}
	return changes
}

func wantLines(t *testing.T, got []string, want ...string) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("got %d lines, want %d:\n%s", len(got), len(want), strings.Join(got, "\n"))
		return
	}
	for i := range want {
		if !strings.Contains(got[i], want[i]) {
			t.Errorf("line %d: got %q, want %q in it", i, got[i], want[i])
		}
	}
}

func wantFailure(t *testing.T, err error, class event.Class, want ...string) {
	t.Helper()
	if err == nil || event.ClassOf(err) != class || event.HintOf(err) == "" {
		t.Errorf("got %v (class %d, hint %q), want class %d and a hint", err, event.ClassOf(err), event.HintOf(err), class)
		return
	}
	for _, w := range want {
		if !strings.Contains(err.Error()+"\n"+event.HintOf(err), w) {
			t.Errorf("got %v, want %q in it", err, w)
		}
	}
}

var plain = Schema{Table: Table{Schema: "public", Name: "outbox"}, Publication: "walrelay"}

func TestPostgres(t *testing.T) {
	d := &databases{pg: harness.RunPostgres(t, harness.PostgresOptions{})}
	for name, test := range map[string]func(*testing.T, *databases){
		"ApplyTwice":                      testApplyTwice,
		"ScriptTwice":                     testScriptTwice,
		"HostileNames":                    testHostileNames,
		"LeastPrivilege":                  testLeastPrivilege,
		"ExistingRole":                    testExistingRole,
		"Mismatch":                        testMismatch,
		"TablesThatFit":                   testTablesThatFit,
		"NotATable":                       testNotATable,
		"SeveralTables":                   testSeveralTables,
		"ExistingPublications":            testExistingPublications,
		"FiltersAndLists":                 testFiltersAndLists,
		"Partitioned":                     testPartitioned,
		"Shards":                          testShards,
		"WithoutRights":                   testWithoutRights,
		"ReadOnly":                        testReadOnly,
		"AtOnce":                          testAtOnce,
		"Inspect":                         testInspect,
		"Emitting":                        testEmitting,
		"FailedApplyLeavesNothing":        testFailedApply,
		"PayloadAndHeadersAsServerSends":  testServerText,
		"ScriptAndApplyMakeTheSameThings": testScriptEqualsApply,
	} {
		t.Run(name, func(t *testing.T) { test(t, d) })
	}
}

func testApplyTwice(t *testing.T, d *databases) {
	conn := d.fresh(t)
	s := plain
	s.Role = "relay_twice"
	wantLines(t, mustApply(t, conn, s),
		`table "public"."outbox" created`, `publication "walrelay" created`, `role "relay_twice" created`,
		`GRANT SELECT ON TABLE "public"."outbox"`)
	must(t, conn, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'placed', '{}')`)
	wantLines(t, mustApply(t, conn, s))
	if n := ask[int](t, conn, "SELECT count(*) FROM outbox WHERE id IS NOT NULL AND seq = 1 AND created_at IS NOT NULL"); n != 1 {
		t.Errorf("got %d rows, want 1", n)
	}
	same(t, "publication", ask[string](t, conn, "SELECT concat_ws(' ', pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot, puballtables) FROM pg_publication"), "t f f f f f")
}

func testScriptTwice(t *testing.T, d *databases) {
	conn := d.fresh(t)
	a, b := plain, Schema{Table: Table{Schema: "app", Name: "events", Preset: PresetDebezium}, Publication: "walrelay", Role: "relay_script"}
	a.Role = "relay_script"
	for range 2 {
		must(t, conn, a.SQL()+b.SQL())
	}
	same(t, "tables", ask[string](t, conn, "SELECT string_agg(schemaname || '.' || tablename, ' ' ORDER BY schemaname) FROM pg_publication_tables"), "app.events public.outbox")
	wantLines(t, mustApply(t, conn, a))
	wantLines(t, mustApply(t, conn, b))
}

// testScriptEqualsApply compares what the two ways leave in the catalogue.
func testScriptEqualsApply(t *testing.T, d *databases) {
	const picture = `
		SELECT string_agg(concat_ws(' ', a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
			pg_get_expr(x.adbin, x.adrelid)), E'\n' ORDER BY a.attnum)
			|| (SELECT string_agg(pg_get_constraintdef(oid), ' ' ORDER BY conname) FROM pg_constraint WHERE conrelid = 'q."O x"'::regclass)
			|| (SELECT string_agg(concat_ws(' ', pubname, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot), ' ') FROM pg_publication)
			|| (SELECT relacl::text FROM pg_class WHERE oid = 'q."O x"'::regclass)
		FROM pg_attribute a LEFT JOIN pg_attrdef x ON x.adrelid = a.attrelid AND x.adnum = a.attnum
		WHERE a.attrelid = 'q."O x"'::regclass AND a.attnum > 0`
	s := Schema{
		Table:       Table{Schema: "q", Name: "O x", Columns: map[string]string{"content_type": "ctype", "headers": "", "event_type": "Type"}},
		Publication: "p", Role: "relay_same",
	}
	byScript, byApply := d.fresh(t), d.fresh(t)
	must(t, byScript, s.SQL())
	mustApply(t, byApply, s)
	same(t, "catalogue", ask[string](t, byApply, picture), ask[string](t, byScript, picture))
	wantLines(t, mustApply(t, byScript, s))
	if cols, err := Inspect(t.Context(), byApply, s.Table); err != nil || len(cols) != 9 || cols[4].Name != "Type" || cols[8].Name != "ctype" {
		t.Errorf("got %+v, %v", cols, err)
	}
}

func testHostileNames(t *testing.T, d *databases) {
	for i, name := range []string{`My "Table"`, `a'b`, `x\y`, `$walrelay$`, "new\nline; DROP TABLE x --", "%I %s", `Ünï.dot`, "select"} {
		s := Schema{
			Table:       Table{Schema: "s" + name, Name: name, Columns: map[string]string{"payload": "p" + name}},
			Publication: "P" + name, Role: "r" + name,
		}
		conn := d.fresh(t)
		if i%2 == 0 {
			must(t, conn, s.SQL())
			must(t, conn, s.SQL())
		} else {
			mustApply(t, conn, s)
		}
		wantLines(t, mustApply(t, conn, s))
		same(t, name, ask[string](t, conn, "SELECT tablename FROM pg_publication_tables WHERE pubname = $1 AND schemaname = $2", s.Publication, s.Table.Schema), name)
		if !ask[bool](t, conn, "SELECT rolreplication AND rolcanlogin FROM pg_roles WHERE rolname = $1", s.Role) {
			t.Errorf("%q: role may not replicate", name)
		}
	}
}

func testLeastPrivilege(t *testing.T, d *databases) {
	conn := d.fresh(t)
	name := ask[string](t, conn, "SELECT current_database()")
	must(t, conn, "REVOKE CONNECT ON DATABASE "+name+" FROM PUBLIC")
	s := Schema{Table: Table{Schema: "app", Name: "outbox"}, Publication: "walrelay", Role: "relay_least"}
	wantLines(t, mustApply(t, conn, s), `schema "app" created`, "table", "publication", "role",
		"GRANT CONNECT ON DATABASE", `GRANT USAGE ON SCHEMA "app"`, "GRANT SELECT ON TABLE")
	relay := d.connect(t, "relay_least", name)
	same(t, "rows", fmt.Sprint(ask[int](t, relay, "SELECT count(*) FROM app.outbox")), "0")
	for _, sql := range []string{"INSERT INTO app.outbox (aggregate_type) VALUES ('x')", "DELETE FROM app.outbox", "CREATE TABLE app.x ()"} {
		if _, err := relay.Exec(t.Context(), sql); err == nil {
			t.Errorf("%s: the relay may", sql)
		}
	}
	must(t, relay, "SELECT pg_create_logical_replication_slot('least', 'pgoutput')")
	must(t, relay, "SELECT pg_drop_replication_slot('least')")
	wantLines(t, mustApply(t, conn, s))
}

func testExistingRole(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, "CREATE ROLE relay_weak")
	s := plain
	s.Role = "relay_weak"
	wantLines(t, mustApply(t, conn, s), "table", "publication", "GRANT SELECT", `note: role "relay_weak" lacks LOGIN or REPLICATION`)
	if ask[bool](t, conn, "SELECT rolreplication FROM pg_roles WHERE rolname = 'relay_weak'") {
		t.Error("an existing role was altered")
	}
}

func testMismatch(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, `CREATE DOMAIN note AS text;
		CREATE TABLE outbox (id uuid, aggregate_type integer NOT NULL, aggregate_id text, payload note, headers point, created_at bigint, other point)`)
	_, err := Apply(t.Context(), conn, plain)
	var m *Mismatch
	if !errors.As(err, &m) {
		t.Fatalf("got %v, want a Mismatch", err)
	}
	wantFailure(t, err, event.Precondition, "table public.outbox", "never altered")
	var got []string
	for _, c := range m.Columns {
		got = append(got, c.String())
	}
	wantLines(t, got,
		`column "id" (id) is uuid, nullable: want uuid, text or bigint, NOT NULL`,
		`column "aggregate_type" (aggregate_type) is integer: want text, NOT NULL`,
		`column "aggregate_id" (aggregate_id) is text, nullable`,
		`column "event_type" (event_type) is missing: want text, NOT NULL`,
		`column "payload" (payload) is note: want jsonb, json, text or bytea`,
		`column "headers" (headers) is point: want jsonb`,
		`column "created_at" (created_at) is bigint: want timestamptz`)
	if n := ask[int](t, conn, "SELECT count(*) FROM pg_publication"); n != 0 {
		t.Errorf("%d publications were made beside the mismatch", n)
	}

	s := plain
	s.Table.Columns = map[string]string{"headers": "", "created_at": "", "schema_version": "version"}
	_, err = Apply(t.Context(), conn, s)
	if !errors.As(err, &m) || !strings.Contains(err.Error(), `column "version" (schema_version) is missing`) || strings.Contains(err.Error(), "headers") {
		t.Errorf("got %v", err)
	}
}

func testTablesThatFit(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, `CREATE TYPE kind AS ENUM ('order'); CREATE DOMAIN word AS varchar(20) NOT NULL; CREATE DOMAIN word2 AS word;
		CREATE TABLE a (id bigint PRIMARY KEY, aggregate_type kind NOT NULL, aggregate_id bigint NOT NULL, event_type word2, payload bytea NOT NULL, extra point NOT NULL);
		CREATE TABLE b (id uuid NOT NULL, aggregatetype varchar(255) NOT NULL, aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb,
			created_at bigint)`)
	wantLines(t, mustApply(t, conn, Schema{Table: Table{Name: "a"}, Publication: "p"}),
		"publication", "note: table public.a has no column seq, headers, schema_version, created_at")
	wantLines(t, mustApply(t, conn, Schema{Table: Table{Name: "b", Preset: PresetDebezium}, Publication: "p"}),
		`table "public"."b" added to publication "p"`, "note: table public.b has no column seq", `note: column "id" of table public.b has no unique index`)
}

func testNotATable(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, "CREATE VIEW outbox AS SELECT 1 AS id")
	_, err := Apply(t.Context(), conn, plain)
	wantFailure(t, err, event.Precondition, "not a table")
	s := plain
	s.Table.Name = "u"
	must(t, conn, "CREATE UNLOGGED"+strings.TrimPrefix(s.createTable(false), "CREATE"))
	_, err = Apply(t.Context(), conn, s)
	wantFailure(t, err, event.Precondition, "unlogged", `ALTER TABLE "public"."u" SET LOGGED`)
	for _, s := range []Schema{{}, {Table: Table{Name: "x"}}, {Table: Table{Name: "x", Preset: "y"}, Publication: "p", Role: strings.Repeat("r", 64)}} {
		if _, err := Apply(t.Context(), conn, s); event.ClassOf(err) != event.Usage {
			t.Errorf("%+v: got %v, want a usage failure", s, err)
		}
	}
}

func testSeveralTables(t *testing.T, d *databases) {
	conn := d.fresh(t)
	for i, name := range []string{"a", "b", "c"} {
		changes := mustApply(t, conn, Schema{Table: Table{Name: name}, Publication: "p", Role: "relay_several"})
		if i > 0 {
			wantLines(t, changes, "created", `table "public"."`+name+`" added to publication "p"`, "GRANT SELECT")
		}
	}
	mustApply(t, conn, Schema{Table: Table{Name: "a"}, Publication: "q"})
	same(t, "published", ask[string](t, conn, "SELECT string_agg(pubname || tablename, ' ' ORDER BY pubname, tablename) FROM pg_publication_tables"), "pa pb pc qa")
}

func testExistingPublications(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, plain.createTable(false)+`;
		CREATE PUBLICATION everything FOR ALL TABLES;
		CREATE PUBLICATION more WITH (publish = 'insert, update');
		CREATE PUBLICATION none WITH (publish = 'update, delete')`)
	s := plain
	s.Publication = "everything"
	for range 2 {
		wantLines(t, mustApply(t, conn, s), "note: publication \"everything\" is FOR ALL TABLES", "note: publication \"everything\" also publishes updates, deletes, truncates")
	}
	must(t, conn, s.SQL())
	s.Publication = "more"
	wantLines(t, mustApply(t, conn, s), "added to publication", "note: publication \"more\" also publishes updates,")
	if since15(t, conn) {
		must(t, conn, "CREATE PUBLICATION by_schema FOR TABLES IN SCHEMA public WITH (publish = 'insert')")
		s.Publication = "by_schema"
		wantLines(t, mustApply(t, conn, s))
	}
	s.Publication = "none"
	_, err := Apply(t.Context(), conn, s)
	wantFailure(t, err, event.Precondition, "does not publish inserts", `ALTER PUBLICATION "none" SET (publish = 'insert')`)
}

func since15(t *testing.T, conn *pgx.Conn) bool {
	return ask[bool](t, conn, "SELECT current_setting('server_version_num')::int >= 150000")
}

func testFiltersAndLists(t *testing.T, d *databases) {
	conn := d.fresh(t)
	if !since15(t, conn) {
		return // there are none
	}
	must(t, conn, plain.createTable(false)+`;
		CREATE PUBLICATION filtered FOR TABLE outbox WHERE (seq > 5) WITH (publish = 'insert');
		CREATE PUBLICATION enough FOR TABLE outbox (id, aggregate_type, aggregate_id, event_type, payload) WITH (publish = 'insert');
		CREATE PUBLICATION less FOR TABLE outbox (id, aggregate_type, aggregate_id) WITH (publish = 'insert')`)
	s := plain
	s.Publication = "filtered"
	wantLines(t, mustApply(t, conn, s), "note: publication \"filtered\" has a row filter")
	s.Publication = "enough"
	wantLines(t, mustApply(t, conn, s))
	s.Publication = "less"
	_, err := Apply(t.Context(), conn, s)
	wantFailure(t, err, event.Precondition, "event_type, payload")
}

func testPartitioned(t *testing.T, d *databases) {
	conn := d.fresh(t)
	const columns = ` (seq bigint GENERATED ALWAYS AS IDENTITY, id uuid NOT NULL DEFAULT gen_random_uuid(), aggregate_type text NOT NULL, aggregate_id text NOT NULL,
		event_type text NOT NULL, payload jsonb, headers jsonb, schema_version int, created_at timestamptz NOT NULL DEFAULT now()) PARTITION BY RANGE (created_at);`
	for _, name := range []string{"a", "b", "c"} {
		must(t, conn, "CREATE TABLE "+name+columns+"CREATE TABLE "+name+"1 PARTITION OF "+name+" DEFAULT")
	}
	root := func(pub string) bool {
		return ask[bool](t, conn, "SELECT pubviaroot FROM pg_publication WHERE pubname = $1", pub)
	}
	wantLines(t, mustApply(t, conn, Schema{Table: Table{Name: "a"}, Publication: "new"}), "publication")
	must(t, conn, Schema{Table: Table{Name: "a"}, Publication: "script"}.SQL())
	if !root("new") || !root("script") {
		t.Error("rows of partitions would have their names")
	}
	mustApply(t, conn, Schema{Table: Table{Name: "plain"}, Publication: "mixed"})
	s := Schema{Table: Table{Name: "a"}, Publication: "mixed"}
	wantLines(t, mustApply(t, conn, s), "publishes via the partition root", "added to publication")
	wantLines(t, mustApply(t, conn, s))
	must(t, conn, "CREATE PUBLICATION others FOR TABLE b WITH (publish = 'insert')")
	s.Publication = "others"
	_, err := Apply(t.Context(), conn, s)
	wantFailure(t, err, event.Precondition, "partitioned", `ALTER PUBLICATION "others" SET (publish_via_partition_root = true)`)
	must(t, conn, "CREATE PUBLICATION own FOR TABLE c WITH (publish = 'insert')")
	wantLines(t, mustApply(t, conn, Schema{Table: Table{Name: "c"}, Publication: "own"}), "publishes via the partition root")
	wantLines(t, mustApply(t, conn, Schema{Table: Table{Name: "c1"}, Publication: "leaf"}), "publication",
		"note: table public.c1 is a partition", "no unique index")
}

func testEmitting(t *testing.T, d *databases) {
	conn := d.fresh(t)
	role := `emit "x"; --` + fmt.Sprint(conn.PgConn().PID())
	must(t, conn, "CREATE ROLE "+ident(role))
	must(t, conn, `CREATE SCHEMA "My $walrelay$ Schema"`)
	e := Emitting{Schema: "My $walrelay$ Schema", Prefix: `it's $walrelay$ \ %s`, Function: true, Emitters: []string{role}, Publication: `Pub "x'`}
	changes, err := e.Apply(t.Context(), conn)
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, changes[:2], "publication \"Pub \"\"x'\" created", `function "My $walrelay$ Schema"."walrelay_emit" created`)
	for range 2 {
		must(t, conn, e.SQL())
		if changes, err := e.Apply(t.Context(), conn); err != nil || len(changes) > 0 {
			t.Errorf("again: %q, %v", changes, err)
		}
	}
	id := ask[string](t, conn, `SELECT "My $walrelay$ Schema".walrelay_emit('order', '1', 'made', '{}')::text`)
	if !uuidText([]byte(id)) {
		t.Errorf("id %q", id)
	}
	if !ask[bool](t, conn, "SELECT bool_and(has_function_privilege($1::name, oid, 'EXECUTE') AND NOT has_function_privilege('public', oid, 'EXECUTE')) FROM pg_proc WHERE proname = 'pg_logical_emit_message'", role) {
		t.Error("others may emit, or the role may not")
	}
	e.Emitters = []string{"nobody at all"}
	if _, err := e.Apply(t.Context(), conn); err == nil {
		t.Error("a role that does not exist is accepted")
	}
	if err := (Emitting{Schema: "x\x00", Prefix: "a\n"}).Validate(); event.ClassOf(err) != event.Usage {
		t.Errorf("bad names: %v", err)
	}
}

func testWithoutRights(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, "REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE nobody LOGIN")
	weak := d.connect(t, "nobody", ask[string](t, conn, "SELECT current_database()"))
	_, err := Apply(t.Context(), weak, plain)
	wantFailure(t, err, event.Precondition, "apply schema of table public.outbox", "permission denied")
	_, err = Inspect(t.Context(), weak, plain.Table)
	wantFailure(t, err, event.Precondition, "does not exist")
}

func testReadOnly(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, "SET default_transaction_read_only = on")
	_, err := Apply(t.Context(), conn, plain)
	wantFailure(t, err, event.Precondition, "primary")
}

func testAtOnce(t *testing.T, d *databases) {
	conn := d.fresh(t)
	name := ask[string](t, conn, "SELECT current_database()")
	s := plain
	s.Role = "relay_at_once"
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		c := d.connect(t, "postgres", name)
		wg.Go(func() { _, errs[i] = Apply(t.Context(), c, s) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}

func testInspect(t *testing.T, d *databases) {
	conn := d.fresh(t)
	_, err := Inspect(t.Context(), conn, plain.Table)
	wantFailure(t, err, event.Precondition, "table public.outbox does not exist")
	mustApply(t, conn, plain)
	must(t, conn, "ALTER TABLE outbox ADD gone int, ADD extra varchar(7); ALTER TABLE outbox DROP gone")
	cols, err := Inspect(t.Context(), conn, plain.Table)
	if err != nil || len(cols) != 10 {
		t.Fatalf("got %+v, %v", cols, err)
	}
	same(t, "first", fmt.Sprintf("%+v", cols[0]), "{Name:seq Type:bigint OID:20 NotNull:true Generated: text:20}")
	same(t, "last", fmt.Sprintf("%+v", cols[9]), "{Name:extra Type:character varying(7) OID:1043 NotNull:false Generated: text:1043}")
	if err := Compare(plain.Table, cols); err != nil {
		t.Error(err)
	}
	if err := Compare(plain.Table, nil); event.ClassOf(err) != event.Precondition {
		t.Errorf("no columns: got %v", err)
	}
}

// testFailedApply breaks the last step: nothing of the earlier ones remains.
func testFailedApply(t *testing.T, d *databases) {
	conn := d.fresh(t)
	s := plain
	s.Role = "pg_reserved"
	_, err := Apply(t.Context(), conn, s)
	if event.ClassOf(err) != event.Precondition || event.HintOf(err) == "" {
		t.Errorf("got %v", err)
	}
	if n := ask[int](t, conn, "SELECT (SELECT count(*) FROM pg_publication) + (SELECT count(*) FROM pg_tables WHERE schemaname = 'public')"); n != 0 {
		t.Errorf("%d things remain", n)
	}
}

// testServerText maps what a real server writes as text, in both forms of
// bytea, with times of every kind.
func testServerText(t *testing.T, d *databases) {
	conn := d.fresh(t)
	must(t, conn, `SET timezone = 'Asia/Kathmandu'; SET bytea_output = escape;
		CREATE TABLE o (id bigint, payload bytea, headers json, created_at timestamptz);
		INSERT INTO o VALUES (1, '\x00ff5c27c3a40a', '{"a": "\u00e4", "n": 1.10}', '2024-05-06 07:08:09.120456+00'),
			(2, '', NULL, '1883-01-01 00:00:00+00'), (3, NULL, '{}', 'infinity'), (4, '\x41', 'null', '0001-06-01 BC')`)
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
	rel := relationWith("o", "id:int8", "payload:bytea", "headers:json", "created_at:timestamptz")
	want := []string{
		"\x00\xff\x5c\x27\xc3\xa4\n|2024-05-06T07:08:09.120456Z|ä|1.10|",
		"|1883-01-01T00:00:00Z|",
		"|2024-05-06T06:08:09.123456Z|",
		"A|2024-05-06T06:08:09.123456Z|",
	}
	for _, output := range []string{"escape", "hex"} {
		must(t, conn, "SET bytea_output = "+output)
		for i, w := range want {
			// The simple protocol answers in text, as the replication stream does.
			rows, err := conn.PgConn().Exec(t.Context(), fmt.Sprintf("SELECT * FROM o WHERE id = %d", i+1)).ReadAll()
			if err != nil {
				t.Fatal(err)
			}
			rec := &event.Record{Kind: event.Row, Relation: rel, Values: rows[0].Rows[0], CommitTime: commitTime}
			ev := mapOne(t, m, rec)
			got := string(ev.Payload) + "|"
			for _, h := range ev.Headers[1 : len(ev.Headers)-1] {
				got += string(h.Value) + "|"
			}
			same(t, output, got, w)
		}
	}
}
