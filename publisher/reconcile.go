package publisher

import (
	"fmt"
	"time"

	"github.com/walrelay/walrelay/event"
)

// owner is the source of the events of a stream.
type owner struct {
	SystemID string `json:"system_id"`
	Database string `json:"database"`
	Slot     string `json:"slot"`
}

func (o owner) String() string {
	return fmt.Sprintf("slot %q of database %q (system %s)", o.Slot, o.Database, o.SystemID)
}

// record is a checkpoint as it lies in the bucket.
type record struct {
	Version     int            `json:"version"`
	Owner       owner          `json:"owner"`
	Created     time.Time      `json:"stream_created"`
	Sequence    uint64         `json:"sequence"` // of the stream, at Position
	Position    event.Position `json:"position"`
	XID         uint32         `json:"xid"`
	CommitTime  time.Time      `json:"commit_time"`
	Confirm     event.LSN      `json:"confirm"`
	Fingerprint string         `json:"fingerprint"`
}

const recordVersion = 1

// lastMessage is what is known of the message at the stream's last sequence.
type lastMessage struct {
	ours     bool // it has a position
	position event.Position
}

// findings is all that the decision where to resume is made of.
type findings struct {
	stream  string
	origin  event.Origin
	created time.Time
	lastSeq uint64
	last    *lastMessage // nil when the message is gone from the stream

	checkpoint *record // nil when there is none
	// earlier checkpoints, newest first; read only when lastSeq is below the newest.
	earlier []record

	adopt     bool // --adopt-stream
	acceptGap bool // --accept-gap
}

// decision is where to resume, and what to say about it.
type decision struct {
	resume event.Resume
	base   uint64 // stream sequence that the events of resume.After stand for
	notes  []note // for the log
}

type note struct {
	text string
	args []any
}

func (d *decision) note(text string, args ...any) {
	d.notes = append(d.notes, note{text, args})
}

func ownerOf(o event.Origin) owner {
	return owner{SystemID: o.SystemID, Database: o.Database, Slot: o.Slot}
}

// decide says where the session goes on. It never guesses: where two readings
// are possible it fails with the choice to make.
func decide(f findings) (decision, error) {
	d := decision{base: f.lastSeq}
	c := f.checkpoint
	if c == nil {
		return f.withoutCheckpoint(d)
	}
	if c.Version != recordVersion {
		return d, event.Fail(event.Precondition, "run the version of walrelay that wrote it, or a later one",
			"the checkpoint of stream %q has format version %d, this walrelay reads %d", f.stream, c.Version, recordVersion)
	}
	if c.Owner != ownerOf(f.origin) {
		return f.otherOwner(d)
	}
	if f.lastSeq < c.Sequence {
		return f.forgotten(d)
	}
	if f.origin.ConfirmedFlush > c.Confirm && !f.acceptGap {
		return d, event.Fail(event.Lost,
			"if the slot was advanced or created again on purpose, go on with --accept-gap; the events between are not published then",
			"slot %q is confirmed up to %s, past the checkpoint of stream %q at %s: events between may be missing in the stream",
			f.origin.Slot, f.origin.ConfirmedFlush, f.stream, c.Confirm)
	}
	if f.last != nil && !f.last.ours {
		return f.foreign(d)
	}
	if f.last != nil {
		return f.afterLast(d, f.last.position)
	}
	return f.afterCheckpoint(d, c)
}

// withoutCheckpoint: nobody claimed the stream, or the bucket was lost.
func (f findings) withoutCheckpoint(d decision) (decision, error) {
	switch {
	case f.lastSeq == 0:
		return d, nil
	case f.last != nil && f.last.ours && (f.origin.Contains(f.last.position) || f.adopt):
		d.note("the stream has no checkpoint, resuming after its last message",
			"position", f.last.position.String(), "sequence", f.lastSeq)
		d.resume.After = f.last.position
		return d, nil
	case f.adopt:
		d.note("adopting the stream", "sequence", f.lastSeq)
		return d, nil
	}
	return d, event.Fail(event.Precondition,
		fmt.Sprintf("give walrelay a stream of its own with --stream, or let it go on after sequence %d with --adopt-stream", f.lastSeq),
		"stream %q has %d messages of another origin and no checkpoint of walrelay", f.stream, f.lastSeq)
}

