package publisher

import (
	"fmt"
	"maps"
	"slices"
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
	Timeline    uint32         `json:"timeline"` // of the session that wrote it
	Begin       event.LSN      `json:"timeline_begin"`
	XID         uint32         `json:"xid"`
	CommitTime  time.Time      `json:"commit_time"`
	Confirm     event.LSN      `json:"confirm"`
	Fingerprint string         `json:"fingerprint"`
	Foreign     uint64         `json:"foreign"` // messages up to this sequence are not the owner's
	Window      int            `json:"window"`  // events in flight at most

	// Tables are those of event.Origin.
	Tables map[string][]string `json:"tables,omitempty"`

	// Since is the moment from which on all that was inserted is stored; nil when that is
	// not known. It lasts as long as nothing was passed over.
	Since *event.Mark `json:"since,omitempty"`

	// Backfill is the state of a backfill, backfillRunning or backfillDone;
	// empty once a slot is streamed. BackfillFrom is the stream's last sequence
	// when it began.
	Backfill     string `json:"backfill,omitempty"`
	BackfillFrom uint64 `json:"backfill_from,omitempty"`
	Recovery     bool   `json:"recovery,omitempty"` // it is one of rows that a lost slot was to bring

	// Drained says that the session ended with every event settled: no message of
	// the owner follows Sequence.
	Drained bool `json:"drained,omitempty"`

	// Proven, when set, is the confirm LSN before events were dropped that are
	// known to be stored by the dedup window alone. No later event is stored yet.
	Proven *event.LSN `json:"proven,omitempty"`

	// Letters is how far the dead-letter stream was; nil when there was none.
	Letters *lettersRecord `json:"dead_letters,omitempty"`
}

// The states of a backfill.
const (
	backfillRunning = "running"
	backfillDone    = "done" // every row is stored, and the slot is about to be made
)

const recordVersion = 1

// lastMessage is what is known of the message at the stream's last sequence.
type lastMessage struct {
	ours     bool // it has a position
	position event.Position
	id       string // of the event; "" when the header may not be it
	replay   bool   // it was published again, long after it was written
}

// tailMessage is a message that was stored after the checkpoint.
type tailMessage struct {
	lastMessage
	sequence uint64
}

// findings is all that the decision where to resume is made of.
type findings struct {
	stream  string
	origin  event.Origin
	created time.Time
	lastSeq uint64
	last    *lastMessage // nil when the message is gone from the stream

	checkpoint *record // nil when there is none
	// tail is what is left of the messages after the checkpoint that may have
	// been in flight when the last session ended, in order.
	tail []tailMessage
	// acked is the stream's last sequence as this process has seen it acked; 0 when it has not.
	acked uint64
	// reached is where this process's last session ended; nil when there was none,
	// or when another process has written a checkpoint since.
	reached *reached
	// history of the checkpoint, newest first; read only when lastSeq is below what was acked.
	earlier []record

	// Of a shared stream.
	own   *tailMessage // the newest event after the checkpoint that is still there; nil when there is none
	known *lastMessage // what is where the last acked event should be; nil when it is gone
	gone  bool         // messages after the checkpoint may be gone

	adopt     bool // --adopt-stream
	acceptGap bool // --accept-gap
}

