package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// PruneOptions say which rows of a table may go, and how.
type PruneOptions struct {
	Table        Table
	Publications []string // whose row filters say which rows are events
	OlderThan    time.Duration
	Batch        int // rows at a time

	// XID is that of a slotmgr.Horizon that the slots have confirmed.
	XID uint64
	// Since is the moment from which on rows are known to be sent; nil when there is none.
	Since *event.Mark
}

// Candidate is a row and what decides whether it may go.
type Candidate struct {
	ID     []byte // as text; nil for NULL
	Old    bool   // enough, by the column with the role created_at
	Passed bool   // inserted, or updated last, by a transaction before the horizon
	Sent   bool   // inserted since the slot sends without a gap
	Event  bool   // the publications let it through

	table uint32 // OID of the table or partition
	ctid  string
}

// Pruner deletes rows of a table over a connection that it alone uses. It is not
// safe for concurrent use.
//
// xmin is a system column of 32 bits. Since 9.4 a row keeps it when it is frozen
// (HEAP_XMIN_FROZEN in htup_details.h; documentation, "Preventing Transaction ID
// Wraparound Failures"), so it says who wrote the row, whatever vacuum did. It is
// made one of 64 bits by the snapshot of the statement that reads it: the row is visible, so its
// xid is below the snapshot's xmax, and the highest such number is taken. A row
// that is older than 2^32 transactions seems to be younger than it is.
//
// So does a row that was updated, since it has the xid of its update. For Passed that
// errs on the right side. Sent also asks that created_at be no earlier than the moment,
// which neither an update nor the wraparound changes.
type Pruner struct {
	o    PruneOptions
	conn *pgx.Conn

	root   *relation
	from   string // the table in SQL
	cols   []Column
	cut    string // timestamp below which rows are old
	flags  string // select list of a candidate's flags
	xid    string // the row's xid, with xmaxHere
	blocks int64  // of the largest partition, when the rows are read in the order of the heap
	block  int64
	seq    string // column, when they are read by its index
	last   int64
	done   bool
}

const (
	// pruneLockTimeout is the longest wait for a lock. Whoever comes later waits behind us as long.
	pruneLockTimeout = 100 * time.Millisecond
	// saveBytes is about how much of the rows is in memory before it is saved.
	saveBytes = 4 << 20
	// rowsInBlock is a guess that keeps a batch near its size.
	rowsInBlock = 32
)

// OpenPruner examines the table and begins at its first row. It sets what it needs of the
// session for good.
func OpenPruner(ctx context.Context, conn *pgx.Conn, o PruneOptions) (*Pruner, error) {
	p := &Pruner{o: o, conn: conn, last: -1 << 63}
	for _, sql := range append(slices.Clone(asReplicated),
		"set statement_timeout = 0", fmt.Sprintf("set lock_timeout = %d", pruneLockTimeout.Milliseconds())) {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return nil, p.failure(err, "prepare to prune table %s", o.Table)
		}
	}
	if err := p.examine(ctx); err != nil {
		return nil, p.failure(err, "inspect table %s", o.Table)
	}
	return p, nil
}

