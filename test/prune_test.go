package test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"

	"github.com/walrelay/walrelay/test/harness"
)

// prune runs the command with the flags of the rig.
func (r *rig) prune(args ...string) harness.Ran {
	r.t.Helper()
	return harness.MustRun(r.t, nil, slices.Concat([]string{"prune"}, r.flags(), []string{"--yes", "--older-than", "0s"}, args)...)
}

// filledRig is one whose relay has published n rows.
func filledRig(t *testing.T, aggregate string, n int) *rig {
	t.Helper()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill(aggregate, n)
	r.stored(n, 30*time.Second)
	return r
}

// pruned is what it says as JSON.
type pruned struct {
	Tables []struct {
		Deleted int64
		Dropped []string          `json:"dropped_partitions"`
		Kept    map[string]int64  `json:"kept"`
		Spared  map[string]string `json:"kept_partitions"`
	}
}

func prunedOf(t testing.TB, ran harness.Ran) pruned {
	t.Helper()
	var p pruned
	if err := json.Unmarshal([]byte(ran.Stdout), &p); err != nil || len(p.Tables) != 1 {
		t.Fatalf("%v: exit code %d\n%s%s", err, ran.Code, ran.Stdout, ran.Stderr)
	}
	return p
}

// prunes wants a pass that deletes so many rows, and returns what it kept.
func (r *rig) prunes(want int64, args ...string) map[string]int64 {
	r.t.Helper()
	ran := r.prune(append(args, "-o", "json")...)
	if ran.Code != 0 {
		r.t.Fatalf("prune: exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
	}
	p := prunedOf(r.t, ran)
	if p.Tables[0].Deleted != want {
		r.t.Errorf("%d rows deleted, want %d\n%s", p.Tables[0].Deleted, want, ran.Stdout)
	}
	return p.Tables[0].Kept
}

func (r *rig) rows() int { r.t.Helper(); return query[int](r, "select count(*)::int from outbox") }

func (r *rig) begin(conn *pgx.Conn, statements ...string) {
	r.t.Helper()
	for _, sql := range append([]string{"begin"}, statements...) {
		if _, err := conn.Exec(r.t.Context(), sql); err != nil {
			r.t.Fatalf("%s: %v", sql, err)
		}
	}
}

const one = `insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('a', 'x', 'e', '{}')`

// A row that was written early and committed late is not deleted before it is
// published, whether it was written by the transaction itself or in a savepoint of it.
func TestPruneWaitsForTransactionsThatAreOpen(t *testing.T) {
	t.Parallel()
	r := filledRig(t, "before", 20)
	slow := r.pg.MustConn(t)
	r.begin(slow, one, "savepoint s", one, "release s", one)
	r.fill("after", 20)
	r.stored(40, 30*time.Second)
	// The command cannot see rows of an open transaction; what it must not do is take
	// later ones for earlier ones.
	kept := r.prunes(20)
	if kept["not_confirmed"] != 20 {
		t.Errorf("kept %v", kept)
	}
	// Now the transaction commits between the horizon and the read: the relay is held up, so that
	// the command waits for its confirmation.
	r.relay.Freeze()
	r.fill("held", 1)
	command := harness.NewRelay(t, slices.Concat([]string{"prune"}, r.flags(), []string{"--yes", "--older-than", "0s", "-o", "json"})...)
	command.MustStart(t)
	command.MustAwait(t, quick, "waiting until slot walrelay is confirmed")
	if _, err := slow.Exec(t.Context(), "commit"); err != nil {
		t.Fatal(err)
	}
	r.relay.Thaw()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if code, err := command.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("%d, %v\n%s", code, err, command.Output())
	}
	if got := r.rows(); got != 24 {
		t.Errorf("%d rows are left, want the 3 late ones and those that came after their xid\n%s", got, command.Output())
	}
	r.stored(44, 30*time.Second)
	r.prunes(24)
	if n := len(r.read()); n != 44 {
		t.Errorf("the stream has %d messages, want 44: deleting is no event", n)
	}
	r.ends(0)
}

