package outbox

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

// applyLock serializes concurrent Applies, which would otherwise both find
// nothing and then collide.
const applyLock = 0x77616c72656c6179 // "walrelay"

// note begins a line of Apply that tells of something it left as it is.
const note = "note: "

// Apply makes what is missing, in one transaction, and returns what it changed
// and, on lines that begin with "note: ", what it left though it is unusual. Run
// again it changes nothing.
//
// An existing table is never altered: where it differs from the contract the
// error is a Precondition failure around a *Mismatch, and nothing is changed.
// It blocks for some dozen round trips and for locks on the table.
func Apply(ctx context.Context, conn *pgx.Conn, s Schema) (changes []string, err error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	a := &applier{Schema: s}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		a.tx = tx
		return a.run(ctx)
	})
	if err != nil {
		return nil, classify(err, "apply schema of table %s", s.Table)
	}
	return append(a.changes, a.notes...), nil
}

// classify keeps failures as they are and gives Postgres's refusals a class.
func classify(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	var f *event.Failure
	if errors.As(err, &f) {
		return err
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) {
		return fmt.Errorf("%s: %w", what, err)
	}
	switch pg.Code {
	case "42501": // insufficient_privilege
		return event.Fail(event.Precondition,
			"connect as the owner of the table with CREATE on the database, for a new role as a superuser; or hand the SQL that `walrelay init` prints to one who may",
			"%s: %w", what, err)
	case "42939": // reserved_name
		return event.Fail(event.Precondition, "choose another name: Postgres keeps this one for itself", "%s: %w", what, err)
	case "25006": // read_only_sql_transaction
		return event.Fail(event.Precondition, "connect to the primary; a standby cannot be changed", "%s: %w", what, err)
	}
	if strings.HasPrefix(pg.Code, "40") || strings.HasPrefix(pg.Code, "53") || strings.HasPrefix(pg.Code, "57") {
		return fmt.Errorf("%s: %w", what, err) // passes: deadlock, resources, shutdown
	}
	return event.Fail(event.Unexpected, "", "%s: %w", what, err)
}

type applier struct {
	Schema
	tx      pgx.Tx
	changes []string
	notes   []string
}

func (a *applier) run(ctx context.Context) error {
	if _, err := a.tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock($1)", int64(applyLock)); err != nil {
		return err
	}
	rel, err := a.ensureTable(ctx)
	if err != nil {
		return err
	}
	ensure := a.ensurePublication
	if a.Shards > 0 {
		ensure = a.ensureShards
	}
	if err := ensure(ctx, rel); err != nil {
		return err
	}
	if err := a.ensureSent(ctx, rel); err != nil {
		return err
	}
	if a.Role == "" {
		return nil
	}
	return a.ensureRole(ctx)
}

func (a *applier) note(format string, args ...any) {
	a.notes = append(a.notes, note+fmt.Sprintf(format, args...))
}

// change runs a statement and reports it.
func (a *applier) change(ctx context.Context, sql, format string, args ...any) error {
	if _, err := a.tx.Exec(ctx, sql); err != nil {
		return err
	}
	a.changes = append(a.changes, fmt.Sprintf(format, args...))
	return nil
}

func (a *applier) holds(ctx context.Context, sql string, args ...any) (bool, error) {
	var yes bool
	err := a.tx.QueryRow(ctx, sql, args...).Scan(&yes)
	return yes, err
}

// rolesExist refuses roles that are missing. Which rights the makers of an
// application's role want to give it is not known here, so none is made.
func (a *applier) rolesExist(ctx context.Context, names []string) error {
	for _, name := range names {
		there, err := a.holds(ctx, "SELECT $1::text = 'public' OR EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = $1)", name)
		if err != nil {
			return err
		}
		if !there {
			return event.Fail(event.Precondition, "correct the name, or make the role first: CREATE ROLE "+ident(name)+" LOGIN;", "role %q does not exist", name)
		}
	}
	return nil
}

func (a *applier) ensureTable(ctx context.Context) (*relation, error) {
	schema := a.Table.schema()
	there, err := a.holds(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)", schema)
	if err != nil {
		return nil, err
	}
	if !there {
		if err := a.change(ctx, a.createSchema(), "schema %s created", ident(schema)); err != nil {
			return nil, err
		}
	}
	rel, err := relationOf(ctx, a.tx, a.Table)
	if err != nil {
		return nil, err
	}
	if rel == nil {
		if err := a.change(ctx, a.createTable(false), "table %s created", a.table()); err != nil {
			return nil, err
		}
		if err := a.partition(ctx); err != nil {
			return nil, err
		}
		return relationOf(ctx, a.tx, a.Table)
	}
	if err := a.compare(ctx, rel); err != nil {
		return rel, err
	}
	if a.Partitioned != "" && !rel.partitioned() {
		a.note("table %s is not partitioned, and a table is never altered", a.Table)
		return rel, nil
	}
	return rel, a.partition(ctx)
}

