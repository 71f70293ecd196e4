package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/slotmgr"
)

// replayKey is the key of the relay's stream once its publisher has read it.
func replayKey(cfg *config.Config, pub **publisher.Publisher) func() (outbox.ReplayKey, bool) {
	return func() (outbox.ReplayKey, bool) {
		if *pub == nil {
			return outbox.ReplayKey{}, false
		}
		secret := (*pub).ReplayKey()
		return outbox.ReplayKey{Secret: secret, Slot: cfg.Slot, Stream: cfg.Stream.Name}, secret != nil
	}
}

// betweenForged is the time between two warnings of forged replays, which anybody
// can write as fast as the log goes.
const betweenForged = time.Minute

// forged warns of messages that pretend to be replays.
func forged(log *slog.Logger) func(event.Position) {
	var last time.Time
	n := 0
	return func(at event.Position) {
		if n++; time.Since(last) < betweenForged {
			return
		}
		last = time.Now()
		log.Warn("ignoring logical messages that are replays by their prefix and have no valid signature", "messages", n, "position", at.String(),
			"hint", "was the key in the bucket of checkpoints removed? Else see who may execute pg_logical_emit_message")
		n = 0
	}
}

// desk is what a command that has events published again works with.
type desk struct {
	*ends
	conn    *pgx.Conn
	replays *publisher.Replays
	key     outbox.ReplayKey
}

// openDesk connects to both ends. A stream that no relay has written to is a
// Precondition failure.
func openDesk(ctx context.Context, e *ends) (*desk, error) {
	conn, err := slotmgr.Connect(ctx, e.pg)
	if err != nil {
		return nil, err
	}
	d := &desk{ends: e, conn: conn}
	if err := d.open(ctx); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *desk) open(ctx context.Context) error {
	database, err := currentDatabase(ctx, d.conn)
	if err != nil {
		return err
	}
	if d.replays, err = d.pub.OpenReplays(ctx); err != nil {
		return err
	}
	d.key = outbox.ReplayKey{Slot: d.cfg.Slot, Stream: d.cfg.Stream.Name}
	d.key.Secret, err = d.replays.Key(ctx, d.cfg.Slot, database)
	return err
}

// tidyPatience bounds how long old notes are looked for.
const tidyPatience = 5 * time.Second

func (d *desk) close() {
	if d.key.Secret != nil {
		ctx, cancel := context.WithTimeout(context.Background(), tidyPatience)
		_ = d.replays.Tidy(ctx) // the next command does it
		cancel()
	}
	if d.replays != nil {
		d.replays.Close()
	}
	hangUp(d.conn)
}

// relayed reports whether a relay reads the slot.
func (d *desk) relayed(ctx context.Context) (bool, error) {
	slot, exists, err := slotmgr.Lookup(ctx, d.conn, d.cfg.Slot)
	return exists && slot.Active, err
}

