package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Oldest is the oldest major version of Postgres that is supported.
const Oldest = 14

// Level is event's.
type Level = event.Level

// Finding is event's.
type Finding = event.Finding

// Findings are event's.
type Findings = event.Findings

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

	// Messages says that logical messages are events, too.
	Messages bool

	// WALSenderTimeout is what the relay sets for its session; zero keeps the server's.
	WALSenderTimeout time.Duration
}

// Preflight looks whether the server, the role, the publications, the tables
// and the slot are as the relay needs them. It changes nothing and asks about
// fifteen short questions. The error tells that a question failed, not a finding.
func Preflight(ctx context.Context, conn *pgx.Conn, want Want) (Findings, error) {
	p := preflight{ctx: ctx, conn: conn, want: want}
	if p.version() {
		p.server()
		p.encoding()
		p.settings()
		p.room()
		p.timeouts()
		p.role()
		p.messages()
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

	keep         int64 // max_slot_wal_keep_size, in MB
	sender, idle int64 // wal_sender_timeout, in ms, and idle_replication_slot_timeout, in s
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

// settings reads numbers in the units that they are set in. The server lists all
// of its settings for each look at pg_settings, so there is one.
func (p *preflight) settings() {
	p.ask(`select max(setting::int8) filter (where name = 'max_slot_wal_keep_size'), max(setting::int8) filter (where name = 'wal_sender_timeout'),
		coalesce(max(setting::int8) filter (where name = 'idle_replication_slot_timeout'), 0)
		from pg_settings where name in ('max_slot_wal_keep_size', 'wal_sender_timeout', 'idle_replication_slot_timeout')`,
		nil, &p.keep, &p.sender, &p.idle)
}

// littleLog is a max_slot_wal_keep_size, in MB, that a busy server fills in minutes.
const littleLog = 256

// room finds whether a slot and a walsender are free, and how much log a slot may keep.
func (p *preflight) room() {
	var slots, maxSlots, senders, maxSenders int
	var mine, active bool
	// pg_stat_get_wal_senders is what pg_stat_replication counts: the view also joins who they are.
	if !p.ask(`select count(*), current_setting('max_replication_slots')::int,
		(select count(*) from pg_stat_get_wal_senders()), current_setting('max_wal_senders')::int,
		coalesce(bool_or(slot_name = $1), false), coalesce(bool_or(slot_name = $1 and active), false)
		from pg_replication_slots`,
		[]any{p.want.Slot}, &slots, &maxSlots, &senders, &maxSenders, &mine, &active) {
		return
	}
	f := Finding{Name: "slots", Detail: fmt.Sprintf("%d of %d replication slots are used", slots, maxSlots)}
	if slots >= maxSlots && p.want.Slot != "" && !mine {
		f.Level = FAIL
		f.Remedy = "drop a slot that is not needed (walrelay slot list --all), or raise max_replication_slots and restart Postgres"
	}
	p.add(f)
	f = Finding{Name: "walsenders", Detail: fmt.Sprintf("%d of %d walsenders are used", senders, maxSenders)}
	if senders >= maxSenders && !active {
		f.Level = WARN
		f.Remedy = "end replication sessions that nobody needs, or raise max_wal_senders and restart Postgres: the relay waits until one is free"
	}
	p.add(f)
	f = Finding{Name: "keep_size", Detail: "max_slot_wal_keep_size is unlimited: the slot is never lost, and the log of a relay that stays away fills the disk"}
	switch keep := p.keep; {
	case keep >= 0 && keep < littleLog:
		f.Level = WARN
		f.Detail = fmt.Sprintf("max_slot_wal_keep_size is %d MB: the slot is lost as soon as the relay is that far behind", keep)
		f.Remedy = "ALTER SYSTEM SET max_slot_wal_keep_size = '10GB'; SELECT pg_reload_conf(); or whatever the disk can spare"
	case keep >= 0:
		f.Detail = fmt.Sprintf("max_slot_wal_keep_size is %d MB: a relay that is further behind loses its slot", keep)
	}
	p.add(f)
}

// shortTimeout is a wal_sender_timeout that a pause of a loaded machine exceeds.
const shortTimeout = 5 * time.Second

func (p *preflight) timeouts() {
	if p.err != nil {
		return
	}
	timeout := time.Duration(p.sender) * time.Millisecond
	whose := "of the server"
	if p.want.WALSenderTimeout > 0 {
		timeout, whose = p.want.WALSenderTimeout, "that the relay sets"
	}
	f := Finding{Name: "wal_sender_timeout", Detail: fmt.Sprintf("wal_sender_timeout %s is %s", whose, timeout)}
	switch {
	case timeout == 0:
		f.Level = WARN
		f.Detail = "wal_sender_timeout is 0: the session of a relay whose network is cut holds the slot for ever"
		f.Remedy = "run with --wal-sender-timeout 60s"
	case timeout < shortTimeout:
		f.Level = WARN
		f.Remedy = "run with --wal-sender-timeout 60s: a short pause of either machine ends the session"
	}
	p.add(f)
	if p.idle > 0 { // since 18
		p.add(Finding{
			Name: "idle_timeout", Level: WARN,
			Detail: fmt.Sprintf("idle_replication_slot_timeout is %s: a relay that is stopped for longer loses its slot", time.Duration(p.idle)*time.Second),
			Remedy: "ALTER SYSTEM SET idle_replication_slot_timeout = 0; SELECT pg_reload_conf(); or never stop the relay for so long",
		})
	}
}

// messages finds who may make events by logical messages.
func (p *preflight) messages() {
	if !p.want.Messages {
		return
	}
	var public bool
	if !p.ask(`select coalesce(bool_or(p.proacl is null or exists (select from aclexplode(p.proacl) a where a.grantee = 0 and a.privilege_type = 'EXECUTE')), false)
		from pg_proc p where p.proname = 'pg_logical_emit_message' and p.pronamespace = 'pg_catalog'::regnamespace`, nil, &public) {
		return
	}
	f := Finding{Name: "messages", Detail: "only chosen roles may emit logical messages"}
	if public {
		f.Level = WARN
		f.Detail = "any role of the database may emit logical messages, and so make events"
		f.Remedy = "walrelay init --messages prints the REVOKE and GRANT"
	}
	p.add(f)
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

// publicationMissing is the finding of a publication that does not exist. tables
// is what it would be for; "…" leaves that to the reader.
func publicationMissing(conn *pgx.Conn, name, tables string) Finding {
	if tables != "" {
		tables = " FOR TABLE " + tables
	}
	return Finding{
		Name: "publication", Level: FAIL, Class: event.Precondition,
		Detail: fmt.Sprintf("publication %q does not exist in database %q", name, database(conn.Config())),
		Remedy: fmt.Sprintf("walrelay init --apply, or CREATE PUBLICATION %s%s WITH (publish = 'insert');", quote(name), tables),
	}
}

func (p *preflight) publications() {
	for _, name := range p.want.Publications {
		var inserts bool
		switch ok := p.ask("select pubinsert from pg_publication where pubname = $1", []any{name}, &inserts); {
		case p.err != nil:
			return
		case !ok:
			tables := make([]string, len(p.want.Tables))
			for i, t := range p.want.Tables {
				tables[i] = t.String()
			}
			p.add(publicationMissing(p.conn, name, strings.Join(tables, ", ")))
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
	names := []any{t.Schema, t.Name, p.present}
	ok := p.ask(`
select c.relkind::text, c.relpersistence::text,
	exists (select from pg_publication_tables t where t.pubname = any($3) and t.schemaname = n.nspname and t.tablename = c.relname)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2`, names, &kind, &persistence, &published)
	if ok && !published { // to plan these takes longer than all the rest
		p.ask(`
select case when c.relispartition then coalesce((
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
where n.nspname = $1 and c.relname = $2`, names, &root, &leaves)
	}
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
	case len(p.present) < len(p.want.Publications):
		return // it is to be in the publication whose absence is told already
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

// narrowed finds row filters and column lists.
func (p *preflight) narrowed(t Table) {
	if major(p.conn) < 15 {
		return
	}
	var filters, quals, lists []string
	if !p.ask(`
select array_agg(p.pubname::text order by 1) filter (where r.prqual is not null), array_agg(pg_get_expr(r.prqual, r.prrelid) order by p.pubname) filter (where r.prqual is not null),
	array_agg(p.pubname::text order by 1) filter (where r.prattrs is not null)
from pg_publication p join pg_publication_rel r on r.prpubid = p.oid join pg_class c on c.oid = r.prrelid join pg_namespace n on n.oid = c.relnamespace
where p.pubname = any($3) and n.nspname = $1 and c.relname = $2`, []any{t.Schema, t.Name, p.present}, &filters, &quals, &lists) {
		return
	}
	for i, pub := range filters {
		if s, ok := parseShard(quals[i]); ok {
			p.sharded(t, pub, s)
			continue
		}
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
		p.add(twoPhase(s))
	}
}
