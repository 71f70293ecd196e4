// Package metrics observes the relay: Prometheus metrics, and whether it is
// alive and ready. It knows no driver: cmd/walrelay hands it what the publisher
// and the watcher of the lag tell.
//
// Callers, in order:
//
//  1. Make a Monitor with New.
//  2. Give it to the relay as its Observer and to the publisher as its Meter.
//  3. Let a sampler with a connection of its own call Sampled.
//  4. Serve Handler.
//
// A scrape asks nobody: it reads what was told.
//
// | file         | holds                                                  |
// |--------------|--------------------------------------------------------|
// | monitor.go   | what the relay tells, and its state                    |
// | meter.go     | what the publisher tells: counts and times of acks     |
// | histogram.go | fixed buckets that cost a few nanoseconds              |
// | lag.go       | samples of the slot, and how far behind the relay is   |
// | trend.go     | how fast things go, and where they lead                |
// | collector.go | the metrics                                            |
// | health.go    | alive, ready, and the report behind both               |
// | handler.go   | the paths                                              |
package metrics
