package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// SQLSTATEs that decide something here, by their names in errcodes.txt.
const (
	codeProtocolViolation     = "08P01"
	codeInvalidParameter      = "22023"
	codeInvalidAuthorization  = "28000"
	codeInvalidPassword       = "28P01"
	codeInvalidCatalogName    = "3D000"
	codeInsufficientPrivilege = "42501"
	codeUndefinedObject       = "42704"
	codeDuplicateObject       = "42710"
	codeTooManyConnections    = "53300"
	codeLimitExceeded         = "53400"
	codeNotInState            = "55000"
	codeInUse                 = "55006"
	codeCannotChangeParameter = "55P02"
	codeAdminShutdown         = "57P01"
	codeCrashShutdown         = "57P02"
	codeCannotConnectNow      = "57P03"
)

// Connect opens an ordinary connection. It blocks until the server answers or
// ctx ends. A failure says where it went, why, and what to do; it never holds
// a password.
func Connect(ctx context.Context, cfg *pgx.ConnConfig) (*pgx.Conn, error) {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, connectFailure(cfg, err)
	}
	return conn, nil
}

// connectError replaces pgconn's text, which repeats every address twice and
// spans lines, by one line. The chain stays whole.
type connectError struct {
	text string
	err  error
}

func (e *connectError) Error() string { return e.text }
func (e *connectError) Unwrap() error { return e.err }

func connectFailure(cfg *pgx.ConnConfig, err error) error {
	class, hint, cause := explain(cfg, err)
	text := fmt.Sprintf("connect to Postgres at %s as role %q, database %q: %s", addresses(cfg), cfg.User, database(cfg), cause)
	return &event.Failure{Class: class, Err: &connectError{text: text, err: err}, Hint: hint}
}

// explain classes an error of pgx.ConnectConfig.
func explain(cfg *pgx.ConnConfig, err error) (class event.Class, hint, cause string) {
	if errors.Is(err, context.Canceled) {
		return event.Transient, "", "canceled"
	}
	role, db := quote(cfg.User), quote(database(cfg))
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		cause = pg.Error()
		switch pg.Code {
		case codeInvalidPassword:
			return event.Precondition, fmt.Sprintf("check the password of role %s: in the DSN, in PGPASSWORD or in the password file", role), cause
		case codeInvalidAuthorization:
			return event.Precondition, fmt.Sprintf("make sure that role %s exists and may log in, and that pg_hba.conf admits it to database %s from here, with or without TLS as sslmode says", role, db), cause
		case codeInvalidCatalogName:
			return event.Precondition, "name the database that holds the outbox table in the DSN or in PGDATABASE", cause
		case codeInsufficientPrivilege:
			return event.Precondition, fmt.Sprintf("GRANT CONNECT ON DATABASE %s TO %s; or leave out of the DSN the settings that the role may not change", db, role), cause
		case codeUndefinedObject, codeInvalidParameter, codeCannotChangeParameter:
			return event.Precondition, "check the settings of the server in the DSN, in its options and in PGOPTIONS", cause
		case codeProtocolViolation:
			return event.Precondition, "this looks like a connection pooler: give the address of Postgres itself", cause
		case codeTooManyConnections:
			return event.Transient, "close connections, or raise max_connections or the role's CONNECTION LIMIT", cause
		case codeCannotConnectNow:
			return event.Transient, "the server is starting up or shutting down", cause
		}
		if strings.HasPrefix(pg.Code, "28") {
			return event.Precondition, "check role, password and pg_hba.conf", cause
		}
		return event.Transient, "", cause
	}

	const listening = "is Postgres running and listening there?"
	var dns *net.DNSError
	if errors.As(err, &dns) {
		return event.Transient, "check the host name in the DSN or in PGHOST", "lookup " + dns.Name + ": " + dns.Err
	}
	var op *net.OpError
	if errors.As(err, &op) {
		hint := listening
		if errors.Is(err, syscall.EACCES) {
			hint = "this user may not open the socket of Postgres"
		}
		return event.Transient, hint, op.Err.Error()
	}
	if pgconn.Timeout(err) || errors.Is(err, context.DeadlineExceeded) {
		return event.Transient, "no answer in time: " + listening, "timeout"
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return event.Transient, "the server closed the connection: is this the port of Postgres?", "connection closed"
	}
	if errors.Is(err, pgconn.ErrReadOnlyConnection) {
		return event.Transient, "the server is a standby; this goes on by itself when one of those named in the DSN is the primary", "read-only server"
	}
	// What is left is refused by this side before or while the session is set
	// up: TLS, sslcertmode, require_auth, channel_binding. pgconn has no types
	// for most of it.
	inner := err
	var outer *pgconn.ConnectError
	if errors.As(err, &outer) {
		inner = outer.Unwrap()
	}
	return event.Precondition, "compare sslmode, sslrootcert, sslcert and the other connection settings with what the server offers",
		strings.ReplaceAll(inner.Error(), "\n", "; ")
}

// addresses lists the places of a configuration, each once.
func addresses(cfg *pgx.ConnConfig) string {
	var list []string
	add := func(host string, port uint16) {
		a := net.JoinHostPort(host, strconv.Itoa(int(port)))
		if strings.HasPrefix(host, "/") {
			a = host + "/.s.PGSQL." + strconv.Itoa(int(port))
		}
		if !slices.Contains(list, a) {
			list = append(list, a)
		}
	}
	add(cfg.Host, cfg.Port)
	for _, f := range cfg.Fallbacks {
		add(f.Host, f.Port)
	}
	return strings.Join(list, ", ")
}

// database is the name that the server takes when none is given.
func database(cfg *pgx.ConnConfig) string {
	if cfg.Database == "" {
		return cfg.User
	}
	return cfg.Database
}

// major is the server's major version, from what it said when the session began.
func major(conn *pgx.Conn) int {
	s := conn.PgConn().ParameterStatus("server_version")
	end := strings.IndexFunc(s, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(s)
	}
	n, _ := strconv.Atoi(s[:end])
	return n
}

// sqlFailure wraps an error of a statement with what was being done, and
// classes what an operator can mend.
func sqlFailure(conn *pgx.Conn, err error, doing string) error {
	role := quote(conn.Config().User)
	switch sqlstate(err) {
	case codeInsufficientPrivilege:
		return event.Fail(event.Precondition, fmt.Sprintf("ALTER ROLE %s REPLICATION; (a managed service has a role to grant instead, such as rds_replication)", role), "%s: %w", doing, err)
	case codeLimitExceeded:
		return event.Fail(event.Precondition, "drop a slot that is not needed (walrelay slot list --all), or raise max_replication_slots and restart Postgres", "%s: %w", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

func sqlstate(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

func quote(parts ...string) string { return pgx.Identifier(parts).Sanitize() }

// hangUp closes a connection that is not needed any more, without waiting long
// for a server that does not answer.
func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the session is over either way
}
