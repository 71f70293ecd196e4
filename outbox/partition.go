package outbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
)

// Partition is a partition of a table that is partitioned by the time of its rows.
type Partition struct {
	Name    string // schema.name
	Default bool   // it has what fits none of the others
	Old     bool   // all that it may hold is old enough

	oid uint32
	sql string
}

// Partitions lists those of the table, by name; none when it is not partitioned by
// the range of its column with the role created_at.
func (p *Pruner) Partitions(ctx context.Context) ([]Partition, error) {
	if !p.root.partitioned() {
		return nil, nil
	}
	all, err := p.partitions(ctx)
	if err != nil {
		return nil, p.failure(err, "list the partitions of table %s", p.o.Table)
	}
	return all, nil
}

func (p *Pruner) partitions(ctx context.Context) ([]Partition, error) {
	var key string
	if err := p.conn.QueryRow(ctx, "SELECT pg_catalog.pg_get_partkeydef($1::oid)", p.root.oid).Scan(&key); err != nil {
		return nil, err
	}
	// pg_get_partkeydef quotes names where it has to.
	var want string
	if err := p.conn.QueryRow(ctx, "SELECT 'RANGE (' || pg_catalog.quote_ident($1::text) || ')'", p.o.Table.column(roleCreatedAt)).Scan(&want); err != nil {
		return nil, err
	}
	if key != want {
		return nil, nil
	}
	rows, err := p.conn.Query(ctx, `
		SELECT c.oid, n.nspname::text, c.relname::text, pg_catalog.pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT',
		       coalesce(substring(pg_catalog.pg_get_expr(c.relpartbound, c.oid) FROM ' TO \(''([^'']+)''\)$')::timestamptz <= $2::text::timestamptz, false)
		FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE i.inhparent = $1 AND c.relkind = 'r' ORDER BY n.nspname, c.relname`, p.root.oid, p.cut)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Partition, error) {
		var t Partition
		var schema, name string
		err := row.Scan(&t.oid, &schema, &name, &t.Default, &t.Old)
		t.Name, t.sql = schema+"."+name, pgx.Identifier{schema, name}.Sanitize()
		return t, err
	})
}

// ErrLocked says that somebody uses what was to be dropped.
var ErrLocked = errors.New("it is in use")

const (
	dropTries = 5
	dropPause = 500 * time.Millisecond
)

// Drop drops a partition after every row of it was judged: an error of judge ends
// it and is returned. save is as in Delete. It returns how many rows there were, and ErrLocked
// when others used the table whenever it tried.
//
// It is one transaction, so that whoever dies in it leaves no partition half detached.
// DETACH CONCURRENTLY cannot be one, and is refused where there is a default
// partition (documentation of ALTER TABLE), as init makes it. Writers of that partition, which is one of the
// past, wait from the beginning; those of the others only for the end of the transaction.
// It waits for them no longer than they may wait for it.
func (p *Pruner) Drop(ctx context.Context, t Partition, judge func(Candidate) error, save func(rows [][]byte) error) (int, error) {
	n := 0
	err := pgx.BeginTxFunc(ctx, p.conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		// Before the snapshot, so that nothing is committed in between.
		if _, err := tx.Exec(ctx, "LOCK TABLE ONLY "+t.sql+" IN SHARE ROW EXCLUSIVE MODE"); err != nil {
			return err
		}
		var xmax string
		if err := tx.QueryRow(ctx, "SELECT "+xmaxOfStatement).Scan(&xmax); err != nil {
			return err
		}
		from := " FROM ONLY " + t.sql + " AS walrelay_row"
		if err := p.judge(ctx, t, from, xmax, judge, &n); err != nil {
			return err
		}
		if save != nil {
			if _, err := p.saveAll(ctx, "SELECT "+p.columns()+from, save); err != nil {
				return err
			}
		}
		return p.drop(ctx, tx, t)
	})
	switch {
	case err == nil:
		return n, nil
	case inTheWay(err):
		return 0, ErrLocked
	}
	return 0, p.failure(err, "drop partition %s", t.Name)
}

func (p *Pruner) judge(ctx context.Context, t Partition, from, xmax string, judge func(Candidate) error, n *int) error {
	var kept error
	err := p.texts(ctx, replaceXmax("SELECT "+p.flags+from, xmax), func(v [][]byte) error {
		*n++
		is := func(i int) bool { return string(v[i]) == "t" }
		kept = judge(Candidate{ID: v[0], Old: is(1), Passed: is(2), Sent: is(3), Event: is(4), table: t.oid})
		return kept
	})
	if kept != nil {
		return kept
	}
	return err
}

// drop needs locks on the root and the default partition, too, which nobody gets
// while others are at work; so it tries again.
func (p *Pruner) drop(ctx context.Context, tx pgx.Tx, t Partition) error {
	for try := 1; ; try++ {
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { // a savepoint
			_, err := tx.Exec(ctx, "DROP TABLE "+t.sql)
			return err
		})
		if err == nil || !inTheWay(err) || try == dropTries {
			return err
		}
		pause := time.NewTimer(dropPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return ctx.Err()
		}
	}
}
