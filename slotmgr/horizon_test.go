package slotmgr

import (
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestEndOfTheLogIsNotBehindAnEmptyPagesHeader(t *testing.T) {
	const page, segment = 8192, 16 << 20
	for _, c := range []struct{ lsn, want event.LSN }{
		{segment + 3*page + 24, segment + 3*page},
		{segment + 40, segment},
		{segment + 24, segment + 24},
		{segment + 3*page + 40, segment + 3*page + 40},
		{segment + 3*page + 1000, segment + 3*page + 1000},
	} {
		if got := flushable(c.lsn, page, segment); got != c.want {
			t.Errorf("%s: got %s, want %s", c.lsn, got, c.want)
		}
	}
}
