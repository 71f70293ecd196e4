package slotmgr

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Blocker is an open transaction that a new slot waits for.
type Blocker struct {
	PID         int           `json:"pid"` // zero for a prepared transaction, or when it is not visible
	Database    string        `json:"database"`
	User        string        `json:"user"`
	Application string        `json:"application"`
	State       string        `json:"state"` // as in pg_stat_activity, or "prepared"
	Since       time.Time     `json:"since"`
	Age         time.Duration `json:"-"`
	Query       string        `json:"query"` // its head without literals; for a prepared transaction its identifier

	gid string // of a prepared transaction, whole
}

func (b Blocker) String() string {
	who := fmt.Sprintf("pid %d", b.PID)
	if b.State == "prepared" {
		who = "a prepared transaction"
	}
	s := fmt.Sprintf("%s, open for %s in database %q", who, b.Age.Round(time.Second), b.Database)
	if b.Application != "" {
		s += fmt.Sprintf(" by %q", shorten(b.Application))
	}
	if b.Query != "" {
		s += ": " + b.Query
	}
	return s
}

// Remedy is the SQL that ends the transaction when it does not end by itself.
func (b Blocker) Remedy() string {
	if b.State == "prepared" {
		return fmt.Sprintf("let it end, or in database %q: ROLLBACK PREPARED %s;", b.Database, literalOf(b.gid))
	}
	return fmt.Sprintf("let it end, or end it: SELECT pg_terminate_backend(%d);", b.PID)
}

func literalOf(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// WatchBlockers reports which transactions the session pid waits for while it
// creates a slot, once they are known and whenever they change. It blocks until
// ctx ends; a server that cannot be asked reports nothing. told is called by the
// goroutine that called WatchBlockers.
func WatchBlockers(ctx context.Context, cfg *pgx.ConnConfig, pid uint32, told func([]Blocker)) {
	look := lookout{cfg: cfg, pid: pid}
	defer look.end()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if now := look.changed(ctx); now != nil {
				told(now)
			}
		}
	}
}

// lookout reads the blockers of a session over a connection of its own, which is
// opened only when there is something to wait for.
type lookout struct {
	cfg  *pgx.ConnConfig
	pid  uint32
	conn *pgx.Conn
	last []Blocker
}

// changed returns the blockers when they are others than before, else nil.
func (l *lookout) changed(ctx context.Context) []Blocker {
	if l.conn == nil || l.conn.IsClosed() {
		l.conn, _ = pgx.ConnectConfig(ctx, l.cfg) // without it the wait is only less telling
	}
	if l.conn == nil {
		return nil
	}
	now, err := blockers(ctx, l.conn, l.pid)
	if err != nil || len(now) == 0 {
		return nil
	}
	same := slices.EqualFunc(now, l.last, func(a, b Blocker) bool { return a.PID == b.PID && a.Since.Equal(b.Since) })
	l.last = now
	if same {
		return nil
	}
	return now
}

func (l *lookout) end() {
	if l.conn != nil {
		hangUp(l.conn)
	}
}

// blockers lists the transactions that the session pid waits for: the one whose
// end it awaits just now, and every writing one that is older than its own,
// since it awaits them in turn (SnapBuildWaitSnapshot in snapbuild.c). A walsender
// that creates a slot is in no transaction, so its command's begin counts. A role
// without pg_read_all_stats sees the first kind only.
func blockers(ctx context.Context, conn *pgx.Conn, pid uint32) ([]Blocker, error) {
	rows, err := conn.Query(ctx, `
with me as (
	select coalesce(xact_start, query_start) as xact_start, pg_blocking_pids(pid) as by from pg_stat_activity where pid = $1 and wait_event_type = 'Lock'
)
select a.pid, coalesce(a.datname::text, '') as database, coalesce(a.usename::text, '') as "user", coalesce(a.application_name, '') as application,
	coalesce(a.state, '') as state, coalesce(a.xact_start, me.xact_start) as since,
	extract(epoch from clock_timestamp() - coalesce(a.xact_start, me.xact_start))::float8 as seconds,
	case when a.state is null then '' else a.query end as query
from pg_stat_activity a, me
where a.pid <> $1 and (a.pid = any(me.by) or a.backend_xid is not null and a.xact_start < me.xact_start)
union all
select 0, p.database::text, p.owner::text, '', 'prepared', p.prepared, extract(epoch from clock_timestamp() - p.prepared)::float8, p.gid
from pg_prepared_xacts p, me
where p.prepared < me.xact_start
order by since, pid`, int32(pid))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, blockerOf)
}

func blockerOf(row pgx.CollectableRow) (Blocker, error) {
	var b Blocker
	var seconds float64
	err := row.Scan(&b.PID, &b.Database, &b.User, &b.Application, &b.State, &b.Since, &seconds, &b.Query)
	b.Age = time.Duration(seconds * float64(time.Second))
	if b.State == "prepared" {
		b.gid, b.Query = b.Query, shorten(b.Query)
	} else {
		b.Query = queryHead(b.Query)
	}
	return b, err
}