func TestPruneDeletesNothingWhileTheRelayIsStopped(t *testing.T) {
	t.Parallel()
	r := filledRig(t, "before", 20)
	r.ends(0)
	r.fill("unsent", 20)
	ran := r.prune("--wait", "1s")
	if ran.Code != 3 || !strings.Contains(ran.Stderr, "start its relay with walrelay run") {
		t.Errorf("exit code %d\n%s", ran.Code, ran.Stderr)
	}
	// Whoever moves the slot on does not make them published.
	r.exec("select pg_replication_slot_advance('walrelay', pg_current_wal_lsn())")
	ran = r.prune("--wait", "1s")
	if ran.Code != 3 || !strings.Contains(ran.Stderr, "advanced or made anew") {
		t.Errorf("exit code %d\n%s", ran.Code, ran.Stderr)
	}
	if got := r.rows(); got != 40 {
		t.Errorf("%d rows are left, want 40", got)
	}
	// Nor does an operator who accepts the gap.
	r.relay.Args = with(r.relay.Args, "--accept-gap")
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill("after", 20)
	r.stored(40, 30*time.Second)
	if kept := r.prunes(20); kept["not_proven"] != 40 {
		t.Errorf("kept %v", kept)
	}
	r.prunes(40, "--include-unproven")
	r.ends(0)
}

// What the slot never had stays, also when the rows are updated later.
func TestPruneKeepsRowsFromBeforeTheSlot(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{prepare: func(r *rig) {
		r.must("init", "--apply", "--dsn", r.dsn, "--publication", publication)
		r.fill("before", 20)
	}})
	ran := r.prune()
	if ran.Code != 3 || !strings.Contains(ran.Stderr, "hint: ") {
		t.Errorf("exit code %d without a stream\n%s", ran.Code, ran.Stderr)
	}
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill("after", 30)
	r.stored(30, 30*time.Second)
	r.exec("update outbox set headers = '{}' where aggregate_id = 'before'", "vacuum freeze outbox")
	if kept := r.prunes(30, "--batch", "7"); kept["not_proven"] != 20 {
		t.Errorf("kept %v", kept)
	}
	// A restart does not change what is proven.
	r.fill("later", 5)
	r.stored(35, 30*time.Second)
	r.ends(0)
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	if kept := r.prunes(0, "--dry-run", "--older-than", "1d"); kept["too_young"] != 25 {
		t.Errorf("kept %v", kept)
	}
	r.prunes(5, "--dry-run")
	r.prunes(5)
	r.ends(0)
}

// All rows of a table whose slot began with a backfill were sent.
func TestPruneAfterABackfill(t *testing.T) {
	t.Parallel()
	r := newBackfillRig(t)
	r.fill("before", 20)
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill("after", 10)
	r.stored(30, 30*time.Second)
	r.prunes(30)
	// Skipping is not publishing.
	r.ends(0)
	r.fill("skipped", 7)
	r.must(slices.Concat([]string{"slot", "advance", "--to-now", "--yes"}, r.flags())...)
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill("last", 3)
	r.stored(33, 30*time.Second)
	if kept := r.prunes(3); kept["not_proven"] != 7 {
		t.Errorf("kept %v", kept)
	}
	r.ends(0)
}

func TestPruneKeepsRowsWithDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{nats: harness.NATSOptions{MaxPayload: 64 << 10}})
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill("good", 5)
	r.exec(into + "select 'order', 'large', 'e', to_jsonb(repeat('x', 100000)) from generate_series(1, 3)")
	r.stored(8, 30*time.Second)
	if kept := r.prunes(5); kept["dead_letter"] != 3 {
		t.Errorf("kept %v", kept)
	}
	dlq, err := r.js.Stream(t.Context(), stream+"_DLQ")
	must(t, err)
	must(t, dlq.DeleteMsg(t.Context(), 3))
	if kept := r.prunes(1); kept["dead_letter"] != 2 {
		t.Errorf("kept %v", kept)
	}
	must(t, dlq.Purge(t.Context()))
	r.prunes(2)
	r.ends(0)
}

