package outbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/charset"
	"github.com/walrelay/walrelay/event"
)

// Range chooses stored rows. What is zero does not choose.
type Range struct {
	From time.Time `json:"from,omitzero"` // created_at from here on
	To   time.Time `json:"to,omitzero"`   // and before here
	IDs  []string  `json:"ids,omitempty"`

	AggregateType string `json:"aggregate_type,omitempty"`
	AggregateID   string `json:"aggregate_id,omitempty"`
}

// Place is the place of a row among those of a Range.
type Place struct {
	Table string `json:"table"`
	Order string `json:"order"` // value of the column that orders the table
	ID    string `json:"id"`
}

// RangeReader reads the rows of a Range, table after table, each in its order,
// as the replication stream would send them. It holds no snapshot: it reads a batch
// at a time, and rows that are deleted meanwhile are missing. One goroutine uses it.
type RangeReader struct {
	conn   *pgx.Conn
	tables []ranged
}

type ranged struct {
	ordered
	id    string // columns, quoted
	by    string // column of the order, quoted
	byTyp string // its type, as SQL writes it
	cond  string // what chooses rows
}

// OpenRange looks at the tables' columns and changes settings of the connection.
// order is the column by which rows are read; "" is the one with the role seq.
func OpenRange(ctx context.Context, conn *pgx.Conn, tables []Table, r Range, order string, publications []string) (*RangeReader, error) {
	rr := &RangeReader{conn: conn}
	for _, sql := range asReplicated {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return nil, classify(err, "begin to read the outbox")
		}
	}
	reader := &Reader{conn: conn, publications: publications}
	for _, t := range tables {
		o, err := reader.open(ctx, t, order)
		if err != nil {
			if event.ClassOf(err) == event.Usage {
				return nil, event.Fail(event.Usage, "name a column that grows from event to event with --order, such as created_at", "%w", err)
			}
			return nil, err
		}
		one := ranged{ordered: o, id: ident(t.column(roleID)), by: ident(o.order)}
		one.byTyp = o.cols[slices.IndexFunc(o.cols, func(c Column) bool { return c.Name == o.order })].Type
		if one.cond, err = r.condition(t, o.cols); err != nil {
			return nil, err
		}
		if o.where != "" {
			one.cond += " AND (" + o.where + ")"
		}
		rr.tables = append(rr.tables, one)
	}
	return rr, nil
}

// condition is the SQL that chooses rows of a table.
func (r Range) condition(t Table, cols []Column) (string, error) {
	has := func(role, option string) (string, error) {
		name := t.column(role)
		if name == "" || !slices.ContainsFunc(cols, func(c Column) bool { return c.Name == name }) {
			return "", event.Fail(event.Usage, "map the role to a column in --table, or choose rows otherwise", "table %s has no column for %s, which %s needs", t, role, option)
		}
		return ident(name), nil
	}
	conds := []string{"true"}
	for _, bound := range []struct {
		at           time.Time
		sign, option string
	}{{r.From, ">=", "--from"}, {r.To, "<", "--to"}} {
		if bound.at.IsZero() {
			continue
		}
		created, err := has(roleCreatedAt, bound.option)
		if err != nil {
			return "", err
		}
		conds = append(conds, fmt.Sprintf("%s %s %s", created, bound.sign, quote(bound.at.UTC().Format("2006-01-02 15:04:05.999999Z07:00"))))
	}
	if len(r.IDs) > 0 {
		conds = append(conds, anyID(t, cols, r.IDs))
	}
	for _, part := range []struct{ value, role string }{{r.AggregateType, roleAggregateType}, {r.AggregateID, roleAggregateID}} {
		if part.value == "" {
			continue
		}
		column, err := has(part.role, "--aggregate")
		if err != nil {
			return "", err
		}
		conds = append(conds, fmt.Sprintf("%s::text = %s", column, quote(part.value)))
	}
	return strings.Join(conds, " AND "), nil
}

