package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Oldest is the oldest major version of Postgres that is supported.
const Oldest = 14

// What a preflight finds.
type (
	Level    = event.Level
	Finding  = event.Finding
	Findings = event.Findings
)

// The levels of a finding.
const (
	OK   = event.OK
	WARN = event.WARN
	FAIL = event.FAIL
)

// Table names a table.
type Table struct{ Schema, Name string }

func (t Table) String() string { return quote(t.Schema, t.Name) }

// Want is what the relay is going to use.
type Want struct {
	Slot         string // empty: not looked at
	Publications []string
	Tables       []Table // the outbox tables

	// ApplicationName is the one of the replication connection.
	ApplicationName string
}

// Preflight looks whether the server, the role, the publications, the tables
// and the slot are as the relay needs them. It changes nothing and asks about
// ten short questions. The error tells that a question failed, not a finding.
func Preflight(ctx context.Context, conn *pgx.Conn, want Want) (Findings, error) {
	p := preflight{ctx: ctx, conn: conn, want: want}
	if p.version() {
		p.server()
		p.role()
		p.publications()
		p.tables()
		p.slot()
	}
	if p.err != nil {
		return p.found, fmt.Errorf("check the server: %w", p.err)
	}
	return p.found, nil
}

// preflight gathers findings; after the first error its checks do nothing.
type preflight struct {
	ctx   context.Context
	conn  *pgx.Conn
	want  Want
	found Findings
	err   error

	database string
	present  []string // publications that exist
}

func (p *preflight) add(f Finding) {
	p.found = append(p.found, f)
}

// ask scans the only row of a query. It returns false when there is none or
// something failed.
func (p *preflight) ask(sql string, args []any, into ...any) bool {
	if p.err != nil {
		return false
	}
	err := p.conn.QueryRow(p.ctx, sql, args...).Scan(into...)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		p.err = err
	}
	return err == nil
}

func (p *preflight) version() bool {
	text := p.conn.PgConn().ParameterStatus("server_version")
	if major(p.conn) < Oldest {
		p.add(Finding{
			Name: "version", Level: FAIL, Detail: "the server is Postgres " + text,
			Remedy: fmt.Sprintf("use Postgres %d or newer", Oldest),
		})
		return false
	}
	p.add(Finding{Name: "version", Detail: "Postgres " + text})
	return true
}

func (p *preflight) server() {
	var level, sync string
	var standby bool
	var backend uint32
	if !p.ask(`select current_database()::text, current_setting('wal_level'), pg_is_in_recovery(),
		current_setting('synchronous_standby_names'), pg_backend_pid()::int8`, nil, &p.database, &level, &standby, &sync, &backend) {
		return
	}
	p.add(walLevel(level))

	switch f := (Finding{Name: "standby"}); {
	case standby && major(p.conn) < 16:
		f.Level, f.Detail = FAIL, "the server is a standby, which can not decode its log before Postgres 16"
		f.Remedy = "connect to the primary"
		p.add(f)
	case standby:
		f.Level, f.Detail = WARN, "the server is a standby"
		f.Remedy = "connect to the primary, unless reading from the standby is meant"
		p.add(f)
	}

	// A pooler hands out process ids of its own, for cancel requests.
	if pid := p.conn.PgConn().PID(); pid != 0 && pid != backend {
		p.add(Finding{
			Name: "pooler", Level: WARN, Detail: "a connection pooler seems to be in between",
			Remedy: "give the address of Postgres itself: most poolers do not pass replication connections on",
		})
	}

	if catches(sync, p.want.ApplicationName) {
		p.add(Finding{
			Name: "synchronous", Level: WARN,
			Detail: fmt.Sprintf("synchronous_standby_names = '%s' makes the relay a synchronous standby: commits would wait for it", sync),
			Remedy: fmt.Sprintf("ALTER SYSTEM SET synchronous_standby_names = '…'; with the standbys by name, without %q; then SELECT pg_reload_conf();", p.want.ApplicationName),
		})
	}
}

func walLevel(level string) Finding {
	f := Finding{Name: "wal_level", Detail: "wal_level is " + level}
	if level != "logical" {
		f.Level = FAIL
		f.Remedy = "ALTER SYSTEM SET wal_level = logical; then restart Postgres"
	}
	return f
}

// catches reports whether synchronous_standby_names matches an application
// name. The grammar is that of syncrep_gram.y; names compare without case.
func catches(setting, application string) bool {
	list := setting
	if _, in, ok := strings.Cut(list, "("); ok {
		list = strings.TrimSuffix(strings.TrimSpace(in), ")")
	}
	for name := range strings.SplitSeq(list, ",") {
		name = strings.Trim(strings.TrimSpace(name), `"`)
		if name == "*" || name != "" && strings.EqualFold(name, application) {
			return true
		}
	}
	return false
}

