package harness

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/walrelay/walrelay/event"
)

// ParkedSubject begins the subjects of the markers that hold a parked event's place.
const ParkedSubject = "walrelay.parked."

// Stored is a message of a stream.
type Stored struct {
	Seq       uint64
	Time      time.Time // when the server stored it
	Subject   string
	ID        string // Outbox-Id
	Pos       string // Outbox-Pos
	Aggregate string // Outbox-Aggregate-Id
	Payload   []byte
}

// Marker reports whether the message stands for a parked event.
func (s *Stored) Marker() bool { return strings.HasPrefix(s.Subject, ParkedSubject) }

// silence is how long a consumer may bring nothing before its stream's end until another takes its place.
const silence = 5 * time.Second

// Messages yields what a stream holds at the time of the call, in order. It
// blocks for each message. A consumer that falls silent on the way is replaced: one was seen to
// stall for good on a healthy server, and what is asked here is what the stream holds.
// Ten of them in a row that bring nothing are an error, which is the last thing yielded.
func Messages(ctx context.Context, js jetstream.JetStream, name string, c jetstream.OrderedConsumerConfig, opts ...jetstream.PullMessagesOpt) iter.Seq2[jetstream.Msg, error] {
	return func(yield func(jetstream.Msg, error) bool) {
		stream, err := js.Stream(ctx, name)
		if err != nil {
			yield(nil, fmt.Errorf("read stream %s: %w", name, err))
			return
		}
		state := stream.CachedInfo().State
		last, n := uint64(0), uint64(0)
		for fruitless := 0; n < state.Msgs && last < state.LastSeq; fruitless++ {
			before := n
			if last > 0 {
				c.DeliverPolicy, c.OptStartSeq = jetstream.DeliverByStartSequencePolicy, last+1
			}
			consumer, err := stream.OrderedConsumer(ctx, c)
			if err != nil {
				yield(nil, fmt.Errorf("read stream %s: %w", name, err))
				return
			}
			for m, err := range messagesOf(ctx, consumer, opts...) {
				var meta *jetstream.MsgMetadata
				if err == nil {
					meta, err = m.Metadata()
				}
				if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil && fruitless < 9 {
					break
				}
				if err != nil {
					yield(nil, fmt.Errorf("read stream %s after %d of %d messages: %w", name, n, state.Msgs, err))
					return
				}
				if last = meta.Sequence.Stream; last > state.LastSeq {
					return
				}
				n++
				// A consumer on a server that lags has nothing pending before the end.
				if !yield(m, nil) || last == state.LastSeq || meta.NumPending == 0 && n >= state.Msgs {
					return
				}
			}
			if n > before {
				fruitless = 0
			}
		}
	}
}

// messagesOf yields what a consumer brings until it is silent, which is an error.
func messagesOf(ctx context.Context, consumer jetstream.Consumer, opts ...jetstream.PullMessagesOpt) iter.Seq2[jetstream.Msg, error] {
	return func(yield func(jetstream.Msg, error) bool) {
		it, err := consumer.Messages(opts...)
		if err != nil {
			yield(nil, err)
			return
		}
		defer it.Stop()
		for err == nil {
			next, cancel := context.WithTimeout(ctx, silence)
			var m jetstream.Msg
			m, err = it.Next(jetstream.NextContext(next))
			cancel()
			if !yield(m, err) {
				return
			}
		}
	}
}

// ReadStream reads all messages that a stream holds now, in order.
func ReadStream(ctx context.Context, js jetstream.JetStream, name string) ([]Stored, error) {
	var all []Stored
	for m, err := range Messages(ctx, js, name, jetstream.OrderedConsumerConfig{}, jetstream.PullMaxMessages(5000)) {
		if err != nil {
			return nil, err
		}
		meta, err := m.Metadata()
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", name, err)
		}
		h := m.Headers()
		all = append(all, Stored{
			Seq:       meta.Sequence.Stream,
			Time:      meta.Timestamp,
			Subject:   m.Subject(),
			ID:        h.Get(event.HeaderID),
			Pos:       h.Get(event.HeaderPos),
			Aggregate: h.Get(event.HeaderAggregateID),
			Payload:   m.Data(),
		})
	}
	return all, nil
}

// AwaitMessages blocks until a stream holds at least n messages. It rides out a
// broker that is away.
func AwaitMessages(ctx context.Context, js jetstream.JetStream, name string, n int) error {
	var have uint64
	var last error
	err := until(ctx, 20*time.Millisecond, "messages", func() bool {
		short, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		stream, err := js.Stream(short, name)
		if last = err; err != nil {
			return false
		}
		have = stream.CachedInfo().State.Msgs
		return have >= uint64(max(n, 0))
	})
	if err != nil {
		return fmt.Errorf("stream %s has %d of %d messages: %w", name, have, n, errors.Join(err, last))
	}
	return nil
}

// Finding is one thing that is wrong.
type Finding struct {
	ID     string // of the event
	Seq    uint64 // of the message; 0 when there is none
	Detail string
}

func (f Finding) String() string {
	if f.Seq == 0 {
		return fmt.Sprintf("%s: %s", f.ID, f.Detail)
	}
	return fmt.Sprintf("%s (sequence %d): %s", f.ID, f.Seq, f.Detail)
}

