package test

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/test/harness"
)

// writing is an open transaction with an xid, which a new slot waits for.
func (r *rig) writing() (pid uint32, end func()) {
	r.t.Helper()
	conn := r.pg.MustConn(r.t)
	for _, sql := range []string{"set application_name = 'slow writer'", "begin", "select pg_current_xact_id()"} {
		if _, err := conn.Exec(r.t.Context(), sql, pgx.QueryExecModeSimpleProtocol); err != nil {
			r.t.Fatal(err)
		}
	}
	return conn.PgConn().PID(), func() {
		r.t.Helper()
		if _, err := conn.Exec(r.t.Context(), "commit"); err != nil {
			r.t.Fatal(err)
		}
	}
}

// sessions of walrelay on the server, and slots of any kind.
func (r *rig) sessions() int64 {
	return query[int64](r, `select (select count(*) from pg_stat_activity where application_name like 'walrelay%' and pid <> pg_backend_pid())
		+ (select count(*) from pg_replication_slots)`)
}

// A command that waits for old transactions to create a slot says which, and
// leaves nothing on the server when it is stopped or killed.
func TestCreationOfASlotIsWatchedAndLeavesNothing(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		prepare func(r *rig)
		args    []string
		stopped int // exit code after SIGTERM
		done    string
	}{
		{"run --backfill", nil, []string{"run", "--create-stream", "--backfill", "--log-format", "text"}, 0, "backfilled"},
		{"slot recover", func(r *rig) {
			r.must("slot", "create", slot, "--dsn", r.dsn, "--publication", publication)
			relay := harness.NewRelay(r.t, slices.Concat([]string{"run"}, r.flags(), []string{"--create-stream"})...)
			relay.MustStart(r.t)
			r.exec(into + "values ('a', 'b', 'c', '{}')")
			r.stored(1, quick)
			if code := relay.MustStop(r.t, quick); code != 0 {
				r.t.Fatalf("exit code %d\n%s", code, relay.Output())
			}
			r.exec("select pg_drop_replication_slot('"+slot+"')", into+"values ('a', 'b', 'c', '{}')")
		}, []string{"slot", "recover", slot, "--log-format", "text", "--yes"}, 130, "0 were in the stream, 1 published"},
		{"slot create", nil, []string{"slot", "create", slot}, 130, "created"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newBackfillRig(t)
			r.t = t
			if c.prepare != nil {
				c.prepare(r)
			}
			flags := r.flags()
			if c.args[1] == "create" {
				flags = []string{"--dsn", r.dsn, "--publication", publication}
			}
			r.relay = harness.NewRelay(t, slices.Concat(c.args, flags)...)
			pid, end := r.writing()
			waits := func() {
				t.Helper()
				r.relay.MustStart(t)
				line := r.relay.MustAwait(t, quick, "waiting for ")
				for _, text := range []string{fmt.Sprint(pid), "slow writer", "postgres"} {
					if !strings.Contains(line, text) {
						t.Errorf("want %q in %s", text, line)
					}
				}
				if strings.Contains(r.relay.Output(), "under way") {
					t.Errorf("stands by behind nobody:\n%s", r.relay.Output())
				}
			}
			gone := func() bool { return r.sessions() == 0 }

			waits()
			if code := r.relay.MustStop(t, quick); code != c.stopped {
				t.Errorf("stopped: exit code %d, want %d\n%s", code, c.stopped, r.relay.Output())
			}
			r.await(2*time.Second, "nothing is left by the stopped one", gone)

			waits()
			must(t, r.relay.Signal(syscall.SIGKILL))
			r.await(quick, "nothing is left by the killed one", gone)

			waits()
			must(t, r.relay.Kill())
			end() // at once: the backend goes on before it finds its client gone
			r.await(quick, "the slot is not made behind the back", gone)

			_, end = r.writing()
			r.relay.MustStart(t)
			r.relay.MustAwait(t, quick, "waiting for ")
			end()
			r.relay.MustAwait(t, 60*time.Second, c.done)
		})
	}
}
