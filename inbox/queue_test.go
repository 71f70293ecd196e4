package inbox

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

func arrive(q *queue, seq, delivery uint64, key string) *item {
	return q.add(&item{seq: seq, delivery: delivery, delivered: 1}, key)
}

func nextSeq(q *queue) uint64 {
	if it := q.next(); it != nil {
		return it.seq
	}
	return 0
}

func TestNothingBeginsWhileDeliveriesMayBeElsewhere(t *testing.T) {
	q := newQueue(false)
	arrive(q, 7, 4, "a") // three deliveries went to a process that is no more
	if got := nextSeq(q); got != 0 {
		t.Fatalf("began %d", got)
	}
	if got := q.assure(3, 4); got != 2 {
		t.Errorf("%d are elsewhere, want 2", got)
	}
	arrive(q, 6, 5, "a")
	arrive(q, 5, 6, "a")
	if q.assure(3, 5); !q.unsure {
		t.Error("sure of what the server said before the last delivery")
	}
	if got := q.assure(3, 6); got != 0 || q.unsure {
		t.Errorf("%d are elsewhere", got)
	}
	for _, want := range []uint64{5, 6, 7} {
		it := q.next()
		if it == nil || it.seq != want {
			t.Fatalf("got %v, want %d", it, want)
		}
		if got := nextSeq(q); got != 0 {
			t.Fatalf("began %d beside %d", got, want)
		}
		q.settle(it)
	}
	arrive(q, 9, 8, "a") // delivery 7 was lost on its way
	if got := nextSeq(q); got != 0 {
		t.Fatalf("began %d", got)
	}
	arrive(q, 8, 9, "a")
	q.assure(2, 9)
	if got := nextSeq(q); got != 8 {
		t.Errorf("began %d, want 8", got)
	}
}

func TestFailedEventHoldsItsAggregateOnly(t *testing.T) {
	q := newQueue(false)
	q.assure(0, 0)
	for seq, key := range []string{"", "a", "b", "a", "b"} {
		if seq > 0 {
			arrive(q, uint64(seq), uint64(seq), key)
		}
	}
	now := time.Unix(1000, 0)
	q.postpone(q.next(), now.Add(time.Second))
	for _, want := range []uint64{2, 4} {
		it := q.next()
		if it == nil || it.seq != want {
			t.Fatalf("got %v, want %d", it, want)
		}
		q.settle(it)
	}
	if got := q.wake(now); !got.Equal(now.Add(time.Second)) || q.next() != nil {
		t.Errorf("wakes at %s", got)
	}
	arrive(q, 1, 5, "a") // delivered again meanwhile
	q.wake(now.Add(time.Second))
	for _, want := range []uint64{1, 3} {
		it := q.next()
		if it == nil || it.seq != want {
			t.Fatalf("got %v, want %d", it, want)
		}
		q.settle(it)
	}
	if len(q.items)+len(q.lanes)+len(q.ready)+q.running != 0 {
		t.Errorf("something is left: %+v", q)
	}
}

func TestSuspectRunsAlone(t *testing.T) {
	q := newQueue(false)
	q.assure(0, 0)
	arrive(q, 1, 1, "a")
	arrive(q, 2, 2, "b").suspect = true
	arrive(q, 3, 3, "c")
	first := q.next()
	if got := nextSeq(q); first.seq != 1 || got != 0 {
		t.Fatalf("began %d and %d", first.seq, got)
	}
	q.settle(first)
	suspect := q.next()
	if got := nextSeq(q); suspect.seq != 2 || got != 0 {
		t.Fatalf("began %d and %d", suspect.seq, got)
	}
	q.settle(suspect)
	if got := nextSeq(q); got != 3 {
		t.Errorf("began %d", got)
	}
}

// broker is a dumb model of the server's half: what it has delivered and waits for.
type broker struct {
	next     uint64 // stream sequence of the next new message
	delivery uint64
	pending  map[uint64]bool
}

// Whatever is lost, delivered again, failed or killed: of an aggregate nothing is
// handled before what precedes it in the stream.
func TestQueueKeepsOrderInRandomSchedules(t *testing.T) {
	const messages, aggregates, maxPending = 60, 4, 12
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 1))
		b := broker{next: 1, pending: map[uint64]bool{}}
		q := newQueue(false)
		done := map[uint64]bool{}
		var running []*item
		now := time.Unix(0, 0)
		key := func(seq uint64) string { return fmt.Sprint(seq % aggregates) }
		deliver := func(seq uint64) {
			b.delivery++
			b.pending[seq] = true
			if rng.IntN(8) == 0 {
				return // lost on its way
			}
			q.add(&item{seq: seq, delivery: b.delivery}, key(seq))
		}
		settled := func(it *item) {
			for seq := it.seq; seq > aggregates; {
				seq -= aggregates
				if !done[seq] {
					t.Fatalf("seed %d: %d is handled before %d", seed, it.seq, seq)
				}
			}
			done[it.seq] = true
			if rng.IntN(10) > 0 { // otherwise the ack is lost
				delete(b.pending, it.seq)
			}
			q.settle(it)
		}
		steps := 0
		for ; len(done) < messages || len(b.pending) > 0; steps++ {
			if steps > 50000 {
				t.Fatalf("seed %d: %d of %d handled, %d pending, %d here, unsure %v", seed, len(done), messages, len(b.pending), len(q.items), q.unsure)
			}
			now = now.Add(time.Millisecond)
			switch rng.IntN(8) {
			case 0, 1:
				if b.next <= messages && len(b.pending) < maxPending {
					deliver(b.next)
					b.next++
				}
			case 2: // an ack deadline passes, of what is not here and sometimes of what is
				seqs := slices.Sorted(maps.Keys(b.pending))
				if len(seqs) > 0 {
					if seq := seqs[rng.IntN(len(seqs))]; q.items[seq] == nil || rng.IntN(4) == 0 {
						deliver(seq)
					}
				}
			case 3:
				q.assure(len(b.pending), b.delivery)
			case 4, 5:
				if it := q.next(); it != nil && len(running) < 3 {
					running = append(running, it)
				} else if it != nil {
					q.postpone(it, now)
				}
			case 6:
				if len(running) > 0 {
					i := rng.IntN(len(running))
					it := running[i]
					running = slices.Delete(running, i, i+1)
					if rng.IntN(4) == 0 {
						q.postpone(it, now.Add(time.Duration(rng.IntN(20))*time.Millisecond))
					} else {
						settled(it)
					}
				}
			case 7:
				q.wake(now)
				if rng.IntN(200) == 0 { // killed; what ran may have been committed
					for _, it := range running {
						if rng.IntN(2) == 0 {
							done[it.seq] = true
						}
					}
					running, q = nil, newQueue(false)
				}
			}
		}
	}
}
