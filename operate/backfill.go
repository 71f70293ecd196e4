package operate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Options of a Backfill. TakeSnapshot, OpenSink, Mapper and Kept are required;
// zero values of the others take their defaults.
type Options struct {
	TakeSnapshot func(context.Context) (Snapshot, error)
	OpenSink     func(ctx context.Context, fail func(error)) (Sink, error)
	Mapper       Mapper

	// Kept looks for the slot that stays and returns where it begins, 0 when it is not there.
	Kept func(context.Context) (event.LSN, error)
	// Drop removes the slot whose place the new one takes, after every row is
	// stored; nil when there must be none.
	Drop func(context.Context) error

	// Recover publishes only rows that come after the first of what the stream
	// holds. All lifts that bound.
	Recover, All bool
	// AcceptGap goes on although messages are gone from the stream that say which rows are published.
	AcceptGap bool

	Halt           bool          // stop at a poison event instead of parking it
	MaxParkedInRow int           // 100
	Interval       time.Duration // between looks for overdue acks, and reports; 1 s
	DrainTimeout   time.Duration // 10 s
	BackoffMin     time.Duration // 100 ms
	BackoffMax     time.Duration // 5 s

	// Progress is told once an interval; nil for nobody.
	Progress func(Progress)
	Log      *slog.Logger
}

// Progress is how far a pass over the rows is.
type Progress struct {
	Total     int64 // rows to look at
	Seen      int64 // of these
	Published int64 // of these, in this pass
}

// Result says what a job did.
type Result struct {
	Seen      int64             // rows that the last pass looked at
	Published int64             // events stored by this job
	Parked    int64             // of these, as dead letters
	Stored    int64             // rows that were stored before the job began
	From      map[string]string // by table, which rows Recover looked at, such as seq > 41
	Begin     event.LSN         // of the new slot
	Completed bool              // false when it was told to stop before
}

// Backfill is a job. It is used once.
type Backfill struct {
	o      Options
	result Result
	begin  event.LSN // of the last slot whose rows were all stored
	parked int       // in a row
	text   string    // of the last report
	before int64     // events in the stream when the job began; negative until that is known
}

// edge is how many messages at the beginning of the stream decide behind which
// place of the table rows may be missing. Rows are not committed in the order of
// their numbers, so the very first message is not enough.
const edge = 1000

// readBack is how many messages recovery reads from the stream.
const readBack = 1 << 21