// Writers with a lock_timeout never meet it, and rows that they have locked stay.
func TestPruneDoesNotBlockWriters(t *testing.T) {
	t.Parallel()
	r := filledRig(t, "locked", 50)
	other := r.pg.MustConn(t)
	r.begin(other, "select from outbox where seq in (3, 17, 50) for update")
	// The transaction above has no xid, so it holds nothing back.
	if kept := r.prunes(47); kept["in_use"] != 3 {
		t.Errorf("kept %v", kept)
	}
	_, err := other.Exec(t.Context(), "rollback")
	must(t, err)

	ctx, stop := context.WithCancel(t.Context())
	ws := harness.NewWriters(harness.Workload{
		DSN: r.pg.DSN("postgres"), Writers: 4, Seed: 3, Plain: true,
		Init: func(ctx context.Context, c *pgx.Conn) error {
			_, err := c.Exec(ctx, "set lock_timeout = '1s'")
			return err
		},
	})
	written := in(func() error { return ws.Run(ctx, -1) })
	var deleted int
	for range 5 {
		must(t, ws.Diary.Await(t.Context(), ws.Diary.Committed()+200))
		ran := r.prune("--batch", "100", "-o", "json")
		if ran.Code != 0 {
			t.Fatalf("exit code %d\n%s", ran.Code, ran.Stderr)
		}
		deleted += int(prunedOf(t, ran).Tables[0].Deleted)
	}
	stop()
	if err := written(); err != nil && ctx.Err() == nil {
		t.Fatal(err)
	}
	if n := ws.Diary.Count(harness.Unknown); n > 4 || deleted == 0 {
		t.Errorf("%d transactions failed, %d rows deleted", n, deleted)
	}
	r.stored(50+ws.Diary.Committed(), 30*time.Second)
	r.ends(0)
}

func TestPruneDropsPartitions(t *testing.T) {
	t.Parallel()
	r := newBackfillRig(t)
	r.exec("drop publication walrelay", "drop table outbox")
	r.must("init", "--apply", "--partitioned", "month", "--dsn", r.dsn, "--publication", publication)
	r.exec(`create table "Old One" partition of outbox for values from ('2001-01-01 00:00+00') to ('2001-02-01 00:00+00')`,
		"create table old_two partition of outbox for values from ('2001-02-01 00:00+00') to ('2001-03-01 00:00+00')")
	at := `insert into outbox (aggregate_type, aggregate_id, event_type, payload, created_at) select 'a', 'old', 'e', to_jsonb(repeat('x', %d)), '%s' from generate_series(1, %d)`
	r.relay.Args = append(r.relay.Args, "--max-parked-in-row", "2")
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.exec(fmt.Sprintf(at, 1, "2001-01-10", 30), fmt.Sprintf(at, 1, "2001-02-10", 30), fmt.Sprintf(at, 1<<21, "2001-02-11", 1), fmt.Sprintf(at, 1, "1999-01-01", 5))
	r.fill("now", 10)
	r.stored(76, 30*time.Second)

	// Somebody holds the table: its partitions stay, and nobody waits for long.
	reader := r.pg.MustConn(t)
	r.begin(reader, "select from outbox limit 1")
	ran := r.prune("--older-than", "1d", "--drop-partitions", "-o", "json", "--dry-run")
	if p := prunedOf(t, ran); ran.Code != 0 || p.Tables[0].Deleted != 65 {
		t.Errorf("%d: %+v\n%s", ran.Code, p, ran.Stderr)
	}
	_, err := reader.Exec(t.Context(), "rollback")
	must(t, err)

	file := filepath.Join(t.TempDir(), "rows.jsonl")
	ran = r.prune("--older-than", "1d", "--drop-partitions", "-o", "json", "--archive", file)
	p := prunedOf(t, ran).Tables[0]
	if ran.Code != 0 || p.Deleted != 65 || !slices.Equal(p.Dropped, []string{"public.Old One"}) || p.Spared["public.old_two"] != "dead_letter" ||
		p.Spared["public.outbox_default"] != "default_partition" || p.Kept["dead_letter"] != 1 || p.Kept["too_young"] != 10 {
		t.Errorf("%d: %+v\n%s", ran.Code, p, ran.Stderr)
	}
	if n := len(archived(t, file)); n != 65 {
		t.Errorf("the archive has %d rows, want 65", n)
	}
	r.fill("after", 4)
	r.stored(80, 30*time.Second)
	r.ends(0)
}

