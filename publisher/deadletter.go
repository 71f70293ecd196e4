package publisher

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// headerOmitted is the size of a body that is too large even for the dead letter.
const headerOmitted = "Outbox-Body-Omitted"

// Park implements relay.Sink. The dead letter's subject is the position, and
// it is stored only if that subject has no message: parking the same event
// again, after a crash in between, changes nothing.
func (s *Session) Park(ctx context.Context, ev *event.Event, why *event.Poison) error {
	if s.acked.Load() != s.appended {
		return errors.New("park: events before the parked one are in flight")
	}
	if fits, err := s.lastLook(ctx, ev); fits || err != nil {
		return err
	}
	m := nats.NewMsg(s.o.deadLetterPrefix() + ev.Position.String())
	for _, h := range ev.Headers {
		m.Header.Add(h.Name, textOf(h.Value))
	}
	m.Header.Set(event.HeaderID, textOf(ev.ID))
	m.Header.Set(event.HeaderPos, ev.Position.String())
	m.Header.Set(event.HeaderTable, ev.Table)
	m.Header.Set(event.HeaderSubject, textOf(ev.Subject))
	m.Header.Set(event.HeaderReason, why.Error())
	m.Header.Set(headerExpectedStream, s.o.DeadLetters)
	m.Header.Set(headerExpectedLastSubject, "0")
	m.Data = ev.Payload
	if m.Size() > s.w.maxPayload || len(ev.Payload) > s.w.maxPayload-maxHeaderBytes {
		m.Header.Set(headerOmitted, strconv.Itoa(len(ev.Payload)))
		m.Data = nil
	}
	if m.Size() > maxHeaderBytes {
		// The headers are what is wrong with it. The row has them.
		for _, h := range ev.Headers {
			m.Header.Del(h.Name)
		}
		m.Header.Set(event.HeaderID, textOf(ev.ID))
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	_, err := s.js.PublishMsg(ctx, m)
	var api *jetstream.APIError
	if errors.As(err, &api) && api.ErrorCode == codeWrongLastSeq {
		err = nil // stored before a crash
	}
	if err != nil {
		return fmt.Errorf("park event %s in stream %q: %w", textOf(ev.ID), s.o.DeadLetters, err)
	}
	if s.p.condemned != nil && s.p.condemned.position == ev.Position {
		s.p.condemned = nil
	}
	s.p.suspect = false
	return s.appendMarker(ev, why)
}

// lastLook appends ev after all when the stream was changed since the session
// began, so that it would be stored now.
func (s *Session) lastLook(ctx context.Context, ev *event.Event) (fits bool, err error) {
	if s.unfitAt != ev.Position {
		return false, nil
	}
	st, err := s.js.Stream(ctx, s.o.Stream)
	if err != nil {
		return false, streamError(s.o.Stream, err)
	}
	s.config = st.CachedInfo().Config
	err = s.Append(ev)
	var still *event.Poison
	if errors.As(err, &still) {
		return false, nil
	}
	return true, err
}

// appendMarker puts a marker into the chain in the place of the parked event.
// Without it, a successor that an earlier session left in a buffer would fit the hole.
func (s *Session) appendMarker(ev *event.Event, why *event.Poison) error {
	pos := ev.Position.String()
	marker := event.Event{
		ID:       ev.ID,
		MsgID:    []byte("parked:" + pos),
		Subject:  []byte(s.o.markerSubject()),
		Position: ev.Position,
		Headers: []event.Header{
			{Name: event.HeaderID, Value: []byte(textOf(ev.ID))},
			{Name: event.HeaderReason, Value: []byte(textOf([]byte(why.Error())))},
		},
	}
	return s.Append(&marker)
}