// emit writes messages for the relay in one transaction. ready may be nil.
func (d *desk) emit(ctx context.Context, contents [][]byte, ready func(xid string) error) error {
	tx, err := d.conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin a transaction: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	if err := outbox.EmitReplays(ctx, tx, contents); err != nil {
		return err
	}
	if ready != nil {
		var xid string
		if err := tx.QueryRow(ctx, "select pg_catalog.pg_current_xact_id()::text").Scan(&xid); err != nil {
			return fmt.Errorf("read the transaction's id: %w", err)
		}
		if err := ready(xid); err != nil {
			return err
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// preview maps a signed replay as the relay would, with the command's own flags.
func (d *desk) preview(content []byte, ev *event.Event) error {
	rec := &event.Record{Kind: event.Message, Prefix: outbox.ReplayPrefix, Content: content, Transactional: true, CommitTime: time.Now()}
	_, err := d.mapper.Map(rec, ev)
	return err
}

// again are the flags of replay.
type again struct {
	from, to  string
	ids       []string
	aggregate string
	order     string
	keepID    bool
	rate      string
	run       string
	dryRun    bool
	yes       bool
}

func replayCommand(p *process) *cobra.Command {
	var a again
	cmd := &cobra.Command{
		Use: "replay [flags]", Short: "Publish stored rows again",
		Long: `Has rows of the outbox tables published again: those of a time, of an aggregate, or with
given ids. The relay publishes them, in the order of the table, among what else it
publishes, or when it is started. They have the header Outbox-Replay with the name of the run, and
Nats-Msg-Id with it behind the id, so that the dedup window does not swallow them;
--keep-id leaves Nats-Msg-Id as it was, for consumers and streams that are to drop what they
have, and rows that the stream's dedup window still knows are then passed over.

Replayed events come behind all that is in the stream: an aggregate's older events then
follow its newer ones. Consumers have to expect that. --subject on the command line sends
them to another subject than the relay's mapping does.

A run that was stopped or killed goes on with --run and its name, and emits no row
twice. --dry-run shows what would be done.`,
		Example: `  walrelay replay --from 2026-03-01 --to 2026-03-02 --dry-run
  walrelay replay --aggregate order/42 --yes
  walrelay replay --id 0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d --subject 'again.{aggregate_type}.{event_type}'
  walrelay replay --run r20260301t120000-5f1c`,
		Args: atMost(0),
	}
	f := cmd.Flags()
	f.StringVar(&a.from, "from", "", "rows created at this time or later: RFC 3339, a date, or a duration ago such as 24h")
	f.StringVar(&a.to, "to", "", "rows created before this time")
	f.StringArrayVar(&a.ids, "id", nil, "id of a row; repeatable")
	f.StringVar(&a.aggregate, "aggregate", "", "rows of an aggregate, as ID or TYPE/ID")
	f.StringVar(&a.order, "order", "", "column by which rows are read (default the one with the role seq)")
	f.BoolVar(&a.keepID, "keep-id", false, "leave Nats-Msg-Id as it was")
	f.StringVar(&a.rate, "rate", "", "rows a second at most, such as 500/s")
	f.StringVar(&a.run, "run", "", "name of the run: of one to go on with, or of a new one")
	f.BoolVar(&a.dryRun, "dry-run", false, "show what would be done, and change nothing")
	f.BoolVar(&a.yes, "yes", false, "do not ask")
	return command(p, cmd, append(bothEnds, config.Logging), func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
		choice, rate, err := a.choice(cmd, cfg)
		if err != nil {
			return err
		}
		log, _ := newLogger(p, cfg.Log)
		e, err := newEnds(cfg, log)
		if err != nil {
			return err
		}
		if len(e.outboxes) == 0 {
			return event.Fail(event.Usage, "name one with --table; what logical messages said is in the stream alone", "there is no outbox table to read")
		}
		d, err := openDesk(cmd.Context(), e)
		if err != nil {
			return err
		}
		defer d.close()
		return a.perform(cmd, p, d, log, choice, rate)
	})
}

// choice is what a run is asked for, as its record keeps it.
type choice struct {
	outbox.Range
	Tables  []string       `json:"tables"`
	Order   string         `json:"order,omitempty"`
	KeepID  bool           `json:"keep_id,omitempty"`
	Subject string         `json:"subject,omitempty"`
	Ends    []outbox.Place `json:"ends"`
}

func (c *choice) chooses() bool {
	return !c.From.IsZero() || !c.To.IsZero() || len(c.IDs) > 0 || c.AggregateID != ""
}

// choice reads the flags. It is one that chooses nothing when only --run is given.
func (a *again) choice(cmd *cobra.Command, cfg *config.Config) (c choice, rate int, err error) {
	now := time.Now()
	if c.From, err = parseTime("--from", a.from, now); err != nil {
		return c, 0, err
	}
	if c.To, err = parseTime("--to", a.to, now); err != nil {
		return c, 0, err
	}
	if !c.From.IsZero() && !c.To.IsZero() && !c.From.Before(c.To) {
		return c, 0, event.Fail(event.Usage, "let --from be before --to", "--from %s is not before --to %s", a.from, a.to)
	}
	for _, id := range a.ids {
		if id == "" {
			return c, 0, event.Fail(event.Usage, "name the id of a row", "--id is empty")
		}
		c.IDs = append(c.IDs, strings.TrimSpace(id))
	}
	c.AggregateType, c.AggregateID, err = parseAggregate(a.aggregate, cmd.Flags().Changed("aggregate"))
	if err != nil {
		return c, 0, err
	}
	if a.run != "" && !outbox.ValidRun(a.run) {
		return c, 0, event.Fail(event.Usage, "use up to 64 letters, digits, - and _", "--run %q is no name of a run", a.run)
	}
	if !c.chooses() && a.run == "" {
		return c, 0, event.Fail(event.Usage, "choose with --from and --to, --id or --aggregate; --run goes on with a run", "it is not said which rows to publish again")
	}
	if cmd.Flags().Changed("subject") {
		c.Subject = cfg.Subject
		if err := outbox.CheckSubject(c.Subject); err != nil {
			return c, 0, err
		}
	}
	c.Order, c.KeepID = a.order, a.keepID
	if a.rate != "" {
		if rate, err = parseRate(a.rate); err != nil {
			return c, 0, err
		}
	}
	return c, rate, nil
}

func parseRate(s string) (int, error) {
	n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimSpace(s), "/s"))
	if err != nil || n < 1 {
		return 0, event.Fail(event.Usage, "write rows a second, such as 500/s", "--rate %q is no rate", s)
	}
	return n, nil
}

