package publisher

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// broker is a peer by script: it stores one message after the other, each in
// its own time, or batches at a time, and answers over a link of its own length.
type broker struct {
	link  time.Duration // one way
	each  time.Duration // to store a message
	group int           // messages that are stored as fast as one

	done sync.WaitGroup
}

// serve answers what comes on conn, in a bubble's time.
func (b *broker) serve(conn net.Conn) {
	type answer struct {
		text string
		due  time.Time
	}
	answers := make(chan answer, 1<<16)
	defer b.done.Wait()
	defer close(answers)
	b.done.Go(func() {
		for a := range answers {
			<-time.After(time.Until(a.due))
			if _, err := io.WriteString(conn, a.text); err != nil {
				return
			}
		}
	})
	var busy time.Time // until when the broker has to do
	count := 0
	var rest []byte
	buf := make([]byte, 1<<20)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		rest = append(rest, buf[:n]...)
		for {
			line, after, ok := strings.Cut(string(rest), "\r\n")
			var subject, reply string
			var header, size int
			if ok {
				if _, err := fmt.Sscanf(line, "HPUB %s %s %d %d", &subject, &reply, &header, &size); err != nil {
					panic(line)
				}
			}
			if !ok || len(after) < size+2 {
				break
			}
			rest = []byte(after[size+2:])
			if arrives := time.Now().Add(b.link); busy.Before(arrives) {
				busy = arrives
			}
			if count++; count%max(b.group, 1) == 0 {
				busy = busy.Add(b.each)
			}
			ack := fmt.Sprintf(`{"stream":"orders","seq":%s}`, reply[strings.LastIndexByte(reply, '.')+1:])
			answers <- answer{fmt.Sprintf("MSG %s 1 %d\r\n%s\r\n", reply, len(ack), ack), busy.Add(b.link)}
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
		{"slow disk", &broker{each: 10 * time.Millisecond}, 2048, 8 * time.Second, windowLeast, 40, 97, 103},
		{"syncs each message", &broker{each: 300 * time.Microsecond}, 2048, 4 * time.Second, 40, 200, 3200, 3400},
		{"fast", &broker{each: 5 * time.Microsecond}, 2048, 300 * time.Millisecond, 2048, 2048, 195_000, 204_000},
		{"fast, small limit", &broker{each: 5 * time.Microsecond}, 100, 300 * time.Millisecond, 100, 100, 100_000, 204_000},
		{"long way", &broker{link: 25 * time.Millisecond, each: 30 * time.Microsecond}, 4096, 4 * time.Second, 2000, 4096, 32_000, 34_000},
		{"long way, limited by the window", &broker{link: 25 * time.Millisecond, each: 5 * time.Microsecond}, 2048, 4 * time.Second, 2048, 2048, 33_000, 41_000},
		{"long way, slow", &broker{link: 25 * time.Millisecond, each: 10 * time.Millisecond}, 2048, 8 * time.Second, windowLeast, 50, 97, 103},
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
		b := &broker{each: 100 * time.Microsecond}
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
		b.each = 5 * time.Millisecond
		run(5 * time.Second)
		if limit, rate = run(time.Second); limit > 32 || rate < 190 {
			t.Errorf("at 200 a second: window %d, %.0f events/s", limit, rate)
		}
		b.each = 100 * time.Microsecond
		run(time.Second)
		if limit, rate = run(500 * time.Millisecond); limit < 200 || rate < 9900 {
			t.Errorf("at 10,000 a second again: window %d, %.0f events/s", limit, rate)
		}
		b.link = 25 * time.Millisecond
		run(13 * time.Second) // more than a least round trip is believed
		if limit, rate = run(time.Second); limit < 500 || rate < 9000 {
			t.Errorf("at 10,000 a second behind a long link: window %d, %.0f events/s", limit, rate)
		}
	})
}

// Without anything more to send, a low rate says nothing about the broker.
func TestWindowIsNotShrunkByLittleToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, end := against(t, &broker{each: 5 * time.Microsecond}, 2048)
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
	n := harness.RunNATS(t, harness.NATSOptions{})
	link := harness.RunProxy(t, n.Addr())
	measure := func(stream string, fixed bool) (time.Duration, uint64) {
		o := optionsFor(n, stream)
		o.URL = "nats://" + link.Addr()
		p := newPublisher(t, o)
		link.Delay(25 * time.Millisecond)
		r := begin(t, p)
		if fixed {
			r.pace.init(uint64(p.o.Window), ModeSingle)
			r.pace.most, r.pace.small = 0, false
		}
		events := numberedLog(stream, 40_000)
		began := time.Now()
		if err := r.publish(t.Context(), events); err != nil {
			t.Fatal(err)
		}
		took, window := time.Since(began), r.pace.limit.Load()
		r.Close()
		if err := link.Heal(); err != nil {
			t.Fatal(err)
		}
		same(t, stored(t, n, stream), events)
		return took, window
	}
	took, window := measure("long", false)
	fixed, _ := measure("long-fixed", true)
	t.Logf("40,000 events in %s, window %d; in %s with a fixed window", took, window, fixed)
	// It has to grow first, which takes some round trips.
	if window < 1500 || took > fixed*3/2+500*time.Millisecond {
		t.Errorf("40,000 events took %s, window %d; with a fixed window %s", took, window, fixed)
	}
}
