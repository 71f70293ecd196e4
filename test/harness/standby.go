package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Standby makes and starts a standby of pg that ends with the test, and streams
// from it over a physical slot of the given name, which is created. keepSlots
// leaves it the logical slots of pg as they are now, which no base backup does.
// settings are added to those of pg.
func (pg *Postgres) Standby(t testing.TB, slot string, keepSlots bool, settings map[string]string) *Postgres {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pg.MustExec(t, "SELECT pg_create_physical_replication_slot('"+slot+"', true)")
	s := pg.Copy(t)
	if !keepSlots {
		if err := s.dropSlots(); err != nil {
			t.Fatalf("configure standby: %v", err)
		}
	}
	set := map[string]string{
		"primary_conninfo":            fmt.Sprintf("host=127.0.0.1 port=%d user=postgres dbname=postgres application_name=%s", pg.Port, slot),
		"primary_slot_name":           slot,
		"hot_standby_feedback":        "on",
		"wal_retrieve_retry_interval": "100ms",
	}
	maps.Copy(set, settings)
	if err := s.Configure(set); err != nil {
		t.Fatalf("configure standby: %v", err)
	}
	if err := s.Signal("standby.signal"); err != nil {
		t.Fatalf("configure standby: %v", err)
	}
	if err := s.Start(ctx); err != nil {
		t.Fatalf("start standby: %v", err)
	}
	return s
}

// Copy makes another cluster of the data folder as it is, while pg runs or not,
// and does not start it. It has a port of its own and ends with the test. The slots are copied, too.
func (pg *Postgres) Copy(t testing.TB) *Postgres {
	t.Helper()
	dir, err := Folder("pg")
	if err != nil {
		t.Fatalf("%v", err)
	}
	c := &Postgres{Dir: dir, Bin: pg.Bin, opts: pg.opts, cred: pg.cred}
	c.opts.Settings = maps.Clone(pg.opts.Settings)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("postgres log, last lines:\n%s", tail(c.Log(), 40))
		}
		if err := c.Remove(); err != nil {
			t.Errorf("remove postgres: %v", err)
		}
	})
	if err := pg.backup(c.Data()); err != nil {
		t.Fatalf("copy postgres: %v", err)
	}
	if err := c.Configure(nil); err != nil {
		t.Fatalf("copy postgres: %v", err)
	}
	if err := c.giveAway(c.Dir); err != nil {
		t.Fatalf("copy postgres: %v", err)
	}
	return c
}

// backup copies the data folder; of a server that runs between
// pg_backup_start and pg_backup_stop, as "Making a Base Backup Using the Low
// Level API" of the manual has it.
func (pg *Postgres) backup(dst string) error {
	if !pg.Running() {
		return copyTree(pg.Data(), dst)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	c, err := pg.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	var major int
	if err := c.QueryRow(ctx, "SELECT current_setting('server_version_num')::int / 10000").Scan(&major); err != nil {
		return err
	}
	start, stop := "SELECT pg_backup_start('copy', true)", "SELECT labelfile FROM pg_backup_stop(false)"
	if major < 15 {
		start, stop = "SELECT pg_start_backup('copy', true, false)", "SELECT labelfile FROM pg_stop_backup(false, false)"
	}
	if _, err := c.Exec(ctx, start); err != nil {
		return err
	}
	// A file that goes or changes while it is copied is what the WAL makes good.
	// The WAL comes last, so that it reaches to where the copy ends.
	if err := copyLive(pg.Data(), dst, func(name string) bool { return name == "postmaster.pid" || name == "pg_wal" }); err != nil {
		return err
	}
	var label string
	if err := c.QueryRow(ctx, stop).Scan(&label); err != nil {
		return err
	}
	if err := copyLive(filepath.Join(pg.Data(), "pg_wal"), filepath.Join(dst, "pg_wal"), func(string) bool { return false }); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dst, "backup_label"), []byte(label), 0o600)
}

// copyLive copies a folder whose files come and go; skip leaves out names of its top.
func copyLive(src, dst string, skip func(name string) bool) error {
	return filepath.WalkDir(src, func(p string, d os.DirEntry, err error) error {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(src, p)
		if err != nil {
			return err
		}
		to := filepath.Join(dst, rel)
		switch {
		case rel != "." && filepath.Dir(rel) == "." && skip(rel):
			if d.IsDir() {
				return filepath.SkipDir
			}
			return nil
		case d.IsDir():
			return os.MkdirAll(to, 0o700)
		case !d.Type().IsRegular():
			return nil
		}
		err = copyFile(p, to, 0o600)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return err
	})
}

// dropSlots removes all slots from a data folder that no server uses.
func (pg *Postgres) dropSlots() error {
	dir := filepath.Join(pg.Data(), "pg_replslot")
	slots, err := os.ReadDir(dir)
	for _, s := range slots {
		err = errors.Join(err, os.RemoveAll(filepath.Join(dir, s.Name())))
	}
	return err
}

// Swap exchanges the data folder of a stopped server for that of another one,
// which must not run either.
func (pg *Postgres) Swap(other *Postgres) error {
	aside := filepath.Join(pg.Dir, "aside")
	for _, move := range [][2]string{{pg.Data(), aside}, {other.Data(), pg.Data()}, {aside, other.Data()}} {
		if err := os.Rename(move[0], move[1]); err != nil {
			return err
		}
	}
	return errors.Join(pg.configure(), other.configure())
}

// Configure changes settings for the next start.
func (pg *Postgres) Configure(settings map[string]string) error {
	set := map[string]string{}
	maps.Copy(set, pg.opts.Settings)
	maps.Copy(set, settings)
	pg.opts.Settings = set
	return pg.configure()
}

// Signal makes a file such as standby.signal or recovery.signal.
func (pg *Postgres) Signal(name string) error {
	name = filepath.Join(pg.Data(), name)
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		return err
	}
	return pg.giveAway(name)
}

// Promote makes a standby a primary and blocks until it is one.
func (pg *Postgres) Promote(t testing.TB) {
	t.Helper()
	pg.MustExec(t, "SELECT pg_promote(true, 30)")
}

// Gone is the outcome of an event that was committed on a server that is no
// more, and that its successor never had. It may be stored or not.
const Gone Outcome = 3

// Survive looks every event up in the table of a server that took over. Those
// that it has not are gone, and their number is returned. Events that were
// deleted in their own transaction must not be among them.
func (d *Diary) Survive(ctx context.Context, c *pgx.Conn, table string) (gone int, err error) {
	rows, err := c.Query(ctx, "SELECT id::text FROM "+table)
	if err != nil {
		return 0, fmt.Errorf("look up events: %w", err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return 0, fmt.Errorf("look up events: %w", err)
	}
	there := make(map[string]bool, len(ids))
	for _, id := range ids {
		there[id] = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, e := range d.entries {
		switch {
		case e.Outcome == Committed && !there[id]:
			e.Outcome = Gone
			d.committed--
			gone++
		case e.Outcome == Unknown && there[id]:
			e.Outcome = Committed
			d.committed++
		case e.Outcome == Unknown:
			e.Outcome = Gone
		}
	}
	return gone, nil
}

// Has reports whether the writers know an event.
func (d *Diary) Has(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.entries[id] != nil
}