// decision is where to resume, and what to say about it.
type decision struct {
	resume event.Resume
	base   uint64  // stream sequence that the events of resume.After stand for
	from   *record // that resume.Gone follows
	fresh  bool    // nothing in the checkpoint holds for the server
	again  uint64  // events that are published again because the stream lost them
	lost   bool    // what the checkpoint covers is not all in the stream
	notes  []note  // for the log
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
	if f.origin.Backfill && (c == nil || c.Version == recordVersion) {
		return f.backfill(d)
	}
	if c == nil {
		return f.withoutCheckpoint(d)
	}
	if d, settled, err := f.elsewhere(d); settled {
		return d, err
	}
	if f.lastSeq < max(c.Sequence, f.acked) || f.recreated() && c.Sequence > 0 {
		return f.forgotten(d)
	}
	if err := f.unaccounted(); err != nil {
		return d, err
	}
	if f.lastSeq == c.Sequence {
		return f.atCheckpoint(d)
	}
	if seq, found := f.intruder(); found && !f.acceptGap {
		return d, event.Fail(event.Lost,
			"stop the other writer, compare the rows between the messages around it with the stream, then go on with --accept-gap: the missing event is not published then",
			"message %d of stream %q was not written by walrelay and took the place of an event, which is missing", seq, f.stream)
	}
	if err := f.refitted(); err != nil {
		return d, err
	}
	if f.last != nil && !f.last.ours {
		return f.foreign(d)
	}
	if f.last != nil {
		return f.afterLast(d, f.last.position)
	}
	return f.afterCheckpoint(d, c)
}

// elsewhere settles the cases in which the checkpoint is not of this server's log.
func (f findings) elsewhere(d decision) (_ decision, settled bool, err error) {
	c := f.checkpoint
	if c.Version != recordVersion {
		return d, true, event.Fail(event.Precondition, "run the version of walrelay that wrote it, or a later one",
			"the checkpoint of stream %q has format version %d, this walrelay reads %d", f.stream, c.Version, recordVersion)
	}
	if c.Owner != ownerOf(f.origin) {
		d, err = f.otherOwner(d)
		return d, true, err
	}
	if c.Backfill == backfillRunning {
		return d, true, f.unfinished()
	}
	beside := c.Timeline == f.origin.Timeline && c.Begin != f.origin.Begin() && c.Begin != 0
	if f.origin.Diverged || beside && f.acceptGap {
		d, err = f.another(d)
		return d, true, err
	}
	if table := f.interrupted(); table != "" && !f.acceptGap {
		return d, true, event.Fail(event.Lost,
			fmt.Sprintf("walrelay slot recover %s finds the rows that are missing in the stream and publishes them; to go on without use --accept-gap", f.origin.Slot),
			"table %s was made anew, or its publication was altered, or it was taken out and put back, since the last checkpoint of stream %q: rows committed in between may not be in the log",
			table, f.stream)
	}
	if beside {
		return d, true, event.Fail(event.Lost,
			"this server was restored or promoted beside the one that was read before; to go on and publish whatever it has use --accept-gap",
			"timeline %d of the server began at %s, that of the checkpoint of stream %q at %s",
			c.Timeline, f.origin.Begin(), f.stream, c.Begin)
	}
	return d, false, nil
}

// unaccounted: Postgres has dropped what no checkpoint says is stored.
func (f findings) unaccounted() error {
	c := f.checkpoint
	if f.origin.ConfirmedFlush <= f.confirmOf(c) || f.acceptGap {
		return nil
	}
	return event.Fail(event.Lost,
		fmt.Sprintf("if the slot was advanced or created again on purpose, go on with --accept-gap; the events between are not published then; walrelay slot recover %s finds those that the stream lacks and publishes them", f.origin.Slot),
		"slot %q is confirmed up to %s, past the checkpoint of stream %q at %s: events between may be missing in the stream",
		f.origin.Slot, f.origin.ConfirmedFlush, f.stream, f.confirmOf(c))
}

// unfinished: the rows of the tables are not all stored, and the slot has none of them.
func (f findings) unfinished() error {
	again := fmt.Sprintf("walrelay slot recover %s --yes", f.origin.Slot)
	if !f.checkpoint.Recovery {
		again = fmt.Sprintf("walrelay slot drop %s, then walrelay run --backfill", f.origin.Slot)
	}
	return event.Fail(event.Lost,
		"start again what was interrupted: "+again+"; what is stored is not published again",
		"the backfill of stream %q was interrupted and slot %q begins after it: rows of the table are missing", f.stream, f.origin.Slot)
}

