package sock

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"
)

// pair is a lean connection and its peer.
func pair(t testing.TB) (lean, peer net.Conn) {
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
	if peer, err = l.Accept(); err != nil {
		t.Fatal(err)
	}
	lean = Lean(client)
	t.Cleanup(func() { lean.Close(); peer.Close() })
	return lean, peer
}

func TestBytesArriveBothWays(t *testing.T) {
	lean, peer := pair(t)
	sent := make([]byte, 8<<20) // more than the kernel holds, so that writes are partial
	rand.NewChaCha8([32]byte{}).Read(sent)
	go func() {
		defer lean.(interface{ CloseWrite() error }).CloseWrite()
		if n, err := lean.Write(sent); n != len(sent) || err != nil {
			t.Errorf("wrote %d bytes: %v", n, err)
		}
	}()
	go io.Copy(peer, peer) // the echo ends with the writes
	got := sha256.New()
	for n := 0; n < len(sent); {
		p := make([]byte, 100_000)
		k, err := lean.Read(p)
		if err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		got.Write(p[:k])
		n += k
	}
	if want := sha256.Sum256(sent); !bytes.Equal(got.Sum(nil), want[:]) {
		t.Error("other bytes came back")
	}
}

func TestEndsAreThoseOfNet(t *testing.T) {
	lean, peer := pair(t)
	if n, err := lean.Read(nil); n != 0 || err != nil {
		t.Errorf("read into nothing: %d, %v", n, err)
	}
	peer.(*net.TCPConn).CloseWrite()
	if n, err := lean.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("read after the peer's end: %d, %v, want EOF", n, err)
	}

	lean, peer = pair(t)
	peer.(*net.TCPConn).SetLinger(0)
	peer.Close()
	_, err := lean.Read(make([]byte, 1))
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read after a reset: %v, want ECONNRESET", err)
	}
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "read" {
		t.Errorf("read after a reset: %#v, want a *net.OpError", err)
	}
	for range 2 { // the first one may only bring the reset
		_, err = lean.Write([]byte("x"))
	}
	if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("write after a reset: %v", err)
	}
}

func TestDeadlinesAndCloseEndAWait(t *testing.T) {
	for _, c := range []struct {
		name string
		wait func(net.Conn) error
	}{
		{"read", func(c net.Conn) error { _, err := c.Read(make([]byte, 1)); return err }},
		{"write", func(c net.Conn) error { _, err := c.Write(make([]byte, 64<<20)); return err }},
	} {
		lean, _ := pair(t)
		done := make(chan error)
		go func() { done <- c.wait(lean) }()
		lean.SetDeadline(time.Now().Add(10 * time.Millisecond))
		err := <-done
		if !os.IsTimeout(err) {
			t.Errorf("%s: %v, want a timeout", c.name, err)
		}
		var op *net.OpError
		if !errors.As(err, &op) || op.Op != c.name {
			t.Errorf("%s: %v does not name it", c.name, err)
		}
		lean.SetDeadline(time.Time{})
		go func() { done <- c.wait(lean) }()
		lean.Close()
		if err := <-done; !errors.Is(err, net.ErrClosed) {
			t.Errorf("%s: %v, want net.ErrClosed", c.name, err)
		}
	}
}

func TestNothingIsAllocated(t *testing.T) {
	lean, peer := pair(t)
	go io.Copy(peer, peer)
	p := make([]byte, 100)
	got := testing.AllocsPerRun(1000, func() {
		if _, err := lean.Write(p); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(lean, p); err != nil {
			t.Fatal(err)
		}
	})
	if got != 0 {
		t.Errorf("%g allocations a write and a read, want 0", got)
	}
}