func (p *Pruner) examine(ctx context.Context) (err error) {
	t := p.o.Table
	if p.root, err = relationOf(ctx, p.conn, t); err != nil {
		return err
	}
	if p.root == nil {
		return event.Fail(event.Precondition, "create it with `walrelay init --apply`, or correct --table", "table %s does not exist", t)
	}
	if p.cols, err = columnsOf(ctx, p.conn, p.root.oid); err != nil {
		return err
	}
	column := func(role string) *Column {
		i := slices.IndexFunc(p.cols, func(c Column) bool { return c.Name == t.column(role) })
		if i < 0 {
			return nil
		}
		return &p.cols[i]
	}
	created := column(roleCreatedAt)
	if created == nil || !slices.Contains(wanted[roleCreatedAt].accepts, created.text) {
		return event.Fail(event.Precondition, "name a column with the time of the row: --table "+t.String()+",created_at=COLUMN",
			"table %s has no timestamp with the role created_at, so the age of its rows is not known", t)
	}
	id := column(roleID)
	if id == nil {
		return event.Fail(event.Precondition, "name it with --table "+t.String()+",id=COLUMN", "table %s has no column %q", t, t.column(roleID))
	}
	filter, err := (&Reader{conn: p.conn, publications: p.o.Publications}).filter(ctx, p.root.oid)
	if err != nil {
		return err
	}
	if filter == "" {
		filter = "true"
	}
	err = p.conn.QueryRow(ctx, "SELECT (pg_catalog.clock_timestamp() - make_interval(secs => $1))::text", p.o.OlderThan.Seconds()).Scan(&p.cut)
	if err != nil {
		return err
	}

	p.from = pgx.Identifier{t.schema(), t.Name}.Sanitize() + " AS walrelay_row"
	if !p.root.partitioned() {
		p.from = "ONLY " + p.from
	}
	// No & yields a negative number here, and the highest number below xmax comes of it.
	p.xid = fmt.Sprintf("(%[1]s::int8 - ((%[1]s::int8 - walrelay_row.xmin::text::int8) & 4294967295))", xmaxHere)
	when := func(at string) string { // in the column's type, or an index on it is of no use
		at = quote(at) + "::timestamptz"
		if created.text == event.TypeTimestamp {
			at += "::timestamp"
		}
		return at
	}
	at := "walrelay_row." + ident(created.Name)
	sent := "false"
	if m := p.o.Since; m != nil && *m == (event.Mark{}) {
		sent = "true"
	} else if m != nil {
		sent = fmt.Sprintf("walrelay_row.xmin::text::int8 >= 3 AND %s >= %d AND %s >= %s", p.xid, m.XID, at, when(m.Time.Format(time.RFC3339Nano)))
	}
	p.flags = fmt.Sprintf("walrelay_row.%s::text, coalesce(%s < %s, false), %s, coalesce(%s, false), coalesce(%s, false)",
		ident(id.Name), at, when(p.cut), p.passed(), sent, filter)
	return p.choose(ctx, column(roleSeq))
}

// passed is the condition for rows before the horizon. An xid below 3 is that of
// a row that was frozen before 9.4.
func (p *Pruner) passed() string {
	return fmt.Sprintf("(walrelay_row.xmin::text::int8 < 3 OR %s < %d)", p.xid, p.o.XID)
}

// choose finds how to walk over the rows: by the index on seq, or by the
// blocks of the heap, which reads all of the table.
func (p *Pruner) choose(ctx context.Context, seq *Column) error {
	if seq != nil && slices.Contains(intTypes, seq.text) {
		var indexed bool
		err := p.conn.QueryRow(ctx, `
			SELECT EXISTS (
				SELECT FROM pg_catalog.pg_index i JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
					JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid JOIN pg_catalog.pg_am m ON m.oid = c.relam
				WHERE i.indrelid = $1 AND i.indisvalid AND i.indpred IS NULL AND m.amname = 'btree' AND a.attname = $2)`,
			p.root.oid, seq.Name).Scan(&indexed)
		if err != nil {
			return err
		}
		if indexed {
			p.seq = "walrelay_row." + ident(seq.Name)
			return nil
		}
	}
	return p.conn.QueryRow(ctx, `
		SELECT coalesce(max(pg_catalog.pg_relation_size(r.oid)) / pg_catalog.current_setting('block_size')::int8, 0)::int8
		FROM (SELECT $1::oid AS oid UNION SELECT relid::oid FROM pg_catalog.pg_partition_tree($1::oid::regclass) WHERE isleaf) r`,
		p.root.oid).Scan(&p.blocks)
}

// Next reads some rows, no more than a batch or about so many, in order; none at the end.
// Rows that were in order by seq end with the first batch in which none is old.
func (p *Pruner) Next(ctx context.Context) ([]Candidate, error) {
	for !p.done {
		found, err := p.read(ctx)
		if err != nil {
			return nil, p.failure(err, "read table %s", p.o.Table)
		}
		if len(found) > 0 {
			return found, nil
		}
	}
	return nil, nil
}

