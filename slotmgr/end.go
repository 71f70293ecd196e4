package slotmgr

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

const (
	endPatience = 5 * time.Second // for the flush of what is written
	endEvery    = 20 * time.Millisecond
)

// End is the end of the last record in the WAL, which a slot can be advanced to. It
// blocks until that is flushed, a moment mostly.
//
// It is not the flush position: that may lie within a record that crosses a page, and stays
// there as long as a transaction that has written is idle (XLogBackgroundFlush backs off
// to the last complete page). A slot that is advanced to there skips a logical message
// with that record, though its LSN, the record's end, lies behind.
func End(ctx context.Context, conn *pgx.Conn) (event.LSN, error) {
	fail := func(err error) (event.LSN, error) { return 0, sqlFailure(conn, err, "read the end of the WAL") }
	var standby bool
	var end, page, segment int64
	err := conn.QueryRow(ctx, `select r.standby,
	(case when r.standby then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end - '0/0')::int8,
	current_setting('wal_block_size')::int8, pg_size_bytes(current_setting('wal_segment_size'))
from (select pg_is_in_recovery() as standby) r`).Scan(&standby, &end, &page, &segment)
	if err != nil {
		return fail(err)
	}
	if standby {
		return event.LSN(end), nil // the end of a record (GetXLogReplayRecPtr)
	}
	at := flushable(event.LSN(end), event.LSN(page), event.LSN(segment))
	deadline := time.Now().Add(endPatience)
	for asked := false; ; {
		var flushed int64
		if err := conn.QueryRow(ctx, "select (pg_current_wal_flush_lsn() - '0/0')::int8").Scan(&flushed); err != nil {
			return fail(err)
		}
		switch {
		case event.LSN(flushed) >= at:
			return at, nil
		case time.Now().After(deadline):
			return 0, event.Fail(event.Transient, "is the server's disk full or slow? Try again", "the WAL is written up to %s, and flushed up to %s only", at, event.LSN(flushed))
		}
		if !asked { // the commit of a transaction with an id makes the WAL writer flush
			asked = true
			if _, err := conn.Exec(ctx, "select pg_current_xact_id()"); err != nil {
				return fail(fmt.Errorf("have it flushed: %w", err))
			}
		}
		select {
		case <-time.After(endEvery):
		case <-ctx.Done():
			return fail(ctx.Err())
		}
	}
}

// Boundary is the end of the record that an LSN lies within, or the LSN where one ends
// there. It reads a temporary copy of the slot up to there, which decodes nothing: what
// begins before the LSN is skipped (SnapBuildXactNeedsSkip), and the copy is then
// confirmed up to the end of the last record that was read (pg_logical_slot_get_changes_guts).
// Without a free slot the LSN is returned as it is. plugin is as in PeekOptions.
func Boundary(ctx context.Context, conn *pgx.Conn, slot Slot, at event.LSN, plugin []string) (event.LSN, error) {
	if at <= slot.ConfirmedFlush {
		return at, nil
	}
	name, err := duplicate(ctx, conn, slot)
	if err != nil || name == slot.Name {
		return at, err
	}
	defer dropCopy(ctx, conn, name)
	end, err := skipTo(ctx, conn, name, at, plugin)
	if err != nil {
		return 0, sqlFailure(conn, err, fmt.Sprintf("find the end of the record at %s", at))
	}
	return end, nil
}

// skipTo moves a temporary copy to the end of the record at an LSN and returns that.
func skipTo(ctx context.Context, conn *pgx.Conn, name string, at event.LSN, plugin []string) (event.LSN, error) {
	var end int64
	err := pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "set local statement_timeout = 0"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "select pg_replication_slot_advance($1, $2::pg_lsn)", name, at.String()); err != nil {
			return err
		}
		args := []any{name, at.String()}
		options := ""
		for _, v := range plugin {
			args = append(args, v)
			options += fmt.Sprintf(", $%d", len(args))
		}
		if _, err := tx.Exec(ctx, "select from pg_logical_slot_get_binary_changes($1, $2::pg_lsn, null"+options+")", args...); err != nil {
			return err
		}
		return tx.QueryRow(ctx, "select (confirmed_flush_lsn - '0/0')::int8 from pg_replication_slots where slot_name = $1", name).Scan(&end)
	})
	return event.LSN(end), err
}

// dropCopy drops a temporary copy, which would otherwise last as long as the session.
func dropCopy(ctx context.Context, conn *pgx.Conn, name string) {
	if !conn.IsClosed() {
		_, _ = conn.Exec(context.WithoutCancel(ctx), "select pg_drop_replication_slot($1)", name)
	}
}
