package outbox

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestParseTable(t *testing.T) {
	for _, tt := range []struct{ in, schema, name string }{
		{"outbox", "public", "outbox"},
		{"app.outbox", "app", "outbox"},
		{"App.OutBox_1$", "app", "outbox_1$"},
		{`"Quoted Schema"."T"`, "Quoted Schema", "T"},
		{`"a.b".c`, "a.b", "c"},
		{`a."say ""hi"""`, "a", `say "hi"`},
		{`"Outbox"`, "public", "Outbox"},
		{"äußeres.Ä", "äußeres", "Ä"},
	} {
		got, err := ParseTable(tt.in)
		if err != nil || got.Schema != tt.schema || got.Name != tt.name {
			t.Errorf("%q: got %q %q, %v", tt.in, got.Schema, got.Name, err)
		}
	}
	for _, bad := range []string{
		"", ".", "a.", ".a", "a.b.c", `"a`, `""`, `"a"b`, "a b", "my-table", "1a", "a;b", `a"b"`, `"a\`, "a.\"\"", "\"a\x00\"", strings.Repeat("x", 64), " a",
	} {
		if got, err := ParseTable(bad); event.ClassOf(err) != event.Usage || event.HintOf(err) == "" {
			t.Errorf("%q: got %+v, %v, want a usage failure", bad, got, err)
		}
	}
}
