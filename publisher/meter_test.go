package publisher

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// told is a Meter that remembers.
type told struct {
	runs     []run3
	rests    int
	failures []string
}

type run3 struct {
	n                      uint64
	sinceCommit, sinceSend time.Duration
}

func (m *told) Acked(n uint64, sinceCommit, sinceSend time.Duration) {
	m.runs = append(m.runs, run3{n, sinceCommit, sinceSend})
}

func (m *told) Rest() { m.rests++ }

func (m *told) Failed(reason string, duplicate bool) {
	m.failures = append(m.failures, fmt.Sprint(reason, duplicate))
}

// metered is a session without a connection.
func metered(m Meter, window int) *Session {
	p := &Publisher{o: Options{Window: window, Stream: "S"}}
	s := &Session{p: p, o: &p.o, window: make([]inFlight, window+1), frames: newFramer("S", "_INBOX.x", true)}
	if m != nil {
		s.flight = newFlight(m, window+1)
		p.session.Store(s)
	}
	return s
}

func (s *Session) add(n int, commit time.Time) {
	ev := &event.Event{CommitTime: commit}
	for range n {
		s.append(ev, nil, 0)
		s.out = s.out[:0]
	}
}

func TestMeterTellsTransactionsThatWereSentTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pass := func(d time.Duration) { <-time.After(d) }
		m := &told{}
		s := metered(m, 8)
		first := time.Now()
		s.add(2, first)
		pass(time.Second)
		second := time.Now()
		s.add(1, second)
		s.sending()
		if n, oldest := s.p.InFlight(); n != 3 || !oldest.Equal(first) {
			t.Errorf("in flight: %d since %v, want 3 since %v", n, oldest, first)
		}
		pass(time.Second)
		s.add(2, second)
		s.add(1, time.Time{}) // a message outside of a transaction
		s.sending()
		s.sending() // nothing new
		pass(time.Second)

		s.settle(2)
		if n, oldest := s.p.InFlight(); n != 4 || !oldest.Equal(second) {
			t.Errorf("in flight: %d since %v, want 4 since %v", n, oldest, second)
		}
		s.settle(2) // nothing new
		s.settle(6)
		want := []run3{
			{2, 3 * time.Second, 2 * time.Second},
			{1, 2 * time.Second, 2 * time.Second},
			{2, 2 * time.Second, time.Second},
			{1, -1, time.Second},
		}
		if !slices.Equal(m.runs, want) || m.rests != 2 {
			t.Errorf("got %v, %d rests, want %v", m.runs, m.rests, want)
		}
		if n, oldest := s.p.InFlight(); n != 0 || !oldest.IsZero() {
			t.Errorf("in flight: %d since %v, want none", n, oldest)
		}

		// Round the ring, with a marker that is no event, and a clock that is behind.
		m.runs = nil
		for range 20 {
			s.add(1, time.Now().Add(time.Minute))
			s.flight.marker = s.appended + 1
			s.add(1, time.Time{})
			s.add(2, time.Now())
			s.sending()
			pass(time.Millisecond)
			s.settle(s.appended)
		}
		want = nil
		for range 20 {
			want = append(want, run3{1, 0, time.Millisecond}, run3{2, time.Millisecond, time.Millisecond})
		}
		if !slices.Equal(m.runs, want) {
			t.Errorf("got %v, want %v", m.runs, want)
		}
	})
}

// What is in flight is never told to be older than it is, whatever the two goroutines do.
func TestInFlightFromAnotherGoroutine(t *testing.T) {
	s := metered(&told{}, 64)
	began := time.Now()
	stop := make(chan struct{})
	acks := in(func() {
		for n := uint64(0); ; {
			if sent := s.sent.Load(); sent > n {
				n++
				s.settle(n)
				continue
			}
			select {
			case <-stop:
				return
			default:
				runtime.Gosched()
			}
		}
	})
	asks := in(func() {
		for {
			n, oldest := s.p.InFlight()
			if n > 64 || !oldest.IsZero() && oldest.Before(began) {
				t.Errorf("in flight: %d since %v", n, oldest)
			}
			select {
			case <-stop:
				return
			default:
				runtime.Gosched()
			}
		}
	})
	for range 2_000 {
		for s.appended-s.acked.Load() > 60 {
			runtime.Gosched()
		}
		s.add(3, time.Now())
		s.sending()
	}
	close(stop)
	acks()
	asks()
	if n, oldest := s.p.InFlight(); n != 0 || !oldest.IsZero() {
		t.Errorf("in flight at the end: %d since %v", n, oldest)
	}
}

