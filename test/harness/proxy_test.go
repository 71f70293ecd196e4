package harness_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// echo starts a server that sends everything back and reports each connection's end.
func echo(t *testing.T) (addr string, ended <-chan error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	ends := make(chan error, 16)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				_, err := io.Copy(c, c)
				ends <- err
			}()
		}
	}()
	return ln.Addr().String(), ends
}

func dial(t *testing.T, p *harness.Proxy) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ask sends a line and waits for its echo.
func ask(c net.Conn, limit time.Duration) error {
	c.SetDeadline(time.Now().Add(limit))
	if _, err := c.Write([]byte("ping")); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 4))
	return err
}

func TestProxyCutRefusesUntilHealed(t *testing.T) {
	addr, ended := echo(t)
	p := harness.RunProxy(t, addr)
	c := dial(t, p)
	if err := ask(c, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	p.Cut()
	if err := ask(c, 5*time.Second); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("cut connection: %v", err)
	}
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("server saw %v, want a reset", err)
	}
	if _, err := net.Dial("tcp", p.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("new connection: %v, want refused", err)
	}
	if err := p.Heal(); err != nil {
		t.Fatal(err)
	}
	if err := ask(dial(t, p), 5*time.Second); err != nil {
		t.Error(err)
	}
	if p.Accepted() != 2 || p.Bytes(harness.ToServer) != 8 || p.Bytes(harness.ToClient) != 8 {
		t.Errorf("accepted %d, bytes %d and %d", p.Accepted(), p.Bytes(harness.ToServer), p.Bytes(harness.ToClient))
	}
}

func TestProxyStallKeepsConnections(t *testing.T) {
	addr, _ := echo(t)
	p := harness.RunProxy(t, addr)
	c := dial(t, p)
	if err := ask(c, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	p.Stall()
	if err := ask(c, 50*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("stalled connection: %v", err)
	}
	if err := p.Heal(); err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil {
		t.Errorf("after the stall: %v", err)
	}
}

func TestProxyHalfOpenTellsOneSideOnly(t *testing.T) {
	addr, ended := echo(t)
	p := harness.RunProxy(t, addr)
	c := dial(t, p)
	if err := ask(c, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	p.HalfOpen(harness.ToClient)
	if err := <-ended; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("server saw %v, want a reset", err)
	}
	if err := ask(c, 50*time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("client saw %v, want silence", err)
	}
	if err := ask(dial(t, p), 5*time.Second); err != nil {
		t.Errorf("new connection: %v", err)
	}
}

func TestProxyDelays(t *testing.T) {
	addr, _ := echo(t)
	p := harness.RunProxy(t, addr)
	p.Delay(40 * time.Millisecond)
	start := time.Now()
	if err := ask(dial(t, p), 5*time.Second); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 80*time.Millisecond {
		t.Errorf("there and back took %s, want 80ms at least", took)
	}
}

func TestProxyThrottles(t *testing.T) {
	addr, _ := echo(t)
	p := harness.RunProxy(t, addr)
	p.Throttle(100_000)
	c := dial(t, p)
	start := time.Now()
	go c.Write(make([]byte, 20_000))
	if _, err := io.ReadFull(c, make([]byte, 20_000)); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took < 150*time.Millisecond || took > 2*time.Second {
		t.Errorf("20 kB at 100 kB/s took %s", took)
	}
}

func TestProxyCutsAfterExactlyThatManyBytes(t *testing.T) {
	addr, _ := echo(t)
	p := harness.RunProxy(t, addr)
	c := dial(t, p)
	p.CutAfter(harness.ToClient, 12_345)
	sent := bytes.Repeat([]byte("0123456789"), 10_000)
	go c.Write(sent)
	got, _ := io.ReadAll(c)
	if !bytes.Equal(got, sent[:12_345]) {
		t.Errorf("got %d bytes, want the first 12345", len(got))
	}
	if err := ask(dial(t, p), 5*time.Second); err != nil {
		t.Errorf("new connection: %v", err)
	}
}