// New checks the options and starts nothing.
func New(o Options) (*Backfill, error) {
	if o.TakeSnapshot == nil || o.OpenSink == nil || o.Mapper == nil || o.Kept == nil {
		return nil, errors.New("operate: TakeSnapshot, OpenSink, Mapper and Kept are required")
	}
	if o.MaxParkedInRow == 0 {
		o.MaxParkedInRow = 100
	}
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	if o.DrainTimeout == 0 {
		o.DrainTimeout = 10 * time.Second
	}
	if o.BackoffMin == 0 {
		o.BackoffMin = 100 * time.Millisecond
	}
	if o.BackoffMax == 0 {
		o.BackoffMax = 5 * time.Second
	}
	if o.Progress == nil {
		o.Progress = func(Progress) {}
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return &Backfill{o: o, before: -1}, nil
}

// Run works until the slot is there, and rides out every failure that can pass.
// When ctx ends before, what is in flight is settled and the result is not
// Completed: the next job goes on.
func (b *Backfill) Run(ctx context.Context) (Result, error) {
	for tries := 0; ctx.Err() == nil; tries++ {
		before := b.result.Published
		err := b.attempt(ctx)
		if err == nil {
			return b.result, nil
		}
		if ctx.Err() != nil {
			break
		}
		if event.ClassOf(err) != event.Transient {
			return b.result, err
		}
		if b.result.Published > before {
			tries = 0
		}
		b.wait(ctx, tries, err)
	}
	return b.result, nil
}

func (b *Backfill) wait(ctx context.Context, tries int, err error) {
	if text := err.Error(); text != b.text {
		b.o.Log.Warn("backfill interrupted, trying again", "err", text, "hint", event.HintOf(err))
		b.text = text
	}
	d := min(b.o.BackoffMin<<min(tries, 20), b.o.BackoffMax)
	t := time.NewTimer(d/2 + rand.N(d/2+1))
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// sinkError is a failure of the stream's side: the snapshot is still good.
type sinkError struct{ error }

func (e *sinkError) Unwrap() error { return e.error }

func onSink(err error) error {
	if err == nil {
		return nil
	}
	return &sinkError{err}
}

// attempt takes a snapshot and works in it until the slot is there or Postgres fails.
func (b *Backfill) attempt(ctx context.Context) error {
	if made, err := b.made(ctx); made || err != nil {
		return err
	}
	snap, err := b.o.TakeSnapshot(ctx)
	if err != nil {
		return err
	}
	defer snap.Close()
	b.o.Log.Info("reading the table", "begin", snap.Origin().ConfirmedFlush.String())
	for tries := 0; ; tries++ {
		before := b.result.Published
		err := b.session(ctx, snap)
		var sink *sinkError
		if err == nil || !errors.As(err, &sink) || ctx.Err() != nil || event.ClassOf(err) != event.Transient {
			return err
		}
		if b.result.Published > before {
			tries = 0
		}
		b.wait(ctx, tries, err)
		if ctx.Err() != nil {
			return err
		}
	}
}

// made reports whether the slot is there though nobody heard of it.
func (b *Backfill) made(ctx context.Context) (bool, error) {
	at, err := b.o.Kept(ctx)
	switch {
	case err != nil || at == 0:
		return false, err
	case at == b.begin:
		b.result.Begin, b.result.Completed = at, true
		return true, nil
	case b.o.Drop == nil:
		return false, event.Fail(event.Precondition,
			"drop it with walrelay slot drop and start again; what is stored is not published again", "a slot of that name exists, and begins at %s", at)
	}
	return false, nil
}

// pass is one read of the rows with one session of the sink.
type pass struct {
	*Backfill
	sink   Sink
	origin event.Origin
	known  *known
	held   int64 // events in the stream when the session began
	ev     event.Event

	progress Progress
	appended uint64
	last     event.Position
	alone    bool
}

func (b *Backfill) session(ctx context.Context, snap Snapshot) error {
	work, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	sink, err := b.o.OpenSink(work, func(err error) { fail(onSink(err)) })
	if err != nil {
		return onSink(err)
	}
	defer func() { _ = sink.Close() }() // the first failure is the one that counts
	p := &pass{Backfill: b, sink: sink, origin: snap.Origin(), known: newKnown()}
	p.origin.Backfill, p.origin.Recovery = true, b.o.Recover
	resume, err := sink.Resume(work, p.origin)
	if err != nil {
		return onSink(err)
	}
	p.alone = resume.Suspect

	first, complete, err := p.readBack(work)
	if err != nil {
		return err
	}
	rows, err := snap.Rows(work)
	if err != nil {
		return err
	}
	defer rows.Close()
	if b.o.Recover && !b.o.All {
		if err := p.bound(work, rows, first, complete); err != nil {
			return err
		}
	}
	if p.progress.Total, err = rows.Count(work); err != nil {
		return err
	}
	b.o.Progress(p.progress)

	ticks := time.NewTicker(b.o.Interval)
	defer ticks.Stop()
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-ticks.C:
				sink.Tick()
			case <-stop:
				return
			}
		}
	}()
	err = p.publish(work, rows)
	if err != nil {
		if cause := context.Cause(work); cause != nil {
			err = cause
		}
		if ctx.Err() != nil {
			err = p.drain(ctx)
		}
	}
	close(stop)
	<-stopped
	if err != nil {
		return err
	}
	rows.Close()
	return p.complete(work, snap)
}

// readBack reads what the stream holds. It returns the ids of the events at its
// beginning, as it was before the job, and whether the very first one is there.
func (p *pass) readBack(ctx context.Context) (first []string, complete bool, err error) {
	limit := uint64(0)
	if p.o.Recover {
		limit = readBack
	}
	var early []uint64 // sequences of first
	held := 0          // events that were in the stream before the job
	start, from, gone, err := p.sink.Stored(ctx, limit, func(seq uint64, msgID, id, table string) {
		if len(first) < edge && id != "" {
			first, early = append(first, id), append(early, seq)
		}
		p.known.add(msgID, id, table)
		p.held++
	})
	if err != nil {
		return nil, false, onSink(err)
	}
	if p.before < 0 {
		p.before = p.held
	}
	p.count()
	if gone > 0 && !p.o.Recover && !p.o.AcceptGap {
		return nil, false, event.Fail(event.Lost,
			"see which rows are missing downstream; --accept-gap publishes every row that is not in the stream, those that were consumed among them",
			"%d messages are gone from the stream since the backfill began, so the rows that they were made of cannot be told", gone)
	}
	for held < len(early) && early[held] <= from {
		held++
	}
	complete = start == 1
	if !complete && held < edge {
		held = (held + 1) / 2 // some have to be left to compare with
	}
	return first[:held], complete, nil
}

// bound leaves out what was published before anything that the stream holds.
func (p *pass) bound(ctx context.Context, rows Rows, first []string, complete bool) error {
	from, without, err := rows.Since(ctx, first, complete)
	if err != nil {
		return err
	}
	if len(without) > 0 {
		return event.Fail(event.Precondition,
			"if the stream still holds whatever was published of the table, or nothing was, --all publishes every row that is not in the stream",
			"none of the first %d events in the stream has its row in table %s, so it cannot be told which rows were published", len(first), strings.Join(without, " and "))
	}
	p.result.From = from
	return nil
}