// interrupted is a table whose rows were not sent for a while, or "". OIDs of
// another cluster say nothing.
func (f findings) interrupted() string {
	for _, table := range slices.Sorted(maps.Keys(f.origin.Tables)) {
		was := f.checkpoint.Tables[table]
		same := func(entry string) bool { return slices.Contains(was, entry) }
		if len(was) > 0 && !slices.ContainsFunc(f.origin.Tables[table], same) {
			return table
		}
	}
	return ""
}

// backfill: the rows of the tables are read in a snapshot that is newer than
// all that is stored, so positions grow, and the ids in the stream say which of
// them are stored. Hence it does not matter how far the log was read before,
// or from which server.
func (f findings) backfill(d decision) (decision, error) {
	c := f.checkpoint
	mine := ownerOf(f.origin)
	switch {
	case f.lastSeq == 0 || f.adopt:
	case c == nil && (f.last == nil || !f.last.ours):
		return f.withoutCheckpoint(d)
	case c != nil && (c.Owner.Database != mine.Database || c.Owner.Slot != mine.Slot):
		return f.otherOwner(d)
	case f.last != nil && !f.last.ours && (c == nil || f.lastSeq > c.Foreign) && !f.acceptGap:
		return d, event.Fail(event.Precondition,
			"stop the other writer, then go on with --adopt-stream; walrelay needs to be the only one that publishes to its stream",
			"message %d of stream %q was not written by walrelay", f.lastSeq, f.stream)
	}
	return d, nil
}

// another: this is not the server that was read before, though it may have
// been up to some place, and that is accepted.
func (f findings) another(d decision) (decision, error) {
	d.note("the server is not the one that was read before, publishing whatever it has and the stream has not",
		"confirmed", f.origin.ConfirmedFlush.String(), "wal_end", f.origin.WALEnd.String(), "timeline", f.origin.Timeline)
	d.fresh = true
	return d, nil
}

// recreated reports whether the stream is not the one of the checkpoint.
func (f findings) recreated() bool { return !f.created.Equal(f.checkpoint.Created) }

// atCheckpoint: nothing was stored since. The last message may be of the source
// from which the stream was adopted; the checkpoint's position is zero then.
func (f findings) atCheckpoint(d decision) (decision, error) {
	c := f.checkpoint
	if f.last != nil && f.last.ours && !c.Position.IsZero() && f.last.position != c.Position {
		if f.acceptGap {
			return f.afterLast(d, f.last.position)
		}
		return d, event.Fail(event.Lost,
			"another client may have written to the stream, or the stream was restored: compare, then go on with --accept-gap",
			"the last message of stream %q, sequence %d, has position %s, the checkpoint says %s",
			f.stream, f.lastSeq, f.last.position, c.Position)
	}
	return f.afterCheckpoint(d, c)
}

// intruder finds a message of another client that messages of the relay
// follow. It took the place of an event: the chain refused that event, and the
// next one fitted again.
func (f findings) intruder() (seq uint64, found bool) {
	for i := 1; i < len(f.tail); i++ {
		if f.tail[i].ours && !f.tail[i-1].ours {
			return f.tail[i-1].sequence, true
		}
	}
	return 0, false
}

// withoutCheckpoint: nobody claimed the stream, or the bucket was lost.
func (f findings) withoutCheckpoint(d decision) (decision, error) {
	if f.lastSeq < f.acked && !f.acceptGap && (f.last == nil || !f.last.ours || !f.resends(f.last.position)) {
		return d, event.Fail(event.Lost, hintForgotten,
			"stream %q lost acked messages and its checkpoint: its last sequence is %d, %d was acked, and Postgres has dropped the WAL up to %s",
			f.stream, f.lastSeq, f.acked, f.origin.ConfirmedFlush)
	}
	switch {
	case f.lastSeq == 0:
		return d, nil
	case f.last != nil && f.last.ours && f.origin.Contains(f.last.position):
		if err := f.slotPassed(f.lastSeq, f.last.position); err != nil {
			return d, err
		}
		d.note("the stream has no checkpoint, resuming after its last message",
			"position", f.last.position.String(), "sequence", f.lastSeq)
		if !f.acceptGap {
			f.publishAgain(&d, f.acked)
		}
		d.resume.After = f.last.position
		return d, nil
	case f.adopt:
		d.note("adopting the stream", "sequence", f.lastSeq)
		return d, nil
	}
	if f.last == nil {
		return d, event.Fail(event.Precondition,
			fmt.Sprintf("if they are of another origin, give walrelay a stream of its own with --stream; to go on after sequence %d use --adopt-stream: what Postgres sends again is published again then", f.lastSeq),
			"the last of %d messages of stream %q is gone, and it has no checkpoint of walrelay", f.lastSeq, f.stream)
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
		"give each slot a stream of its own with --stream; to take this one over for good, stop its relay, then use --adopt-stream",
		"stream %q belongs to %s, not to %s", f.stream, c.Owner, mine)
}

