package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// Watcher asks Postgres about one slot over ordinary connections. Its methods
// may be called at the same time: each but Confirmed opens and closes its own
// connection, so that a blocked read never stands in the way of a question.
type Watcher struct {
	cfg  *pgx.ConnConfig
	slot string

	// seen is set once this process has met the slot: a missing slot is then
	// a lost one, not one that was never made.
	seen atomic.Bool

	patience time.Duration // for one connection and its question
	probe    time.Duration // between looks whether new sessions are still admitted
}

const (
	diagnosePatience = 3 * time.Second
	firstPause       = 100 * time.Millisecond
	longestPause     = 5 * time.Second
)

// NewWatcher makes a Watcher of the slot. It opens nothing.
func NewWatcher(cfg *pgx.ConnConfig, slot string) *Watcher {
	cfg = cfg.Copy()
	delete(cfg.RuntimeParams, "replication")
	// One round trip a question, and nothing prepared that a pooler could lose.
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec
	return &Watcher{cfg: cfg, slot: slot, patience: 5 * time.Second, probe: 20 * time.Second}
}

// Confirmed returns the slot's confirmed flush LSN as the server has it now.
// It blocks for two questions over conn, five seconds at most. A slot
// that is missing, lost or of another kind is a failure.
func (w *Watcher) Confirmed(ctx context.Context, conn *pgx.Conn) (event.LSN, error) {
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	v, err := w.view(ctx, conn)
	if err != nil {
		return 0, fmt.Errorf("read slot %q: %w", w.slot, err)
	}
	if err := w.judge(v, nil); err != nil {
		return 0, err
	}
	return v.slot.ConfirmedFlush, nil
}

// Sent returns how far the server has sent the log to the session that holds the
// slot, and whether one does. The LSN is 0 when the role may not see it, which
// takes pg_read_all_stats. It blocks for a connection and one question.
func (w *Watcher) Sent(ctx context.Context) (sent event.LSN, held bool, err error) {
	conn, err := Connect(ctx, w.cfg)
	if err != nil {
		return 0, false, err
	}
	defer hangUp(conn)
	var text string
	err = conn.QueryRow(ctx, `select s.active, coalesce(r.sent_lsn, '0/0')::text
		from pg_replication_slots s left join pg_stat_replication r on r.pid = s.active_pid
		where s.slot_name = $1`, w.slot).Scan(&held, &text)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("read how far slot %q is sent: %w", w.slot, err)
	}
	sent, err = event.ParseLSN(text)
	return sent, held, err
}

// view is what one look at the server shows.
type view struct {
	slot     Slot
	exists   bool
	database string
	standby  bool
}

func (w *Watcher) look(ctx context.Context) (view, error) {
	conn, err := Connect(ctx, w.cfg)
	if err != nil {
		return view{}, err
	}
	defer hangUp(conn)
	return w.view(ctx, conn)
}

func (w *Watcher) view(ctx context.Context, conn *pgx.Conn) (view, error) {
	var v view
	if err := conn.QueryRow(ctx, "select current_database()::text, pg_is_in_recovery()").Scan(&v.database, &v.standby); err != nil {
		return view{}, err
	}
	var err error
	v.slot, v.exists, err = find(ctx, conn, w.slot)
	return v, err
}

// AwaitShutdown blocks until the server is seen to shut down, crash or restart,
// and returns nil then; it returns ctx's error when ctx ends.
//
// It keeps one idle connection. A fast shutdown ends that connection with 57P01
// within milliseconds, while a replication connection is kept until its client
// has read everything (PostmasterStateMachine in postmaster.c). An ended
// connection alone may also be an administrator's doing, so a new one decides:
// when it works and reaches the same postmaster, watching goes on.
//
// A smart shutdown waits for ordinary sessions, this one included, and tells
// them nothing. Only a new session is refused, so one is tried every 20 seconds.
func (w *Watcher) AwaitShutdown(ctx context.Context) error {
	var born time.Time // start of the postmaster that is watched
	var pause time.Duration
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
		from := time.Now()
		if w.watch(ctx, &born) {
			return nil
		}
		// A connection that lasted is replaced at once; those that end or
		// fail in short order wait longer and longer.
		pause = min(max(2*pause, firstPause), longestPause)
		if time.Since(from) > longestPause {
			pause = 0
		}
	}
}

// watch opens a connection and reads it until it ends. It reports whether the
// postmaster that started at born is on its way or gone.
func (w *Watcher) watch(ctx context.Context, born *time.Time) bool {
	conn, started, err := w.listen(ctx)
	if err != nil {
		return ctx.Err() == nil && leaving(err)
	}
	defer hangUp(conn)
	if !born.IsZero() && !started.Equal(*born) {
		return true // restarted, or another server took over
	}
	*born = started
	return w.hold(ctx, conn)
}

// listen opens the connection that will hear of the shutdown.
func (w *Watcher) listen(ctx context.Context) (*pgx.Conn, time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, w.cfg)
	if err != nil {
		return nil, time.Time{}, err
	}
	var started time.Time
	var exists bool
	err = conn.QueryRow(ctx, `select pg_postmaster_start_time(), exists (select from pg_replication_slots where slot_name = $1)`, w.slot).Scan(&started, &exists)
	if err != nil {
		hangUp(conn)
		return nil, time.Time{}, err
	}
	if exists {
		w.seen.Store(true)
	}
	return conn, started, nil
}

// hold reads the idle connection until it ends, which returns false, or until
// the server no longer admits sessions, which returns true.
func (w *Watcher) hold(ctx context.Context, conn *pgx.Conn) bool {
	for {
		wait, cancel := context.WithTimeout(ctx, w.probe)
		_, err := conn.WaitForNotification(wait)
		cancel()
		if ctx.Err() != nil || conn.IsClosed() {
			return false
		}
		if err != nil && w.refused(ctx) {
			return true
		}
	}
}

// refused tries whether the server admits a session.
func (w *Watcher) refused(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, w.patience)
	defer cancel()
	conn, err := pgx.ConnectConfig(ctx, w.cfg)
	if err != nil {
		return leaving(err)
	}
	hangUp(conn)
	return false
}

// leaving reports whether a refused connection means that the server is gone or
// on its way: 57P03 is all that a postmaster says then, and without one nobody
// listens on the port or the socket file is gone.
func leaving(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code == codeCannotConnectNow
	}
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ENOENT)
}
