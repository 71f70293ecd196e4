package operate

import (
	"fmt"
	"strings"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Row is a row of an outbox table as the message it would become.
type Row struct {
	Table   string
	Subject string
	Bytes   int64 // with headers
	Bound   bool  // the stream binds the subject
	Poison  string
}

// Limits bound a message, in bytes with its headers; 0 is no limit.
type Limits struct {
	MaxPayload int64 // of the server
	MaxMsgSize int64 // of the stream
	MaxBytes   int64 // of the stream
}

func (l Limits) least() (limit int64, name string) {
	limit, name = l.MaxPayload, "the server's max_payload"
	if l.MaxMsgSize > 0 && (limit == 0 || l.MaxMsgSize < limit) {
		limit, name = l.MaxMsgSize, "the stream's max_msg_size"
	}
	if l.MaxBytes > 0 && (limit == 0 || l.MaxBytes < limit) {
		limit, name = l.MaxBytes, "the stream's max_bytes"
	}
	return limit, name
}

// Fit finds whether rows of a table, those that were looked at, fit the
// stream. What does not fit is parked and stops nothing, so it only warns.
func Fit(table string, rows []Row, l Limits) event.Findings {
	size := event.Finding{Name: "size", Detail: fmt.Sprintf("table %s has no rows to look at", table)}
	subjects := event.Finding{Name: "coverage", Detail: size.Detail}
	mapping := event.Finding{Name: "mapping", Detail: size.Detail}
	if len(rows) == 0 {
		return event.Findings{size, subjects, mapping}
	}
	var largest Row
	var unbound, poison []string
	seen := map[string]bool{}
	for _, r := range rows {
		if r.Bytes > largest.Bytes {
			largest = r
		}
		switch {
		case r.Poison != "":
			poison = append(poison, r.Poison)
		case !r.Bound && !seen[r.Subject]:
			unbound = append(unbound, r.Subject)
		}
		seen[r.Subject] = true
	}
	limit, name := l.least()
	size.Detail = fmt.Sprintf("the largest row of table %s makes %d bytes, %s is %d", table, largest.Bytes, name, limit)
	switch {
	case limit > 0 && largest.Bytes > limit:
		size.Level, size.Remedy = event.WARN, "raise the limit, or store large bodies elsewhere: such an event is parked"
	case limit > 0 && largest.Bytes > limit/2:
		size.Level, size.Remedy = event.WARN, "raise the limit before a larger event is parked"
	}
	subjects.Detail = fmt.Sprintf("the stream binds every subject of the types in table %s", table)
	if len(unbound) > 0 {
		subjects.Level = event.WARN
		subjects.Detail = fmt.Sprintf("the stream does not bind %d subjects of the types in table %s, such as %s: such events are parked", len(unbound), table, unbound[0])
		subjects.Remedy = "add them to the stream's subjects: " + strings.Join(unbound[:min(len(unbound), 5)], ",")
	}
	mapping.Detail = fmt.Sprintf("every type in table %s can be mapped", table)
	if len(poison) > 0 {
		mapping.Level = event.WARN
		mapping.Detail = fmt.Sprintf("%d rows that were looked at in table %s cannot be mapped, such as: %s", len(poison), table, poison[0])
		mapping.Remedy = "mend what writes them: such events are parked"
	}
	return event.Findings{size, subjects, mapping}
}

// tolerable is the difference between two clocks that misleads nobody.
const tolerable = 2 * time.Second

// Clocks compares the clocks of both servers, each given by how far it is ahead of ours.
func Clocks(postgres, nats time.Duration) event.Finding {
	f := event.Finding{Name: "clocks", Detail: "the clocks of Postgres, NATS and this machine agree"}
	apart := max(postgres, nats, 0) - min(postgres, nats, 0)
	if apart >= tolerable {
		f.Level = event.WARN
		f.Detail = fmt.Sprintf("clocks differ: that of Postgres by %s from ours, that of NATS by %s", signed(postgres), signed(nats))
		f.Remedy = "let NTP set all of them: delivery lags are wrong by that much, as are times of replay"
	}
	return f
}

func signed(d time.Duration) string {
	d = d.Round(10 * time.Millisecond)
	if d >= 0 {
		return "+" + d.String()
	}
	return d.String()
}

// Start is the finding about where a relay would go on in the stream.
func Start(r event.Resume, notes []string, err error) event.Finding {
	f := event.Finding{Name: "resume"}
	switch {
	case err != nil:
		f.Level, f.Class = event.FAIL, event.ClassOf(err)
		f.Detail, f.Remedy = err.Error(), event.HintOf(err)
	case len(notes) > 0:
		f.Level = event.WARN
		f.Detail = strings.Join(notes, "; ")
		f.Remedy = "make sure that this is meant"
	case r.After.IsZero():
		f.Detail = "the relay begins with what the slot sends first"
	default:
		f.Detail = "the relay goes on after the event at " + r.After.String()
	}
	return f
}