// anyID is the SQL for rows with one of the ids. In the type of the column an
// index is of use; an id that the type cannot hold is that of no row.
func anyID(t Table, cols []Column, ids []string) string {
	column := t.column(roleID)
	cast := ""
	if i := slices.IndexFunc(cols, func(c Column) bool { return c.Name == column }); i >= 0 {
		fits := func(ok func(string) bool) bool {
			return !slices.ContainsFunc(ids, func(id string) bool { return !ok(id) })
		}
		switch cols[i].OID {
		case event.TypeUUID:
			if fits(func(id string) bool { return uuidText([]byte(id)) }) {
				cast = "uuid"
			}
		case event.TypeInt8, event.TypeInt4, event.TypeInt2:
			if fits(func(id string) bool { return len(id) > 0 && len(id) < 19 && strings.Trim(id, "0123456789") == "" }) {
				cast = "bigint"
			}
		case event.TypeText, event.TypeVarchar:
			cast = "text"
		}
	}
	quoted := make([]string, len(ids))
	for i, id := range ids {
		quoted[i] = quote(id)
		if cast != "" {
			quoted[i] += "::" + cast
		}
	}
	if cast == "" {
		return fmt.Sprintf("%s::text IN (%s)", ident(column), strings.Join(quoted, ", "))
	}
	return fmt.Sprintf("%s IN (%s)", ident(column), strings.Join(quoted, ", "))
}

func (o *ranged) key() string { return o.id + `::text COLLATE "C"` }

func (o *ranged) after(p Place) string {
	return fmt.Sprintf("(%s, %s) > (%s::%s, %s)", o.by, o.key(), quote(p.Order), o.byTyp, quote(p.ID))
}

func (o *ranged) upTo(p Place) string {
	return fmt.Sprintf("(%s, %s) <= (%s::%s, %s)", o.by, o.key(), quote(p.Order), o.byTyp, quote(p.ID))
}

// Ends are, for each table that has rows in the range, the place of the last. Rows that are
// written later lie behind it, but for those of transactions that are open now.
func (r *RangeReader) Ends(ctx context.Context) ([]Place, error) {
	var ends []Place
	for i := range r.tables {
		p, ok, err := r.one(ctx, &r.tables[i], "DESC")
		if err != nil {
			return nil, err
		}
		if ok {
			ends = append(ends, p)
		}
	}
	return ends, nil
}

// First is the place of the first row, false without one.
func (r *RangeReader) First(ctx context.Context) (Place, bool, error) {
	for i := range r.tables {
		if p, ok, err := r.one(ctx, &r.tables[i], "ASC"); ok || err != nil {
			return p, ok, err
		}
	}
	return Place{}, false, nil
}

// one is the first or the last place. A value's text must not have the column's
// name, or rows would be ordered by that.
func (r *RangeReader) one(ctx context.Context, o *ranged, direction string) (Place, bool, error) {
	p := Place{Table: o.String()}
	err := r.conn.QueryRow(ctx, fmt.Sprintf("SELECT %s::text AS \"?\", %s AS \"??\" FROM %s WHERE %s AND %s IS NOT NULL ORDER BY %s %s, 2 %s LIMIT 1",
		o.by, o.key(), o.name(), o.cond, o.id, o.by, direction, direction)).Scan(&p.Order, &p.ID)
	if errors.Is(err, pgx.ErrNoRows) {
		return p, false, nil
	}
	if err != nil {
		return p, false, r.failed(err, o)
	}
	return p, true, nil
}

func (r *RangeReader) failed(err error, o *ranged) error { return readError(err, o.Table) }

// readError tells a role that may not read from others.
func readError(err error, t Table) error {
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "42501" {
		return event.Fail(event.Precondition, fmt.Sprintf("GRANT SELECT ON %s TO the role", pgx.Identifier{t.schema(), t.Name}.Sanitize()), "read table %s: %w", t, err)
	}
	return classify(err, "read table %s", t)
}