func in(f func()) (wait func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	return func() { <-done }
}

func TestFailureReasons(t *testing.T) {
	refused := func(code int) error { return &surprise{err: &apiError{ErrCode: code}} }
	for _, c := range []struct {
		err  error
		want string
	}{
		{event.Fail(event.Transient, "", "%w for 2s", errOverdue), "ack_timeout"},
		{fmt.Errorf("connection to NATS: %w", io.EOF), "connection"},
		{&surprise{duplicate: 7, err: errors.New("taken for a duplicate")}, "duplicate"},
		{parseReply("S", 7, nil, []byte(`{"stream":"S","seq":9}`)), "foreign_writer"},
		{parseReply("S", 7, nil, []byte(`{"stream":"S", "seq":9, "x":1}`)), "foreign_writer"},
		{parseReply("S", 7, []byte("NATS/1.0 503\r\n\r\n"), nil), "no_responders"},
		{parseReply("S", 7, nil, []byte(`?`)), "unexpected_reply"},
		{&surprise{err: protocolError(`-ERR 'Permissions Violation for Publish to "x"'`)}, "not_authorized"},
		{refused(codeWrongLastSeq), "wrong_sequence"},
		{refused(codeStoreFailed), "store_failed"},
		{refused(codeInsufficient), "store_failed"},
		{refused(codeAccountFull), "store_failed"},
		{refused(codeNotLeader), "not_available"},
		{refused(codeTooLarge), "refused"},
	} {
		if got := failureOf(c.err); got != c.want || !slices.Contains(Failures, got) {
			t.Errorf("%v: got %q, want %q", c.err, got, c.want)
		}
	}
}

// A real server: every event is told once, the marker of a parked one is not.
func TestMeterOnAServer(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	m := &told{}
	o := optionsFor(n, "meter")
	o.Meter = m
	p := newPublisher(t, o)
	events := numberedLog("meter", 3_000)
	events[700].Subject = []byte("elsewhere")
	r := begin(t, p)
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	r.Close()
	var sum uint64
	for _, run := range m.runs {
		if sum += run.n; run.sinceCommit < 0 || run.sinceSend <= 0 || run.sinceSend > time.Minute {
			t.Errorf("told %+v", run)
		}
	}
	if sum != 2_999 || m.rests == 0 || len(m.failures) > 0 {
		t.Errorf("told of %d events, %d rests, failures %v", sum, m.rests, m.failures)
	}
	if n, _ := p.InFlight(); n != 0 {
		t.Errorf("%d in flight after the end", n)
	}
}

// nowhere costs nothing.
type nowhere struct{ n uint64 }

func (m *nowhere) Acked(n uint64, _, _ time.Duration) { m.n += n }
func (m *nowhere) Rest()                              {}
func (m *nowhere) Failed(string, bool)                {}

// The way of an event through the window: append, send, ack. The difference
// between with and without is what a Meter costs, but for what it does itself.
func BenchmarkWindow(b *testing.B) {
	for _, batch := range []int{1, 16, 256} {
		for _, with := range []bool{false, true} {
			b.Run(fmt.Sprintf("batch=%d/meter=%t", batch, with), func(b *testing.B) {
				var m Meter
				if with {
					m = &nowhere{}
				}
				s := metered(m, 2048)
				ev := &event.Event{CommitTime: time.Now()}
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					ev.CommitTime = ev.CommitTime.Add(time.Microsecond)
					s.append(ev, nil, 0)
					if i%batch == batch-1 {
						s.out = s.out[:0]
						s.sending()
						s.settle(s.appended)
					}
				}
			})
		}
	}
}
