package outbox

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// contract is what the column of a role should be.
type contract struct {
	ddl     string // after the column's name
	types   string // that are accepted, in words
	accepts []uint32
	needed  bool // the relay or the order of events needs the column
	notNull bool
	comment string
}

var (
	textTypes = []uint32{event.TypeText, event.TypeVarchar, event.TypeBPChar}
	intTypes  = []uint32{event.TypeInt8, event.TypeInt4, event.TypeInt2}
	keyTypes  = slices.Concat([]uint32{event.TypeUUID}, textTypes, intTypes)
)

var wanted = map[string]contract{
	roleSeq: {
		ddl: "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY", types: "bigint", accepts: intTypes,
		comment: "order in which the table is read back; not published",
	},
	roleID: {
		ddl: "uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE", types: "uuid, text or bigint", accepts: keyTypes,
		needed: true, notNull: true,
		comment: "identity of the event: Outbox-Id and Nats-Msg-Id",
	},
	roleAggregateType: {
		ddl: "text NOT NULL", types: "text", accepts: textTypes, needed: true, notNull: true,
		comment: "kind of thing the event is about, such as order; part of the subject",
	},
	roleAggregateID: {
		ddl: "text NOT NULL", types: "text, uuid or bigint", accepts: keyTypes, needed: true, notNull: true,
		comment: "which one; events of one aggregate stay in order",
	},
	roleEventType: {
		ddl: "text NOT NULL", types: "text", accepts: textTypes, needed: true, notNull: true,
		comment: "what happened, such as placed; part of the subject",
	},
	rolePayload: {
		ddl: "jsonb", types: "jsonb, json, text or bytea",
		accepts: slices.Concat([]uint32{event.TypeJSONB, event.TypeJSON, event.TypeBytea}, textTypes), needed: true,
		comment: "body of the message, byte for byte; NULL is an empty body",
	},
	roleHeaders: {
		ddl: "jsonb", types: "jsonb, json or text",
		accepts: []uint32{event.TypeJSONB, event.TypeJSON, event.TypeText, event.TypeVarchar},
		comment: "JSON object of further headers, such as traceparent",
	},
	roleSchemaVersion: {
		ddl: "integer", types: "integer or text", accepts: slices.Concat(intTypes, textTypes),
		comment: "version of the payload's schema: Outbox-Schema-Version",
	},
	roleCreatedAt: {
		ddl: "timestamptz NOT NULL DEFAULT now()", types: "timestamptz or timestamp",
		accepts: []uint32{event.TypeTimestamptz, event.TypeTimestamp},
		comment: "start of the transaction: Outbox-Time",
	},
	roleContentType: {
		ddl: "text", types: "text", accepts: textTypes,
		comment: "Content-Type of the payload",
	},
}

// readable reports whether the text form of the type can be read. Ids, names
// and versions are passed on as text, whatever their type.
func readable(role string, oid uint32) bool {
	switch role {
	case rolePayload, roleHeaders, roleCreatedAt:
		return slices.Contains(wanted[role].accepts, oid)
	}
	return true
}

func typeName(oid uint32) string {
	names := map[uint32]string{
		event.TypeBytea: "bytea", event.TypeInt8: "bigint", event.TypeInt2: "smallint", event.TypeInt4: "integer",
		event.TypeText: "text", event.TypeJSON: "json", event.TypeBPChar: "character", event.TypeVarchar: "varchar",
		event.TypeTimestamp: "timestamp", event.TypeTimestamptz: "timestamptz", event.TypeUUID: "uuid", event.TypeJSONB: "jsonb",
	}
	if s, ok := names[oid]; ok {
		return s
	}
	return "OID " + strconv.FormatUint(uint64(oid), 10)
}

// Column is a column of an existing table.
type Column struct {
	Name    string
	Type    string // as SQL writes it
	OID     uint32 // of the type, as the replication stream names it
	NotNull bool

	Generated string // "stored" or "virtual"; "" when it is neither

	// text is the OID of the type whose text form the values have: a domain's
	// base type, text for an enum.
	text uint32
}

// Inspect reads the columns of a table, in order. It blocks for two round
// trips. A missing table is a Precondition failure.
func Inspect(ctx context.Context, conn *pgx.Conn, t Table) ([]Column, error) {
	rel, err := relationOf(ctx, conn, t)
	if err != nil {
		return nil, classify(err, "inspect table %s", t)
	}
	if rel == nil {
		return nil, event.Fail(event.Precondition,
			"create it with `walrelay init --apply`, or correct --table",
			"table %s does not exist", t)
	}
	cols, err := columnsOf(ctx, conn, rel.oid)
	if err != nil {
		return nil, classify(err, "inspect table %s", t)
	}
	return cols, nil
}

