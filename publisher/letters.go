package publisher

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walrelay/walrelay/event"
)

// DeadLetter is a parked event as the dead-letter stream has it.
type DeadLetter struct {
	Subject  string // its own in the dead-letter stream, unlike any other's
	Sequence uint64 // there
	Parked   time.Time
	Position event.Position

	// ID is cut off after 512 bytes, "" when the event has none. Table is where its
	// row is, or the prefix of a logical message.
	ID    string
	Table string

	AggregateType, AggregateID, EventType string

	EventSubject string // where the event was to go; "" when it has none
	Reason       event.Reason
	Detail       string

	Headers []event.Header // those of the message that it would have become
	Body    []byte
	Omitted int // size of a body that was left out; 0 when it is there
}

// Complete reports whether nothing of the message is missing in the dead letter.
func (l *DeadLetter) Complete() bool {
	typed := slices.ContainsFunc(l.Headers, func(h event.Header) bool { return h.Name == event.HeaderContentType })
	return l.Omitted == 0 && typed && len(l.ID) < excerptBytes
}

// Aggregate is the key of the letter's aggregate: letters that have it in common
// are of one; "" is none.
func (l *DeadLetter) Aggregate() string {
	if key := letterAggregate(l.Subject); key != noAggregate {
		return key
	}
	return ""
}

// DeadLetters reads the dead letters of a stream over a connection of its own.
// One goroutine uses it, and closes it.
type DeadLetters struct {
	s *Session
}

// OpenDeadLetters connects. A dead-letter stream that does not exist has no
// letters.
func (p *Publisher) OpenDeadLetters(ctx context.Context) (*DeadLetters, error) {
	s, err := p.look(ctx)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	return &DeadLetters{s}, nil
}

// Close ends the connection.
func (d *DeadLetters) Close() { d.s.nc.Close() }

// All yields the dead letters, oldest first, with one at a time in memory. Those
// that are parked meanwhile are among them, and those that are removed are
// not. An error is the last that is yielded.
func (d *DeadLetters) All(ctx context.Context) iter.Seq2[*DeadLetter, error] {
	return func(yield func(*DeadLetter, error) bool) {
		for seq := uint64(1); ; {
			m, err := d.s.fetch(ctx, d.s.o.DeadLetters, nextBySubject{seq, d.s.o.deadLetterPrefix() + ">"})
			if noStream(err) {
				return
			}
			if err != nil {
				yield(nil, fmt.Errorf("read dead letters of stream %q: %w", d.s.o.DeadLetters, err))
				return
			}
			if m == nil {
				return
			}
			seq = m.Seq + 1
			letter, err := d.s.letterOf(m)
			if err != nil {
				d.s.o.Log.Warn("not a dead letter", "stream", d.s.o.DeadLetters, "sequence", m.Seq, "err", err)
				continue
			}
			if !yield(letter, nil) {
				return
			}
		}
	}
}

// At reads the dead letter with a sequence, nil when it is gone.
func (d *DeadLetters) At(ctx context.Context, seq uint64) (*DeadLetter, error) {
	m, err := d.s.fetch(ctx, d.s.o.DeadLetters, bySequence{seq})
	if noStream(err) || err == nil && m == nil {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read dead letter %d of stream %q: %w", seq, d.s.o.DeadLetters, err)
	}
	return d.s.letterOf(m)
}

// Remove deletes a dead letter. One that is gone is no error. An event that was
// in no other place is lost by it.
func (d *DeadLetters) Remove(ctx context.Context, l *DeadLetter) error {
	if err := d.s.deleteLetter(ctx, l.Sequence); err != nil {
		return fmt.Errorf("remove dead letter %d of stream %q: %w", l.Sequence, d.s.o.DeadLetters, err)
	}
	return nil
}

// deleteLetter deletes the message with a sequence. One that is gone is no error;
// an *apiError says that the server refuses.
func (s *Session) deleteLetter(ctx context.Context, seq uint64) error {
	req, err := json.Marshal(deletion{seq, true})
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	msg, err := s.nc.RequestWithContext(short, "$JS.API.STREAM.MSG.DELETE."+s.o.DeadLetters, req)
	if err != nil {
		return err
	}
	var reply struct {
		Error *apiError `json:"error"`
	}
	if err := json.Unmarshal(msg.Data, &reply); err != nil {
		return err
	}
	if reply.Error == nil || noStream(reply.Error) {
		return nil
	}
	// The code for a message that is gone has others for neighbours.
	if m, err := s.fetch(ctx, s.o.DeadLetters, bySequence{seq}); err == nil && m == nil {
		return nil
	}
	return reply.Error
}

type deletion struct {
	Seq     uint64 `json:"seq"`
	NoErase bool   `json:"no_erase"`
}

type nextBySubject struct {
	Seq  uint64 `json:"seq"`
	Next string `json:"next_by_subj"`
}

func noStream(err error) bool {
	var api *apiError
	return errors.As(err, &api) && api.ErrCode == codeStreamNotFound
}

// ofLetter are the headers that Park adds to those of the event.
var ofLetter = []string{
	event.HeaderPos, event.HeaderTable, event.HeaderSubject, event.HeaderReason, headerOmitted,
	headerExpectedStream, headerExpectedLastSubject,
}

func (s *Session) letterOf(m *storedMessage) (*DeadLetter, error) {
	h, err := nats.DecodeHeadersMsg(m.Header)
	if err != nil {
		return nil, err
	}
	l := &DeadLetter{
		Subject: m.Subject, Sequence: m.Seq, Parked: m.Time, Body: m.Data,
		ID: h.Get(event.HeaderID), Table: h.Get(event.HeaderTable),
		AggregateType: h.Get(event.HeaderAggregateType), AggregateID: h.Get(event.HeaderAggregateID), EventType: h.Get(event.HeaderEventType),
		EventSubject: h.Get(event.HeaderSubject),
	}
	if l.Position, err = event.ParsePosition(h.Get(event.HeaderPos)); err != nil {
		return nil, err
	}
	reason, detail, _ := strings.Cut(h.Get(event.HeaderReason), ": ")
	l.Reason, l.Detail = event.Reason(reason), detail
	if size := h.Get(headerOmitted); size != "" {
		if l.Omitted, err = strconv.Atoi(size); err != nil {
			return nil, fmt.Errorf("header %s: %w", headerOmitted, err)
		}
	}
	l.Headers = ownHeaders(m.Header)
	return l, nil
}

// ownHeaders reads a header block in its order and spelling, without what Park added.
func ownHeaders(block []byte) []event.Header {
	var own []event.Header
	for i, line := range bytes.Split(block, crlf) {
		name, value, ok := bytes.Cut(line, []byte(":"))
		if i == 0 || !ok || slices.Contains(ofLetter, string(name)) {
			continue
		}
		if string(name) == event.HeaderID && len(bytes.TrimSpace(value)) == 0 {
			continue // Park sets one in any case
		}
		own = append(own, event.Header{Name: string(name), Value: bytes.TrimSpace(value)})
	}
	return own
}
