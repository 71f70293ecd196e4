package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/slotmgr"
	"github.com/walrelay/walrelay/test/harness"
)

// The commands on a real server, in the order that an operator takes.
func TestCommandsOnAServer(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Password: "p@:/#%word"})
	u, err := url.Parse(pg.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	// The password goes into the URL as it is.
	env := []string{"WALRELAY_DSN=postgres://postgres:p@:/#%word@" + u.Host + "/postgres"}
	run := func(args ...string) outcome { return walrelay(t, env, args...) }

	t.Run("wrong password", func(t *testing.T) {
		o := walrelay(t, []string{"WALRELAY_DSN=postgres://postgres:hunter2@" + u.Host + "/postgres"}, "slot", "list")
		o.want(t, exitPrecondition, "hint: ", "password")
		if strings.Contains(o.err, "hunter2") {
			t.Errorf("the password is shown: %s", o.err)
		}
	})
	t.Run("no publication", func(t *testing.T) {
		run("slot", "create").want(t, exitPrecondition, `"walrelay"`, "hint: ")
	})
	t.Run("init", func(t *testing.T) {
		printed := run("init", "--role", "relay")
		printed.want(t, exitOK, "CREATE TABLE")
		run("init", "--apply", "--role", "relay").want(t, exitOK, "table", "publication", "role", "created")
		again := run("init", "--apply", "--role", "relay")
		again.want(t, exitOK)
		if again.out != "nothing to do\n" {
			t.Errorf("the second time: %s", again.out)
		}
		pg.MustExec(t, printed.out) // what is printed can be run on top
		pg.MustExec(t, "CREATE TABLE odd (id int, payload point)")
		run("init", "--apply", "--table", "public.odd").want(t, exitPrecondition, "payload")
	})
	t.Run("slot create", func(t *testing.T) {
		o := run("slot", "create")
		o.want(t, exitOK, "slot walrelay created, confirmed at ")
		run("slot", "create").want(t, exitPrecondition, "exists already", "--if-not-exists")
		run("slot", "create", "--if-not-exists").want(t, exitOK, "exists already")
		run("slot", "create", "second").want(t, exitOK, "slot second created")
	})
	t.Run("slot create waits", func(t *testing.T) {
		conn := pg.MustConn(t)
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(t.Context(), "CREATE TABLE open_transaction ()"); err != nil {
			t.Fatal(err)
		}
		run("slot", "create", "third", "--timeout", "1s").want(t, exitPrecondition, "waiting for pid ", "hint: ")

		// Interrupted, it leaves no slot behind.
		ctx, cancel := context.WithCancelCause(t.Context())
		told := &signalWriter{text: "waiting for pid ", found: make(chan struct{})}
		done := make(chan int, 1)
		go func() {
			done <- execute(ctx, &process{args: []string{"slot", "create", "third"}, environ: env, in: strings.NewReader(""), out: told, err: told})
		}()
		<-told.found
		cancel(errSignal)
		if code := <-done; code != exitForced {
			t.Errorf("interrupted: exit code %d", code)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		run("slot", "drop", "third", "--yes").want(t, exitPrecondition, "third")
	})
	t.Run("slot list", func(t *testing.T) {
		pg.MustExec(t, "SELECT pg_create_physical_replication_slot('physical')")
		o := run("slot", "list")
		o.want(t, exitOK, "NAME", "WAL STATUS", "walrelay", "second", "reserved")
		if strings.Contains(o.out, "physical") {
			t.Errorf("a slot of another kind is listed:\n%s", o.out)
		}
		run("slot", "list", "--all").want(t, exitOK, "PLUGIN", "physical", "pgoutput")
		var slots []slotmgr.Slot
		if err := json.Unmarshal([]byte(run("slot", "list", "-o", "json").out), &slots); err != nil {
			t.Fatal(err)
		}
		if len(slots) != 2 || slots[0].Name != "second" || slots[0].ConfirmedFlush == 0 {
			t.Errorf("got %+v", slots)
		}
	})
	t.Run("slot drop", func(t *testing.T) {
		run("slot", "drop", "second").want(t, exitUsage, "--yes")
		run("slot", "drop", "second", "--yes").want(t, exitOK, "slot second dropped")
		run("slot", "drop", "second", "--yes").want(t, exitPrecondition, "second", "hint: ")

		hold(t, pg, "walrelay")
		run("slot", "drop", "--yes").want(t, exitPrecondition, "walrelay", "hint: ")
	})
	t.Run("no slots", func(t *testing.T) {
		if o := walrelay(t, []string{env[0] + "?dbname=template1"}, "slot", "list", "-o", "json"); o.out != "[]\n" {
			t.Errorf("got %s%s", o.out, o.err)
		}
	})
}

// hold keeps the slot in use until the test ends.
func hold(t *testing.T, pg *harness.Postgres, slot string) {
	t.Helper()
	cfg, err := pgx.ParseConfig(pg.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	cfg.RuntimeParams["replication"] = "database"
	cfg.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	front := conn.PgConn().Frontend()
	front.SendQuery(&pgproto3.Query{String: "START_REPLICATION SLOT " + slot + " LOGICAL 0/0 (proto_version '1', publication_names 'walrelay')"})
	if err := front.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := front.Receive(); err != nil { // CopyBothResponse: the slot is ours
		t.Fatal(err)
	}
}

// signalWriter closes found when text was written.
type signalWriter struct {
	text  string
	found chan struct{}
	buf   bytes.Buffer
	told  bool
}

func (w *signalWriter) Write(b []byte) (int, error) {
	w.buf.Write(b)
	if !w.told && strings.Contains(w.buf.String(), w.text) {
		w.told = true
		close(w.found)
	}
	return len(b), nil
}

// A file with the DSN, and a password from libpq's variable.
func TestPasswordFromLibpq(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Password: "secret one"})
	u, err := url.Parse(pg.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	file := t.TempDir() + "/walrelay.yaml"
	if err := os.WriteFile(file, []byte("dsn: host="+u.Hostname()+" port="+u.Port()+" user=postgres dbname=postgres password=wrong\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PGPASSWORD", "secret one") // pgx reads the process's environment
	walrelay(t, os.Environ(), "slot", "list", "--config", file).want(t, exitOK, "NAME")
}
