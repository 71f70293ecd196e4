package replication

import (
	"io"
	"math/bits"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/walrelay/walrelay/sock"
)

// A walsender writes each message to the socket by itself. A reader that is
// faster would be woken for each, and everything behind it would work message
// by message, at several times the cost. So when messages come fast, a read
// waits for as many bytes as come in a short while: a very short one as long as
// what comes is fresh. A lone message never waits, and the last ones of a burst
// wait for gatherPatience of these whiles at most.
const (
	gatherFresh    = 300 * time.Microsecond
	gatherBehind   = time.Millisecond // while there is a backlog
	gatherPatience = 4

	freshness   = 20 * time.Millisecond // since the commit; what is older is backlog
	gatherReads = 32                    // after so many reads the rate is looked at
	gatherLeast = 2 << 10               // bytes below which waiting is not worth it
	gatherMost  = 64 << 10              // bytes that are waited for at most
)

// gather reads the connection of a stream.
type gather struct {
	r           io.Reader
	conn        net.Conn     // of r, once streaming
	interrupted *atomic.Bool // as in Stream
	committed   *time.Time   // when the transaction was that is read

	floor int           // bytes that a read waits for; 0 for any
	limit time.Duration // and how long
	reads int
	bytes int
	since time.Time
}

func (g *gather) Read(p []byte) (int, error) {
	if g.conn == nil {
		return g.r.Read(p)
	}
	if g.floor > 0 {
		if err := g.conn.SetReadDeadline(time.Now().Add(g.limit)); err != nil {
			return 0, err
		}
	}
	// Stream.Interrupt sets its flag before its own deadline, so looking for it
	// after a deadline of ours decides that it is heard.
	if g.interrupted.Load() {
		return 0, os.ErrDeadlineExceeded
	}
	// A read returns less than the floor when that is there already.
	n, err := g.r.Read(p)
	if g.floor > 0 && n == 0 && os.IsTimeout(err) && !g.interrupted.Load() {
		g.wait(0)
		return g.Read(p)
	}
	g.count(n)
	return n, err
}

// count looks at the rate from time to time.
func (g *gather) count(n int) {
	g.bytes += n
	if g.reads++; g.reads < gatherReads {
		return
	}
	now := time.Now()
	while := gatherFresh
	if now.Sub(*g.committed) > freshness {
		while = gatherBehind
	}
	if took := now.Sub(g.since); took > 0 {
		g.limit = gatherPatience * while
		g.wait(int(int64(g.bytes) * int64(while) / int64(took)))
	}
	g.reads, g.bytes, g.since = 0, 0, now
}

// wait makes reads wait for about so many bytes.
func (g *gather) wait(bytes int) {
	floor := 0
	if bytes >= gatherLeast {
		floor = 1 << (bits.Len(uint(min(bytes, gatherMost))) - 1)
	}
	if floor == g.floor {
		return
	}
	if g.floor > 0 && floor == 0 {
		_ = g.conn.SetReadDeadline(time.Time{}) // a broken connection is told by the next read
	}
	if !sock.SetReadFloor(g.conn, max(floor, 1)) {
		g.conn, floor = nil, 0
	}
	g.floor = floor
}
