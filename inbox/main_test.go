package inbox

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walrelay/walrelay/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// servers are shared by all tests of the package: each has a database of its own.
var servers = struct {
	sync.Mutex
	pg *harness.Postgres
	n  int
}{}

// database makes a database with an inbox and returns a pool of it.
func database(t *testing.T) *pgxpool.Pool {
	t.Helper()
	servers.Lock()
	defer servers.Unlock()
	if servers.pg == nil {
		pg, err := harness.CreatePostgres(t.Context(), harness.PostgresOptions{})
		check(t, err)
		check(t, pg.Start(context.Background()))
		servers.pg = pg
	}
	servers.n++
	name := fmt.Sprintf("db%d", servers.n)
	check(t, servers.pg.Exec(t.Context(), "CREATE DATABASE "+name))
	pool := connect(t, servers.pg.DSN(name))
	exec(t, pool, Schema{}.SQL())
	return pool
}

func connect(t *testing.T, dsn string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(dsn)
	check(t, err)
	cfg.MaxConns = 12
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	check(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func exec(t *testing.T, db Execer, sql string, args ...any) {
	t.Helper()
	if _, err := db.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func ask[T any](t *testing.T, db interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}, sql string, args ...any,
) T {
	t.Helper()
	var v T
	if err := db.QueryRow(t.Context(), sql, args...).Scan(&v); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return v
}

// await polls until ok, since servers do not signal what is waited for.
func await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.NewTimer(30 * time.Second)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			t.Fatalf("not yet: %s", what)
		}
	}
}
