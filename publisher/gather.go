package publisher

const (
	// While at least gatherFrom acks are to come, a read waits for gatherBytes,
	// some twenty acks. A server that writes one ack at a time would else wake
	// the reader for each, which costs more than all the rest of an event's way.
	gatherFrom  = 128
	gatherBytes = 2048
	// Below gatherUntil a read waits for nothing more than the next ack. So many
	// replies are longer than gatherBytes, so what is waited for always comes.
	gatherUntil = 48
)

// gather reads acks from the connection, many at a time as long as many are to come.
type gather struct {
	w       *wire
	pending func() uint64 // nil until acks are read
	on      bool
	off     bool // for good: the system cannot do it
}

func (g *gather) Read(p []byte) (int, error) {
	if g.pending != nil && !g.off {
		g.adjust(g.pending())
	}
	return g.w.conn.Read(p)
}

func (g *gather) adjust(pending uint64) {
	switch {
	case !g.on && pending >= gatherFrom:
		g.on = setReadFloor(g.w.conn, gatherBytes)
		g.off = !g.on
	case g.on && pending < gatherUntil:
		g.off = !setReadFloor(g.w.conn, 1)
		g.on = false
	}
}
