package replication

import (
	"fmt"
	"sync/atomic"

	"github.com/walrelay/walrelay/event"
)

// What the decoder does with each kind of message of pgoutput
// (LogicalRepMsgType in logicalproto.h of Postgres 18):
//
//	B C R I M     decoded
//	O Y           origin, type: describe what follows, nothing that is needed
//	U D T         skipped and counted: they make no event
//	A             stream abort, skipped and counted
//	b P K r       prepared transactions, of a slot with two_phase: refused
//	S E c p       streaming, which is never asked for: refused
//	all others    refused: they could be rows
//
// Postgres 18 sends A outside of streaming, too, with any protocol version, for
// a transaction that is evicted from memory after it aborted
// (ReorderBufferTruncateTXN and pgoutput_stream_abort). Nothing of such a
// transaction was sent, so nothing is undone by skipping it.

// Skipped counts the messages that make no event and are skipped, by kind, for
// all sessions that are given the same one. Its methods may be called from any
// goroutine.
type Skipped struct {
	updates, deletes, truncates, aborts atomic.Uint64
}

// Counts are the numbers so far, by the name of the kind.
func (s *Skipped) Counts() map[string]uint64 {
	return map[string]uint64{
		"update": s.updates.Load(), "delete": s.deletes.Load(), "truncate": s.truncates.Load(), "stream_abort": s.aborts.Load(),
	}
}

// skip counts a message of a kind that makes no event.
func (s *Skipped) skip(kind byte) {
	switch kind {
	case 'U':
		s.updates.Add(1)
	case 'D':
		s.deletes.Add(1)
	case 'T':
		s.truncates.Add(1)
	case 'A':
		s.aborts.Add(1)
	}
}

// other handles the kinds that are not decoded.
func (d *decoder) other(kind byte, r reader) error {
	switch kind {
	case 'O', 'Y', 'U', 'D', 'T':
		d.skipped.skip(kind)
		return nil
	case 'A':
		// Protocols before 4 send two transaction ids; later ones add an LSN and a time.
		if r.uint32(); r.bad {
			return malformed("Stream Abort")
		}
		d.skipped.skip(kind)
		return nil
	case 'b', 'P', 'K', 'r':
		return event.Fail(event.Precondition, "walrelay check names the SQL that takes two_phase from the slot and keeps its events",
			"read the replication stream: slot %q has two_phase and sends prepared transactions, which the relay does not read", d.slot)
	case 'S', 'E', 'c', 'p':
		return event.Fail(event.Precondition, hintProtocol,
			"read the replication stream: message %q of a transaction in progress, although streaming is off", kind)
	}
	return event.Fail(event.Precondition, hintProtocol, "read the replication stream: unknown logical replication message %q", kind)
}

// past adds the command that gets past a message that cannot be decoded. The place is the LSN
// behind the commit record of its transaction, or behind the message itself.
func (d *decoder) past(start event.LSN, err error) error {
	at := start + 1
	if d.open {
		at = d.position.Commit + 1
	}
	hint := fmt.Sprintf("or skip all that was committed up to there, unread: walrelay slot advance %s --blind --to %s", d.slot, at)
	if before := event.HintOf(err); before != "" {
		hint = before + "\n" + hint
	}
	return event.Fail(event.ClassOf(err), hint, "%w", err)
}
