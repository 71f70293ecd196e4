//go:build !linux

package sock

import "net"

// Lean returns conn as it is.
func Lean(conn net.Conn) net.Conn { return conn }