// Count returns how many rows there are up to the ends.
func (r *RangeReader) Count(ctx context.Context, ends []Place) (int64, error) {
	var total int64
	for i := range r.tables {
		o := &r.tables[i]
		end, ok := endOf(ends, o)
		if !ok {
			continue
		}
		var n int64
		err := r.conn.QueryRow(ctx, fmt.Sprintf("SELECT count(*) FROM %s WHERE %s AND %s", o.name(), o.cond, o.upTo(end))).Scan(&n)
		if err != nil {
			return 0, r.failed(err, o)
		}
		total += n
	}
	return total, nil
}

func endOf(ends []Place, o *ranged) (Place, bool) {
	i := slices.IndexFunc(ends, func(p Place) bool { return p.Table == o.String() })
	if i < 0 {
		return Place{}, false
	}
	return ends[i], true
}

// Read returns the rows behind a place, the zero Place being before all, up to the ends: of one table, limit rows at
// most, and fewer when they are large. None are returned at the end.
func (r *RangeReader) Read(ctx context.Context, after Place, ends []Place, limit, bytes int) ([]*event.Record, []Place, error) {
	begun := after == Place{}
	for i := range r.tables {
		o := &r.tables[i]
		from := Place{}
		if !begun {
			if begun = after.Table == o.String(); !begun {
				continue
			}
			from = after
		}
		end, ok := endOf(ends, o)
		if !ok {
			continue
		}
		records, places, err := r.read(ctx, o, from, end, limit, bytes)
		if err != nil || len(records) > 0 {
			return records, places, err
		}
	}
	if !begun {
		return nil, nil, event.Fail(event.Usage, "name the tables as when the run began", "table %s, of which rows are left, is not given", after.Table)
	}
	return nil, nil, nil
}

func (r *RangeReader) read(ctx context.Context, o *ranged, from, end Place, limit, most int) (records []*event.Record, places []Place, err error) {
	cond := o.cond + " AND " + o.upTo(end)
	if from != (Place{}) {
		cond += " AND " + o.after(from)
	}
	sql := fmt.Sprintf("SELECT %s::text AS \"?\", %s AS \"??\", %s FROM %s WHERE %s ORDER BY %s, 2 LIMIT %d",
		o.by, o.key(), o.columns(), o.name(), cond, o.by, limit)
	texts := charset.New(r.conn.PgConn(), &r.conn.Config().Config)
	defer texts.Close()
	raw := texts.Reads(sql)
	if raw { // one value that the server cannot convert would end the read
		if err := encode(ctx, r.conn, "SQL_ASCII"); err != nil {
			return nil, nil, r.failed(err, o)
		}
	}
	read := r.conn.PgConn().ExecParams(ctx, sql, nil, nil, nil, nil)
	size := 0
	var failed error
	for read.NextRow() {
		if size >= most {
			continue // the rest is for the next time
		}
		rec := &event.Record{Kind: event.Row, Relation: o.relation}
		values := read.Values()
		if raw && failed == nil {
			var foreign []bool
			if foreign, failed = texts.Row(values); foreign != nil {
				rec.Foreign = slices.Clone(foreign[2:])
			}
		}
		for _, v := range values[2:] {
			size += len(v)
			rec.Values = append(rec.Values, bytes.Clone(v))
		}
		records = append(records, rec)
		places = append(places, Place{Table: o.String(), Order: string(values[0]), ID: string(values[1])})
	}
	if _, err := read.Close(); err != nil {
		return nil, nil, r.failed(err, o)
	}
	if raw && failed == nil {
		failed = encode(ctx, r.conn, "UTF8")
	}
	if failed != nil {
		return nil, nil, r.failed(failed, o)
	}
	return records, places, nil
}

// ReplayOf is a row as a replay has it.
func ReplayOf(rec *event.Record) *ReplayRow {
	row := &ReplayRow{Schema: rec.Relation.Schema, Table: rec.Relation.Name, Values: rec.Values, Foreign: rec.Foreign}
	for _, c := range rec.Relation.Columns {
		row.Columns = append(row.Columns, ReplayColumn{Name: c.Name, Type: c.Type})
	}
	return row
}
