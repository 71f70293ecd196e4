package publisher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// headerLetter of a marker is the sequence of its dead letter in the dead-letter stream.
const headerLetter = "Outbox-Letter"

// lettersRecord is how far the dead-letter stream was at a checkpoint: of each
// dead letter up to Sequence the marker is stored, too.
type lettersRecord struct {
	Stream   string    `json:"stream"`
	Created  time.Time `json:"created"`
	Sequence uint64    `json:"sequence"`
}

// letterbox is what a session knows of the dead-letter stream. A relay that dies between the ack of
// a dead letter and its marker leaves a dead letter without one. Its event
// keeps that fate, whatever has changed since: were it published now, a replay of the
// dead letter would publish it twice.
type letterbox struct {
	// Of the goroutine that appends.
	waiting map[event.Position]waitingLetter // dead letters of events that are not in the stream
	byID    map[parkedKey]waitingLetter      // the same, for rows that are read from the table and get other positions
	until   event.Position                   // the last of waiting
	high    uint64                           // the newest dead letter's sequence

	missing  map[event.Position]*event.Poison // of parked events, until their dead letters are stored again
	tolerant bool                             // an operator accepts that some stay missing

	// Shared with the goroutine that writes checkpoints.
	mu     sync.Mutex
	stands lettersRecord  // of the dead letters whose markers are acked
	next   uint64         // the newest dead letter, which counts
	at     uint64         // once so many events of the session are settled
	keep   *lettersRecord // stands in the checkpoint while dead letters are missing
}

// waitingLetter is a dead letter whose marker is missing.
type waitingLetter struct {
	seq uint64
	why event.Poison
}

// stored notes that the dead letter with a sequence has its marker as the session's event number at.
// All events before are settled.
func (b *letterbox) stored(seq, at uint64) {
	b.high = max(b.high, seq)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stands.Sequence = max(b.stands.Sequence, b.next)
	b.next, b.at = max(b.next, seq), at
}

// record is what a checkpoint after so many settled events says.
func (b *letterbox) record(events uint64) *lettersRecord {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.keep != nil:
		return b.keep
	case b.stands.Stream == "":
		return nil
	}
	if events >= b.at {
		b.stands.Sequence = max(b.stands.Sequence, b.next)
	}
	r := b.stands
	return &r
}

// survey reads what the stream and the dead-letter stream hold and decides where to go on. It changes nothing.
func (s *Session) survey(ctx context.Context, origin event.Origin) (findings, decision, error) {
	f, d, err := s.surveyStream(ctx, origin)
	if err != nil {
		return f, d, err
	}
	return f, d, s.surveyLetters(ctx, f, &d)
}

// surveyLetters finds the dead letters whose events may come again.
func (s *Session) surveyLetters(ctx context.Context, f findings, d *decision) error {
	s.letters = letterbox{waiting: map[event.Position]waitingLetter{}}
	c := f.checkpoint
	var known *lettersRecord
	if c != nil && c.Letters != nil && c.Letters.Stream == s.o.DeadLetters {
		known = c.Letters
	}
	if !s.o.Park && known == nil {
		return nil // the user may not even read a dead-letter stream
	}
	info, err := s.lettersInfo(ctx, known)
	if err != nil {
		return err
	}
	b := &s.letters
	back := known.thrownBack(info)
	if back {
		if err := s.surveyMissing(ctx, f, d, known, info); err != nil {
			return err
		}
	}
	if info == nil {
		return nil
	}
	b.high = info.State.LastSeq
	b.stands = lettersRecord{Stream: s.o.DeadLetters, Created: info.Created, Sequence: b.high}
	from := uint64(1)
	if known != nil && !back && d.inTurn(f) {
		from = known.Sequence + 1
	}
	if !s.looking {
		if err := s.readWaiting(ctx, from, d.resume.After, f.origin.Backfill); err != nil {
			return err
		}
	}
	b.next = b.stands.Sequence
	return nil
}

