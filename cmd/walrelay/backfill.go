package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/slotmgr"
)

// job is work that spans both ends and takes its time.
type job struct {
	*ends
	log *slog.Logger
}

func newJob(cfg *config.Config, log *slog.Logger) (*job, error) {
	e, err := newEnds(cfg, log)
	return &job{ends: e, log: log}, err
}

// situation is what both ends say of the slot.
type situation struct {
	slot     slotmgr.Slot
	exists   bool
	database string
	state    publisher.State
}

func (j *job) look(ctx context.Context) (s situation, err error) {
	conn, err := slotmgr.Connect(ctx, j.pg)
	if err != nil {
		return s, err
	}
	defer hangUp(conn)
	if s.database, err = currentDatabase(ctx, conn); err != nil {
		return s, err
	}
	if s.slot, s.exists, err = slotmgr.Lookup(ctx, conn, j.cfg.Slot); err != nil {
		return s, err
	}
	s.state, err = j.pub.Examine(ctx, j.cfg.Slot, s.database)
	return s, err
}

// backfill publishes the rows of the table before the relay starts, when there
// is no slot yet. It reports whether the relay may start.
func backfill(ctx context.Context, cfg *config.Config, log *slog.Logger, screen io.Writer) (bool, error) {
	j, err := newJob(cfg, log)
	if err != nil {
		return false, err
	}
	var s situation
	if err := patiently(ctx, cfg, log, func() error {
		s, err = j.look(ctx)
		return err
	}); err != nil || ctx.Err() != nil {
		return false, err
	}
	switch {
	case s.exists && !s.state.Claimed && !s.slot.Lost():
		return false, event.Fail(event.Precondition,
			fmt.Sprintf("drop it with walrelay slot drop %s: a backfill makes the slot, so that it begins where the rows end", cfg.Slot),
			"slot %q exists already, and nothing was published from it", cfg.Slot)
	case s.exists:
		log.Info("the slot exists, so there is nothing to backfill", "slot", cfg.Slot)
		return true, nil
	case s.state.Interrupted && s.state.Recovery:
		return false, interrupted(cfg.Slot, s.state)
	case s.state.Claimed && !s.state.Interrupted:
		return false, slotmgr.Gone(cfg.Slot)
	}
	result, err := j.run(ctx, screen, operate.Options{})
	if err != nil || !result.Completed {
		return false, err
	}
	log.Info("backfilled", "rows", result.Seen, "published", result.Published, "parked", result.Parked, "slot", cfg.Slot, "begin", result.Begin.String())
	return true, nil
}

// interrupted is the failure of a slot whose backfill or recovery did not end.
func interrupted(slot string, state publisher.State) error {
	what, again := "backfill", "walrelay run --backfill"
	if state.Recovery {
		what, again = "recovery", "walrelay slot recover "+slot
	}
	return event.Fail(event.Lost, "start it again: "+again+"; what is stored is not published again",
		"slot %q does not exist: its %s was interrupted", slot, what)
}

// run runs a job whose options are those of o and the configuration.
func (j *job) run(ctx context.Context, screen io.Writer, o operate.Options) (operate.Result, error) {
	show := &progress{w: screen, log: j.log, terminal: isTerminal(screen), began: time.Now(), name: "backfill", done: "published"}
	o.TakeSnapshot = j.snapshot
	o.OpenSink = func(ctx context.Context, fail func(error)) (operate.Sink, error) { return j.pub.Open(ctx, fail) }
	o.Mapper = j.mapper
	o.Kept = j.kept
	o.AcceptGap = j.cfg.Stream.AcceptGap
	o.Halt = j.cfg.OnPoison == config.Halt
	if o.MaxParkedInRow = j.cfg.MaxParkedInRow; o.MaxParkedInRow == 0 {
		o.MaxParkedInRow = math.MaxInt
	}
	o.Interval = j.cfg.StatusInterval
	o.DrainTimeout = j.cfg.DrainTimeout
	o.BackoffMin, o.BackoffMax = j.cfg.Backoff.Min, j.cfg.Backoff.Max
	o.Progress, o.Log = show.tell, j.log
	work, err := operate.New(o)
	if err != nil {
		return operate.Result{}, err
	}
	defer show.end()
	return work.Run(ctx)
}

// kept returns where the slot begins, 0 when it is not there.
func (j *job) kept(ctx context.Context) (event.LSN, error) {
	conn, err := slotmgr.Connect(ctx, j.pg)
	if err != nil {
		return 0, err
	}
	defer hangUp(conn)
	slot, _, err := slotmgr.Lookup(ctx, conn, j.cfg.Slot)
	return slot.ConfirmedFlush, err
}

// snapshot is a replication.Snapshot with the reads of the tables in it.
type snapshot struct {
	*replication.Snapshot
	job    *job
	tables map[string][]string
}

func (j *job) snapshot(ctx context.Context) (operate.Snapshot, error) {
	watch := &publicationWatch{pg: j.pg, slot: j.cfg.Slot, publications: j.cfg.Publications, tables: wanted(j.outboxes)}
	published, err := watch.begin(ctx, nil)
	watch.end()
	if err != nil {
		return nil, err
	}
	taken, err := replication.TakeSnapshot(ctx, replicationConfig(j.cfg, j.pg, j.cfg.Slot), temporarySlot(j.cfg.Slot), j.waiting)
	if err != nil {
		return nil, err
	}
	return &snapshot{Snapshot: taken, job: j, tables: published.Entries}, nil
}

