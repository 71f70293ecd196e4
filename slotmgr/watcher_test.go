package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// watched starts AwaitShutdown and returns its result once it comes.
func watched(t *testing.T, w *Watcher) <-chan error {
	t.Helper()
	ctx := within(t, time.Minute)
	done := make(chan error, 1)
	go func() { done <- w.AwaitShutdown(ctx) }()
	return done
}

// watcherPID waits for the watcher's idle connection, other than the one before.
func watcherPID(t *testing.T, conn *pgx.Conn, before int) (pid int) {
	t.Helper()
	until(t, "watcher is connected", func() bool {
		err := conn.QueryRow(t.Context(), `select pid from pg_stat_activity
			where application_name = 'watcher' and state = 'idle' and query like '%postmaster%' and pid <> $1`, before).Scan(&pid)
		return err == nil
	})
	return pid
}

func watcherOf(t *testing.T, pg *harness.Postgres, slot string) *Watcher {
	t.Helper()
	cfg := config(t, pg.DSN("postgres"))
	cfg.RuntimeParams["application_name"] = "watcher"
	return NewWatcher(cfg, slot)
}

func TestWatcherSeesShutdownAndNotALostConnection(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, "create publication walrelay for table outbox")
	conn := connect(t, pg.DSN("postgres"))
	slot := mustCreate(t, conn, CreateOptions{Name: "orders"})
	w := watcherOf(t, pg, "orders")
	done := watched(t, w)

	pid := watcherPID(t, conn, 0)
	for range 3 {
		if _, err := conn.Exec(t.Context(), "select pg_terminate_backend($1)", pid); err != nil {
			t.Fatal(err)
		}
		pid = watcherPID(t, conn, pid)
	}
	select {
	case err := <-done:
		t.Fatalf("a terminated connection counts as a shutdown: %v", err)
	default:
	}

	// Questions are answered while the watcher is blocked in its read.
	if lsn, err := w.Confirmed(within(t, 5*time.Second), conn); err != nil || lsn != slot.ConfirmedFlush {
		t.Errorf("confirmed: got %s, %v, want %s", lsn, err, slot.ConfirmedFlush)
	}

	// A walsender whose client reads nothing keeps the server from stopping; the watcher must hear of it all the same.
	holder := hold(t, pg, "orders", "walrelay")
	stopped := make(chan error, 1)
	go func() {
		_, err := pg.Stop(harness.Fast, 20*time.Second)
		stopped <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("got %v, want nil", err)
		}
	case <-time.After(time.Second):
		t.Error("the shutdown was not seen within a second")
	}
	_ = holder.Close(t.Context())
	if err := <-stopped; err != nil {
		t.Error(err)
	}

	// Nobody listens now.
	if err := w.AwaitShutdown(within(t, 5*time.Second)); err != nil {
		t.Errorf("server down: got %v, want nil", err)
	}
	if _, err := w.Confirmed(within(t, 5*time.Second), conn); event.ClassOf(err) != event.Transient || err == nil {
		t.Errorf("server down: got %v, want a transient failure", err)
	}
	if _, _, err := w.Sent(within(t, 5*time.Second)); event.ClassOf(err) != event.Transient || event.HintOf(err) == "" {
		t.Errorf("server down: got %v, want a transient failure with a hint", err)
	}
	cause := io.ErrUnexpectedEOF
	if err := w.Diagnose(within(t, 5*time.Second), cause); err != cause { //nolint:errorlint // it must be the very same
		t.Errorf("server down: got %v, want the error as it was", err)
	}
}

func TestWatcherDoesNotHoldUpASmartShutdown(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	conn := connect(t, pg.DSN("postgres"))
	w := watcherOf(t, pg, "orders")
	w.probe = 50 * time.Millisecond
	done := watched(t, w)
	watcherPID(t, conn, 0)
	hangUp(conn)
	if _, err := pg.Stop(harness.Smart, 10*time.Second); err != nil {
		t.Error(err)
	}
	if err := <-done; err != nil {
		t.Errorf("got %v, want nil", err)
	}
}

func TestWatcherSeesACrash(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	done := watched(t, watcherOf(t, pg, "orders"))
	watcherPID(t, connect(t, pg.DSN("postgres")), 0)
	if err := pg.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-done:
		if err != nil {
			t.Errorf("got %v, want nil", err)
		}
	case <-time.After(5 * time.Second):
		t.Error("the crash was not seen")
	}
}

func TestWatcherEndsWithItsContext(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	ctx, cancel := context.WithCancel(within(t, 30*time.Second))
	done := make(chan error, 1)
	go func() { done <- watcherOf(t, pg, "orders").AwaitShutdown(ctx) }()
	conn := connect(t, pg.DSN("postgres"))
	pid := watcherPID(t, conn, 0)
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
	until(t, "the connection is closed", func() bool {
		var n int
		err := conn.QueryRow(t.Context(), "select count(*) from pg_stat_activity where pid = $1", pid).Scan(&n)
		return err == nil && n == 0
	})
}

