package publisher

import (
	"bufio"
	"fmt"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestTextsThatChangeLittle(t *testing.T) {
	var c counter
	var p positionText
	for _, n := range []uint64{0, 1, 2, 9, 10, 11, 99, 100, 998, 999, 1000, 7, 8, 7, 1<<64 - 2, 1<<64 - 1, 3} {
		if got, want := string(c.text(n)), fmt.Sprint(n); got != want {
			t.Errorf("counter: got %s, want %s", got, want)
		}
		for change := range event.LSN(3) {
			pos := event.Position{Timeline: uint32(n % 3), Commit: event.LSN(n), Change: event.LSN(n)<<8 + change, N: uint32(n)}
			if got, want := string(p.text(pos)), pos.String(); got != want {
				t.Errorf("position: got %s, want %s", got, want)
			}
		}
	}
	for _, n := range []int{0, 9, 10, 99, 100, 101, 110, 999, 1000, 1001, 1010, 1100, 9999, 10000, 1 << 20} {
		if got, want := string(appendSize(nil, n)), fmt.Sprint(n); got != want {
			t.Errorf("size: got %s, want %s", got, want)
		}
	}
}

func TestUsualAck(t *testing.T) {
	t.Run("each with its subject", func(t *testing.T) {
		testUsualAck(t, func(seq int) string { return fmt.Sprintf("_INBOX.a.%d", seq) })
	})
	t.Run("in turn", func(t *testing.T) {
		testUsualAck(t, func(int) string { return "_INBOX.a." + replyInTurn })
	})
}

func testUsualAck(t *testing.T, subject func(seq int) string) {
	ack := func(seq int, payload string) string {
		return fmt.Sprintf("MSG %s 1 %d\r\n%s\r\n", subject(seq), len(payload), payload)
	}
	form := func(seq int) string { return fmt.Sprintf(`{"stream":"S","domain":"D","seq":%d}`, seq) }
	var u usualAck
	learned := 0
	for seq := 7; seq < 1200; seq++ {
		text := ack(seq, form(seq))
		r := bufio.NewReader(strings.NewReader(text + "PING\r\n"))
		r.Peek(1)
		if !u.take(r) {
			u.learn(uint64(seq), []byte(subject(seq)), nil, []byte(form(seq)))
			learned++
			continue
		}
		if rest, _ := r.ReadString('\n'); rest != "PING\r\n" {
			t.Fatalf("sequence %d: %q is left", seq, rest)
		}
	}
	if learned != 4 {
		t.Errorf("read %d acks in full, want the first one of each length", learned)
	}
	for _, text := range []string{
		"", "MSG", ack(1199, form(1199)), ack(1201, form(1201)), ack(1200, form(1201)),
		ack(1200, `{"stream":"S","domain":"D","seq":1200,"duplicate":true}`), ack(1200, form(1200))[:40],
	} {
		r := bufio.NewReader(strings.NewReader(text))
		r.Peek(1)
		if u.take(r) {
			t.Errorf("took %q", text)
		}
	}
	u.learn(3, []byte(subject(3)), []byte("NATS/1.0 503\r\n\r\n"), nil)
	if len(u.text) != 0 {
		t.Errorf("expects %q after a reply that is no ack", u.text)
	}
}
