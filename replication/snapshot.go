package replication

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

const duplicateObject = "42710"

// ErrSnapshotTaken means that another session holds the temporary slot of that name.
var ErrSnapshotTaken = errors.New("temporary slot is in use")

// Snapshot is a temporary slot with the snapshot of the database at the place
// where it begins: what is visible in the one is not sent by the other, and the
// other way round. Both end with the connection.
//
// What a caller does, in order: import Name in another session with SET
// TRANSACTION SNAPSHOT, before any other call; read what it wants; Keep, when
// the slot is to stay; Close. It is not safe for concurrent use.
type Snapshot struct {
	// Name is for SET TRANSACTION SNAPSHOT.
	Name string

	slot   string
	pg     *pgconn.PgConn
	origin event.Origin
}

// TakeSnapshot connects and creates the temporary slot. cfg.Slot is the slot
// that Keep will make. It blocks until every write transaction that is
// open in any database has ended, or ctx does: the creation is then cancelled on
// the server, and no slot remains. A process that is killed leaves none either,
// half a second later.
//
// waiting, when set, is called in a goroutine of its own while the server creates
// the slot in the session pid; its ctx ends with that, and it has to return then.
func TakeSnapshot(ctx context.Context, cfg Config, temporary string, waiting func(ctx context.Context, pid uint32)) (*Snapshot, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	conf := cfg.session()
	pg, err := pgconn.ConnectConfig(ctx, conf)
	if err != nil {
		return nil, connectFailure(conf, err)
	}
	s := &Snapshot{slot: temporary, pg: pg}
	stream := &Stream{pg: pg}
	if err := stream.identify(ctx, cfg, conf); err != nil {
		s.Close()
		return nil, err
	}
	results, err := createTemporary(ctx, pg, temporary, waiting)
	if err != nil {
		by := holder(ctx, pg, temporary)
		s.Close()
		if ctx.Err() != nil {
			return nil, fmt.Errorf("create temporary slot %q: %w", temporary, ctx.Err())
		}
		doing := fmt.Sprintf("create temporary slot %q", temporary)
		var refused *pgconn.PgError
		switch {
		case errors.As(err, &refused) && refused.Code == duplicateObject:
			return nil, event.Fail(event.Transient, "another backfill or recovery is under way; this one takes over when it ends", "%s: %w%s: %w", doing, ErrSnapshotTaken, by, refused)
		case errors.As(err, &refused) && refused.Code == configurationLimit:
			return nil, event.Fail(event.Precondition, "raise max_replication_slots, or drop slots that nobody needs: a backfill needs one more while it lasts", "%s: %w", doing, refused)
		}
		return nil, startFailure(conf, temporary, doing, err)
	}
	at, err := event.ParseLSN(results.ConsistentPoint)
	if err != nil {
		s.Close()
		return nil, event.Fail(event.Unexpected, hintProtocol, "create temporary slot %q: %w", temporary, err)
	}
	s.Name, s.origin = results.SnapshotName, stream.origin
	s.origin.ConfirmedFlush = at
	s.origin.WALEnd = max(s.origin.WALEnd, at)
	return s, nil
}

const (
	cancelAgain = 500 * time.Millisecond
	giveUpAfter = 10 * time.Second // on a server that does not react to cancel
)

// createTemporary creates the slot and cancels that when ctx ends. pgconn would
// close the connection instead and leave the backend waiting, with the slot.
func createTemporary(ctx context.Context, pg *pgconn.PgConn, name string, waiting func(context.Context, uint32)) (pglogrepl.CreateReplicationSlotResult, error) {
	type outcome struct {
		result pglogrepl.CreateReplicationSlotResult
		err    error
	}
	work, end := context.WithCancel(context.WithoutCancel(ctx))
	var wait sync.WaitGroup
	defer wait.Wait()
	defer end()
	attended(work, pg)
	done := make(chan outcome, 1)
	go func() {
		// The grammar of 14; later versions take it, too (create_slot_legacy_opt_list).
		r, err := pglogrepl.CreateReplicationSlot(work, pg, quoteIdentifier(name), "pgoutput",
			pglogrepl.CreateReplicationSlotOptions{Temporary: true, Mode: pglogrepl.LogicalReplication, SnapshotAction: "EXPORT_SNAPSHOT"})
		done <- outcome{r, err}
	}()
	if waiting != nil {
		wait.Go(func() { waiting(work, pg.PID()) })
	}
	select {
	case o := <-done:
		return o.result, o.err
	case <-ctx.Done():
	}
	limit, stop := context.WithTimeout(work, giveUpAfter)
	defer stop()
	again := time.NewTicker(cancelAgain)
	defer again.Stop()
	for {
		_ = pg.CancelRequest(limit) // one that comes too early is lost; hence again
		select {
		case o := <-done: // a slot that came to be all the same ends with the session
			return o.result, errors.Join(ctx.Err(), o.err)
		case <-again.C:
		case <-limit.Done():
			_ = pg.Conn().Close() // safe while the other goroutine reads it
			return (<-done).result, ctx.Err()
		}
	}
}

// holder is " by " and the session that holds a slot; "" when that is not known.
func holder(ctx context.Context, pg *pgconn.PgConn, name string) string {
	if ctx.Err() != nil {
		return ""
	}
	results, err := pg.Exec(ctx, `SELECT format(' by pid %s (%s)', s.active_pid, a.application_name) FROM pg_catalog.pg_replication_slots s
		JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid WHERE s.slot_name = `+quoteLiteral(name)).ReadAll()
	if err != nil || len(results) != 1 || len(results[0].Rows) != 1 {
		return ""
	}
	return string(results[0].Rows[0][0])
}

// attended asks the server to end the session soon after its client is gone,
// also while a command waits for a lock. It is best effort: a server on a system
// that cannot report a closed connection refuses the setting. The last statement
// starts the timer: replication commands do not (start_xact_command).
func attended(ctx context.Context, pg *pgconn.PgConn) {
	for _, sql := range []string{
		"SET tcp_keepalives_idle = 30", "SET tcp_keepalives_interval = 10", "SET tcp_keepalives_count = 3", // for a client whose host is gone
		"SET client_connection_check_interval = '500ms'", "SELECT 1",
	} {
		_, _ = pg.Exec(ctx, sql).ReadAll()
	}
}

// Origin says which log the slot begins in; ConfirmedFlush is where.
func (s *Snapshot) Origin() event.Origin { return s.origin }

// Keep copies the temporary slot to one that stays, with the same beginning. It
// uses the connection that owns the temporary slot, so that it fails when that is gone.
func (s *Snapshot) Keep(ctx context.Context, name string) error {
	sql := fmt.Sprintf("SELECT pg_catalog.pg_copy_logical_replication_slot(%s, %s, false)", quoteLiteral(s.slot), quoteLiteral(name))
	if _, err := s.pg.Exec(ctx, sql).ReadAll(); err != nil {
		var refused *pgconn.PgError
		if errors.As(err, &refused) {
			switch refused.Code {
			case duplicateObject:
				return event.Fail(event.Precondition, fmt.Sprintf("somebody made it meanwhile: drop it with walrelay slot drop %s and start again; what is stored is not published again", name),
					"create slot %q: %w", name, refused)
			case configurationLimit:
				return event.Fail(event.Precondition, "raise max_replication_slots, or drop slots that nobody needs: a backfill needs one more while it lasts", "create slot %q: %w", name, refused)
			}
		}
		return fmt.Errorf("create slot %q: %w", name, err)
	}
	return nil
}

// Close ends the session, and with it the temporary slot.
func (s *Snapshot) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = s.pg.Close(ctx) // the session is over either way
}
