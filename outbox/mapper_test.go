package outbox

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

const testID = "0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d"

var commitTime = time.Date(2024, 5, 6, 7, 8, 9, 123456000, time.FixedZone("x", 3600))

// defaultRelation is the default table as the server describes it.
func defaultRelation() *event.Relation {
	return &event.Relation{ID: 1, Schema: "public", Name: "outbox", Columns: []event.Column{
		{Name: "seq", Type: event.TypeInt8},
		{Name: "id", Type: event.TypeUUID},
		{Name: "aggregate_type", Type: event.TypeText},
		{Name: "aggregate_id", Type: event.TypeText},
		{Name: "event_type", Type: event.TypeText},
		{Name: "payload", Type: event.TypeJSONB},
		{Name: "headers", Type: event.TypeJSONB},
		{Name: "schema_version", Type: event.TypeInt4},
		{Name: "created_at", Type: event.TypeTimestamptz},
	}}
}

// sqlNull is SQL's NULL among the values of a row.
const sqlNull = "\x00NULL"

func rowOf(rel *event.Relation, values ...string) *event.Record {
	rec := &event.Record{
		Kind: event.Row, Relation: rel, XID: 77, CommitTime: commitTime,
		Position: event.Position{Timeline: 1, Commit: 200, Change: 100},
	}
	for _, v := range values {
		if v == sqlNull {
			rec.Values = append(rec.Values, nil)
			continue
		}
		rec.Values = append(rec.Values, []byte(v))
	}
	return rec
}

// relationWith is a relation of columns written as name:type, of text without a type.
func relationWith(table string, columns ...string) *event.Relation {
	types := map[string]uint32{
		"": event.TypeText, "uuid": event.TypeUUID, "bytea": event.TypeBytea, "json": event.TypeJSON, "jsonb": event.TypeJSONB,
		"int8": event.TypeInt8, "timestamp": event.TypeTimestamp, "timestamptz": event.TypeTimestamptz, "varchar": event.TypeVarchar,
		"point": 600, "own": 16400,
	}
	rel := &event.Relation{ID: 2, Schema: "public", Name: table}
	for _, c := range columns {
		name, typ, _ := strings.Cut(c, ":")
		rel.Columns = append(rel.Columns, event.Column{Name: name, Type: types[typ]})
	}
	return rel
}

func mapperOf(t testing.TB, m Mapping) *Mapper {
	t.Helper()
	mp, err := NewMapper(m)
	if err != nil {
		t.Fatal(err)
	}
	return mp
}

func mapOne(t testing.TB, m *Mapper, rec *event.Record) *event.Event {
	t.Helper()
	var ev event.Event
	ok, err := m.Map(rec, &ev)
	if err != nil || !ok {
		t.Fatalf("map: got %t, %v", ok, err)
	}
	return &ev
}

func poisonOf(t testing.TB, m *Mapper, rec *event.Record, reason event.Reason, detail string) *event.Event {
	t.Helper()
	var ev event.Event
	ok, err := m.Map(rec, &ev)
	var p *event.Poison
	if !ok || !errors.As(err, &p) || p.Reason != reason || !strings.Contains(p.Detail, detail) {
		t.Fatalf("map: got %t, %v, want %s with %q", ok, err, reason, detail)
	}
	if ev.Position != rec.Position || ev.Table == "" || ev.XID != rec.XID || !ev.CommitTime.Equal(rec.CommitTime) {
		t.Errorf("poison does not say where it comes from: %+v", ev)
	}
	return &ev
}

func headersOf(ev *event.Event) string {
	var b strings.Builder
	for _, h := range ev.Headers {
		fmt.Fprintf(&b, "%s: %s\n", h.Name, h.Value)
	}
	return b.String()
}

func same(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s:\n got %q\nwant %q", what, got, want)
	}
}

