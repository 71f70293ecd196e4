package publisher

import (
	"fmt"
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
