package publisher

import "github.com/walrelay/walrelay/event"

// sendsAgain reports whether the server certainly sends the event at pos, which lies
// in its history. A message that is no part of a transaction counts by the begin of its
// record (logicalmsg_decode), and pos is at the end of that. A slot that was advanced to
// a flush position may be confirmed in between, where the record crosses a page: at
// the begin of a page.
func (f findings) sendsAgain(pos event.Position) bool {
	at := f.origin.ConfirmedFlush
	alone := pos.Commit == pos.Change // no row or message of a transaction is where its commit is
	return pos.Commit >= at && !(alone && at%smallestPage == 0)
}

// smallestPage is the smallest page that the WAL can have (configure --with-wal-blocksize).
const smallestPage = 1024