func TestDefaultRow(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Schema: "public", Name: "outbox"}}})
	rec := rowOf(defaultRelation(), "1", testID, "order", "42", "placed", `{"n": 18446744073709551615, "p": 1.10}`,
		`{"traceparent": "00-x", "n": 1.10, "ok": true, "deep": {"a": [1, "b c"]}, "no": null}`, "3", "2024-05-06 07:08:09.5+00")
	ev := mapOne(t, m, rec)
	same(t, "id", string(ev.ID), testID)
	same(t, "msg id", string(ev.MsgID), testID)
	same(t, "subject", string(ev.Subject), "outbox.order.placed")
	same(t, "payload", string(ev.Payload), `{"n": 18446744073709551615, "p": 1.10}`)
	same(t, "table", ev.Table, "public.outbox")
	same(t, "aggregate", string(ev.AggregateType)+"/"+string(ev.AggregateID)+"/"+string(ev.EventType), "order/42/placed")
	same(t, "headers", headersOf(ev), `Outbox-Id: `+testID+`
Outbox-Aggregate-Type: order
Outbox-Aggregate-Id: 42
Outbox-Event-Type: placed
Outbox-Time: 2024-05-06T07:08:09.5Z
Outbox-Schema-Version: 3
traceparent: 00-x
n: 1.10
ok: true
deep: {"a":[1,"b c"]}
Content-Type: application/json
`)
	if ev.Position != rec.Position || ev.XID != 77 || !ev.CommitTime.Equal(commitTime) {
		t.Errorf("got %+v", ev)
	}
	if want := []string{"outbox.>"}; fmt.Sprint(m.Subjects()) != fmt.Sprint(want) {
		t.Errorf("subjects: got %v, want %v", m.Subjects(), want)
	}
}

func TestNullsOfARow(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}})
	ev := mapOne(t, m, rowOf(defaultRelation(), "1", testID, "order", "42", "placed", sqlNull, sqlNull, sqlNull, sqlNull))
	if len(ev.Payload) != 0 {
		t.Errorf("payload: got %q", ev.Payload)
	}
	same(t, "headers", headersOf(ev), `Outbox-Id: `+testID+`
Outbox-Aggregate-Type: order
Outbox-Aggregate-Id: 42
Outbox-Event-Type: placed
Outbox-Time: 2024-05-06T06:08:09.123456Z
Content-Type: application/json
`)
	ev = mapOne(t, m, rowOf(defaultRelation(), "1", testID, sqlNull, sqlNull, sqlNull, sqlNull, "null", sqlNull, "infinity"))
	same(t, "subject", string(ev.Subject), "outbox.%.%")
	same(t, "headers", headersOf(ev), "Outbox-Id: "+testID+"\nOutbox-Time: 2024-05-06T06:08:09.123456Z\nContent-Type: application/json\n")
}

// A time is formatted once for rows that share it. What is no time must not get that of the row before.
func TestTimesOfRowsInTurn(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox", Columns: map[string]string{"created_at": "at"}}}})
	rel := relationWith("outbox", "id:uuid", "aggregate_type", "event_type", "payload", "at:timestamptz")
	rel.Schema = "public"
	const commit = "2024-05-06T06:08:09.123456Z"
	for i, tt := range []struct{ at, want string }{
		{"", commit},
		{"2024-05-06 07:08:09.5+00", "2024-05-06T07:08:09.5Z"},
		{"2024-05-06 07:08:09.5+00", "2024-05-06T07:08:09.5Z"},
		{"2024-05-06 07:08:09.5+01", "2024-05-06T06:08:09.5Z"},
		{"2024-05-06 07:08", commit},
		{"2024-05-06 07:08", commit},
		{"2024-05-06 07:08:09.5+01", "2024-05-06T06:08:09.5Z"},
		{"", commit},
		{sqlNull, commit},
		{"2024-05-06 07:08:09.5+01", "2024-05-06T06:08:09.5Z"},
	} {
		ev := mapOne(t, m, rowOf(rel, testID, "order", "placed", "x", tt.at))
		if got := string(lastHeader(ev.Headers, event.HeaderTime)); got != tt.want {
			t.Errorf("row %d, %q: got %q, want %q", i, tt.at, got, tt.want)
		}
	}
}

