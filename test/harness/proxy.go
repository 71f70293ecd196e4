package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Direction is a way through a proxy.
type Direction int

// The two ways.
const (
	ToServer Direction = iota
	ToClient
)

// Proxy forwards TCP connections to a server and makes faults on the way.
// Faults hold for present and later connections until Heal, unless said otherwise.
type Proxy struct {
	addr   string
	target string

	mu      sync.Mutex
	changed chan struct{} // closed and replaced by every change below
	ln      net.Listener
	links   map[*link]bool
	stalled bool
	delay   time.Duration
	rate    int64    // bytes a second and direction; 0 is unlimited
	quota   [2]int64 // bytes until a cut; negative is unlimited
	closed  bool

	accepted atomic.Int64
	bytes    [2]atomic.Int64
	running  sync.WaitGroup
}

// link is one proxied connection.
type link struct {
	client, server net.Conn
	done           chan struct{}
	once           sync.Once
	number         int64
	mute           bool // the other side is gone and nobody is told
	held           bool // nothing passes until Heal
}

// RunProxy starts a proxy to target (host:port) that ends with the test.
func RunProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	p, err := StartProxy(target)
	if err != nil {
		t.Fatalf("start proxy: %v", err)
	}
	t.Cleanup(p.Close)
	return p
}

// StartProxy listens on a free port of 127.0.0.1.
func StartProxy(target string) (*Proxy, error) {
	for retries := 3; ; retries-- {
		p, err := startProxy(target)
		if err == nil || retries == 0 {
			return p, err
		}
		// Somebody else took the port between the look and the start.
	}
}

func startProxy(target string) (*Proxy, error) {
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	p := &Proxy{
		addr:    net.JoinHostPort("127.0.0.1", strconv.Itoa(port)),
		target:  target,
		changed: make(chan struct{}),
		links:   make(map[*link]bool),
		quota:   [2]int64{-1, -1},
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p, p.listen()
}

// Addr is host:port of the proxy.
func (p *Proxy) Addr() string { return p.addr }

// Accepted is the number of connections so far.
func (p *Proxy) Accepted() int64 { return p.accepted.Load() }

// Bytes is the number of bytes delivered so far.
func (p *Proxy) Bytes(d Direction) int64 { return p.bytes[d].Load() }

// Open is the number of connections now.
func (p *Proxy) Open() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.links)
}

// AwaitOpen blocks until n connections are open.
func (p *Proxy) AwaitOpen(ctx context.Context, n int) error {
	for {
		p.mu.Lock()
		open, changed := len(p.links), p.changed
		p.mu.Unlock()
		if open == n {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for %d connections, have %d: %w", n, open, ctx.Err())
		}
	}
}

// Reset breaks the present connections with RST; new ones are forwarded.
func (p *Proxy) Reset() {
	p.change(func() { p.breakAll() })
}

// Cut breaks the present connections with RST and refuses new ones.
func (p *Proxy) Cut() {
	p.change(func() {
		p.breakAll()
		if p.ln != nil {
			p.ln.Close()
			p.ln = nil
		}
	})
}

// Stall stops forwarding; connections stay, new ones are accepted.
func (p *Proxy) Stall() { p.change(func() { p.stalled = true }) }

// HoldNewest stops forwarding on the connection that was accepted last.
func (p *Proxy) HoldNewest() {
	p.change(func() {
		var newest *link
		for l := range p.links {
			if newest == nil || l.number > newest.number {
				newest = l
			}
		}
		if newest != nil {
			newest.held = true
		}
	})
}

// HalfOpen makes one side of the present connections vanish: towards keeps
// its connection, on which nothing is read and nothing comes any more, and the
// other side sees RST. New connections are forwarded. Heal does not bring the
// connections back.
func (p *Proxy) HalfOpen(towards Direction) {
	p.change(func() {
		for l := range p.links {
			l.mute = true
			gone := l.server
			if towards == ToServer {
				gone = l.client
			}
			reset(gone)
		}
	})
}

// Delay holds everything back for d, in each direction.
func (p *Proxy) Delay(d time.Duration) { p.change(func() { p.delay = d }) }

// Throttle limits each direction of every connection to a number of bytes a second.
func (p *Proxy) Throttle(bytesPerSecond int64) { p.change(func() { p.rate = bytesPerSecond }) }

// CutAfter delivers n more bytes in a direction, over all connections, and then
// breaks the present connections: the receiver sees the end after the last
// byte, the sender RST. New connections are forwarded without a limit.
func (p *Proxy) CutAfter(d Direction, n int64) { p.change(func() { p.quota[d] = n }) }

// Heal ends all faults.
func (p *Proxy) Heal() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stalled, p.delay, p.rate, p.quota = false, 0, 0, [2]int64{-1, -1}
	for l := range p.links {
		l.held = false
	}
	p.notify()
	if p.ln == nil && !p.closed {
		return p.listen()
	}
	return nil
}

