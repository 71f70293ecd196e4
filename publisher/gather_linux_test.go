package publisher

import (
	"net"
	"testing"

	"github.com/walrelay/walrelay/sock"
)

func TestGatherWaitsForHalfOfWhatIsToCome(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if !sock.SetReadFloor(conn, 1) {
		t.Fatal("SO_RCVLOWAT cannot be set")
	}
	g := gather{w: &wire{conn: conn}}
	for _, c := range []struct {
		pending uint64
		want    int
	}{{0, 0}, {1, 0}, {7, 0}, {8, 256}, {15, 256}, {16, 512}, {100, 2048}, {2048, 4096}, {1 << 40, 4096}, {3, 0}} {
		if g.adjust(c.pending); g.floor != c.want || g.cannot {
			t.Errorf("%d acks to come: a read waits for %d bytes, want %d", c.pending, g.floor, c.want)
		}
	}
	g = gather{w: &wire{conn: discard{}}}
	if g.adjust(100); !g.cannot {
		t.Error("a connection that is no socket can do it")
	}
}
