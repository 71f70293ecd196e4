// Package operate holds the jobs that span both ends, the slot in Postgres and
// the stream in NATS: backfill and recovery, a peek at what comes next, skipping
// it, pruning what is published, and the check that the two fit.
//
// It knows no driver: what it needs of Postgres and NATS it declares itself, as
// relay does, and it decides on values.
//
// What a caller of peek, advance and check does, in order:
//
//  1. Read the slot's confirmed flush LSN, then survey the stream, so that a
//     relay that runs meanwhile cannot make the log look ahead of the stream.
//  2. Give the event.Resume of that survey to Peek, or to an Advance.
//  3. Advance only a slot that nobody reads. It tells every event that is
//     skipped before it changes anything, moves the checkpoint, then the slot.
//
// # Replay
//
// Stored rows and dead letters are published again by the relay, which stays the
// only writer of its stream: a job writes signed messages into the log, each
// transaction of them as a whole or not at all. The record of a run is written
// before each commit and names the transaction, so that whoever goes on with it asks
// Postgres what became of the last one.
//
// # Backfill
//
// A job reads the rows of the outbox tables in a snapshot, publishes those that
// the stream does not have, and leaves behind a slot that begins where the
// snapshot ends. Rows are one with the log, without gap or overlap:
//
//   - The snapshot comes with a temporary slot: what is visible in the one is not
//     sent by the other. At the end the slot is copied to the one that stays, with
//     the same beginning, over the connection that owns it.
//   - A row's position is (timeline, the slot's beginning − 1, its number in the
//     read, 0). No commit of the log has that LSN, since records begin at
//     multiples of eight; every commit that the slot sends comes after it; and a
//     later snapshot begins at a higher one. So positions grow, and compare with
//     those of the log.
//   - All messages go through the chain of the sink: two jobs cannot both write.
//
// It can be killed at any moment. The temporary slot and its snapshot die with
// the connection, and the next run takes a new one, in which there are more
// rows, some of them before the last one that was published: a transaction may
// take its number early and commit late. So it does not count. It reads back from the
// stream the ids that are stored, and publishes the rows whose ids are not
// among them, in their order. Events of one aggregate keep theirs, as their
// transactions follow one another.
//
// The checkpoint says what state this is in:
//
//	claim, "running" ─▶ rows … ─▶ "done" ─▶ slot ─▶ the first session of the relay claims it
//	      ▲                                  │
//	      └── killed before there is a slot ─┘
//
// # Recovery
//
// A lost slot is the same job with a lower bound: of what the stream holds at
// its beginning, the highest place in the table's order. What comes before
// was published and has left the stream, as far as anybody can tell.
//
// # Prune
//
// A row may go when three things hold that no one place knows:
//
//   - Its commit lies before a place in the log: its transaction had ended when a
//     [Horizon] was taken, and the end of the log was read after that.
//   - All of the log up to there is dealt with: slot and checkpoint are past it. A slot
//     alone may have been made anew behind it.
//   - It was in the log: it was inserted since the moment from which on, as the checkpoint
//     says, nothing was passed over. Rows from before the slot's first session were not
//     for certain.
//
// The checkpoint and the dead letters are read after the wait for the slot, so
// that an event that was parked before it was confirmed is among them.
//
// | file        | holds                                                   |
// |-------------|---------------------------------------------------------|
// | ports.go    | what a backfill needs of both sides                     |
// | backfill.go | the job: attempts, sessions, one pass                   |
// | known.go    | the set of stored ids                                   |
// | ahead.go    | the events that the slot sends and the stream has not   |
// | event.go    | an event that outlives its record, as JSON              |
// | advance.go  | passing over events, with an audit                      |
// | replay.go   | stored rows published again, run by run                 |
// | redeliver.go| dead letters published after all                        |
// | fit.go      | whether the table's rows fit the stream                 |
// | prune.go    | which rows are published and may be deleted             |
// | standing.go | how far Postgres, relay and stream are apart            |
package operate
