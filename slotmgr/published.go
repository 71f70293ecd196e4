package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Published is one look at how the rows of tables are sent.
type Published struct {
	// Flushed is the end of the flushed log when the look began, which may lie within a record.
	Flushed event.LSN
	// Entries are, by schema.table, what each table is sent by: its OID with that
	// of the publication's entry for it, which is a new one whenever the table
	// was taken out and put back, or its filter or column list was changed, and
	// the transaction that last altered the publication itself.
	Entries map[string][]string
	// OIDs of the tables, in the order that was asked for.
	OIDs []uint32
	// Err says which tables are not sent, and what to do; nil when all are. It is a Precondition failure.
	Err error
}

// LookAtPublications looks at how the rows of tables are sent. before is an
// earlier look or nil; it helps to say what became of a table.
func LookAtPublications(ctx context.Context, conn *pgx.Conn, publications []string, tables []Table, before *Published) (Published, error) {
	p := Published{Entries: map[string][]string{}}
	var flushed string
	if err := conn.QueryRow(ctx, "select ("+walFlushed+")::text").Scan(&flushed); err != nil {
		return p, fmt.Errorf("look at the publications: %w", err)
	}
	var err error
	if p.Flushed, err = event.ParseLSN(flushed); err != nil {
		return p, err
	}
	bySchema := ""
	if major(conn) >= 15 {
		bySchema = `union all
	select 's' || e.oid || '@' || p.xmin from pg_publication_namespace e join pg_publication p on p.oid = e.pnpubid
	where p.pubname = any($3) and p.pubinsert and (c.relkind <> 'p' or p.pubviaroot) and e.pnnspid = c.relnamespace`
	}
	for i, t := range tables {
		var oid uint32
		var entries []string
		// Without via_root the rows of a partitioned table come under the names of its partitions.
		err := conn.QueryRow(ctx, `
select c.oid, array(
	select 'a' || p.oid || '@' || p.xmin from pg_publication p
	where p.pubname = any($3) and p.pubinsert and (c.relkind <> 'p' or p.pubviaroot) and p.puballtables
	union all
	select 'r' || e.oid || '@' || p.xmin from pg_publication_rel e join pg_publication p on p.oid = e.prpubid
	where p.pubname = any($3) and p.pubinsert and (c.relkind <> 'p' or p.pubviaroot) and (
		e.prrelid = c.oid or not p.pubviaroot and e.prrelid in (select a.relid from pg_partition_ancestors(c.oid) a))
	`+bySchema+`)
from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = $1 and c.relname = $2 and c.relkind in ('r', 'p') and c.relpersistence = 'p'`, t.Schema, t.Name, publications).Scan(&oid, &entries)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return p, fmt.Errorf("look at the publications: %w", err)
		}
		p.OIDs = append(p.OIDs, oid)
		if len(entries) > 0 {
			key := t.Schema + "." + t.Name
			for _, e := range entries {
				p.Entries[key] = append(p.Entries[key], fmt.Sprintf("%d/%s", oid, e))
			}
			continue
		}
		if p.Err == nil {
			was := uint32(0)
			if before != nil && i < len(before.OIDs) {
				was = before.OIDs[i]
			}
			if p.Err, err = unsent(ctx, conn, publications, t, was, oid); err != nil {
				return p, err
			}
		}
	}
	return p, nil
}

// unsent explains why the rows of a table are not sent under its name. was is its OID before, 0 when unknown.
func unsent(ctx context.Context, conn *pgx.Conn, publications []string, t Table, was, oid uint32) (failure, err error) {
	if oid == 0 && was != 0 {
		var now Table
		err := conn.QueryRow(ctx, `select n.nspname::text, c.relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace where c.oid = $1`, was).
			Scan(&now.Schema, &now.Name)
		if err == nil && now == t {
			return event.Fail(event.Precondition, fmt.Sprintf("ALTER TABLE %s SET LOGGED;", t), "table %s has become unlogged: its rows no longer reach the log", t), nil
		}
		if err == nil {
			return event.Fail(event.Precondition,
				fmt.Sprintf("start again with --table %s.%s, or rename it back: no row is passed over", now.Schema, now.Name),
				"table %s was renamed to %s", t, now), nil
		}
	}
	// A new preflight has words for the rest.
	found, err := Preflight(ctx, conn, Want{Publications: publications, Tables: []Table{t}})
	if err != nil {
		return nil, err
	}
	if failure = found.Err(); failure == nil { // what was wrong is right again; the entries tell
		failure = event.Fail(event.Transient, "", "table %s was not published for a moment", t)
	}
	return failure, nil
}

// Interrupted returns a table that was taken out of the publications and put
// back, or made anew, between an earlier look and this one; "" when none was.
func (p Published) Interrupted(before Published) string {
	for table, now := range p.Entries {
		was := strings.Join(before.Entries[table], " ") + " "
		kept := false
		for _, e := range now {
			kept = kept || strings.Contains(was, e+" ")
		}
		if len(before.Entries[table]) > 0 && !kept {
			return table
		}
	}
	return ""
}
