// Package publisher turns events into stored messages of one JetStream stream,
// in order and each once.
//
// A Session is a chain: every message names the sequence that the stream must
// have before it (Nats-Expected-Last-Sequence), so thousands can be in flight
// and still none is stored out of turn: when one is refused, all later ones
// are. On any surprise the session fails as a whole; nothing is retried alone.
// A new session asks the stream what it holds (reconcile.go) and goes on there.
//
// Options.Mode lets messages share an ack, in an atomic batch or else.
//
// On a stream with other writers (Options.Shared) there is no chain: one message
// is in flight at a time, and its id keeps it from being stored twice.
//
// The caller's obligations, in order:
//
//  1. Open a session, then call Resume once, after the replication slot is owned.
//  2. Drop the events that Resume says are stored, Append the rest in commit order.
//  3. Flush before waiting for anything else.
//  4. Confirm an LSN to Postgres only after Checkpoint has recorded it.
//  5. After the session's failure, or any error, Close it and open another.
//
// | file         | holds                                                      |
// |--------------|------------------------------------------------------------|
// | publisher.go | options, the life of sessions, what one leaves to the next |
// | session.go   | the chain: append, window, acks, failure                   |
// | mode.go      | how messages ask for acks, and why so                      |
// | batch.go     | events as an atomic batch                                  |
// | sparse.go    | messages that do not ask                                   |
// | pace.go      | how many events are in flight                              |
// | wire.go      | one NATS client connection, by hand                        |
// | frame.go     | an event as HPUB bytes                                     |
// | ack.go       | replies and error codes                                    |
// | gather.go    | many acks with one read                                    |
// | reconcile.go | the decision where to go on, without I/O                   |
// | gone.go      | which events are stored though their messages are gone      |
// | checkpoint.go| the record beside the stream                               |
// | stored.go    | which events the stream holds, for backfill and recovery   |
// | shared.go    | what is decided otherwise on a stream with other writers    |
// | sharing.go   | and what is read there                                     |
// | stream.go    | creating and finding the streams                           |
// | judge.go     | what in the settings of a stream breaks a promise          |
// | inspect.go   | what the broker holds, for whoever looks on                |
// | meter.go     | how long events take, for whoever counts                   |
// | survey.go    | looking at stream and checkpoint without a session         |
// | deadletter.go| parking an event                                           |
// | letterbox.go | which dead letters have no marker yet                       |
// | missing.go   | dead letters that their stream has lost                    |
// | letters.go   | reading and removing dead letters, for whoever looks on    |
// | replay.go    | dead letters that are published after all, runs, the key   |
// | hold.go      | parking what follows in the same aggregate                 |
package publisher
