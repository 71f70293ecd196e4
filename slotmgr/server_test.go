package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// within bounds everything that a test waits for.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func config(t *testing.T, dsn string) *pgx.ConnConfig {
	t.Helper()
	cfg, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	conn, err := Connect(within(t, 10*time.Second), config(t, dsn))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hangUp(conn) })
	return conn
}

// hold reads a slot as a relay does and returns the connection that does it.
func hold(t *testing.T, pg *harness.Postgres, slot, publication string) *pgconn.PgConn {
	t.Helper()
	ctx := within(t, 10*time.Second)
	cfg := config(t, pg.DSN("postgres"))
	cfg.RuntimeParams["replication"] = "database"
	cfg.RuntimeParams["application_name"] = "holder"
	conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = conn.Close(ctx)
	})
	err = pglogrepl.StartReplication(ctx, conn, slot, 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", fmt.Sprintf("publication_names '%q'", publication)},
	})
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// released waits until nobody reads the slot any more.
func released(t *testing.T, conn *pgx.Conn, slot string) {
	t.Helper()
	until(t, "slot is released", func() bool {
		s, err := Inspect(t.Context(), conn, slot)
		if err != nil {
			t.Fatal(err)
		}
		return !s.Active
	})
}

// until asks again and again, since the server offers no signal for it.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx := within(t, 15*time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("never: %s", what)
		}
	}
}

// wantFailure checks class, text and hint.
func wantFailure(t *testing.T, err error, class event.Class, text, hint string) {
	t.Helper()
	var f *event.Failure
	if !errors.As(err, &f) {
		t.Fatalf("got error %v, want a failure with %q", err, text)
	}
	if got := event.ClassOf(err); got != class {
		t.Errorf("got class %d, want %d: %v", got, class, err)
	}
	if !strings.Contains(err.Error(), text) {
		t.Errorf("got error %q, want %q in it", err, text)
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("error %q has more than one line", err)
	}
	if got := event.HintOf(err); !strings.Contains(got, hint) {
		t.Errorf("got hint %q, want %q in it", got, hint)
	}
}

func mustCreate(t *testing.T, conn *pgx.Conn, o CreateOptions) Slot {
	t.Helper()
	slot, _, err := Create(within(t, 30*time.Second), conn, o)
	if err != nil {
		t.Fatal(err)
	}
	return slot
}

const outboxTable = "create table outbox (seq bigint generated always as identity, id uuid, payload jsonb)"
