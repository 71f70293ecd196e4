package chaos

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// witness remembers what was seen of stream and slot while faults happened.
type witness struct {
	mu       sync.Mutex
	messages map[uint64]harness.Stored // those that were purged later, too
	samples  []sample
	changed  []string // messages that were another one before

	busiest int64 // connections in a second, of one link
}

// sample is a confirmed LSN and a last sequence that was read after it: every
// event below the LSN has to be among the messages up to the sequence.
type sample struct {
	at        time.Time
	confirmed event.LSN
	last      uint64
}

func newWitness() *witness { return &witness{messages: map[uint64]harness.Stored{}} }

// read adds what the stream holds, and returns the last sequence that was read.
func (w *witness) read(ctx context.Context, js jetstream.JetStream) (uint64, error) {
	all, err := harness.ReadStream(ctx, js, stream)
	w.mu.Lock()
	defer w.mu.Unlock()
	var last uint64
	for _, m := range all {
		if was, ok := w.messages[m.Seq]; ok && was.Pos != m.Pos {
			w.changed = append(w.changed, fmt.Sprintf("sequence %d was %s at %s, is %s at %s", m.Seq, was.ID, was.Pos, m.ID, m.Pos))
		}
		w.messages[m.Seq] = m
		last = m.Seq
	}
	return last, err
}

// stored are the messages in the order of the stream.
func (w *witness) stored() []harness.Stored {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []harness.Stored
	for _, seq := range slices.Sorted(maps.Keys(w.messages)) {
		all = append(all, w.messages[seq])
	}
	return all
}

// watch samples slot and stream until ctx ends.
func (w *witness) watch(ctx context.Context, pg *harness.Postgres, nodes []*harness.NATS) {
	var c *pgx.Conn
	hangUp := func() {
		if c != nil {
			short, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
			defer cancel()
			c.Close(short)
			c = nil
		}
	}
	defer hangUp()
	for pause(ctx, 30*time.Millisecond) {
		short, cancel := context.WithTimeout(ctx, time.Second)
		var err error
		if c == nil {
			c, err = pg.Conn(short)
		}
		var text string
		if err == nil {
			err = c.QueryRow(short, "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = $1", slot).Scan(&text)
		}
		cancel()
		if err != nil {
			hangUp()
			continue
		}
		lsn, err := event.ParseLSN(text)
		if err != nil {
			continue
		}
		if last, ok := lastSequence(nodes); ok {
			w.mu.Lock()
			w.samples = append(w.samples, sample{time.Now(), lsn, last})
			w.mu.Unlock()
		}
	}
}

// lastSequence is the highest of what all servers say. A follower may be behind,
// and a server that was stopped out of date or not yet aware of the stream, so
// all have to know of it.
func lastSequence(nodes []*harness.NATS) (uint64, bool) {
	var last uint64
	for _, n := range nodes {
		var z struct {
			Accounts []struct {
				Streams []struct {
					Name  string `json:"name"`
					State struct {
						Last uint64 `json:"last_seq"`
					} `json:"state"`
				} `json:"stream_detail"`
			} `json:"account_details"`
		}
		if n.Monitor("/jsz?streams=true", &z) != nil {
			return 0, false
		}
		known := false
		for _, a := range z.Accounts {
			for _, s := range a.Streams {
				if s.Name == stream {
					known, last = true, max(last, s.State.Last)
				}
			}
		}
		if !known {
			return 0, false
		}
	}
	return last, true
}

// early finds samples in which an LSN was confirmed before an event below it was stored.
func (w *witness) early(stored []harness.Stored) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	var found []string
	for _, s := range w.samples {
		i, _ := slices.BinarySearchFunc(stored, s.last+1, func(m harness.Stored, seq uint64) int { return int(m.Seq) - int(seq) })
		if i == len(stored) {
			continue
		}
		pos, err := event.ParsePosition(stored[i].Pos)
		if err == nil && pos.Commit < s.confirmed {
			found = append(found, fmt.Sprintf("at %s %s was confirmed and the stream's last sequence %d, but sequence %d is at %s",
				s.at.UTC().Format("15:04:05.000"), s.confirmed, s.last, stored[i].Seq, pos))
		}
	}
	return found
}

// count watches how many connections the relays make, until ctx ends.
func (w *witness) count(ctx context.Context, relays []*relay) {
	before := map[*harness.Proxy]int64{}
	for pause(ctx, time.Second) {
		for _, r := range relays {
			for _, p := range append([]*harness.Proxy{r.toPostgres}, r.toNATS...) {
				n := p.Accepted()
				w.mu.Lock()
				w.busiest = max(w.busiest, n-before[p])
				w.mu.Unlock()
				before[p] = n
			}
		}
	}
}
