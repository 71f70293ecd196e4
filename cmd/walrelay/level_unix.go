//go:build unix

package main

import (
	"os"
	"os/signal"
	"syscall"
)

// onUser1 calls f at every SIGUSR1, until stop is called.
func onUser1(f func()) (stop func()) {
	sigs := make(chan os.Signal, 1)
	signal.Notify(sigs, syscall.SIGUSR1)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-sigs:
				f()
			case <-done:
				return
			}
		}
	}()
	return func() {
		signal.Stop(sigs)
		close(done)
	}
}