// otherOwner: the stream was written from another slot, database or cluster.
func (f findings) otherOwner(d decision) (decision, error) {
	c := f.checkpoint
	mine := ownerOf(f.origin)
	if c.Owner.SystemID != mine.SystemID && c.Owner.Database == mine.Database && c.Owner.Slot == mine.Slot {
		// pg_upgrade and a restore into a new cluster give a new system
		// identifier, and LSNs that cannot be compared with the old ones.
		if f.lastSeq == c.Sequence || f.acceptGap {
			d.note("the database cluster has a new system identifier", "was", c.Owner.SystemID, "is", mine.SystemID)
			return d, nil
		}
		return d, event.Fail(event.Lost,
			"make sure that the old cluster's outbox was drained, then go on with --accept-gap",
			"slot %q belongs to a new cluster (system %s, before %s) and stream %q has %d messages after the last checkpoint",
			mine.Slot, mine.SystemID, c.Owner.SystemID, f.stream, int64(f.lastSeq)-int64(c.Sequence))
	}
	if f.adopt {
		d.note("adopting the stream of another owner", "was", c.Owner.String(), "sequence", f.lastSeq)
		return d, nil
	}
	return d, event.Fail(event.Precondition,
		"give each slot a stream of its own with --stream; to take this one over for good use --adopt-stream",
		"stream %q belongs to %s, not to %s", f.stream, c.Owner, mine)
}

// forgotten: the stream's last sequence is below the checkpoint, so the
// broker lost messages that it had acked, or the stream was made anew.
func (f findings) forgotten(d decision) (decision, error) {
	c := f.checkpoint
	lost := c.Sequence - f.lastSeq
	recreated := !f.created.Equal(c.Created)
	for i := range f.earlier {
		e := &f.earlier[i]
		if recreated || e.Owner != c.Owner || e.Sequence > f.lastSeq || e.Confirm < f.origin.ConfirmedFlush {
			continue
		}
		d.note("the stream lost acked messages, publishing them again from the WAL",
			"lost", lost, "last_sequence", f.lastSeq, "checkpoint_sequence", c.Sequence)
		if f.last != nil && f.last.ours {
			return f.afterLastOf(d, f.last.position, e)
		}
		return f.afterCheckpoint(d, e)
	}
	what := "lost acked messages"
	if recreated {
		what = "was created anew"
	}
	if f.acceptGap {
		d.note("going on after a gap", "lost", lost, "last_sequence", f.lastSeq, "checkpoint_sequence", c.Sequence)
		if f.last != nil && f.last.ours && f.origin.Contains(f.last.position) {
			d.resume.After = f.last.position
		}
		return d, nil
	}
	return d, event.Fail(event.Lost,
		"restore the stream, or go on with --accept-gap: events up to the slot's confirmed LSN stay missing, later ones are published",
		"stream %q %s: its last sequence is %d, the checkpoint's is %d, and Postgres has dropped the WAL up to %s",
		f.stream, what, f.lastSeq, c.Sequence, f.origin.ConfirmedFlush)
}

// foreign: the last message is not the relay's.
func (f findings) foreign(d decision) (decision, error) {
	if f.lastSeq == f.checkpoint.Sequence {
		// An adopted stream to which nothing was added since.
		return f.afterCheckpoint(d, f.checkpoint)
	}
	return d, event.Fail(event.Precondition,
		"stop the other writer; walrelay needs to be the only one that publishes to its stream",
		"message %d of stream %q was not written by walrelay", f.lastSeq, f.stream)
}