func TestDebeziumRow(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Schema: "public", Name: "outboxevent", Preset: PresetDebezium, Columns: map[string]string{"headers": "extra"}}}})
	rel := relationWith("outboxevent", "id:uuid", "aggregatetype:varchar", "aggregateid:varchar", "type:varchar", "payload", "extra:jsonb")
	ev := mapOne(t, m, rowOf(rel, testID, "Order", "1", "OrderCreated", "x", `{"id":"fake","ID":"kept"}`))
	same(t, "subject", string(ev.Subject), "outbox.event.Order")
	same(t, "headers", headersOf(ev), `Outbox-Id: `+testID+`
Outbox-Aggregate-Type: Order
Outbox-Aggregate-Id: 1
Outbox-Event-Type: OrderCreated
Outbox-Time: 2024-05-06T06:08:09.123456Z
id: `+testID+`
ID: kept
Content-Type: text/plain; charset=utf-8
`)
	if m.Stripped() != 1 {
		t.Errorf("stripped: got %d, want 1", m.Stripped())
	}
}

func TestIDsThatAreNotUUIDsAreQualified(t *testing.T) {
	for _, typ := range []string{"int8", "", "varchar", "own"} {
		m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
		ev := mapOne(t, m, rowOf(relationWith("o", "id:"+typ, "payload"), "7", ""))
		same(t, typ, string(ev.ID)+" "+string(ev.MsgID), "7 public.o:7")
	}
}