// archived reads the ids of an archive.
func archived(t *testing.T, file string) map[string]int {
	t.Helper()
	b, err := os.ReadFile(file)
	must(t, err)
	if strings.HasSuffix(file, ".zst") {
		dec, err := zstd.NewReader(bytes.NewReader(b))
		must(t, err)
		defer dec.Close()
		b, err = io.ReadAll(dec)
		must(t, err)
	}
	ids := map[string]int{}
	lines := bufio.NewScanner(bytes.NewReader(b))
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var row struct {
			ID      string
			Payload any
		}
		must(t, json.Unmarshal(lines.Bytes(), &row))
		ids[row.ID]++
	}
	return ids
}

// Killed at any moment, no row is gone that is not in the archive.
func TestPruneArchivesBeforeItDeletes(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"rows.jsonl", "rows.jsonl.zst"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const total = 4000
			r := newRig(t, rigOptions{})
			r.relay.MustStart(t)
			r.relay.MustAwait(t, quick, "streaming")
			r.fill("a", total)
			r.stored(total, 60*time.Second)
			all := map[string]bool{}
			for _, m := range r.read() {
				all[m.ID] = true
			}
			file := filepath.Join(t.TempDir(), name)
			command := harness.NewRelay(t, slices.Concat([]string{"prune"}, r.flags(), []string{"--yes", "--older-than", "0s", "--batch", "20", "--archive", file})...)
			for i := range 5 {
				command.MustStart(t)
				goal := total - (i+1)*500
				r.await(60*time.Second, fmt.Sprintf("no more than %d rows", goal), func() bool { return r.rows() <= goal })
				must(t, command.Kill())
			}
			// What the crash of a machine may leave.
			f, err := os.OpenFile(file, os.O_APPEND|os.O_WRONLY, 0)
			must(t, err)
			_, err = f.WriteString("\x28\xb5\x2f\xfd\x04torn")
			must(t, err)
			must(t, f.Close())
			ran := r.prune("--archive", file)
			if ran.Code != 0 || !strings.Contains(ran.Stderr, ".torn1") {
				t.Fatalf("exit code %d\n%s", ran.Code, ran.Stderr)
			}
			ids := archived(t, file)
			for id := range all {
				if ids[id] == 0 {
					t.Errorf("row %s is missing", id)
				}
			}
			if len(ids) != total || r.rows() != 0 {
				t.Errorf("%d rows in the archive, %d in the table", len(ids), r.rows())
			}
			r.ends(0)
		})
	}
}

func TestRunPrunesWhileItLeads(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: append([]string{"--prune-after", "1s", "--prune-every", "200ms"}, serving...)})
	r.relay.MustStart(t)
	url := address(t, r.relay)
	r.relay.MustAwait(t, quick, "streaming")
	standby := harness.NewRelay(t, r.relay.Args...)
	standby.MustStart(t)
	standby.MustAwait(t, quick, "standing by")
	r.fill("a", 100)
	r.await(60*time.Second, "the rows are gone", func() bool { return r.rows() == 0 })
	r.once(100)
	r.await(quick, "they are counted", func() bool { return scrape(t, url)["pruned_rows_total"] == 100 })
	scrape(t, url).want(t, "prune_failures_total", 0)
	if strings.Contains(standby.Output(), "rows deleted") {
		t.Error("the standby prunes, too")
	}
	r.ends(0)
	// The one that takes over goes on.
	r.fill("b", 50)
	r.await(60*time.Second, "the rows are gone", func() bool { return r.rows() == 0 })
	if code := standby.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d\n%s", code, standby.Output())
	}
	r.once(150)
}

// A role that may not delete is told so, and the relay goes on.
func TestPruneNeedsTheRightToDelete(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		prepare: func(r *rig) {
			r.must("init", "--apply", "--dsn", r.pg.DSN("postgres"), "--publication", publication, "--role", "courier")
		},
		args: []string{"--prune-after", "1s", "--prune-every", "200ms"},
	})
	r.relay.Args = with(r.relay.Args, "--dsn", r.pg.DSNFor("postgres", "courier", ""))
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.fill("a", 10)
	line := r.relay.MustAwait(t, 30*time.Second, "cannot delete published rows")
	if !strings.Contains(line, `GRANT SELECT, DELETE ON TABLE \"public\".\"outbox\" TO \"courier\"`) {
		t.Errorf("it says %s", line)
	}
	r.must("init", "--apply", "--dsn", r.pg.DSN("postgres"), "--publication", publication, "--role", "courier", "--grant-delete")
	r.await(30*time.Second, "the rows are gone", func() bool { return r.rows() == 0 })
	r.once(10)
	r.ends(0)
}

