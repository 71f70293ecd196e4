package config

import (
	"slices"
	"strings"
)

// roles are the columns of an outbox table by what they are for.
var roles = []string{"id", "aggregate_type", "aggregate_id", "event_type", "payload", "headers", "schema_version", "created_at", "content_type", "seq"}

var presets = []string{PresetDefault, PresetDebezium, PresetSnake}

// noTables is the word that stands for no outbox table at all.
const noTables = "none"

func setTables(c *Config, v given) error {
	parsed, err := parseEach(v.texts, ";\n", parseTable)
	if err != nil {
		return err
	}
	tables := append(v.tables, parsed...)
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
	if value == "" && slices.Contains([]string{"preset", "subject", "header", "id", "payload"}, key) {
		return &mistake{"has no value for " + key, "write " + key + "=…"}
	}
	switch key {
	case "preset":
		t.Preset = value
	case "subject":
		t.Subject = value
	case "header":
		c, err := parseHeaderColumn(value)
		if err != nil {
			return err
		}
		t.HeaderColumns = append(t.HeaderColumns, c)
	default:
		return t.column(key, value)
	}
	return nil
}

func (t *Table) column(role, column string) error {
	if !slices.Contains(roles, role) {
		remedy := "the roles are " + strings.Join(roles, ", ") + "; further keys are preset, subject and header"
		if n := Nearest(role, append([]string{"preset", "subject", "header"}, roles...)); n != "" {
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
		return &mistake{"has the unknown preset " + t.Preset, "write " + alternatives(presets)}
	}
	if t.Subject != "" && !subjectText.MatchString(t.Subject) {
		return &mistake{"has blanks in its subject", "write tokens with dots between"}
	}
	return nil
}

// parseHeaderColumn reads COLUMN[:HEADER]; a column that has a colon in its
// name is in double quotes.
func parseHeaderColumn(s string) (HeaderColumn, error) {
	parts, err := split(s, ":")
	if err != nil {
		return HeaderColumn{}, err
	}
	c := HeaderColumn{Column: parts[0]}
	if n := len(c.Column); n > 1 && c.Column[0] == '"' && c.Column[n-1] == '"' {
		c.Column = strings.ReplaceAll(c.Column[1:n-1], `""`, `"`)
	}
	if len(parts) == 2 {
		c.Header = parts[1]
	}
	if c.Column == "" || len(parts) > 2 || len(parts) == 2 && c.Header == "" {
		return c, &mistake{"is no column with a header", "write COLUMN or COLUMN:HEADER, such as tenant_id:X-Tenant"}
	}
	return c, nil
}

func setHeaderColumns(c *Config, v given) (err error) {
	c.HeaderColumns, err = parseEach(v.texts, ",;\n", parseHeaderColumn)
	return err
}

func setTypeSubjects(c *Config, v given) (err error) {
	c.TypeSubjects, err = parseEach(v.texts, ";\n", parseTypeSubject)
	return err
}

// parseEach parses every value of a list that may be given at once, parted by
// one of seps, and more than once.
func parseEach[T any](texts []string, seps string, parse func(string) (T, error)) ([]T, error) {
	var all []T
	for _, t := range texts {
		parts, err := split(t, seps)
		if err != nil {
			return nil, err
		}
		for _, p := range parts {
			if p == "" {
				continue
			}
			v, err := parse(p)
			if err != nil {
				return nil, err
			}
			all = append(all, v)
		}
	}
	return all, nil
}

func parseTypeSubject(text string) (TypeSubject, error) {
	types, subject, ok := strings.Cut(text, "=")
	aggregate, event, both := strings.Cut(strings.TrimSpace(types), "/")
	if !both {
		aggregate, event = "*", aggregate
	}
	subject = strings.TrimSpace(subject)
	if !ok || aggregate == "" || event == "" || aggregate+event == "**" || !subjectText.MatchString(subject) {
		return TypeSubject{}, &mistake{"is no type with its subject", "write EVENT_TYPE=TEMPLATE, AGGREGATE_TYPE/EVENT_TYPE=TEMPLATE or AGGREGATE_TYPE/*=TEMPLATE"}
	}
	return TypeSubject{unlessAny(aggregate), unlessAny(event), subject}, nil
}

// unlessAny is the type that a word names, empty for the asterisk.
func unlessAny(word string) string {
	if word == "*" {
		return ""
	}
	return word
}