func TestPayloads(t *testing.T) {
	for _, tt := range []struct{ typ, value, want, contentType string }{
		{"jsonb", `{"a": 1}`, `{"a": 1}`, "application/json"},
		{"json", "{ \"a\" :\n1.0, \"a\":\"\\u0000\"}", "{ \"a\" :\n1.0, \"a\":\"\\u0000\"}", "application/json"},
		{"", "hällo\r\n", "hällo\r\n", "text/plain; charset=utf-8"},
		{"varchar", "", "", "text/plain; charset=utf-8"},
		{"bytea", `\x`, "", "application/octet-stream"},
		{"bytea", `\x00fF10`, "\x00\xff\x10", "application/octet-stream"},
		{"bytea", `a\\b\000\377\303\244`, "a\\b\x00\xff\xc3\xa4", "application/octet-stream"},
		{"bytea", sqlNull, "", "application/octet-stream"},
	} {
		m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
		ev := mapOne(t, m, rowOf(relationWith("o", "id:uuid", "payload:"+tt.typ), testID, tt.value))
		same(t, tt.typ+" "+tt.value, string(ev.Payload), tt.want)
		same(t, tt.typ, string(ev.Headers[len(ev.Headers)-1].Value), tt.contentType)
	}
	for _, bad := range []string{`\x0`, `\xzz`, `\`, `\9`, `\40`, `\400`, `a\b`} {
		m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
		poisonOf(t, m, rowOf(relationWith("o", "id:uuid", "payload:bytea"), testID, bad), event.ReasonContent, "bytea")
	}
}

func TestContentTypePrecedence(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
	rel := relationWith("o", "id:uuid", "payload", "headers:jsonb", "content_type")
	for _, tt := range []struct{ headers, column, want string }{
		{sqlNull, sqlNull, "text/plain; charset=utf-8"},
		{`{"content-type":"a/b"}`, sqlNull, "a/b"},
		{`{"content-type":"a/b","CONTENT-TYPE":"c/d"}`, "e/f", "e/f"},
		{`{"content-type":null}`, sqlNull, "text/plain; charset=utf-8"},
	} {
		ev := mapOne(t, m, rowOf(rel, testID, "", tt.headers, tt.column))
		same(t, tt.headers+tt.column, headersOf(ev)[strings.Index(headersOf(ev), "Z\n")+2:], "Content-Type: "+tt.want+"\n")
	}
}

func TestControlHeadersAreStripped(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
	rel := relationWith("o", "id:uuid", "payload", "headers:json")
	ev := mapOne(t, m, rowOf(rel, testID, "", `{"Nats-Rollup":"all","NATS-Msg-Id":"1","nats-":"","status":"503","DESCRIPTION":"x",
		"Kv-Operation":"PURGE","outbox-id":"2","Outbox-Pos":{"a":1},"\u004eats-Rollup":"all","Natsy":"y","Status2":"z","tracestate":"t"}`))
	got := headersOf(ev)
	same(t, "headers", got[strings.Index(got, "Z\n")+2:], "Natsy: y\nStatus2: z\ntracestate: t\nContent-Type: text/plain; charset=utf-8\n")
	if m.Stripped() != 9 {
		t.Errorf("stripped: got %d, want 9", m.Stripped())
	}
}

func TestHeadersThatCannotBe(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}})
	for _, tt := range []struct{ headers, detail string }{
		{`[]`, "not a JSON object"},
		{`"x"`, "not a JSON object"},
		{`{`, "not a JSON object"},
		{``, "not a JSON object"},
		{`{"a b":1}`, "name"},
		{`{"a:b":1}`, "name"},
		{`{"":1}`, "name"},
		{`{"a\r\nNats-Rollup":"all"}`, "name"},
		{`{"\u0000":1}`, "name"},
		{`{"ä":1}`, "name"},
		{`{"good":"1","a":"x\r\nNats-Rollup: all"}`, "the value of a "},
		{`{"a":"\u0000"}`, "the value of a "},
		{`{"content-type":"a\nb"}`, "Content-Type"},
	} {
		ev := poisonOf(t, m, rowOf(defaultRelation(), "1", testID, "order", "42", "placed", "{}", tt.headers, "3", sqlNull), event.ReasonHeaders, tt.detail)
		if string(ev.ID) != testID || string(ev.Subject) != "outbox.order.placed" || string(ev.Payload) != "{}" {
			t.Errorf("%s: the rest is not there: %+v", tt.headers, ev)
		}
		if strings.Contains(headersOf(ev), "Nats-") {
			t.Errorf("%s: got headers %s", tt.headers, headersOf(ev))
		}
	}
	ev := poisonOf(t, m, rowOf(defaultRelation(), "1", testID, "order", "4\n2", "placed", "{}", sqlNull, sqlNull, sqlNull), event.ReasonHeaders, event.HeaderAggregateID)
	same(t, "aggregate id", string(ev.AggregateID), "4\n2")
}

func TestPoisonRows(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}})
	ev := poisonOf(t, m, rowOf(defaultRelation(), "1", sqlNull, "order", "42", "placed", "{}", sqlNull, "3", sqlNull), event.ReasonNullID, "NULL")
	same(t, "subject", string(ev.Subject), "outbox.order.placed")
	same(t, "payload", string(ev.Payload), "{}")
	poisonOf(t, m, rowOf(defaultRelation(), "1", "", "order", "42", "placed", "{}", sqlNull, "3", sqlNull), event.ReasonNullID, "empty")
	ev = poisonOf(t, m, rowOf(defaultRelation(), "1", testID, strings.Repeat("x", 2000), "42", "placed", "{}", sqlNull, "3", sqlNull), event.ReasonSubject, "1024")
	same(t, "subject", string(ev.Subject), "")
	same(t, "payload", string(ev.Payload), "{}")
	// The next event is not tainted.
	mapOne(t, m, rowOf(defaultRelation(), "1", testID, "order", "42", "placed", "{}", sqlNull, "3", sqlNull))
}

func TestOtherRecordsAreNone(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}})
	for _, rec := range []*event.Record{
		{Kind: event.Commit},
		{Kind: event.Keepalive},
		{Kind: event.Message, Prefix: "walrelay", Content: []byte("{}")},
		rowOf(relationWith("orders", "id")),
		rowOf(&event.Relation{ID: 9, Schema: "other", Name: "outbox"}),
	} {
		if ok, err := m.Map(rec, &event.Event{}); ok || err != nil {
			t.Errorf("%+v: got %t, %v", rec, ok, err)
		}
	}
}

func TestRowsWithoutNeededColumnsAreParkedWhole(t *testing.T) {
	for _, tt := range []struct {
		name    string
		table   Table
		columns []string
		want    []string
	}{
		{"needed", Table{Name: "o"}, []string{"id:uuid", "body:jsonb", "event_type"}, []string{
			`column "payload" (payload) is missing`, `column "aggregate_type" (aggregate_type) is missing`,
			"published columns are id uuid, body jsonb, event_type text",
		}},
		{"id", Table{Name: "o", Subject: "x"}, []string{"payload"}, []string{`column "id" (id) is missing`}},
		{"subject", Table{Name: "o", Subject: "x.{partition:3}.{header:h}.{schema_version}"}, []string{"id", "payload"}, []string{
			`"aggregate_id"`, `"headers"`, `"schema_version"`,
		}},
		{"named", Table{Name: "o", Subject: "x", Columns: map[string]string{"created_at": "at"}}, []string{"id", "payload"}, []string{`column "at" (created_at) is missing`}},
		{"unmapped", Table{Name: "o", Subject: "x.{event_type}", Columns: map[string]string{"event_type": ""}}, []string{"id", "payload"}, []string{"no column has the role event_type"}},
		{"payload type", Table{Name: "o", Subject: "x"}, []string{"id", "payload:own"}, []string{"OID 16400", "want jsonb, json, text or bytea"}},
		{"time type", Table{Name: "o", Subject: "x"}, []string{"id", "payload", "created_at:int8"}, []string{"bigint"}},
		{"headers type", Table{Name: "o", Subject: "x"}, []string{"id", "payload", "headers:point"}, []string{"OID 600"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := mapperOf(t, Mapping{Tables: []Table{tt.table}})
			rec := rowOf(relationWith("o", tt.columns...), make([]string, len(tt.columns))...)
			for range 2 {
				var ev event.Event
				ok, err := m.Map(rec, &ev)
				var p *event.Poison
				if !ok || !errors.As(err, &p) || p.Reason != event.ReasonContent || !strings.HasPrefix(string(ev.Payload), `{"`) {
					t.Fatalf("got %t, %v, body %s", ok, err, ev.Payload)
				}
				if ours, err := m.Fits(rec.Relation); !ours || event.ClassOf(err) != event.Precondition || event.HintOf(err) == "" {
					t.Fatalf("got %t, %v", ours, err)
				}
				for _, w := range append(tt.want, "public.o") {
					if !strings.Contains(err.Error(), w) {
						t.Errorf("got %v, want %q in it", err, w)
					}
				}
			}
		})
	}
}

