package sock

import (
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"unsafe"
)

// Lean returns conn with the same behaviour and cheaper reads and writes; conn
// itself when it is no TCP connection.
//
// The runtime cannot know that a read or write of a network connection does not
// block. It tells its monitor thread (sysmon), which then looks every 20 µs
// whether the call takes long, until all is idle again. Of a program that reads
// a little, works a little and waits, that is a third of the processor time.
// The calls here are raw ones, of which the monitor is not told; waiting for
// the network, deadlines and Close are those of package net.
func Lean(conn net.Conn) net.Conn {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return conn
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return conn
	}
	c := &leanConn{TCPConn: tcp, raw: raw}
	c.in = transfer{call: syscall.SYS_READ, name: "read", wait: raw.Read}
	c.out = transfer{call: syscall.SYS_WRITE, name: "write", wait: raw.Write}
	c.in.attempt, c.out.attempt = c.in.try, c.out.try
	return c
}

type leanConn struct {
	*net.TCPConn
	raw     syscall.RawConn
	in, out transfer
}

func (c *leanConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	n, err := c.in.do(c, p)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

func (c *leanConn) Write(p []byte) (int, error) {
	for done := 0; ; {
		n, err := c.out.do(c, p[done:])
		if done += n; err != nil || done == len(p) {
			return done, err
		}
	}
}

// ReadFrom and WriteTo keep io.Copy from going around Read and Write.
func (c *leanConn) ReadFrom(r io.Reader) (int64, error) {
	return io.Copy(struct{ io.Writer }{c}, r)
}

func (c *leanConn) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{c})
}

// transfer is one direction.
type transfer struct {
	call uintptr
	name string
	wait func(func(fd uintptr) bool) error // of syscall.RawConn

	mu      sync.Mutex
	attempt func(fd uintptr) bool // try, made once so that no call allocates
	p       []byte
	n       int
	errno   syscall.Errno
}

// do reads into p, or writes it, as far as one call gets.
func (t *transfer) do(c *leanConn, p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.p = p
	err := t.wait(t.attempt)
	t.p = nil
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			op.Op = t.name // it says raw-read otherwise
		}
		return 0, err
	}
	if t.errno != 0 {
		return 0, &net.OpError{
			Op: t.name, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(t.name, t.errno),
		}
	}
	return t.n, nil
}

// try makes one attempt; false when the connection is not ready.
func (t *transfer) try(fd uintptr) bool {
	for {
		n, _, errno := syscall.RawSyscall(t.call, fd, uintptr(unsafe.Pointer(unsafe.SliceData(t.p))), uintptr(len(t.p)))
		switch errno {
		case syscall.EINTR:
			continue
		case syscall.EAGAIN:
			return false
		case 0:
			t.n, t.errno = int(n), 0
		default:
			t.n, t.errno = 0, errno
		}
		return true
	}
}
