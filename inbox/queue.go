package inbox

import (
	"cmp"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// queue holds the messages that the server has delivered and that are not yet
// settled, in lanes: one an aggregate. It decides what is handled next, without
// I/O and without a clock. One goroutine owns it.
//
// In order means: of an aggregate nothing is handled as long as something before
// it is not settled, be it in the queue or elsewhere. Elsewhere are messages that
// the server has delivered to a process that died, or into a connection that
// broke. The consumer sequence shows them: it counts deliveries, so one that is
// left out means a delivery that went elsewhere, and nothing is begun until
// the server says that all it waits for is here.
type queue struct {
	unordered bool

	items map[uint64]*item // by stream sequence
	lanes map[string]*lane
	ready []*lane // can begin with their first item, oldest first

	running int
	alone   bool // the item that runs must run alone

	last    uint64 // consumer sequence of the last delivery
	unsure  bool   // deliveries up to unknown may be elsewhere
	unknown uint64
}

// item is one message in the queue.
type item struct {
	seq       uint64 // of the stream
	delivery  uint64 // consumer sequence of its latest delivery
	delivered uint64 // how often the server has delivered it
	suspect   bool   // it may be what killed earlier processes

	doomed   string // why it is to become a dead letter, once that is decided
	failures int    // of its handler, in this process
	delays   int    // failures of whatever kind in a row

	lane    *lane
	running bool

	msg *Message
	raw jetstream.Msg
}

type lane struct {
	key     string
	items   []*item // by stream sequence
	waiting bool    // for the time of the next try
	queued  bool    // in ready
	until   time.Time
}

func newQueue(unordered bool) *queue {
	return &queue{unordered: unordered, items: map[uint64]*item{}, lanes: map[string]*lane{}, unsure: !unordered}
}

// count takes note of a delivery.
func (q *queue) count(delivery uint64) {
	if delivery != q.last+1 && !q.unordered {
		q.unsure, q.unknown = true, delivery-1
	}
	q.last = delivery
}

// add takes a delivery in. It returns the item that is in the queue for it: a
// message that is delivered again while it is here stays where it is.
func (q *queue) add(it *item, key string) *item {
	q.count(it.delivery)
	if old := q.items[it.seq]; old != nil {
		old.delivery, old.raw, old.delivered = it.delivery, it.raw, max(old.delivered, it.delivered)
		return old
	}
	q.items[it.seq] = it
	l := q.lanes[key]
	if l == nil {
		l = &lane{key: key}
		q.lanes[key] = l
	}
	it.lane = l
	at, _ := slices.BinarySearchFunc(l.items, it.seq, func(it *item, seq uint64) int { return cmp.Compare(it.seq, seq) })
	l.items = slices.Insert(l.items, at, it)
	q.offer(l)
	return it
}

// offer makes a lane ready when it is.
func (q *queue) offer(l *lane) {
	if l.queued || l.waiting || len(l.items) == 0 || slices.ContainsFunc(l.items, func(it *item) bool { return it.running }) {
		return
	}
	l.queued = true
	q.ready = append(q.ready, l)
}

// next is the item to handle now, nil when there is none. It runs until settle or postpone.
func (q *queue) next() *item {
	if q.unsure || q.alone || len(q.ready) == 0 {
		return nil
	}
	l := q.ready[0]
	it := l.items[0]
	if it.suspect && q.running > 0 {
		return nil // the others end first, so that it cannot take them along
	}
	q.ready = q.ready[1:]
	l.queued = false
	it.running, q.alone = true, it.suspect
	q.running++
	return it
}

func (q *queue) stop(it *item) {
	it.running, q.alone = false, false
	q.running--
}

// settle takes an item out that is done.
func (q *queue) settle(it *item) {
	q.stop(it)
	delete(q.items, it.seq)
	l := it.lane
	l.items = slices.DeleteFunc(l.items, func(other *item) bool { return other == it })
	if len(l.items) == 0 {
		delete(q.lanes, l.key)
		return
	}
	q.offer(l)
}

// postpone keeps an item, and with it its lane, until a time.
func (q *queue) postpone(it *item, until time.Time) {
	q.stop(it)
	it.lane.waiting, it.lane.until = true, until
}

// wake offers the lanes whose time has come and returns when the next one's
// does; zero when none waits.
func (q *queue) wake(now time.Time) (next time.Time) {
	for _, l := range q.lanes {
		switch {
		case !l.waiting:
		case !l.until.After(now):
			l.waiting = false
			q.offer(l)
		case next.IsZero() || l.until.Before(next):
			next = l.until
		}
	}
	return next
}

// assure takes what the server says at one moment: how many messages it waits
// for, and the consumer sequence of its latest delivery. It returns how many of them are elsewhere.
func (q *queue) assure(pending int, delivered uint64) (elsewhere int) {
	here := 0
	for _, it := range q.items {
		if it.delivery <= delivered {
			here++ // delivered before that moment and not settled since, so it waits for it
		}
	}
	if delivered >= q.unknown && pending <= here {
		q.unsure = false
		q.last = max(q.last, delivered)
		return 0
	}
	return max(pending-here, 1)
}
