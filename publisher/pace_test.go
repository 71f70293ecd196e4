package publisher

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// broker is a peer by script: it stores one message after the other, each in
// its own time, and answers over a link of its own length.
type broker struct {
	link atomic.Int64 // one way, a time.Duration
	each atomic.Int64 // to store a message, likewise
	done sync.WaitGroup
}

func newBroker(link, each time.Duration) *broker {
	b := &broker{}
	b.link.Store(int64(link))
	b.each.Store(int64(each))
	return b
}

// answer is what the broker sends, and when.
type answer struct {
	text string
	due  time.Time
}

// serve answers what comes on conn, in a bubble's time.
func (b *broker) serve(conn net.Conn) {
	answers := make(chan answer, 1<<16)
	defer b.done.Wait()
	defer close(answers)
	b.done.Go(func() {
		for a := range answers {
			if d := time.Until(a.due); d > 0 {
				<-time.After(d)
			}
			if _, err := io.WriteString(conn, a.text); err != nil {
				return
			}
		}
	})
	var busy time.Time // until when the broker has to do
	var rest []byte
	buf := make([]byte, 1<<16)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		rest = append(rest, buf[:n]...)
		for {
			line, after, ok := bytes.Cut(rest, crlf)
			if !ok {
				break
			}
			f := bytes.Fields(line) // HPUB subject reply header size
			size, err := strconv.Atoi(string(f[4]))
			if err != nil {
				panic(err)
			}
			if len(after) < size+2 {
				break
			}
			link := time.Duration(b.link.Load())
			if arrives := time.Now().Add(link); busy.Before(arrives) {
				busy = arrives
			}
			busy = busy.Add(time.Duration(b.each.Load()))
			reply := string(f[2])
			ack := `{"stream":"orders","seq":` + reply[strings.LastIndexByte(reply, '.')+1:] + "}"
			answers <- answer{"MSG " + reply + " 1 " + strconv.Itoa(len(ack)) + "\r\n" + ack + "\r\n", busy.Add(link)}
			rest = after[size+2:]
		}
	}
}

// paced runs a session against b for a while, as fast as its window lets it,
// and returns the window and how many events were stored a second in the second half.
func paced(t *testing.T, b *broker, window int, lasts time.Duration) (limit uint64, rate float64) {
	s, end := against(t, b, window)
	defer end()
	var half, stored uint64
	start := time.Now()
	for n := 1; time.Since(start) < lasts; n++ {
		s.add1(t, n)
		if time.Since(start) >= lasts/2 && half == 0 {
			half = s.acked.Load()
		}
	}
	stored = s.acked.Load() - half
	return s.pace.limit.Load(), float64(stored) / (lasts / 2).Seconds()
}

func (s *Session) add1(t *testing.T, n int) {
	t.Helper()
	ev := numbered("outbox", 1)
	ev.Position = event.Position{Timeline: 1, Commit: event.LSN(n), Change: event.LSN(n)}
	err := s.Append(ev)
	if err == nil && s.Full() {
		err = s.WaitRoom(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
}

// against is a session with b at the other end of its connection.
func against(t *testing.T, b *broker, window int) (*Session, func()) {
	mine, its := net.Pipe()
	served := make(chan struct{})
	go func() {
		defer close(served)
		b.serve(its)
	}()
	s := deaf(window)
	s.w.conn = mine
	s.w.gather.w = s.w
	s.w.r = bufio.NewReaderSize(&s.w.gather, readBufferSize)
	s.replyPrefix = len("_INBOX.0123456789012345678901") + 1
	s.mode = ModeChain
	s.pace.init(uint64(window), s.mode)
	s.reading.Go(s.read)
	return s, func() {
		s.closing.Store(true)
		its.Close()
		mine.Close()
		s.reading.Wait()
		<-served
	}
}

func TestWindowFitsTheBroker(t *testing.T) {
	for _, c := range []struct {
		name        string
		b           *broker
		most        int
		lasts       time.Duration
		least, max  uint64  // the window at the end
		wants, upTo float64 // events a second
	}{
		{"slow disk", newBroker(0, 10*time.Millisecond), 2048, 8 * time.Second, windowLeast, 40, 97, 103},
		{"syncs each message", newBroker(0, 300*time.Microsecond), 2048, 4 * time.Second, 40, 200, 3200, 3400},
		{"fast", newBroker(0, 5*time.Microsecond), 2048, 300 * time.Millisecond, 2048, 2048, 195_000, 204_000},
		{"fast, small limit", newBroker(0, 5*time.Microsecond), 100, 100 * time.Millisecond, 100, 100, 100_000, 204_000},
		{"long way", newBroker(25*time.Millisecond, 30*time.Microsecond), 4096, 1500 * time.Millisecond, 2000, 4096, 32_000, 34_000},
		{"long way, limited by the window", newBroker(25*time.Millisecond, 5*time.Microsecond), 2048, 1500 * time.Millisecond, 2048, 2048, 33_000, 41_000},
		{"long way, slow", newBroker(25*time.Millisecond, 10*time.Millisecond), 2048, 8 * time.Second, windowLeast, 50, 97, 103},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				limit, rate := paced(t, c.b, c.most, c.lasts)
				t.Logf("window %d, %.0f events/s", limit, rate)
				if limit < c.least || limit > c.max {
					t.Errorf("window %d, want %d to %d", limit, c.least, c.max)
				}
				if rate < c.wants || rate > c.upTo {
					t.Errorf("%.0f events/s, want %.0f to %.0f", rate, c.wants, c.upTo)
				}
			})
		})
	}
}

