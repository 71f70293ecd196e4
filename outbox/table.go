package outbox

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/walrelay/walrelay/event"
)

// The roles that a column may have.
const (
	roleSeq           = "seq"
	roleID            = "id"
	roleAggregateType = "aggregate_type"
	roleAggregateID   = "aggregate_id"
	roleEventType     = "event_type"
	rolePayload       = "payload"
	roleHeaders       = "headers"
	roleSchemaVersion = "schema_version"
	roleCreatedAt     = "created_at"
	roleContentType   = "content_type"
)

// roles in the order of the DDL.
var roles = []string{
	roleSeq, roleID, roleAggregateType, roleAggregateID, roleEventType,
	rolePayload, roleHeaders, roleSchemaVersion, roleCreatedAt, roleContentType,
}

// The names of the presets.
const (
	PresetDefault  = "default"
	PresetDebezium = "debezium"
	PresetSnake    = "snake" // another name of the default
)

type preset struct {
	subject string
	columns map[string]string
}

var presets = map[string]preset{
	PresetDefault: {
		subject: "outbox.{aggregate_type}.{event_type}",
		columns: map[string]string{
			roleSeq: "seq", roleID: "id", roleAggregateType: "aggregate_type", roleAggregateID: "aggregate_id",
			roleEventType: "event_type", rolePayload: "payload", roleHeaders: "headers",
			roleSchemaVersion: "schema_version", roleCreatedAt: "created_at", roleContentType: "content_type",
		},
	},
	PresetDebezium: {
		subject: "outbox.event.{aggregate_type}",
		columns: map[string]string{
			roleSeq: "seq", roleID: "id", roleAggregateType: "aggregatetype", roleAggregateID: "aggregateid",
			roleEventType: "type", rolePayload: "payload",
		},
	},
}

// Table is one outbox table and how its columns are read.
type Table struct {
	Schema string // "" is public
	Name   string
	Preset string // "default" (also "" and "snake") or "debezium"

	// Columns maps a role to the column that has it, overriding the preset. A
	// column named here must exist; "" says that no column has the role. Names that the
	// column had before follow after "|", for rows that were written then.
	Columns map[string]string

	// Subject is the template for this table; "" takes the Mapping's, and
	// without one the preset's.
	Subject string

	// HeaderColumns become headers, beside those of the Mapping.
	HeaderColumns []HeaderColumn
}

// ParseTable reads a table's name as SQL does: schema.table, each part quoted
// or not, public when there is no schema. Unquoted parts are folded to lower
// case. An error is a Usage failure.
func ParseTable(s string) (Table, error) {
	bad := func(why string) (Table, error) {
		return Table{}, event.Fail(event.Usage,
			`write it as schema.table; names with capitals or signs in double quotes, as in 'public."Outbox"'`,
			"invalid table %q: %s", s, why)
	}
	var parts []string
	for rest := s; ; {
		part, tail, err := cutIdentifier(rest)
		if err != nil {
			return bad(err.Error())
		}
		parts = append(parts, part)
		if tail == "" {
			break
		}
		if tail[0] != '.' {
			return bad("a part ends before " + tail)
		}
		rest = tail[1:]
	}
	switch len(parts) {
	case 1:
		return Table{Schema: "public", Name: parts[0]}, nil
	case 2:
		return Table{Schema: parts[0], Name: parts[1]}, nil
	}
	return bad("more than a schema and a table")
}

// maxName is NAMEDATALEN-1: Postgres cuts longer names silently.
const maxName = 63

func checkName(name string) error {
	switch {
	case name == "":
		return errors.New("a name is empty")
	case len(name) > maxName:
		return fmt.Errorf("a name is longer than %d bytes", maxName)
	case strings.Contains(name, "\x00"):
		return errors.New("a name holds a NUL byte")
	}
	return nil
}

func cutIdentifier(s string) (name, rest string, err error) {
	if strings.HasPrefix(s, `"`) {
		var b strings.Builder
		for i := 1; i < len(s); i++ {
			if s[i] != '"' {
				b.WriteByte(s[i])
				continue
			}
			if i+1 < len(s) && s[i+1] == '"' {
				b.WriteByte('"')
				i++
				continue
			}
			return b.String(), s[i+1:], checkName(b.String())
		}
		return "", "", errors.New("a quote is not closed")
	}
	end := 0
	for end < len(s) && s[end] != '.' {
		if !plainIdentifier(s[end], end == 0) {
			return "", "", fmt.Errorf("%q needs double quotes", s)
		}
		end++
	}
	// Postgres folds ASCII only, whatever the locale, in multi-byte encodings.
	name = strings.Map(func(r rune) rune {
		if r >= 'A' && r <= 'Z' {
			return r + 'a' - 'A'
		}
		return r
	}, s[:end])
	return name, s[end:], checkName(name)
}

func plainIdentifier(c byte, first bool) bool {
	switch {
	case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c == '_', c >= 0x80:
		return true
	case c >= '0' && c <= '9', c == '$':
		return !first
	}
	return false
}

// String is schema.table without quotes, the name that events carry.
func (t Table) String() string { return t.schema() + "." + t.Name }

func (t Table) schema() string {
	if t.Schema == "" {
		return "public"
	}
	return t.Schema
}

func (t Table) preset() preset {
	if t.Preset == "" || t.Preset == PresetSnake {
		return presets[PresetDefault]
	}
	return presets[t.Preset]
}

// column is the column that has the role, "" when none has.
func (t Table) column(role string) string { return present(t.names(role)) }

// names are the alternatives of that column, as they are written.
func (t Table) names(role string) string {
	if c, ok := t.Columns[role]; ok {
		return c
	}
	return t.preset().columns[role]
}

// check returns every mistake of the table, the subject excepted.
func (t Table) check() []error {
	var errs []error
	add := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("table %s: "+format, append([]any{t}, args...)...))
	}
	for _, name := range []string{t.schema(), t.Name} {
		if err := checkName(name); err != nil {
			add("%w", err)
		}
	}
	if _, ok := presets[t.Preset]; !ok && t.Preset != "" && t.Preset != PresetSnake {
		add("unknown preset %q: want default or debezium", t.Preset)
	}
	for _, role := range slices.Sorted(maps.Keys(t.Columns)) {
		if !slices.Contains(roles, role) {
			add("unknown role %q: want one of %s", role, strings.Join(roles, ", "))
			continue
		}
		c := t.Columns[role]
		if c == "" && (role == roleID || role == rolePayload) {
			add("the role %s needs a column", role)
		} else if c != "" {
			for _, name := range alternatives(c) {
				if err := checkName(name); err != nil {
					add("column of role %s: %w", role, err)
				}
			}
		}
	}
	for _, c := range t.HeaderColumns {
		if err := c.check(); err != nil {
			add("%w", err)
		}
	}
	return errs
}