const hintForgotten = "restore the stream, or go on with --accept-gap: events up to the slot's confirmed LSN stay missing, later ones are published; --confirm-delay keeps the WAL for such a case"

// forgotten: the stream's last sequence is below what was acked, so the broker
// lost messages, or the stream was made anew. They are published again if
// Postgres sends every event again that is not stored. It sends those that end
// after the slot's confirmed LSN, which lags behind with a confirm delay.
func (f findings) forgotten(d decision) (decision, error) {
	c := f.checkpoint
	had := max(c.Sequence, f.acked)
	lost := int64(had) - int64(f.lastSeq)
	recreated := f.recreated()
	// Without a position nothing up to the checkpoint came from this source.
	lastIsSource := f.last != nil && f.last.ours && f.lastSeq > c.Foreign && (f.lastSeq > c.Sequence || !c.Position.IsZero())
	for i := range f.earlier {
		e := &f.earlier[i]
		if recreated || !e.Created.Equal(c.Created) || e.Owner != c.Owner || e.Sequence > f.lastSeq {
			continue
		}
		switch last := f.last; {
		case lastIsSource && (f.covers(e) || f.resends(last.position)):
			f.publishAgain(&d, had)
			d, err := f.afterLastOf(d, last.position, e)
			for j := i; d.resume.Proof == nil && j < len(f.earlier); j++ {
				if e := &f.earlier[j]; e.Position.Compare(d.resume.After) <= 0 {
					f.prove(&d, e)
				}
			}
			return d, err
		case f.covers(e) && (last == nil || f.lastSeq == e.Sequence):
			f.publishAgain(&d, had)
			return f.afterCheckpoint(d, e)
		}
	}
	if lastIsSource && !recreated && f.resends(f.last.position) {
		f.publishAgain(&d, had)
		d.resume.After = f.last.position
		f.recognise(&d, c)
		return d, nil
	}
	what := "lost acked messages"
	if recreated {
		what = "was created anew"
	}
	if f.acceptGap {
		d.note("going on after a gap", "lost", lost, "last_sequence", f.lastSeq, "acked_sequence", had)
		if lastIsSource && f.origin.Contains(f.last.position) {
			d.resume.After = f.last.position
		}
		return d, nil
	}
	after := "the first one"
	if lastIsSource && !recreated {
		after = f.last.position.String()
	}
	known := "the checkpoint's"
	if f.acked > c.Sequence {
		known = "the last one acked"
	}
	return d, event.Fail(event.Lost, hintForgotten,
		"stream %q %s: its last sequence is %d, %s is %d, and Postgres has dropped the WAL up to %s: events from %s up to there are missing",
		f.stream, what, f.lastSeq, known, had, f.origin.ConfirmedFlush, after)
}

// publishAgain says how much the stream lost of what was acked up to the sequence had.
func (f findings) publishAgain(d *decision, had uint64) {
	if had <= f.lastSeq {
		return
	}
	d.again = had - f.lastSeq
	d.note("the stream lost acked messages, publishing them again from the WAL",
		"lost", d.again, "last_sequence", f.lastSeq, "acked_sequence", had)
}

