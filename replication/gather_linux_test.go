package replication

import (
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/walrelay/walrelay/sock"
)

// gathering is a gather on one end of a TCP connection, and the other end.
func gathering(t *testing.T) (*gather, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	if !sock.SetReadFloor(client, 1) {
		t.Fatal("SO_RCVLOWAT cannot be set")
	}
	return &gather{r: client, conn: client, interrupted: new(atomic.Bool), committed: new(time.Time)}, server
}

func TestGatherFollowsTheRate(t *testing.T) {
	g, _ := gathering(t)
	for _, c := range []struct {
		perSecond int
		committed time.Time
		want      int
	}{
		{1 << 20, time.Now(), 0},
		{1 << 20, time.Time{}, 0}, // a thousand transactions a second
		{4 << 20, time.Now(), 0},
		{4 << 20, time.Time{}, 4096},
		{10 << 20, time.Now(), 2048},
		{10 << 20, time.Time{}, 8192},
		{100 << 20, time.Now(), 16384},
		{100 << 20, time.Time{}, 65536},
		{0, time.Time{}, 0},
	} {
		*g.committed = c.committed
		g.reads, g.bytes, g.since = gatherReads-1, c.perSecond, time.Now().Add(-time.Second)
		g.count(0)
		if g.floor != c.want {
			t.Errorf("%d bytes a second, committed %v: a read waits for %d bytes, want %d", c.perSecond, c.committed, g.floor, c.want)
		}
	}
}

func TestGatherGivesUpWhenNothingComes(t *testing.T) {
	g, server := gathering(t)
	g.limit = time.Millisecond
	g.wait(gatherMost)
	if g.floor != gatherMost {
		t.Fatalf("a read waits for %d bytes, want %d", g.floor, gatherMost)
	}
	read := make(chan int)
	go func() {
		n, err := g.Read(make([]byte, 100))
		if err != nil {
			t.Error(err)
		}
		read <- n
	}()
	if _, err := server.Write([]byte("few")); err != nil {
		t.Fatal(err)
	}
	if n := <-read; n != 3 {
		t.Errorf("read %d bytes, want the 3 that came", n)
	}
}

func TestGatherHearsAnInterrupt(t *testing.T) {
	for _, floor := range []int{0, gatherMost} {
		g, _ := gathering(t)
		g.limit = time.Hour
		g.wait(floor)
		read := make(chan error)
		go func() {
			_, err := g.Read(make([]byte, 100))
			read <- err
		}()
		g.interrupted.Store(true)
		g.conn.SetReadDeadline(time.Unix(1, 0))
		if err := <-read; !os.IsTimeout(err) {
			t.Errorf("got %v, want a timeout", err)
		}
	}
}
