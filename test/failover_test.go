package test

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// A slot that standbys keep up with exists from Postgres 17 on. Before, a
// standby has one when its data folder was copied with the slots; the server
// that takes over then sends again what was confirmed since.
const failoverSlots = 17

func (r *rig) major() int {
	return query[int](r, "select current_setting('server_version_num')::int / 10000")
}

// bothHosts names two servers in one DSN, which leads to the one that is primary.
func bothHosts(a, b *harness.Postgres) string {
	u := url.URL{
		Scheme: "postgres", User: url.User("postgres"), Host: a.Addr() + "," + b.Addr(), Path: "/postgres",
		RawQuery: "sslmode=disable&target_session_attrs=read-write&connect_timeout=2",
	}
	return u.String()
}

// settled blocks until everything that is committed now is confirmed.
func (r *rig) settled(limit time.Duration) {
	r.t.Helper()
	end := query[string](r, "select pg_current_wal_insert_lsn()::text")
	r.await(limit, "everything is confirmed", func() bool {
		return query[bool](r, "select confirmed_flush_lsn >= $1::pg_lsn from pg_replication_slots where slot_name = $2", end, slot)
	})
}

// compare compares the whole stream with what the present server has. It
// returns how many committed events that server lacks, and how many of them are
// in the stream.
func (r *rig) compare(ws *harness.Writers) (gone, orphans int) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	gone, err := ws.Diary.Survive(ctx, r.pg.MustConn(r.t), r.table)
	must(r.t, err)
	r.settled(30 * time.Second)
	res := harness.Compare(ws.Diary, r.read())
	r.t.Log(res)
	if !res.OK() {
		r.t.Error("stream and table disagree")
	}
	return gone, res.Stored - res.Committed
}

func TestStandbyIsPromotedUnderLoad(t *testing.T) {
	for _, c := range []struct {
		name    string
		behind  bool // the standby misses the last commits of the primary
		guarded bool // synchronized_standby_slots: nothing is sent that the standby has not
	}{
		{name: "in step"},
		{name: "behind", behind: true},
		{name: "behind, guarded", behind: true, guarded: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: []string{"--status-interval", "200ms"}})
			synced := r.major() >= failoverSlots
			if c.guarded && !synced {
				c.guarded = false // this server has no such setting
			}
			old := r.pg
			settings := map[string]string{}
			if synced {
				r.must("slot", "drop", slot, "--yes", "--dsn", r.dsn)
				r.must("slot", "create", slot, "--failover", "--dsn", r.dsn, "--publication", publication)
				settings["sync_replication_slots"] = "on"
			}
			standby := old.Standby(t, "standby", !synced, settings)
			if c.guarded {
				r.exec("alter system set synchronized_standby_slots = 'standby'", "select pg_reload_conf()")
			}
			r.relay.Args = append(r.relay.Args, "--dsn", bothHosts(old, standby))
			r.relay.MustStart(t)
			ws := harness.NewWriters(harness.Workload{DSN: bothHosts(old, standby), Plain: true, Rate: 300, Seed: 5})
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			writing := in(func() error { return ws.Run(ctx, -1) })
			r.stored(500, 30*time.Second)

			there := &rig{t: t, pg: standby, nats: r.nats, js: r.js, table: r.table}
			if synced {
				there.await(60*time.Second, "the slot is on the standby", func() bool {
					r.exec("select pg_log_standby_snapshot()")
					return query[bool](there, "select exists (select from pg_replication_slots where slot_name = $1 and synced and not temporary)", slot)
				})
			}
			end := ""
			if c.behind {
				must(t, standby.Exec(t.Context(), "alter system set primary_conninfo = ''", "select pg_reload_conf()"))
				there.await(10*time.Second, "nothing is received", func() bool {
					return query[int](there, "select count(*)::int from pg_stat_wal_receiver") == 0
				})
				n := ws.Diary.Committed()
				wait, cancel := context.WithTimeout(ctx, 20*time.Second)
				defer cancel()
				must(t, ws.Diary.Await(wait, n+1000))
				if !c.guarded {
					r.stored(n+1000, 20*time.Second)
				}
				end = query[string](r, "select pg_current_wal_lsn()::text")
			}
			must(t, old.Kill())
			killed := time.Now()
			standby.Promote(t)
			n := ws.Diary.Committed()
			wait, cancel := context.WithTimeout(ctx, 60*time.Second)
			defer cancel()
			must(t, ws.Diary.Await(wait, n+3000))
			t.Logf("3000 events later than the kill after %s", time.Since(killed).Round(time.Millisecond))
			stop()
			must(t, writing())

			r.pg = standby
			gone, orphans := r.compare(ws)
			t.Logf("%d committed events are gone, %d of them are in the stream", gone, orphans)
			if c.behind {
				if gone == 0 || (orphans > 0) == c.guarded {
					t.Errorf("%d events gone, %d in the stream", gone, orphans)
				}
				if !query[bool](r, "select pg_current_wal_lsn() > $1::pg_lsn", end) {
					t.Error("no LSN was used again")
				}
			}
			if told := strings.Contains(r.relay.Output(), "postgres holds events back"); told != c.guarded {
				t.Errorf("guarded %v, told that events are held back: %v", c.guarded, told)
			}
			if told := strings.Contains(r.relay.Output(), "events that this server never had"); told != (orphans > 0) {
				t.Errorf("orphans %d, told %v", orphans, told)
			}
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Errorf("exit code %d", code)
			}
		})
	}
}