// parseTime reads a point in time; "" is none.
func parseTime(option, s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	for _, form := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", "2006-01-02T15:04", "2006-01-02 15:04", time.DateOnly} {
		if t, err := time.Parse(form, s); err == nil {
			return t.UTC(), nil
		}
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d).UTC(), nil
	}
	return time.Time{}, event.Fail(event.Usage, "write 2026-03-01T12:00:00Z, 2026-03-01 (UTC), or a duration ago such as 24h", "%s %q is no time", option, s)
}

// parseAggregate reads [TYPE/]ID.
func parseAggregate(s string, given bool) (kind, id string, err error) {
	if !given {
		return "", "", nil
	}
	kind, id, both := strings.Cut(s, "/")
	if !both {
		kind, id = "", s
	}
	if id == "" {
		return "", "", event.Fail(event.Usage, "write ID or TYPE/ID, such as order/42", "--aggregate %q names no aggregate", s)
	}
	return kind, id, nil
}

// newRun is a name that no other run has.
func newRun(now time.Time) string {
	b := make([]byte, 4)
	_, _ = rand.Read(b) // never fails
	return "r" + strings.ToLower(now.UTC().Format("20060102T150405")) + "-" + hex.EncodeToString(b)
}

// perform begins a run or goes on with one.
func (a *again) perform(cmd *cobra.Command, p *process, d *desk, log *slog.Logger, c choice, rate int) error {
	ctx := cmd.Context()
	run, revision, err := a.load(ctx, d)
	if err != nil {
		return err
	}
	begun := revision != 0
	switch {
	case begun && (c.chooses() || c.Subject != "" || c.KeepID || c.Order != ""):
		return event.Fail(event.Usage, "leave out what chooses rows and ids, or choose another name", "run %s was begun already, with a choice of its own", run.ID)
	case begun:
		if err := json.Unmarshal(run.Choice, &c); err != nil {
			return event.Fail(event.Precondition, "begin another run", "the record of run %s cannot be read: %w", run.ID, err)
		}
	case !c.chooses():
		return event.Fail(event.Usage, "choose rows with --from and --to, --id or --aggregate to begin it", "there is no run %s to go on with", a.run)
	}
	tables, err := d.tablesOf(c.Tables)
	if err != nil {
		return err
	}
	rows, err := outbox.OpenRange(ctx, d.conn, tables, c.Range, c.Order, d.cfg.Publications)
	if err != nil {
		return err
	}
	src := &replayRows{d: d, rows: rows, choice: &c, run: run.ID}
	if !begun {
		for _, t := range tables {
			c.Tables = append(c.Tables, t.String())
		}
		if c.Ends, err = rows.Ends(ctx); err != nil {
			return err
		}
		if run.Total, err = rows.Count(ctx, c.Ends); err != nil {
			return err
		}
		if run.Choice, err = json.Marshal(c); err != nil {
			return err
		}
	}
	if run.Done {
		fmt.Fprintf(cmd.OutOrStdout(), "run %s is complete: %d rows\n", run.ID, run.Emitted)
		return nil
	}
	if a.dryRun || !a.yes {
		if err := src.show(ctx, cmd, run, begun); err != nil {
			return err
		}
	}
	if a.dryRun || run.Total == 0 {
		return nil
	}
	err = consent{
		ask:     fmt.Sprintf("publish %d rows again, behind what is in stream %s?", run.Total, d.cfg.Stream.Name),
		unasked: fmt.Sprintf("replay asks before it publishes %d rows again, and this is no terminal", run.Total),
		hint:    "add --yes to publish them without being asked", refused: "nothing is published again",
	}.get(cmd, isTerminal(p.in), a.yes || begun)
	if err != nil {
		return err
	}
	cmd.PrintErrf("run %s\n", run.ID)
	show := &progress{w: p.err, log: log, terminal: isTerminal(p.err), began: time.Now(), name: "replay", done: "emitted"}
	job := operate.Replay{
		Rows: src, Emitter: emitter{d}, Rate: rate, Progress: show.tell, Log: log,
		Save: func(ctx context.Context, r operate.Run) error {
			record, err := json.Marshal(r)
			if err != nil {
				return err
			}
			next, err := d.replays.SaveRun(ctx, r.ID, record, revision)
			if err == nil {
				revision = next
			}
			return err
		},
	}
	run, err = job.Run(ctx, run)
	show.end()
	if err != nil {
		return err
	}
	when := "the relay publishes them now"
	if there, err := d.relayed(ctx); err == nil && !there {
		when = "no relay reads slot " + d.cfg.Slot + " now: they are published when one starts"
	}
	fmt.Fprintf(cmd.OutOrStdout(), "run %s: %d rows are in the log; %s\n", run.ID, run.Emitted, when)
	return nil
}

