package outbox

import (
	"bytes"
	"encoding/hex"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

// decodeSubject is the decoder that the package documentation describes.
func decodeSubject(t testing.TB, s []byte) []byte {
	t.Helper()
	tokens := bytes.Split(s, []byte("."))
	for i, token := range tokens {
		if string(token) == "%" {
			tokens[i] = nil
			continue
		}
		var out []byte
		for j := 0; j < len(token); j++ {
			if token[j] != '%' {
				out = append(out, token[j])
				continue
			}
			if j+2 >= len(token) {
				t.Fatalf("subject %q: cut escape", s)
			}
			b, err := hex.DecodeString(string(token[j+1 : j+3]))
			if err != nil || strings.ToUpper(string(token[j+1:j+3])) != string(token[j+1:j+3]) {
				t.Fatalf("subject %q: bad escape in token %q", s, token)
			}
			out = append(out, b...)
			j += 2
		}
		tokens[i] = out
	}
	return bytes.Join(tokens, []byte("."))
}

func checkSubject(t testing.TB, s []byte) {
	t.Helper()
	if len(s) == 0 || len(s) > maxSubject {
		t.Fatalf("subject has %d bytes", len(s))
	}
	if !utf8.Valid(s) || s[0] == '$' || bytes.ContainsAny(s, "*> \t\r\n\x00\x7f") {
		t.Fatalf("invalid subject %q", s)
	}
	for _, c := range s {
		if c < ' ' {
			t.Fatalf("control byte in subject %q", s)
		}
	}
	if slices.ContainsFunc(bytes.Split(s, []byte(".")), func(b []byte) bool { return len(b) == 0 }) {
		t.Fatalf("empty token in subject %q", s)
	}
}

func mustCompile(t testing.TB, s string) *template {
	t.Helper()
	tmpl, err := compileTemplate(s)
	if err != nil {
		t.Fatal(err)
	}
	return tmpl
}

func TestSubjectEncodesValues(t *testing.T) {
	for _, tt := range []struct{ template, value, want string }{
		{"outbox.{aggregate_type}", "order", "outbox.order"},
		{"outbox.{aggregate_type}", "sales.order", "outbox.sales.order"},
		{"outbox.{aggregate_type}", "", "outbox.%"},
		{"outbox.{aggregate_type}", ".", "outbox.%.%"},
		{"outbox.{aggregate_type}", "a..b", "outbox.a.%.b"},
		{"outbox.{aggregate_type}", ".a.", "outbox.%.a.%"},
		{"outbox.{aggregate_type}", "*", "outbox.%2A"},
		{"outbox.{aggregate_type}", "a>b c%", "outbox.a%3Eb%20c%25"},
		{"outbox.{aggregate_type}", "a\tb\r\n\x00\x7f", "outbox.a%09b%0D%0A%00%7F"},
		{"outbox.{aggregate_type}", "Überweisung", "outbox.Überweisung"},
		{"outbox.{aggregate_type}", "注文", "outbox.注文"},
		{"outbox.{aggregate_type}", "\xff\xc3", "outbox.%FF%C3"},
		{"outbox.{aggregate_type}", "a\u0085b\u3000", "outbox.a%C2%85b%E3%80%80"},
		{"outbox.{aggregate_type}", "$JS", "outbox.$JS"},
		{"{aggregate_type}.x", "$JS.API", "%24JS.API.x"},
		{"{aggregate_type}$JS.x", "", "%24JS.x"},
		{"{aggregate_type}x", "", "x"},
		{"pre{aggregate_type}post", ".", "pre.post"},
		{"pre{aggregate_type}post", "..", "pre.%.post"},
		{"{aggregate_type}", "", "%"},
		{"{aggregate_type}", "{event_type}", "{event_type}"},
	} {
		got, ok := mustCompile(t, tt.template).append(nil, &subjectValues{aggregateType: []byte(tt.value)})
		if !ok || string(got) != tt.want {
			t.Errorf("%s of %q: got %q, want %q", tt.template, tt.value, got, tt.want)
		}
		checkSubject(t, got)
	}
}

func TestSubjectPlaceholders(t *testing.T) {
	v := &subjectValues{
		aggregateType: []byte("order"), aggregateID: []byte("42"), eventType: []byte("placed"), schemaVersion: []byte("3"),
		headers: []event.Header{{Name: "tenant", Value: []byte("a")}, {Name: "Tenant", Value: []byte("b")}, {Name: "tenant", Value: []byte("c")}},
	}
	got, _ := mustCompile(t, "o.{aggregate_type}-{aggregate_id}.{event_type}.v{schema_version}.{header:tenant}.{header:none}.p{partition:16}").append([]byte("x"), v)
	if want := "xo.order-42.placed.v3.c.%.p3"; string(got) != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestSubjectLength(t *testing.T) {
	tmpl := mustCompile(t, "{aggregate_type}")
	for _, tt := range []struct {
		value string
		ok    bool
	}{
		{strings.Repeat("a", maxSubject), true},
		{strings.Repeat("a", maxSubject+1), false},
		{strings.Repeat(" ", maxSubject/3), true},
		{strings.Repeat(" ", maxSubject/3+1), false},
		{strings.Repeat("注", 1<<20), false},
	} {
		if got, ok := tmpl.append(nil, &subjectValues{aggregateType: []byte(tt.value)}); ok != tt.ok || len(got) > maxSubject+12 {
			t.Errorf("%d bytes: got %t with %d bytes, want %t", len(tt.value), ok, len(got), tt.ok)
		}
	}
}

func TestTemplateMistakes(t *testing.T) {
	for _, tt := range []struct{ template, want string }{
		{"", "empty"},
		{"a.{aggregatetype}", "unknown placeholder {aggregatetype}: known are {aggregate_type} "},
		{"a.{}", "unknown placeholder {}"},
		{"a.{aggregate_type:3}", "unknown placeholder"},
		{"a.{partition}", "unknown placeholder"},
		{"a.{partition:0}", "from 1 to"},
		{"a.{partition:x}", "from 1 to"},
		{"a.{partition:-1}", "from 1 to"},
		{"a.{partition:99999999}", "from 1 to"},
		{"a.{header:}", "cannot be a header's name"},
		{"a.{header:a b}", "cannot be a header's name"},
		{"a.{header:nats-x}", "never a header of the event's own"},
		{"a.{header:content-type}", "never a header of the event's own"},
		{"a.{event_type", "has no }"},
		{"a.event_type}", "has no {"},
		{"a b", "cannot be part of a subject"},
		{"a.*", "cannot be part of a subject"},
		{"a.>", "cannot be part of a subject"},
		{"a\x00", "cannot be part of a subject"},
		{"a\xff", "not UTF-8"},
		{"a%20", "% is kept"},
		{"a..b", "is empty"},
		{".a", "is empty"},
		{"a.", "is empty"},
		{"a.{event_type}.", "is empty"},
		{"$JS.{event_type}", "the server's"},
		{strings.Repeat("a", 2000), "longer than"},
	} {
		_, err := compileTemplate(tt.template)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: got %v, want %q in it", tt.template, err, tt.want)
		}
	}
}

func TestFilters(t *testing.T) {
	for _, tt := range []struct {
		templates []string
		want      string
	}{
		{[]string{"outbox.{aggregate_type}.{event_type}"}, "outbox.>"},
		{[]string{"outbox.event.{aggregate_type}"}, "outbox.event.>"},
		{[]string{"outbox.fixed"}, "outbox.fixed"},
		{[]string{"outbox.p{partition:8}"}, "outbox.*"},
		{[]string{"outbox.{partition:8}.x.{aggregate_type}"}, "outbox.*.x.>"},
		{[]string{"outbox.{partition:8}{event_type}"}, "outbox.>"},
		{[]string{"outbox.x{event_type}.y"}, "outbox.>"},
		{[]string{"{event_type}"}, ">"},
		{[]string{"outbox.{aggregate_type}", "outbox.{event_type}"}, "outbox.>"},
		{[]string{"outbox.event.{aggregate_type}", "outbox.{event_type}"}, "outbox.>"},
		{[]string{"b.{event_type}", "a.{event_type}"}, "a.> b.>"},
		{[]string{"a.{partition:2}", "a.x"}, "a.*"},
		{[]string{"a.{partition:2}", "a.x.y"}, "a.* a.x.y"},
		{[]string{"{partition:2}.b", "a.{partition:2}"}, "*.*"},
		{[]string{"a.{partition:2}", "a.b.c", "{partition:3}.{partition:3}.c"}, "*.*.c a.*"},
		{[]string{"c.d", "{partition:2}.b", "a.{partition:2}"}, "*.*"},
	} {
		var filters []string
		for _, s := range tt.templates {
			filters = append(filters, mustCompile(t, s).filter())
		}
		if got := strings.Join(disjoint(filters), " "); got != tt.want {
			t.Errorf("%v: got %q, want %q", tt.templates, got, tt.want)
		}
	}
}

// The figures are fixed: consumers compute partitions, too.
func TestPartitionIsStable(t *testing.T) {
	for _, tt := range []struct {
		id   string
		hash uint64
		of8  string
	}{
		{"", 0xcbf29ce484222325, "5"},
		{"a", 0xaf63dc4c8601ec8c, "4"},
		{"foobar", 0x85944171f73967e8, "0"},
		{"42", 0x07ee7e07b4b19223, "3"},
	} {
		if got := fnv1a([]byte(tt.id)); got != tt.hash {
			t.Errorf("fnv1a(%q): got %#x, want %#x", tt.id, got, tt.hash)
		}
		got, _ := mustCompile(t, "{partition:8}").append(nil, &subjectValues{aggregateID: []byte(tt.id)})
		if string(got) != tt.of8 {
			t.Errorf("partition of %q: got %s, want %s", tt.id, got, tt.of8)
		}
	}
}

func FuzzSubject(f *testing.F) {
	f.Add("outbox.{aggregate_type}.{event_type}", "order", "placed", "42")
	f.Add("{aggregate_type}{event_type}$x", "", "", "")
	f.Add("{aggregate_type}.{event_type}", "a..b", "*.>", "\xff")
	f.Add("a.{aggregate_id}{aggregate_type}.{partition:7}.{header:h}", "$", "%", ".")
	f.Fuzz(func(t *testing.T, s, aggregateType, eventType, aggregateID string) {
		tmpl, err := compileTemplate(s)
		if err != nil {
			return
		}
		v := &subjectValues{
			aggregateType: []byte(aggregateType), eventType: []byte(eventType), aggregateID: []byte(aggregateID),
			headers: []event.Header{{Name: "h", Value: []byte(eventType)}},
		}
		got, ok := tmpl.append(nil, v)
		if !ok {
			return
		}
		checkSubject(t, got)
		if raw := rawSubject(tmpl, v); !bytes.Equal(decodeSubject(t, got), raw) {
			t.Fatalf("subject %q decodes to %q, want %q", got, decodeSubject(t, got), raw)
		}
		if !covers(tmpl.filter(), string(got)) {
			t.Fatalf("filter %q does not cover %q", tmpl.filter(), got)
		}
	})
}

// rawSubject is the template with its values as they are.
func rawSubject(tmpl *template, v *subjectValues) []byte {
	var raw []byte
	for _, p := range tmpl.parts {
		switch p.kind {
		case literal:
			raw = append(raw, p.text...)
		case aggregateType:
			raw = append(raw, v.aggregateType...)
		case aggregateID:
			raw = append(raw, v.aggregateID...)
		case eventType:
			raw = append(raw, v.eventType...)
		case schemaVersion:
			raw = append(raw, v.schemaVersion...)
		case header:
			raw = append(raw, lastHeader(v.headers, p.text)...)
		case partition:
			raw = strconv.AppendUint(raw, fnv1a(v.aggregateID)%p.n, 10)
		case group:
			if from, to := v.groups[2*p.n], v.groups[2*p.n+1]; from >= 0 {
				raw = append(raw, v.routed[from:to]...)
			}
		}
	}
	if tmpl.route != nil {
		raw = append(raw, v.routed[v.groups[1]:]...)
	}
	return raw
}

// covers reports whether a filter matches a subject without wildcards.
func covers(filter, subject string) bool {
	return overlap(filter, subject)
}