// gaveUp wants the relay to end by itself with an exit code and texts in its output.
func (r *rig) gaveUp(code int, texts ...string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	got, err := r.relay.Wait(ctx)
	must(r.t, err)
	<-r.relay.Done()
	out := r.relay.Output()
	if got != code {
		r.t.Fatalf("exit code %d, want %d", got, code)
	}
	r.t.Log(out[strings.LastIndex(out, "error:"):])
	for _, text := range texts {
		if !strings.Contains(out, text) {
			r.t.Errorf("no %q in the output", text)
		}
	}
}

// again restarts the relay with further flags.
func (r *rig) again(args ...string) {
	r.t.Helper()
	before := r.relay.Args
	r.relay.Args = append(before[:len(before):len(before)], args...)
	r.relay.MustStart(r.t)
	r.relay.Args = before
}

func (r *rig) write(ws *harness.Writers, n int) {
	r.t.Helper()
	must(r.t, ws.Run(r.t.Context(), n))
}

// A slot that is made on the server that took over begins too late: events
// between are in its table only. The LSN alone would not tell, because the old
// primary had gone further.
func TestSlotMadeAfterThePromotionIsAGap(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--status-interval", "100ms"}})
	old := r.pg
	standby := old.Standby(t, "standby", false, nil)
	r.relay.Args = append(r.relay.Args, "--dsn", bothHosts(old, standby))
	r.relay.MustStart(t)
	ws := harness.NewWriters(harness.Workload{DSN: bothHosts(old, standby), Plain: true, Seed: 6})
	r.write(ws, 500)
	r.settled(20 * time.Second)
	there := &rig{t: t, pg: standby}
	must(t, standby.Exec(t.Context(), "alter system set primary_conninfo = ''", "select pg_reload_conf()"))
	there.await(10*time.Second, "nothing is received", func() bool {
		return query[int](there, "select count(*)::int from pg_stat_wal_receiver") == 0
	})
	r.write(ws, 3000)
	r.settled(20 * time.Second)
	must(t, r.relay.Kill())
	must(t, old.Kill())
	standby.Promote(t)
	r.pg = standby
	r.write(ws, 50)
	r.must("slot", "create", slot, "--dsn", standby.DSN("postgres"), "--publication", publication)
	r.relay.MustStart(t)
	r.gaveUp(5, "events between may be missing", "--accept-gap")
	r.again("--accept-gap")
	r.relay.MustAwait(t, 20*time.Second, "streaming")
	later := harness.NewWriters(harness.Workload{DSN: standby.DSN("postgres"), Plain: true, Seed: 7})
	r.write(later, 200)
	r.settled(20 * time.Second)
	r.wantStored(later)
}

// wantStored wants the events of ws to be in the stream once and in order,
// whatever else is there.
func (r *rig) wantStored(ws *harness.Writers) {
	r.t.Helper()
	var own []harness.Stored
	for _, m := range r.read() {
		if ws.Diary.Has(m.ID) {
			own = append(own, m)
		}
	}
	if res := harness.Compare(ws.Diary, own); !res.OK() {
		r.t.Errorf("stream and table disagree: %s", res)
	}
}

