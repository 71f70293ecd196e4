package operate

import (
	"context"
	"encoding/json"
	"errors"

	"github.com/walrelay/walrelay/event"
)

// Log reads what a slot would send next, and consumes nothing.
type Log interface {
	// Read calls each with every record in order, until each returns an error,
	// which Read returns. Transactions whose commit record begins at upTo or later
	// may be left out; zero reads to the end. Changes ends the read at the end of the
	// transaction in which so many are reached, zero does not. It returns how
	// many changes there were. What cannot be decoded is given to unread, in its place.
	Read(ctx context.Context, upTo event.LSN, changes int, each func(*event.Record) error, unread func(Unread) error) (int, error)
}

// Unread is what a Log cannot decode: a transaction, or with End 0 one change of it.
type Unread struct {
	Position event.Position
	End      event.LSN // of the transaction's commit record
	Err      error
}

// event stands for it among the events.
func (u Unread) event() *Event {
	what := "this transaction cannot be decoded"
	if u.End == 0 {
		what = "this change cannot be decoded"
	}
	return &Event{Position: u.Position, Headers: []Header{}, Undecoded: true, Poison: what + ": " + u.Err.Error()}
}

// Mapper makes events of records, as in package relay.
type Mapper interface {
	Map(rec *event.Record, ev *event.Event) (bool, error)
}

// errEnough ends a read of the log.
var errEnough = errors.New("enough")

// filter leaves out of the log what the stream holds, as a relay does when it
// starts (resume.go of package relay).
type filter struct {
	resume event.Resume
	mapper Mapper
	ev     event.Event
}

// next maps a record to the event that is still to be published; nil when the
// record makes none. It is valid until the next call.
func (f *filter) next(rec *event.Record) (*event.Event, *event.Poison, error) {
	if rec.Kind != event.Row && rec.Kind != event.Message || rec.Position.Compare(f.resume.After) <= 0 {
		return nil, nil, nil
	}
	ok, err := f.mapper.Map(rec, &f.ev)
	var poison *event.Poison
	if err != nil && !errors.As(err, &poison) {
		f.ev, poison = raw(rec), &event.Poison{Reason: event.ReasonContent, Detail: err.Error() + "; the payload is the row as it is"}
	} else if !ok {
		return nil, nil, nil
	}
	if id, ok := f.resume.Stored[rec.Position]; ok && id == string(f.ev.ID) {
		return nil, nil, nil
	}
	return &f.ev, poison, nil
}

// raw is the event of a row that the mapping does not fit: with the row's values.
func raw(rec *event.Record) event.Event {
	ev := event.Event{Position: rec.Position, XID: rec.XID, CommitTime: rec.CommitTime}
	if rec.Relation == nil {
		ev.Table, ev.Payload = rec.Prefix, rec.Content
		return ev
	}
	ev.Table = rec.Relation.Schema + "." + rec.Relation.Name
	row := map[string]*string{}
	for i, c := range rec.Relation.Columns {
		if row[c.Name] = nil; i < len(rec.Values) && rec.Values[i] != nil {
			text := string(rec.Values[i])
			row[c.Name] = &text
		}
	}
	ev.Payload, _ = json.Marshal(row) // of strings alone
	return ev
}

// firstLook is how many changes Peek asks for beyond the events it wants: a
// transaction has a begin, a commit and tables beside its rows.
const firstLook = 64

// Peek returns the next events that the stream does not hold, limit at most,
// and whether there are more. The log is read from its beginning again, twice as
// far, until there are enough, since a server cannot tell events from other changes.
func Peek(ctx context.Context, log Log, m Mapper, r event.Resume, limit int) (events []*Event, more bool, err error) {
	for changes := 2*limit + firstLook; ; changes *= 2 {
		events = events[:0]
		f := filter{resume: r, mapper: m}
		n, err := log.Read(ctx, 0, changes, func(rec *event.Record) error {
			ev, poison, err := f.next(rec)
			if ev == nil {
				return err
			}
			if len(events) == limit {
				return errEnough
			}
			events = append(events, keep(ev, poison))
			return nil
		}, func(u Unread) error {
			if len(events) == limit {
				return errEnough
			}
			events = append(events, u.event())
			return nil
		})
		switch {
		case errors.Is(err, errEnough):
			return events, true, nil
		case err != nil:
			return nil, false, err
		case n < changes:
			return events, false, nil
		}
	}
}

// Transaction identifies one of the log's transactions: by its id, or by the
// LSN of its commit record, of the end of that, or of one of its changes.
type Transaction struct {
	XID uint32
	LSN event.LSN
}

// FindEnd returns the end of a transaction's commit record: the LSN to which a
// slot is advanced to pass over it.
func FindEnd(ctx context.Context, log Log, t Transaction) (event.LSN, error) {
	var end event.LSN
	open := false // it is this one
	_, err := log.Read(ctx, 0, 0, func(rec *event.Record) error {
		if end != 0 {
			return errEnough
		}
		p := rec.Position
		open = open || t.XID != 0 && rec.XID == t.XID || t.LSN != 0 && (t.LSN == p.Commit || t.LSN == p.Change || t.LSN == rec.Confirm)
		if open && rec.Confirm != 0 { // of the commit, or of a message that is its own
			end = rec.Confirm
			if t.LSN == end {
				return nil // the change of an undecodable transaction may begin there
			}
			return errEnough
		}
		return nil
	}, func(u Unread) error {
		p := u.Position
		if end != 0 && t.LSN != p.Change {
			return errEnough
		}
		open = open || t.LSN != 0 && (t.LSN == p.Commit || t.LSN == p.Change || t.LSN == u.End)
		if open && u.End != 0 {
			end = u.End
			return errEnough
		}
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return 0, err
	}
	if end == 0 {
		const hint = "walrelay slot peek lists those ahead, with their positions: the second part is the LSN; one that wrote nothing that is published cannot be named"
		if t.XID != 0 {
			return 0, event.Fail(event.Precondition, hint, "the slot will not send a transaction %d", t.XID)
		}
		return 0, event.Fail(event.Precondition, hint, "the slot will not send a transaction at %s", t.LSN)
	}
	return end, nil
}