// managed are the roles by which managed services give what the REPLICATION
// attribute gives elsewhere.
var managed = []string{"rds_replication", "rds_superuser", "cloudsqlsuperuser", "azure_pg_admin", "alloydbsuperuser"}

func (p *preflight) role() {
	var role string
	var may bool
	var through []string
	if !p.ask(`select rolname::text, rolreplication or rolsuper,
		array(select m.rolname::text from pg_roles m where m.rolname = any($1) and pg_has_role(r.oid, m.oid, 'member') order by 1)
		from pg_roles r where rolname = session_user`, []any{managed}, &role, &may, &through) {
		return
	}
	f := Finding{Name: "role", Detail: fmt.Sprintf("role %q may replicate", role)}
	if !may {
		f.Remedy = fmt.Sprintf("ALTER ROLE %s REPLICATION;", quote(role))
		if len(through) > 0 {
			f.Level = WARN
			f.Detail = fmt.Sprintf("role %q lacks REPLICATION, but is a member of %s", role, through[0])
			f.Remedy += " if the service refuses the replication connection"
		} else {
			f.Level = FAIL
			f.Detail = fmt.Sprintf("role %q lacks REPLICATION", role)
			f.Remedy += " (a managed service has a role to grant instead, such as rds_replication)"
		}
	}
	p.add(f)
}

func publicationMissing(conn *pgx.Conn, name string) Finding {
	return Finding{
		Name: "publication", Level: FAIL, Class: event.Precondition,
		Detail: fmt.Sprintf("publication %q does not exist in database %q", name, database(conn.Config())),
		Remedy: fmt.Sprintf("walrelay init --apply, or CREATE PUBLICATION %s FOR TABLE … WITH (publish = 'insert');", quote(name)),
	}
}

func (p *preflight) publications() {
	for _, name := range p.want.Publications {
		var inserts bool
		switch ok := p.ask("select pubinsert from pg_publication where pubname = $1", []any{name}, &inserts); {
		case p.err != nil:
			return
		case !ok:
			p.add(publicationMissing(p.conn, name))
		case !inserts:
			p.present = append(p.present, name)
			p.add(Finding{
				Name: "publication", Level: FAIL, Detail: fmt.Sprintf("publication %q does not publish inserts", name),
				Remedy: fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert');", quote(name)),
			})
		default:
			p.present = append(p.present, name)
			p.add(Finding{Name: "publication", Detail: fmt.Sprintf("publication %q publishes inserts", name)})
		}
	}
}

func (p *preflight) tables() {
	for _, t := range p.want.Tables {
		p.table(t)
		if p.err == nil {
			p.narrowed(t)
		}
	}
}

// table finds whether the rows of a table arrive under its name.
func (p *preflight) table(t Table) {
	f := Finding{Name: "table", Level: FAIL}
	var kind, persistence string
	var published bool
	var root, leaves string // the publication that names the root instead, or the partitions instead
	ok := p.ask(`
select c.relkind::text, c.relpersistence::text,
	exists (select from pg_publication_tables t where t.pubname = any($3) and t.schemaname = n.nspname and t.tablename = c.relname),
	case when c.relispartition then coalesce((
		select min(an.nspname || '.' || ac.relname)
		from pg_partition_ancestors(c.oid) a join pg_class ac on ac.oid = a.relid join pg_namespace an on an.oid = ac.relnamespace
			join pg_publication_tables t on t.schemaname = an.nspname and t.tablename = ac.relname
		where a.relid <> c.oid and t.pubname = any($3)), '') else '' end,
	case when c.relkind = 'p' then coalesce((
		select min(t.pubname::text)
		from pg_partition_tree(c.oid) a join pg_class ac on ac.oid = a.relid join pg_namespace an on an.oid = ac.relnamespace
			join pg_publication_tables t on t.schemaname = an.nspname and t.tablename = ac.relname
		where a.relid <> c.oid and t.pubname = any($3)), '') else '' end
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2`, []any{t.Schema, t.Name, p.present}, &kind, &persistence, &published, &root, &leaves)
	switch {
	case p.err != nil:
		return
	case !ok:
		f.Detail = fmt.Sprintf("table %s does not exist in database %q", t, p.database)
		f.Remedy = "walrelay init --apply, or name the outbox table with --table"
	case kind != "r" && kind != "p":
		f.Detail = fmt.Sprintf("%s is not a table", t)
		f.Remedy = "name the outbox table with --table"
	case persistence != "p":
		f.Detail = fmt.Sprintf("table %s is unlogged or temporary: its rows never reach the log", t)
		f.Remedy = fmt.Sprintf("ALTER TABLE %s SET LOGGED;", t)
	case published:
		f.Level = OK
		f.Detail = fmt.Sprintf("table %s is published", t)
	case root != "":
		f.Detail = fmt.Sprintf("rows of partition %s are published under the name of %s", t, root)
		f.Remedy = "name that table with --table"
	case leaves != "":
		f.Detail = fmt.Sprintf("publication %q publishes the partitions of %s under their own names", leaves, t)
		f.Remedy = fmt.Sprintf("ALTER PUBLICATION %s SET (publish_via_partition_root = true);", quote(leaves))
	case len(p.want.Publications) == 0:
		f.Detail = fmt.Sprintf("no publication is given for table %s", t)
		f.Remedy = "name it with --publication"
	default:
		quoted := make([]string, len(p.want.Publications))
		for i, name := range p.want.Publications {
			quoted[i] = fmt.Sprintf("%q", name)
		}
		f.Detail = fmt.Sprintf("table %s is not in publication %s: its rows are not sent", t, strings.Join(quoted, " or "))
		f.Remedy = fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s;", quote(p.want.Publications[0]), t)
	}
	p.add(f)
}