func TestRelationChangesAreSeen(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "o"}}, Subject: "x"})
	a, b := relationWith("o", "id", "payload"), relationWith("o", "payload", "extra", "id")
	for range 2 {
		same(t, "first", string(mapOne(t, m, rowOf(a, "1", "p")).Payload), "p")
		same(t, "second", string(mapOne(t, m, rowOf(b, "q", "", "2")).Payload), "q")
	}
	if len(m.plans) != 1 {
		t.Errorf("got %d plans, want 1", len(m.plans))
	}
	rec := rowOf(a, "1")
	if _, err := m.Map(rec, &event.Event{}); event.ClassOf(err) != event.Unexpected {
		t.Errorf("short row: got %v", err)
	}
}

func TestNewMapperTellsAllMistakes(t *testing.T) {
	_, err := NewMapper(Mapping{
		Tables: []Table{
			{Name: "a"},
			{Schema: "public", Name: "a"},
			{Name: "b", Preset: "kafka", Columns: map[string]string{"foo": "bar", "id": "", "payload": strings.Repeat("x", 64)}},
			{Name: "c", Subject: "x.{y}"},
			{Name: ""},
		},
		Subject: "ok.{event_type}", Messages: true, Prefix: "a\nb",
	})
	if event.ClassOf(err) != event.Usage {
		t.Fatalf("got %v", err)
	}
	for _, w := range []string{
		"public.a is given twice", `unknown preset "kafka"`, `unknown role "foo"`, "role id needs a column", "longer than 63",
		"unknown placeholder {y}", "a name is empty", "message prefix",
	} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("got %v, want %q in it", err, w)
		}
	}
	if _, err := NewMapper(Mapping{}); event.ClassOf(err) != event.Usage {
		t.Errorf("empty mapping: got %v", err)
	}
}

