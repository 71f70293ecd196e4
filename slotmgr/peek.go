package slotmgr

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// PeekOptions says what to read of a slot.
type PeekOptions struct {
	Slot string

	// Plugin are the options of the plugin, names and values in turn.
	Plugin []string

	// UpTo ends the read: transactions whose commit record begins there or later
	// may be left out. Zero reads to the end of the log.
	UpTo event.LSN

	// Changes ends the read at the end of the transaction in which so many
	// changes are reached; zero does not.
	Changes int

	// Unread, when set, is called for a transaction that the server cannot decode, in
	// its place, and the read goes on behind it. Without a free slot, and when nil, such a
	// transaction ends the read.
	Unread func(Unread) error
}

// Peek calls each with every change that the slot would send next, in order,
// and returns how many there were. It consumes nothing, and works while a relay
// reads the slot: it reads a temporary copy. Data is valid during the call.
//
// It blocks until the server has decoded everything that was asked for, which
// it does before the first call. An error of each ends the read and is returned.
func Peek(ctx context.Context, conn *pgx.Conn, o PeekOptions, each func(lsn event.LSN, data []byte) error) (n int, err error) {
	slot, err := Inspect(ctx, conn, o.Slot)
	if err != nil {
		return 0, err
	}
	var database string
	if err := conn.QueryRow(ctx, "select current_database()::text").Scan(&database); err != nil {
		return 0, sqlFailure(conn, err, "read the name of the database")
	}
	if err := unfit(slot, database, nil); err != nil {
		return 0, err
	}
	name, err := duplicate(ctx, conn, slot)
	if err != nil {
		return 0, err
	}
	if name != slot.Name {
		defer dropCopy(ctx, conn, name)
	}
	if o.Unread != nil && name != slot.Name {
		n, err = peekAll(ctx, conn, slot, name, o, each)
	} else {
		n, err = peek(ctx, conn, name, o, each)
	}
	switch at := FailedAt(err); {
	case sqlstate(err) == codeUndefinedObject:
		return n, event.Fail(event.Precondition, "the publication has to exist before the change: make it with walrelay init --apply, then skip what was committed before with walrelay slot advance --blind --to-now",
			"peek slot %q: %w", o.Slot, err)
	case at != 0:
		return n, event.Fail(event.Precondition, fmt.Sprintf("walrelay slot advance %s --blind --to-now skips everything that is committed now; with one more of max_replication_slots free, slot peek and slot advance read around it", o.Slot),
			"peek slot %q: the change at %s cannot be decoded: %w", o.Slot, at, err)
	case sqlstate(err) != "":
		return n, sqlFailure(conn, err, fmt.Sprintf("peek slot %q", o.Slot))
	}
	return n, err
}

// duplicate copies the slot to a temporary one and returns its name. Without a
// free slot, one that nobody reads is as good itself: to peek does not move it.
func duplicate(ctx context.Context, conn *pgx.Conn, slot Slot) (string, error) {
	name := fmt.Sprintf("walrelay_peek_%d", conn.PgConn().PID())
	_, err := conn.Exec(ctx, "select pg_copy_logical_replication_slot($1, $2, true)", slot.Name, name)
	switch {
	case err == nil:
		return name, nil
	case sqlstate(err) == codeLimitExceeded && !slot.Active:
		return slot.Name, nil
	}
	return "", sqlFailure(conn, err, fmt.Sprintf("copy slot %q to a temporary one", slot.Name))
}

// peek reads the slot in a transaction of its own, where the settings fix the
// text form of values, which those of the role would otherwise change.
func peek(ctx context.Context, conn *pgx.Conn, name string, o PeekOptions, each func(event.LSN, []byte) error) (n int, err error) {
	args := []any{name, nil, nil}
	if o.UpTo > 0 {
		args[1] = o.UpTo.String()
	}
	if o.Changes > 0 {
		args[2] = o.Changes
	}
	var options strings.Builder
	for _, v := range o.Plugin {
		args = append(args, v)
		fmt.Fprintf(&options, ", $%d", len(args))
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		for _, setting := range []string{
			"client_encoding = '" + clientEncoding(conn, o.Plugin) + "'", "datestyle = 'ISO'", "intervalstyle = 'postgres'", "extra_float_digits = 3",
			"timezone = 'UTC'", "bytea_output = 'hex'", "statement_timeout = 0",
		} {
			if _, err := tx.Exec(ctx, "set local "+setting); err != nil {
				return err
			}
		}
		rows, err := tx.Query(ctx, `select (lsn - '0/0')::int8, data
			from pg_logical_slot_peek_binary_changes($1, $2::pg_lsn, $3::int`+options.String()+")", args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var lsn int64
			var data []byte
			if err := rows.Scan(&lsn, &data); err != nil {
				return err
			}
			n++
			if err := each(event.LSN(lsn), data); err != nil {
				return err
			}
		}
		return rows.Err()
	})
	return n, err
}

// Advance moves the confirmed flush LSN of a slot that nobody reads to an LSN,
// so that nothing is sent of the transactions whose commit record begins before
// it. It returns where the slot is then. It blocks until the server has read
// the log up to there.
//
// The server writes the new place down at its next checkpoint: when it crashes
// before, the slot is back where it was.
func Advance(ctx context.Context, conn *pgx.Conn, name string, to event.LSN) (event.LSN, error) {
	slot, err := Advanceable(ctx, conn, name)
	if err != nil {
		return 0, err
	}
	if to < slot.ConfirmedFlush {
		return 0, event.Fail(event.Precondition, "name a later LSN", "slot %q is confirmed up to %s and cannot go back to %s", name, slot.ConfirmedFlush, to)
	}
	var end int64
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "set local statement_timeout = 0"); err != nil {
			return err
		}
		return tx.QueryRow(ctx, "select (end_lsn - '0/0')::int8 from pg_replication_slot_advance($1, $2::pg_lsn)", name, to.String()).Scan(&end)
	})
	if sqlstate(err) == codeInUse { // taken since it was read
		if slot, err := Inspect(ctx, conn, name); err != nil || slot.Active {
			return 0, inUse(slot)
		}
	}
	if err != nil {
		return 0, sqlFailure(conn, err, fmt.Sprintf("advance slot %q to %s", name, to))
	}
	return event.LSN(end), nil
}

// Advanceable reads a slot and fails when it cannot be advanced: it is missing,
// lost, of another kind or database, or in use.
func Advanceable(ctx context.Context, conn *pgx.Conn, name string) (Slot, error) {
	slot, err := Inspect(ctx, conn, name)
	if err != nil {
		return Slot{}, err
	}
	var database string
	if err := conn.QueryRow(ctx, "select current_database()::text").Scan(&database); err != nil {
		return Slot{}, sqlFailure(conn, err, "read the name of the database")
	}
	if err := unfit(slot, database, nil); err != nil {
		return Slot{}, err
	}
	if slot.Active {
		return Slot{}, inUse(slot)
	}
	return slot, nil
}
