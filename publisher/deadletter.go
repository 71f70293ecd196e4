package publisher

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// headerOmitted is the size of a body that is too large even for the dead letter.
const headerOmitted = "Outbox-Body-Omitted"

// Park implements relay.Sink. The dead letter's subject has the position, and
// it is stored only if that subject has no message: parking the same event
// again, after a crash in between, changes nothing.
func (s *Session) Park(ctx context.Context, ev *event.Event, why *event.Poison) error {
	if s.acked.Load() != s.appended {
		return errors.New("park: events before the parked one are in flight")
	}
	if fits, err := s.lastLook(ctx, ev); fits || err != nil {
		return err
	}
	letter, err := s.letterBefore(ctx, ev)
	if err == nil && letter == 0 {
		letter, err = s.storeLetter(ctx, ev, why)
	}
	if err != nil {
		return err
	}
	s.sentenced(ev)
	s.hold.add(ev)
	if err := s.appendMarker(ev, why, letter); err != nil {
		return err
	}
	s.letters.stored(letter, s.appended)
	return s.awaitMarker(ctx, ev, letter)
}

// awaitMarker waits for the ack of the marker. A relay that stood still for so long that another one
// took over may find the event stored there, which that one could publish: the dead letter that
// came too late is removed then. The wait outlasts a stop of the relay, as the event would otherwise
// be in the chain and not counted; Tick ends it when no ack comes.
func (s *Session) awaitMarker(ctx context.Context, ev *event.Event, letter uint64) error {
	err := s.Flush()
	if err == nil {
		err = s.wait(context.WithoutCancel(ctx), s.appended)
	}
	if err == nil || s.o.Shared {
		return err
	}
	// The connection for requests outlives that for messages.
	m, looked := s.fetch(ctx, s.o.Stream, bySequence{s.lastSeq + s.appended})
	if looked != nil || m == nil || m.Subject == s.o.markerSubject() {
		return err
	}
	if there := s.messageOf(m); !there.ours || there.position != ev.Position {
		return err
	}
	if gone := s.deleteLetter(ctx, letter); gone != nil {
		s.o.Log.Warn("a dead letter of a stored event cannot be removed", "dead_letters", s.o.DeadLetters, "sequence", letter, "err", gone)
		return err
	}
	s.o.Log.Warn("another relay has stored the event meanwhile, its dead letter is removed", "id", excerpt(ev.ID), "dead_letters", s.o.DeadLetters, "sequence", letter)
	return err
}

// Repark implements relay.Sink.
func (s *Session) Repark(ctx context.Context, ev *event.Event, why *event.Poison) error {
	if _, err := s.storeLetter(ctx, ev, why); err != nil {
		return err
	}
	s.hold.add(ev)
	s.letters.found(ev.Position)
	s.o.Log.Info("stored a missing dead letter again", "id", excerpt(ev.ID), "table", ev.Table, "position", ev.Position.String(), "dead_letters", s.o.DeadLetters)
	return nil
}

