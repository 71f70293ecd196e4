package publisher

import (
	"net"
	"syscall"
)

// setReadFloor makes the socket below conn readable only when it has n bytes
// (SO_RCVLOWAT of socket(7)), or its peer has closed it. It reports whether
// that can be done.
func setReadFloor(conn net.Conn, n int) bool {
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
	err = raw.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, n)
	})
	return err == nil && failed == nil
}
