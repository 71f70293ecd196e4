package publisher

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// thrownBack reports whether the dead-letter stream has lost what a checkpoint knew of.
func (r *lettersRecord) thrownBack(info *jetstream.StreamInfo) bool {
	if r == nil || r.Sequence == 0 {
		return false
	}
	return info == nil || !info.Created.Equal(r.Created) || info.State.LastSeq < r.Sequence
}

// whatHappened says how the stream has lost dead letters, and up to which sequence it has them.
func (r *lettersRecord) whatHappened(info *jetstream.StreamInfo) (what string, left uint64) {
	switch {
	case info == nil:
		return "is gone", 0
	case !info.Created.Equal(r.Created):
		return "was recreated", 0
	}
	return fmt.Sprintf("was restored from an older copy, its last sequence is %d", info.State.LastSeq), info.State.LastSeq
}

// trustLetters fails when the dead-letter stream may lack dead letters: it has lost some,
// or its settings let them vanish. Rows must not be deleted because they have no dead letter then.
func (s *Session) trustLetters(ctx context.Context) error {
	c, err := s.readCheckpoint(ctx)
	if err != nil {
		return err
	}
	var known *lettersRecord
	if c != nil && c.Letters != nil && c.Letters.Stream == s.o.DeadLetters {
		known = c.Letters
	}
	info, err := s.lettersInfo(ctx, known)
	if err != nil {
		return err
	}
	if known.thrownBack(info) {
		what, _ := known.whatHappened(info)
		return event.Fail(event.Lost, "start walrelay run: it stores the missing dead letters again, or says what to decide",
			"dead-letter stream %q %s, and the checkpoint of stream %q knows dead letters up to sequence %d: rows of missing ones cannot be told from published ones",
			s.o.DeadLetters, what, s.o.Stream, known.Sequence)
	}
	if info == nil {
		return nil
	}
	for _, f := range s.o.judge(ofLetters, &info.Config, &s.config) {
		if f.Level == event.FAIL {
			return event.Fail(event.Precondition, f.Remedy, "%s", f.Detail)
		}
	}
	return nil
}

// marker is one of a parked event.
type marker struct {
	letter   uint64 // sequence of the dead letter
	position event.Position
	id       string
	why      event.Poison
}

// surveyMissing finds what the dead-letter stream has lost, by the markers: each names its
// dead letter. Those whose events Postgres sends again are stored again. For others, and
// for those whose markers are gone, too, an operator has to decide.
func (s *Session) surveyMissing(ctx context.Context, f findings, d *decision, known *lettersRecord, info *jetstream.StreamInfo) error {
	b := &s.letters
	what, left := known.whatHappened(info)
	if !s.o.Park {
		b.keep = known
		d.note("the dead-letter stream "+what+": dead letters may be missing, which the relay looks into when it parks events again",
			"dead_letters", s.o.DeadLetters, "had", known.Sequence)
		return nil
	}
	markers, err := s.markersOf(ctx, f, known, left)
	if err != nil {
		return err
	}
	again, marked := map[event.Position]*event.Poison{}, map[uint64]bool{}
	var gone []string
	for _, m := range markers {
		marked[m.letter] = true
		there, err := s.settledLetter(ctx, m.position)
		switch {
		case err != nil:
			return err
		case there:
		case info != nil && s.sendsAgain(f, d, m.position):
			again[m.position] = &m.why
		default:
			gone = append(gone, m.id)
		}
	}
	unmarked := known.Sequence - left - uint64(len(marked))
	if len(gone) > 0 || unmarked > 0 {
		if !f.acceptGap {
			return s.lettersLost(known, what, gone, unmarked)
		}
		d.note("going on without dead letters", "dead_letters", s.o.DeadLetters, "ids", strings.Join(someOf(gone), ","), "without_marker", unmarked)
	}
	if len(again) == 0 {
		return nil
	}
	d.note("the dead-letter stream "+what+": storing the missing dead letters again from the WAL", "dead_letters", s.o.DeadLetters, "missing", len(again))
	b.missing, b.keep, b.tolerant, d.resume.Missing = again, known, f.acceptGap, again
	return nil
}

// sendsAgain reports whether the event at a position is one of those that are dropped when Postgres sends them again.
func (s *Session) sendsAgain(f findings, d *decision, pos event.Position) bool {
	c := f.checkpoint
	return c.Owner == ownerOf(f.origin) && !d.fresh && !f.origin.Backfill && c.Fingerprint == f.origin.Fingerprint &&
		pos.Compare(d.resume.After) <= 0 && f.resends(pos)
}

