package inbox

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Order within an aggregate needs that one process handles a consumer's events
// at a time. The others stand by: an advisory lock of Postgres tells who is who. It is
// one of a transaction, not of a session, so that it works through a pooler that
// hands out connections by the transaction. It writes nothing and, between two
// questions, has no snapshot, so it holds back no vacuum.
//
// A process may lose the lock and not know it yet. Even then two processes do
// not handle events of one aggregate at once: the next one begins with nothing
// before all that was delivered to the first is settled or is delivered to itself.

const (
	standby     = 500 * time.Millisecond // between two tries to get the lock
	lockTimeout = 10 * time.Second
)

// lockSettings keep the lock's transaction from being ended for idleness, and
// let Postgres notice within a minute that our machine is gone. Names that a server does
// not know are left out.
const lockSettings = `
	SELECT set_config(s.name, v.value, true)
	FROM (VALUES ('idle_in_transaction_session_timeout', '0'), ('transaction_timeout', '0'),
	             ('tcp_keepalives_idle', '20'), ('tcp_keepalives_interval', '5'), ('tcp_keepalives_count', '4')) v (name, value)
	JOIN pg_catalog.pg_settings s USING (name)`

// tryOwn returns the transaction that holds the lock, nil when another process has it.
func (c *Consumer) tryOwn(ctx context.Context) (pgx.Tx, error) {
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	// The isolation is given since a default of repeatable read would keep a snapshot.
	tx, err := c.begin(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return nil, err
	}
	var mine bool
	if _, err = tx.Exec(ctx, lockSettings); err == nil {
		err = tx.QueryRow(ctx, "SELECT pg_catalog.pg_try_advisory_xact_lock(pg_catalog.hashtextextended($1, 0))", "walrelay inbox "+c.name).Scan(&mine)
	}
	if err != nil || !mine {
		rollback(tx)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the consumer: %w", err)
	}
	if !mine {
		return nil, nil
	}
	return tx, nil
}

// own blocks until this process has the lock or ctx ends. lost is closed when
// the lock is; free gives it up.
func (c *Consumer) own(ctx context.Context) (lost <-chan struct{}, free func(), err error) {
	for n, told := 1, false; ; {
		tx, err := c.tryOwn(ctx)
		switch {
		case ctx.Err() != nil:
			if tx != nil {
				rollback(tx)
			}
			return nil, nil, ctx.Err()
		case tx != nil:
			lost, free := watch(tx)
			return lost, free, nil
		case err != nil:
			c.log.Warn("postgres does not answer", "err", err, "try", n)
			n++
		case !told:
			c.log.Info("standing by: another process handles the events of this consumer")
			told = true
		}
		if !pause(ctx, max(standby, min(time.Duration(n-1)*standby, lockTimeout))) {
			return nil, nil, ctx.Err()
		}
	}
}

// lookEvery is how often the lock's connection is asked whether it is alive. Its
// end is seen at once, unless the network swallows it.
const lookEvery = 5 * time.Second

// watch notices the end of the lock's connection.
func watch(tx pgx.Tx) (lost <-chan struct{}, free func()) {
	ctx, cancel := context.WithCancel(context.Background())
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for alive(ctx, tx) {
		}
	}()
	return gone, func() {
		cancel()
		<-gone
		rollback(tx)
	}
}

// alive listens for a while, in which nothing is expected, and then asks.
func alive(ctx context.Context, tx pgx.Tx) bool {
	wait, cancel := context.WithTimeout(ctx, lookEvery)
	defer cancel()
	if err := tx.Conn().PgConn().WaitForNotification(wait); err != nil && (!pgconn.Timeout(err) || ctx.Err() != nil) {
		return false
	}
	ask, cancel := context.WithTimeout(ctx, lookEvery)
	defer cancel()
	_, err := tx.Exec(ask, "SELECT")
	return err == nil
}

// pause waits, and reports whether ctx still holds.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