// waiting logs which transactions the creation of the slot in session pid waits for.
func (j *job) waiting(ctx context.Context, pid uint32) {
	slotmgr.WatchBlockers(ctx, j.pg, pid, func(open []slotmgr.Blocker) {
		for _, b := range open {
			j.log.Warn("waiting for a transaction to end, so that the slot can begin", "pid", b.PID, "state", b.State,
				"open_for", b.Age.Round(time.Second).String(), "database", b.Database, "application", b.Application, "user", b.User, "query", b.Query,
				"hint", b.Remedy())
		}
	})
}

// temporarySlot is the same for every backfill of a slot, so that there can be
// only one at a time.
func temporarySlot(slot string) string {
	const suffix = "_backfill"
	return slot[:min(len(slot), 63-len(suffix))] + suffix
}

func (s *snapshot) Origin() event.Origin {
	o := s.Snapshot.Origin()
	o.Tables = s.tables
	return o
}

func (s *snapshot) Keep(ctx context.Context) error { return s.Snapshot.Keep(ctx, s.job.cfg.Slot) }

func (s *snapshot) Rows(ctx context.Context) (operate.Rows, error) {
	return s.job.rows(ctx, s.Name)
}

// fit refuses tables that the mapping does not fit, before a reader takes all of their rows for poison.
func fit(ctx context.Context, conn *pgx.Conn, m *outbox.Mapper, tables []outbox.Table) error {
	for _, t := range tables {
		cols, err := outbox.Inspect(ctx, conn, t)
		if err == nil {
			err = m.Check(t, cols)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (j *job) rows(ctx context.Context, snapshot string) (*rows, error) {
	conn, err := slotmgr.Connect(ctx, j.pg)
	if err != nil {
		return nil, err
	}
	if err := fit(ctx, conn, j.mapper, j.outboxes); err != nil {
		hangUp(conn)
		return nil, err
	}
	r, err := outbox.OpenReader(ctx, conn, snapshot, j.outboxes, j.cfg.BackfillOrder, j.cfg.Publications)
	if err != nil {
		hangUp(conn)
		return nil, err
	}
	return &rows{Reader: r, conn: conn}, nil
}

// rows are an outbox.Reader on a connection of their own.
type rows struct {
	*outbox.Reader
	conn *pgx.Conn
}

func (r *rows) Close() { hangUp(r.conn) }

// patiently tries again, as the relay does, until something does not pass.
func patiently(ctx context.Context, cfg *config.Config, log *slog.Logger, try func() error) error {
	told := ""
	for wait := cfg.Backoff.Min; ; wait = min(2*wait, cfg.Backoff.Max) {
		err := try()
		if err == nil || ctx.Err() != nil {
			return nil
		}
		if event.ClassOf(err) != event.Transient {
			return err
		}
		if text := err.Error(); text != told {
			log.Warn("not ready yet, trying again", "err", text, "hint", event.HintOf(err))
			told = text
		}
		pause(ctx, wait)
	}
}

// progress shows how far a job is: a bar on a terminal, elsewhere a line of log
// now and then.
type progress struct {
	name     string // of the job
	done     string // what it has done with rows
	w        io.Writer
	log      *slog.Logger
	terminal bool
	began    time.Time
	shown    time.Time
	drawn    bool
}

// betweenLines is the time between two lines of progress in a log.
const betweenLines = 5 * time.Second

func (p *progress) tell(now operate.Progress) {
	if p.terminal {
		const width = 30
		full := now.Percent() * width / 100
		fmt.Fprintf(p.w, "\r\x1b[K[%s%s] %3d%%  %d of %d rows, %d %s",
			strings.Repeat("#", full), strings.Repeat(".", width-full), now.Percent(), now.Seen, now.Total, now.Published, p.done)
		p.drawn = true
		return
	}
	if now.Seen > 0 && now.Seen < now.Total && time.Since(p.shown) < betweenLines {
		return
	}
	p.shown = time.Now()
	p.log.Info(p.name, "percent", now.Percent(), "rows", now.Seen, "of", now.Total, p.done, now.Published)
}

func (p *progress) end() {
	if p.drawn {
		fmt.Fprintln(p.w)
	}
}

// unpublished adds to a lost slot or a gap what is known of its size. It is
// best effort and takes a few seconds at most.
func unpublished(ctx context.Context, cfg *config.Config, log *slog.Logger, err error) error {
	if event.ClassOf(err) != event.Lost {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	j, failed := newJob(cfg, log)
	if failed != nil {
		return err
	}
	s, failed := j.look(ctx)
	if failed != nil || s.exists && !s.slot.Lost() || !s.state.Claimed || s.state.Position.IsZero() {
		return err
	}
	text := "the last event in the stream has position " + s.state.Position.String()
	if !s.state.CommitTime.IsZero() {
		text += ", committed at " + s.state.CommitTime.UTC().Format(time.RFC3339)
	}
	if n, ok := j.newer(ctx, s.state.LastID); ok {
		text += fmt.Sprintf("; %d rows of the table come after it", n)
	} else {
		text += "; how many rows come after it cannot be told"
	}
	return event.Fail(event.Lost, event.HintOf(err), "%w; %s", err, text)
}

// newer counts the rows that come after the one with an id.
func (j *job) newer(ctx context.Context, id string) (int64, bool) {
	if id == "" {
		return 0, false
	}
	r, err := j.rows(ctx, "")
	if err != nil {
		return 0, false
	}
	defer r.Close()
	n, ok, err := r.CountAfter(ctx, id)
	return n, ok && err == nil
}

// dropLost drops the slot that a new one replaces, if it is there.
func (j *job) dropLost(ctx context.Context) error {
	conn, err := slotmgr.Connect(ctx, j.pg)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	if _, exists, err := slotmgr.Lookup(ctx, conn, j.cfg.Slot); err != nil || !exists {
		return err
	}
	return slotmgr.Drop(ctx, conn, j.cfg.Slot)
}

var errStopped = errors.New("stopped before the end")
