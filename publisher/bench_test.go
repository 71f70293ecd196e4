package publisher

import (
	"bufio"
	"strings"
	"testing"
)

// BenchmarkRead reads acks as the server sends them, many at a time. One
// operation is one ack.
func BenchmarkRead(b *testing.B) {
	const acks = 10_000
	s := deaf(acks)
	s.replyPrefix = len("_INBOX.0123456789012345678901.")
	s.sent.Store(acks)
	b.ReportAllocs()
	text := ackText(acks, true)
	r := bufio.NewReaderSize(nil, readBufferSize)
	for left := b.N; left > 0; left -= acks {
		s.acked.Store(0)
		r.Reset(strings.NewReader(text))
		s.w.r = r
		s.read()
		if s.acked.Load() != acks {
			b.Fatalf("got %d acks, want %d", s.acked.Load(), acks)
		}
	}
}
