// Package test holds what is proved of the whole: how the packages may depend
// on each other, and scenarios that run the real relay between real servers.
//
// The servers come from package harness. One that is missing fails its test.
package test
