package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// CreateOptions says which slot to create.
type CreateOptions struct {
	Name         string
	Publications []string // must exist; they are not stored in the slot
	Failover     bool     // synchronised to standbys; needs Postgres 17
	Temporary    bool     // dropped when the connection ends
	IfNotExists  bool     // a slot that fits is kept as it is

	// Timeout limits the wait for open transactions; zero does not.
	Timeout time.Duration

	// Waiting, when set, is told which transactions the creation waits for,
	// once they are known and whenever they change. It is called by the
	// goroutine that called Create.
	Waiting func([]Blocker)
}

const (
	lookEvery   = 250 * time.Millisecond // for blockers
	cancelAgain = 500 * time.Millisecond
	giveUpAfter = 10 * time.Second // on a server that does not react to cancel
)

// Create creates a logical slot for the plugin pgoutput and reports whether it
// did: with IfNotExists a slot that fits is returned as it is.
//
// It blocks until every write transaction that is open in any database has
// ended. When ctx or the timeout ends first, the creation is cancelled on the
// server and no slot remains.
func Create(ctx context.Context, conn *pgx.Conn, o CreateOptions) (slot Slot, created bool, err error) {
	if err := CheckName(o.Name); err != nil {
		return Slot{}, false, err
	}
	if o.Failover && major(conn) < 17 {
		return Slot{}, false, event.Fail(event.Usage, "leave --failover away", "a failover slot needs Postgres 17, this is %d", major(conn))
	}
	if o.Failover && o.Temporary {
		return Slot{}, false, event.Fail(event.Usage, "choose one of --failover and --temporary", "a temporary slot cannot be a failover slot")
	}
	if err := creatable(ctx, conn, o.Publications); err != nil {
		return Slot{}, false, err
	}

	slot, exists, err := find(ctx, conn, o.Name)
	if err != nil {
		return Slot{}, false, sqlFailure(conn, err, fmt.Sprintf("read slot %q", o.Name))
	}
	if exists {
		return keep(ctx, conn, o, slot)
	}
	err = createOrCancel(ctx, conn, o)
	if sqlstate(err) == codeDuplicateObject {
		if slot, err = Inspect(ctx, conn, o.Name); err != nil {
			return Slot{}, false, err
		}
		return keep(ctx, conn, o, slot)
	}
	if err != nil {
		return Slot{}, false, err
	}
	slot, err = Inspect(ctx, conn, o.Name)
	return slot, err == nil, err
}

// CheckName reports what is wrong with the name of a slot, as a Usage failure.
// The rule is that of ReplicationSlotValidateName in slot.c.
func CheckName(name string) error {
	const rule = "use 1 to 63 of the characters a-z, 0-9 and _"
	if name == "" {
		return event.Fail(event.Usage, rule, "the slot has no name")
	}
	bad := strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_'
	})
	if bad || len(name) > 63 {
		return event.Fail(event.Usage, rule, "slot name %q is not valid", name)
	}
	return nil
}

// creatable checks what has to be so before a slot makes sense.
func creatable(ctx context.Context, conn *pgx.Conn, publications []string) error {
	var level string
	var absent []string
	err := conn.QueryRow(ctx, `select current_setting('wal_level'),
		array(select p from unnest($1::text[]) with ordinality as t(p, n) where not exists (select from pg_publication where pubname = p) order by n)`,
		publications).Scan(&level, &absent)
	if err != nil {
		return sqlFailure(conn, err, "read the server's settings")
	}
	if level != "logical" {
		f := walLevel(level)
		return event.Fail(event.Precondition, f.Remedy, "%s", f.Detail)
	}
	if len(absent) > 0 {
		f := publicationMissing(conn, absent[0], "…")
		return event.Fail(event.Precondition, f.Remedy, "%s", f.Detail)
	}
	return nil
}

// keep returns the slot that exists when it may be kept.
func keep(ctx context.Context, conn *pgx.Conn, o CreateOptions, slot Slot) (Slot, bool, error) {
	if !o.IfNotExists {
		return slot, false, event.Fail(event.Precondition, fmt.Sprintf("keep it with --if-not-exists, or drop it first: walrelay slot drop %s", o.Name),
			"slot %q exists already", o.Name)
	}
	var current string
	if err := conn.QueryRow(ctx, "select current_database()").Scan(&current); err != nil {
		return slot, false, sqlFailure(conn, err, "read the name of the database")
	}
	if err := unfit(slot, current, nil); err != nil {
		return slot, false, err
	}
	if slot.TwoPhase {
		f := twoPhase(slot)
		return slot, false, event.Fail(f.Class, f.Remedy, "%s", f.Detail)
	}
	return slot, false, nil
}

// createOrCancel runs the creation and watches it.
func createOrCancel(ctx context.Context, conn *pgx.Conn, o CreateOptions) error {
	wait, cancel := ctx, context.CancelFunc(func() {})
	if o.Timeout > 0 {
		wait, cancel = context.WithTimeout(ctx, o.Timeout)
	}
	defer cancel()

	// The statement must not see ctx: pgx would then close the connection, and
	// nobody could tell whether the slot came to be.
	done := make(chan outcome, 1)
	go func() { done <- create(context.WithoutCancel(ctx), conn, o) }()

	look := lookout{cfg: conn.Config(), pid: conn.PgConn().PID()}
	defer look.end()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case end := <-done:
			if end.err != nil {
				return createFailure(conn, o, end.err)
			}
			return nil
		case <-wait.Done():
			if err := undo(conn, o.Name, done); err != nil {
				return err
			}
			if ctx.Err() == nil {
				return timedOut(o, look.last)
			}
			return fmt.Errorf("create slot %q: %w", o.Name, ctx.Err())
		case <-tick.C:
			if now := look.changed(wait); now != nil && o.Waiting != nil {
				o.Waiting(now)
			}
		}
	}
}

