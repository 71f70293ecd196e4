package outbox

import (
	"bytes"
	"regexp"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestRouteRewritesAsDebeziumsRouter(t *testing.T) {
	for _, tt := range []struct {
		regex, replacement, value, want string // "" is poison
	}{
		{`(?<routedByValue>.*)`, `outbox.event.${routedByValue}`, "order", "outbox.event.order"}, // Debezium's defaults
		{`(?P<routedByValue>.*)`, `outbox.event.${routedByValue}`, "order", "outbox.event.order"},
		{`(.*)`, `outbox.event.$1`, "order", "outbox.event.order"},
		{`(.*)`, `outbox.$1.{event_type}`, "order", "outbox.order.placed"},
		{`(.*)`, `outbox.${1}`, "order", "outbox.order"},
		{`(.*)`, `outbox.$0`, "order", "outbox.order"},
		{`(.*)`, `outbox.$11`, "order", "outbox.order1"}, // there is no group 11
		{`(.*)`, `outbox.\$1\.$1`, "order", "outbox.$1.order"},
		{`([^-]+)-(.+)`, `$2.$1`, "eu-order", "order.eu"},
		{`([^-]+)-(.+)`, `x.$2.$1`, "order", ""}, // the whole has to match
		{`a|ab`, `x`, "ab", "xb"},                // and the first match is replaced
		{`(a)|(b)`, `x.$1.$2`, "b", "x.%.b"},
		{`(.*)`, `outbox.$1`, "a b.*", "outbox.a%20b.%2A"},
		{`(.*)`, `$1`, "$JS.API", "%24JS.API"},
		{`(?i)ORDER`, `outbox.orders`, "order", "outbox.orders"},
		{`(.*)`, `outbox.$1`, "", "outbox.%"},
		{`(.*)`, `outbox.$1`, "a\nb", ""}, // . is no line break, in Java neither
	} {
		m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}, Subject: tt.replacement, Route: Route{Regex: tt.regex}})
		rec := rowOf(defaultRelation(), "1", testID, tt.value, "7", "placed", "{}", sqlNull, sqlNull, sqlNull)
		if strings.ContainsAny(tt.value, "\n") {
			ev := &event.Event{}
			if _, err := m.Map(rec, ev); err == nil {
				t.Errorf("%q: no poison", tt.value)
			}
			continue
		}
		if tt.want == "" {
			poisonOf(t, m, rec, event.ReasonSubject, "does not match the route's expression")
			continue
		}
		for range 2 { // the second time from memory
			if got := mapOne(t, m, rec); string(got.Subject) != tt.want {
				t.Errorf("%s to %s of %q: got %q, want %q", tt.regex, tt.replacement, tt.value, got.Subject, tt.want)
			}
		}
		if !covers(strings.Join(m.Subjects(), " "), tt.want) {
			t.Errorf("%s: filter %q does not cover %q", tt.replacement, m.Subjects(), tt.want)
		}
	}
}

func TestRouteGoesByAnotherColumn(t *testing.T) {
	m := mapperOf(t, Mapping{
		Tables: []Table{{Name: "outbox"}}, Messages: true,
		Subject: "outbox.$1", Route: Route{By: "event_type", Regex: `order\.(.*)`},
	})
	rec := rowOf(defaultRelation(), "1", testID, "x", "7", "order.placed", "{}", sqlNull, sqlNull, sqlNull)
	same(t, "subject", string(mapOne(t, m, rec).Subject), "outbox.placed")
	same(t, "subject of a message", string(mapOne(t, m, messageOf(`{"id":"1","event_type":"order.paid"}`)).Subject), "outbox.paid")
	poisonOf(t, m, messageOf(`{"id":"1"}`), event.ReasonContent, "event_type")
}

