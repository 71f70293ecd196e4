// Package harness runs real servers as processes that can be killed, stopped
// and cut off, and compares what was committed with what was stored.
//
// It serves tests and the demo program alike. Functions that take a
// testing.TB fail the test and clean up after it; all others return errors.
//
// What a caller does, in order:
//
//  1. RunPostgres and RunNATS (or CreatePostgres and CreateNATS with Start)
//     for the servers, a Proxy where a link is to be cut.
//
//  2. BuildRelay and Relay.Start for the program under test.
//
//  3. Writers to commit a known workload, then ReadStream and Compare.
//
//  4. A program that is no test calls Shutdown before it exits. When a process
//     dies without it, a reaper ends its servers and removes its folders.
//
//     postgres.go  a Postgres cluster         nats.go   a JetStream server, or three
//     relay.go     the relay as a process     proxy.go  a TCP proxy with faults
//     writers.go   a known workload           oracle.go stream against workload
//     sandbox.go   folders, ports, reaper     process.go signals, output, exit
package harness
