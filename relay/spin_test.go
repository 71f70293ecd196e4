package relay

import (
	"fmt"
	"testing"
	"time"
)

// A stream that is full and whose consumers make room for one message at a time.
func TestSessionsThatSettleOneEventAreNotSpunOn(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		now := func() (src *handSource, opened int) {
			b.set(func() { src, opened = b.source, len(b.opened) })
			return src, opened
		}
		const watched = 20 * time.Second
		for start := time.Now(); time.Since(start) < watched; {
			src, opened := now()
			src.commit("a")
			b.sink.ack(1)
			b.sink.breakWith(fmt.Errorf("message for sequence %d: full", opened))
			for at := src; at == src && time.Since(start) < watched; at, _ = now() {
				b.after(10 * time.Millisecond)
			}
		}
		_, opened := now()
		if n := opened / 2; n < 20 || n > 3*20 {
			t.Errorf("%d sessions in %s, want no more than three a second", n, watched)
		}
		if got := b.lines.with("trying again"); len(got) != 1 {
			t.Errorf("logged %d times: %q", len(got), got[:min(len(got), 3)])
		}
		if got := b.lines.with("streaming"); len(got) != 2 {
			t.Errorf("logged %d times: %q", len(got), got[:min(len(got), 3)])
		}
		b.after(2 * time.Second)
		if got := b.lines.with("streaming"); len(got) != 3 {
			t.Errorf("the session that lasts is not told: %q", got)
		}
	})
}
