package operate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Horizon divides rows into those that lie before a place in the log, and others.
type Horizon struct {
	XID uint64
	LSN event.LSN

	SystemID string
	Database string
	Timeline uint32
}

// Place is how far a slot is confirmed.
type Place struct {
	Slot      string
	Confirmed event.LSN
	Active    bool
}

// Evidence is what the checkpoint says of the events that are stored.
type Evidence struct {
	Found bool

	SystemID, Database, Slot string
	Timeline                 uint32
	Confirm                  event.LSN
	Since                    *event.Mark
	Proven                   *event.LSN          // when set, what is behind it is not proven yet
	Tables                   map[string][]string // as in event.Origin
	Unfinished               bool
	Forgotten                bool // the stream has lost messages
}

// Parked tells which events have a dead letter.
type Parked interface {
	Has(table string, id []byte) bool
}

// PruneRow is a row and what is known of it.
type PruneRow struct {
	ID     []byte // nil for NULL
	Old    bool
	Passed bool // before the horizon
	Sent   bool // since the slot sends without a gap
	Event  bool // the publications let it through

	Ref any // what PruneTable knows it by
}

// PrunePartition is a partition of a table.
type PrunePartition struct {
	Name    string
	Default bool
	Old     bool // all of it is

	Ref any
}

// PruneTable is a pass over a table.
type PruneTable interface {
	// Next reads some rows; none at the end.
	Next(ctx context.Context) ([]PruneRow, error)
	// Delete deletes rows and returns how many are gone; others have been in the way of the rest.
	Delete(ctx context.Context, rows []PruneRow) (int, error)
}

// PrunePartitions is a PruneTable that may be partitioned.
type PrunePartitions interface {
	Partitions(ctx context.Context) ([]PrunePartition, error)
	// Drop drops one after each of its rows was judged, whose error it returns, and says
	// how many rows there were. locked says that it could not.
	Drop(ctx context.Context, p PrunePartition, judge func(PruneRow) error) (rows int, locked bool, err error)
}

// Prune deletes rows that are provably published. All functions but Waiting are required.
type Prune struct {
	Horizon  func(context.Context) (Horizon, error)
	Places   func(context.Context) ([]Place, error) // the slot of the checkpoint is the first
	Evidence func(context.Context) (Evidence, error)
	Parked   func(context.Context) (Parked, error)
	// Entries says by which entries of the publications the tables are sent now.
	Entries func(context.Context) (map[string][]string, error)
	Open    func(ctx context.Context, table string, h Horizon, since *event.Mark) (PruneTable, error)

	Tables []string // schema.table

	DryRun     bool
	Unproven   bool // rows of which nobody knows whether they were sent go, too
	Partitions bool // are dropped where all of one may go

	Wait  time.Duration // for the slots to confirm, at most
	Every time.Duration // between two looks at them

	// Waiting is told once what it waits for; nil for nobody.
	Waiting func(slot string, lsn event.LSN)
}

// Keep is why a row stays.
type Keep string

// The reasons, in the order in which they are looked at.
const (
	KeepYoung    Keep = "too_young"
	KeepUnpassed Keep = "not_confirmed" // written after the horizon, or by a transaction that was open then
	KeepNoEvent  Keep = "no_event"      // the publication's row filter leaves it out
	KeepUnproven Keep = "not_proven"    // it may be older than the slot, or in a gap that was accepted
	KeepParked   Keep = "dead_letter"
	KeepInTheWay Keep = "in_use" // locked by somebody, or changed meanwhile
	KeepDefault  Keep = "default_partition"
)

// Pruned is what became of a table.
type Pruned struct {
	Table   string          `json:"table"`
	Deleted int64           `json:"deleted"` // of rows; those of dropped partitions are among them
	Dropped []string        `json:"dropped_partitions"`
	Kept    map[Keep]int64  `json:"kept"` // rows that were looked at; a pass ends where all are too young
	Spared  map[string]Keep `json:"kept_partitions"`
}

// PruneResult is what a pass has done, or with DryRun what it would have done.
type PruneResult struct {
	DryRun  bool        `json:"dry_run"`
	Horizon event.LSN   `json:"horizon_lsn"`
	Since   *event.Mark `json:"since"` // rows that were inserted later are known to be sent
	Tables  []Pruned    `json:"tables"`
}

// Deleted is the number of rows of all tables.
func (r PruneResult) Deleted() int64 {
	var n int64
	for _, t := range r.Tables {
		n += t.Deleted
	}
	return n
}

