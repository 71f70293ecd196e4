package inbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// Schema is what `walrelay init --inbox` makes.
type Schema struct {
	Table Table
	Roles []string // that consumers connect as; they get the rights that consumers need
}

const maxName = 63 // NAMEDATALEN-1

// Validate returns every mistake, joined in one Usage failure.
func (s Schema) Validate() error {
	var errs []error
	names := append([]string{s.Table.name() + "_processed_at_idx"}, s.Roles...)
	if s.Table.Schema != "" {
		names = append(names, s.Table.Schema)
	}
	for _, name := range names {
		switch {
		case name == "":
			errs = append(errs, errors.New("a role's name is empty"))
		case len(name) > maxName:
			errs = append(errs, fmt.Errorf("name %q is longer than %d bytes", name, maxName))
		case strings.Contains(name, "\x00"):
			errs = append(errs, fmt.Errorf("name %q holds a NUL byte", name))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return event.Fail(event.Usage, "", "inbox: %w", errors.Join(errs...))
}

// SQL is the DDL as a script that may be run again and again. The Schema must
// be valid.
func (s Schema) SQL() string {
	var b strings.Builder
	b.WriteString("-- The inbox: which consumer has handled which event. It belongs into the database of the consumer.\n")
	for _, st := range s.statements() {
		b.WriteString(st.sql + ";\n")
	}
	return b.String()
}

// statement is one step, and what tells whether it is done.
type statement struct {
	sql, did string
	done     string // SQL that yields a boolean
	args     []any
}

func (s Schema) statements() []statement { return append(s.tables(), s.rest()...) }

const exists = "SELECT pg_catalog.to_regclass($1) IS NOT NULL"

func (s Schema) tables() []statement {
	t := s.Table
	all := []statement{
		{
			sql: "CREATE TABLE IF NOT EXISTS " + t.sql() + ` (
    consumer     text        NOT NULL,
    id           text        NOT NULL,
    processed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, id)
)`,
			did: "table " + t.sql() + " created", done: exists, args: []any{t.sql()},
		},
		{
			sql: "CREATE TABLE IF NOT EXISTS " + t.tries() + ` (
    consumer text        NOT NULL,
    id       text        NOT NULL,
    tries    int         NOT NULL DEFAULT 1,
    tried_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, id)
)`,
			did: "table " + t.tries() + " created", done: exists, args: []any{t.tries()},
		},
	}
	if t.Schema == "" || t.Schema == "public" {
		return all
	}
	return append([]statement{{
		sql: "CREATE SCHEMA IF NOT EXISTS " + pgx.Identifier{t.Schema}.Sanitize(),
		did: "schema " + t.Schema + " created", done: "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)", args: []any{t.Schema},
	}}, all...)
}

// rest is what works on tables that are as they should be only.
func (s Schema) rest() []statement {
	t := s.Table
	index := t.name() + "_processed_at_idx"
	all := []statement{{
		sql: "CREATE INDEX IF NOT EXISTS " + pgx.Identifier{index}.Sanitize() + " ON " + t.sql() + " (processed_at)",
		did: "index " + index + " created", done: exists, args: []any{t.qualified(index)},
	}}
	for _, role := range s.Roles {
		name := pgx.Identifier{role}.Sanitize()
		if t.Schema != "" {
			sql := "GRANT USAGE ON SCHEMA " + pgx.Identifier{t.Schema}.Sanitize() + " TO " + name
			all = append(all, statement{sql: sql, did: sql, done: "SELECT pg_catalog.has_schema_privilege($1::text, $2::text, 'USAGE')", args: []any{role, t.Schema}})
		}
		for _, r := range t.rights() {
			granted := slices.Concat(r.once, r.prune)
			sql := "GRANT " + strings.Join(granted, ", ") + " ON " + r.table + " TO " + name
			all = append(all, statement{sql: sql, did: sql, done: "SELECT " + has("$1::text, $2::text", granted), args: []any{role, r.table}})
		}
	}
	return all
}

// right is what a consumer needs on a table, and Prune besides.
type right struct {
	table       string
	once, prune []string
}

func (t Table) rights() []right {
	return []right{
		{t.sql(), []string{"SELECT", "INSERT"}, []string{"UPDATE", "DELETE"}}, // a lock of rows needs UPDATE
		{t.tries(), []string{"SELECT", "INSERT", "UPDATE"}, []string{"DELETE"}},
	}
}

// has is SQL that asks whether all of the rights are there.
func has(who string, rights []string) string {
	var parts []string
	for _, r := range rights {
		parts = append(parts, "pg_catalog.has_table_privilege("+who+", '"+r+"')")
	}
	return strings.Join(parts, " AND ")
}

// applyLock is that of `walrelay init`: two of them would both find nothing and
// then collide.
const applyLock = 0x77616c72656c6179 // "walrelay"

// Apply makes what is missing, in one transaction, and returns what it changed.
// Run again it changes nothing. It blocks for some dozen round trips.
//
// An existing table without the columns of the inbox is a Precondition failure.
func (s Schema) Apply(ctx context.Context, conn *pgx.Conn) (changes []string, err error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock($1)", int64(applyLock)); err != nil {
			return err
		}
		if err := s.rolesExist(ctx, tx); err != nil {
			return err
		}
		if err := run(ctx, tx, s.tables(), &changes); err != nil {
			return err
		}
		if err := s.Table.check(ctx, tx); err != nil {
			return err
		}
		return run(ctx, tx, s.rest(), &changes)
	})
	var f *event.Failure
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return changes, nil
	case errors.As(err, &f):
		return nil, err
	case errors.As(err, &pg) && pg.Code == "42501": // insufficient_privilege
		return nil, event.Fail(event.Precondition, "connect as the owner of the schema, or hand the SQL that `walrelay init --inbox` prints to one who may",
			"make the inbox %s: %w", s.Table.sql(), err)
	}
	return nil, fmt.Errorf("make the inbox %s: %w", s.Table.sql(), err)
}

