package publisher

import (
	"math/bits"

	"github.com/walrelay/walrelay/sock"
)

// A server often writes each ack by itself. A reader that is woken for each
// costs more than all the rest of an event's way, and nothing waits for a single
// ack as long as others are to come. So a read waits until about half of what is
// to come is there, by a lower bound of an ack's size: it always comes.
const (
	gatherFrom = 8    // acks to come below which a read waits for one
	gatherSize = 64   // bytes of an ack; with any name of a stream, they are hardly fewer
	gatherMost = 4096 // bytes that a read waits for at most
)

// gather reads acks from the connection.
type gather struct {
	w       *wire
	pending func() uint64 // acks to come; nil until acks are read
	floor   int           // bytes that a read waits for; 0 for any
	cannot  bool          // the system has no such thing
}

func (g *gather) Read(p []byte) (int, error) {
	if g.pending != nil && !g.cannot {
		g.adjust(g.pending())
	}
	return g.w.conn.Read(p)
}

func (g *gather) adjust(pending uint64) {
	floor := 0
	if pending >= gatherFrom {
		// A power of two, so that it does not change all the time.
		floor = 1 << (bits.Len64(min(pending*gatherSize/2, gatherMost)) - 1)
	}
	if floor != g.floor {
		g.floor = floor
		g.cannot = !sock.SetReadFloor(g.w.conn, max(floor, 1))
	}
}
