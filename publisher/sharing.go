package publisher

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/walrelay/walrelay/event"
)

// errSharedBackfill: which rows are stored is told by reading the whole stream,
// and that they are all stored by its last sequence.
var errSharedBackfill = event.Fail(event.Usage, "give walrelay a stream of its own with --stream and leave out --shared-stream; to go on without the rows make the slot with walrelay slot create and start with --accept-gap",
	"rows of the table cannot be published to a shared stream")

// readShared reads what decideShared needs of a shared stream.
func (s *Session) readShared(ctx context.Context, f *findings) (err error) {
	c := f.checkpoint
	after, than := uint64(0), event.Position{}
	if c != nil && f.created.Equal(c.Created) {
		if err := s.awaitLeader(ctx, f); err != nil {
			return err
		}
		if had := f.had(); had > 0 && had <= f.lastSeq {
			if f.known, err = s.readLast(ctx, had); err != nil {
				return err
			}
		}
		after, than = c.Sequence, c.Position
		if c.Owner == ownerOf(f.origin) && f.lost() {
			after, than = 0, event.Position{}
			if f.earlier, err = s.provenCheckpoint(ctx, f); err != nil {
				return err
			}
			if len(f.earlier) > 0 {
				after, than = f.earlier[0].Sequence, f.earlier[0].Position
			}
		}
	}
	f.gone = f.lastSeq > after && (s.first > after+1 || s.deleted > 0)
	f.own, err = s.newestOwn(ctx, max(after, s.first-min(s.first, 1)), than)
	return err
}

// provenCheckpoint is the newest checkpoint of the history whose message is
// where it says, or that was written before there was any.
func (s *Session) provenCheckpoint(ctx context.Context, f *findings) ([]record, error) {
	all, err := s.earlierCheckpoints(ctx)
	if err != nil {
		return nil, err
	}
	for i, e := range all {
		if !e.Created.Equal(f.created) || e.Owner != f.checkpoint.Owner {
			continue
		}
		if e.Position.IsZero() {
			return all[i : i+1], nil
		}
		if e.Sequence > f.lastSeq {
			continue
		}
		m, err := s.readLast(ctx, e.Sequence)
		if err != nil {
			return nil, err
		}
		if m != nil && m.ours && m.position.Compare(e.Position) <= 0 {
			return all[i : i+1], nil
		}
	}
	return nil, nil
}

// newestOwn finds the message of ours with the highest position behind a
// sequence; nil when none has a higher one than than. It reads back from the
// last message on our subjects, and a whole chunk at least: a message that an
// earlier session left in a buffer may have been stored late, behind newer ones.
func (s *Session) newestOwn(ctx context.Context, after uint64, than event.Position) (*tailMessage, error) {
	last := uint64(0)
	for _, filter := range s.subjects() {
		m, err := s.fetch(ctx, s.o.Stream, bySubject{filter})
		if err != nil {
			return nil, fmt.Errorf("read last message of stream %q on %s: %w", s.o.Stream, filter, err)
		}
		if m != nil {
			last = max(last, m.Seq)
		}
	}
	for last > after {
		first := max(last-min(last, storedChunk), after) + 1
		tail, err := s.readTail(ctx, first, last)
		if err != nil {
			return nil, err
		}
		var newest *tailMessage
		for i := range tail {
			if m := &tail[i]; m.ours && m.position.Compare(than) > 0 && (newest == nil || m.position.Compare(newest.position) > 0) {
				newest = m
			}
		}
		if newest != nil {
			return newest, nil
		}
		last = first - 1
	}
	return nil, nil
}

// copied reports whether the message at seq has a position and was made for another
// stream: a shared one may have sources. One of a time when the stream was the
// relay's own names the message before it, and the stream not always.
func (s *Session) copied(seq uint64, h nats.Header) bool {
	if !s.o.Shared {
		return false
	}
	stream := h.Get(headerExpectedStream)
	return stream != s.o.Stream && (stream != "" || h.Get(headerExpectedLastSeq) != strconv.FormatUint(seq-1, 10))
}

// sharedReply is what read does with a reply on a shared stream. It asks for
// the original of a duplicate, while nothing else is in flight.
func (s *Session) sharedReply(n uint64, header, payload []byte) *surprise {
	sequence, duplicate, sup := parseShared(n, s.stored.Load(), header, payload)
	if sup != nil {
		return sup
	}
	if s.sent.Load() < n-s.lastSeq {
		return &surprise{seq: n, err: errors.New("acked before it was sent")}
	}
	pos := s.window[(n-s.lastSeq)%uint64(len(s.window))].position
	if duplicate {
		same, err := s.isOriginal(sequence, pos)
		if err != nil {
			return &surprise{seq: n, err: fmt.Errorf("read the original of a duplicate, sequence %d: %w", sequence, err)}
		}
		if !same {
			return &surprise{seq: n, duplicate: sequence, err: fmt.Errorf("taken for a duplicate of stream sequence %d, which is another message", sequence)}
		}
	}
	s.stored.Store(max(s.stored.Load(), sequence))
	s.places.add(place{event: n - s.lastSeq, sequence: s.stored.Load(), commit: pos.Commit})
	return nil
}

// isOriginal reports whether the message with that sequence is the event at pos.
// One that is gone from the stream is taken for it if an earlier session can
// have stored it: behind the event that this session resumed after, and before
// it began. Else parking an event that is stored is better than losing one.
func (s *Session) isOriginal(sequence uint64, pos event.Position) (bool, error) {
	m, err := s.fetch(s.life, s.o.Stream, bySequence{sequence})
	if err != nil {
		return false, err
	}
	if m == nil {
		return sequence > s.behind && sequence <= s.lastSeq, nil
	}
	own := s.messageOf(m)
	return own.ours && own.position == pos, nil
}
