package publisher

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/walrelay/walrelay/event"
)

// A shared stream has other writers. The server cannot chain its messages, so
// one is in flight at a time: order holds because nothing follows a message
// that is not known to be stored. The id of a message keeps it from being
// stored twice, for as long as the server remembers it.

// decideShared is decide for a shared stream. Nothing can be counted there:
// what the stream holds of ours is known by the messages that are left, and
// the server's memory of ids covers the rest.
func decideShared(f findings) (decision, error) {
	d := decision{base: f.lastSeq}
	c := f.checkpoint
	if c == nil {
		return f.unclaimed(d)
	}
	ours := f
	ours.lastSeq = c.Sequence
	if f.own != nil {
		ours.lastSeq = f.own.sequence
	}
	if d, settled, err := ours.elsewhere(d); settled {
		return d, err
	}
	if f.lost() {
		return f.lostOwn(d)
	}
	if err := f.unaccounted(); err != nil {
		return d, err
	}
	return f.afterOwn(d, c)
}

// unclaimed: a stream that this relay has not written to, or the bucket was lost.
func (f findings) unclaimed(d decision) (decision, error) {
	known := f.own != nil && f.origin.Contains(f.own.position)
	if f.lastSeq < f.acked && !f.acceptGap && (!known || !f.resends(f.own.position)) {
		return d, event.Fail(event.Lost, hintForgotten,
			"stream %q lost acked messages and its checkpoint: its last sequence is %d, %d was acked, and Postgres has dropped the WAL up to %s",
			f.stream, f.lastSeq, f.acked, f.origin.ConfirmedFlush)
	}
	switch {
	case known:
		if err := f.slotPassed(f.own.sequence, f.own.position); err != nil {
			return d, err
		}
		d.note("the stream has no checkpoint, resuming after the last event in it",
			"position", f.own.position.String(), "sequence", f.own.sequence)
		d.resume.After, d.base = f.own.position, f.own.sequence
	case f.lastSeq > 0:
		d.note("the stream has no checkpoint and holds no event of this slot, publishing all that Postgres sends", "sequence", f.lastSeq)
	}
	return d, nil
}

// had is the sequence at which an event of ours was last known to be; 0 when none was.
func (f findings) had() uint64 {
	had := f.acked
	if c := f.checkpoint; c != nil && !c.Position.IsZero() {
		had = max(had, c.Sequence)
	}
	return had
}

// lost reports whether acked messages of ours are not in the stream any more,
// though they did not leave it in the usual ways: others may have taken their
// sequences since. A message that is gone says nothing.
func (f findings) lost() bool {
	c, had := f.checkpoint, f.had()
	switch {
	case had == 0:
		return false
	case f.recreated(), f.lastSeq < had:
		return true
	case f.known == nil:
		return false
	}
	return !f.known.ours || had == c.Sequence && f.known.position.Compare(c.Position) > 0
}

// lostOwn: what was lost is published again if Postgres still sends it. earlier
// is the newest checkpoint whose message is where it says.
func (f findings) lostOwn(d decision) (decision, error) {
	d.lost = true
	had, recreated := f.had(), f.recreated()
	if len(f.earlier) > 0 && !recreated {
		e := &f.earlier[0]
		last := e.Position
		if f.own != nil && f.own.position.Compare(last) > 0 {
			last = f.own.position
		}
		if f.covers(e) || !last.IsZero() && f.resends(last) {
			d.note("the stream lost acked messages, publishing them again from the WAL",
				"after", last.String(), "last_sequence", f.lastSeq, "acked_sequence", had)
			return f.afterOwn(d, e)
		}
	}
	after := "the first one"
	if f.own != nil && !recreated {
		after = f.own.position.String()
	}
	if f.acceptGap {
		d.note("going on after a gap", "after", after, "last_sequence", f.lastSeq, "acked_sequence", had)
		if f.own != nil && f.origin.Contains(f.own.position) {
			d.resume.After, d.base = f.own.position, f.own.sequence
		}
		return d, nil
	}
	what := "lost acked messages"
	if recreated {
		what = "was created anew"
	}
	return d, event.Fail(event.Lost, hintForgotten,
		"stream %q %s: sequence %d is not the event any more that was acked there, and Postgres has dropped the WAL up to %s: events from %s up to there are missing",
		f.stream, what, had, f.origin.ConfirmedFlush, after)
}

// afterOwn resumes after the newest event of ours that the stream holds, or
// that the checkpoint c speaks of.
func (f findings) afterOwn(d decision, c *record) (decision, error) {
	d.resume.After, d.base = c.Position, min(c.Sequence, f.lastSeq)
	f.last = nil
	switch own := f.own; {
	case own != nil && own.position.Compare(c.Position) > 0:
		d.resume.After, d.base, f.last = own.position, own.sequence, &own.lastMessage
	case f.known != nil && f.had() == c.Sequence:
		f.last = f.known
	}
	if after := d.resume.After; !after.IsZero() && !f.origin.Contains(after) {
		if err := f.orphan(&d, after); err != nil {
			return d, err
		}
	}
	if f.gone {
		d.note("messages are gone from the stream, Nats-Msg-Id alone keeps an event from being stored twice that was stored after this one",
			"position", d.resume.After.String(), "sequence", d.base)
	}
	f.prove(&d, c)
	return d, nil
}

// parseShared reads the reply for the n-th message of a session, n being the
// number that its reply subject names. Each message names the stream. Any sequence behind that of the last
// event is good. duplicate says that the message at sequence has to be looked at.
func parseShared(n, last uint64, header, payload []byte) (sequence uint64, duplicate bool, sup *surprise) {
	_, sequence, ok := ackSequence(payload)
	if !ok {
		var a pubAck
		if json.Unmarshal(payload, &a) != nil || a.Error != nil || a.Sequence == 0 {
			if sup := parseReply(a.Stream, n, header, payload); sup != nil {
				return 0, false, sup
			}
			return 0, false, &surprise{seq: n, err: errors.New("reply without a sequence")}
		}
		if a.Duplicate {
			return a.Sequence, true, nil
		}
		sequence = a.Sequence
	}
	if sequence <= last {
		return 0, false, &surprise{seq: n, err: fmt.Errorf("stored as sequence %d, which is not behind %d of the event before", sequence, last)}
	}
	return sequence, false, nil
}

// places are the stream sequences of the last events of transactions: those
// that a checkpoint may ask for.
type places struct {
	mu    sync.Mutex
	queue []place
}

type place struct {
	event    uint64 // its number in the session
	sequence uint64
	commit   event.LSN
}

// placesLimit bounds how many places are kept. Every second one is forgotten
// then: an earlier place serves, too, only that the next session has more to read.
const placesLimit = 4096

func (p *places) add(a place) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.queue)
	if n > 0 && p.queue[n-1].commit == a.commit {
		p.queue[n-1] = a
		return
	}
	if n == placesLimit {
		for i := range n / 2 {
			p.queue[i] = p.queue[2*i+1]
		}
		p.queue = p.queue[:n/2]
	}
	p.queue = append(p.queue, a)
}

// upTo is the sequence of the last place among the first n events, 0 when there
// is none. What lies before it is forgotten.
func (p *places) upTo(n uint64) uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := len(p.queue)
	for i > 0 && p.queue[i-1].event > n {
		i--
	}
	if i == 0 {
		return 0
	}
	p.queue = p.queue[:copy(p.queue, p.queue[i-1:])]
	return p.queue[0].sequence
}