// Run makes one pass. What it has done before an error is in the result.
func (p Prune) Run(ctx context.Context) (PruneResult, error) {
	r := PruneResult{DryRun: p.DryRun, Tables: []Pruned{}}
	h, err := p.Horizon(ctx)
	if err != nil {
		return r, err
	}
	r.Horizon = h.LSN
	places, err := p.confirmed(ctx, h)
	if err != nil {
		return r, err
	}
	// Both after the wait: an event whose commit is confirmed is stored or has its
	// dead letter by then, and a checkpoint read earlier would not know of a gap that was accepted since.
	e, err := p.Evidence(ctx)
	if err != nil {
		return r, err
	}
	if err := e.proves(h, places[0]); err != nil {
		return r, err
	}
	entries, err := p.Entries(ctx)
	if err != nil {
		return r, err
	}
	for _, table := range p.Tables {
		if err := e.sends(table, entries[table]); err != nil {
			return r, err
		}
	}
	if e.Since == nil && !p.Unproven {
		return r, event.Fail(event.Precondition,
			"start walrelay run once, which writes it down, and prune what is inserted from then on; --include-unproven deletes rows of which nobody knows whether they were sent, too",
			"the checkpoint of slot %q does not say since when its log was read without a gap", e.Slot)
	}
	r.Since = e.Since
	parked, err := p.Parked(ctx)
	if err != nil {
		return r, err
	}
	for _, table := range p.Tables {
		done, err := p.table(ctx, table, h, e.Since, parked)
		r.Tables = append(r.Tables, done)
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// confirmed waits until every slot is confirmed up to the horizon.
func (p Prune) confirmed(ctx context.Context, h Horizon) ([]Place, error) {
	deadline := time.NewTimer(p.Wait)
	defer deadline.Stop()
	look := time.NewTicker(p.Every)
	defer look.Stop()
	for told := false; ; told = true {
		places, err := p.Places(ctx)
		if err != nil {
			return nil, err
		}
		if len(places) == 0 {
			return nil, errors.New("operate: Places has no slot")
		}
		i := slices.IndexFunc(places, func(at Place) bool { return at.Confirmed < h.LSN })
		if i < 0 {
			return places, nil
		}
		if !told && p.Waiting != nil {
			p.Waiting(places[i].Slot, h.LSN)
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-deadline.C:
			at, hint := places[i], "nothing reads it: start its relay with walrelay run"
			if at.Active {
				hint = "its relay is behind, or confirms late (--confirm-delay): wait longer with --wait; walrelay status says how far it is"
			}
			return nil, event.Fail(event.Precondition, hint,
				"slot %q is confirmed up to %s, and not to %s, within %s: nothing is deleted", at.Slot, at.Confirmed, h.LSN, p.Wait)
		}
	}
}

// proves reports whether the checkpoint speaks for the slot up to the horizon. A slot alone
// does not: it may have been made anew, or been advanced, since the relay looked last.
func (e Evidence) proves(h Horizon, at Place) error {
	const again = "start walrelay run once, or let it go on, and try again"
	switch {
	case !e.Found:
		return event.Fail(event.Precondition, "name the relay's stream with --stream, and its bucket with --checkpoint-bucket",
			"the stream has no checkpoint that says what is stored")
	case e.Slot != at.Slot || e.Database != h.Database || e.SystemID != h.SystemID:
		return event.Fail(event.Precondition, "name the slot and the stream of one relay, with --slot and --stream",
			"the checkpoint belongs to slot %q of database %q (system %s), not to slot %q of database %q (system %s)",
			e.Slot, e.Database, e.SystemID, at.Slot, h.Database, h.SystemID)
	case e.Unfinished:
		return event.Fail(event.Precondition, again, "a backfill or a recovery of slot %q is not done", e.Slot)
	case e.Forgotten:
		return event.Fail(event.Precondition, "start walrelay run, which publishes them again where it can, or says what is missing",
			"the stream has lost messages that slot %q was confirmed past: the rows may be all that is left", e.Slot)
	case e.Timeline != h.Timeline:
		return event.Fail(event.Precondition, again, "the server was promoted, to timeline %d, and the last checkpoint is of timeline %d", h.Timeline, e.Timeline)
	case e.Proven != nil && *e.Proven < h.LSN:
		return event.Fail(event.Precondition, "try again when the relay has published another event",
			"of the last events before %s only the dedup window of the stream says that they are stored, and their messages are gone: nothing is deleted", h.LSN)
	case e.Confirm < h.LSN:
		return event.Fail(event.Precondition, again,
			"slot %q is confirmed up to %s, past its checkpoint at %s: it was advanced or made anew", e.Slot, at.Confirmed, e.Confirm)
	}
	return nil
}

// sends reports whether a table is one that the relay reads, and still the same.
func (e Evidence) sends(table string, now []string) error {
	was := e.Tables[table]
	if len(was) == 0 {
		return event.Fail(event.Precondition, "name the relay's own tables with --table",
			"the relay of slot %q does not publish table %s", e.Slot, table)
	}
	if !slices.ContainsFunc(now, func(entry string) bool { return slices.Contains(was, entry) }) {
		return event.Fail(event.Precondition, "start walrelay run, which says what became of it",
			"table %s, or its publication, is not the one that slot %q was last read with", table, e.Slot)
	}
	return nil
}

// keeps says why a row stays, "" when it may go.
func (p Prune) keeps(table string, row PruneRow, parked Parked) Keep {
	switch {
	case !row.Old:
		return KeepYoung
	case !row.Passed:
		return KeepUnpassed
	case !row.Event:
		return KeepNoEvent
	case !row.Sent && !p.Unproven:
		return KeepUnproven
	case parked.Has(table, row.ID):
		return KeepParked
	}
	return ""
}

func (p Prune) table(ctx context.Context, name string, h Horizon, since *event.Mark, parked Parked) (Pruned, error) {
	done := Pruned{Table: name, Dropped: []string{}, Kept: map[Keep]int64{}, Spared: map[string]Keep{}}
	t, err := p.Open(ctx, name, h, since)
	if err != nil {
		return done, err
	}
	if parts, ok := t.(PrunePartitions); ok && p.Partitions {
		if err := p.partitions(ctx, parts, &done, parked); err != nil {
			return done, err
		}
	}
	for {
		rows, err := t.Next(ctx)
		if err != nil || len(rows) == 0 {
			return done, err
		}
		var gone []PruneRow
		for _, row := range rows {
			if why := p.keeps(name, row, parked); why != "" {
				done.Kept[why]++
			} else {
				gone = append(gone, row)
			}
		}
		if len(gone) == 0 {
			continue
		}
		n := len(gone)
		if !p.DryRun {
			if n, err = t.Delete(ctx, gone); err != nil {
				done.Deleted += int64(n)
				return done, err
			}
		}
		done.Deleted += int64(n)
		if left := len(gone) - n; left > 0 {
			done.Kept[KeepInTheWay] += int64(left)
		}
	}
}

// spared ends the look at a partition.
type spared struct{ why Keep }

func (s *spared) Error() string { return string(s.why) }

func (p Prune) partitions(ctx context.Context, t PrunePartitions, done *Pruned, parked Parked) error {
	all, err := t.Partitions(ctx)
	if err != nil {
		return err
	}
	for _, part := range all {
		switch {
		case part.Default:
			done.Spared[part.Name] = KeepDefault
			continue
		case !part.Old:
			done.Spared[part.Name] = KeepYoung
			continue
		case p.DryRun:
			continue // its rows are counted with the others
		}
		n, locked, err := t.Drop(ctx, part, func(row PruneRow) error {
			if why := p.keeps(done.Table, row, parked); why != "" {
				return &spared{why}
			}
			return nil
		})
		kept, spare := errors.AsType[*spared](err)
		switch {
		case spare:
			done.Spared[part.Name] = kept.why
		case err != nil:
			return err
		case locked:
			done.Spared[part.Name] = KeepInTheWay
		default:
			done.Dropped = append(done.Dropped, part.Name)
			done.Deleted += int64(n)
		}
	}
	return nil
}

// String says what was done, in lines.
func (r PruneResult) String() string {
	var b strings.Builder
	verb := "deleted"
	if r.DryRun {
		verb = "would be deleted"
	}
	for _, t := range r.Tables {
		fmt.Fprintf(&b, "table %s: %d rows %s\n", t.Table, t.Deleted, verb)
		for _, name := range t.Dropped {
			fmt.Fprintf(&b, "  partition %s dropped\n", name)
		}
		for _, k := range keeps {
			if n := t.Kept[k.why]; n > 0 {
				fmt.Fprintf(&b, "  %d rows kept: %s\n", n, k.text)
			}
		}
		for _, k := range keeps {
			var names []string
			for name, why := range t.Spared {
				if why == k.why {
					names = append(names, name)
				}
			}
			slices.Sort(names)
			for _, name := range names {
				fmt.Fprintf(&b, "  partition %s kept: %s\n", name, k.text)
			}
		}
	}
	return b.String()
}

var keeps = []struct {
	why  Keep
	text string
}{
	{KeepYoung, "too young"},
	{KeepUnpassed, "written by a transaction that had not ended, or not been confirmed, when this began"},
	{KeepNoEvent, "the publication's row filter leaves them out, so they are no events"},
	{KeepUnproven, "not proven to be published: older than the first start of the relay on this slot, or than a gap that was accepted (--include-unproven)"},
	{KeepParked, "an open dead letter needs the row"},
	{KeepInTheWay, "in use by somebody"},
	{KeepDefault, "it is the default partition"},
}