func TestRestoreToAPointInTime(t *testing.T) {
	for _, c := range []struct {
		name  string
		after int // events between the point and the end
	}{
		{name: "before the last event", after: 500},
		{name: "behind the last event"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: []string{"--status-interval", "100ms"}})
			r.relay.MustStart(t)
			ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Plain: true, Seed: 8})
			r.write(ws, 300)
			r.settled(20 * time.Second)
			base := r.pg.Copy(t)
			r.write(ws, 300)
			r.settled(20 * time.Second)
			r.exec("select pg_create_restore_point('here')")
			if c.after > 0 {
				r.write(ws, c.after)
				r.settled(20 * time.Second)
			}
			r.exec("select pg_switch_wal()")
			must(t, r.relay.Kill())
			if _, err := r.pg.Stop(harness.Fast, 10*time.Second); err != nil {
				t.Fatal(err)
			}

			must(t, base.Configure(map[string]string{
				"restore_command":        fmt.Sprintf(`cp "%s/pg_wal/%%f" "%%p"`, r.pg.Data()),
				"recovery_target_name":   "here",
				"recovery_target_action": "promote",
			}))
			must(t, base.Signal("recovery.signal"))
			base.MustStart(t)
			r.pg = base
			r.await(20*time.Second, "the recovery has ended", func() bool { return !query[bool](r, "select pg_is_in_recovery()") })
			later := harness.NewWriters(harness.Workload{DSN: base.DSN("postgres"), Plain: true, Seed: 9})
			r.write(later, 1000) // uses LSNs again
			r.relay.Args = append(r.relay.Args, "--dsn", base.DSN("postgres"))
			if c.after > 0 {
				r.relay.MustStart(t)
				r.gaveUp(5, "the server was restored to", "--accept-gap")
				r.again("--accept-gap")
			} else {
				r.relay.MustStart(t)
			}
			r.relay.MustAwait(t, 20*time.Second, "streaming")
			r.settled(20 * time.Second)
			r.wantStored(later)
			r.compareAfterRestore(ws, later)
		})
	}
}

// compareAfterRestore compares the stream with the two workloads before and
// after a restore together.
func (r *rig) compareAfterRestore(ws, later *harness.Writers) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Minute)
	defer cancel()
	gone, err := ws.Diary.Survive(ctx, r.pg.MustConn(r.t), r.table)
	must(r.t, err)
	var own []harness.Stored
	for _, m := range r.read() {
		if !later.Diary.Has(m.ID) {
			own = append(own, m)
		}
	}
	res := harness.Compare(ws.Diary, own)
	r.t.Logf("%d events undone by the restore; %s", gone, res)
	if !res.OK() {
		r.t.Error("stream and table disagree")
	}
}

// The old copy goes on on the same timeline, so other events get the LSNs of
// those that are in the stream.
func TestDataFolderIsRestoredFromAnOldCopy(t *testing.T) {
	for _, c := range []struct {
		name   string
		before int  // events on the restored server before the relay sees it
		silent bool // no checkpoint was written since the copy
		text   string
	}{
		{"the log ends earlier", 0, false, "the WAL of the server ends at"},
		{"the log has grown past the checkpoint", 1500, false, "the last checkpoint's transaction"},
		{"the log has grown past the last event", 1500, true, "the stream's last event"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: []string{"--status-interval", "100ms"}})
			r.relay.MustStart(t)
			ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Plain: true, Seed: 10})
			r.write(ws, 300)
			r.stored(ws.Diary.Committed(), 20*time.Second)
			stopPostgres := func() {
				t.Helper()
				if _, err := r.pg.Stop(harness.Fast, 10*time.Second); err != nil {
					t.Fatal(err)
				}
			}
			if c.silent {
				r.settled(20 * time.Second)
				must(t, r.relay.Kill())
			}
			stopPostgres()
			old := r.pg.Copy(t)
			r.pg.MustStart(t)
			if c.silent {
				r.again("--status-interval", "1h")
			}
			r.write(ws, 600)
			r.stored(ws.Diary.Committed(), 20*time.Second)
			if !c.silent {
				r.settled(20 * time.Second)
			}
			must(t, r.relay.Kill())
			stopPostgres()
			must(t, r.pg.Swap(old))
			r.pg.MustStart(t)

			later := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Plain: true, Seed: 11})
			if c.before > 0 {
				r.write(later, c.before)
			}
			had := len(r.read())
			r.relay.MustStart(t)
			r.gaveUp(5, c.text, "--accept-gap")
			if n := len(r.read()); n != had {
				t.Errorf("%d messages were published before the relay gave up", n-had)
			}
			r.again("--accept-gap")
			r.relay.MustAwait(t, 20*time.Second, "streaming")
			r.write(later, 300)
			r.settled(20 * time.Second)
			r.wantStored(later)
			r.compareAfterRestore(ws, later)
		})
	}
}

