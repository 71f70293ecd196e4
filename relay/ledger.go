package relay

import (
	"sync"

	"github.com/walrelay/walrelay/event"
)

// ledger is the account of what may be confirmed: a queue of checkpoints in
// order, each good as soon as its number of events is settled. The loop adds,
// the ticker takes; the lock is taken once a transaction, not once an event.
type ledger struct {
	mu    sync.Mutex
	queue []event.Checkpoint // Events strictly increasing
	head  int
}

// add says that c.Confirm is confirmable once c.Events events are settled.
// settled lets it forget what a later entry supersedes, so that the queue is
// never longer than the window.
func (l *ledger) add(c event.Checkpoint, settled uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.queue); n > l.head && l.queue[n-1].Events == c.Events {
		last := &l.queue[n-1]
		last.Confirm = max(last.Confirm, c.Confirm)
		return
	}
	for l.head+1 < len(l.queue) && l.queue[l.head+1].Events <= settled {
		l.head++
	}
	if l.head > 0 && len(l.queue) == cap(l.queue) {
		n := copy(l.queue, l.queue[l.head:])
		l.queue, l.head = l.queue[:n], 0
	}
	l.queue = append(l.queue, c)
}

// take removes and returns the last checkpoint that is good when settled
// events are settled.
func (l *ledger) take(settled uint64) (event.Checkpoint, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var c event.Checkpoint
	found := false
	for l.head < len(l.queue) && l.queue[l.head].Events <= settled {
		c, found = l.queue[l.head], true
		l.head++
	}
	if l.head == len(l.queue) {
		l.queue, l.head = l.queue[:0], 0
	}
	return c, found
}
