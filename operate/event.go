package operate

import (
	"time"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

// Event is an event that outlives the record it was made of. As JSON it has all
// that is needed to publish it later.
type Event struct {
	ID            string         `json:"id"`
	MsgID         string         `json:"msg_id"`
	Subject       string         `json:"subject"`
	Table         string         `json:"table"`
	AggregateType string         `json:"aggregate_type"`
	AggregateID   string         `json:"aggregate_id"`
	EventType     string         `json:"event_type"`
	Position      event.Position `json:"position"`
	XID           uint32         `json:"xid"`         // zero for a message outside of a transaction
	CommitTime    time.Time      `json:"commit_time"` // zero, too
	Headers       []Header       `json:"headers"`

	// One of them has the body; base64 has one that is no UTF-8.
	Payload *string `json:"payload,omitempty"`
	Base64  []byte  `json:"payload_base64,omitempty"`

	// Undecoded says that the server cannot decode what is there: nothing but the
	// position is known, and in Poison why.
	Undecoded bool `json:"undecoded,omitempty"`

	// Poison says why it would be parked, "" when it would be published.
	Poison string `json:"poison,omitempty"`
}

// Header is one header line.
type Header struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// Body is the body, whichever field has it.
func (e *Event) Body() []byte {
	if e.Payload != nil {
		return []byte(*e.Payload)
	}
	return e.Base64
}

func keep(ev *event.Event, poison *event.Poison) *Event {
	e := &Event{
		ID: string(ev.ID), MsgID: string(ev.MsgID), Subject: string(ev.Subject), Table: ev.Table,
		AggregateType: string(ev.AggregateType), AggregateID: string(ev.AggregateID), EventType: string(ev.EventType),
		Position: ev.Position, XID: ev.XID, CommitTime: ev.CommitTime, Headers: []Header{},
	}
	for _, h := range ev.Headers {
		e.Headers = append(e.Headers, Header{h.Name, string(h.Value)})
	}
	if utf8.Valid(ev.Payload) {
		text := string(ev.Payload)
		e.Payload = &text
	} else {
		e.Base64 = append([]byte(nil), ev.Payload...)
	}
	if poison != nil {
		e.Poison = poison.Error()
	}
	return e
}
