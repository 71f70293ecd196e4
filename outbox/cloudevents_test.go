package outbox

import (
	"net/url"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestColumnsBecomeHeaders(t *testing.T) {
	rel := relationWith("outbox", "id:uuid", "aggregate_type", "event_type", "payload:jsonb", "headers:jsonb", "tenant", "traceparent")
	m := mapperOf(t, Mapping{
		Tables:        []Table{{Name: "outbox", Subject: "o.{header:X-Tenant}", HeaderColumns: []HeaderColumn{{Column: "tenant", Name: "X-Tenant"}}}},
		HeaderColumns: []HeaderColumn{{Column: "traceparent"}},
	})
	ev := mapOne(t, m, rowOf(rel, testID, "order", "made", "{}", `{"x-tenant": "other", "a": "b"}`, "acme", "00-1-2-01"))
	got := headersOf(ev)
	for _, want := range []string{"X-Tenant: acme", "traceparent: 00-1-2-01", "a: b"} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	if strings.Contains(got, "other") {
		t.Errorf("the column does not win over the headers:\n%s", got)
	}
	same(t, "subject", string(ev.Subject), "o.acme")
	ev = mapOne(t, m, rowOf(rel, testID, "order", "made", "{}", `{"x-tenant": "other"}`, sqlNull, sqlNull))
	if got := headersOf(ev); strings.Contains(got, "traceparent") || !strings.Contains(got, "x-tenant: other") {
		t.Errorf("NULL makes no header, but\n%s", got)
	}
	// The header of a column needs no headers column.
	bare := relationWith("outbox", "id:uuid", "payload:jsonb", "tenant", "traceparent")
	same(t, "subject", string(mapOne(t, m, rowOf(bare, testID, "{}", "acme", sqlNull)).Subject), "o.acme")
	poisonOf(t, m, rowOf(bare, testID, "{}", "a\nb", sqlNull), event.ReasonHeaders, "X-Tenant")

	_, err := m.Fits(relationWith("outbox", "id:uuid", "payload:jsonb", "tenant"))
	wantFailure(t, err, event.Precondition, `column "traceparent" (header traceparent) is missing`)

	_, err = NewMapper(Mapping{Tables: []Table{{Name: "outbox", HeaderColumns: []HeaderColumn{
		{Column: "a", Name: "Nats-Rollup"}, {Column: "b", Name: "x y"}, {Column: "c", Name: "content-type"}, {},
	}}, {Name: "twice", HeaderColumns: []HeaderColumn{{Column: "d"}, {Column: "e", Name: "D"}}}}})
	for _, want := range []string{"would control the server", "cannot be a header's name", "content_type", "has no name", "two columns become the header D"} {
		if event.ClassOf(err) != event.Usage || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %q in it", err, want)
		}
	}
}

func TestCloudEventHeaders(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}, Messages: true, CloudEvents: CloudEvents{On: true}})
	rel := defaultRelation()
	ev := mapOne(t, m, rowOf(rel, "1", testID, "order", "Euro € 😀", `pla"ced%`, "{}",
		`{"traceparent": "00-1-2-01", "ce-id": "x", "CE-Type": "y", "ce-region": "ü", "other": "ü"}`, sqlNull, "2024-05-06 07:08:09.5+00"))
	got := headersOf(ev)
	for _, want := range []string{
		"ce-specversion: 1.0", "ce-id: " + testID, "ce-source: /public.outbox", "ce-type: pla%22ced%25",
		"ce-subject: Euro%20%E2%82%AC%20%F0%9F%98%80", "ce-time: 2024-05-06T07:08:09.5Z", "ce-datacontenttype: application/json",
		"ce-traceparent: 00-1-2-01", "traceparent: 00-1-2-01", "ce-region: %C3%BC", "other: ü",
	} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in\n%s", want, got)
		}
	}
	for _, name := range []string{"ce-id: x", "CE-Type"} {
		if strings.Contains(got, name) {
			t.Errorf("%q in\n%s", name, got)
		}
	}
	if m.Stripped() != 2 {
		t.Errorf("%d headers stripped, want 2", m.Stripped())
	}
	whole := mapOne(t, m, messageOf(`{"id":"1","aggregate_type":"a","event_type":"b","content_type":"application/cloudevents+json","payload":{}}`))
	if got := headersOf(whole); strings.Contains(got, "ce-") {
		t.Errorf("the payload is a CloudEvent, but\n%s", got)
	}
	poisonOf(t, m, rowOf(rel, "1", testID, "order", "7", "", "{}", sqlNull, sqlNull, sqlNull), event.ReasonContent, "no type")
	poisonOf(t, m, rowOf(rel, "1", testID, "order", "7", "x", "{}", `{"ce-Foo": 1}`, sqlNull, sqlNull), event.ReasonHeaders, "ce-Foo")
	_, err := m.Fits(relationWith("outbox", "id:uuid", "aggregate_type", "payload:jsonb"))
	wantFailure(t, err, event.Precondition, `"event_type" (event_type) is missing`)
}

func FuzzCloudEventValue(f *testing.F) {
	f.Add("Euro € 😀")
	f.Add("%41\"\x7f\x00")
	f.Fuzz(func(t *testing.T, s string) {
		got := string(appendCE(nil, []byte(s)))
		for _, c := range []byte(got) {
			if c <= ' ' || c >= 0x7f || c == '"' {
				t.Fatalf("%q has byte %#x", got, c)
			}
		}
		if back, err := url.PathUnescape(got); err != nil || back != s {
			t.Fatalf("%q becomes %q and then %q, %v", s, got, back, err)
		}
	})
}