// publish looks at every row.
func (p *pass) publish(ctx context.Context, rows Rows) error {
	next := time.Now().Add(p.o.Interval)
	for rec, err := range rows.All(ctx) {
		if err != nil {
			return err
		}
		p.progress.Seen++
		rec.Position = event.Position{Timeline: p.origin.Timeline, Commit: p.origin.ConfirmedFlush - 1, Change: event.LSN(p.progress.Seen)}
		if err := p.row(ctx, rec); err != nil {
			return err
		}
		if p.progress.Seen%64 == 0 && time.Now().After(next) {
			next = time.Now().Add(p.o.Interval)
			p.o.Progress(p.progress)
		}
	}
	return onSink(p.sink.WaitSettled(ctx, p.appended))
}

// count is what the job has published: what a session left in flight is counted
// only when the next one finds it in the stream.
func (p *pass) count() {
	p.result.Published = p.held - p.before + int64(p.appended)
}

func (p *pass) row(ctx context.Context, rec *event.Record) error {
	ok, err := p.o.Mapper.Map(rec, &p.ev)
	poison, bad := errors.AsType[*event.Poison](err)
	switch {
	case err != nil && !bad:
		return err
	case err == nil && !ok:
		return nil
	}
	if p.known.has(p.ev.MsgID, p.ev.ID, p.ev.Table) {
		return nil
	}
	if !bad {
		err := p.sink.Append(&p.ev)
		if poison, bad = errors.AsType[*event.Poison](err); err != nil && !bad {
			return onSink(err)
		}
	}
	if bad {
		if err := p.poisoned(ctx, poison); err != nil {
			return err
		}
	} else {
		p.parked = 0
	}
	p.appended++
	p.last = rec.Position
	p.progress.Published++
	p.count()
	if p.alone {
		p.alone = false
		return onSink(p.sink.WaitSettled(ctx, p.appended))
	}
	if p.sink.Full() {
		return onSink(p.sink.WaitRoom(ctx))
	}
	return nil
}

func (p *pass) poisoned(ctx context.Context, why *event.Poison) error {
	if err := p.sink.WaitSettled(ctx, p.appended); err != nil {
		return onSink(err)
	}
	if p.o.Halt {
		return event.Fail(event.Halted,
			"mend the row or the limit and start again, or start with --on-poison park to set such events aside",
			"event %.100q of %s cannot be stored: %w", p.ev.ID, p.ev.Table, why)
	}
	// An event that waits for another one says nothing about the configuration.
	held := why.Reason == event.ReasonAggregate
	if p.parked >= p.o.MaxParkedInRow && !held {
		return event.Fail(event.Precondition,
			"so many in a row are rather a fault of the configuration: mend it, or raise --max-parked-in-row",
			"%d events in a row cannot be stored, the last one %.100q of %s: %w", p.parked+1, p.ev.ID, p.ev.Table, why)
	}
	if err := p.sink.Park(ctx, &p.ev, why); err != nil {
		return onSink(err)
	}
	if !held {
		p.parked++
	}
	p.result.Parked++
	p.o.Log.Warn("parked an event", "id", fmt.Sprintf("%.100s", p.ev.ID), "table", p.ev.Table,
		"reason", string(why.Reason), "detail", why.Detail)
	return nil
}

// drain settles what is in flight after the job was told to stop.
func (p *pass) drain(ctx context.Context) error {
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), p.o.DrainTimeout)
	defer cancel()
	if err := p.sink.WaitSettled(limit, p.appended); err != nil {
		// The next job reads from the stream what became of it.
		p.o.Log.Warn("stopped with events in flight; the next start goes on after them", "err", err)
	}
	return context.Cause(ctx)
}

// complete makes the slot, once the stream says that every row is stored.
func (p *pass) complete(ctx context.Context, snap Snapshot) error {
	c := event.Checkpoint{Events: p.appended, Position: p.last, Confirm: p.origin.ConfirmedFlush}
	if err := p.sink.CompleteBackfill(ctx, c); err != nil {
		return onSink(err)
	}
	p.begin = p.origin.ConfirmedFlush
	p.o.Progress(p.progress)
	if p.o.Drop != nil {
		if err := p.o.Drop(ctx); err != nil {
			return err
		}
	}
	if err := snap.Keep(ctx); err != nil {
		// It may be there all the same.
		if made, lookErr := p.made(ctx); lookErr == nil && made {
			err = nil
		}
		if err != nil {
			return err
		}
	}
	p.result.Begin, p.result.Completed = p.begin, true
	p.result.Seen = p.progress.Seen
	p.result.Stored = max(p.progress.Seen-p.result.Published, 0)
	return nil
}

// Percent is how much of the rows is seen.
func (p Progress) Percent() int {
	if p.Total == 0 {
		return 100
	}
	return int(math.Min(100, float64(p.Seen)*100/float64(p.Total)))
}
