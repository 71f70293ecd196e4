// Package relay runs sessions: read → publish → settle → confirm.
//
// It is the core of walrelay and knows no driver; what it needs of Postgres and
// NATS it declares itself, in ports.go. The rules that keep the promises:
//
//   - One goroutine reads records, maps them and appends events, in commit order.
//   - The ledger holds, in order, which LSN becomes confirmable after how many
//     settled events. There is no other account of progress.
//   - A ticker takes the settled front of the ledger, records it as the
//     checkpoint beside the stream, and only then, and after the confirm delay,
//     confirms it to Postgres. It runs while the loop is blocked, too.
//   - When the window is full, reading stops. That is the back-pressure.
//   - Any error ends the session. The next one starts from what Postgres and the
//     stream say, so there is one way to recover from everything.
//
// | file       | holds                                              |
// |------------|----------------------------------------------------|
// | ports.go   | the interfaces to both sides                       |
// | relay.go   | options, the supervisor: retry, backoff, reporting |
// | session.go | one session: the loop, the ticker, the drain       |
// | ledger.go  | which LSN is confirmable when                      |
// | hold.go    | what waits for the confirm delay                   |
// | resume.go  | what is dropped when a session starts              |
// | observer.go| what an observer of the relay is told              |
// | silence.go | when a session that hears nothing is dead          |
// | vouch.go   | up to where the log is known to have every row     |
package relay
