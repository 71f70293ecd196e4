package outbox

import (
	"net/url"
	"slices"

	"github.com/walrelay/walrelay/event"
)

// CloudEvents asks for the headers of the binary mode of the CloudEvents NATS
// protocol binding, 1.0, beside the relay's own.
type CloudEvents struct {
	On     bool
	Source string // URI reference; "" is /schema.table, or /prefix for messages
}

// The context attributes that the relay sets, without their prefix.
const cePrefix = "ce-"

var (
	ceSet     = []string{"specversion", "id", "source", "type", "subject", "time", "datacontenttype"}
	ceVersion = []byte("1.0")
)

// ceSource is the value of ce-source for the events of one table, encoded.
func ceSource(c CloudEvents, name string) []byte {
	source := c.Source
	if source == "" {
		source = "/" + url.PathEscape(name)
	}
	return appendCE(nil, []byte(source))
}

// appendCE appends a value as the binding encodes it: what is not printable
// ASCII, the space, the double quote and the percent sign become %XX.
func appendCE(b, v []byte) []byte {
	const digits = "0123456789ABCDEF"
	for _, c := range v {
		if c > ' ' && c < 0x7f && c != '"' && c != '%' {
			b = append(b, c)
		} else {
			b = append(b, '%', digits[c>>4], digits[c&15])
		}
	}
	return b
}

// ceName reports whether an attribute of CloudEvents can have that name.
func ceName(name []byte) bool {
	for _, c := range name {
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') {
			return false
		}
	}
	return len(name) > 0
}

// structured reports whether the payload is a whole CloudEvent by itself.
func structured(contentType []byte) bool {
	return hasFoldPrefix(contentType, "application/cloudevents")
}

// cloudEvent adds the context attributes. The event's own headers begin at own.
func (m *Mapper) cloudEvent(ev *event.Event, s *source, contentType []byte, own int) {
	if structured(contentType) {
		return // its attributes are in the payload
	}
	put := func(attribute string, v []byte) {
		if len(v) == 0 {
			return // an attribute is never empty
		}
		n := len(m.buf)
		m.buf = appendCE(m.buf, v)
		ev.Headers = append(ev.Headers, event.Header{Name: attribute, Value: m.since(n)})
	}
	if len(ev.EventType) == 0 {
		m.poison(event.ReasonContent, "the event has no type, which a CloudEvent needs")
	}
	headers := ev.Headers
	ev.Headers = append(ev.Headers,
		event.Header{Name: "ce-specversion", Value: ceVersion},
		event.Header{Name: "ce-source", Value: s.ceSource})
	put("ce-id", ev.ID)
	put("ce-type", ev.EventType)
	put("ce-subject", ev.AggregateID)
	put("ce-datacontenttype", contentType)
	for i, h := range headers {
		switch {
		case h.Name == event.HeaderTime:
			put("ce-time", h.Value)
		// The attributes of the extension for distributed tracing.
		case i >= own && h.Name == "traceparent" && lastHeader(headers[own:], "ce-traceparent") == nil:
			put("ce-traceparent", h.Value)
		case i >= own && h.Name == "tracestate" && lastHeader(headers[own:], "ce-tracestate") == nil:
			put("ce-tracestate", h.Value)
		}
	}
}

// ceOwn reports whether a header of the event's own is one that the relay sets.
func ceOwn(name []byte) bool {
	return slices.ContainsFunc(ceSet, func(s string) bool { return fold(name[len(cePrefix):], s) })
}
