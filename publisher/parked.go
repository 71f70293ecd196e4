package publisher

import (
	"context"
	"fmt"
	"strings"

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
	if err := s.trustLetters(ctx); err != nil {
		return nil, p.classifyConnect(err)
	}
	found := &Parked{set: map[parkedKey]struct{}{}}
	last, err := s.lastLetter(ctx)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	if last == 0 {
		return found, nil
	}
	// The last ones may have been removed meanwhile.
	over := func(seq uint64) bool {
		now, err := s.lastLetter(ctx)
		return err == nil && now <= seq
	}
	for m, err := range s.headersFrom(ctx, p.o.DeadLetters, 1, over) {
		if err != nil {
			return nil, p.classifyConnect(fmt.Errorf("read dead letters of stream %q: %w", p.o.DeadLetters, err))
		}
		found.set[parkedKey{strings.TrimSpace(m.header.Get(event.HeaderTable)), strings.TrimSpace(m.header.Get(event.HeaderID))}] = struct{}{}
		// Up to the last one that the leader has: the consumer may be on a replica that lags.
		if m.seq >= last {
			break
		}
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