func TestDiagnoseReadsTheSlot(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, "create publication walrelay for table outbox", "create database other",
		"select pg_create_physical_replication_slot('physical')")
	conn := connect(t, pg.DSN("postgres"))
	mustCreate(t, conn, CreateOptions{Name: "orders"})
	mustCreate(t, connect(t, pg.DSN("other")), CreateOptions{Name: "elsewhere"})
	ctx := within(t, 30*time.Second)
	state := func(code string) error {
		return fmt.Errorf("start replication: %w", &pgconn.PgError{Severity: "ERROR", Code: code, Message: "m"})
	}

	// Nothing wrong: the error comes back as it was.
	w := watcherOf(t, pg, "orders")
	for _, cause := range []error{io.EOF, state(codeAdminShutdown), state(codeNotInState), state(codeInUse), event.Fail(event.Halted, "h", "poison"), context.Canceled} {
		if got := w.Diagnose(ctx, cause); got != cause { //nolint:errorlint // it must be the very same
			t.Errorf("got %v, want %v", got, cause)
		}
	}
	if got := w.Diagnose(ctx, nil); got != nil {
		t.Errorf("got %v, want nil", got)
	}

	diagnose := func(slot string, cause error, class event.Class, text, hint string) {
		t.Helper()
		err := watcherOf(t, pg, slot).Diagnose(ctx, cause)
		wantFailure(t, err, class, text, hint)
		if !errors.Is(err, cause) {
			t.Errorf("%v does not wrap %v", err, cause)
		}
	}
	diagnose("never", state(codeUndefinedObject), event.Precondition, `"never" does not exist`, "walrelay slot create never --publication")
	diagnose("physical", state(codeNotInState), event.Precondition, "physical slot", "slot create")
	diagnose("elsewhere", state(codeNotInState), event.Precondition, `database "other"`, `connect to database "other"`)

	holder := hold(t, pg, "orders", "walrelay")
	diagnose("orders", state(codeInUse), event.Transient, fmt.Sprintf(`pid %d (application "holder", client 127.0.0.1)`, holder.PID()), "takes over")
	if got := w.Diagnose(ctx, io.EOF); got != io.EOF { //nolint:errorlint // it must be the very same
		t.Errorf("got %v, want %v", got, io.EOF)
	}
	if err := holder.Close(ctx); err != nil {
		t.Fatal(err)
	}
	released(t, conn, "orders")

	// w has seen the slot, so it is lost and not forgotten.
	if err := Drop(ctx, conn, "orders"); err != nil {
		t.Fatal(err)
	}
	cause := state(codeUndefinedObject)
	err := w.Diagnose(ctx, cause)
	wantFailure(t, err, event.Lost, `slot "orders" is gone`, "walrelay slot recover orders")
	if !errors.Is(err, cause) {
		t.Errorf("%v does not wrap %v", err, cause)
	}
	_, err = w.Confirmed(ctx, conn)
	wantFailure(t, err, event.Lost, `slot "orders" is gone`, "walrelay slot recover orders")
}

func TestLostSlotIsTold(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{
		"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB",
	}})
	pg.MustExec(t, outboxTable, "create publication walrelay for table outbox")
	conn := connect(t, pg.DSN("postgres"))
	mustCreate(t, conn, CreateOptions{Name: "orders"})
	w := watcherOf(t, pg, "orders")
	ctx := within(t, time.Minute)
	if _, err := w.Confirmed(ctx, conn); err != nil {
		t.Fatal(err)
	}

	for i := 0; ; i++ {
		for range 3 {
			pg.MustExec(t, "select pg_logical_emit_message(false, 'x', 'y')", "select pg_switch_wal()")
		}
		pg.MustExec(t, "checkpoint")
		slot, err := Inspect(ctx, conn, "orders")
		if err != nil {
			t.Fatal(err)
		}
		if slot.Lost() {
			if major(conn) >= 17 && (slot.InvalidationReason == nil || *slot.InvalidationReason != "wal_removed" || slot.InactiveSince == nil) {
				t.Errorf("unexpected %+v", slot)
			}
			break
		}
		if i == 10 {
			t.Fatalf("not lost: %+v", slot)
		}
	}

	cause := &pgconn.PgError{Code: codeNotInState}
	err := w.Diagnose(ctx, cause)
	wantFailure(t, err, event.Lost, "max_slot_wal_keep_size", "walrelay slot recover orders")
	if !errors.Is(err, cause) {
		t.Errorf("%v does not wrap %v", err, cause)
	}
	_, err = w.Confirmed(ctx, conn)
	wantFailure(t, err, event.Lost, "max_slot_wal_keep_size", "walrelay slot recover orders")
	_, _, err = Create(ctx, conn, CreateOptions{Name: "orders", IfNotExists: true})
	wantFailure(t, err, event.Lost, "max_slot_wal_keep_size", "walrelay slot recover orders")
	found, err := Preflight(ctx, conn, Want{Slot: "orders", Publications: []string{"missing"}})
	if err != nil {
		t.Fatal(err)
	}
	wantFailure(t, found.Err(), event.Lost, "max_slot_wal_keep_size", "walrelay slot recover orders")
	if lag, err := Sample(ctx, conn, "orders"); err != nil || !lag.Lost {
		t.Errorf("sample: got %+v, %v", lag, err)
	}
	if err := Drop(ctx, conn, "orders"); err != nil {
		t.Error(err)
	}
}