// partition makes the partitions that are missing, and says how many.
func (a *applier) partition(ctx context.Context) error {
	if a.Partitioned == "" {
		return nil
	}
	count := func() (n int, err error) {
		err = a.tx.QueryRow(ctx, "SELECT count(*) FROM pg_catalog.pg_inherits WHERE inhparent = $1::text::regclass", a.table()).Scan(&n)
		return n, err
	}
	before, err := count()
	if err != nil {
		return err
	}
	if _, err := a.tx.Exec(ctx, a.partitionsBlock()); err != nil {
		return err
	}
	after, err := count()
	if err == nil && after > before {
		a.changes = append(a.changes, fmt.Sprintf("%d partitions of table %s created", after-before, a.table()))
	}
	return err
}

func (a *applier) compare(ctx context.Context, rel *relation) error {
	switch {
	case rel.kind != "r" && rel.kind != "p":
		return event.Fail(event.Precondition, "choose another name, or name the table behind it",
			"%s exists and is not a table", a.Table)
	case rel.persistence != "p":
		return event.Fail(event.Precondition, "make it permanent: ALTER TABLE "+a.table()+" SET LOGGED",
			"table %s is unlogged or temporary: its rows are not in the write-ahead log", a.Table)
	}
	cols, err := columnsOf(ctx, a.tx, rel.oid)
	if err != nil {
		return err
	}
	if err := Compare(a.Table, cols); err != nil {
		return err
	}
	if names := missing(a.Table, cols); len(names) > 0 {
		a.note("table %s has no column %s; the relay runs without", a.Table, strings.Join(names, ", "))
	}
	if rel.partition {
		a.note("table %s is a partition: rows of its siblings are not published; name the root to publish all", a.Table)
	}
	if rel.partitioned() {
		return nil // cannot have a unique id without the partition key
	}
	unique, err := a.holds(ctx, `
		SELECT EXISTS (
			SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute k ON k.attrelid = i.indrelid AND k.attnum = i.indkey[0]
			WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indnkeyatts = 1 AND i.indpred IS NULL AND k.attname = $2)`,
		rel.oid, a.Table.column(roleID))
	if err == nil && !unique {
		a.note("column %q of table %s has no unique index: a second row with the id of another is parked, not published",
			a.Table.column(roleID), a.Table)
	}
	return err
}

func (a *applier) ensurePublication(ctx context.Context, rel *relation) error {
	var pub struct {
		oid                                   uint32
		all, insert, update, del, trunc, root bool
	}
	err := a.tx.QueryRow(ctx, `
		SELECT oid, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
		FROM pg_catalog.pg_publication WHERE pubname = $1`, a.Publication).
		Scan(&pub.oid, &pub.all, &pub.insert, &pub.update, &pub.del, &pub.trunc, &pub.root)
	name := ident(a.Publication)
	if errors.Is(err, pgx.ErrNoRows) {
		return a.change(ctx, a.createPublication(rel.partitioned()), "publication %s created for table %s", name, a.table())
	}
	if err != nil {
		return err
	}
	if !pub.insert {
		return event.Fail(event.Precondition, "ALTER PUBLICATION "+name+" SET (publish = 'insert'), or choose another publication",
			"publication %s does not publish inserts", name)
	}
	if pub.all {
		a.note("publication %s is FOR ALL TABLES: the relay reads and drops the rows of every other table", name)
	}
	var more []string
	for _, op := range []struct {
		on   bool
		name string
	}{{pub.update, "updates"}, {pub.del, "deletes"}, {pub.trunc, "truncates"}} {
		if op.on {
			more = append(more, op.name)
		}
	}
	if len(more) > 0 {
		a.note("publication %s also publishes %s, which the relay reads and drops: ALTER PUBLICATION %s SET (publish = 'insert') would spare them",
			name, strings.Join(more, ", "), name)
	}
	if rel.partitioned() && !pub.root {
		if err := a.publishRoot(ctx, pub.oid, pub.all); err != nil {
			return err
		}
	}
	if pub.all {
		return nil
	}
	return a.ensureMember(ctx, pub.oid, rel)
}

// publishRoot makes the rows of a partitioned table arrive under its own name,
// unless that would rename the rows of another.
func (a *applier) publishRoot(ctx context.Context, pub uint32, all bool) error {
	name := ident(a.Publication)
	sql := "ALTER PUBLICATION " + name + " SET (publish_via_partition_root = true)"
	others, err := a.holds(ctx, `
		SELECT EXISTS (
			SELECT FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_class c ON c.oid = r.prrelid
			WHERE r.prpubid = $1 AND c.relkind = 'p'
			AND r.prrelid <> (SELECT c.oid FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
			                  WHERE n.nspname = $2 AND c.relname = $3))`, pub, a.Table.schema(), a.Table.Name)
	if err != nil {
		return err
	}
	if !others && !all {
		others, err = a.bySchema(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_namespace WHERE pnpubid = $1)", pub)
		if err != nil {
			return err
		}
	}
	if others || all {
		return event.Fail(event.Precondition, sql+", unless other readers of the publication rely on the names of partitions; or choose another publication",
			"table %s is partitioned and publication %s sends its rows under the names of the partitions", a.Table, name)
	}
	return a.change(ctx, sql, "publication %s publishes via the partition root", name)
}

