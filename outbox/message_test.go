package outbox

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func messageOf(content string) *event.Record {
	return &event.Record{
		Kind: event.Message, Prefix: "walrelay", Content: []byte(content), Transactional: true, XID: 5, CommitTime: commitTime,
		Position: event.Position{Timeline: 1, Commit: 300, Change: 250},
	}
}

func TestMessage(t *testing.T) {
	m := mapperOf(t, Mapping{Messages: true})
	ev := mapOne(t, m, messageOf(`{"id": "o-1", "aggregate_type": "order", "aggregate_id": 42, "event_type": "pl\u0061ced",
		"payload": { "n" : 1.10,  "n":2 } , "headers": {"traceparent": "x", "Nats-Rollup": "all"}, "schema_version": 3,
		"created_at": "2024-01-02T03:04:05Z"}`))
	same(t, "ids", string(ev.ID)+" "+string(ev.MsgID), "o-1 walrelay:o-1")
	same(t, "subject", string(ev.Subject), "outbox.order.placed")
	same(t, "payload", string(ev.Payload), `{ "n" : 1.10,  "n":2 }`)
	same(t, "table", ev.Table, "walrelay")
	same(t, "headers", headersOf(ev), `Outbox-Id: o-1
Outbox-Aggregate-Type: order
Outbox-Aggregate-Id: 42
Outbox-Event-Type: placed
Outbox-Time: 2024-01-02T03:04:05Z
Outbox-Schema-Version: 3
traceparent: x
Content-Type: application/json
`)
	if m.Stripped() != 1 {
		t.Errorf("stripped: got %d, want 1", m.Stripped())
	}
}

func TestMessageBodies(t *testing.T) {
	m := mapperOf(t, Mapping{Messages: true, Subject: "x", Prefix: "p"})
	for _, tt := range []struct{ fields, body, contentType string }{
		{`"payload":[1, 2]`, "[1, 2]", "application/json"},
		{`"payload":"text"`, `"text"`, "application/json"},
		{`"payload":18446744073709551615`, "18446744073709551615", "application/json"},
		{`"payload":null`, "", "application/json"},
		{`"schema_version":"v1"`, "", "application/json"},
		{`"payload":false,"payload_text":null`, "false", "application/json"},
		{`"payload_text":"h\u00e4llo\n"`, "hällo\n", "text/plain; charset=utf-8"},
		{`"payload_text":""`, "", "text/plain; charset=utf-8"},
		{`"payload_base64":"AP8Q"`, "\x00\xff\x10", "application/octet-stream"},
		{`"payload_base64":"AP\n8Q"`, "\x00\xff\x10", "application/octet-stream"},
		{`"payload_text":"<a/>","content_type":"application/xml"`, "<a/>", "application/xml"},
		{`"payload_text":"<a/>","headers":{"content-type":"text/xml"}`, "<a/>", "text/xml"},
	} {
		rec := messageOf(`{"id":"` + testID + `",` + tt.fields + `}`)
		rec.Prefix = "p"
		ev := mapOne(t, m, rec)
		same(t, tt.fields, string(ev.Payload), tt.body)
		same(t, tt.fields, string(ev.Headers[len(ev.Headers)-1].Value), tt.contentType)
		same(t, "msg id", string(ev.MsgID), testID)
	}
}

func TestPoisonMessages(t *testing.T) {
	m := mapperOf(t, Mapping{Messages: true, Subject: "x.{event_type}.{schema_version}.{header:h}"})
	for _, tt := range []struct {
		content string
		reason  event.Reason
		detail  string
	}{
		{``, event.ReasonContent, "not a JSON object"},
		{`hello`, event.ReasonContent, "not a JSON object"},
		{`[]`, event.ReasonContent, "not a JSON object"},
		{`null`, event.ReasonContent, "not a JSON object"},
		{`{"id":"1"`, event.ReasonContent, "not a JSON object"},
		{"{\"id\":\"\xe4\"}", event.ReasonContent, "not UTF-8"},
		{`{"id":"1","event_type":"a","payloads":{}}`, event.ReasonContent, `unknown key "payloads"`},
		{`{"id":"1"}`, event.ReasonContent, `no "event_type"`},
		{`{"id":"1","event_type":null}`, event.ReasonContent, `no "event_type"`},
		{`{"id":{},"event_type":"a"}`, event.ReasonContent, `"id" is of the wrong JSON type`},
		{`{"id":true,"event_type":"a"}`, event.ReasonContent, `"id" is of the wrong JSON type`},
		{`{"event_type":"a"}`, event.ReasonNullID, "NULL"},
		{`{"id":null,"event_type":"a"}`, event.ReasonNullID, "NULL"},
		{`{"id":"","event_type":"a"}`, event.ReasonNullID, "empty"},
		{`{"id":"1","event_type":"a","payload":1,"payload_text":"b"}`, event.ReasonContent, "more than one payload"},
		{`{"id":"1","event_type":"a","payload_text":1}`, event.ReasonContent, "payload_text"},
		{`{"id":"1","event_type":"a","payload_base64":"!"}`, event.ReasonContent, "base64"},
		{`{"id":"1","event_type":"a","payload_base64":3}`, event.ReasonContent, "wrong JSON type"},
		{`{"id":"1","event_type":"a","headers":[]}`, event.ReasonHeaders, "not a JSON object"},
		{`{"id":"1","event_type":"a","created_at":"yesterday"}`, event.ReasonContent, "created_at"},
		{`{"id":"1\r\n","event_type":"a"}`, event.ReasonHeaders, event.HeaderID},
		{`{"id":"1","event_type":"` + strings.Repeat("x", 3000) + `"}`, event.ReasonSubject, "longer"},
	} {
		rec := messageOf(tt.content)
		ev := poisonOf(t, m, rec, tt.reason, tt.detail)
		if strings.Contains(tt.detail, "not ") && tt.reason == event.ReasonContent {
			same(t, "payload", string(ev.Payload), tt.content)
		}
	}
}

func TestNonTransactionalMessageHasNoTime(t *testing.T) {
	m := mapperOf(t, Mapping{Messages: true, Subject: "x"})
	rec := &event.Record{Kind: event.Message, Prefix: "walrelay", Content: []byte(`{"id":1}`)}
	same(t, "headers", headersOf(mapOne(t, m, rec)), "Outbox-Id: 1\nContent-Type: application/json\n")
	rec.Prefix = "other"
	if ok, err := m.Map(rec, &event.Event{}); ok || err != nil {
		t.Errorf("other prefix: got %t, %v", ok, err)
	}
}