// A link may become a longer one, and a broker slower or faster, while events flow.
func TestWindowFollows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBroker(0, 100*time.Microsecond)
		s, end := against(t, b, 2048)
		defer end()
		n := 0
		run := func(lasts time.Duration) (uint64, float64) {
			before, start := s.acked.Load(), time.Now()
			for time.Since(start) < lasts {
				n++
				s.add1(t, n)
			}
			return s.pace.limit.Load(), float64(s.acked.Load()-before) / lasts.Seconds()
		}
		limit, rate := run(time.Second)
		if limit < 200 || limit > 600 || rate < 9900 {
			t.Errorf("at 10,000 a second: window %d, %.0f events/s", limit, rate)
		}
		b.each.Store(int64(5 * time.Millisecond))
		run(5 * time.Second)
		if limit, rate = run(time.Second); limit > 32 || rate < 190 {
			t.Errorf("at 200 a second: window %d, %.0f events/s", limit, rate)
		}
		b.each.Store(int64(100 * time.Microsecond))
		run(time.Second)
		if limit, rate = run(500 * time.Millisecond); limit < 200 || rate < 9900 {
			t.Errorf("at 10,000 a second again: window %d, %.0f events/s", limit, rate)
		}
		b.link.Store(int64(25 * time.Millisecond))
		run(13 * time.Second) // more than a least round trip is believed
		if limit, rate = run(time.Second); limit < 500 || rate < 9000 {
			t.Errorf("at 10,000 a second behind a long link: window %d, %.0f events/s", limit, rate)
		}
	})
}

// Without anything more to send, a low rate says nothing about the broker.
func TestWindowIsNotShrunkByLittleToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, end := against(t, newBroker(0, 5*time.Microsecond), 2048)
		defer end()
		n := 0
		for range 20_000 {
			n++
			s.add1(t, n)
		}
		was := s.pace.limit.Load()
		for range 200 {
			n++
			s.add1(t, n)
			if err := s.Flush(); err != nil {
				t.Fatal(err)
			}
			<-time.After(100 * time.Millisecond)
		}
		if got := s.pace.limit.Load(); got != was || got != 2048 {
			t.Errorf("window %d, was %d", got, was)
		}
	})
}

// On real servers, over a link that takes 50 ms there and back.
func TestWindowOverALongLink(t *testing.T) {
	const way = 25 * time.Millisecond
	n := harness.RunNATS(t, harness.NATSOptions{})
	link := harness.RunProxy(t, n.Addr())
	o := optionsFor(n, "long")
	o.URL = "nats://" + link.Addr()
	p := newPublisher(t, o)
	link.Delay(way)
	r := begin(t, p)
	events := numberedLog(o.Stream, 40_000)
	began := time.Now()
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	rate := float64(len(events)) / time.Since(began).Seconds()
	window := r.pace.limit.Load()
	r.Close()
	if err := link.Heal(); err != nil {
		t.Fatal(err)
	}
	same(t, stored(t, n, o.Stream), events)
	// Fewer than what was stored in a round trip, and the window would be what limits the rate.
	if trip := rate * (2 * way).Seconds(); float64(window) < trip || window <= windowLeast {
		t.Errorf("window %d, of %.0f events a second %.0f fit a round trip", window, rate, trip)
	}
}
