package harness_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/walrelay/walrelay/test/harness"
)

func TestPostgresSurvivesKillStopAndFreeze(t *testing.T) {
	ctx := context.Background()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (1)")

	if err := pg.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := pg.Conn(ctx); err == nil {
		t.Fatal("killed server answers")
	}
	pg.MustStart(t)

	pg.Freeze()
	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := pg.Conn(short); err == nil {
		t.Fatal("frozen server answers")
	}
	pg.Thaw()
	if took, err := pg.Stop(harness.Fast, 10*time.Second); err != nil {
		t.Fatalf("after %s: %v", took, err)
	}
	pg.MustStart(t)

	var n int
	var level string
	c := pg.MustConn(t)
	if err := c.QueryRow(ctx, "SELECT n, current_setting('wal_level') FROM t").Scan(&n, &level); err != nil {
		t.Fatal(err)
	}
	if n != 1 || level != "logical" {
		t.Errorf("got %d, %s; want 1, logical", n, level)
	}
}

func TestPostgresOptionsApply(t *testing.T) {
	ctx := context.Background()
	pg := harness.RunPostgres(t, harness.PostgresOptions{
		Encoding: "LATIN1",
		Password: "p@ss:/#%",
		TLS:      true,
		Settings: map[string]string{"work_mem": "5MB"},
	})
	c := pg.MustConn(t)
	var encoding, mem string
	var ssl bool
	err := c.QueryRow(ctx, `SELECT current_setting('server_encoding'), current_setting('work_mem'),
		(SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid())`).Scan(&encoding, &mem, &ssl)
	if err != nil {
		t.Fatal(err)
	}
	if encoding != "LATIN1" || mem != "5MB" || !ssl {
		t.Errorf("got %s, %s, ssl %t", encoding, mem, ssl)
	}
	if _, err := pgx.Connect(ctx, pg.DSNFor("postgres", "postgres", "wrong")); err == nil {
		t.Error("wrong password accepted")
	}
}
