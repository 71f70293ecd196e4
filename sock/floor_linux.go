package sock

import (
	"net"
	"syscall"
)

// SetReadFloor makes the socket below conn readable only when it has n bytes
// (SO_RCVLOWAT of socket(7)), or its peer has closed it. A read that finds less
// takes it all the same: it is only not woken for it. It reports whether that
// can be done.
func SetReadFloor(conn net.Conn, n int) bool {
	if c, ok := conn.(interface{ NetConn() net.Conn }); ok {
		conn = c.NetConn() // below TLS
	}
	c, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	var failed error
	err = raw.Control(func(fd uintptr) {
		failed = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVLOWAT, n)
	})
	return err == nil && failed == nil
}