// Close breaks everything and returns when all is gone.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.Cut()
	p.running.Wait()
}

func (p *Proxy) change(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	p.notify()
}

func (p *Proxy) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

func (p *Proxy) breakAll() {
	for l := range p.links {
		delete(p.links, l)
		l.cut()
	}
}

func (p *Proxy) listen() error {
	ln, err := net.Listen("tcp", p.addr)
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	p.ln = ln
	p.running.Go(func() { p.accept(ln) })
	return nil
}

func (p *Proxy) accept(ln net.Listener) {
	for {
		c, err := ln.Accept()
		if err != nil {
			return
		}
		number := p.accepted.Add(1)
		p.running.Go(func() { p.serve(ln, c, number) })
	}
}

// serve forwards one connection to its end.
func (p *Proxy) serve(ln net.Listener, client net.Conn, number int64) {
	server, err := net.DialTimeout("tcp", p.target, 5*time.Second)
	if err != nil {
		reset(client)
		return
	}
	l := &link{client: client, server: server, number: number, done: make(chan struct{})}
	p.mu.Lock()
	if p.ln != ln { // cut meanwhile
		p.mu.Unlock()
		l.cut()
		return
	}
	p.links[l] = true
	p.notify()
	p.mu.Unlock()

	var both sync.WaitGroup
	both.Go(func() { p.pump(l, ToServer, client, server) })
	both.Go(func() { p.pump(l, ToClient, server, client) })
	both.Wait()
	l.cut()
	p.change(func() { delete(p.links, l) })
}

// chunk is what one read brought, and when the delay lets it go on.
type chunk struct {
	data []byte
	due  time.Time
	err  error
}

// pump forwards one direction. A reader and a writer share it, so that a delay
// does not limit the throughput.
func (p *Proxy) pump(l *link, d Direction, from, to net.Conn) {
	queue := make(chan chunk, 256)
	go func() {
		defer close(queue)
		for {
			buf := make([]byte, 16<<10)
			n, err := from.Read(buf)
			p.mu.Lock()
			due := time.Now().Add(p.delay)
			p.mu.Unlock()
			select {
			case queue <- chunk{buf[:n], due, err}:
			case <-l.done:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	for c := range queue {
		if !sleepUntil(l, c.due) || !p.forward(l, d, c.data, to) {
			return
		}
		if c.err != nil {
			p.end(l, c.err, to)
			return
		}
	}
}

// end passes the end of a direction on. Where the other side must not learn of it, it waits.
func (p *Proxy) end(l *link, err error, to net.Conn) {
	if !p.open(l) {
		return
	}
	if tcp, ok := to.(*net.TCPConn); ok && errors.Is(err, io.EOF) {
		tcp.CloseWrite()
		return
	}
	l.cut()
}

// forward writes data as the faults allow and reports whether to go on.
func (p *Proxy) forward(l *link, d Direction, data []byte, to net.Conn) bool {
	for len(data) > 0 {
		if !p.open(l) {
			return false
		}
		p.mu.Lock()
		n, rate, last := int64(len(data)), p.rate, false
		if rate > 0 {
			n = min(n, max(rate/50, 1))
		}
		if q := p.quota[d]; q >= 0 {
			n = min(n, q)
			p.quota[d] -= n
			if last = p.quota[d] == 0; last {
				p.quota[d] = -1
			}
		}
		p.mu.Unlock()

		// Counted before the receiver can know of them.
		p.bytes[d].Add(n)
		if _, err := to.Write(data[:n]); err != nil {
			return p.lost(l)
		}
		data = data[n:]
		if last {
			to.Close() // an orderly end, which lets the bytes arrive
			p.Reset()
			return false
		}
		if rate > 0 && !sleepUntil(l, time.Now().Add(time.Duration(n)*time.Second/time.Duration(rate))) {
			return false
		}
	}
	return true
}

// lost ends a link whose receiver is gone.
func (p *Proxy) lost(l *link) bool {
	if p.open(l) {
		l.cut()
	}
	return false
}

// open blocks while the proxy stalls or the link is half open. It reports whether the link is open.
func (p *Proxy) open(l *link) bool {
	for {
		p.mu.Lock()
		wait, changed := p.stalled || l.mute || l.held, p.changed
		p.mu.Unlock()
		if !wait {
			select {
			case <-l.done:
				return false
			default:
				return true
			}
		}
		select {
		case <-changed:
		case <-l.done:
			return false
		}
	}
}

// cut breaks both sides of a link.
func (l *link) cut() {
	l.once.Do(func() {
		close(l.done)
		reset(l.client)
		reset(l.server)
	})
}

// reset closes a connection with RST.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	c.Close()
}

func sleepUntil(l *link, due time.Time) bool {
	d := time.Until(due)
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-l.done:
		return false
	}
}