func TestSubjectsOfSeveralTables(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{
		{Name: "a"}, {Name: "b", Preset: PresetDebezium}, {Name: "c", Subject: "billing.{event_type}"},
	}, Messages: true})
	same(t, "subjects", strings.Join(m.Subjects(), " "), "billing.> outbox.>")
	m = mapperOf(t, Mapping{Tables: []Table{{Name: "b", Preset: PresetDebezium}}, Subject: "all.{event_type}"})
	same(t, "subjects", strings.Join(m.Subjects(), " "), "all.>")
}

func TestPayloadIsNotCopied(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}})
	rec := rowOf(defaultRelation(), "1", testID, "order", "42", "placed", `{"a":1}`, sqlNull, "3", sqlNull)
	if ev := mapOne(t, m, rec); &ev.Payload[0] != &rec.Values[5][0] {
		t.Error("the payload lies elsewhere than in the record")
	}
}

func TestGiantRowsAreNotHeld(t *testing.T) {
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}}})
	rec := rowOf(defaultRelation(), "1", testID, "order", "42", "placed", `\x`+strings.Repeat("11", 5<<20), sqlNull, "3", sqlNull)
	rec.Relation.Columns[5].Type = event.TypeBytea
	if ev := mapOne(t, m, rec); len(ev.Payload) != 5<<20 {
		t.Fatalf("payload: got %d bytes", len(ev.Payload))
	}
	rec.Values[5] = []byte(`\x11`)
	mapOne(t, m, rec)
	if cap(m.buf) > maxBuffer {
		t.Errorf("buffer of %d bytes is kept", cap(m.buf))
	}
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	bytea := relationWith("b", "id:int8", "aggregate_type", "aggregate_id", "event_type", "payload:bytea")
	m := mapperOf(t, Mapping{Tables: []Table{{Name: "outbox"}, {Name: "b"}, {Name: "d", Preset: PresetDebezium}}})
	recs := []*event.Record{
		rowOf(defaultRelation(), "1", testID, "order", "42", "placed", strings.Repeat("x", 900<<10), sqlNull, "3", "2024-05-06 07:08:09.123+05:30"),
		rowOf(bytea, "7", "order", "42", "pla ced", `\xdeadbeef`),
		rowOf(bytea, "7", "order", "42", "placed", `esc\\ape\001`),
		rowOf(relationWith("d", "id:uuid", "aggregatetype", "aggregateid", "type", "payload"), testID, "ä", "1", "x", sqlNull),
		rowOf(relationWith("unknown", "id"), "1"),
	}
	for i, rec := range recs {
		rec.Relation.ID = uint32(i + 1)
	}
	recs[2].Relation.ID = recs[1].Relation.ID
	var ev event.Event
	allocs := testing.AllocsPerRun(200, func() {
		for _, rec := range recs {
			if _, err := m.Map(rec, &ev); err != nil {
				t.Fatal(err)
			}
		}
	})
	if allocs != 0 {
		t.Errorf("got %v allocations a round, want 0", allocs)
	}
	withHeaders := rowOf(defaultRelation(), "1", testID, "order", "42", "placed", "{}", `{"traceparent": "00-x", "n": 1}`, "3", sqlNull)
	if allocs := testing.AllocsPerRun(200, func() { m.Map(withHeaders, &ev) }); allocs > 0 {
		t.Errorf("with plain headers: got %v allocations, want 0", allocs)
	}
}

