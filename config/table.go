package config

import (
	"slices"
	"strings"
)

// roles are the columns of an outbox table by what they are for.
var roles = []string{"id", "aggregate_type", "aggregate_id", "event_type", "payload", "headers", "schema_version", "created_at", "content_type", "seq"}

var presets = []string{PresetDefault, PresetDebezium}

// noTables is the word that stands for no outbox table at all.
const noTables = "none"

func setTables(c *Config, v given) error {
	tables := v.tables
	for _, t := range v.texts {
		parts, err := split(t, ";\n")
		if err != nil {
			return err
		}
		for _, p := range parts {
			if p == "" {
				continue
			}
			table, err := parseTable(p)
			if err != nil {
				return err
			}
			tables = append(tables, table)
		}
	}
	if len(tables) == 1 && tables[0].Name == noTables {
		tables = nil
	}
	for i, t := range tables {
		if t.Name == noTables {
			return &mistake{"names tables and none", "write one or the other"}
		}
		if slices.ContainsFunc(tables[:i], func(o Table) bool { return o.Name == t.Name }) {
			return &mistake{"names the table " + t.Name + " twice", "name it once"}
		}
	}
	c.Tables = tables
	return nil
}

// parseTable reads schema.table[,key=value…].
func parseTable(s string) (Table, error) {
	parts, err := split(s, ",")
	if err != nil {
		return Table{}, err
	}
	t := Table{Name: parts[0]}
	if strings.Contains(t.Name, "=") && !strings.Contains(t.Name, `"`) {
		return t, &mistake{"has no table name in front", "write schema.table,preset=debezium"}
	}
	for _, p := range parts[1:] {
		key, value, ok := strings.Cut(p, "=")
		if !ok {
			return t, &mistake{"has something that is no key=value behind the table", "separate tables with a semicolon, and write key=value after a comma"}
		}
		if err := t.put(strings.TrimSpace(key), strings.TrimSpace(value)); err != nil {
			return t, err
		}
	}
	return t, t.check()
}

// put sets what a key=value of a table says.
func (t *Table) put(key, value string) error {
	if value == "" && slices.Contains([]string{"preset", "subject", "id", "payload"}, key) {
		return &mistake{"has no value for " + key, "write " + key + "=…"}
	}
	switch key {
	case "preset":
		t.Preset = value
	case "subject":
		t.Subject = value
	default:
		return t.column(key, value)
	}
	return nil
}

func (t *Table) column(role, column string) error {
	if !slices.Contains(roles, role) {
		remedy := "the roles are " + strings.Join(roles, ", ") + "; further keys are preset and subject"
		if n := Nearest(role, append([]string{"preset", "subject"}, roles...)); n != "" {
			remedy = "did you mean " + n + "?"
		}
		return &mistake{"has the unknown key " + role, remedy}
	}
	if t.Columns == nil {
		t.Columns = map[string]string{}
	}
	t.Columns[role] = column
	return nil
}

func (t *Table) check() error {
	if t.Name == "" {
		return &mistake{"has no table name", "write schema.table"}
	}
	if parts, err := split(t.Name, "."); err != nil || len(parts) > 2 || slices.Contains(parts, "") {
		return &mistake{"is no table name", `write schema.table, with double quotes around a part that has capitals or dots`}
	}
	if t.Preset != "" && !slices.Contains(presets, t.Preset) {
		return &mistake{"has the unknown preset " + t.Preset, "the presets are " + strings.Join(presets, " and ")}
	}
	if t.Subject != "" && !subjectText.MatchString(t.Subject) {
		return &mistake{"has blanks in its subject", "write tokens with dots between"}
	}
	return nil
}
