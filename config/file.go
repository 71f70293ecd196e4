package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"go.yaml.in/yaml/v3"
)

// readFile reads the file that --config or WALRELAY_CONFIG names. Its keys are
// judged as a whole, also those that the command has no flag for.
func (l *loader) readFile() map[string]found {
	var name, source string
	if f := l.flags.Lookup(fileOption); f != nil && f.Changed {
		name, source = f.Value.String(), "--"+fileOption
	} else if f != nil {
		name, source = l.env[envName(fileOption)], envName(fileOption)
	}
	if name == "" {
		return nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		l.problems = append(l.problems, Problem{source, err.Error(), "name a readable YAML file"})
		return nil
	}
	r := fileReader{name: name, found: map[string]found{}}
	r.read(text)
	l.problems = append(l.problems, r.problems...)
	return r.found
}

type fileReader struct {
	name     string
	found    map[string]found
	problems []Problem
}

func (r *fileReader) tell(line int, key, message, remedy string) {
	source := fmt.Sprintf("%s:%d", r.name, line)
	if key != "" {
		source += ": " + key
	}
	r.problems = append(r.problems, Problem{source, message, remedy})
}

func (r *fileReader) read(text []byte) {
	dec := yaml.NewDecoder(bytes.NewReader(text))
	var doc yaml.Node
	switch err := dec.Decode(&doc); {
	case errors.Is(err, io.EOF):
		return
	case err != nil:
		// The parser's message may quote the text, which may be a secret.
		r.problems = append(r.problems, Problem{r.name, "is not YAML" + yamlLine(err), "check indentation, colons and quotes there"})
		return
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		r.problems = append(r.problems, Problem{r.name, "holds more than one document", "keep the first"})
	}
	r.section(doc.Content[0], "")
}

// yamlLine takes the place from a parser's message, which has no field for it.
func yamlLine(err error) string {
	_, rest, ok := strings.Cut(err.Error(), "line ")
	digits := rest[:len(rest)-len(strings.TrimLeft(rest, "0123456789"))]
	if !ok || digits == "" {
		return ""
	}
	return " at line " + digits
}

func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// section reads a mapping whose keys begin with prefix.
func (r *fileReader) section(n *yaml.Node, prefix string) {
	n = resolve(n)
	if isNull(n) {
		return
	}
	if n.Kind != yaml.MappingNode {
		r.tell(n.Line, strings.TrimSuffix(prefix, "."), "is no mapping", "write its keys below it, such as "+strings.Join(keysBelow(prefix), ", "))
		return
	}
	seen := map[string]bool{}
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], resolve(n.Content[i+1])
		path := prefix + key.Value
		switch o := optionAt(path); {
		case seen[path]:
			r.tell(key.Line, path, "is there twice", "keep one")
		case o != nil:
			r.option(o, key, value)
		case len(keysBelow(path+".")) > 0:
			r.section(value, path+".")
		default:
			r.tell(key.Line, path, "is no key of the configuration", keyRemedy(path, prefix))
		}
		seen[path] = true
	}
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

func (r *fileReader) option(o *option, key, value *yaml.Node) {
	f := found{from: byFile, source: fmt.Sprintf("%s:%d: %s", r.name, key.Line, o.path)}
	switch {
	case isNull(value):
		return
	case o.name == "table":
		var ok bool
		if f.tables, ok = r.tables(value, o.path); !ok {
			return
		}
	case value.Kind == yaml.ScalarNode:
		f.texts = []string{value.Value}
	case value.Kind == yaml.SequenceNode && o.list:
		for _, e := range value.Content {
			if e = resolve(e); e.Kind != yaml.ScalarNode || isNull(e) {
				r.tell(e.Line, o.path, "is a list with something else than text in it", "write one name a line, after a dash")
				return
			}
			text := e.Value
			if o.name == "publication" { // a list has no need to be split at commas
				text = `"` + strings.ReplaceAll(text, `"`, `""`) + `"`
			}
			f.texts = append(f.texts, text)
		}
		if f.texts == nil {
			r.tell(value.Line, o.path, "is an empty list", "leave it out, or write one name a line")
			return
		}
	default:
		r.tell(value.Line, o.path, "is not a single value", "write the value after the colon")
		return
	}
	r.found[o.path] = f
}