// afterLast resumes after the last message, which is still in the stream.
func (f findings) afterLast(d decision, last event.Position) (decision, error) {
	return f.afterLastOf(d, last, f.checkpoint)
}

func (f findings) afterLastOf(d decision, last event.Position, c *record) (decision, error) {
	if last.Compare(c.Position) < 0 && !f.acceptGap {
		return d, event.Fail(event.Lost,
			"another client may have written to the stream, or the stream was restored: compare, then go on with --accept-gap",
			"the last message of stream %q, sequence %d, has position %s, before the checkpoint's %s at sequence %d",
			f.stream, f.lastSeq, last, c.Position, c.Sequence)
	}
	d.resume.After = last
	if !f.origin.Contains(last) {
		if err := f.orphan(&d, last); err != nil {
			return d, err
		}
	}
	f.prove(&d, c)
	return d, nil
}

// orphan: the stream holds an event that this server's history does not. After
// a promotion that is an event that the old primary committed and the new one
// never received. On the same timeline the server went back in time.
func (f findings) orphan(d *decision, last event.Position) error {
	if last.Timeline < f.origin.Timeline {
		d.note("the stream holds events that the promoted server never received",
			"position", last.String(), "timeline", f.origin.Timeline)
		return nil
	}
	if f.acceptGap {
		d.note("the server's WAL ends before the last message of the stream", "position", last.String(), "wal_end", f.origin.WALEnd.String())
		d.resume.After = event.Position{}
		return nil
	}
	return event.Fail(event.Lost,
		"this server was restored from an older state or is not the one that was read before; to go on and publish whatever it has use --accept-gap",
		"the WAL of the server ends at %s on timeline %d, before the last event of stream %q at %s",
		f.origin.WALEnd, f.origin.Timeline, f.stream, last)
}

// afterCheckpoint resumes by counting, because the last message is gone:
// consumed, purged or expired.
func (f findings) afterCheckpoint(d decision, c *record) (decision, error) {
	skip := f.lastSeq - c.Sequence
	if skip > 0 && !f.acceptGap {
		const hint = "see which of the rows after the checkpoint are missing downstream, then go on with --accept-gap: events after the checkpoint are published again"
		if c.Fingerprint != f.origin.Fingerprint {
			return d, event.Fail(event.Lost, "start once with the publications and tables as they were, then change them",
				"%d messages were stored in stream %q after the checkpoint and are gone, and publications or tables were changed since: they cannot be counted off",
				skip, f.stream)
		}
		if c.Position.Timeline != 0 && c.Position.Timeline != f.origin.Timeline {
			return d, event.Fail(event.Lost, hint,
				"%d messages were stored in stream %q after the checkpoint and are gone, and the server was promoted since: they cannot be counted off",
				skip, f.stream)
		}
	}
	d.resume.After = c.Position
	d.base = c.Sequence
	if !c.Position.IsZero() && !f.origin.Contains(c.Position) {
		if err := f.orphan(&d, c.Position); err != nil {
			return d, err
		}
	}
	if skip > 0 && !f.acceptGap {
		d.resume.Skip = skip
		d.note("the last messages are gone from the stream, resuming by the checkpoint",
			"position", c.Position.String(), "skip", skip)
	} else {
		d.base = f.lastSeq
	}
	f.prove(&d, c)
	return d, nil
}

// prove asks for the checkpoint's transaction to reappear. It does when its
// commit lies at or after the confirmed LSN (SnapBuildXactNeedsSkip), the
// server still has it, and the same tables are published.
func (f findings) prove(d *decision, c *record) {
	if d.resume.After.IsZero() || c.Position.IsZero() || c.XID == 0 ||
		c.Position.Commit < f.origin.ConfirmedFlush ||
		!f.origin.Contains(c.Position) || c.Fingerprint != f.origin.Fingerprint {
		return
	}
	d.resume.Proof = &event.Checkpoint{
		Position: c.Position, XID: c.XID, CommitTime: c.CommitTime, Confirm: c.Confirm,
	}
}
