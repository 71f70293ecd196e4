package publisher

import (
	"errors"
	"sync"
	"time"
)

// Meter is told how publishing goes. Its methods return at once; Acked and Rest
// are called by the goroutine that reads acks.
type Meter interface {
	// Acked tells of n events in a row that were acked just now: how long after
	// their transaction's commit, by the clocks of Postgres and of this machine,
	// and how long after they were sent. sinceCommit is negative when there is
	// no commit. The markers of parked events are not among them.
	Acked(n uint64, sinceCommit, sinceSend time.Duration)

	// Rest says that no more acks are at hand. It follows Acked.
	Rest()

	// Failed tells why a session ended, by one of Failures, and whether that
	// was because the server took an event for one that it has. It is called
	// once a failed session, from any goroutine.
	Failed(reason string, duplicate bool)
}

// What Meter.Failed is told.
const (
	failedAckTimeout    = "ack_timeout"      // no ack came in time
	failedConnection    = "connection"       // the connection ended
	failedDuplicate     = "duplicate"        // an event was taken for one that is stored
	failedForeignWriter = "foreign_writer"   // stored at the place of another message
	failedNoResponders  = "no_responders"    // no stream answers for the subject
	failedNotAuthorized = "not_authorized"   // publishing to the subject is not permitted
	failedRefused       = "refused"          // for any other reason
	failedSequence      = "wrong_sequence"   // the stream has another last sequence than expected
	failedStore         = "store_failed"     // stream or server are full, or cannot store
	failedUnavailable   = "not_available"    // the cluster has no leader or quorum
	failedUnexpected    = "unexpected_reply" // not what a server answers
)

// Failures are the reasons that a Meter is told.
var Failures = []string{
	failedAckTimeout, failedConnection, failedDuplicate, failedForeignWriter, failedNoResponders, failedNotAuthorized,
	failedRefused, failedSequence, failedStore, failedUnavailable, failedUnexpected,
}

// failureOf is the reason for which a session ended with err.
func failureOf(err error) string {
	var sup *surprise
	var api *apiError
	var proto protocolError
	switch {
	case errors.Is(err, errOverdue):
		return failedAckTimeout
	case errors.As(err, &proto) && proto.permissions():
		return failedNotAuthorized
	case !errors.As(err, &sup):
		return failedConnection
	case sup.duplicate != 0:
		return failedDuplicate
	case errors.Is(err, errForeignWriter):
		return failedForeignWriter
	case errors.Is(err, errNoResponders):
		return failedNoResponders
	case !errors.As(err, &api):
		return failedUnexpected
	}
	if full(api.ErrCode) {
		return failedStore
	}
	switch api.ErrCode {
	case codeWrongLastSeq, codeWrongLastMsgID:
		return failedSequence
	case codeUnavailable, codeNotLeader, codeDuplicateAsync:
		return failedUnavailable
	}
	return failedRefused
}

// flight keeps the times of what is in flight, for a Meter.
//
// The appending goroutine writes a slot of sends before it adds to
// Session.sent, and the goroutine that reads acks reads it after it has seen
// that. A slot is used again only when what it stands for is acked: there are
// as many slots as the window has, and a send is of one event at least.
type flight struct {
	meter Meter
	began time.Time

	sends []send // ring
	next  int    // slot of the next send

	// Number of the last marker. It is written when everything is acked.
	marker uint64

	at int // slot of the send that the next ack belongs to; of the goroutine that reads acks

	front front
}

// send is what was handed to the connection at one time.
type send struct {
	last uint64        // number of its last event
	at   time.Duration // since flight.began
}

// front is the first event that waits for its ack.
type front struct {
	mu    sync.Mutex
	event uint64 // its number
	since time.Time
}

func (f *front) set(event uint64, since time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if event > f.event {
		f.event, f.since = event, since
	}
}

func newFlight(m Meter, window int) *flight {
	return &flight{meter: m, began: time.Now(), sends: make([]send, window)}
}

func (f *flight) failed(err error) {
	reason := failureOf(err)
	f.meter.Failed(reason, reason == failedDuplicate)
}

// sending counts everything appended as handed to the connection. It comes
// before the write, so that Tick sees one that blocks.
func (s *Session) sending() {
	before := s.sent.Load()
	s.pace.begin(before, s.appended, s.acked.Load())
	f := s.flight
	if f == nil || before == s.appended {
		s.sent.Store(s.appended)
		return
	}
	now := time.Now()
	f.sends[f.next] = send{s.appended, now.Sub(f.began)}
	if f.next++; f.next == len(f.sends) {
		f.next = 0
	}
	s.sent.Store(s.appended)
	// Either this goroutine sees that nothing is in flight before, or the other
	// one, when it has stored that, sees what is sent now.
	if s.acked.Load() >= before {
		f.front.set(before+1, s.waitingSince(before+1, now))
	}
}

// waitingSince is when the n-th event was committed, or now when it has no commit.
func (s *Session) waitingSince(n uint64, now time.Time) time.Time {
	if c := s.window[n%uint64(len(s.window))].commit; c != 0 {
		return time.Unix(0, c)
	}
	return now
}

// settle publishes that the first n events are acked. It belongs to the
// goroutine that reads acks.
func (s *Session) settle(n uint64) {
	before := s.acked.Load()
	f := s.flight
	if f == nil || n == before || s.sent.Load() < n {
		s.acked.Store(n)
		return
	}
	now := time.Now()
	s.measure(before, n, now)
	s.acked.Store(n)
	if s.sent.Load() > n {
		f.front.set(n+1, s.waitingSince(n+1, now))
	}
}

// measure tells the meter of the events after from, up to to. Those of a
// transaction that were sent together are told together.
func (s *Session) measure(from, to uint64, now time.Time) {
	f := s.flight
	wall, since := now.UnixNano(), now.Sub(f.began)
	var run uint64
	var commit int64
	tell := func() {
		if run == 0 {
			return
		}
		sinceCommit := time.Duration(-1)
		if commit != 0 {
			sinceCommit = max(time.Duration(wall-commit), 0)
		}
		f.meter.Acked(run, sinceCommit, since-f.sends[f.at].at)
		run = 0
	}
	slot := (from + 1) % uint64(len(s.window))
	for n := from + 1; n <= to; n++ {
		for f.sends[f.at].last < n {
			tell()
			if f.at++; f.at == len(f.sends) {
				f.at = 0
			}
		}
		if c := s.window[slot].commit; c != commit {
			tell()
			commit = c
		}
		if n != f.marker {
			run++
		}
		if slot++; slot == uint64(len(s.window)) {
			slot = 0
		}
	}
	tell()
	f.meter.Rest()
}

// InFlight is the number of events that wait for their acks, and when the first
// of them was committed; the time is zero when there is none. It counts only
// with a Meter, and may be called from any goroutine.
func (p *Publisher) InFlight() (events uint64, oldest time.Time) {
	s := p.session.Load()
	if s == nil {
		return 0, time.Time{}
	}
	f := &s.flight.front
	f.mu.Lock()
	defer f.mu.Unlock()
	acked := s.acked.Load() // before sent, which is never less
	if f.event > acked {
		oldest = f.since
	}
	return s.sent.Load() - acked, oldest
}
