package test

import (
	"context"
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

// page is more than a page of the WAL, so that a record with it crosses one.
var page = strings.Repeat("x", 20_000)

// half emits a message that belongs to no transaction and is flushed in part: a
// transaction that is idle after it leaves the flush position within the record. end
// has the rest flushed.
func (r *rig) half(id string) (first, last uint64, end func()) {
	r.t.Helper()
	conn := r.pg.MustConn(r.t)
	one := func(sql string, args ...any) (lsn int64) {
		r.t.Helper()
		if err := conn.QueryRow(r.t.Context(), sql, args...).Scan(&lsn); err != nil {
			r.t.Fatal(err)
		}
		return lsn
	}
	if _, err := conn.Exec(r.t.Context(), "begin"); err != nil {
		r.t.Fatal(err)
	}
	begin := one("select (pg_current_wal_insert_lsn() - '0/0')::int8")
	stop := one("select (pg_logical_emit_message(false, 'walrelay', $1) - '0/0')::int8",
		fmt.Sprintf(`{"id": %q, "aggregate_type": "order", "aggregate_id": "1", "event_type": "placed", "payload": {"x": %q}}`, id, page))
	r.await(quick, "the flush position is within the record", func() bool {
		at := query[int64](r, "select (pg_current_wal_flush_lsn() - '0/0')::int8")
		if at >= stop {
			r.t.Fatalf("the record %x-%x is flushed up to %x", begin, stop, at)
		}
		return at > begin
	})
	return uint64(begin), uint64(stop), func() {
		r.t.Helper()
		if _, err := conn.Exec(r.t.Context(), "select pg_current_xact_id(); commit", pgx.QueryExecModeSimpleProtocol); err != nil {
			r.t.Fatal(err)
		}
	}
}

// A slot is never confirmed up to a place within a record: Postgres would skip the
// message with it, and the next start would miss it.
func TestNoPlaceWithinARecordIsConfirmed(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{pg: quietWAL, args: []string{"--messages", "--status-interval", "500ms"}})
	r.relay.MustStart(t)
	r.exec(into + "values ('a', 'b', 'c', '{}')")
	r.stored(1, quick)
	const rounds = 6
	for i := range rounds {
		first, last, end := r.half(fmt.Sprint("m", i))
		start := time.Now()
		r.await(quick, "the relay has looked at that place twice", func() bool { return time.Since(start) > 700*time.Millisecond })
		end()
		r.await(quick, "it is confirmed", func() bool {
			at := uint64(query[int64](r, "select (confirmed_flush_lsn - '0/0')::int8 from pg_replication_slots where slot_name = $1", slot))
			if at > first+64 && at < last {
				t.Fatalf("confirmed up to %x, within the record %x-%x", at, first, last)
			}
			return at >= last
		})
	}
	r.stored(1+rounds, quick)
	must(t, r.relay.Kill())
	r.relay.MustStart(t)
	r.exec(into + "values ('a', 'b', 'c', '{}')")
	r.stored(2+rounds, quick)
	if code := r.relay.MustStop(t, quick); code != 0 {
		t.Errorf("exit code %d\n%s", code, r.relay.Output())
	}
}

// quietWAL is a server whose background flushes leave the last page alone.
var quietWAL = harness.PostgresOptions{Settings: map[string]string{"wal_writer_delay": "10ms", "bgwriter_delay": "10s", "checkpoint_timeout": "1d", "autovacuum": "off"}}

// What slot advance skips it lists, also where the place to advance to is
// within a message's record.
func TestAdvanceTakesRecordsAsAWhole(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{pg: quietWAL, args: []string{"--messages"}})
	r.relay.MustStart(t)
	r.exec(into + "values ('a', 'b', 'c', '{}')")
	r.stored(1, quick)
	if code := r.relay.MustStop(t, quick); code != 0 {
		t.Fatalf("exit code %d\n%s", code, r.relay.Output())
	}
	advance := func(args ...string) harness.Ran {
		return r.must(slices.Concat([]string{"slot", "advance", slot, "--yes", "--messages"}, r.flags(), args)...)
	}
	confirmed := func() uint64 {
		return uint64(query[int64](r, "select (confirmed_flush_lsn - '0/0')::int8 from pg_replication_slots where slot_name = $1", slot))
	}
	_, last, end := r.half("now")
	ran := advance("--to-now")
	if !strings.Contains(ran.Stdout, `"id":"now"`) || confirmed() < last {
		t.Errorf("to now, %x: confirmed %x\n%s%s", last, confirmed(), head(ran.Stdout), ran.Stderr)
	}
	end()
	for _, blind := range []bool{false, true} {
		first, last, end := r.half("to")
		end()
		args := []string{"--to", fmt.Sprintf("0/%X", (first+last)/2)}
		if blind {
			args = append(args, "--blind")
		}
		ran = advance(args...)
		if !blind && !strings.Contains(ran.Stdout, `"id":"to"`) || confirmed() != last {
			t.Errorf("blind %t, within %x-%x: confirmed %x\n%s%s", blind, first, last, confirmed(), head(ran.Stdout), ran.Stderr)
		}
	}
	r.relay.MustStart(t)
	r.exec(into + "values ('a', 'b', 'c', '{}')")
	r.stored(2, quick)
	if code := r.relay.MustStop(t, quick); code != 0 {
		t.Errorf("exit code %d\n%s", code, r.relay.Output())
	}
}

