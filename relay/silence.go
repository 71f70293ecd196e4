package relay

import (
	"context"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/event"
)

// silence tells a quiet log from a session that is dead without a word: its
// server is stopped, or the network lost one direction of the connection.
//
// While nothing new comes and the loop waits for Postgres, it asks over another
// connection how far the server has sent the log. A walsender that gets on
// answers every status with its position, so when it was at one place the first
// time and at a later one the second, and nothing came between, that is lost on the
// way. One that is busy with a large transaction stands still and is left alone.
type silence struct {
	received event.LSN
	since    time.Time
	sent     event.LSN // what the server said last; 0 when it did not
	answer   chan sent // of the question under way; nil when there is none
}

// sent is an answer of Options.Sent.
type sent struct {
	lsn     event.LSN
	held    bool
	late    bool // no answer in time
	unknown bool // an error, which tells nothing of the session
}

// longestQuestion bounds the wait for an answer.
const longestQuestion = 5 * time.Second

// listen is of the ticker. It returns why the session is dead, or nil.
func (s *session) listen(now time.Time) error {
	q := &s.quiet
	at := event.LSN(s.received.Load())
	if Activity(s.activity.Load()) != Reading || at != q.received || q.since.IsZero() {
		*q = silence{received: at, since: now}
		return nil
	}
	if q.answer != nil {
		select {
		case a := <-q.answer:
			q.answer = nil
			return onSide(sourceSide, q.judge(a))
		default:
			return nil
		}
	}
	if now.Sub(q.since) < s.o.Silence {
		return nil
	}
	q.since = now
	q.answer = make(chan sent, 1)
	answer := q.answer
	s.wait.Go(func() { answer <- s.ask() })
	return nil
}

func (s *session) ask() sent {
	ctx, cancel := context.WithTimeout(s.ctx, min(s.o.Silence, longestQuestion))
	defer cancel()
	lsn, held, err := s.o.Sent(ctx)
	return sent{lsn: lsn, held: held, late: err != nil && ctx.Err() != nil, unknown: err != nil}
}

func (q *silence) judge(a sent) error {
	switch {
	case a.late:
		return fmt.Errorf("postgres neither sends anything nor answers a question")
	case a.unknown:
		q.sent = 0
		return nil
	case !a.held:
		return fmt.Errorf("postgres has given this session up")
	case q.sent != 0 && a.lsn > q.sent:
		return fmt.Errorf("postgres has sent the log up to %s, but nothing after %s arrives", a.lsn, q.received)
	}
	q.sent = a.lsn
	return nil
}
