package inbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// DefaultName is the name of the inbox table where no other is given.
const DefaultName = "inbox"

// Table is where it is recorded which events were handled. The zero value is
// the table "inbox" of the search path.
type Table struct {
	Schema string // "" is the search path
	Name   string // "" is DefaultName
}

func (t Table) name() string {
	if t.Name == "" {
		return DefaultName
	}
	return t.Name
}

func (t Table) sql() string   { return t.qualified(t.name()) }
func (t Table) tries() string { return t.qualified(t.name() + "_tries") }

func (t Table) qualified(name string) string {
	if t.Schema == "" {
		return pgx.Identifier{name}.Sanitize()
	}
	return pgx.Identifier{t.Schema, name}.Sanitize()
}

// Once is Table.Once on the table "inbox" of the search path.
func Once(ctx context.Context, tx pgx.Tx, consumer, id string, fn func(ctx context.Context, tx pgx.Tx) error) (first bool, err error) {
	return Table{}.Once(ctx, tx, consumer, id, fn)
}

// Once runs fn in tx unless consumer has handled the event id before, and
// records in tx that it has. first reports whether fn ran. The caller commits.
//
// When fn fails, Once rolls tx back and returns the error, so that the record can
// never be committed without the effects. With a nested transaction as tx (tx.Begin),
// that goes back to its savepoint only, and the outer one can go on.
//
// When another transaction is handling the same event, Once blocks until it
// ends: after its commit there is nothing to do, after its rollback fn runs. At
// REPEATABLE READ and SERIALIZABLE a commit since tx's snapshot is an error with
// SQLSTATE 40001 instead, and the whole transaction is to be tried again, as such
// transactions always are.
func (t Table) Once(ctx context.Context, tx pgx.Tx, consumer, id string, fn func(ctx context.Context, tx pgx.Tx) error) (first bool, err error) {
	tag, err := tx.Exec(ctx, "INSERT INTO "+t.sql()+" (consumer, id) VALUES ($1, $2) ON CONFLICT DO NOTHING", consumer, id)
	if err != nil {
		return false, fmt.Errorf("record event %q in table %s: %w", id, t.sql(), err)
	}
	if tag.RowsAffected() == 0 {
		return false, nil
	}
	if err := fn(ctx, tx); err != nil {
		// The context may be what made it fail.
		undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
		defer cancel()
		_ = tx.Rollback(undo) // what cannot be rolled back has lost its connection, and Postgres does it
		return true, err
	}
	return true, nil
}

const rollbackTimeout = 5 * time.Second

// Execer runs a statement: a connection, a pool or a transaction of pgx.
type Execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Prune is Table.Prune on the table "inbox" of the search path.
func Prune(ctx context.Context, db Execer, olderThan time.Duration) (int64, error) {
	return Table{}.Prune(ctx, db, olderThan)
}

// pruneBatch bounds the locks, the log and the time of one statement.
const pruneBatch = 1000

// Prune deletes the records of events that were handled longer ago than
// olderThan, and returns how many. An event that comes again after that is
// handled again: see the package's text for how long to keep them.
//
// It deletes a thousand at a time, each batch in a transaction of its own when db
// is no transaction, and never waits for a lock of others. It blocks until
// all are deleted or ctx ends; calling it again goes on.
func (t Table) Prune(ctx context.Context, db Execer, olderThan time.Duration) (int64, error) {
	if olderThan <= 0 {
		return 0, fmt.Errorf("prune table %s: records older than %s would be those of events that can still come again; keep them for days", t.sql(), olderThan)
	}
	var total int64
	for _, part := range []struct{ table, column string }{{t.sql(), "processed_at"}, {t.tries(), "tried_at"}} {
		for {
			tag, err := db.Exec(ctx, fmt.Sprintf(`
				DELETE FROM %[1]s WHERE ctid = ANY (ARRAY(
					SELECT ctid FROM %[1]s WHERE %[2]s < now() - $1::interval ORDER BY %[2]s LIMIT $2 FOR UPDATE SKIP LOCKED))`,
				part.table, part.column), olderThan, pruneBatch)
			if err != nil {
				return total, fmt.Errorf("prune table %s: %w", part.table, err)
			}
			if part.column == "processed_at" {
				total += tag.RowsAffected()
			}
			if tag.RowsAffected() < pruneBatch {
				break
			}
		}
	}
	return total, nil
}

// countTry records that an event is about to be handled, in a transaction of
// its own, and returns how often that was recorded.
func (t Table) countTry(ctx context.Context, db DB, consumer, id string) (tries int, err error) {
	err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{}, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, "INSERT INTO "+t.tries()+` AS t (consumer, id) VALUES ($1, $2)
			ON CONFLICT (consumer, id) DO UPDATE SET tries = t.tries + 1, tried_at = now() RETURNING tries`, consumer, id).Scan(&tries)
	})
	if err != nil {
		return 0, fmt.Errorf("record a try of event %q in table %s: %w", id, t.tries(), err)
	}
	return tries, nil
}