// covers reports whether Postgres sends every event again that is not stored
// by the sequence of e. All transactions that end by e.Confirm are stored by
// then, and Postgres sends all that end after the confirmed LSN.
func (f findings) covers(e *record) bool {
	if e.Backfill == backfillRunning {
		return false // what follows was read from the table
	}
	return f.confirmOf(e) >= f.origin.ConfirmedFlush || !e.Position.IsZero() && f.resends(e.Position)
}

// resends reports whether Postgres sends every event again that follows pos. It
// skips the transactions whose commit record starts before the confirmed LSN
// (SnapBuildXactNeedsSkip), and later events lie in the same transaction or in
// one that commits later. In a history without pos, LSNs may be used again, so
// that comparing them says nothing.
func (f findings) resends(pos event.Position) bool {
	return pos.Commit >= f.origin.ConfirmedFlush && f.origin.Contains(pos)
}

// confirmOf is the confirm LSN of a checkpoint in the present history: of a
// timeline that was left, no more counts than what the new one took over.
func (f findings) confirmOf(c *record) event.LSN {
	if c.Timeline == f.origin.Timeline {
		return c.Confirm
	}
	if left, ok := f.origin.Left(c.Timeline); ok {
		return min(c.Confirm, left.End)
	}
	return 0
}

// foreign: the last message is not the relay's. No event is missing yet: those
// that should have followed were refused.
func (f findings) foreign(d decision) (decision, error) {
	after, known := f.beforeForeign()
	if f.adopt && known || f.acceptGap {
		d.note("going on after messages of another client", "position", after.String(), "sequence", f.lastSeq)
		if after.IsZero() {
			return d, nil
		}
		return f.afterLast(d, after)
	}
	if !known {
		return d, event.Fail(event.Precondition,
			"stop the other writer, see which of the rows after the checkpoint are in the stream, then go on with --accept-gap: events after the last one found are published again",
			"message %d of stream %q and those before it were not written by walrelay", f.lastSeq, f.stream)
	}
	return d, event.Fail(event.Precondition,
		"stop the other writer and leave its message where it is, then go on with --adopt-stream; walrelay needs to be the only one that publishes to its stream",
		"message %d of stream %q was not written by walrelay", f.lastSeq, f.stream)
}

// beforeForeign returns the position of the last event stored before the
// messages of another client at the end of the stream, and whether nothing
// that could hide a later one is gone from between.
func (f findings) beforeForeign() (after event.Position, known bool) {
	next := f.lastSeq + 1
	known = true
	for _, m := range slices.Backward(f.tail) {
		known = known && m.sequence+1 == next
		if m.ours {
			return m.position, known
		}
		next = m.sequence
	}
	return f.checkpoint.Position, known && f.checkpoint.Sequence+1 == next
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
	if left, ok := f.origin.Left(last.Timeline); ok && last.Timeline < f.origin.Timeline {
		if left.Restored && !f.acceptGap {
			return event.Fail(event.Lost,
				"the events behind that place are in the stream and not on this server: compare, then go on with --accept-gap",
				"the server was restored to %s of timeline %d, before the last event of stream %q at %s",
				left.End, left.Timeline, f.stream, last)
		}
		d.note("the stream holds events that this server never had: it was promoted or restored",
			"up_to", last.String(), "left_at", left.End.String(), "left_timeline", left.Timeline, "timeline", f.origin.Timeline)
		return nil
	}
	if f.acceptGap {
		d.note("the server's WAL ends before the last message of the stream, publishing whatever it has and the stream has not",
			"position", last.String(), "wal_end", f.origin.WALEnd.String())
		d.resume.After, d.fresh = event.Position{}, true
		return nil
	}
	return event.Fail(event.Lost,
		"this server was restored from an older state or is not the one that was read before; to go on and publish whatever it has use --accept-gap",
		"the WAL of the server ends at %s on timeline %d, before the last event of stream %q at %s",
		f.origin.WALEnd, f.origin.Timeline, f.stream, last)
}

