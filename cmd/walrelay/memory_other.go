//go:build !linux

package main

// forgetPages is for Linux only.
func forgetPages() {}
