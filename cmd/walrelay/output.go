package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/event"
)

// form is the value of -o.
type form string

const (
	formTable form = "table"
	formJSON  form = "json"
)

func (f *form) String() string    { return string(*f) }
func (f *form) Type() string      { return "form" }
func (f *form) choices() []string { return []string{string(formTable), string(formJSON)} }

func (f *form) Set(s string) error {
	if !slices.Contains(f.choices(), s) {
		return errNoChoice
	}
	*f = form(s)
	return nil
}

// outputFlag gives a reading command -o.
func outputFlag(cmd *cobra.Command) *form {
	f := formTable
	cmd.Flags().VarP(&f, "output", "o", "form of the output: table or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(f.choices(), cobra.ShellCompDirectiveNoFileComp))
	return &f
}

func writeJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

func writeTable(w io.Writer, rows [][]string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, r := range rows {
		if _, err := fmt.Fprintln(t, strings.Join(r, "\t")); err != nil {
			return err
		}
	}
	return t.Flush()
}

// size writes bytes for humans.
func size(n int64) string {
	const units = "KMGTPE"
	v, unit := float64(n), -1
	for (v >= 1024 || v <= -1024) && unit < len(units)-1 {
		v /= 1024
		unit++
	}
	if unit < 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %ciB", v, units[unit])
}

func position(l event.LSN) string {
	if l == 0 {
		return "-"
	}
	return l.String()
}