// outcome is how a creation ended. A slot that was made stays, whatever
// happens to the transaction around it.
type outcome struct {
	made bool
	err  error
}

// create makes the slot. Its backend outlives a client that was killed and makes
// whatever its statement says once the wait is over. So the wait is that of a
// temporary slot, which goes with the session, and the one that stays is a copy
// of it, by a statement that a killed client no longer sends. A copy is no failover
// slot, and needs one more of max_replication_slots: without, the wait is for the
// slot itself, and only attended keeps an orphan from making it.
func create(ctx context.Context, conn *pgx.Conn, o CreateOptions) (end outcome) {
	attended(ctx, conn)
	if !o.Temporary && !o.Failover {
		end.err = viaTemporary(ctx, conn, o.Name)
		if sqlstate(end.err) != codeLimitExceeded {
			end.made = end.err == nil
			return end
		}
	}
	sql, args := "select pg_create_logical_replication_slot($1, $2, $3, false)", []any{o.Name, Plugin, o.Temporary}
	if o.Failover {
		sql, args = "select pg_create_logical_replication_slot($1, $2, $3, false, $4)", append(args, true)
	}
	end.err = untimed(ctx, conn, sql, args...)
	end.made = end.err == nil
	return end
}

func viaTemporary(ctx context.Context, conn *pgx.Conn, name string) error {
	temporary := fmt.Sprintf("walrelay_create_%d", conn.PgConn().PID())
	if err := untimed(ctx, conn, "select pg_create_logical_replication_slot($1, $2, true, false)", temporary, Plugin); err != nil {
		return err
	}
	err := untimed(ctx, conn, "select pg_copy_logical_replication_slot($1, $2, false)", temporary, name)
	for range 2 { // a late cancel can hit it
		if untimed(ctx, conn, "select pg_drop_replication_slot($1)", temporary) == nil {
			break
		}
	}
	return err
}

// untimed runs a statement in a transaction of its own, where the role's
// timeouts can be put off.
func untimed(ctx context.Context, conn *pgx.Conn, sql string, args ...any) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "set local statement_timeout = 0"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "set local lock_timeout = 0"); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, sql, args...)
		return err
	})
}

// attended asks the server to end the session soon after its client is gone,
// also while a statement waits for a lock. It is best effort: a server on a system
// that cannot report a closed connection refuses the setting.
func attended(ctx context.Context, conn *pgx.Conn) {
	for _, setting := range []string{
		"client_connection_check_interval = '500ms'",
		"tcp_keepalives_idle = 30", "tcp_keepalives_interval = 10", "tcp_keepalives_count = 3", // for a client whose host is gone
	} {
		_, _ = conn.Exec(ctx, "set "+setting)
	}
}

// undo cancels a creation that is under way, and drops the slot when the
// cancel came too late. It returns nil when no slot remains.
func undo(conn *pgx.Conn, name string, done <-chan outcome) error {
	const hint = "look for the slot with walrelay slot list, and drop it"
	ctx, cancel := context.WithTimeout(context.Background(), giveUpAfter)
	defer cancel()
	again := time.NewTicker(cancelAgain)
	defer again.Stop()
	for {
		// A cancel that arrives between two statements is lost; hence again.
		_ = conn.PgConn().CancelRequest(ctx)
		select {
		case end := <-done:
			err := end.err
			if end.made {
				_, err = conn.Exec(ctx, "select pg_drop_replication_slot($1)", name)
			} else if sqlstate(err) != "" {
				return nil // refused by the server
			}
			if err == nil || sqlstate(err) == codeUndefinedObject {
				return nil
			}
			return failed(event.Unexpected, hint, err, "create slot %q: canceled, but the slot may remain", name)
		case <-again.C:
		case <-ctx.Done():
			// Closing the socket is safe while another goroutine reads it.
			_ = conn.PgConn().Conn().Close()
			return failed(event.Unexpected, hint, (<-done).err, "create slot %q: the server did not react to cancel, so the slot may appear later", name)
		}
	}
}

func timedOut(o CreateOptions, last []Blocker) error {
	if len(last) == 0 {
		return event.Fail(event.Precondition, "try again with a longer --timeout", "create slot %q: not done within %s", o.Name, o.Timeout)
	}
	list := make([]string, len(last))
	for i, b := range last {
		list[i] = b.String()
	}
	return event.Fail(event.Precondition, "let these transactions end, or end them, or try again with a longer --timeout",
		"create slot %q: still waiting after %s for %d open transactions: %s", o.Name, o.Timeout, len(last), strings.Join(list, "; "))
}

func createFailure(conn *pgx.Conn, o CreateOptions, err error) error {
	doing := fmt.Sprintf("create slot %q", o.Name)
	switch sqlstate(err) {
	case codeNotInState: // wal_level is known to be logical
		return event.Fail(event.Precondition, "create the slot on the primary, and with max_replication_slots above 0", "%s: %w", doing, err)
	case "":
		if conn.IsClosed() && !errors.Is(err, context.Canceled) {
			return event.Fail(event.Transient, "look for the slot with walrelay slot list before trying again", "%s: the connection broke: %w", doing, err)
		}
	}
	return sqlFailure(conn, err, doing)
}