func TestTimes(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"2024-05-06 07:08:09+00", "2024-05-06T07:08:09Z"},
		{"2024-05-06 07:08:09.123456+00", "2024-05-06T07:08:09.123456Z"},
		{"2024-05-06 07:08:09.120000", "2024-05-06T07:08:09.12Z"},
		{"2024-05-31 07:08:09.5+00", "2024-05-31T07:08:09.5Z"},
		{"2024-05-00 07:08:09+00", ""},
		{"2024-00-01 07:08:09+00", ""},
		{"2024-05-06 07:08:09.100+00", "2024-05-06T07:08:09.1Z"},
		{"2024-05-06 07:08:09.0+00", "2024-05-06T07:08:09Z"},
		{"2024-12-31 23:30:00-05", "2025-01-01T04:30:00Z"},
		{"2024-01-01 00:30:00+05:45", "2023-12-31T18:45:00Z"},
		{"1883-01-01 00:00:00+00:53:28", "1882-12-31T23:06:32Z"},
		{"2024-02-29T07:08:09.5Z", "2024-02-29T07:08:09.5Z"},
		{"2023-02-29 07:08:09", ""},
		{"2024-13-01 07:08:09", ""},
		{"2024-05-06 24:08:09", ""},
		{"2024-05-06", ""},
		{"2024-05-06 07:08:09.", ""},
		{"2024-05-06 07:08:09.1234567890", ""},
		{"2024-05-06 07:08:09+0", ""},
		{"2024-05-06 07:08:09+00:00:00:00", ""},
		{"0044-03-15 00:00:00 BC", ""},
		{"12024-05-06 07:08:09", ""},
		{"9999-12-31 23:59:59-01", ""},
		{"06.05.2024 07:08:09.12", ""},
		{"infinity", ""},
		{"-infinity", ""},
		{"", ""},
	} {
		got, ok := appendTime(nil, []byte(tt.in))
		if string(got) != tt.want || ok != (tt.want != "") {
			t.Errorf("%q: got %q, %t, want %q", tt.in, got, ok, tt.want)
		}
	}
}