// rolesExist refuses roles that are missing.
func (s Schema) rolesExist(ctx context.Context, tx pgx.Tx) error {
	for _, name := range s.Roles {
		var there bool
		if err := tx.QueryRow(ctx, "SELECT $1::text = 'public' OR EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = $1)", name).Scan(&there); err != nil {
			return err
		}
		if !there {
			return event.Fail(event.Precondition, "correct the name, or make the role first: CREATE ROLE "+pgx.Identifier{name}.Sanitize()+" LOGIN;", "role %q does not exist", name)
		}
	}
	return nil
}

func run(ctx context.Context, tx pgx.Tx, all []statement, changes *[]string) error {
	for _, st := range all {
		var done bool
		if err := tx.QueryRow(ctx, st.done, st.args...).Scan(&done); err != nil {
			return err
		}
		if done {
			continue
		}
		if _, err := tx.Exec(ctx, st.sql); err != nil {
			return err
		}
		*changes = append(*changes, st.did)
	}
	return nil
}

// check compares the table with what Once needs: columns, and the unique key
// without which every event would seem to be the first.
func (t Table) check(ctx context.Context, tx pgx.Tx) error {
	hint := "make it with `walrelay init --inbox --apply` in the consumer's database, or name another one"
	for _, part := range []struct {
		table   string
		columns []string
	}{
		{t.sql(), []string{"consumer", "id", "processed_at"}},
		{t.tries(), []string{"consumer", "id", "tries", "tried_at"}},
	} {
		var columns []string
		var unique bool
		err := tx.QueryRow(ctx, `
			SELECT coalesce((SELECT array_agg(attname::text) FROM pg_catalog.pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped), '{}'),
			       EXISTS (SELECT FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indnkeyatts = 2
			               AND (SELECT count(*) FROM pg_catalog.pg_attribute a WHERE a.attrelid = c.oid AND a.attname IN ('consumer', 'id') AND a.attnum = ANY (i.indkey::int2[])) = 2)
			FROM pg_catalog.pg_class c WHERE c.oid = pg_catalog.to_regclass($1)`, part.table).Scan(&columns, &unique)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return event.Fail(event.Precondition, hint, "there is no table %s", part.table)
		case err != nil:
			return fmt.Errorf("look at table %s: %w", part.table, err)
		}
		for _, c := range part.columns {
			if !slices.Contains(columns, c) {
				return event.Fail(event.Precondition, hint, "table %s has no column %s: it is no inbox", part.table, c)
			}
		}
		if !unique {
			return event.Fail(event.Precondition, "ALTER TABLE "+part.table+" ADD PRIMARY KEY (consumer, id)",
				"table %s has no unique key of consumer and id: events would be handled more than once", part.table)
		}
	}
	return nil
}

// checkRights tells of rights that are missing before an event needs them.
func (t Table) checkRights(ctx context.Context, tx pgx.Tx) error {
	for _, r := range t.rights() {
		var all bool
		var user string
		if err := tx.QueryRow(ctx, "SELECT "+has("$1::text", r.once)+", current_user", r.table).Scan(&all, &user); err != nil {
			return fmt.Errorf("look at the rights on table %s: %w", r.table, err)
		}
		if !all {
			return event.Fail(event.Precondition, "walrelay init --inbox --inbox-grant "+user+" --apply, as the owner of the table",
				"role %q lacks %s on table %s", user, strings.Join(r.once, " or "), r.table)
		}
	}
	return nil
}
