package inbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// parkedSubject begins the subjects of the markers that hold the place of events
// which the relay has parked.
const parkedSubject = "walrelay.parked."

// Message is an event as a consumer sees it.
type Message struct {
	// ID tells events apart, and is what Once records: the event's id, with the
	// table's name before it where ids are not uuids. Replayed, an event keeps it.
	ID string

	AggregateType string
	AggregateID   string
	EventType     string
	Time          time.Time // created_at, or else the time of the commit; zero when there is none

	Subject  string
	Header   nats.Header
	Data     []byte
	Sequence uint64 // in the stream
	Try      int    // 1 for the first time in this process
}

// Parked reports whether the message is the marker of an event that the relay
// could not publish and has parked. It has no data.
func (m *Message) Parked() bool { return strings.HasPrefix(m.Subject, parkedSubject) }

func newMessage(msg jetstream.Msg, meta *jetstream.MsgMetadata) *Message {
	h := msg.Headers()
	m := &Message{
		ID:            identify(h, meta),
		AggregateType: h.Get(event.HeaderAggregateType),
		AggregateID:   h.Get(event.HeaderAggregateID),
		EventType:     h.Get(event.HeaderEventType),
		Subject:       msg.Subject(),
		Header:        h,
		Data:          msg.Data(),
		Sequence:      meta.Sequence.Stream,
	}
	m.Time, _ = time.Parse(time.RFC3339Nano, h.Get(event.HeaderTime)) // zero when there is none
	if m.Parked() {
		m.ID = "parked:" + m.ID
	}
	return m
}

// identify finds the id. Those that are no uuids may be the same in two tables,
// so the one with the table's name is taken, which is in Nats-Msg-Id, and in that
// of a replay with more behind it.
func identify(h nats.Header, meta *jetstream.MsgMetadata) string {
	id, msgID := h.Get(event.HeaderID), h.Get(nats.MsgIdHdr)
	switch {
	case id == "" && msgID != "":
		id = msgID
	case id == "":
		id = fmt.Sprintf("%s:%d", meta.Stream, meta.Sequence.Stream) // a message of somebody else
	default:
		if at := strings.Index(msgID, ":"+id); at > 0 {
			table, rest := msgID[:at], msgID[at+1+len(id):]
			if rest == "" || strings.HasPrefix(rest, ":r:") {
				id = table + ":" + id
			}
		}
	}
	return storable(id)
}

// maxID is less than what fits an index entry together with the consumer.
const maxID = 1024

// storable makes a key of any id: what Postgres cannot store or index is
// replaced by a digest.
func storable(id string) string {
	if len(id) <= maxID && utf8.ValidString(id) && !strings.Contains(id, "\x00") {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// aggregate is what order is kept within. Events that name no aggregate are
// one together, which keeps all that they could rely on.
func (m *Message) aggregate() string { return m.AggregateType + "\x00" + m.AggregateID }