func TestRouteMistakes(t *testing.T) {
	for _, tt := range []struct {
		route   Route
		subject string
		want    string
	}{
		{Route{Regex: `(`}, "a.b", "missing closing )"},
		{Route{Regex: `(?=a)b`}, "a.b", "look-around"},
		{Route{By: "payload", Regex: `.*`}, "a.b", `cannot go by "payload"`},
		{Route{By: "event_type"}, "a.b", "no regular expression"},
		{Route{Regex: `.*`}, "a.$1", "no group $1"},
		{Route{Regex: `.*`}, "a.${x}", "no group ${x}"},
		{Route{Regex: `.*`}, "a.${}", "no group ${}"},
		{Route{Regex: `.*`}, "a.${-1}", "no group"},
		{Route{Regex: `.*`}, "a.${x", "has no }"},
		{Route{Regex: `.*`}, "a.$", "names no group"},
		{Route{Regex: `.*`}, `a.\`, `ends in a \`},
		{Route{Regex: `.*`}, `\$JS.x`, "the server's"},
		{Route{Regex: `.*`}, "a..$0", "is empty"},
	} {
		_, err := NewMapper(Mapping{Tables: []Table{{Name: "outbox"}}, Subject: tt.subject, Route: tt.route})
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%+v, %s: got %v, want %q in it", tt.route, tt.subject, err, tt.want)
		}
	}
}

func TestSubjectOverrides(t *testing.T) {
	m := mapperOf(t, Mapping{
		Tables: []Table{{Name: "outbox"}}, Messages: true,
		Overrides: []Override{
			{EventType: "deleted", Subject: "gone.{aggregate_type}"},
			{AggregateType: "order", Subject: "orders.{event_type}"},
			{AggregateType: "order", EventType: "paid", Subject: "money.{aggregate_id}"},
		},
	})
	for _, tt := range []struct{ aggregate, event, want string }{
		{"order", "paid", "money.7"},
		{"order", "deleted", "gone.order"},
		{"order", "made", "orders.made"},
		{"user", "paid", "outbox.user.paid"},
		{"user", "deleted", "gone.user"},
	} {
		rec := rowOf(defaultRelation(), "1", testID, tt.aggregate, "7", tt.event, "{}", sqlNull, sqlNull, sqlNull)
		same(t, tt.aggregate+" "+tt.event, string(mapOne(t, m, rec).Subject), tt.want)
	}
	// What only another template needs may be absent.
	same(t, "message", string(mapOne(t, m, messageOf(`{"id":"1","aggregate_type":"order","event_type":"made"}`)).Subject), "orders.made")
	same(t, "filters", strings.Join(m.Subjects(), " "), "gone.> money.> orders.> outbox.>")

	_, err := NewMapper(Mapping{Messages: true, Overrides: []Override{
		{Subject: "a"}, {EventType: "x", Subject: "a.{y}"}, {EventType: "z", Subject: "a"}, {EventType: "z", Subject: "b"},
	}})
	for _, want := range []string{"subject of */*: it names no type", "subject of */x: subject template", "subject of */z: it is given twice"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

// FuzzRoute checks what a route yields against the standard library's way to replace.
func FuzzRoute(f *testing.F) {
	f.Add(`(?<a>[^.]*)\.?(.*)`, `outbox.${a}.$2`, "order.eu")
	f.Add(`(.*)`, `$1`, "$JS")
	f.Add(`a|ab`, `x`, "ab")
	f.Add(`(\w+)`, `o.$1\.$0`, "öl")
	f.Fuzz(func(t *testing.T, regex, replacement, value string) {
		r, err := compileRoute(Route{Regex: regex})
		if err != nil || r == nil {
			return
		}
		tmpl, err := compileRouted(replacement, r)
		if err != nil {
			return
		}
		v := &subjectValues{routed: []byte(value)}
		var ok bool
		if v.groups, ok = r.match(v.routed); !ok {
			if loc := regexp.MustCompile(`\A(?:` + regex + `)\z`).FindStringIndex(value); loc != nil {
				t.Fatalf("%q matches %q and is refused", regex, value)
			}
			return
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
