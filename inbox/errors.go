package inbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

type verdict struct {
	err    error
	reject bool
}

func (v *verdict) Error() string { return v.err.Error() }
func (v *verdict) Unwrap() error { return v.err }

// Later marks a handler's error as no fault of the event: it is tried again for
// as long as it takes, and these tries are not counted. nil stays nil.
func Later(err error) error {
	if err == nil {
		return nil
	}
	return &verdict{err: err}
}

// Reject marks a handler's error as one that no further try can mend: the event
// becomes a dead letter at once, when there is a subject for them. nil stays nil.
func Reject(err error) error {
	if err == nil {
		return nil
	}
	return &verdict{err: err, reject: true}
}

// fault says whose an error is.
type fault uint8

const (
	ofNobody fault = iota // it passes, and says nothing about the event
	ofEvent               // it counts as a try of the event
	ofEventForGood
)

// blame judges an error of a handler. What Postgres says of its own state or of
// two transactions in each other's way is not the event's fault.
func blame(ctx context.Context, tx pgx.Tx, err error) fault {
	var v *verdict
	switch {
	case errors.As(err, &v) && v.reject:
		return ofEventForGood
	case v != nil, ctx.Err() != nil, tx.Conn() != nil && tx.Conn().IsClosed(), passes(err):
		return ofNobody
	}
	return ofEvent
}

// passes reports whether Postgres's refusal ends by itself, by the class of its
// SQLSTATE: connection, transaction rollback, resources, operator intervention,
// and a read-only server, which a failover leaves behind.
func passes(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) < 2 {
		return false
	}
	switch pg.Code[:2] {
	case "08", "40", "53", "57":
		return true
	}
	return pg.Code == "25006"
}

// collided reports whether another transaction was in the way, so that the next
// try need not wait long.
func collided(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && len(pg.Code) > 2 && pg.Code[:2] == "40"
}

// commitFault judges an error of COMMIT: a constraint that was deferred, or a
// statement whose error the handler passed over, are the handler's.
func commitFault(err error) fault {
	var pg *pgconn.PgError
	if errors.Is(err, pgx.ErrTxCommitRollback) || errors.As(err, &pg) && pg.Code[:2] == "23" {
		return ofEvent
	}
	return ofNobody
}

// guarded runs a handler and makes an error of a panic, so that one event
// does not end the process for all the others.
func guarded(fn func() error, stack func(any)) (err error) {
	defer func() {
		if r := recover(); r != nil {
			stack(r)
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return fn()
}
