//go:build !linux

package publisher

import "net"

// setReadFloor is for Linux only.
func setReadFloor(net.Conn, int) bool { return false }
