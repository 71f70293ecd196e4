package replication

import (
	"context"
	"errors"
	"fmt"
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
// open in any database has ended, or ctx does.
func TakeSnapshot(ctx context.Context, cfg Config, temporary string) (*Snapshot, error) {
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
	// The grammar of 14; later versions take it, too (create_slot_legacy_opt_list).
	results, err := pglogrepl.CreateReplicationSlot(ctx, pg, quoteIdentifier(temporary), "pgoutput",
		pglogrepl.CreateReplicationSlotOptions{Temporary: true, Mode: pglogrepl.LogicalReplication, SnapshotAction: "EXPORT_SNAPSHOT"})
	if err != nil {
		s.Close()
		doing := fmt.Sprintf("create temporary slot %q", temporary)
		var refused *pgconn.PgError
		switch {
		case errors.As(err, &refused) && refused.Code == duplicateObject:
			return nil, event.Fail(event.Transient, "another backfill is under way; this one takes over when it ends", "%s: %w: %w", doing, ErrSnapshotTaken, refused)
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