// A dump that is restored into a new cluster, as an upgrade does it: the same
// names, another system identifier, LSNs that have nothing to do with the old ones.
func TestNewClusterTakesOver(t *testing.T) {
	for _, c := range []struct {
		name   string
		killed bool // the relay, with messages stored after the last checkpoint
	}{
		{name: "drained"},
		{name: "killed", killed: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{})
			if c.killed {
				r.again("--status-interval", "1h")
			} else {
				r.relay.MustStart(t)
			}
			ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Plain: true, Seed: 13})
			r.write(ws, 500)
			r.stored(ws.Diary.Committed(), 20*time.Second)
			if c.killed {
				must(t, r.relay.Kill())
			} else if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}

			old := r.pg.MustConn(t)
			// The harness copies one initdb's result for each encoding, system identifier included.
			r.pg = harness.RunPostgres(t, harness.PostgresOptions{Encoding: "LATIN1"})
			dsn := r.pg.DSN("postgres")
			r.must("init", "--apply", "--dsn", dsn, "--table", r.table, "--publication", publication)
			const columns = "outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)"
			var rows bytes.Buffer
			_, err := old.PgConn().CopyTo(t.Context(), &rows, "copy "+columns+" to stdout")
			must(t, err)
			_, err = r.pg.MustConn(t).PgConn().CopyFrom(t.Context(), &rows, "copy "+columns+" from stdin")
			must(t, err)
			r.must("slot", "create", slot, "--dsn", dsn, "--publication", publication)
			later := harness.NewWriters(harness.Workload{DSN: dsn, Plain: true, Seed: 14})
			r.write(later, 300)

			r.relay.Args = append(r.relay.Args, "--dsn", dsn)
			if c.killed {
				r.relay.MustStart(t)
				r.gaveUp(5, "belongs to a new cluster", "--accept-gap")
				r.again("--accept-gap")
			} else {
				r.relay.MustStart(t)
			}
			r.relay.MustAwait(t, 20*time.Second, "has a new system identifier")
			r.settled(20 * time.Second)
			r.write(later, 300)
			r.settled(20 * time.Second)
			r.wantStored(later)
			r.compareAfterRestore(ws, later)
		})
	}
}

// Messages that were consumed or purged after the last checkpoint could not be
// counted off on another timeline, so a relay that lives writes one when its server dies.
func TestFailoverWithTheMessagesGone(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--status-interval", "1h"}})
	old := r.pg
	standby := old.Standby(t, "standby", true, nil)
	r.relay.Args = append(r.relay.Args, "--dsn", bothHosts(old, standby))
	r.relay.MustStart(t)
	ws := harness.NewWriters(harness.Workload{DSN: bothHosts(old, standby), Plain: true, Seed: 15})
	r.write(ws, 500)
	r.stored(ws.Diary.Committed(), 20*time.Second)
	all := r.read()
	st, err := r.js.Stream(t.Context(), stream)
	must(t, err)
	must(t, st.Purge(t.Context()))
	end := query[string](r, "select pg_current_wal_lsn()::text")
	there := &rig{t: t, pg: standby}
	r.await(10*time.Second, "the standby has everything", func() bool {
		return query[bool](there, "select pg_last_wal_replay_lsn() >= $1::pg_lsn", end)
	})
	must(t, old.Kill())
	standby.Promote(t)
	r.pg = standby
	r.write(ws, 300)
	r.stored(ws.Diary.Committed()-len(all), 20*time.Second)
	res := harness.Compare(ws.Diary, append(all, r.read()...))
	t.Log(res)
	if !res.OK() {
		t.Error("stream and table disagree")
	}
}
