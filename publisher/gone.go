package publisher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"

	"github.com/walrelay/walrelay/event"
)

// The last messages of a stream can be gone: consumed, purged or expired. Its
// last sequence then says nothing about the events, because purges, messages of
// other clients and first_seq move it, too. What is dropped needs evidence:
//
//   - the checkpoint says that the last session drained,
//   - this process knows what its last session had in flight,
//   - the server knows the event's Nats-Msg-Id, at the very sequence that the chain gave it,
//   - what was committed after the session began was not published before it.

// reached is how far a session of this process came: position is that of the
// event at sequence.
type reached struct {
	sequence uint64
	position event.Position
	revision uint64 // of the checkpoint that the session wrote last
	settled  bool   // nothing that follows was stored
	refused  bool   // the next event was refused for the wrong last sequence
}

// leave keeps for the next session how far this one came, of which acked events are settled.
func (s *Session) leave(acked uint64) {
	if s.recall.d.resume.Gone > 0 {
		return // what is known is what was before
	}
	p := &reached{sequence: s.lastSeq + acked, position: s.after, revision: s.revision, settled: acked == s.sent.Load()}
	if s.o.Shared {
		p.sequence = s.stored.Load()
	}
	if acked > 0 {
		p.position = s.window[acked%uint64(len(s.window))].position
	}
	var sup *surprise
	if errors.As(s.err, &sup) && sup.seq == p.sequence+1 && wrongLastSequence(sup) {
		p.settled, p.refused = true, true
	}
	s.p.reached = p
}

// wrongLastSequence reports whether a reply proves that its message was not stored.
func wrongLastSequence(err error) bool {
	var api *apiError
	return errors.As(err, &api) && api.ErrCode == codeWrongLastSeq
}

// refitted finds events that were stored after one that was refused: the stream's
// last sequence was moved to where their predecessors should have been.
func (f findings) refitted() error {
	p := f.reached
	if p == nil || !p.refused || f.acceptGap {
		return nil
	}
	for _, m := range f.tail {
		if m.ours && m.sequence > p.sequence && m.position.Compare(p.position) > 0 {
			return event.Fail(event.Lost,
				"stop what purges the stream or writes to it, compare the rows after "+p.position.String()+" with the stream, then go on with --accept-gap: the missing events are not published then",
				"the event after sequence %d of stream %q was refused, and the one at sequence %d was stored all the same: those between are missing",
				p.sequence, f.stream, m.sequence)
		}
	}
	return nil
}

// slotPassed: without a checkpoint, the last message is the only trace of what was
// published. Events that followed it are in the stream no more than in the WAL
// that the slot sends.
func (f findings) slotPassed(seq uint64, last event.Position) error {
	if f.acceptGap || f.resends(last) || f.reached != nil && f.reached.sequence == seq && f.reached.position == last {
		return nil
	}
	return event.Fail(event.Lost,
		fmt.Sprintf("walrelay slot recover %s finds the rows that the stream lacks and publishes them; if there are none, go on with --accept-gap", f.origin.Slot),
		"stream %q has no checkpoint, and slot %q is confirmed up to %s, past its last event, sequence %d at %s: events between may be missing",
		f.stream, f.origin.Slot, f.origin.ConfirmedFlush, seq, last)
}

// latest is the last event that is known to be stored, c being the newest
// checkpoint that holds, and whether nothing that follows can be.
func (f findings) latest(c *record) reached {
	at := reached{sequence: c.Sequence, position: c.Position, settled: c.Drained}
	for _, m := range f.tail {
		if m.ours && m.sequence > at.sequence && m.position.Compare(at.position) > 0 {
			at = reached{sequence: m.sequence, position: m.position}
		}
	}
	if p := f.reached; p != nil && c == f.checkpoint && p.sequence >= at.sequence && p.sequence <= f.lastSeq {
		at = *p
	}
	return at
}

// afterCheckpoint resumes behind the last event that is known to be stored,
// because the last message is gone.
func (f findings) afterCheckpoint(d decision, c *record) (decision, error) {
	at := f.latest(c)
	gone := f.lastSeq - at.sequence
	switch {
	case gone == 0 || f.acceptGap:
		gone = 0
	case at.settled:
		d.note("the stream's last sequence was moved by a purge or by messages of another client that are gone: nothing of this relay follows",
			"sequence", at.sequence, "last_sequence", f.lastSeq)
		gone = 0
	default:
		const hint = "see which of the rows after the checkpoint are missing downstream, then go on with --accept-gap: events after the checkpoint are published again"
		if c.Fingerprint != f.origin.Fingerprint {
			return d, event.Fail(event.Lost, "start once with the publications and tables as they were, then change them; or "+hint,
				"%d messages that were stored in stream %q after sequence %d are gone, and publications or tables were changed since: which events they were cannot be found out",
				gone, f.stream, at.sequence)
		}
		if c.Timeline != f.origin.Timeline {
			return d, event.Fail(event.Lost, hint,
				"%d messages that were stored in stream %q after sequence %d are gone, and the server was promoted since: which events they were cannot be found out",
				gone, f.stream, at.sequence)
		}
		d.note("the last messages are gone from the stream, asking the server which events they were",
			"position", at.position.String(), "sequence", at.sequence, "gone", gone)
	}
	d.resume.After, d.resume.Gone = at.position, gone
	d.base, d.from = f.lastSeq, c
	if !at.position.IsZero() && !f.origin.Contains(at.position) {
		if err := f.orphan(&d, at.position); err != nil {
			return d, err
		}
	}
	f.prove(&d, c)
	return d, nil
}

