package publisher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Parked are the events that have a dead letter, by table and id.
type Parked struct {
	set map[parkedKey]struct{}
}

type parkedKey struct{ table, id string }

// Len is their number.
func (p *Parked) Len() int { return len(p.set) }

// Has reports whether an event of a table, as schema.table, has a dead letter; a nil
// id is NULL. What a header cannot hold of an id is left out of the comparison, so
// that of two ids that differ there only both are found.
func (p *Parked) Has(table string, id []byte) bool {
	_, ok := p.set[parkedKey{strings.TrimSpace(textOf([]byte(table))), strings.TrimSpace(excerpt(id))}]
	return ok
}

// Parked reads the dead letters that there are when it is called. It blocks for
// as long as the reading takes, and keeps their ids in memory.
func (p *Publisher) Parked(ctx context.Context) (*Parked, error) {
	s, err := p.look(ctx)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	defer s.nc.Close()
	found := &Parked{set: map[parkedKey]struct{}{}}
	last, err := s.lastLetter(ctx)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	if last == 0 {
		return found, nil
	}
	fail := func(err error) (*Parked, error) {
		return nil, p.classifyConnect(fmt.Errorf("read dead letters of stream %q: %w", p.o.DeadLetters, err))
	}
	cons, err := s.js.OrderedConsumer(ctx, p.o.DeadLetters, jetstream.OrderedConsumerConfig{HeadersOnly: true, InactiveThreshold: time.Minute})
	if err != nil {
		return fail(err)
	}
	it, err := cons.Messages(jetstream.PullMaxMessages(storedAtOnce))
	if err != nil {
		return fail(err)
	}
	defer it.Stop()
	// Up to the last one that the leader has: the consumer may be on a replica that lags.
	for seq := uint64(0); seq < last; {
		next, cancel := context.WithTimeout(ctx, storedPatience)
		m, err := it.Next(jetstream.NextContext(next))
		cancel()
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			// The last ones may have been removed meanwhile.
			if now, err := s.lastLetter(ctx); err == nil && now <= seq {
				return found, nil
			}
		}
		if err != nil {
			return fail(err)
		}
		meta, err := m.Metadata()
		if err != nil {
			return fail(err)
		}
		seq = meta.Sequence.Stream
		h := m.Headers()
		found.set[parkedKey{strings.TrimSpace(h.Get(event.HeaderTable)), strings.TrimSpace(h.Get(event.HeaderID))}] = struct{}{}
	}
	return found, nil
}

// lastLetter is the sequence of the newest dead letter, 0 when there is none.
func (s *Session) lastLetter(ctx context.Context) (uint64, error) {
	m, err := s.fetch(ctx, s.o.DeadLetters, bySubject{s.o.deadLetterPrefix() + ">"})
	if noStream(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read dead letters of stream %q: %w", s.o.DeadLetters, err)
	}
	if m == nil {
		return 0, nil
	}
	return m.Seq, nil
}
