package slotmgr

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Horizon divides the transactions of a server into those whose commits lie
// before a place in the log, and others.
type Horizon struct {
	XID uint64    // of 64 bits: transactions with a lower one, and their subtransactions, had ended
	LSN event.LSN // behind all their commits

	SystemID string
	Database string
	Timeline uint32 // of the log at that place
}

// LookAtHorizon takes the horizon of now. The connection must have no
// transaction open, and be one to a primary.
//
// The list of a pg_snapshot leaves subtransactions out (documentation, "Transaction
// ID and Snapshot Information Functions"), so that pg_visible_in_snapshot takes rows of an open
// transaction's savepoint for committed ones. Its xmin has no such hole: a
// subtransaction gets its xid after its parent has one (AssignTransactionId).
//
// A transaction leaves the snapshots after its commit record was written
// (CommitTransaction: RecordTransactionCommit, then ProcArrayEndTransaction), so
// the end of the log, read in a second statement, lies behind the records of all. It is
// the insert LSN, since a commit that is asynchronous is visible before it is flushed.
func LookAtHorizon(ctx context.Context, conn *pgx.Conn) (Horizon, error) {
	var h Horizon
	fail := func(err error) (Horizon, error) {
		if sqlstate(err) == codeNotInState {
			return h, event.Fail(event.Precondition, "connect to the primary", "look at the end of the log: %w", err)
		}
		return h, sqlFailure(conn, err, "look at the end of the log")
	}
	var xid int64
	if err := conn.QueryRow(ctx, "select pg_snapshot_xmin(pg_current_snapshot())::text::int8").Scan(&xid); err != nil {
		return fail(err)
	}
	var lsn, page, segment int64
	err := conn.QueryRow(ctx, `
select (l.lsn - '0/0')::int8, current_setting('wal_block_size')::int8, pg_size_bytes(current_setting('wal_segment_size')),
	('x' || substr(pg_walfile_name(l.lsn), 1, 8))::bit(32)::int8, current_database()::text,
	(select system_identifier::text from pg_control_system())
from (select pg_current_wal_insert_lsn() as lsn) l`).Scan(&lsn, &page, &segment, &h.Timeline, &h.Database, &h.SystemID)
	if err != nil {
		return fail(err)
	}
	h.XID, h.LSN = uint64(xid), flushable(event.LSN(lsn), event.LSN(page), event.LSN(segment))
	return h, nil
}

// Sizes of the headers of the log's pages: SizeOfXLogShortPHD, and
// SizeOfXLogLongPHD on the first page of a segment.
const (
	shortHeader = 24
	longHeader  = 40
)

// flushable is the end of the last record. At the beginning of a page the insert
// LSN is behind the page's header (XLogBytePosToRecPtr), which nobody writes
// before there is a record: the log of an idle server is never flushed that far.
func flushable(lsn, page, segment event.LSN) event.LSN {
	switch {
	case lsn%segment == longHeader:
		return lsn - longHeader
	case lsn%page == shortHeader && lsn%segment != shortHeader:
		return lsn - shortHeader
	}
	return lsn
}

// LookAtMoment takes the moment of now.
func LookAtMoment(ctx context.Context, conn *pgx.Conn) (event.Mark, error) {
	var xid int64
	var m event.Mark
	err := conn.QueryRow(ctx, "select pg_snapshot_xmax(pg_current_snapshot())::text::int8, clock_timestamp()").Scan(&xid, &m.Time)
	if err != nil {
		return m, sqlFailure(conn, err, "look at the clock")
	}
	m.XID, m.Time = uint64(xid), m.Time.UTC().Round(time.Microsecond)
	return m, nil
}

// Places reads the slots of those names in the order given. One that is missing, lost or
// not of the connection's database is a failure: it will never be further.
func Places(ctx context.Context, conn *pgx.Conn, names []string) ([]Slot, error) {
	var database string
	if err := conn.QueryRow(ctx, "select current_database()::text").Scan(&database); err != nil {
		return nil, sqlFailure(conn, err, "read the name of the database")
	}
	all := make([]Slot, 0, len(names))
	for _, name := range names {
		s, err := Inspect(ctx, conn, name)
		if err != nil {
			return nil, err
		}
		switch {
		case s.Lost():
			return nil, event.Fail(event.Lost, recoverCommand(name), "slot %q is lost: %s", name, s.LostReason())
		case s.Plugin == "" || s.Database != database:
			return nil, event.Fail(event.Precondition, "name logical slots of the database of the outbox", "slot %q is not a logical slot of database %q", name, database)
		}
		all = append(all, s)
	}
	return all, nil
}

// Others lists the logical slots of the connection's database beside those of
// the names. Whether they send a table cannot be seen: publications are
// chosen by whoever reads them.
func Others(ctx context.Context, conn *pgx.Conn, names []string) ([]string, error) {
	rows, err := conn.Query(ctx, `select slot_name::text from pg_replication_slots
where database = current_database() and not temporary and slot_name::text <> all($1) order by 1`, names)
	if err != nil {
		return nil, sqlFailure(conn, err, "list slots")
	}
	others, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("list slots: %w", err)
	}
	return others, nil
}
