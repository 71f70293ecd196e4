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
	setOption(conn, syscall.IPPROTO_TCP, tcpUserTimeout, int(peerTimeout.Milliseconds()))
}

// setReadFloor makes the socket readable only when it has n bytes (SO_RCVLOWAT of
// socket(7)), or its peer has closed it. It reports whether that can be done.
func setReadFloor(conn net.Conn, n int) bool {
	return setOption(conn, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, n)
}

// setOption sets an option of the TCP socket below conn.
func setOption(conn net.Conn, level, name, value int) bool {
	if c, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = c.NetConn() // below TLS
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return false
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = syscall.SetsockoptInt(int(fd), level, name, value) })
	return err == nil && failed == nil
}
