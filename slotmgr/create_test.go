package slotmgr

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestCreateRefuses(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "1"}})
	pg.MustExec(t, outboxTable, "create publication present for table outbox", "create role plain login")
	conn := connect(t, pg.DSN("postgres"))
	plain := connect(t, pg.DSNFor("postgres", "plain", ""))
	mustCreate(t, conn, CreateOptions{Name: "taken"})

	for name, c := range map[string]struct {
		conn       *pgx.Conn
		o          CreateOptions
		class      event.Class
		text, hint string
	}{
		"no name":             {conn, CreateOptions{}, event.Usage, "no name", "a-z"},
		"bad name":            {conn, CreateOptions{Name: "My-Slot"}, event.Usage, `"My-Slot"`, "a-z"},
		"long name":           {conn, CreateOptions{Name: strings.Repeat("x", 64)}, event.Usage, "xxx", "63"},
		"taken name":          {conn, CreateOptions{Name: "taken"}, event.Precondition, "exists already", "--if-not-exists"},
		"missing publication": {conn, CreateOptions{Name: "s", Publications: []string{"present", "Ab sent"}}, event.Precondition, `"Ab sent"`, `CREATE PUBLICATION "Ab sent"`},
		"no slot free":        {conn, CreateOptions{Name: "s"}, event.Precondition, "53400", "max_replication_slots"},
		"plain role":          {plain, CreateOptions{Name: "s"}, event.Precondition, "42501", `ALTER ROLE "plain" REPLICATION`},
	} {
		t.Run(name, func(t *testing.T) {
			_, created, err := Create(within(t, 10*time.Second), c.conn, c.o)
			wantFailure(t, err, c.class, c.text, c.hint)
			if created {
				t.Error("it was created all the same")
			}
		})
	}
	if major(conn) < 17 {
		_, _, err := Create(t.Context(), conn, CreateOptions{Name: "s", Failover: true})
		wantFailure(t, err, event.Usage, "Postgres 17", "--failover")
	}
}

func TestCreateNeedsLogicalWAL(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{WALLevel: "replica"})
	_, _, err := Create(within(t, 10*time.Second), connect(t, pg.DSN("postgres")), CreateOptions{Name: "s"})
	wantFailure(t, err, event.Precondition, "wal_level is replica", "ALTER SYSTEM SET wal_level = logical")
}

func TestCreateMakesOtherKinds(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	conn, other := connect(t, pg.DSN("postgres")), connect(t, pg.DSN("postgres"))
	if slot := mustCreate(t, conn, CreateOptions{Name: "brief", Temporary: true}); !slot.Temporary {
		t.Errorf("not temporary: %+v", slot)
	}
	if err := conn.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	until(t, "temporary slot is gone", func() bool {
		_, ok, err := find(t.Context(), other, "brief")
		return err == nil && !ok
	})
	if major(other) >= 17 {
		if slot := mustCreate(t, other, CreateOptions{Name: "safe", Failover: true}); slot.Failover == nil || !*slot.Failover {
			t.Errorf("not a failover slot: %+v", slot)
		}
	}
}

