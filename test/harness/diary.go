package harness

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Outcome is what a writer knows of an event's transaction.
type Outcome uint8

// The outcomes.
const (
	RolledBack Outcome = iota // never committed
	Committed                 // COMMIT was acknowledged
	Unknown                   // the connection broke at COMMIT
)

// Entry is what a writer remembers of one event.
type Entry struct {
	ID        string // the event's id, as text
	Aggregate string // aggregate id
	N         int    // increases within the aggregate
	Payload   []byte // as the database returns it; only its hash is kept

	Tx      int64 // events of one transaction share it
	Outcome Outcome
	At      time.Time // when COMMIT returned

	deleted bool // in its own transaction, so that the table tells nothing
	sum     uint64
	size    int
}

// Diary is what writers know of their events. All methods are safe for
// concurrent use.
type Diary struct {
	mu        sync.Mutex
	entries   map[string]*Entry
	committed int
	waiting   chan struct{} // closed by the next change; nil when nobody waits
}

// NewDiary is empty.
func NewDiary() *Diary { return &Diary{entries: make(map[string]*Entry)} }

var payloadSeed = maphash.MakeSeed()

// Add remembers events of one transaction.
func (d *Diary) Add(entries ...Entry) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, e := range entries {
		e.sum, e.size, e.Payload = maphash.Bytes(payloadSeed, e.Payload), len(e.Payload), nil
		if e.Outcome == Committed {
			d.committed++
		}
		d.entries[e.ID] = &e
	}
	if d.waiting != nil {
		close(d.waiting)
		d.waiting = nil
	}
}

// Committed is the number of events whose COMMIT was acknowledged.
func (d *Diary) Committed() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.committed
}

// Count is the number of events with an outcome.
func (d *Diary) Count(o Outcome) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, e := range d.entries {
		if e.Outcome == o {
			n++
		}
	}
	return n
}

// Await blocks until n events are committed.
func (d *Diary) Await(ctx context.Context, n int) error {
	for {
		d.mu.Lock()
		if d.committed >= n {
			d.mu.Unlock()
			return nil
		}
		if d.waiting == nil {
			d.waiting = make(chan struct{})
		}
		waiting := d.waiting
		d.mu.Unlock()
		select {
		case <-waiting:
		case <-ctx.Done():
			return fmt.Errorf("wait for %d committed events, have %d: %w", n, d.Committed(), ctx.Err())
		}
	}
}

// Resolve looks the events of unknown outcome up in the table. Those that were
// deleted in their own transaction stay unknown.
func (d *Diary) Resolve(ctx context.Context, c *pgx.Conn, table string) error {
	d.mu.Lock()
	byTx := make(map[int64][]*Entry)
	var ids []string
	for _, e := range d.entries {
		if e.Outcome == Unknown && !e.deleted {
			byTx[e.Tx] = append(byTx[e.Tx], e)
			ids = append(ids, e.ID)
		}
	}
	d.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	rows, err := c.Query(ctx, "SELECT id::text FROM "+table+" WHERE id = ANY($1)", ids)
	if err != nil {
		return fmt.Errorf("look up events: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("look up events: %w", err)
	}
	there := make(map[string]bool, len(found))
	for _, id := range found {
		there[id] = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, tx := range byTx {
		for _, e := range tx {
			e.Outcome = RolledBack
			if there[e.ID] {
				e.Outcome = Committed
				d.committed++
			}
		}
	}
	return nil
}
