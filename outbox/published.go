package outbox

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/event"
)

// published are the columns whose values the publications send. Generated columns are not
// sent before Postgres 18; from then on stored ones are with publish_generated_columns =
// stored or in a column list, virtual ones never (pub_form_cols_map in pg_publication.c).
// Column lists came with 15.
func published(ctx context.Context, q querier, t Table, cols []Column, publications []string) ([]Column, error) {
	named, err := listed(ctx, q, t, publications)
	if err != nil {
		return nil, err
	}
	var sent []Column
	for _, c := range cols {
		if named != nil && slices.Contains(named, c.Name) || named == nil && c.Generated == "" {
			sent = append(sent, c)
		}
	}
	return sent, nil
}

// listed are the names in pg_publication_tables; nil when no publication has the table under
// its own name, or the server does not tell.
func listed(ctx context.Context, q querier, t Table, publications []string) ([]string, error) {
	// attnames came with 15; to_jsonb has it where it is.
	rows, err := q.Query(ctx, `
		SELECT a.name, a.name IN (SELECT k.attname::text FROM pg_catalog.pg_attribute k
			WHERE k.attrelid = p.rel AND k.attgenerated <> '') AND pg_catalog.current_setting('server_version_num')::int < 180000
		FROM (SELECT to_jsonb(t) -> 'attnames' AS names, c.oid AS rel
			FROM pg_catalog.pg_publication_tables t
				JOIN pg_catalog.pg_namespace n ON n.nspname = t.schemaname
				JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = t.tablename
			WHERE t.pubname = ANY($1) AND t.schemaname = $2 AND t.tablename = $3) p,
			LATERAL jsonb_array_elements_text(CASE jsonb_typeof(p.names) WHEN 'array' THEN p.names ELSE '[]' END) a(name)`,
		publications, t.schema(), t.Name)
	if err != nil {
		return nil, err
	}
	var names []string
	for rows.Next() {
		var name string
		var withheld bool
		if err := rows.Scan(&name, &withheld); err != nil {
			return nil, err
		}
		if !withheld {
			names = append(names, name)
		}
	}
	return names, rows.Err()
}

// withheld is the failure of a table whose columns fit the mapping while those that are sent
// do not; nil when both do.
func withheld(ctx context.Context, q querier, m *Mapper, t Table, cols []Column, publications []string) error {
	sent, err := published(ctx, q, t, cols, publications)
	if err != nil {
		return classify(err, "read what is published of table %s", t)
	}
	if m.Check(t, sent) == nil {
		return nil
	}
	var why []string
	for _, c := range cols {
		if slices.ContainsFunc(sent, func(s Column) bool { return s.Name == c.Name }) || !m.uses(t, c.Name) {
			continue
		}
		if c.Generated != "" {
			why = append(why, fmt.Sprintf("column %q is generated (%s)", c.Name, c.Generated))
		} else {
			why = append(why, fmt.Sprintf("column %q is not in the column list", c.Name))
		}
	}
	return event.Fail(event.Precondition,
		"map an ordinary column, which a trigger can fill, or add the column to the publication's list; "+
			"Postgres 18 sends stored generated columns with ALTER PUBLICATION "+ident(firstOf(append(publications, "…")...))+" SET (publish_generated_columns = stored), earlier versions and virtual columns never",
		"the publication does not send a column of table %s that the mapping needs: %s", t, strings.Join(why, "; "))
}

// uses reports whether the mapping reads a column of the table.
func (m *Mapper) uses(t Table, column string) bool {
	s := m.tables[tableKey(t.schema(), t.Name)]
	if s == nil {
		return false
	}
	for _, role := range roles {
		if role != roleSeq && slices.Contains(alternatives(s.table.names(role)), column) {
			return true
		}
	}
	return slices.ContainsFunc(s.columns, func(c HeaderColumn) bool { return slices.Contains(alternatives(c.Column), column) })
}

// ensureSent refuses a table with a column that has a role and is not sent, before a relay
// would find it out by rows that it can only park.
func (a *applier) ensureSent(ctx context.Context, rel *relation) error {
	cols, err := columnsOf(ctx, a.tx, rel.oid)
	if err != nil {
		return err
	}
	publications := []string{a.Publication}
	sent, err := published(ctx, a.tx, a.Table, cols, publications)
	if err != nil {
		return err
	}
	for _, c := range cols {
		role := slices.IndexFunc(roles, func(role string) bool { return role != roleSeq && a.Table.column(role) == c.Name })
		if role < 0 || c.Generated == "" || slices.ContainsFunc(sent, func(s Column) bool { return s.Name == c.Name }) {
			continue
		}
		return event.Fail(event.Precondition,
			"use an ordinary column, which a trigger can fill; Postgres 18 sends stored generated columns with ALTER PUBLICATION "+
				ident(a.Publication)+" SET (publish_generated_columns = stored), earlier versions and virtual columns never",
			"column %q (%s) of table %s is generated (%s): the publication does not send it", c.Name, roles[role], a.Table, c.Generated)
	}
	return nil
}