func TestPruneStopsOnATerm(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	command := harness.NewRelay(t, slices.Concat([]string{"prune"}, r.flags(), []string{"--yes", "--older-than", "0s", "--every", "100ms", "-o", "json"})...)
	command.MustStart(t)
	r.fill("a", 100)
	r.await(60*time.Second, "the rows are gone", func() bool { return r.rows() == 0 })
	if code := command.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d\n%s", code, command.Output())
	}
	r.once(100)
	r.ends(0)
}

// A slot that somebody else reads is waited for when it is named, and told of when not.
func TestPruneWaitsForFurtherSlots(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	r.exec("select pg_create_logical_replication_slot('other', 'pgoutput')")
	r.fill("a", 10)
	r.stored(10, 30*time.Second)
	ran := r.prune("--also-slot", "other", "--wait", "5s")
	if ran.Code != 3 || !strings.Contains(ran.Stderr, `slot "other" is confirmed up to`) || r.rows() != 10 {
		t.Errorf("exit code %d, %d rows\n%s", ran.Code, r.rows(), ran.Stderr)
	}
	if ran := r.prune("--dry-run"); ran.Code != 0 || !strings.Contains(ran.Stderr, "not waited for: other") {
		t.Errorf("exit code %d\n%s", ran.Code, ran.Stderr)
	}
	if ran := r.prune("--also-slot", "absent"); ran.Code != 3 || !strings.Contains(ran.Stderr, `slot "absent" does not exist`) {
		t.Errorf("exit code %d\n%s", ran.Code, ran.Stderr)
	}
	r.exec("select pg_replication_slot_advance('other', pg_current_wal_insert_lsn())")
	// Its end may have moved on since.
	r.await(30*time.Second, "the rows are gone", func() bool {
		r.exec("select pg_replication_slot_advance('other', pg_current_wal_flush_lsn())")
		r.prune("--also-slot", "other", "--wait", "3s")
		return r.rows() == 0
	})
	// Other tables, slots and streams prove nothing.
	r.exec("create table other (like outbox including all)", "alter publication walrelay add table other")
	for flag, want := range map[string]struct{ value, text string }{
		"--table":  {"public.other", "does not publish table public.other"},
		"--slot":   {"other", "belongs to slot"},
		"--stream": {"OTHER", "no checkpoint"},
	} {
		r.exec("select pg_replication_slot_advance('other', pg_current_wal_flush_lsn())")
		ran := r.prune(flag, want.value)
		if ran.Code != 3 || !strings.Contains(ran.Stderr, want.text) {
			t.Errorf("%s: exit code %d\n%s", flag, ran.Code, ran.Stderr)
		}
	}
	r.ends(0)
}

func TestPruneRefusesBadInput(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ args, text string }{
		{"", "--older-than"},
		{"--older-than 7", "such as 7d"},
		{"--older-than -1h", "such as 7d"},
		{"--older-than 7d", "--yes"},
		{"--older-than 7d --yes --batch 0", "--batch 0"},
		{"--older-than 7d --yes --wait -1s", "below zero"},
		{"--older-than 7d --yes --also-slot Not", "slot"},
		{"--older-than 7d --yes --table none --messages", "no outbox table"},
		{"--older-than 7d --yes --table a --table b --archive x", "--archive takes the rows of one table"},
	} {
		ran := harness.MustRun(t, nil, append([]string{"prune", "--dsn", "host=127.0.0.1 user=relay"}, strings.Fields(c.args)...)...)
		if ran.Code != 2 || !strings.Contains(ran.Stderr, c.text) || !strings.Contains(ran.Stderr, "hint: ") {
			t.Errorf("prune %s: exit code %d\n%s", c.args, ran.Code, ran.Stderr)
		}
	}
}