// lettersInfo is the state of the dead-letter stream, nil when there is none. A server that has
// just become its leader may still be about to apply what it has.
func (s *Session) lettersInfo(ctx context.Context, known *lettersRecord) (*jetstream.StreamInfo, error) {
	for try := 0; ; try++ {
		st, err := s.js.Stream(ctx, s.o.DeadLetters)
		if errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, streamError(s.o.DeadLetters, err)
		}
		info := st.CachedInfo()
		if !known.thrownBack(info) || !known.Created.Equal(info.Created) || info.Config.Replicas < 2 || try == leaderTries {
			return info, nil
		}
		select {
		case <-time.After(leaderPause):
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// inTurn reports whether the session goes on where the checkpoint or a message after
// it is, so that no event that the checkpoint covers comes again.
func (d *decision) inTurn(f findings) bool {
	return d.again == 0 && !d.fresh && !d.lost && !f.adopt && !f.acceptGap && d.resume.Stored == nil &&
		(f.origin.Backfill || d.resume.After.Compare(f.checkpoint.Position) >= 0)
}

// readWaiting reads the dead letters from a sequence on of events after a position.
func (s *Session) readWaiting(ctx context.Context, from uint64, after event.Position, backfill bool) error {
	b := &s.letters
	if from > b.high {
		return nil
	}
	last, err := s.lastLetter(ctx)
	if err != nil || last < from {
		return err
	}
	if backfill {
		b.byID = map[parkedKey]waitingLetter{}
	}
	// The last ones may have been removed meanwhile.
	over := func(seq uint64) bool {
		now, err := s.lastLetter(ctx)
		return err == nil && now <= seq
	}
	for m, err := range s.headersFrom(ctx, s.o.DeadLetters, from, over) {
		if err != nil {
			return fmt.Errorf("read dead letters of stream %q: %w", s.o.DeadLetters, err)
		}
		pos, err := event.ParsePosition(m.header.Get(event.HeaderPos))
		if err == nil && strings.HasPrefix(m.subject, s.o.deadLetterPrefix()) && (backfill || pos.Compare(after) > 0) {
			reason, detail, _ := strings.Cut(m.header.Get(event.HeaderReason), ": ")
			l := waitingLetter{m.seq, event.Poison{Reason: event.Reason(reason), Detail: detail}}
			b.waiting[pos] = l
			if pos.Compare(b.until) > 0 {
				b.until = pos
			}
			if id := strings.TrimSpace(m.header.Get(event.HeaderID)); backfill && whole(id) {
				b.byID[parkedKey{strings.TrimSpace(m.header.Get(event.HeaderTable)), id}] = l
			}
			b.stands.Sequence = min(b.stands.Sequence, m.seq-1)
		}
		if m.seq >= last {
			break
		}
	}
	return nil
}

// whole reports whether an id in a header is the event's, neither empty nor cut off nor with a replaced character.
func whole(id string) bool {
	return id != "" && len(id) < excerptBytes && !strings.Contains(id, "?")
}

// waitingOf finds the dead letter that ev has already, by its place or, of a row that is read from the table, by its id.
func (s *Session) waitingOf(ev *event.Event) (waitingLetter, bool) {
	b := &s.letters
	if ev.Replay != nil {
		return waitingLetter{}, false
	}
	l, found := b.waiting[ev.Position]
	if !found && b.byID != nil {
		if id := strings.TrimSpace(excerpt(ev.ID)); whole(id) {
			l, found = b.byID[parkedKey{strings.TrimSpace(textOf([]byte(ev.Table))), id}]
		}
	}
	return l, found
}

// letterBefore is the sequence of the dead letter that ev has already, 0 when it has none. It may have been
// removed since the session began. Its event waits no longer.
func (s *Session) letterBefore(ctx context.Context, ev *event.Event) (uint64, error) {
	l, found := s.waitingOf(ev)
	if !found {
		return 0, nil
	}
	m, err := s.fetch(ctx, s.o.DeadLetters, bySequence{l.seq})
	if err != nil {
		return 0, fmt.Errorf("read dead letter %d of stream %q: %w", l.seq, s.o.DeadLetters, err)
	}
	delete(s.letters.waiting, ev.Position)
	for k, o := range s.letters.byID {
		if o.seq == l.seq {
			delete(s.letters.byID, k)
		}
	}
	if m == nil {
		return 0, nil
	}
	return l.seq, nil
}

// parkedBefore says why ev keeps the fate that its dead letter gave it, nil when it has none.
func (s *Session) parkedBefore(ev *event.Event) (*event.Poison, error) {
	b := &s.letters
	if b.byID == nil && ev.Replay == nil && ev.Position.Compare(b.until) > 0 {
		b.waiting = nil
		return nil, nil
	}
	l, found := s.waitingOf(ev)
	if !found {
		return nil, nil
	}
	switch m, err := s.fetch(context.Background(), s.o.DeadLetters, bySequence{l.seq}); {
	case err != nil:
		return nil, fmt.Errorf("read dead letter %d of stream %q: %w", l.seq, s.o.DeadLetters, err)
	case m == nil:
		return nil, nil
	}
	why := l.why
	if !s.o.Park {
		why.Detail = fmt.Sprintf("it has dead letter %d in stream %s already, and its marker is missing: %s", l.seq, s.o.DeadLetters, why.Detail)
	}
	return &why, nil
}