// xmaxHere is where SQL takes the xmax of its snapshot: that of the statement, or
// in a transaction of repeatable read the one that was read before.
const xmaxHere = "/*xmax*/"

func replaceXmax(sql, xmax string) string { return strings.ReplaceAll(sql, xmaxHere, quote(xmax)) }

const xmaxOfStatement = "(SELECT pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::text)"

func (p *Pruner) read(ctx context.Context) ([]Candidate, error) {
	var seq, where string
	if p.seq != "" {
		seq = p.seq
		than := ">"
		if p.last == -1<<63 {
			than = ">="
		}
		where = fmt.Sprintf("%s %s '%d'::int8 ORDER BY %s LIMIT %d", p.seq, than, p.last, p.seq, p.o.Batch)
	} else {
		// Postgres reads a range of ctid alone, from 14 on (TID Range Scan).
		seq = "0"
		end := p.block + max(int64(p.o.Batch/rowsInBlock), 1)
		where = fmt.Sprintf("walrelay_row.ctid >= '(%d,0)' AND walrelay_row.ctid < '(%d,0)'", p.block, end)
		p.block = end
		p.done = p.block >= p.blocks
	}
	sql := strings.ReplaceAll(fmt.Sprintf("SELECT walrelay_row.tableoid, walrelay_row.ctid::text, %s::int8, %s FROM %s WHERE %s",
		seq, p.flags, p.from, where), xmaxHere, xmaxOfStatement)
	rows, err := p.conn.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	old := false
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Candidate, error) {
		var c Candidate
		var id *string
		err := row.Scan(&c.table, &c.ctid, &p.last, &id, &c.Old, &c.Passed, &c.Sent, &c.Event)
		if id != nil {
			c.ID = []byte(*id)
		}
		old = old || c.Old
		return c, err
	})
	if p.seq != "" {
		p.done = len(found) < p.o.Batch || !old
	}
	return found, err
}

// Delete deletes candidates, each batch in a transaction of its own, and returns
// how many are gone. Rows that somebody has locked, or has changed since, stay.
// Before it commits it hands the rows, as they are deleted, to save, unless that is nil:
// each is one JSON object. It needs the privileges SELECT and DELETE.
func (p *Pruner) Delete(ctx context.Context, cs []Candidate, save func(rows [][]byte) error) (int, error) {
	deleted := 0
	// One table or partition at a time, since a ctid is of one.
	for table, part := range byTable(cs) {
		n, err := p.divide(ctx, table, part, save)
		deleted += n
		if err != nil {
			return deleted, p.failure(err, "prune table %s", p.o.Table)
		}
	}
	return deleted, nil
}

func byTable(cs []Candidate) map[uint32][]Candidate {
	parts := map[uint32][]Candidate{}
	for _, c := range cs {
		parts[c.table] = append(parts[c.table], c)
	}
	return parts
}

// divide halves what cannot be locked until the rows in the way are found.
func (p *Pruner) divide(ctx context.Context, table uint32, cs []Candidate, save func([][]byte) error) (int, error) {
	n, err := p.delete(ctx, table, cs, save)
	if err == nil || !inTheWay(err) {
		return n, err
	}
	if len(cs) == 1 {
		return 0, nil
	}
	half := len(cs) / 2
	n, err = p.divide(ctx, table, cs[:half], save)
	if err != nil {
		return n, err
	}
	more, err := p.divide(ctx, table, cs[half:], save)
	return n + more, err
}

// inTheWay reports whether somebody else holds or has changed a row.
func inTheWay(err error) bool {
	const lockNotAvailable, serializationFailure, deadlock = "55P03", "40001", "40P01"
	var pg *pgconn.PgError
	return errors.As(err, &pg) && slices.Contains([]string{lockNotAvailable, serializationFailure, deadlock}, pg.Code)
}

