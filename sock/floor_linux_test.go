//go:build !386

package sock

import (
	"net"
	"testing"
)

func TestFloorHoldsAWaitBack(t *testing.T) {
	lean, peer := pair(t)
	if !SetReadFloor(lean, 100) {
		t.Fatal("cannot be set")
	}
	peer.Write(make([]byte, 10))
	got := make(chan int)
	read := func() {
		n, err := lean.Read(make([]byte, 1000))
		if err != nil {
			t.Error(err)
		}
		got <- n
	}
	go read()
	n := <-got // whether or not it was there in time to be taken at once
	go read()
	peer.Write(make([]byte, 100))
	if n += <-got; n < 100 {
		t.Errorf("read %d bytes, want at least 100", n)
	}
	client, server := net.Pipe()
	defer client.Close()
	defer server.Close()
	if SetReadFloor(client, 100) || Lean(client) != client {
		t.Error("a pipe is no socket")
	}
}
