package outbox

import (
	"encoding/base64"
	"slices"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

// The keys of a message beside the roles.
const (
	keyPayloadText   = "payload_text"
	keyPayloadBase64 = "payload_base64"
)

// messageFields are the raw values of a message's members, nil for null.
type messageFields struct {
	id, aggregateType, aggregateID, eventType     []byte
	payload, payloadText, payloadBase64           []byte
	headers, schemaVersion, createdAt, contentKey []byte
}

func (f *messageFields) field(key []byte) *[]byte {
	switch string(key) {
	case roleID:
		return &f.id
	case roleAggregateType:
		return &f.aggregateType
	case roleAggregateID:
		return &f.aggregateID
	case roleEventType:
		return &f.eventType
	case rolePayload:
		return &f.payload
	case keyPayloadText:
		return &f.payloadText
	case keyPayloadBase64:
		return &f.payloadBase64
	case roleHeaders:
		return &f.headers
	case roleSchemaVersion:
		return &f.schemaVersion
	case roleCreatedAt:
		return &f.createdAt
	case roleContentType:
		return &f.contentKey
	}
	return nil
}

func (m *Mapper) message(rec *event.Record, ev *event.Event) {
	var f messageFields
	if !m.split(rec.Content, &f) {
		// Nothing can be told apart, so a dead letter keeps all of it.
		ev.Payload = rec.Content
		return
	}
	id := m.scalar(roleID, f.id, true)
	m.identify(ev, m.messages, id, uuidText(id))
	m.describe(ev, m.scalar(roleAggregateType, f.aggregateType, true),
		m.scalar(roleAggregateID, f.aggregateID, true), m.scalar(roleEventType, f.eventType, true))
	// The DDL forbids NULL there; in messages only this does.
	roles := m.messages.template(ev).roles
	m.needed(roles, roleAggregateType, ev.AggregateType)
	m.needed(roles, roleAggregateID, ev.AggregateID)
	m.needed(roles, roleEventType, ev.EventType)

	switch created := m.scalar(roleCreatedAt, f.createdAt, false); {
	case m.created(ev, created):
	case created != nil:
		m.poison(event.ReasonContent, "%q is no time of RFC 3339", roleCreatedAt)
	default:
		m.committed(ev)
	}
	version := m.scalar(roleSchemaVersion, f.schemaVersion, true)
	m.header(ev, event.HeaderSchemaVersion, version)

	byPayload := contentJSON
	switch {
	case f.payloadText != nil:
		byPayload = contentText
	case f.payloadBase64 != nil:
		byPayload = contentBytes
	}
	m.content(ev, m.messages, len(ev.Headers), f.headers, m.scalar(roleContentType, f.contentKey, false), byPayload, version)
	m.body(ev, &f)
}

// split finds the members; false when the content is not what a message may be.
func (m *Mapper) split(content []byte, f *messageFields) bool {
	// Postgres passes a message's bytes as they are, whatever the encoding of the database.
	if !utf8.Valid(content) {
		m.poison(event.ReasonContent, "the message is not UTF-8: in a database of another encoding write \\u escapes")
		return false
	}
	o, ok := members(content)
	if !ok {
		m.poison(event.ReasonContent, "the message is not a JSON object")
		return false
	}
	for o.next() {
		key := unquote(o.key)
		field := f.field(key)
		if field == nil {
			m.poison(event.ReasonContent, "the message has the unknown key %q", shorten(key))
			continue
		}
		if *field = nil; !null(o.value) {
			*field = o.value
		}
	}
	return true
}

// scalar is the text of a string, or of a number where that is allowed.
func (m *Mapper) scalar(key string, raw []byte, numbers bool) []byte {
	switch {
	case raw == nil:
		return nil
	case raw[0] == '"':
		return unquote(raw)
	case numbers && (raw[0] == '-' || raw[0] >= '0' && raw[0] <= '9'):
		return raw
	}
	m.poison(event.ReasonContent, "the message's %q is of the wrong JSON type", key)
	return nil
}

func (m *Mapper) needed(roles []string, role string, v []byte) {
	if v == nil && slices.Contains(roles, role) {
		m.poison(event.ReasonContent, "the message has no %q, which the subject needs", role)
	}
}

func (m *Mapper) body(ev *event.Event, f *messageFields) {
	given := 0
	for _, raw := range [...][]byte{f.payload, f.payloadText, f.payloadBase64} {
		if raw != nil {
			given++
		}
	}
	if given > 1 {
		m.poison(event.ReasonContent, "the message has more than one payload")
	}
	switch {
	case f.payload != nil:
		ev.Payload = f.payload
	case f.payloadText != nil:
		ev.Payload = m.scalar(keyPayloadText, f.payloadText, false)
	case f.payloadBase64 != nil:
		n := len(m.buf)
		var err error
		if m.buf, err = base64.StdEncoding.AppendDecode(m.buf, m.scalar(keyPayloadBase64, f.payloadBase64, false)); err != nil {
			m.poison(event.ReasonContent, "%q is not base64", keyPayloadBase64)
		}
		ev.Payload = m.since(n)
	}
}