// prove asks for the checkpoint's transaction to reappear. It does when its
// commit lies at or after the confirmed LSN (SnapBuildXactNeedsSkip), the
// server still has it, and the same tables are published.
func (f findings) prove(d *decision, c *record) {
	f.recognise(d, c)
	if d.resume.After.IsZero() || c.Position.IsZero() || c.XID == 0 ||
		c.Position.Commit < f.origin.ConfirmedFlush ||
		!f.origin.Contains(c.Position) || c.Fingerprint != f.origin.Fingerprint {
		return
	}
	d.resume.Proof = &event.Checkpoint{
		Position: c.Position, XID: c.XID, CommitTime: c.CommitTime, Confirm: c.Confirm,
	}
}

// recognise asks for the last message's event to reappear at its place. Like the
// checkpoint's transaction it does, if it is of the tables that are published.
func (f findings) recognise(d *decision, c *record) {
	after := d.resume.After
	if f.last == nil || !f.last.ours || f.last.position != after || !f.sendsAgain(after) || !f.origin.Contains(after) ||
		c.Fingerprint != f.origin.Fingerprint || f.checkpoint.Fingerprint != f.origin.Fingerprint {
		return
	}
	d.resume.AfterID = f.last.id
}

// claim is the checkpoint with the place where the session resumes. It is
// written before anything is published, so that the stream has an owner, and a
// position of the present timeline and tables. While messages that are gone are not
// accounted for, the last checkpoint stands.
func claim(f findings, d decision, window int) record {
	r := record{
		Version: recordVersion, Owner: ownerOf(f.origin), Created: f.created,
		Sequence: d.base, Position: d.resume.After, Timeline: f.origin.Timeline,
		Begin: f.origin.Begin(), Confirm: f.origin.ConfirmedFlush, Fingerprint: f.origin.Fingerprint, Window: window,
		Tables: f.origin.Tables, Since: f.since(d),
	}
	if f.origin.Backfill {
		r.Backfill, r.BackfillFrom, r.Recovery = backfillRunning, f.lastSeq, f.origin.Recovery
		if c := f.checkpoint; c != nil {
			if c.Foreign <= f.lastSeq && c.Owner.Slot == r.Owner.Slot && c.Owner.Database == r.Owner.Database {
				r.Foreign = c.Foreign
			}
			if c.Backfill != "" {
				r.BackfillFrom = min(c.BackfillFrom, f.lastSeq)
			}
		}
		return r
	}
	if d.resume.After.IsZero() {
		r.Foreign = d.base
	}
	c := f.checkpoint
	if c == nil || c.Owner != r.Owner || d.fresh {
		return r
	}
	if d.resume.Gone > 0 {
		since := r.Since
		r = *d.from
		r.Since = since
		r.Window = max(window, c.Window)
		r.Backfill, r.BackfillFrom, r.Recovery = "", 0, false
		return r
	}
	if f.last == nil {
		r.Proven = c.Proven // no later event is seen to be stored
	}
	if !d.resume.After.IsZero() {
		r.Foreign = c.Foreign
	}
	if c.Position == r.Position {
		r.XID, r.CommitTime = c.XID, c.CommitTime
	}
	if f.lastSeq >= c.Sequence && c.Created.Equal(r.Created) && !d.lost {
		r.Confirm = max(r.Confirm, f.confirmOf(c))
	}
	return r
}

// since is the moment from which on nothing was passed over. An operator who
// accepts a gap, takes a stream over, or changes what is published begins anew.
func (f findings) since(d decision) *event.Mark {
	c := f.checkpoint
	switch {
	case f.origin.Backfill:
		return nil // until every row is stored
	case c == nil, c.Since == nil, c.Owner != ownerOf(f.origin), c.Fingerprint != f.origin.Fingerprint,
		f.adopt, f.acceptGap, f.origin.Diverged, d.fresh, d.lost, f.interrupted() != "":
		return f.origin.Now
	}
	return c.Since
}