// Result is the outcome of a comparison.
type Result struct {
	Committed int // events known to be committed
	Unknown   int // events whose COMMIT was not answered
	Stored    int // messages that are no markers
	Parked    int // markers

	Missing    []Finding // committed, and neither stored nor parked
	Duplicates []Finding // stored or parked more than once
	OutOfOrder []Finding // behind a later event, of the same aggregate or by position
	Differing  []Finding // other bytes than were committed
	Unexpected []Finding // not committed by the writers
}

// Compare holds a whole stream against what was committed. Events of an unknown
// outcome may be stored or not, but the transaction as a whole.
func Compare(d *Diary, stream []Stored) *Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &Result{}
	seen := make(map[string]uint64, len(stream)) // id to sequence
	aggregates := make(map[string]int)           // last number
	storedTx := make(map[int64]bool)
	var last event.Position
	for i := range stream {
		m := &stream[i]
		if m.Marker() {
			r.Parked++
		} else {
			r.Stored++
		}
		e := d.entries[m.ID]
		if first, again := seen[m.ID]; again && m.ID != "" {
			r.Duplicates = append(r.Duplicates, Finding{m.ID, m.Seq, fmt.Sprintf("already at sequence %d", first)})
			continue
		}
		seen[m.ID] = m.Seq
		if e == nil || e.Outcome == RolledBack {
			detail := "unknown to the writers"
			if e != nil {
				detail = "was rolled back"
			}
			r.Unexpected = append(r.Unexpected, Finding{m.ID, m.Seq, detail})
			continue
		}
		storedTx[e.Tx] = true
		if detail := disorder(e, m, aggregates, &last); detail != "" {
			r.OutOfOrder = append(r.OutOfOrder, Finding{m.ID, m.Seq, detail})
		}
		if m.Marker() {
			continue
		}
		if len(m.Payload) != e.size || maphash.Bytes(payloadSeed, m.Payload) != e.sum {
			r.Differing = append(r.Differing, Finding{m.ID, m.Seq, fmt.Sprintf("%d bytes %.60q, committed were %d", len(m.Payload), m.Payload, e.size)})
		} else if m.Aggregate != "" && m.Aggregate != e.Aggregate {
			r.Differing = append(r.Differing, Finding{m.ID, m.Seq, fmt.Sprintf("aggregate %q, want %q", m.Aggregate, e.Aggregate)})
		}
	}
	for id, e := range d.entries {
		_, there := seen[id]
		switch e.Outcome {
		case Committed:
			r.Committed++
			if !there {
				r.Missing = append(r.Missing, Finding{ID: id, Detail: fmt.Sprintf("aggregate %s number %d", e.Aggregate, e.N)})
			}
		case Unknown:
			r.Unknown++
			if !there && storedTx[e.Tx] {
				r.Missing = append(r.Missing, Finding{ID: id, Detail: "other events of its transaction are stored"})
			}
		}
	}
	slices.SortFunc(r.Missing, func(a, b Finding) int {
		return int(d.entries[a.ID].Tx - d.entries[b.ID].Tx)
	})
	return r
}

// disorder checks a message against those before it.
func disorder(e *Entry, m *Stored, aggregates map[string]int, last *event.Position) string {
	pos, err := event.ParsePosition(m.Pos)
	if err != nil {
		return err.Error()
	}
	var wrong []string
	if pos.Compare(*last) <= 0 {
		wrong = append(wrong, fmt.Sprintf("position %s after %s", pos, last))
	} else {
		*last = pos
	}
	if e.N <= aggregates[e.Aggregate] {
		wrong = append(wrong, fmt.Sprintf("aggregate %s: number %d after %d", e.Aggregate, e.N, aggregates[e.Aggregate]))
	} else {
		aggregates[e.Aggregate] = e.N
	}
	return strings.Join(wrong, ", ")
}

// OK reports whether nothing is wrong.
func (r *Result) OK() bool {
	return len(r.Missing)+len(r.Duplicates)+len(r.OutOfOrder)+len(r.Differing)+len(r.Unexpected) == 0
}

// String is one line of numbers, then up to five findings of each kind.
func (r *Result) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "committed=%d stored=%d parked=%d unknown=%d missing=%d duplicates=%d out_of_order=%d differing=%d unexpected=%d",
		r.Committed, r.Stored, r.Parked, r.Unknown, len(r.Missing), len(r.Duplicates), len(r.OutOfOrder), len(r.Differing), len(r.Unexpected))
	for _, kind := range []struct {
		name  string
		found []Finding
	}{
		{"missing", r.Missing},
		{"duplicate", r.Duplicates},
		{"out of order", r.OutOfOrder},
		{"differing", r.Differing},
		{"unexpected", r.Unexpected},
	} {
		for i, f := range kind.found {
			if i == 5 {
				fmt.Fprintf(&b, "\n%s: and %d more", kind.name, len(kind.found)-i)
				break
			}
			fmt.Fprintf(&b, "\n%s: %s", kind.name, f)
		}
	}
	return b.String()
}

// Latencies are the times from COMMIT's return to the message's timestamp, in
// increasing order, of events committed from since on. They may be negative,
// since a relay can be faster than the answer to COMMIT.
func Latencies(d *Diary, stream []Stored, since time.Time) []time.Duration {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []time.Duration
	for i := range stream {
		if e := d.entries[stream[i].ID]; e != nil && e.Outcome == Committed && !e.At.Before(since) {
			all = append(all, stream[i].Time.Sub(e.At))
		}
	}
	slices.Sort(all)
	return all
}

// Percentile picks from sorted values; p is between 0 and 1.
func Percentile(sorted []time.Duration, p float64) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(p*float64(len(sorted))), len(sorted)-1)]
}
