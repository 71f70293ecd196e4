package config

import (
	"fmt"
	"strings"
)

// Markdown writes the options as the table of the README.
func Markdown() string {
	var b strings.Builder
	b.WriteString("| flag | variable | key of the file | default | meaning |\n|---|---|---|---|---|\n")
	code := func(s string) string {
		if s == "" {
			return "–"
		}
		return "`" + s + "`"
	}
	fmt.Fprintf(&b, "| `--%s` | `%s` | – | – | YAML file with the configuration |\n", fileOption, envName(fileOption))
	for _, o := range options {
		env := code(o.env())
		if o.foreign != "" {
			env += ", " + code(o.foreign)
		}
		if o.name == "dsn" {
			env += ", `PG*`"
		}
		fmt.Fprintf(&b, "| `--%s` | %s | %s | %s | %s |\n", o.name, env, code(o.path), code(o.def), o.help)
	}
	return b.String()
}