// load reads the record of the run; its revision is 0 when there is none.
func (a *again) load(ctx context.Context, d *desk) (operate.Run, uint64, error) {
	now := time.Now()
	fresh := operate.Run{Version: operate.RunVersion, ID: a.run, Begun: now.UTC()}
	if a.run == "" {
		fresh.ID = newRun(now)
		return fresh, 0, nil
	}
	record, revision, err := d.replays.Run(ctx, a.run)
	if err != nil || record == nil {
		return fresh, 0, err
	}
	var run operate.Run
	if err := json.Unmarshal(record, &run); err != nil || run.Version != operate.RunVersion {
		return run, 0, event.Fail(event.Precondition, "go on with it by the version of walrelay that began it, or begin another run", "the record of run %s is none of this version", a.run)
	}
	return run, revision, nil
}

// tablesOf are the tables with the given names, or all of them.
func (d *desk) tablesOf(names []string) ([]outbox.Table, error) {
	if names == nil {
		return d.outboxes, nil
	}
	var all []outbox.Table
	for _, name := range names {
		t, ok := d.table(name)
		if !ok {
			return nil, event.Fail(event.Usage, "name the tables with --table as when the run began", "table %s is not given", name)
		}
		all = append(all, t)
	}
	return all, nil
}

// emitter is an operate.Emitter.
type emitter struct{ d *desk }

func (e emitter) Emit(ctx context.Context, contents [][]byte, ready func(xid string) error) error {
	return e.d.emit(ctx, contents, ready)
}

func (e emitter) Outcome(ctx context.Context, xid string) (operate.TxOutcome, error) {
	return outcomeOf(ctx, e.d.conn, xid)
}

func outcomeOf(ctx context.Context, conn *pgx.Conn, xid string) (operate.TxOutcome, error) {
	const inTheFuture = "22023" // of another server, or one that was restored
	var outcome *string
	err := conn.QueryRow(ctx, "select pg_catalog.pg_xact_status($1::text::xid8)", xid).Scan(&outcome)
	var pg *pgconn.PgError
	switch {
	case errors.As(err, &pg) && pg.Code == inTheFuture, err == nil && outcome == nil:
		return operate.TxUnknown, nil
	case err != nil:
		return operate.TxUnknown, fmt.Errorf("ask for transaction %s: %w", xid, err)
	}
	return operate.TxOutcome(*outcome), nil
}

