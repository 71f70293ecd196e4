package replication

import (
	"crypto/tls"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

var (
	// ErrInterrupted is what Next returns after Interrupt or Close.
	ErrInterrupted = errors.New("replication session interrupted")

	// ErrSlotActive means that another session holds the slot. It passes when
	// that session ends.
	ErrSlotActive = errors.New("replication slot is in use")

	// ErrShutdown means that the server is shutting down and waits for this
	// session to end.
	ErrShutdown = errors.New("server is shutting down")
)

const (
	hintPooler   = "connect to the server itself: a logical replication connection cannot pass through a pooler that does not support it"
	hintProtocol = "the server speaks a protocol this version of walrelay does not know; please report it with the server's version"
)

// SQLSTATE codes, appendix A of the Postgres manual.
const (
	protocolViolation     = "08P01"
	featureNotSupported   = "0A000"
	invalidParameterValue = "22023"
	invalidAuthorization  = "28000"
	invalidPassword       = "28P01"
	invalidCatalogName    = "3D000"
	insufficientPrivilege = "42501"
	syntaxError           = "42601"
	undefinedObject       = "42704"
	tooManyConnections    = "53300"
	configurationLimit    = "53400"
	notInPrerequisite     = "55000"
	objectInUse           = "55006"
	cannotChangeParameter = "55P02"

	classDataException = "22"
)

// connectFailure explains why no connection was made.
func connectFailure(conf *pgconn.Config, err error) error {
	doing := fmt.Sprintf("connect to Postgres at %s:%d as %q", conf.Host, conf.Port, conf.User)
	var unverified *tls.CertificateVerificationError
	if errors.As(err, &unverified) {
		return event.Fail(event.Precondition, "check sslrootcert and sslmode of the DSN against the server's certificate", "%s: %w", doing, unverified)
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Errorf("%s: %w", doing, oneLine{err})
	}
	fail := func(class event.Class, hint string) error {
		return event.Fail(class, hint, "%s: %w", doing, pg)
	}
	switch pg.Code {
	case invalidPassword, invalidAuthorization:
		return fail(event.Precondition, "check user and password of the DSN, and that pg_hba.conf lets the role connect to this database from here")
	case invalidCatalogName:
		return fail(event.Precondition, "check the database of the DSN")
	case insufficientPrivilege:
		return fail(event.Precondition, grantReplication(conf))
	case protocolViolation, syntaxError:
		return fail(event.Precondition, hintPooler)
	case undefinedObject, invalidParameterValue, cannotChangeParameter:
		return fail(event.Precondition, "check the settings of the server in the DSN, in its options and in PGOPTIONS")
	case tooManyConnections:
		return fail(event.Transient, "raise max_connections or max_wal_senders, or end sessions that nobody needs")
	}
	return fmt.Errorf("%s: %w", doing, pg)
}

// startFailure explains an error of the commands before the stream begins.
func startFailure(conf *pgconn.Config, slot, doing string, err error) error {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Errorf("%s: %w", doing, oneLine{err})
	}
	fail := func(class event.Class, hint string) error {
		return event.Fail(class, hint, "%s: %w", doing, pg)
	}
	switch pg.Code {
	case undefinedObject:
		return fail(event.Precondition, "create the slot: walrelay slot create --slot "+slot)
	case objectInUse:
		return event.Fail(event.Transient, "another session reads this slot; it is taken over when that one ends",
			"%s: %w: %w", doing, ErrSlotActive, pg)
	case insufficientPrivilege:
		return fail(event.Precondition, grantReplication(conf))
	case syntaxError, protocolViolation:
		return fail(event.Precondition, hintPooler)
	case invalidParameterValue:
		return fail(event.Precondition, "the slot belongs to another output plugin; name another one, or create one for pgoutput: walrelay slot create")
	case featureNotSupported:
		return fail(event.Transient, "connect to the primary: name every host in the DSN and add target_session_attrs=read-write")
	case tooManyConnections:
		return fail(event.Transient, "raise max_wal_senders, or end replication sessions that nobody needs")
	case configurationLimit:
		return fail(event.Transient, "raise max_replication_slots, or drop slots that nobody needs")
	}
	// 55000 means a lost slot, or a slot of another database, or one that a
	// standby keeps in step: pg_replication_slots tells which, not the error.
	return fmt.Errorf("%s: %w", doing, pg)
}