func head(s string) string { return s[:min(len(s), 500)] }

// undecodable makes the publication's row filter fail for an event type of no letters.
func (r *rig) undecodable() {
	r.t.Helper()
	if query[int64](r, "select current_setting('server_version_num')::int8") < 150000 {
		r.t.Fatal("row filters need Postgres 15")
	}
	r.exec("alter publication " + publication + " set table public.outbox where (10 / length(event_type) > 0)")
}

// The hint of the error says how to get past it: the command after the last colon, or
// on a line of its own.
func hinted(t *testing.T, output string) []string {
	t.Helper()
	for line := range strings.Lines(output) {
		if at := strings.Index(line, "walrelay "); at >= 0 && (strings.HasPrefix(line, "hint: ") || strings.Contains(line, "hint=")) {
			return strings.Fields(strings.TrimSpace(line[at+len("walrelay "):]))
		}
	}
	t.Fatalf("no hint names a command:\n%s", output)
	return nil
}

// A transaction that the server cannot decode stops the relay, and the hint's command
// gets past it: what can be read is shown, and what cannot is reported as such.
func TestUndecodableTransactionIsShownAndSkipped(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.undecodable()
	row := func(kind, n string) string { return into + "values ('a', 'b', '" + kind + "', '" + n + "')" }
	r.exec(row("good", "1"), row("", "2"), row("good", "3"), row("good", "4"), row("", "5"), row("", "6"), row("good", "7"))

	peek := r.must(slices.Concat([]string{"slot", "peek", slot, "-o", "json"}, r.flags())...)
	var kinds []string
	for line := range strings.Lines(peek.Stdout) {
		switch {
		case strings.Contains(line, `"undecoded": true`):
			kinds = append(kinds, "?")
		case strings.Contains(line, `"payload":`):
			kinds = append(kinds, strings.Trim(strings.TrimSpace(strings.SplitN(line, ":", 2)[1]), `",`))
		}
	}
	if got := strings.Join(kinds, " "); got != "1 ? 3 4 ? ? 7" {
		t.Errorf("peek shows %q\n%s%s", got, peek.Stdout, peek.Stderr)
	}
	table := r.must(slices.Concat([]string{"slot", "peek", slot}, r.flags())...)
	if strings.Count(table.Stdout, "cannot be decoded") != 3 {
		t.Errorf("got\n%s", table.Stdout)
	}

	for round := range 3 {
		r.relay.MustStart(t)
		if code := r.exit(quick); code != 3 {
			t.Fatalf("round %d: exit code %d\n%s", round, code, r.relay.Output())
		}
		ran := r.must(slices.Concat(hinted(t, r.relay.Output()), []string{"--yes"}, r.flags())...)
		if !strings.Contains(ran.Stderr, "unread, 1 transactions that cannot be decoded") || !strings.Contains(ran.Stdout, `"undecoded":true`) || !strings.Contains(ran.Stdout, "division by zero") {
			t.Errorf("round %d\n%s%s", round, ran.Stdout, ran.Stderr)
		}
	}
	r.relay.MustStart(t)
	r.exec(row("good", "8"))
	r.stored(5, quick)
	if code := r.relay.MustStop(t, quick); code != 0 {
		t.Errorf("exit code %d\n%s", code, r.relay.Output())
	}
	var got []string
	for _, m := range r.read() {
		got = append(got, string(m.Payload))
	}
	if all := strings.Join(got, " "); all != "1 3 4 7 8" {
		t.Errorf("the stream has %s", all)
	}
}

// exit is the code with which the relay ends by itself.
func (r *rig) exit(limit time.Duration) int {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	code, err := r.relay.Wait(ctx)
	if err != nil {
		r.t.Fatal(err)
	}
	return code
}
