package publisher

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// storedPatience is how long the next message of the stream may take to arrive.
const storedPatience = 10 * time.Second

// storedAtOnce is how many messages are asked for at a time.
const storedAtOnce = 4096

// Stored reads the headers of the messages that the stream held when the session
// resumed and tells, in order, each event's sequence, Nats-Msg-Id, id and, where
// it is parked, table. Only the last limit messages are read, all when it is 0. It returns the
// sequence of the first one that was read, 0 without one; the stream's last sequence when
// the backfill began; and how many messages are gone of those stored since. It blocks for as long as the reading takes.
func (s *Session) Stored(ctx context.Context, limit uint64, tell func(seq uint64, msgID, id, table string)) (first, from, gone uint64, err error) {
	last := s.lastSeq
	from = s.current.BackfillFrom
	if last == 0 {
		return 0, from, 0, nil
	}
	st, err := s.js.Stream(ctx, s.o.Stream)
	if err != nil {
		return 0, from, 0, streamError(s.o.Stream, err)
	}
	first = max(st.CachedInfo().State.FirstSeq, 1)
	if limit > 0 && last > limit {
		first = max(first, last-limit+1)
	}
	if first > last || st.CachedInfo().State.Msgs == 0 {
		return 0, from, last - from, nil
	}
	// An end of the stream that was deleted never arrives.
	over := func(uint64) bool {
		tail, err := s.readLast(ctx, last)
		return err == nil && tail == nil
	}
	var counted uint64
	read := false
	for m, err := range s.headersFrom(ctx, s.o.Stream, first, over) {
		if err != nil {
			return 0, from, 0, fmt.Errorf("read the messages of stream %q: %w", s.o.Stream, err)
		}
		seq := m.seq
		if seq > last {
			break
		}
		if !read {
			first, read = seq, true
		}
		if seq > from {
			counted++
		}
		s.tellStored(seq, m.subject, m.header, tell)
		if seq == last {
			break
		}
	}
	if limit > 0 && last > limit {
		return first, from, 0, nil // most of the stream was left out, so nothing can be counted
	}
	return first, from, last - from - counted, nil
}

// headed is a message without its body.
type headed struct {
	seq     uint64
	subject string
	header  nats.Header
}

// headersFrom yields the messages of a stream from a sequence on, without
// bodies, and those that are stored meanwhile. When none comes for storedPatience it asks
// over, which is told the last sequence that came, and ends, or fails. An error is the last
// that is yielded.
func (s *Session) headersFrom(ctx context.Context, stream string, first uint64, over func(last uint64) bool) iter.Seq2[headed, error] {
	return func(yield func(headed, error) bool) {
		cons, err := s.js.OrderedConsumer(ctx, stream, jetstream.OrderedConsumerConfig{
			DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: first, HeadersOnly: true, InactiveThreshold: time.Minute,
		})
		if err != nil {
			yield(headed{}, err)
			return
		}
		it, err := cons.Messages(jetstream.PullMaxMessages(storedAtOnce))
		if err != nil {
			yield(headed{}, err)
			return
		}
		defer it.Stop()
		for last := uint64(0); ; {
			next, cancel := context.WithTimeout(ctx, storedPatience)
			m, err := it.Next(jetstream.NextContext(next))
			cancel()
			if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && over(last) {
				return
			}
			var meta *jetstream.MsgMetadata
			if err == nil {
				meta, err = m.Metadata()
			}
			if err != nil {
				yield(headed{}, err)
				return
			}
			last = meta.Sequence.Stream
			if !yield(headed{last, m.Subject(), m.Headers()}, nil) {
				return
			}
		}
	}
}

func (s *Session) tellStored(seq uint64, subject string, h nats.Header, tell func(seq uint64, msgID, id, table string)) {
	if h.Get(event.HeaderPos) == "" {
		return // of another client
	}
	if subject == s.o.markerSubject() {
		tell(seq, "", strings.TrimSpace(h.Get(event.HeaderID)), h.Get(event.HeaderTable))
		return
	}
	msgID, id := strings.TrimSpace(h.Get(headerMsgID)), strings.TrimSpace(h.Get(event.HeaderID))
	if run := h.Get(event.HeaderReplay); run != "" {
		// The event is stored, but its place in the stream says nothing of its row's.
		msgID, id = strings.TrimSuffix(msgID, ":r:"+run), ""
	}
	tell(seq, msgID, id, "")
}

// CompleteBackfill records that every row up to c is stored. It blocks until
// that is acked, and fails when another session has written the checkpoint.
func (s *Session) CompleteBackfill(ctx context.Context, c event.Checkpoint) error {
	r := s.current
	r.Sequence = s.base + c.Events
	r.Backfill = backfillDone
	r.Letters = s.letters.record(c.Events)
	if !r.Recovery { // which leaves out what it takes for published
		r.Since = &event.Mark{}
	}
	if !c.Position.IsZero() {
		r.Position, r.XID, r.CommitTime = c.Position, 0, time.Time{}
	}
	return s.writeCheckpoint(ctx, r)
}

// State is what a stream and its checkpoint say of a slot.
type State struct {
	Claimed     bool   // the checkpoint is one of the slot, by its name and database
	Interrupted bool   // a backfill or a recovery was begun and the slot not streamed since
	Recovery    bool   // it was a recovery
	Sequence    uint64 // of the stream's last message

	Position   event.Position // of the last event that is known to be stored
	LastID     string         // its id; "" when the message is gone
	Confirm    event.LSN      // of the checkpoint
	CommitTime time.Time      // of the checkpoint's transaction; zero when unknown
}

// Examine reads what the stream holds and says, without a session. It
// connects, blocks for a few round trips, and changes nothing. A stream or
// bucket that does not exist yet says nothing.
func (p *Publisher) Examine(ctx context.Context, slot, database string) (State, error) {
	s, err := p.look(ctx)
	if err != nil {
		return State{}, p.classifyConnect(err)
	}
	defer s.nc.Close()
	var state State
	if !s.exists() {
		return state, nil
	}
	var f findings
	c, err := s.readCheckpoint(ctx)
	if err != nil {
		return state, err
	}
	if err := s.readEnd(ctx, &f); err != nil {
		return state, err
	}
	state.Sequence = f.lastSeq
	if c != nil && c.Owner.Slot == slot && c.Owner.Database == database {
		state.Claimed, state.Interrupted, state.Recovery = true, c.Backfill != "", c.Recovery
		state.Position, state.Confirm, state.CommitTime = c.Position, c.Confirm, c.CommitTime
		if f.last != nil && f.last.ours {
			state.Position, state.LastID = f.last.position, f.last.id
			if f.last.replay {
				state.LastID = "" // its row is not the last one
			}
			if f.last.position != c.Position {
				state.CommitTime = time.Time{}
			}
		}
	}
	return state, nil
}
