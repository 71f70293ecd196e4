package outbox

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

// A row comes with the columns that its table had when it was written, and with those that
// were published. Where they do not fit the mapping the row is parked: neither a later ALTER
// TABLE nor a restart changes what the WAL holds.

// alternatives are the names that a column has or had, the present one first.
func alternatives(column string) []string { return strings.Split(column, "|") }

// present is the first of the alternatives.
func present(column string) string {
	name, _, _ := strings.Cut(column, "|")
	return name
}

// find is the place of the first alternative that the relation has, -1 for none.
func find(rel *event.Relation, column string) int {
	for name := range strings.SplitSeq(column, "|") {
		for i := range rel.Columns {
			if rel.Columns[i].Name == name {
				return i
			}
		}
	}
	return -1
}

// Fits reports whether rows of the relation are those of an outbox table, and the failure
// that says why they cannot be mapped.
func (m *Mapper) Fits(rel *event.Relation) (ours bool, err error) {
	p := m.plan(rel)
	if p == nil {
		return false, nil
	}
	return true, p.misfit
}

// Is reports whether the relation is that of a configured table, also under a name that it
// had before.
func (m *Mapper) Is(rel *event.Relation, t Table) bool {
	p := m.plan(rel)
	return p != nil && p.source == m.tables[tableKey(t.schema(), t.Name)]
}

// misfit fills ev from a row whose columns do not fit the mapping: with what can be found,
// and as its body with all of the row, since the columns that are needed may be under any name.
func (m *Mapper) misfit(p *plan, rec *event.Record, ev *event.Event) {
	m.poison(event.ReasonContent, "%v", p.misfit)
	if id := value(rec, p.id); len(id) > 0 {
		m.identify(ev, p.source, id, p.uuid)
	}
	m.describe(ev, value(rec, p.aggregateType), value(rec, p.aggregateID), value(rec, p.eventType))
	if !readableTime(p, rec) || !m.created(ev, value(rec, p.createdAt)) {
		m.committed(ev)
	}
	ev.Payload = rowJSON(rec)
}

// foreign finds a mapped value that is no text, and bytes of the database instead. The row is mapped
// as it is, so that a dead letter has these bytes.
func (m *Mapper) foreign(p *plan, rec *event.Record) {
	places := append([]int{p.id, p.aggregateType, p.aggregateID, p.eventType, p.payload, p.headers, p.schemaVersion, p.createdAt, p.contType}, p.columns...)
	for _, i := range places {
		if i >= 0 && rec.Foreign[i] {
			m.poison(event.ReasonContent, "column %q holds bytes that cannot be converted to UTF-8", rec.Relation.Columns[i].Name)
			return
		}
	}
}

func readableTime(p *plan, rec *event.Record) bool {
	return p.createdAt >= 0 && readable(roleCreatedAt, rec.Relation.Columns[p.createdAt].Type)
}

// rowJSON is the row as a JSON object of its columns: their text, null, or an object with
// the bytes in base64 where they are not UTF-8.
func rowJSON(rec *event.Record) []byte {
	b := []byte{'{'}
	text := func(s string) {
		quoted, err := json.Marshal(s)
		if err != nil {
			quoted = []byte(`""`) // a string always has a JSON form
		}
		b = append(b, quoted...)
	}
	for i, c := range rec.Relation.Columns {
		if i > 0 {
			b = append(b, ", "...)
		}
		text(c.Name)
		b = append(b, ": "...)
		switch v := rec.Values[i]; {
		case v == nil:
			b = append(b, "null"...)
		case utf8.Valid(v) && !rec.Undecoded(i):
			text(string(v))
		default:
			b = append(b, `{"base64": `...)
			text(base64.StdEncoding.EncodeToString(v))
			b = append(b, '}')
		}
	}
	return append(b, '}')
}
