package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/charset"
	"github.com/walrelay/walrelay/event"
)

// How far back Sample looks, and how many types it looks at.
const (
	sampleRows  = 10_000
	sampleTypes = 500
)

// Sample maps rows that are in the table to the events they would become: of
// the newest rows one of each aggregate type and event type, and the largest.
// Newest are those with the highest seq; without such a column any will do. It
// calls each with every event, and with what is wrong with it when it would be
// parked; the event is valid during the call.
//
// It reads at most ten thousand rows with their payloads, and blocks as long.
func Sample(ctx context.Context, conn *pgx.Conn, m *Mapper, t Table, each func(*event.Event, *event.Poison)) error {
	cols, err := Inspect(ctx, conn, t)
	if err != nil {
		return err
	}
	if err := m.Check(t, cols); err != nil {
		return err
	}
	rel := &event.Relation{Schema: t.schema(), Name: t.Name}
	texts := make([]string, len(cols))
	for i, c := range cols {
		rel.Columns = append(rel.Columns, event.Column{Name: c.Name, Type: c.OID})
		texts[i] = ident(c.Name) + "::text"
	}
	has := func(role string) string {
		name := t.column(role)
		if name == "" || !slices.ContainsFunc(cols, func(c Column) bool { return c.Name == name }) {
			return ""
		}
		return ident(name)
	}
	newest, kinds := "", "true"
	if seq := has(roleSeq); seq != "" {
		newest = "order by " + seq + " desc"
	}
	var by []string
	for _, role := range []string{roleAggregateType, roleEventType} {
		if c := has(role); c != "" {
			by = append(by, c)
		}
	}
	if len(by) > 0 {
		kinds = strings.Join(by, ", ")
	}
	sql := fmt.Sprintf(`with newest as materialized (select * from %s %s limit %d)
		(select distinct on (%s) %s from newest limit %d)
		union all (select %s from newest order by octet_length(%s::text) desc nulls last limit 1)`,
		pgx.Identifier{t.schema(), t.Name}.Sanitize(), newest, sampleRows,
		kinds, strings.Join(texts, ", "), sampleTypes, strings.Join(texts, ", "), has(rolePayload))

	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		client := "UTF8"
		values := charset.New(conn.PgConn(), &conn.Config().Config)
		defer values.Close()
		raw := values.Reads(sql)
		if raw {
			client = "SQL_ASCII" // one value that the server cannot convert would end the read
		}
		for _, setting := range []string{"client_encoding = '" + client + "'", "datestyle = 'ISO'", "timezone = 'UTC'", "bytea_output = 'hex'"} {
			if _, err := tx.Exec(ctx, "set local "+setting); err != nil {
				return err
			}
		}
		rows, err := tx.Query(ctx, sql)
		if err != nil {
			return err
		}
		defer rows.Close()
		texts := make([]*string, len(cols))
		into := make([]any, len(cols))
		for i := range texts {
			into[i] = &texts[i]
		}
		var ev event.Event
		for rows.Next() {
			if err := rows.Scan(into...); err != nil {
				return err
			}
			rec := event.Record{Kind: event.Row, CommitTime: time.Now(), Relation: rel, Values: make([][]byte, len(cols))}
			for i, text := range texts {
				if text != nil {
					rec.Values[i] = []byte(*text)
				}
			}
			if raw {
				var err error
				if rec.Foreign, err = values.Row(rec.Values); err != nil {
					return err
				}
			}
			ok, err := m.Map(&rec, &ev)
			var poison *event.Poison
			if err != nil && !errors.As(err, &poison) {
				return err
			}
			if ok {
				each(&ev, poison)
			}
		}
		return rows.Err()
	})
	if err != nil {
		return classify(err, "look at rows of table %s", t)
	}
	return nil
}

// Advise holds a table against what the mapping needs and what an operator
// should know of it. A missing table gives no finding: the preflight of the
// server tells that.
func Advise(ctx context.Context, conn *pgx.Conn, m *Mapper, t Table, publications []string) (event.Findings, error) {
	rel, err := relationOf(ctx, conn, t)
	if err != nil {
		return nil, classify(err, "inspect table %s", t)
	}
	if rel == nil {
		return nil, nil
	}
	cols, err := columnsOf(ctx, conn, rel.oid)
	if err != nil {
		return nil, classify(err, "inspect table %s", t)
	}
	err = m.Check(t, cols)
	if err == nil {
		if err = withheld(ctx, conn, m, t, cols, publications); err != nil && event.ClassOf(err) != event.Precondition {
			return nil, err
		}
	}
	if err != nil {
		return event.Findings{{Name: "mapping", Level: event.FAIL, Detail: err.Error(), Remedy: event.HintOf(err), Class: event.ClassOf(err)}}, nil
	}
	var found event.Findings
	id := t.column(roleID)
	var unique bool
	err = conn.QueryRow(ctx, `SELECT EXISTS (
		SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attname = $2
		WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
			AND (i.indnkeyatts = 1 OR $3) AND a.attnum = ANY (i.indkey::int2[]))`, rel.oid, id, rel.partitioned()).Scan(&unique)
	if err != nil {
		return nil, classify(err, "inspect the indexes of table %s", t)
	}
	f := event.Finding{Name: "unique_id", Detail: fmt.Sprintf("column %q of table %s is unique", id, t)}
	if !unique {
		f.Level = event.WARN
		f.Detail = fmt.Sprintf("no unique index is on column %q of table %s: of two rows with one id, within the dedup window, the second is parked", id, t)
		f.Remedy = fmt.Sprintf("CREATE UNIQUE INDEX CONCURRENTLY ON %s (%s);", pgx.Identifier{t.schema(), t.Name}.Sanitize(), ident(id))
	}
	found = append(found, f)
	if i := slices.IndexFunc(cols, func(c Column) bool { return c.Name == t.column(rolePayload) }); i >= 0 {
		f := event.Finding{Name: "payload", Detail: fmt.Sprintf("the payload of table %s is %s, which is published byte for byte as it was inserted", t, cols[i].Type)}
		if cols[i].text == event.TypeJSONB {
			f.Detail = fmt.Sprintf("the payload of table %s is jsonb, which Postgres stores with sorted keys and its own white space; json keeps every byte", t)
		}
		found = append(found, f)
	}
	return found, nil
}
