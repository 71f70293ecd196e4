package slotmgr

import (
	"context"
	"errors"
	"regexp"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// Unread is a transaction that the server cannot decode. Each read of the slot ends with
// the same error at every try, until the slot is advanced past it.
type Unread struct {
	Change event.LSN // of the change that fails
	Commit event.LSN // begin of the commit record
	End    event.LSN // of the commit record
	Err    error     // of the server
}

const (
	unreadLimit = 50      // transactions that one read goes past: each is looked for by repeated reads
	gallopFrom  = 1 << 10 // bytes of WAL
	recordAlign = 8       // MAXALIGN, where records begin
)

// associated finds the LSN that the server names in the context of an error of an output
// plugin (output_plugin_error_callback in logical.c). The words around it
// are in the server's language; it is the last one.
var associated = regexp.MustCompile(`\b([0-9A-F]{1,8}/[0-9A-F]{1,8})\b`)

// FailedAt is the LSN of the change that the server could not decode, 0 when
// err is none of that kind.
func FailedAt(err error) event.LSN {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return 0
	}
	all := associated.FindAllString(pg.Where, -1)
	if len(all) == 0 {
		return 0
	}
	at, err := event.ParseLSN(all[len(all)-1])
	if err != nil {
		return 0
	}
	return at
}

// locate finds the transaction whose decoding failed with cause: reads that end before
// its commit succeed, and those that go further fail (a read ends behind the first record that
// ends at upto_lsn or later). before is the end of the record in front of the commit.
func locate(ctx context.Context, conn *pgx.Conn, name string, o PeekOptions, cause error, renew func() error) (u Unread, before event.LSN, found bool, err error) {
	u = Unread{Change: FailedAt(cause), Err: cause}
	if u.Change == 0 {
		return u, 0, false, nil
	}
	var end, page, segment int64
	if err := conn.QueryRow(ctx, "select (("+walFlushed+") - '0/0')::int8, current_setting('wal_block_size')::int8, pg_size_bytes(current_setting('wal_segment_size'))").
		Scan(&end, &page, &segment); err != nil {
		return u, 0, false, err
	}
	o.Changes = 0
	nothing := func(event.LSN, []byte) error { return nil }
	good := func(upTo event.LSN) bool {
		o.UpTo = upTo
		_, e := peek(ctx, conn, name, o, nothing)
		switch {
		case e == nil:
			return true
		case sqlstate(e) == "":
			err = e
		default:
			err = renew()
		}
		return false
	}
	lo := (u.Change - min(u.Change-1, longHeader+longHeader)) &^ (recordAlign - 1) // before the commit, also where the commit is what fails
	hi := lo
	for step := event.LSN(gallopFrom); good(hi); step *= 2 {
		lo, hi = hi, hi+step
		if hi > event.LSN(end)+event.LSN(page) {
			return u, 0, false, err // it succeeds now
		}
	}
	for err == nil && hi-lo > recordAlign {
		if mid := (lo + (hi-lo)/2) &^ (recordAlign - 1); good(mid) {
			lo = mid
		} else {
			hi = mid
		}
	}
	if err != nil || hi == lo {
		return u, 0, false, err
	}
	u.Commit = lo
	switch { // the record begins behind the header of the next page
	case lo%event.LSN(segment) == 0:
		u.Commit += longHeader
	case lo%event.LSN(page) == 0:
		u.Commit += shortHeader
	}
	return u, lo, true, nil
}

// peekAll is peek that goes on behind what the server cannot decode. It moves the temporary
// copy of the slot. An error drops that (PostgresMain calls ReplicationSlotCleanup),
// so another is made.
func peekAll(ctx context.Context, conn *pgx.Conn, slot Slot, name string, o PeekOptions, each func(event.LSN, []byte) error) (int, error) {
	n := 0
	from := event.LSN(0)
	renew := func() error {
		if _, err := conn.Exec(ctx, "select pg_copy_logical_replication_slot($1, $2, true)", slot.Name, name); err != nil || from == 0 {
			return err
		}
		_, err := conn.Exec(ctx, "select pg_replication_slot_advance($1, $2::pg_lsn)", name, from.String())
		return err
	}
	for range unreadLimit {
		k, err := peek(ctx, conn, name, o, each)
		if sqlstate(err) == "" || ctx.Err() != nil {
			return n + k, err
		}
		if err := renew(); err != nil {
			return n, err
		}
		u, before, found, lookErr := locate(ctx, conn, name, o, err, renew)
		if !found || lookErr != nil {
			return n, err
		}
		rest := o
		rest.UpTo, rest.Changes = before, 0
		k, err = peek(ctx, conn, name, rest, each)
		if n += k; err != nil {
			return n, err
		}
		if o.Changes > 0 && k >= o.Changes {
			return n, nil
		}
		if u.End, err = skipTo(ctx, conn, name, u.Commit+recordAlign, o.Plugin); err != nil {
			return n, err
		}
		from = u.End
		if err := o.Unread(u); err != nil {
			return n, err
		}
		if o.Changes > 0 {
			o.Changes = max(o.Changes-k-1, 1)
			n++
		}
	}
	k, err := peek(ctx, conn, name, o, each)
	return n + k, err
}