// storeLetter stores the dead letter of ev, unless it is there, and returns its sequence.
func (s *Session) storeLetter(ctx context.Context, ev *event.Event, why *event.Poison) (uint64, error) {
	m := s.deadLetter(ev, why, ev.Headers)
	if n := m.Size() - len(m.Subject); n <= 0 || n > min(maxHeaderBytes, s.w.maxPayload) {
		// The headers are what is wrong with it, by size or by name. The row has them.
		m = s.deadLetter(ev, why, nil)
	}
	omit := func() {
		m.Header.Set(headerOmitted, strconv.Itoa(len(ev.Payload)))
		m.Data = nil
	}
	m.Data = ev.Payload
	if m.Size() > s.w.maxPayload {
		omit()
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	if err := s.judgeLetters(ctx); err != nil {
		return 0, err
	}
	ack, err := s.js.PublishMsg(ctx, m)
	if refused(err, codeTooLarge) && m.Data != nil {
		omit()
		ack, err = s.js.PublishMsg(ctx, m)
	}
	if refused(err, codeTooLarge) && len(ev.Headers) > 0 {
		m = s.deadLetter(ev, why, nil)
		omit()
		ack, err = s.js.PublishMsg(ctx, m)
	}
	if refused(err, codeWrongLastSeq) {
		// It was stored before a crash.
		at, err := s.letter(ctx, m.Subject)
		if err == nil && at == nil {
			err = errors.New("it was there and is gone")
		}
		if err != nil {
			return 0, s.unparked(ev, err)
		}
		return at.Seq, nil
	}
	if err != nil {
		return 0, s.unparked(ev, err)
	}
	if ack.Sequence <= s.letters.high {
		return 0, event.Fail(event.Transient, "", "dead-letter stream %q was restored or recreated while the relay runs: its last sequence was %d, and a dead letter got %d",
			s.o.DeadLetters, s.letters.high, ack.Sequence)
	}
	s.letters.high = ack.Sequence
	return ack.Sequence, nil
}

// unparked is a failure to store a dead letter, with what helps.
func (s *Session) unparked(ev *event.Event, err error) error {
	err = fmt.Errorf("park event %s in stream %q: %w", excerpt(ev.ID), s.o.DeadLetters, err)
	var api *jetstream.APIError
	switch {
	case refused(err, codeTooLarge):
		return event.Fail(event.Precondition, fmt.Sprintf("nats stream edit %s --max-msg-size -1", s.o.DeadLetters), "%w", err)
	case errors.As(err, &api) && full(int(api.ErrorCode)):
		return event.Fail(event.Transient, s.o.roomForLetters(), "%w", err)
	}
	return err
}

// judgeEvery is how often the settings of the dead-letter stream are looked at while events are parked.
const judgeEvery = time.Second

// judgeLetters looks at the settings of the dead-letter stream again: they may have
// been changed since the session began, and a dead letter may be all that is left of its event.
func (s *Session) judgeLetters(ctx context.Context) error {
	if time.Since(s.judged) < judgeEvery {
		return nil
	}
	st, err := s.js.Stream(ctx, s.o.DeadLetters)
	if err != nil {
		return streamError(s.o.DeadLetters, err)
	}
	s.judged = time.Now()
	return s.examine(ofLetters, &st.CachedInfo().Config)
}

// sentenced forgets what was held against ev, now that it is out of the way.
func (s *Session) sentenced(ev *event.Event) {
	if s.p.condemned != nil && s.p.condemned.position == ev.Position {
		s.p.condemned = nil
	}
	s.p.suspect = false
}

// deadLetter is the message without its body.
func (s *Session) deadLetter(ev *event.Event, why *event.Poison, own []event.Header) *nats.Msg {
	m := nats.NewMsg(s.o.deadLetterSubject(ev))
	for _, h := range own {
		m.Header.Add(h.Name, textOf(h.Value))
	}
	m.Header.Set(event.HeaderID, excerpt(ev.ID))
	m.Header.Set(event.HeaderPos, ev.Position.String())
	m.Header.Set(event.HeaderTable, ev.Table)
	// Also when the event's own headers are left out: they say what it was about.
	for name, v := range map[string][]byte{
		event.HeaderAggregateType: ev.AggregateType, event.HeaderAggregateID: ev.AggregateID, event.HeaderEventType: ev.EventType,
	} {
		if v != nil {
			m.Header.Set(name, excerpt(v))
		}
	}
	m.Header.Set(event.HeaderSubject, excerpt(ev.Subject))
	m.Header.Set(event.HeaderReason, textOf([]byte(why.Error())))
	m.Header.Set(headerExpectedStream, s.o.DeadLetters)
	m.Header.Set(headerExpectedLastSubject, "0")
	return m
}

func refused(err error, code jetstream.ErrorCode) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == code
}

const excerptBytes = 512

// excerpt is textOf of no more than fits a header whatever the row holds: an
// event can be poison because its id or its subject is too long.
func excerpt(b []byte) string { return textOf(b[:min(len(b), excerptBytes)]) }

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
	s.config, s.known = st.CachedInfo().Config, knownSubjects{}
	err = s.Append(ev)
	var still *event.Poison
	if errors.As(err, &still) {
		return false, nil
	}
	return true, err
}

// markerID is the Nats-Msg-Id of the marker of the event at pos.
func markerID(pos event.Position) []byte { return []byte("parked:" + pos.String()) }

// appendMarker puts a marker into the chain in the place of the parked event.
// Without it, a successor that an earlier session left in a buffer would fit the hole.
//
// letter is the sequence of its dead letter, 0 when it has none.
func (s *Session) appendMarker(ev *event.Event, why *event.Poison, letter uint64) error {
	marker := event.Event{
		ID:       ev.ID,
		MsgID:    markerID(ev.Position),
		Subject:  []byte(s.o.markerSubject()),
		Position: ev.Position,
		Headers: []event.Header{
			{Name: event.HeaderID, Value: []byte(excerpt(ev.ID))},
			{Name: event.HeaderTable, Value: []byte(textOf([]byte(ev.Table)))},
			{Name: event.HeaderReason, Value: []byte(textOf([]byte(why.Error())))},
		},
	}
	if letter > 0 {
		marker.Headers = append(marker.Headers, event.Header{Name: headerLetter, Value: strconv.AppendUint(nil, letter, 10)})
	}
	if s.flight != nil {
		s.flight.marker = s.appended + 1
	}
	return s.Append(&marker)
}