func TestBlockedCreateNamesTheTransactionsAndLeavesNoOrphan(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_prepared_transactions": "2"}})
	pg.MustExec(t, outboxTable, "create database other", "create role relay login replication")
	conn := connect(t, pg.DSN("postgres"))
	if _, err := conn.Exec(t.Context(), "set statement_timeout = '20ms'"); err != nil {
		t.Fatal(err)
	}

	// A prepared transaction, and an open one in another database.
	pg.MustExec(t, "begin; insert into outbox (payload) values ('1'); prepare transaction 'left over'")
	writer := connect(t, pg.DSN("other"))
	tx, err := writer.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "create table secrets as select 'hunter2' as password, 4711 as pin", pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}

	check := func(got []Blocker) {
		t.Helper()
		if len(got) != 2 || got[0].State != "prepared" || got[0].Query != "left over" || got[0].Database != "postgres" {
			t.Fatalf("got blockers %v, want the prepared one first", got)
		}
		if b := got[1]; uint32(b.PID) != writer.PgConn().PID() || b.Database != "other" || b.Query != "create table secrets as select ? as password, ? as pin" {
			t.Errorf("got blocker %+v", b)
		}
	}

	ctx, cancel := context.WithCancel(within(t, 30*time.Second))
	told := 0
	_, created, err := Create(ctx, conn, CreateOptions{Name: "orders", Waiting: func(got []Blocker) {
		told++
		check(got)
		cancel()
	}})
	if !errors.Is(err, context.Canceled) || created || told != 1 {
		t.Errorf("canceled: got %v, created %v, told %d times", err, created, told)
	}
	noOrphan := func() {
		t.Helper()
		if all, err := List(t.Context(), conn, true); err != nil || len(all) != 0 {
			t.Errorf("slots left: %+v, %v", all, err)
		}
	}
	noOrphan() // over the same connection: it is still good

	_, created, err = Create(within(t, 30*time.Second), conn, CreateOptions{Name: "orders", Timeout: time.Second})
	wantFailure(t, err, event.Precondition, "2 open transactions: a prepared transaction", "--timeout")
	if created || strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "4711") {
		t.Errorf("timed out: got %v, created %v", err, created)
	}
	noOrphan()

	// A role that may not see the sessions of others is told at least which it is.
	_, _, err = Create(within(t, 30*time.Second), connect(t, pg.DSNFor("postgres", "relay", "")), CreateOptions{Name: "orders", Timeout: time.Second})
	wantFailure(t, err, event.Precondition, "open transactions: ", "--timeout")

	// And it goes on by itself when they end.
	pg.MustExec(t, "rollback prepared 'left over'")
	slot, created, err := Create(within(t, 30*time.Second), conn, CreateOptions{Name: "orders", Waiting: func(got []Blocker) {
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
	}})
	if err != nil || !created || slot.Name != "orders" {
		t.Errorf("got %+v, created %v, %v", slot, created, err)
	}
}

func TestCancelThatComesTooLateDropsTheSlot(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	conn := connect(t, pg.DSN("postgres"))
	done := make(chan outcome, 1)
	done <- create(t.Context(), conn, CreateOptions{Name: "orders"})
	if err := undo(conn, "orders", done); err != nil {
		t.Fatal(err)
	}
	if all, err := List(t.Context(), conn, true); err != nil || len(all) != 0 {
		t.Errorf("slots left: %+v, %v", all, err)
	}
}

func TestQueryHeadHidesLiterals(t *testing.T) {
	for query, want := range map[string]string{
		"":       "",
		"vacuum": "vacuum",
		"update t1 set a = 'it''s', b = 12.5e3 where x2 = $1 and y = -7": "update t1 set a = ?, b = ? where x2 = $1 and y = -?",
		`select E'a\'b secret', "odd ""name'", 'x\'`:                     `select E?, "odd ""name'", ?`,
		"select $$secret$$, $q$ secret $$ $q$, 0xDEAD":                   "select ?, ?, ?",
		"select 1 -- secret\n, /* se /* cret */ */ 2":                    "select ? , ?",
		"insert into t values ('cut off in the midd":                     "insert into t values (?",
		"select $q$cut off":     "select ?",
		"select /* cut off":     "select",
		"  select\n\t1 ":        "select ?",
		strings.Repeat("ä", 70): strings.Repeat("ä", 59) + "…",
		"select '" + strings.Repeat("s", 90) + "' from a": "select ? from a",
	} {
		if got := queryHead(query); got != want {
			t.Errorf("%q: got %q, want %q", query, got, want)
		}
	}
}

func FuzzQueryHead(f *testing.F) {
	f.Add("select E'a\\' $q$ \"x /* -- ")
	f.Fuzz(func(t *testing.T, q string) {
		if n := len([]rune(queryHead(q))); n > headLength {
			t.Errorf("%d characters of %q", n, q)
		}
	})
}

// A slot is made as a copy of a temporary one, as long as there is room for both.
func TestCreateDoesWithTheLastFreeSlot(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "2"}})
	pg.MustExec(t, outboxTable)
	conn := connect(t, pg.DSN("postgres"))
	for _, name := range []string{"first", "second"} {
		if slot := mustCreate(t, conn, CreateOptions{Name: name}); slot.Temporary || slot.ConfirmedFlush == 0 {
			t.Errorf("got %+v", slot)
		}
	}
	if all, err := List(t.Context(), conn, true); err != nil || len(all) != 2 {
		t.Errorf("got slots %+v, %v", all, err)
	}
}
