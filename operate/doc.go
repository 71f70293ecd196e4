// Package operate does the jobs of an operator that need both ends, the slot in
// Postgres and the stream in NATS: peek at what comes next, skip it, and check
// that the two fit. It knows no driver: it declares the interfaces it needs, and
// decides on values.
//
// What a caller does, in order:
//
//  1. Read the slot's confirmed flush LSN, then survey the stream, so that a
//     relay that runs meanwhile cannot make the log look ahead of the stream.
//  2. Give the event.Resume of that survey to Peek, or to an Advance.
//  3. Advance only a slot that nobody reads. It tells every event that is
//     skipped before it changes anything, moves the checkpoint, then the slot.
//
// | file        | holds                                                   |
// |-------------|---------------------------------------------------------|
// | ahead.go    | the events that the slot sends and the stream has not   |
// | event.go    | an event that outlives its record, as JSON              |
// | advance.go  | passing over events, with an audit                      |
// | fit.go      | whether the table's rows fit the stream                 |
// | standing.go | how far Postgres, relay and stream are apart            |
package operate