// streamFailure explains an error that the server sent in the stream.
func streamFailure(slot string, publications []string, pg *pgconn.PgError) error {
	const doing = "read the replication stream"
	switch {
	case pg.Code == undefinedObject:
		return event.Fail(event.Precondition, createPublication(slot, publications, pg.Message), "%s: %w", doing, pg)
	case pg.Code == insufficientPrivilege:
		return event.Fail(event.Precondition, "the publication's row filter needs a privilege that the role lacks", "%s: %w", doing, pg)
	case strings.HasPrefix(pg.Code, classDataException):
		return event.Fail(event.Precondition, "a row cannot be sent, most likely because the publication's row filter raises an error for it: correct the filter, or skip the row's transaction:\n"+advancePast(slot, pg), "%s: %w", doing, pg)
	}
	return fmt.Errorf("%s: %w", doing, pg)
}

// advancePast is the command that skips what the server cannot decode. It names the change
// in the context of the error (output_plugin_error_callback in logical.c).
func advancePast(slot string, pg *pgconn.PgError) string {
	if all := lsnText.FindAllString(pg.Where, -1); len(all) > 0 {
		return fmt.Sprintf("walrelay slot advance %s --past-transaction %s", slot, all[len(all)-1])
	}
	return fmt.Sprintf("walrelay slot peek %s shows it, and walrelay slot advance %s --past-transaction LSN skips it", slot, slot)
}

var lsnText = regexp.MustCompile(`\b[0-9A-F]{1,8}/[0-9A-F]{1,8}\b`)

// skippedPublication is the failure behind the warning with which Postgres 18
// tells that it leaves out the rows of a publication that does not exist.
func skippedPublication(slot string, publications []string, n *pgconn.Notice) error {
	return event.Fail(event.Precondition, createPublication(slot, publications, n.Message),
		"read the replication stream: rows are left out: %w", (*pgconn.PgError)(n))
}

// createPublication names the publication that message speaks of, or all of
// them where the message does not say.
func createPublication(slot string, publications []string, message string) string {
	name := ""
	for _, p := range publications {
		if strings.Contains(message, `"`+p+`"`) {
			name = p
		}
	}
	if name == "" {
		return "create the missing one of the publications " + quoteList(publications) + ": walrelay init --apply. One that exists was made after the slot's position, where the slot cannot see it: read through an older publication, or replace the slot:\nwalrelay slot recover " + slot + " --yes"
	}
	return "CREATE PUBLICATION " + quoteIdentifier(name) + " FOR TABLE … WITH (publish = 'insert'), or walrelay init --apply. One that exists was made after the slot's position, where the slot cannot see it: read through an older publication, or replace the slot:\nwalrelay slot recover " + slot + " --yes"
}

func grantReplication(conf *pgconn.Config) string {
	return fmt.Sprintf("as a superuser: ALTER ROLE %s REPLICATION; and, where it may not connect, GRANT CONNECT ON DATABASE %s TO %[1]s",
		quoteIdentifier(conf.User), quoteIdentifier(conf.Database))
}

func malformed(what string) error {
	return event.Fail(event.Unexpected, hintProtocol, "read the replication stream: malformed %s message", what)
}

func unknown(what string, kind byte) error {
	return event.Fail(event.Unexpected, hintProtocol, "read the replication stream: unknown %s %q", what, kind)
}

func disorder(lsn, before event.LSN) error {
	return event.Fail(event.Unexpected, hintProtocol, "read the replication stream: LSN %v after %v", lsn, before)
}

// oneLine puts the error of a driver that writes a line for each address it
// tried into one line of a log. Our own port is left out: it is another one at
// every try and would make each look like a new failure.
type oneLine struct{ error }

var ownPort = regexp.MustCompile(`\b[^ ]+->`)

func (e oneLine) Error() string {
	text := strings.Join(strings.FieldsFunc(e.error.Error(), func(r rune) bool { return r == '\n' || r == '\t' }), " ")
	return ownPort.ReplaceAllString(text, "")
}

func (e oneLine) Unwrap() error { return e.error }

func quoteIdentifier(name string) string {
	return `"` + strings.ReplaceAll(name, `"`, `""`) + `"`
}

func quoteList(names []string) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = quoteIdentifier(name)
	}
	return strings.Join(quoted, ",")
}

func quoteLiteral(s string) string {
	return `'` + strings.ReplaceAll(s, `'`, `''`) + `'`
}
