package relay

import "github.com/walrelay/walrelay/event"

// boundary holds checkpoints back until the log is vouched for up to them. It gives
// no other LSN than those of checkpoints: the server's flush position, for
// which somebody vouches, may lie within a record that crosses a page (WAL pages are
// written one by one, XLogWrite in xlog.c). A slot that is confirmed up to there does
// not send a message with that record again (logicalmsg_decode compares its begin),
// though it ends behind.
//
// It keeps the oldest that waits next to the newest, because on a busy server
// the newest is always ahead of the last look.
type boundary struct {
	oldest, newest event.Checkpoint
}

// add takes over a checkpoint that is settled.
func (b *boundary) add(c event.Checkpoint) {
	b.newest = c
	if b.oldest.Confirm == 0 {
		b.oldest = c
	}
}

// good returns the last checkpoint up to an LSN, with Confirm 0 when there is none yet.
func (b *boundary) good(upTo event.LSN) event.Checkpoint {
	if b.newest.Confirm <= upTo {
		b.oldest = event.Checkpoint{}
		return b.newest
	}
	if b.oldest.Confirm > upTo {
		return event.Checkpoint{}
	}
	c := b.oldest
	b.oldest = b.newest
	return c
}
