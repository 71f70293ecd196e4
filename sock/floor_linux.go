//go:build !386

package sock

import (
	"net"
	"syscall"
	"unsafe"
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
	var errno syscall.Errno
	err = raw.Control(func(fd uintptr) {
		// Raw as in Lean: the call of package syscall sets the monitor thread going.
		v := int32(n)
		_, _, errno = syscall.RawSyscall6(syscall.SYS_SETSOCKOPT, fd, syscall.SOL_SOCKET, syscall.SO_RCVLOWAT,
			uintptr(unsafe.Pointer(&v)), unsafe.Sizeof(v), 0)
	})
	return err == nil && errno == 0
}