// replayRows makes messages for the relay of rows.
type replayRows struct {
	d      *desk
	rows   *outbox.RangeReader
	choice *choice
	run    string
	ev     event.Event
}

// replayBytes is about how much a batch of rows has at most.
const replayBytes = 4 << 20

// Next implements operate.ReplayRows.
func (r *replayRows) Next(ctx context.Context, after json.RawMessage, limit int) ([][]byte, json.RawMessage, error) {
	var place outbox.Place
	if after != nil {
		if err := json.Unmarshal(after, &place); err != nil {
			return nil, nil, event.Fail(event.Precondition, "begin another run", "the place of run %s cannot be read: %w", r.run, err)
		}
	}
	records, places, err := r.rows.Read(ctx, place, r.choice.Ends, limit, replayBytes)
	if err != nil || len(records) == 0 {
		return nil, nil, err
	}
	contents := make([][]byte, len(records))
	for i, rec := range records {
		if contents[i], err = r.sign(rec); err != nil {
			return nil, nil, err
		}
		// A subject that the stream does not take would park row after row.
		if r.choice.Subject == "" || r.d.preview(contents[i], &r.ev) != nil || r.d.replays.Binds(r.ev.Subject) {
			continue
		}
		return nil, nil, event.Fail(event.Precondition, "give the stream the subject, or choose another with --subject",
			"row %.100q of %s would go to %.200q, which stream %q does not take", r.ev.ID, r.ev.Table, r.ev.Subject, r.d.cfg.Stream.Name)
	}
	last, err := json.Marshal(places[len(places)-1])
	return contents, last, err
}

func (r *replayRows) sign(rec *event.Record) ([]byte, error) {
	content := outbox.Replay{Run: r.run, KeepID: r.choice.KeepID, Subject: r.choice.Subject, Row: outbox.ReplayOf(rec)}
	return content.Sign(r.d.key)
}

// sampleRows is how many rows show works out the subjects of.
const sampleRows = 50

// show tells what the run would do, and changes nothing.
func (r *replayRows) show(ctx context.Context, cmd *cobra.Command, run operate.Run, begun bool) error {
	w := cmd.OutOrStdout()
	if begun {
		fmt.Fprintf(w, "run %s was begun at %s: %d of %d rows are emitted\n", run.ID, run.Begun.Format(time.RFC3339), run.Emitted, run.Total)
		return nil
	}
	fmt.Fprintf(w, "%d rows of %s\n", run.Total, strings.Join(r.choice.Tables, ", "))
	if run.Total == 0 {
		return nil
	}
	first, ok, err := r.rows.First(ctx)
	if err != nil {
		return err
	}
	if ok {
		last := r.choice.Ends[len(r.choice.Ends)-1]
		fmt.Fprintf(w, "first  %s, %s of %s\nlast   %s, %s of %s\n", head(first.Order), head(first.ID), first.Table, head(last.Order), head(last.ID), last.Table)
	}
	records, _, err := r.rows.Read(ctx, outbox.Place{}, r.choice.Ends, sampleRows, replayBytes)
	if err != nil {
		return err
	}
	var subjects []string
	for _, rec := range records {
		content, err := r.sign(rec)
		if err != nil {
			return err
		}
		err = r.d.preview(content, &r.ev)
		line := head(string(r.ev.Subject))
		switch poison, bad := errors.AsType[*event.Poison](err); {
		case bad:
			line = "would be parked: " + head(poison.Error())
		case err != nil:
			return err
		case !r.d.replays.Binds(r.ev.Subject):
			line += ", which the stream does not take"
		}
		if !slices.Contains(subjects, line) && len(subjects) < 5 {
			subjects = append(subjects, line)
		}
	}
	for _, s := range subjects {
		fmt.Fprintf(w, "subject %s\n", s)
	}
	fmt.Fprintln(w, "They are stored behind all that is in the stream, so an aggregate's older events follow its newer ones.")
	return nil
}