// lettersLost is the failure that leaves the choice to an operator.
func (s *Session) lettersLost(known *lettersRecord, what string, gone []string, unmarked uint64) error {
	hint := "restore the dead-letter stream, or go on without them with --accept-gap"
	var parts []string
	if len(gone) > 0 {
		parts = append(parts, fmt.Sprintf("of %d dead letters Postgres has dropped the WAL (ids %s)", len(gone), strings.Join(someOf(gone), ", ")))
		var flags []string
		for _, id := range someOf(gone) {
			flags = append(flags, "--id "+id)
		}
		hint += ": their rows are then all that is left, and walrelay replay " + strings.Join(flags, " ") + " publishes those that are still there"
	}
	if unmarked > 0 {
		parts = append(parts, fmt.Sprintf("of %d not even the marker is left in stream %q", unmarked, s.o.Stream))
	}
	return event.Fail(event.Lost, hint, "dead-letter stream %q %s, and the checkpoint of stream %q knows dead letters up to sequence %d: %s",
		s.o.DeadLetters, what, s.o.Stream, known.Sequence, strings.Join(parts, ", and "))
}

// someOf is as many ids as a message can name.
func someOf(ids []string) []string {
	const most = 20
	if len(ids) > most {
		return append(slices.Clone(ids[:most]), "…")
	}
	return ids
}

// markersOf reads the markers of dead letters behind a sequence. They lie behind the newest
// checkpoint that knew no more of the dead-letter stream.
func (s *Session) markersOf(ctx context.Context, f findings, known *lettersRecord, left uint64) ([]marker, error) {
	earlier, err := s.earlierCheckpoints(ctx)
	if err != nil {
		return nil, err
	}
	from := uint64(1)
	for i := range earlier {
		e := &earlier[i]
		if l := e.Letters; l != nil && l.Stream == known.Stream && l.Created.Equal(known.Created) && l.Sequence <= left && e.Created.Equal(f.created) {
			from = e.Sequence + 1
			break
		}
	}
	var found []marker
	for {
		m, err := s.fetch(ctx, s.o.Stream, nextBySubject{from, s.o.markerSubject()})
		if err != nil {
			return nil, fmt.Errorf("read the markers of stream %q: %w", s.o.Stream, err)
		}
		if m == nil {
			return found, nil
		}
		from = m.Seq + 1
		h, err := nats.DecodeHeadersMsg(m.Header)
		if err != nil {
			continue
		}
		letter, err := strconv.ParseUint(h.Get(headerLetter), 10, 64)
		if err != nil || letter <= left || letter > known.Sequence {
			continue
		}
		pos, err := event.ParsePosition(h.Get(event.HeaderPos))
		if err != nil {
			continue
		}
		reason, detail, _ := strings.Cut(h.Get(event.HeaderReason), ": ")
		found = append(found, marker{letter, pos, strings.TrimSpace(h.Get(event.HeaderID)), event.Poison{Reason: event.Reason(reason), Detail: detail}})
	}
}

// settledLetter reports whether the dead letter of a position is there, or its event was published after all.
func (s *Session) settledLetter(ctx context.Context, pos event.Position) (bool, error) {
	subject := s.o.deadLetterPrefix() + "*." + pos.String()
	if m, err := s.letter(ctx, subject); err != nil || m != nil {
		return m != nil, err
	}
	fate, found, err := s.readFate(ctx, subject)
	return found && fate.State == FateStored, err
}

// found notes that the dead letter of a position is stored again.
func (b *letterbox) found(pos event.Position) {
	delete(b.missing, pos)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stands.Sequence = max(b.stands.Sequence, b.high)
	b.next = max(b.next, b.high)
	if len(b.missing) == 0 {
		b.keep = nil
	}
}

// stillMissing fails at the first event behind those that Postgres was to send again, when not all came.
func (s *Session) stillMissing(ev *event.Event) error {
	b := &s.letters
	var ids []string
	for pos := range b.missing {
		ids = append(ids, pos.String())
	}
	slices.Sort(ids)
	b.missing = nil
	if b.tolerant {
		s.o.Log.Warn("dead letters stay missing: Postgres did not send their events again", "dead_letters", s.o.DeadLetters, "positions", strings.Join(someOf(ids), ","))
		b.mu.Lock()
		b.keep = nil
		b.mu.Unlock()
		return nil
	}
	return event.Fail(event.Lost, "restore the dead-letter stream, or go on without them with --accept-gap",
		"dead letters are missing in stream %q, and Postgres did not send their events at %s again before %s", s.o.DeadLetters, strings.Join(someOf(ids), ", "), ev.Position)
}
