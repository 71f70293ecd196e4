package publisher

import (
	"bufio"
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

func TestFrameBytes(t *testing.T) {
	ev := &event.Event{
		ID: []byte("e1"), MsgID: []byte("m1"), Subject: []byte("outbox.order.created"),
		Payload:  []byte("{\"a\": 1.10}\r\n"),
		Position: event.Position{Timeline: 1, Commit: 0x16B3748, Change: 0x16B3700, N: 2},
		Headers: []event.Header{
			{Name: event.HeaderID, Value: []byte("e1")},
			{Name: "traceparent", Value: []byte("00-ab-cd-01")},
			{Name: "Empty"},
		},
	}
	for _, c := range []struct {
		msgIDs bool
		header string
	}{
		{true, "NATS/1.0\r\nNats-Expected-Last-Sequence: 41\r\nNats-Expected-Stream: orders\r\nNats-Msg-Id: m1\r\n" +
			"Outbox-Pos: 1:0/16B3748:0/16B3700:2\r\nOutbox-Id: e1\r\ntraceparent: 00-ab-cd-01\r\nEmpty: \r\n\r\n"},
		{false, "NATS/1.0\r\nNats-Expected-Last-Sequence: 41\r\nNats-Expected-Stream: orders\r\n" +
			"Outbox-Pos: 1:0/16B3748:0/16B3700:2\r\nOutbox-Id: e1\r\ntraceparent: 00-ab-cd-01\r\nEmpty: \r\n\r\n"},
	} {
		f := newFramer("orders", "_INBOX.abc", c.msgIDs)
		f.encode(ev, 7, false) // leaves nothing behind
		h := f.encode(ev, 42, true)
		if want := strings.Replace(c.header, "Nats-Expected-Stream: orders\r\n", "", 1); string(h) != want {
			t.Errorf("on a known subject: got  %q\nwant %q", h, want)
		}
		h = f.encode(ev, 42, false)
		got := string(f.appendFrame([]byte("before"), ev.Subject, h, 42, len(ev.Payload)))
		want := fmt.Sprintf("beforeHPUB outbox.order.created _INBOX.abc.42 %d %d\r\n%s", len(c.header), len(c.header)+13, c.header)
		if got != want {
			t.Errorf("got  %q\nwant %q", got, want)
		}
		f.inTurn = true
		got = string(f.appendFrame([]byte("before"), ev.Subject, h, 42, len(ev.Payload)))
		if want = strings.Replace(want, "abc.42", "abc.0", 1); got != want {
			t.Errorf("answered in turn: got  %q\nwant %q", got, want)
		}
	}
}

func TestValidSubject(t *testing.T) {
	for s, want := range map[string]bool{
		"a": true, "a.b": true, "outbox.order.created": true, "ä.ö": true, "$x.y": true, "a-b_c/d": true,
		strings.Repeat("a", maxSubjectBytes): true, strings.Repeat("a", maxSubjectBytes+1): false,
		"": false, ".": false, ".a": false, "a.": false, "a..b": false, "a b": false, "a\tb": false, "a\r\nb": false,
		"a.*": false, "a.>": false, "a.b*c": false, "a>b": false, "a\x00": false, "a\x7f": false,
	} {
		if got := validSubject([]byte(s)); got != want {
			t.Errorf("%.20q: got %t", s, got)
		}
	}
}

var filterCases = []struct {
	filter, subject string
	want            bool
}{
	{"a", "a", true},
	{"a", "b", false},
	{"a", "a.b", false},
	{"a.b", "a", false},
	{"a", "ab", false},
	{"ab", "a", false},
	{"a.b.c", "a.b.c", true},
	{"a.b.c", "a.b.d", false},
	{"a.b.c", "a.b", false},
	{"a.b", "a.b.c", false},
	{"*", "a", true},
	{"*", "a.b", false},
	{"a.*", "a.b", true},
	{"a.*", "a", false},
	{"a.*", "a.b.c", false},
	{"*.b", "a.b", true},
	{"*.b", "a.c", false},
	{"a.*.c", "a.b.c", true},
	{"a.*.c", "a.b.d", false},
	{"a.*.*", "a.b.c", true},
	{">", "a", true},
	{">", "a.b.c", true},
	{"a.>", "a.b", true},
	{"a.>", "a.b.c", true},
	{"a.>", "a", false},
	{"a.>", "b.c", false},
	{"a.*.>", "a.b.c", true},
	{"a.*.>", "a.b", false},
	{"a*", "a*", true},
	{"a*", "ab", false},
	{"a>", "ab", false},
	{"a>", "a>", true},
	{"outbox.>", "outboxes.a", false},
}

func TestMatches(t *testing.T) {
	for _, c := range filterCases {
		if got := matches(c.filter, []byte(c.subject)); got != c.want {
			t.Errorf("matches(%q, %q) = %t", c.filter, c.subject, got)
		}
	}
}

// matchesByTokens is what the documentation says, token by token.
func matchesByTokens(filter, subject string) bool {
	f, s := strings.Split(filter, "."), strings.Split(subject, ".")
	for i, token := range f {
		switch {
		case token == ">" && i == len(f)-1:
			return len(s) > i
		case i >= len(s):
			return false
		case token != "*" && token != s[i]:
			return false
		}
	}
	return len(f) == len(s)
}

func FuzzMatches(f *testing.F) {
	for _, c := range filterCases {
		f.Add(c.filter, c.subject)
	}
	f.Fuzz(func(t *testing.T, filter, subject string) {
		if !validSubject([]byte(subject)) || filter == "" {
			matches(filter, []byte(subject)) // does not panic
			return
		}
		for _, token := range strings.Split(filter, ".") {
			if token == "" {
				return // no server has such a filter
			}
		}
		if got, want := matches(filter, []byte(subject)), matchesByTokens(filter, subject); got != want {
			t.Fatalf("matches(%q, %q) = %t", filter, subject, got)
		}
		if matches(filter, []byte(subject)) && !covered([]string{filter}, subject) {
			t.Fatalf("covered(%q, %q) is false", filter, subject)
		}
	})
}

func TestCovered(t *testing.T) {
	for _, c := range []struct {
		filters string
		wanted  string
		want    bool
	}{
		{"outbox.>", "outbox.>", true},
		{"outbox.>", "outbox.*.*", true},
		{"outbox.>", "outbox.a", true},
		{">", "outbox.>", true},
		{"outbox.*.*", "outbox.>", false},
		{"outbox.*.*", "outbox.*.*", true},
		{"outbox.*.*", "outbox.a.*", true},
		{"outbox.a.*", "outbox.*.*", false},
		{"outbox.>", "outbox", false},
		{"outbox.*", "outbox", false},
		{"outbox", "outbox.*", false},
		{"outbox.>", ">", false},
		{"*", ">", false},
		{"*", "*", true},
		{"other.>,outbox.>", "outbox.*", true},
		{"outbox.>", "other.a", false},
		{"", "a", false},
	} {
		var filters []string
		if c.filters != "" {
			filters = strings.Split(c.filters, ",")
		}
		if got := covered(filters, c.wanted); got != c.want {
			t.Errorf("covered(%q, %q) = %t", c.filters, c.wanted, got)
		}
	}
}

// discard is a connection that takes everything.
type discard struct{ net.Conn }

func (discard) Write(p []byte) (int, error)      { return len(p), nil }
func (discard) Close() error                     { return nil }
func (discard) SetWriteDeadline(time.Time) error { return nil }

// deaf is a session on a connection that takes everything and answers nothing.
func deaf(window int) *Session {
	p := &Publisher{o: Options{Stream: "orders", Window: window, WindowBytes: 16 << 20}}
	s := &Session{
		p: p, o: &p.o, w: &wire{conn: discard{}, maxPayload: 1 << 20}, failed: make(chan struct{}), wake: make(chan struct{}, 1),
		frames: newFramer("orders", "_INBOX.0123456789012345678901", true), window: make([]inFlight, window+1),
		fail: func(error) {},
	}
	s.config.Subjects = []string{"outbox.>", "walrelay.parked.orders"}
	return s
}

func TestAppendDoesNotAllocate(t *testing.T) {
	for _, size := range []int{256, directPayload} {
		s := deaf(2048)
		ev := &event.Event{
			ID: []byte("0d2f7f0e-6a3e-4f55-9b43-0123456789ab"), Subject: []byte("outbox.order.created"), Payload: make([]byte, size),
			Headers: []event.Header{{Name: event.HeaderID, Value: []byte("0d2f7f0e-6a3e-4f55-9b43-0123456789ab")}},
		}
		ev.MsgID = ev.ID
		n := event.LSN(1)
		got := testing.AllocsPerRun(5000, func() {
			n += 100
			ev.Position = event.Position{Timeline: 1, Commit: n, Change: n - 50}
			if err := s.Append(ev); err != nil {
				t.Fatal(err)
			}
			if s.Full() {
				s.acked.Store(s.appended)
			}
		})
		if got != 0 {
			t.Errorf("payload of %d bytes: %g allocations an event, want 0", size, got)
		}
	}
}

func TestReadDoesNotAllocate(t *testing.T) {
	const acks = 2000
	for _, inTurn := range []bool{false, true} {
		per := allocationsPerAck(t, ackText(acks, inTurn), acks)
		if per > 0.05 {
			t.Errorf("%g allocations an ack, want 0", per)
		}
	}
}

// ackText is the acks for the sequences from 1 to n as the server writes them.
func ackText(n int, inTurn bool) string {
	var in strings.Builder
	for i := range n {
		ack, reply := fmt.Sprintf(`{"stream":"orders","seq":%d}`, i+1), strconv.Itoa(i+1)
		if inTurn {
			reply = replyInTurn
		}
		fmt.Fprintf(&in, "MSG _INBOX.0123456789012345678901.%s 1 %d\r\n%s\r\n", reply, len(ack), ack)
	}
	return in.String()
}

func allocationsPerAck(t *testing.T, text string, acks uint64) float64 {
	s := deaf(int(acks))
	s.replyPrefix = len("_INBOX.0123456789012345678901.")
	s.sent.Store(acks)
	return testing.AllocsPerRun(10, func() {
		s.acked.Store(0)
		s.w.r = bufio.NewReaderSize(strings.NewReader(text), readBufferSize)
		s.read()
		if s.acked.Load() != acks {
			t.Fatalf("got %d acks", s.acked.Load())
		}
	}) / float64(acks)
}

func BenchmarkAppend(b *testing.B) {
	s := deaf(2048)
	ev := &event.Event{
		ID: []byte("0d2f7f0e-6a3e-4f55-9b43-0123456789ab"), MsgID: []byte("0d2f7f0e-6a3e-4f55-9b43-0123456789ab"),
		Subject: []byte("outbox.order.created"), Payload: make([]byte, 256),
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := s.Append(ev); err != nil {
			b.Fatal(err)
		}
		if s.Full() {
			s.acked.Store(s.appended)
		}
	}
}
