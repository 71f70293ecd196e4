package outbox

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/charset"
	"github.com/walrelay/walrelay/event"
)

// Reader reads the rows of outbox tables in one snapshot, as the replication
// stream would send them. It is not safe for concurrent use.
type Reader struct {
	conn         *pgx.Conn
	tables       []ordered
	publications []string
	texts        *charset.Charset // nil for a database that is UTF8
}

// asReplicated are the settings with which the text form of values is that of the
// replication connection.
var asReplicated = []string{
	"set client_encoding = 'UTF8'", "set datestyle = 'ISO'", "set intervalstyle = 'postgres'",
	"set extra_float_digits = 3", "set timezone = 'UTC'", "set bytea_output = 'hex'",
}

// ordered is a table with what is needed to read it.
type ordered struct {
	Table
	cols     []Column
	relation *event.Relation
	order    string // column
	where    string // the publications' row filters; "" without
}

// OpenReader begins a read-only transaction on conn, in the snapshot of that name
// or, when it is "", in one of its own, and finds the tables' columns. order is the column by
// which rows are read; "" is the one with the role seq. Close ends the transaction.
func OpenReader(ctx context.Context, conn *pgx.Conn, snapshot string, tables []Table, order string, publications []string) (*Reader, error) {
	r := &Reader{conn: conn, publications: publications, texts: charset.New(conn.PgConn(), &conn.Config().Config)}
	begin := append(slices.Clone(asReplicated),
		"set statement_timeout = 0", "set idle_in_transaction_session_timeout = 0",
		"begin isolation level repeatable read read only")
	if snapshot != "" {
		begin = append(begin, "set transaction snapshot "+quote(snapshot))
	}
	for _, sql := range begin {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return nil, classify(err, "begin to read the outbox")
		}
	}
	for _, t := range tables {
		o, err := r.open(ctx, t, order)
		if err != nil {
			return nil, err
		}
		r.tables = append(r.tables, o)
	}
	return r, nil
}

func (r *Reader) open(ctx context.Context, t Table, order string) (ordered, error) {
	o := ordered{Table: t, order: order}
	if o.order == "" {
		o.order = t.column(roleSeq)
	}
	rel, err := relationOf(ctx, r.conn, t)
	if err != nil {
		return o, classify(err, "inspect table %s", t)
	}
	if rel == nil {
		return o, event.Fail(event.Precondition, "create it with `walrelay init --apply`, or correct --table", "table %s does not exist", t)
	}
	if o.cols, err = columnsOf(ctx, r.conn, rel.oid); err != nil {
		return o, classify(err, "inspect table %s", t)
	}
	if o.order == "" || !slices.ContainsFunc(o.cols, func(c Column) bool { return c.Name == o.order }) {
		return o, event.Fail(event.Usage, "name a column that grows from event to event with --backfill-order, such as created_at",
			"table %s has no column %q to order its rows by", t, o.order)
	}
	o.relation = &event.Relation{ID: rel.oid, Schema: t.schema(), Name: t.Name}
	for _, c := range o.cols {
		o.relation.Columns = append(o.relation.Columns, event.Column{Name: c.Name, Type: c.OID})
	}
	o.where, err = r.filter(ctx, rel.oid)
	return o, err
}

// filter is what the publications let through of the table, "" when that is every row.
func (r *Reader) filter(ctx context.Context, oid uint32) (string, error) {
	var since15 bool
	if err := r.conn.QueryRow(ctx, "select pg_catalog.current_setting('server_version_num')::int >= 150000").Scan(&since15); err != nil || !since15 {
		return "", err
	}
	var filters []string
	var whole bool
	err := r.conn.QueryRow(ctx, `
		select coalesce(array_agg(p.rowfilter) filter (where p.rowfilter is not null), '{}'), coalesce(bool_or(p.rowfilter is null), true)
		from pg_catalog.pg_publication_tables p join pg_catalog.pg_namespace n on n.nspname = p.schemaname
			join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = p.tablename
		where p.pubname = any($1) and c.oid = $2`, r.publications, oid).Scan(&filters, &whole)
	if err != nil || whole {
		return "", err
	}
	return "(" + strings.Join(filters, ") OR (") + ")", nil
}

// Close ends the transaction. The connection stays open.
func (r *Reader) Close(ctx context.Context) error {
	r.texts.Close()
	_, err := r.conn.Exec(ctx, "rollback")
	return err
}

func (o *ordered) name() string { return pgx.Identifier{o.schema(), o.Name}.Sanitize() }

// columns is the select list of a whole row.
func (o *ordered) columns() string {
	names := make([]string, len(o.cols))
	for i, c := range o.cols {
		names[i] = ident(c.Name)
	}
	return strings.Join(names, ", ")
}

func (o *ordered) from() string {
	sql := "FROM " + o.name()
	if o.where != "" {
		sql += " WHERE " + o.where
	}
	return sql
}