// delete is one transaction. It is one of repeatable read: in another, a row that
// is updated meanwhile would be looked at again in its new version, whose xid may lie
// above the snapshot that xids are compared with.
func (p *Pruner) delete(ctx context.Context, table uint32, cs []Candidate, save func([][]byte) error) (n int, err error) {
	err = pgx.BeginTxFunc(ctx, p.conn, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		var xmax string
		if err := tx.QueryRow(ctx, "SELECT "+xmaxOfStatement).Scan(&xmax); err != nil {
			return err
		}
		ctids := make([]string, len(cs))
		for i, c := range cs {
			ctids[i] = `"` + c.ctid + `"`
		}
		sql := replaceXmax(fmt.Sprintf("DELETE FROM %s WHERE walrelay_row.ctid = ANY ('{%s}'::tid[]) AND walrelay_row.tableoid = %d AND %s",
			p.from, strings.Join(ctids, ","), table, p.passed()), xmax)
		if save == nil {
			tag, err := tx.Exec(ctx, sql)
			n = int(tag.RowsAffected())
			return err
		}
		n, err = p.saveAll(ctx, sql+" RETURNING "+p.columns(), save)
		return err
	})
	if err != nil {
		return 0, err
	}
	return n, nil
}

func (p *Pruner) columns() string {
	names := make([]string, len(p.cols))
	for i, c := range p.cols {
		names[i] = "walrelay_row." + ident(c.Name)
	}
	return strings.Join(names, ", ")
}

// texts reads rows in the text form of their values.
func (p *Pruner) texts(ctx context.Context, sql string, each func([][]byte) error) error {
	read := p.conn.PgConn().ExecParams(ctx, sql, nil, nil, nil, nil)
	var failed error
	for read.NextRow() {
		if failed == nil {
			failed = each(read.Values())
		}
	}
	_, err := read.Close()
	return errors.Join(err, failed)
}

// saveAll hands on the rows that a statement returns, some at a time, and returns how many
// there were.
func (p *Pruner) saveAll(ctx context.Context, sql string, save func([][]byte) error) (n int, err error) {
	var rows [][]byte
	size := 0
	flush := func() error {
		some := rows
		rows, size = nil, 0
		if len(some) == 0 {
			return nil
		}
		return save(some)
	}
	err = p.texts(ctx, sql, func(values [][]byte) error {
		row := appendRow(nil, p.cols, values)
		rows, size, n = append(rows, row), size+len(row), n+1
		if len(rows) >= p.o.Batch || size >= saveBytes {
			return flush()
		}
		return nil
	})
	if err == nil {
		err = flush()
	}
	return n, err
}

// failure gives a refusal of Postgres its class.
func (p *Pruner) failure(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	var f *event.Failure
	var pg *pgconn.PgError
	if errors.As(err, &f) || !errors.As(err, &pg) {
		if f != nil {
			return err
		}
		return fmt.Errorf("%s: %w", what, err)
	}
	name := pgx.Identifier{p.o.Table.schema(), p.o.Table.Name}.Sanitize()
	switch {
	case pg.Code == "42501": // insufficient_privilege
		role := ident(p.conn.Config().User)
		return event.Fail(event.Precondition,
			fmt.Sprintf("GRANT SELECT, DELETE ON TABLE %s TO %s, or walrelay init --apply --role NAME --grant-delete; only the owner of a partition can drop it", name, role), "%s: %w", what, err)
	case pg.Code == "25006": // read_only_sql_transaction
		return event.Fail(event.Precondition, "connect to the primary; a standby cannot be changed", "%s: %w", what, err)
	case pg.Code == "2BP01": // dependent_objects_still_exist
		return event.Fail(event.Precondition, "drop what depends on it first, or prune without --drop-partitions", "%s: %w", what, err)
	case strings.HasPrefix(pg.Code, "23"): // integrity_constraint_violation
		return event.Fail(event.Precondition, "let the other table go without its reference to the outbox, or declare it ON DELETE CASCADE", "%s: %w", what, err)
	case strings.HasPrefix(pg.Code, "42"):
		return event.Fail(event.Precondition, "does --table describe the table as it is?", "%s: %w", what, err)
	}
	return fmt.Errorf("%s: %w", what, err)
}
