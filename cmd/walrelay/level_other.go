//go:build !unix

package main

// onUser1 does nothing where there is no such signal.
func onUser1(func()) (stop func()) { return func() {} }
