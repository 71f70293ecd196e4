// Package replication turns the bytes of one replication connection into
// records in commit order, and owns that connection.
//
// What a caller does, in order:
//
//  1. Open a Stream. It starts streaming at the slot's confirmed flush LSN.
//  2. Call Next from one goroutine, again and again. A record and its bytes
//     are valid until the following call.
//  3. Call Confirm about once a second, from any goroutine, also with an
//     unchanged LSN: it is the only answer the server gets, and a session that
//     is silent for wal_sender_timeout is ended by the server. Confirm an LSN
//     only when every event delivered before the record that carried it is settled.
//  4. Call Close when Next has returned an error, or at any time to make it do so.
//
// A Stream is one session: no error of Next is repaired here, and the next
// session is another Stream.
//
// The layers, each of which knows only the one below:
//
//	stream.go    the session: Next, Confirm, Interrupt, Close
//	open.go      connect, identify, start
//	snapshot.go  a temporary slot and the snapshot where it begins, for reading the table first
//	failure.go   what the server's errors ask for
//	decode.go    CopyData bytes → event.Record; pure, allocates nothing for a row
//	kinds.go     which messages are skipped, and which are refused
//	encoding.go  values that the server cannot convert to UTF-8
//	gather.go    many messages with one read when they come fast
//	timeline.go  which timeline owns an LSN
//	changes.go   the same records from what SQL returns, without a session
package replication
