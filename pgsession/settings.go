package pgsession

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// setting is one setting of a session.
type setting struct {
	name, value string
	since       int // first major version that has it; 0 for those before 14
}

// limits end a session, a transaction or a statement. What walrelay does may
// take long, and it has its own deadlines. They come first, so that a short
// limit cannot end the statements that follow.
var limits = []setting{
	{"statement_timeout", "0", 0},
	{"transaction_timeout", "0", 17},
	{"lock_timeout", "0", 0},
	{"idle_in_transaction_session_timeout", "0", 0},
	{"idle_session_timeout", "0", 14},
}

// writing lets walrelay write, in transactions that see what was committed before
// each statement.
var writing = []setting{
	{"default_transaction_read_only", "off", 0},
	{"default_transaction_isolation", "read committed", 0},
	{"default_transaction_deferrable", "off", 0},
}

// text fixes the form of values and of SQL. The time zone is not among them: for
// a column without one it is that of the database or the role.
var text = []setting{
	{"client_encoding", "UTF8", 0},
	{"datestyle", "ISO", 0},
	{"intervalstyle", "postgres", 0},
	{"extra_float_digits", "3", 0},
	{"bytea_output", "hex", 0},
	{"standard_conforming_strings", "on", 0}, // literals are quoted for it
	{"quote_all_identifiers", "off", 0},      // names read from the catalog are compared
	{"xmloption", "content", 0},
}

// zone is that of replication connections, whose text has one form only.
var zone = []setting{{"timezone", "UTC", 0}}

// Prepare makes sessions of an ordinary configuration take the settings. A
// limit that the configuration itself sets, as a parameter or in its options, stays.
func Prepare(conf *pgconn.Config) {
	kept := slices.DeleteFunc(slices.Clone(limits), func(s setting) bool { return names(conf, s.name) })
	forget(conf, writing, text)
	all := slices.Concat(kept, writing, text)
	conf.AfterConnect = func(ctx context.Context, pg *pgconn.PgConn) error { return apply(ctx, pg, all) }
	// With target_session_attrs pgx asks whether transactions are read-only, before
	// AfterConnect: a default of the role would make a primary look like a standby.
	if check := conf.ValidateConnect; check != nil {
		conf.ValidateConnect = func(ctx context.Context, pg *pgconn.PgConn) error {
			if err := apply(ctx, pg, slices.Concat(kept, writing[:1])); err != nil {
				return err
			}
			return check(ctx, pg)
		}
	}
}

// Replication makes sessions of a replication configuration take the settings,
// whatever limits the configuration sets.
func Replication(conf *pgconn.Config) {
	forget(conf, writing, text, zone)
	all := slices.Concat(limits, writing, text, zone)
	conf.AfterConnect = func(ctx context.Context, pg *pgconn.PgConn) error { return apply(ctx, pg, all) }
}

// names reports whether the configuration sets a setting by itself.
func names(conf *pgconn.Config, name string) bool {
	for k, v := range conf.RuntimeParams {
		if strings.EqualFold(k, name) || strings.EqualFold(k, "options") && strings.Contains(optionName(v), name) {
			return true
		}
	}
	return false
}

// optionName is options in the spelling of names: -c and -- take dashes, too
// (ParseLongOption).
func optionName(options string) string {
	return strings.ReplaceAll(strings.ToLower(options), "-", "_")
}

// forget leaves out of the startup packet what is set afterwards anyway.
func forget(conf *pgconn.Config, groups ...[]setting) {
	for _, group := range groups {
		for _, s := range group {
			for k := range conf.RuntimeParams {
				if strings.EqualFold(k, s.name) {
					delete(conf.RuntimeParams, k)
				}
			}
		}
	}
}

func apply(ctx context.Context, pg *pgconn.PgConn, all []setting) error {
	sql := statements(major(pg.ParameterStatus("server_version")), all)
	// Simple queries, since a replication connection takes nothing else.
	_, err := pg.Exec(ctx, sql).ReadAll()
	// A statement_timeout of about a millisecond can end even these; the shortest
	// statement that puts it off gets through.
	for tries := 0; canceled(err) && all[0] == limits[0] && tries < 50; tries++ {
		if _, err = pg.Exec(ctx, statements(0, all[:1])).ReadAll(); err == nil {
			_, err = pg.Exec(ctx, sql).ReadAll()
		}
	}
	if err != nil {
		return fmt.Errorf("set up the session: %w", err)
	}
	return nil
}

// canceled reports whether the server ended a statement by a timeout, or for a
// user who asked for it.
func canceled(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "57014"
}

// statements set all that a server of the version has.
func statements(major int, all []setting) string {
	var b strings.Builder
	for _, s := range all {
		if major >= s.since {
			fmt.Fprintf(&b, "SET %s = '%s'; ", s.name, s.value)
		}
	}
	return b.String()
}

// major reads the major version from texts such as "15.18 (Debian …)" and
// "18beta1"; 0 means that it has none, as behind some poolers.
func major(version string) int {
	end := strings.IndexFunc(version, func(r rune) bool { return r < '0' || r > '9' })
	if end < 0 {
		end = len(version)
	}
	n, err := strconv.Atoi(version[:end])
	if err != nil {
		return 0
	}
	return n
}
