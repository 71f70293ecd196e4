package operate

import (
	"fmt"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Standing is how far the three are: Postgres with its log, the relay with its
// checkpoint, the stream with its messages.
type Standing struct {
	WALEnd    event.LSN // of Postgres
	Confirmed event.LSN // of the slot
	Active    bool

	Known    bool // there is a checkpoint
	Confirm  event.LSN
	Sequence uint64 // of the stream, at the checkpoint
	Written  time.Time

	StreamSequence uint64
}

// Distance is how far one is behind the other, in the order in which an event passes them.
type Distance struct {
	// Relay is the log that Postgres has written and the checkpoint has not settled, in bytes.
	Relay int64 `json:"postgres_to_relay_bytes"`
	// Confirm is what is settled and not confirmed to Postgres, in bytes.
	Confirm int64 `json:"relay_to_slot_bytes"`
	// Stream is the number of messages stored since the checkpoint.
	Stream int64 `json:"checkpoint_to_stream_messages"`
}

// Distance measures; without a checkpoint only the log counts.
func (s Standing) Distance() Distance {
	at := s.Confirmed
	if s.Known {
		at = max(s.Confirm, s.Confirmed)
	}
	d := Distance{Relay: between(at, s.WALEnd), Confirm: between(s.Confirmed, at)}
	if s.Known {
		d.Stream = int64(s.StreamSequence) - int64(s.Sequence)
	}
	return d
}

func between(a, b event.LSN) int64 {
	if b < a {
		return 0
	}
	return int64(b - a)
}

// stale is how old the checkpoint of a relay that has work to do may be.
const stale = 5 * time.Minute

// Findings say what is wrong between the two ends.
func (s Standing) Findings(now time.Time) event.Findings {
	if s.Known && s.Active && now.Sub(s.Written) > stale && s.Distance().Relay > 16<<20 {
		return event.Findings{{
			Name: "progress", Level: event.WARN,
			Detail: fmt.Sprintf("the relay is connected, but its last checkpoint is of %s", s.Written.UTC().Format(time.RFC3339)),
			Remedy: "look at the relay's log: the broker may be down, or its window full",
		}}
	}
	return nil
}
