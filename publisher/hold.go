package publisher

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

const (
	// maxHeld bounds the aggregates that are remembered. About others the
	// dead-letter stream is asked, which is slow and still right.
	maxHeld = 1 << 16
	// maxLoaded bounds the dead letters whose subjects are read at once: the
	// server takes seconds for a hundred thousand.
	maxLoaded = 10_000
)

// hold knows which aggregates have dead letters, so that what follows in them
// is parked, too. The dead-letter stream is the only record of it: the second
// last token of a dead letter's subject is the aggregate's key. An aggregate is
// released as soon as none of its dead letters is left there.
type hold struct {
	on   bool
	held map[aggregateKey]struct{} // those with dead letters, as far as is known
	free map[aggregateKey]struct{} // those without: nobody but this session adds any
	more bool                      // there may be others with dead letters
}

// aggregateKey tells aggregates apart whatever their type and id hold.
type aggregateKey [16]byte

// noAggregate stands for the key in the dead letter of an event that belongs to no aggregate.
const noAggregate = "-"

func (k aggregateKey) String() string { return hex.EncodeToString(k[:]) }

// keyOf is false for an event without an aggregate's id. The table is no part
// of the key: the events of an aggregate may come by several ways.
func keyOf(ev *event.Event) (k aggregateKey, ok bool) {
	if len(ev.AggregateID) == 0 {
		return k, false
	}
	h := sha256.New()
	fmt.Fprintf(h, "%d:", len(ev.AggregateType)) // or a type's end could be an id's beginning
	h.Write(ev.AggregateType)
	h.Write(ev.AggregateID)
	copy(k[:], h.Sum(nil))
	return k, true
}

// deadLetterSubject is one of its own for each position.
func (o *Options) deadLetterSubject(ev *event.Event) string {
	key := noAggregate
	if k, ok := keyOf(ev); ok {
		key = k.String()
	}
	return o.deadLetterPrefix() + key + "." + ev.Position.String()
}

// add notes that ev has a dead letter.
func (h *hold) add(ev *event.Event) {
	k, ok := keyOf(ev)
	if !h.on || !ok {
		return
	}
	delete(h.free, k)
	if len(h.held) < maxHeld {
		h.held[k] = struct{}{}
	} else {
		h.more = true
	}
}

// release notes that an aggregate has no dead letters.
func (h *hold) release(k aggregateKey) {
	delete(h.held, k)
	if !h.more {
		return
	}
	if len(h.free) >= maxHeld {
		clear(h.free)
	}
	h.free[k] = struct{}{}
}

// loadHeld reads which aggregates have dead letters, unless they are too many.
func (s *Session) loadHeld(ctx context.Context) error {
	s.hold = hold{on: s.o.Hold}
	if !s.o.Hold {
		return nil
	}
	s.hold.held, s.hold.free = map[aggregateKey]struct{}{}, map[aggregateKey]struct{}{}
	st, err := s.js.Stream(ctx, s.o.DeadLetters)
	if err != nil {
		return streamError(s.o.DeadLetters, err)
	}
	state := st.CachedInfo().State
	if state.Msgs == 0 {
		return nil
	}
	if state.NumSubjects > maxLoaded {
		s.hold.more = true
		s.warn(true, "many dead letters: their stream is asked about each aggregate", "dead_letters", s.o.DeadLetters, "messages", state.Msgs)
		return nil
	}
	info, err := st.Info(ctx, jetstream.WithSubjectFilter(s.o.deadLetterPrefix()+">"))
	if err != nil {
		return fmt.Errorf("read subjects of stream %q: %w", s.o.DeadLetters, err)
	}
	for subject := range info.State.Subjects {
		token, _, _ := strings.Cut(strings.TrimPrefix(subject, s.o.deadLetterPrefix()), ".")
		var k aggregateKey
		if b, err := hex.DecodeString(token); err == nil && len(b) == len(k) {
			copy(k[:], b)
			s.hold.held[k] = struct{}{}
		}
	}
	if n := len(s.hold.held); n > 0 {
		s.o.Log.Info("what follows in aggregates with dead letters is parked", "aggregates", n, "dead_letters", s.o.DeadLetters)
	}
	return nil
}

// heldBack says why ev has to wait for the dead letters of its aggregate, nil
// when it has not. It asks the stream only about an aggregate that has had some,
// or may have.
func (s *Session) heldBack(ev *event.Event) (*event.Poison, error) {
	h := &s.hold
	if !h.on || len(h.held) == 0 && !h.more {
		return nil, nil
	}
	k, ok := keyOf(ev)
	if !ok || ev.Replay != nil && letterAggregate(ev.Replay.Letter) == k.String() {
		return nil, nil // of a dead letter Redeliver has looked whether it is the oldest
	}
	if _, free := h.free[k]; free {
		return nil, nil
	}
	if _, held := h.held[k]; !held && !h.more {
		return nil, nil
	}
	m, err := s.fetch(context.Background(), s.o.DeadLetters, bySubject{s.o.deadLetterPrefix() + k.String() + ".*"})
	if err != nil {
		return nil, fmt.Errorf("look for dead letters in stream %q: %w", s.o.DeadLetters, err)
	}
	if m == nil {
		h.release(k)
		return nil, nil
	}
	return &event.Poison{Reason: event.ReasonAggregate, Detail: "an earlier event of its aggregate is parked"}, nil
}