// tables reads a list whose entries are texts, as --table has them, or mappings.
func (r *fileReader) tables(n *yaml.Node, path string) ([]Table, bool) {
	entries := n.Content
	if n.Kind != yaml.SequenceNode {
		entries = []*yaml.Node{n}
	}
	tables := []Table{}
	ok := true
	fail := func(line int, err error) {
		ok = false
		var m *mistake
		if errors.As(err, &m) {
			r.tell(line, path, "entry "+m.msg, m.remedy)
		}
	}
	for _, e := range entries {
		e = resolve(e)
		var t Table
		var err error
		switch e.Kind {
		case yaml.ScalarNode:
			t, err = parseTable(e.Value)
		case yaml.MappingNode:
			t = r.table(e, fail)
			err = t.check()
		default:
			err = &mistake{"is neither text nor mapping", "write - name: schema.table"}
		}
		if err != nil {
			fail(e.Line, err)
		}
		tables = append(tables, t)
	}
	return tables, ok
}

func (r *fileReader) table(n *yaml.Node, fail func(int, error)) Table {
	var t Table
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], resolve(n.Content[i+1])
		switch {
		case key.Value == "columns" && value.Kind == yaml.MappingNode:
			for j := 0; j < len(value.Content); j += 2 {
				if err := t.column(value.Content[j].Value, resolve(value.Content[j+1]).Value); err != nil {
					fail(value.Content[j].Line, err)
				}
			}
		case key.Value == "header_columns" && value.Kind == yaml.SequenceNode:
			for _, e := range value.Content {
				if err := t.put("header", resolve(e).Value); err != nil {
					fail(e.Line, err)
				}
			}
		case value.Kind != yaml.ScalarNode:
			fail(key.Line, &mistake{"has no single value for " + key.Value, "write name, preset, subject and, as a mapping, columns"})
		case key.Value == "name":
			t.Name = value.Value
		case key.Value == "preset" || key.Value == "subject":
			if err := t.put(key.Value, value.Value); err != nil {
				fail(key.Line, err)
			}
		default:
			remedy := "the keys are name, preset, subject, columns and header_columns"
			if n := Nearest(key.Value, []string{"name", "preset", "subject", "columns", "header_columns"}); n != "" {
				remedy = "did you mean " + n + "?"
			}
			fail(key.Line, &mistake{"has the unknown key " + key.Value, remedy})
		}
	}
	return t
}

func optionAt(path string) *option {
	for _, o := range options {
		if o.path != "" && o.path == path {
			return o
		}
	}
	return nil
}

// keysBelow lists the options of the file whose path begins with prefix.
func keysBelow(prefix string) []string {
	var keys []string
	for _, o := range options {
		if o.path != "" && strings.HasPrefix(o.path, prefix) {
			keys = append(keys, o.path)
		}
	}
	return keys
}

func keyRemedy(path, prefix string) string {
	for _, o := range options {
		if o.name == strings.ReplaceAll(path, "_", "-") {
			if o.path == "" {
				return "it is a flag only, --" + o.name
			}
			return "did you mean " + o.path + "?"
		}
	}
	if n := Nearest(path, append(keysBelow(""), sections()...)); n != "" {
		return "did you mean " + n + "?"
	}
	return "the keys here are " + strings.Join(childKeys(prefix), ", ")
}

func sections() []string { return []string{"nats", "stream", "backoff", "log", "route", "cloudevents"} }

func childKeys(prefix string) []string {
	var keys []string
	for _, k := range keysBelow(prefix) {
		k, _, _ = strings.Cut(strings.TrimPrefix(k, prefix), ".")
		if len(keys) == 0 || keys[len(keys)-1] != k {
			keys = append(keys, k)
		}
	}
	return keys
}
