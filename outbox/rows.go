package outbox

import (
	"bytes"
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/charset"
	"github.com/walrelay/walrelay/event"
)

// Selection chooses rows of a table.
type Selection struct {
	IDs   []string // as text; none takes the newest rows
	Limit int      // rows at most
}

// Rows reads rows as the replication stream would send them, oldest first:
// each becomes a Row without a position. The newest are those with the highest
// seq, or else created_at. It blocks for some round trips.
func Rows(ctx context.Context, conn *pgx.Conn, t Table, sel Selection) ([]*event.Record, error) {
	rel, err := relationOf(ctx, conn, t)
	if err != nil {
		return nil, classify(err, "read table %s", t)
	}
	if rel == nil {
		return nil, event.Fail(event.Precondition, "correct --table, or create it with `walrelay init --apply`", "table %s does not exist", t)
	}
	cols, err := columnsOf(ctx, conn, rel.oid)
	if err != nil {
		return nil, classify(err, "read table %s", t)
	}
	var records []*event.Record
	// What the replication session sets, so that the text form is the same.
	const settings = "SET LOCAL datestyle = 'ISO'; SET LOCAL intervalstyle = 'postgres'; SET LOCAL extra_float_digits = 3; " +
		"SET LOCAL timezone = 'UTC'; SET LOCAL bytea_output = 'hex'"
	err = pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, settings, pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		records, err = readRows(ctx, tx, t, cols, sel)
		return err
	})
	if err != nil {
		return nil, readError(err, t)
	}
	slices.Reverse(records)
	return records, nil
}

func readRows(ctx context.Context, tx pgx.Tx, t Table, cols []Column, sel Selection) ([]*event.Record, error) {
	r := &event.Relation{Schema: t.schema(), Name: t.Name}
	for _, c := range cols {
		r.Columns = append(r.Columns, event.Column{Name: c.Name, Type: c.OID})
	}
	sql := "SELECT * FROM " + pgx.Identifier{t.schema(), t.Name}.Sanitize()
	if len(sel.IDs) > 0 {
		sql += " WHERE " + anyID(t, cols, sel.IDs)
	}
	for _, role := range []string{roleSeq, roleCreatedAt} {
		if name := t.column(role); slices.ContainsFunc(cols, func(c Column) bool { return c.Name == name }) {
			sql += " ORDER BY " + ident(name) + " DESC"
			break
		}
	}
	pg := tx.Conn().PgConn()
	texts := charset.New(pg, &tx.Conn().Config().Config)
	defer texts.Close()
	sql = fmt.Sprintf("%s LIMIT %d", sql, sel.Limit)
	raw := texts.Reads(sql)
	if raw {
		// As they are stored: one value that the server cannot convert would end the read.
		if _, err := pg.Exec(ctx, "SET LOCAL client_encoding = 'SQL_ASCII'").ReadAll(); err != nil {
			return nil, err
		}
	}
	// Every value comes as text.
	rows := pg.ExecParams(ctx, sql, nil, nil, nil, nil)
	var records []*event.Record
	var failed error
	for rows.NextRow() {
		rec := &event.Record{Kind: event.Row, Relation: r}
		for _, v := range rows.Values() {
			rec.Values = append(rec.Values, bytes.Clone(v))
		}
		if raw && failed == nil {
			var foreign []bool
			foreign, failed = texts.Row(rec.Values)
			rec.Foreign = slices.Clone(foreign)
			for i, v := range rec.Values {
				rec.Values[i] = bytes.Clone(v)
			}
		}
		records = append(records, rec)
	}
	if _, err := rows.Close(); err != nil {
		return nil, err
	}
	return records, failed
}