func FuzzMap(f *testing.F) {
	f.Add([]byte(testID), []byte("order"), []byte("42"), []byte("placed"), []byte(`\x00`), []byte(`{"a":1}`), []byte("2024-05-06 07:08:09+00"), false)
	f.Add([]byte("1"), []byte(""), []byte("."), []byte("*"), []byte(`\\\001`), []byte(`{"a":"\u0000"}`), []byte("infinity"), true)
	f.Add([]byte{}, []byte("\xff"), []byte("\n"), []byte("$"), []byte(`\`), []byte(`{`), []byte(""), true)
	rels := [2]*event.Relation{
		relationWith("t", "id", "aggregate_type", "aggregate_id", "event_type", "payload:bytea", "headers:json", "created_at:timestamptz"),
		relationWith("t", "created_at:timestamp", "headers", "payload", "event_type", "aggregate_id", "aggregate_type", "id:uuid"),
	}
	m := mapperOf(f, Mapping{Tables: []Table{{Name: "t"}}, Subject: "o.{aggregate_type}.{event_type}.{partition:4}.{header:a}", Messages: true})
	f.Fuzz(func(t *testing.T, id, aggregateType, aggregateID, eventType, payload, headers, created []byte, other bool) {
		values := [][]byte{id, aggregateType, aggregateID, eventType, payload, headers, created}
		rel := rels[0]
		if other {
			rel = rels[1]
			values = [][]byte{created, headers, payload, eventType, aggregateID, aggregateType, id}
		}
		rec := &event.Record{Kind: event.Row, Relation: rel, Values: values, CommitTime: commitTime}
		var ev event.Event
		checkMapped(t, m, rec, &ev)
		if other && !bytes.Equal(ev.Payload, payload) {
			t.Fatalf("payload %q became %q", payload, ev.Payload)
		}
		rec = &event.Record{Kind: event.Message, Prefix: DefaultPrefix, Content: payload}
		checkMapped(t, m, rec, &ev)
		rec.Content, _ = json.Marshal(map[string]any{
			"id": string(id), "aggregate_type": string(aggregateType), "aggregate_id": string(aggregateID), "event_type": string(eventType),
			"payload_base64": payload, "headers": json.RawMessage("{}"),
		})
		if checkMapped(t, m, rec, &ev); !bytes.Equal(ev.Payload, payload) {
			t.Fatalf("payload %q became %q", payload, ev.Payload)
		}
	})
}

// checkMapped holds whatever Map makes of a record against what a publisher relies on.
func checkMapped(t *testing.T, m *Mapper, rec *event.Record, ev *event.Event) {
	t.Helper()
	ok, err := m.Map(rec, ev)
	var p *event.Poison
	if !ok || err != nil && !errors.As(err, &p) {
		t.Fatalf("got %t, %v", ok, err)
	}
	checkHeaders(t, ev.Headers)
	if len(ev.Subject) > 0 {
		checkSubject(t, ev.Subject)
	}
	if err == nil && (len(ev.Subject) == 0 || len(ev.ID) == 0 || len(ev.MsgID) == 0 || badValue(ev.MsgID)) {
		t.Fatalf("half an event: %+v", ev)
	}
}

func checkHeaders(t *testing.T, hs []event.Header) {
	t.Helper()
	for _, h := range hs {
		if badName([]byte(h.Name)) || badValue(h.Value) {
			t.Fatalf("header %q: %q cannot be", h.Name, h.Value)
		}
	}
}

func FuzzHeaders(f *testing.F) {
	f.Add([]byte(`{"a": "b", "n": 1e5, "deep": {"x": [1, " \" "]}, "none": null}`))
	f.Add([]byte(`{"\u004eats-Rollup": "all", "a": "\ud83d\ude00", "t":true}`))
	f.Add([]byte(`{"a":"x\r\ny","b c":{}}`))
	f.Add([]byte(`{}`))
	f.Add([]byte(` [1,{"a":2}] `))
	m := mapperOf(f, Mapping{Messages: true})
	f.Fuzz(func(t *testing.T, raw []byte) {
		m.buf, m.bad = m.buf[:0], nil
		var ev event.Event
		contentType := m.own(&ev, m.messages, 0, raw)
		checkHeaders(t, ev.Headers)
		for _, h := range ev.Headers {
			if controls([]byte(h.Name)) {
				t.Fatalf("control header %q passed", h.Name)
			}
		}
		if m.bad != nil || len(raw) == 0 || !utf8.Valid(raw) {
			return
		}
		// Against encoding/json, member by member.
		want := membersByDecoder(t, raw)
		lost := slices.IndexFunc(want, func(w event.Header) bool {
			return !controls([]byte(w.Name)) && !strings.EqualFold(w.Name, event.HeaderContentType) &&
				!slices.ContainsFunc(ev.Headers, func(h event.Header) bool { return h.Name == w.Name && bytes.Equal(h.Value, w.Value) })
		})
		if lost >= 0 {
			t.Fatalf("header %q: %q is lost (content type %q)", want[lost].Name, want[lost].Value, contentType)
		}
		if len(ev.Headers) > len(want) {
			t.Fatalf("got %d headers, want %d at most", len(ev.Headers), len(want))
		}
	})
}

// membersByDecoder lists what is not null in a JSON object, in the form that headers have.
func membersByDecoder(t *testing.T, raw []byte) []event.Header {
	t.Helper()
	dec := json.NewDecoder(bytes.NewReader(raw))
	open, err := dec.Token()
	if err != nil || open != json.Delim('{') {
		return nil // null
	}
	var want []event.Header
	for dec.More() {
		name, err := dec.Token()
		if err != nil {
			t.Fatal(err)
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			t.Fatal(err)
		}
		var s string
		switch {
		case string(v) == "null":
			continue
		case v[0] == '"':
			if err := json.Unmarshal(v, &s); err != nil {
				t.Fatal(err)
			}
		default:
			var b bytes.Buffer
			if err := json.Compact(&b, v); err != nil {
				t.Fatal(err)
			}
			s = b.String()
		}
		want = append(want, event.Header{Name: name.(string), Value: []byte(s)})
	}
	return want
}

func BenchmarkMap(b *testing.B) {
	m := mapperOf(b, Mapping{Tables: []Table{{Name: "outbox"}}})
	rec := rowOf(defaultRelation(), "1", testID, "order", "42", "placed", strings.Repeat("x", 256), sqlNull, "3", "2024-05-06 07:08:09.123456+00")
	var ev event.Event
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Map(rec, &ev); err != nil {
			b.Fatal(err)
		}
	}
}
