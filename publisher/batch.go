package publisher

import (
	"strconv"

	"github.com/walrelay/walrelay/event"
)

// An atomic batch is stored as a whole or not at all (nats-server's
// processJetStreamAtomicBatchMsg in stream.go). Its messages are staged as they
// come; the last one commits them and is the only one that is acked. The first
// one names its predecessor for all. So a batch is one link of the chain: when
// it is refused, all that was sent later is. What a connection leaves without
// its commit is dropped by the server after 10 s.
//
// The server names no culprit when it refuses a batch. Its events are then
// published one by one, as in a chain.
const (
	batchMost  = 1000    // messages, the server's limit by default (limits.batch.max_msgs)
	batchBytes = 1 << 20 // of events: a replicated batch is one proposal in the servers' memory

	headerBatchID       = "Nats-Batch-Id"
	headerBatchSequence = "Nats-Batch-Sequence"
	headerBatchCommit   = "Nats-Batch-Commit"

	// batchOverhead is more than the headers of a batch add to a message.
	batchOverhead = 128
)

// batch is the one that is being made. The last event is held back, because
// what its message says depends on whether another one follows.
type batch struct {
	session []byte // that ids begin with: the inbox, which no other session has
	number  uint64 // of this batch
	id      []byte
	count   int // messages in the out-buffer or sent; 0 when no batch is open
	bytes   int

	held    bool
	subject []byte
	header  []byte // without what chain or batch add
	payload []byte
	seq     uint64

	lines []byte // scratch: the headers that are added
}

// appendBatched is Append's end for an event of a batch. header is that of a
// message in a chain.
func (s *Session) appendBatched(ev *event.Event, header []byte, seq uint64) error {
	b := &s.batch
	s.emit(b.count+1 >= s.p.batchMost || b.bytes+len(ev.Payload) > batchBytes)
	if len(s.out) >= outBuffer {
		if err := s.write(); err != nil {
			return err
		}
	}
	b.subject = append(b.subject[:0], ev.Subject...)
	b.header = append(b.header[:0], header[s.frames.chained:]...)
	b.payload = append(b.payload[:0], ev.Payload...)
	b.held, b.seq = true, seq
	s.account(ev, len(header))
	return nil
}

// emit appends the event that was held back. It ends the batch, or is a message
// by itself when there is none, if it is the last one.
func (s *Session) emit(last bool) {
	b := &s.batch
	if !b.held {
		return
	}
	b.held = false
	b.count++
	b.bytes += len(b.header) + len(b.payload)
	h := append(b.lines[:0], headerLine...)
	if b.count == 1 {
		h = append(h, headerExpectedLastSeq+": "...)
		h = strconv.AppendUint(h, b.seq-1, 10)
		h = append(h, "\r\n"...)
		b.number++
		b.id = strconv.AppendUint(append(b.id[:0], b.session...), b.number, 10)
	}
	if b.count > 1 || !last {
		h = appendHeader(h, headerBatchID, b.id)
		h = append(h, headerBatchSequence+": "...)
		h = strconv.AppendInt(h, int64(b.count), 10)
		h = append(h, "\r\n"...)
		if last {
			h = append(h, headerBatchCommit+": 1\r\n"...)
		}
	}
	b.lines = h

	out := append(s.out, "HPUB "...)
	out = append(out, b.subject...)
	out = append(out, ' ')
	if last {
		out = append(out, s.frames.reply...)
		out = strconv.AppendUint(out, b.seq, 10)
		out = append(out, ' ')
		b.count, b.bytes = 0, 0
	}
	out = appendSize(out, len(h)+len(b.header))
	out = append(out, ' ')
	out = appendSize(out, len(h)+len(b.header)+len(b.payload))
	out = append(out, "\r\n"...)
	out = append(out, h...)
	out = append(out, b.header...)
	out = append(out, b.payload...)
	s.out = append(out, "\r\n"...)
	if cap(b.payload) > 4*outBuffer {
		b.payload = nil
	}
}