// querier is a connection or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// relation is what pg_class says of a table.
type relation struct {
	oid         uint32
	kind        string // relkind
	persistence string // relpersistence
	partition   bool   // of another table
}

func (r *relation) partitioned() bool { return r.kind == "p" }

// relationOf is nil when there is no such table.
func relationOf(ctx context.Context, q querier, t Table) (*relation, error) {
	rows, err := q.Query(ctx, `
		SELECT c.oid, c.relkind::text, c.relpersistence::text, c.relispartition
		FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, t.schema(), t.Name)
	if err != nil {
		return nil, err
	}
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (*relation, error) {
		var r relation
		return &r, row.Scan(&r.oid, &r.kind, &r.persistence, &r.partition)
	})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	return found[0], nil
}

func columnsOf(ctx context.Context, q querier, oid uint32) ([]Column, error) {
	rows, err := q.Query(ctx, `
		WITH RECURSIVE base AS (
			SELECT a.attnum, t.oid, t.typtype, t.typbasetype, t.typnotnull AND t.typtype = 'd' AS notnull
			FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
			WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
			UNION ALL
			SELECT b.attnum, t.oid, t.typtype, t.typbasetype, b.notnull OR t.typnotnull AND t.typtype = 'd'
			FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.typbasetype
			WHERE b.typtype = 'd'
		)
		SELECT a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), a.atttypid, a.attnotnull OR b.notnull,
		       CASE WHEN b.typtype = 'e' THEN 25::oid ELSE b.oid END,
		       CASE a.attgenerated WHEN '' THEN '' WHEN 's' THEN 'stored' ELSE 'virtual' END
		FROM pg_catalog.pg_attribute a JOIN base b ON b.attnum = a.attnum AND b.typtype <> 'd'
		WHERE a.attrelid = $1 ORDER BY a.attnum`, oid)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Column, error) {
		var c Column
		return c, row.Scan(&c.Name, &c.Type, &c.OID, &c.NotNull, &c.text, &c.Generated)
	})
}

// Mismatch says where a table differs from the contract, column by column.
type Mismatch struct {
	Table   string
	Columns []Difference
}

// Difference is what is wrong with one column.
type Difference struct {
	Column string
	Role   string
	Have   string // "" when the column is missing
	Want   string
}

func (d Difference) String() string {
	if d.Have == "" {
		return fmt.Sprintf("column %q (%s) is missing: want %s", d.Column, d.Role, d.Want)
	}
	return fmt.Sprintf("column %q (%s) is %s: want %s", d.Column, d.Role, d.Have, d.Want)
}

func (m *Mismatch) Error() string {
	lines := []string{"table " + m.Table + " is not what the outbox needs"}
	for _, d := range m.Columns {
		lines = append(lines, d.String())
	}
	return strings.Join(lines, "\n  ")
}

// Compare holds an existing table against the contract, for the columns that
// the relay or the contract needs. Other columns, and optional ones that are
// not there, are no difference. The error is a Precondition failure around a
// *Mismatch.
func Compare(t Table, cols []Column) error {
	m := &Mismatch{Table: t.String()}
	for _, role := range roles {
		name := t.column(role)
		if name == "" {
			continue
		}
		w := wanted[role]
		want := w.types
		if w.notNull {
			want += ", NOT NULL"
		}
		_, explicit := t.Columns[role]
		i := slices.IndexFunc(cols, func(c Column) bool { return c.Name == name })
		if i < 0 {
			if w.needed || explicit {
				m.Columns = append(m.Columns, Difference{Column: name, Role: role, Want: want})
			}
			continue
		}
		c := cols[i]
		fits := slices.Contains(w.accepts, c.text) && readable(role, c.OID)
		if fits && (c.NotNull || !w.notNull) {
			continue
		}
		have := c.Type
		if w.notNull && !c.NotNull {
			have += ", nullable"
		}
		m.Columns = append(m.Columns, Difference{Column: name, Role: role, Have: have, Want: want})
	}
	if len(m.Columns) == 0 {
		return nil
	}
	return event.Fail(event.Precondition,
		"an existing table is never altered: alter it yourself, name its columns for the roles, or choose another table",
		"%w", m)
}

// missing lists the optional columns that the table lacks.
func missing(t Table, cols []Column) []string {
	var names []string
	for _, role := range roles {
		name := t.column(role)
		if name == "" || wanted[role].needed || role == roleContentType {
			continue
		}
		if !slices.ContainsFunc(cols, func(c Column) bool { return c.Name == name }) {
			names = append(names, name)
		}
	}
	return names
}