// headerRollup with an unknown value keeps a message from being stored: the server refuses it, after
// it has looked for the Nats-Msg-Id (processJetStreamMsg, checkMsgHeadersPreClusteredProposal).
const (
	headerRollup = "Nats-Rollup"
	neverStored  = "walrelay-recall"
	codeRollup   = 10111 // JSStreamRollupFailedF
)

// recalled is what is known of events whose messages are gone.
type recalled struct {
	f        findings
	d        decision
	sequence uint64 // of the last event that is known to be stored
}

// Recall implements relay.Sink.
func (s *Session) Recall(ctx context.Context, ev *event.Event) (left uint64, err error) {
	r := &s.recall
	want := r.sequence + 1
	if s.msgIDs {
		ids := map[string]string{s.o.markerSubject(): string(markerID(ev.Position))}
		if len(ev.MsgID) > 0 && validSubject(ev.Subject) && s.binds(ev.Subject) {
			ids[string(ev.Subject)] = string(ev.MsgID)
		}
		for subject, id := range ids {
			seq, err := s.sequenceOfID(ctx, subject, id)
			if err != nil {
				return 0, err
			}
			if seq == want {
				r.sequence = want
				return r.f.lastSeq - want, nil
			}
		}
	}
	why := "the server does not know its Nats-Msg-Id at the next sequence: it was restarted, or the dedup window is over, or the event was never stored"
	if !s.msgIDs {
		why = "this version of nats-server gets no Nats-Msg-Id in a replicated stream"
	}
	return 0, event.Fail(event.Lost,
		fmt.Sprintf("see whether the rows from there on reached the consumers; if they did not, go on with --accept-gap: all events after sequence %d are published again", r.f.checkpoint.Sequence),
		"%d messages of stream %q after sequence %d are gone, and whether one of them was event %s at %s cannot be found out: %s",
		r.f.lastSeq-r.sequence, s.o.Stream, r.sequence, excerpt(ev.ID), ev.Position, why)
}

// sequenceOfID asks the server for the message with an id, without storing anything; 0 when it does not know it.
func (s *Session) sequenceOfID(ctx context.Context, subject, id string) (uint64, error) {
	m := nats.NewMsg(subject)
	m.Header.Set(headerExpectedStream, s.o.Stream)
	m.Header.Set(headerMsgID, id)
	m.Header.Set(headerRollup, neverStored)
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	answer, err := s.nc.RequestMsgWithContext(ctx, m)
	if err != nil {
		return 0, s.p.classifyConnect(fmt.Errorf("ask stream %q for a message id: %w", s.o.Stream, err))
	}
	var ack pubAck
	if err := json.Unmarshal(answer.Data, &ack); err != nil {
		return 0, fmt.Errorf("ask stream %q for a message id: %w", s.o.Stream, err)
	}
	switch {
	case ack.Error != nil && (ack.Error.ErrCode == codeRollup || ack.Error.ErrCode == codeWrongStream):
		return 0, nil
	case ack.Error != nil:
		return 0, event.Fail(event.Transient, "", "ask stream %q for a message id: %w", s.o.Stream, ack.Error)
	case !ack.Duplicate || ack.Stream != s.o.Stream:
		return 0, event.Fail(event.Unexpected, "please report this with the version of nats-server",
			"a question for the message id %.100q was stored in stream %q with sequence %d", id, ack.Stream, ack.Sequence)
	}
	return ack.Sequence, nil
}

// Resumed implements relay.Sink. It claims the stream, as Resume does when no message is gone.
func (s *Session) Resumed(ctx context.Context, at event.Checkpoint) error {
	f, d := s.recall.f, s.recall.d
	first := d.resume.After
	if more := f.lastSeq - s.recall.sequence; more > 0 {
		s.o.Log.Warn("the stream's last sequence was moved by a purge or by messages of another client that are gone: no event follows",
			"stream", s.o.Stream, "sequence", s.recall.sequence, "last_sequence", f.lastSeq)
	}
	d.resume.After, d.resume.Gone, d.base = at.Position, 0, f.lastSeq
	r := claim(f, d, s.o.Window)
	r.Letters = s.letters.record(0)
	if at.XID != 0 {
		r.XID, r.CommitTime = at.XID, at.CommitTime
	}
	if at.Position != first && r.Proven == nil {
		r.Proven = &f.checkpoint.Confirm
	}
	if err := s.writeCheckpoint(ctx, r); err != nil {
		return err
	}
	s.base, s.after, s.recall = f.lastSeq, at.Position, recalled{}
	return nil
}