// bySchema asks something of publications FOR TABLES IN SCHEMA, which came with 15.
func (a *applier) bySchema(ctx context.Context, sql string, args ...any) (bool, error) {
	since15, err := a.since15(ctx)
	if err != nil || !since15 {
		return false, err
	}
	return a.holds(ctx, sql, args...)
}

func (a *applier) since15(ctx context.Context) (bool, error) {
	return a.holds(ctx, "SELECT pg_catalog.current_setting('server_version_num')::int >= 150000")
}

func (a *applier) ensureMember(ctx context.Context, pub uint32, rel *relation) error {
	listed, err := a.holds(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_rel WHERE prpubid = $1 AND prrelid = $2)", pub, rel.oid)
	if err != nil {
		return err
	}
	if listed {
		return a.checkMember(ctx, pub, rel)
	}
	inSchema, err := a.bySchema(ctx, `
		SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_namespace p JOIN pg_catalog.pg_class c ON c.relnamespace = p.pnnspid
		               WHERE p.pnpubid = $1 AND c.oid = $2)`, pub, rel.oid)
	if err != nil || inSchema {
		return err
	}
	return a.change(ctx, a.addTable(), "table %s added to publication %s", a.table(), ident(a.Publication))
}

// checkMember looks at what a publication leaves out of a table: rows by a
// filter, columns by a list. Both came with 15.
func (a *applier) checkMember(ctx context.Context, pub uint32, rel *relation) error {
	since15, err := a.since15(ctx)
	if err != nil || !since15 {
		return err
	}
	var filtered bool
	var list []string
	err = a.tx.QueryRow(ctx, `
		SELECT r.prqual IS NOT NULL,
		       (SELECT array_agg(a.attname::text) FROM pg_catalog.pg_attribute a
		        WHERE a.attrelid = r.prrelid AND a.attnum = ANY (r.prattrs::int2[]))
		FROM pg_catalog.pg_publication_rel r WHERE r.prpubid = $1 AND r.prrelid = $2`, pub, rel.oid).Scan(&filtered, &list)
	if err != nil {
		return err
	}
	name := ident(a.Publication)
	if filtered {
		a.note("publication %s has a row filter for table %s: rows that do not match are never events", name, a.Table)
	}
	if list == nil {
		return nil
	}
	var lacks []string
	for _, role := range roles {
		c := a.Table.column(role)
		_, explicit := a.Table.Columns[role]
		if c != "" && role != roleSeq && (wanted[role].needed || explicit) && !slices.Contains(list, c) {
			lacks = append(lacks, c)
		}
	}
	if len(lacks) > 0 {
		return event.Fail(event.Precondition,
			"give the table's entry in the publication a list with these columns, or none: ALTER PUBLICATION … SET TABLE names every table of the publication anew",
			"publication %s leaves columns of table %s out: %s", name, a.Table, strings.Join(lacks, ", "))
	}
	return nil
}

func (a *applier) ensureRole(ctx context.Context) error {
	name := ident(a.Role)
	var login, replication bool
	err := a.tx.QueryRow(ctx, "SELECT rolcanlogin, rolreplication OR rolsuper FROM pg_catalog.pg_roles WHERE rolname = $1", a.Role).
		Scan(&login, &replication)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		if err := a.change(ctx, a.createRole(), "role %s created with LOGIN REPLICATION and no password", name); err != nil {
			return err
		}
	case err != nil:
		return err
	case !login || !replication:
		// A managed service may grant this in another way, and more rights for
		// an existing role are its owner's to give.
		a.note("role %s lacks LOGIN or REPLICATION: ALTER ROLE %s LOGIN REPLICATION, or what your service has in its place", name, name)
	}
	var database string
	if err := a.tx.QueryRow(ctx, "SELECT pg_catalog.current_database()").Scan(&database); err != nil {
		return err
	}
	type grant struct {
		has  string
		args []any
		sql  string
	}
	grants := []grant{
		{
			"SELECT pg_catalog.has_database_privilege($1::text, $2::text, 'CONNECT')",
			[]any{database},
			fmt.Sprintf("GRANT CONNECT ON DATABASE %s TO %s", ident(database), name),
		},
		{"SELECT pg_catalog.has_schema_privilege($1::text, $2::text, 'USAGE')", []any{a.Table.schema()}, a.grantUsage()},
		{"SELECT pg_catalog.has_table_privilege($1::text, $2::text, 'SELECT')", []any{a.table()}, a.grantSelect()},
	}
	if a.Delete {
		grants = append(grants, grant{"SELECT pg_catalog.has_table_privilege($1::text, $2::text, 'DELETE')", []any{a.table()}, a.grantDelete()})
	}
	for _, g := range grants {
		has, err := a.holds(ctx, g.has, append([]any{a.Role}, g.args...)...)
		if err != nil {
			return err
		}
		if has {
			continue
		}
		if err := a.change(ctx, g.sql, "%s", g.sql); err != nil {
			return err
		}
	}
	return nil
}
