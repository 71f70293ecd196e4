// Package inbox is for consumers in Go: it handles each event once, in the
// consumer's own transaction.
//
// The relay stores each event once in the stream, and JetStream delivers it at
// least once. The inbox is a table in the consumer's database that makes the
// two ends meet: what an event changes there, and the record that it was handled, are
// committed together.
//
// What a caller does, in order:
//
//  1. Make the table in the consumer's database: `walrelay init --inbox --apply`, or Schema.
//  2. Make a durable pull consumer with explicit acks, a MaxAckPending that fits
//     into memory (1000), no MaxDeliver, and an AckWait as short as a crash may hold up
//     the events (10s). Make a stream for the dead letters.
//  3. Run with a Handler that writes with the transaction that it is given.
//  4. Prune now and then.
//
// A restricted NATS user needs, of the API, CONSUMER.INFO and CONSUMER.MSG.NEXT of the
// consumer and STREAM.NAMES, and may publish to $JS.ACK.> and to the dead-letter subject.
//
// Whoever has a loop of their own calls Once and acks after the commit.
//
// # How often, and in which order
//
// What a Handler writes with its transaction takes effect once. What else it
// does (a mail, a call) may happen again, as it cannot be taken back when the commit fails.
//
// Events of one aggregate (Outbox-Aggregate-Type and -Id) are handled one after
// the other in the order of the stream, those of others beside them. An event that
// fails stays in the process and is tried again after a pause, and what follows in
// its aggregate waits in memory, its deadline extended. It is not given back (nak):
// the server would deliver its followers first. A Consumer holds as many messages as
// MaxAckPending says, so an aggregate with as many waiting events holds up the others, too,
// until its first one succeeds or becomes a dead letter.
//
// Order needs that one process handles a JetStream consumer's events at a time.
// An advisory lock of the consumer's database, by Options.Name, sees to it, and
// further processes stand by; its connection shows as idle in transaction. To share work between
// processes, give the relay a subject with {partition:N}, and every partition a
// consumer of its own, in whatever process: an aggregate stays in its partition. When order
// does not matter, Unordered lets any number of processes share one consumer.
//
// After a crash, events wait until what was delivered to the dead process is
// delivered again, which the server does after AckWait. After an orderly end there is no wait.
//
// # Failures
//
// A Handler's error rolls back its transaction. It counts against MaxDeliver
// unless it says nothing about the event: Later marks such errors, and those of
// Postgres's connections, deadlocks, serialization and shutdowns are known. Reject
// marks one for which trying again is pointless. A panic is an error.
//
// After MaxDeliver tries the event is published to the dead-letter subject with
// Outbox-Reason, Outbox-Subject, Outbox-Consumer and Outbox-Tries, and when that is
// stored, recorded as handled and terminated. What follows in its aggregate goes on.
// An event that was delivered more often than MaxDeliver without any outcome may be what
// ends the process. It is handled while nothing else is, and each such try is recorded
// before, so that only the event that does it becomes a dead letter.
//
// Markers of events that the relay has parked are acked and passed over, unless
// Options.Parked wants them.
//
// # Isolation and savepoints
//
// Two transactions with the same event: the second one blocks in Once until the
// first ends. At REPEATABLE READ and SERIALIZABLE it may get 40001 instead; a Consumer
// tries again by itself. A Handler can use savepoints (tx.Begin) as it likes. An SQL
// error that it passes over without one has aborted the transaction, and the event fails at the commit.
//
// # How long to keep records
//
// Prune must not delete the record of an event that can still be delivered: keep
// records longer than the stream keeps messages (max_age); on a stream that keeps
// all, longer than a consumer is ever away, plus AckWait. Longer also than a replay
// reaches back and the relay's --confirm-delay, since replays keep the event's id and are
// passed over. To handle events anew on purpose, choose another Options.Name. With days or weeks
// one is on the safe side; a record takes some 150 bytes with its indexes.
//
// | file        | holds                                                       |
// |-------------|-------------------------------------------------------------|
// | table.go    | Once and Prune                                              |
// | schema.go   | the tables: making them and looking at them                 |
// | message.go  | what a handler sees                                         |
// | options.go  | options                                                     |
// | consumer.go | the run: what is looked at first, and sessions              |
// | owner.go    | the lock                                                    |
// | session.go  | the loop: read, hand to workers, ack                        |
// | queue.go    | what is handled next, without I/O                           |
// | work.go     | one event: transaction, commit, dead letter                 |
// | errors.go   | whose fault an error is                                     |
package inbox