// narrowed warns of a row filter or a column list.
func (p *preflight) narrowed(t Table) {
	if major(p.conn) < 15 {
		return
	}
	var filters, lists []string
	if !p.ask(`
select array_agg(p.pubname::text order by 1) filter (where r.prqual is not null), array_agg(p.pubname::text order by 1) filter (where r.prattrs is not null)
from pg_publication p join pg_publication_rel r on r.prpubid = p.oid join pg_class c on c.oid = r.prrelid join pg_namespace n on n.oid = c.relnamespace
where p.pubname = any($3) and n.nspname = $1 and c.relname = $2`, []any{t.Schema, t.Name, p.present}, &filters, &lists) {
		return
	}
	for _, pub := range filters {
		p.add(Finding{
			Name: "filter", Level: WARN, Detail: fmt.Sprintf("publication %q has a row filter on %s: events that it leaves out are never sent", pub, t),
			Remedy: fmt.Sprintf("ALTER PUBLICATION %s SET TABLE %s; without WHERE, unless that is meant", quote(pub), t),
		})
	}
	for _, pub := range lists {
		p.add(Finding{
			Name: "columns", Level: WARN, Detail: fmt.Sprintf("publication %q has a column list on %s: the other columns are never sent", pub, t),
			Remedy: fmt.Sprintf("ALTER PUBLICATION %s SET TABLE %s; without columns, unless that is meant", quote(pub), t),
		})
	}
}

func (p *preflight) slot() {
	if p.want.Slot == "" || p.err != nil {
		return
	}
	s, exists, err := find(p.ctx, p.conn, p.want.Slot)
	if err != nil {
		p.err = err
		return
	}
	if !exists {
		remedy := createCommand(p.want.Slot)
		if len(p.want.Publications) > 0 {
			remedy = fmt.Sprintf("walrelay slot create %s --publication %s", p.want.Slot, strings.Join(p.want.Publications, ","))
		}
		p.add(Finding{Name: "slot", Level: FAIL, Detail: fmt.Sprintf("slot %q does not exist", p.want.Slot), Remedy: remedy})
		return
	}
	p.add(fitness(s, p.database))
	if fitness(s, p.database).Level == FAIL {
		return
	}
	if by := s.Holder(); by != "" {
		p.add(Finding{
			Name: "active", Level: WARN, Detail: fmt.Sprintf("slot %q is in use by %s", s.Name, by),
			Remedy: "that relay goes on; another one takes over when it ends",
		})
	}
	if s.WALStatus == "unreserved" {
		p.add(Finding{
			Name: "retention", Level: WARN, Detail: fmt.Sprintf("slot %q may be lost at the next checkpoint: more than max_slot_wal_keep_size is retained", s.Name),
			Remedy: "ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf(); until the relay has caught up",
		})
	}
	var guarded bool
	if s.Failover != nil && *s.Failover && p.ask("select current_setting('synchronized_standby_slots') <> ''", nil, &guarded) && !guarded {
		p.add(Finding{
			Name: "failover", Level: WARN, Detail: fmt.Sprintf("slot %q is a failover slot, but synchronized_standby_slots is empty: the relay may publish commits that a promoted standby does not have", s.Name),
			Remedy: "ALTER SYSTEM SET synchronized_standby_slots = '…'; with the physical slots of the standbys, then SELECT pg_reload_conf();",
		})
	}
	if s.TwoPhase {
		p.add(Finding{
			Name: "two_phase", Level: WARN, Detail: fmt.Sprintf("slot %q was created with two_phase, which it keeps for ever and the relay does not use", s.Name),
			Remedy: fmt.Sprintf("walrelay slot drop %s and create it anew when nothing is left in it", s.Name),
		})
	}
}
