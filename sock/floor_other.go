//go:build !linux || 386

package sock

import "net"

// SetReadFloor is for Linux only, and there not for 386, whose call for it is another one.
func SetReadFloor(net.Conn, int) bool { return false }
