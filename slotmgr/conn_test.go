package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestConnectSaysWhatToDo(t *testing.T) {
	const secret = "s3cr3t@:/#%"
	pg := harness.RunPostgres(t, harness.PostgresOptions{Password: secret})
	admin := connect(t, pg.DSN("postgres"))
	for _, sql := range []string{
		"create role full login password 'x' connection limit 0",
		"create database closed",
		"revoke connect on database closed from public",
		"create role stranger login password 'x'",
	} {
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	free, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}

	for name, c := range map[string]struct {
		dsn        string
		class      event.Class
		text, hint string
	}{
		"wrong password":   {pg.DSNFor("postgres", "postgres", secret+"x"), event.Precondition, "28P01", `password of role "postgres"`},
		"no such database": {pg.DSN("nowhere"), event.Precondition, "3D000", "PGDATABASE"},
		"no connect grant": {pg.DSNFor("closed", "stranger", "x"), event.Precondition, "42501", `GRANT CONNECT ON DATABASE "closed" TO "stranger"`},
		"too many":         {pg.DSNFor("postgres", "full", "x"), event.Transient, "53300", "max_connections"},
		"no TLS":           {strings.Replace(pg.DSN("postgres"), "sslmode=disable", "sslmode=require", 1), event.Precondition, "TLS", "sslmode"},
		"refused":          {fmt.Sprintf("postgres://u:s3cr3t@127.0.0.1:%d/db?sslmode=disable", free), event.Transient, "connection refused", "is Postgres running"},
		"no socket":        {fmt.Sprintf("host=%s port=1 user=u password=s3cr3t dbname=db", t.TempDir()), event.Transient, "no such file", "is Postgres running"},
		"no such host":     {"postgres://u:s3cr3t@nowhere.invalid/db", event.Transient, "lookup nowhere.invalid", "host name"},
		"no answer":        {fmt.Sprintf("postgres://u:s3cr3t@%s/db?sslmode=disable", silent.Addr()), event.Transient, "timeout", "no answer"},
		"no startup option": {
			pg.DSN("postgres") + "&no_such_setting=1", event.Precondition, "42704", "PGOPTIONS",
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := Connect(ctx, config(t, c.dsn))
			wantFailure(t, err, c.class, c.text, c.hint)
			if strings.Contains(err.Error()+event.HintOf(err)+fmt.Sprintf("%+v", err), "s3cr3t") {
				t.Errorf("password in %v", err)
			}
			var whole *pgconn.ConnectError
			if !errors.As(err, &whole) {
				t.Errorf("the cause is lost: %v", err)
			}
		})
	}
}
