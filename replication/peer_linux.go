package replication

import (
	"net"
	"syscall"
	"time"
)

// peerTimeout is how long sent bytes may stay without the peer's kernel
// acknowledging them.
const peerTimeout = 30 * time.Second

// tcpUserTimeout is TCP_USER_TIMEOUT of tcp(7), which package syscall lacks.
const tcpUserTimeout = 18

// watchPeer has the kernel end the connection when the peer is unreachable:
// statuses go out every second, and without this a cut network is noticed only
// after a quarter of an hour of retransmissions. A failure leaves it at that.
func watchPeer(conn net.Conn) {
	if c, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = c.NetConn() // below TLS
	}
	c, ok := conn.(syscall.Conn)
	if !ok {
		return
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpUserTimeout, int(peerTimeout.Milliseconds()))
	})
}