// Count returns the number of rows of all tables.
func (r *Reader) Count(ctx context.Context) (int64, error) {
	var total int64
	for _, o := range r.tables {
		var n int64
		if err := r.conn.QueryRow(ctx, "SELECT count(*) "+o.from()).Scan(&n); err != nil {
			return 0, classify(err, "count the rows of table %s", o.Table)
		}
		total += n
	}
	return total, nil
}

// All reads the rows, table after table and each in its order, which is the same
// every time. Rows with the same value are read as they lie in the table. Of a
// record only Kind, Relation and Values are set; it is valid until the next
// one. An error is the last that is yielded.
func (r *Reader) All(ctx context.Context) iter.Seq2[*event.Record, error] {
	return func(yield func(*event.Record, error) bool) {
		for i := range r.tables {
			if !r.table(ctx, &r.tables[i], yield) {
				return
			}
		}
	}
}

func (r *Reader) table(ctx context.Context, o *ordered, yield func(*event.Record, error) bool) bool {
	sql := fmt.Sprintf("SELECT %s %s ORDER BY %s, tableoid, ctid", o.columns(), o.from(), ident(o.order))
	raw := r.texts.Reads(sql)
	if raw {
		// As they are stored: one value that the server cannot convert would end the read.
		if err := encode(ctx, r.conn, "SQL_ASCII"); err != nil {
			yield(nil, classify(err, "read table %s", o.Table))
			return false
		}
	}
	// Each value in its text form, and no more rows at hand than the connection buffers.
	read := r.conn.PgConn().ExecParams(ctx, sql, nil, nil, nil, nil)
	rec := event.Record{Kind: event.Row, Relation: o.relation}
	for read.NextRow() {
		rec.Values = read.Values()
		if raw {
			var err error
			if rec.Foreign, err = r.texts.Row(rec.Values); err != nil {
				r.abandon(read.Close)
				yield(nil, classify(err, "read table %s", o.Table))
				return false
			}
		}
		if !yield(&rec, nil) {
			r.abandon(read.Close)
			return false
		}
	}
	if _, err := read.Close(); err != nil {
		yield(nil, classify(err, "read table %s", o.Table))
		return false
	}
	if raw {
		if err := encode(ctx, r.conn, "UTF8"); err != nil {
			yield(nil, classify(err, "read table %s", o.Table))
			return false
		}
	}
	return true
}

// encode sets the client's encoding by the simple protocol, which pgx refuses itself once it
// is not UTF8.
func encode(ctx context.Context, conn *pgx.Conn, client string) error {
	_, err := conn.PgConn().Exec(ctx, "set client_encoding = "+quote(client)).ReadAll()
	return err
}

// abandonPatience bounds the wait for a query to be canceled.
const abandonPatience = 5 * time.Second

// abandon ends a query whose remaining rows nobody wants, which could be all of
// a large table. The transaction is over then, too.
func (r *Reader) abandon(end func() (pgconn.CommandTag, error)) {
	ctx, cancel := context.WithTimeout(context.Background(), abandonPatience)
	defer cancel()
	_ = r.conn.PgConn().CancelRequest(ctx) // without it the rest is read, which takes longer
	_, _ = end()                           // canceled, as wanted
}

// Since leaves out, of each table, the rows up to the last in order among those
// with the given ids, or with lowest up to the first of them. It says for each
// table which are left, as column > value, and which tables have none of them.
func (r *Reader) Since(ctx context.Context, ids []string, lowest bool) (from map[string]string, without []string, err error) {
	from = map[string]string{}
	pick := "max"
	if lowest {
		pick = "min"
	}
	for i := range r.tables {
		o := &r.tables[i]
		// An id that the column's type cannot hold is that of another table.
		var last *string
		err := r.conn.QueryRow(ctx, fmt.Sprintf("SELECT %s(%s)::text FROM %s WHERE %s::text = ANY($1)",
			pick, ident(o.order), o.name(), ident(o.column(roleID))), ids).Scan(&last)
		if err != nil {
			return nil, nil, classify(err, "look for stored events in table %s", o.Table)
		}
		if last == nil {
			without = append(without, o.String())
			continue
		}
		bound := fmt.Sprintf("%s > %s", ident(o.order), quote(*last))
		from[o.String()] = o.order + " > " + *last
		if o.where != "" {
			bound += " AND (" + o.where + ")"
		}
		o.where = bound
	}
	return from, without, nil
}

// CountAfter returns how many rows come, in the order of each one's table,
// after the row with an id; ok is false when no table has it.
func (r *Reader) CountAfter(ctx context.Context, id string) (n int64, ok bool, err error) {
	_, without, err := r.Since(ctx, []string{id}, false)
	if err != nil || len(without) > 0 {
		return 0, false, err
	}
	n, err = r.Count(ctx)
	return n, err == nil, err
}
