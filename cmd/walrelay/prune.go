package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/slotmgr"
)

// prune is what the flags of prune say.
type prune struct {
	olderThan  ageFlag
	batch      int
	every      time.Duration
	wait       time.Duration
	partitions bool
	archive    string
	alsoSlots  []string
	unproven   bool
	dryRun     bool
	yes        bool
}

const (
	pruneBatch = 1000
	pruneWait  = time.Minute
	// pruneLook is the time between two looks at a slot that is waited for.
	pruneLook = 200 * time.Millisecond
)

// ageFlag is a duration that may have days.
type ageFlag time.Duration

func (a *ageFlag) String() string {
	if *a == 0 {
		return ""
	}
	return time.Duration(*a).String()
}
func (a *ageFlag) Type() string { return "age" }

func (a *ageFlag) Set(s string) error {
	d, err := config.ParseAge(s)
	if err != nil || d < 0 {
		return errBadValue
	}
	*a = ageFlag(d)
	return nil
}

func pruneCommand(p *process) *cobra.Command {
	var o prune
	cmd := &cobra.Command{
		Use: "prune --older-than age [flags]", Short: "Delete rows that are published",
		Long: `Deletes rows of the outbox tables that are older than an age and provably published: every
slot is confirmed past them, the relay's checkpoint says that nothing was passed over since
they were inserted, and no dead letter needs them. It says what it kept, and why. It needs
the relay to run, and the flags that the relay has; deleting costs no message.

Rows go in batches, each in a short transaction, and what others have locked stays.
--drop-partitions drops a partition of an outbox that walrelay init --partitioned made,
when all of its rows may go; the default partition stays.

--archive writes each row to a file, as a JSON object on a line, before it is gone: bytea in
base64, json and jsonb as JSON. After a crash rows may be in it twice, and none is missing.

Rows from before the relay's first start on its slot may never have been sent, unless it
began with --backfill. They stay without --include-unproven, which takes your word for it.`,
		Example: `  walrelay prune --older-than 7d --dry-run
  walrelay prune --older-than 7d --yes --archive outbox.jsonl.zst
  walrelay prune --older-than 30d --yes --drop-partitions --every 1h`,
		Args: atMost(0),
	}
	cmd.Flags().Var(&o.olderThan, "older-than", "age of the rows, by created_at, such as 7d, 36h or 1d12h")
	cmd.Flags().IntVar(&o.batch, "batch", pruneBatch, "rows in a transaction at most")
	cmd.Flags().DurationVar(&o.every, "every", 0, "go on until stopped, with so much time between two passes")
	cmd.Flags().BoolVar(&o.partitions, "drop-partitions", false, "drop partitions of which every row may go")
	cmd.Flags().StringVar(&o.archive, "archive", "", "file that gets the rows before they are deleted; .zst compresses it")
	cmd.Flags().StringArrayVar(&o.alsoSlots, "also-slot", nil, "further slot that reads the tables and has to be confirmed past the rows; repeatable")
	cmd.Flags().DurationVar(&o.wait, "wait", pruneWait, "longest wait for the slots to confirm; more than --confirm-delay of the relay")
	cmd.Flags().BoolVar(&o.unproven, "include-unproven", false, "delete rows, too, of which nobody knows whether they were ever sent")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, "say what would be deleted, and delete nothing")
	cmd.Flags().BoolVar(&o.yes, "yes", false, "do not ask")
	output := outputFlag(cmd)
	groups := append(slices.Clone(bothEnds), config.Logging)
	return command(p, cmd, groups, func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
		if err := o.check(cmd, cfg); err != nil {
			return err
		}
		e, err := newEnds(cfg, nil)
		if err != nil {
			return err
		}
		if err := o.ask(cmd, cfg, isTerminal(p.in)); err != nil {
			return err
		}
		return o.run(cmd, e, *output)
	})
}

func (o *prune) check(cmd *cobra.Command, cfg *config.Config) error {
	usage := func(hint, format string, args ...any) error { return event.Fail(event.Usage, hint, format, args...) }
	switch {
	case !cmd.Flags().Changed("older-than"):
		return usage("add --older-than, such as --older-than 7d", "it is not said how old the rows are that may go")
	case o.batch < 1 || o.batch > 100_000:
		return usage("write a number from 1 to 100000", "--batch %d is out of range", o.batch)
	case o.every < 0 || o.wait < 0:
		return usage("write a duration such as 10m", "a duration is below zero")
	case len(cfg.Tables) == 0:
		return usage("name one with --table", "there is no outbox table to prune")
	case o.archive != "" && len(cfg.Tables) > 1:
		return usage("prune one table at a time, named with --table", "--archive takes the rows of one table, and %d are configured", len(cfg.Tables))
	}
	for _, name := range o.alsoSlots {
		if err := slotmgr.CheckName(name); err != nil {
			return err
		}
	}
	return nil
}

func (o *prune) ask(cmd *cobra.Command, cfg *config.Config, terminal bool) error {
	names := make([]string, len(cfg.Tables))
	for i, t := range cfg.Tables {
		names[i] = t.Name
	}
	which := "published rows"
	if o.unproven {
		which = "rows, published or not,"
	}
	return consent{
		ask:     fmt.Sprintf("delete %s of %s that are older than %s?", which, strings.Join(names, ", "), time.Duration(o.olderThan)),
		unasked: "prune asks before it deletes rows, and this is no terminal",
		hint:    "add --yes to delete them without being asked, or --dry-run to see what it would do", refused: "nothing is deleted",
	}.get(cmd, terminal, o.yes || o.dryRun)
}

// run makes one pass, or one after the other until it is stopped. In a loop what passes by
// itself, or may, is told and tried again.
func (o *prune) run(cmd *cobra.Command, e *ends, output form) (err error) {
	ctx := cmd.Context()
	job := o.job(e)
	if o.archive != "" && !o.dryRun {
		archive, note, err := outbox.OpenArchive(o.archive)
		if err != nil {
			return err
		}
		defer archive.Close() //nolint:errcheck // every row is synced
		if note != "" {
			cmd.PrintErrf("note: %s\n", note)
		}
		job.save = archive.Append
	}
	job.waiting = func(slot string, lsn event.LSN) {
		cmd.PrintErrf("waiting until slot %s is confirmed up to %s\n", slot, lsn)
	}
	if o.every == 0 {
		result, err := job.pass(ctx)
		o.note(cmd, job)
		if err != nil && len(result.Tables) == 0 {
			return err
		}
		return cmp.Or(err, o.tell(cmd, output, result))
	}
	job.waiting = nil
	noted := false
	for ctx.Err() == nil {
		result, err := job.pass(ctx)
		if !noted {
			o.note(cmd, job)
			noted = true
		}
		switch {
		case ctx.Err() != nil: // stopped, with what was deleted until then
		case err != nil && event.ClassOf(err) == event.Usage:
			return err
		case err != nil:
			cmd.PrintErrf("warning: %v\n", err)
			if hint := event.HintOf(err); hint != "" {
				cmd.PrintErrf("hint: %s\n", hint)
			}
		}
		if err == nil || result.Deleted() > 0 {
			if err := o.tell(cmd, output, result); err != nil {
				return err
			}
		}
		pause(ctx, o.every)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

func (o *prune) note(cmd *cobra.Command, job *pruning) {
	if len(job.others) > 0 {
		cmd.PrintErrf("note: this database has further slots, which are not waited for: %s; name those that read the tables with --also-slot\n", strings.Join(job.others, ", "))
	}
}

func (o *prune) tell(cmd *cobra.Command, output form, r operate.PruneResult) error {
	switch {
	case output != formJSON:
		_, err := fmt.Fprint(cmd.OutOrStdout(), r)
		return err
	case o.every > 0:
		return json.NewEncoder(cmd.OutOrStdout()).Encode(r) // a line each
	}
	return writeJSON(cmd.OutOrStdout(), r)
}

func (o *prune) job(e *ends) *pruning {
	return &pruning{
		ends: e, slots: append([]string{e.cfg.Slot}, o.alsoSlots...),
		options: outbox.PruneOptions{Publications: e.cfg.Publications, OlderThan: time.Duration(o.olderThan), Batch: o.batch},
		prune:   operate.Prune{DryRun: o.dryRun, Unproven: o.unproven, Partitions: o.partitions, Wait: o.wait, Every: pruneLook},
	}
}

// pruning makes passes over the outbox tables.
type pruning struct {
	*ends
	slots   []string // the relay's first
	options outbox.PruneOptions
	prune   operate.Prune
	save    func([][]byte) error // nil without an archive
	waiting func(string, event.LSN)

	others []string // slots of the database that are not waited for
}

// pass makes one over a connection of its own.
func (j *pruning) pass(ctx context.Context) (operate.PruneResult, error) {
	conn, err := slotmgr.Connect(ctx, j.pg)
	if err != nil {
		return operate.PruneResult{DryRun: j.prune.DryRun, Tables: []operate.Pruned{}}, err
	}
	defer hangUp(conn)
	p := j.prune
	p.Waiting = j.waiting
	p.Horizon = func(ctx context.Context) (operate.Horizon, error) {
		var err error
		if j.others, err = slotmgr.Others(ctx, conn, j.slots); err != nil {
			return operate.Horizon{}, err
		}
		h, err := slotmgr.LookAtHorizon(ctx, conn)
		return operate.Horizon(h), err
	}
	p.Places = func(ctx context.Context) ([]operate.Place, error) {
		all, err := slotmgr.Places(ctx, conn, j.slots)
		places := make([]operate.Place, len(all))
		for i, s := range all {
			places[i] = operate.Place{Slot: s.Name, Confirmed: s.ConfirmedFlush, Active: s.Active}
		}
		return places, err
	}
	p.Evidence = func(ctx context.Context) (operate.Evidence, error) {
		e, err := j.pub.Evidence(ctx)
		return operate.Evidence(e), err
	}
	p.Parked = func(ctx context.Context) (operate.Parked, error) { return j.pub.Parked(ctx) }
	p.Entries = func(ctx context.Context) (map[string][]string, error) {
		now, err := slotmgr.LookAtPublications(ctx, conn, j.cfg.Publications, wanted(j.outboxes), nil)
		if err == nil {
			err = now.Err
		}
		return now.Entries, err
	}
	p.Open = func(ctx context.Context, name string, h operate.Horizon, since *event.Mark) (operate.PruneTable, error) {
		o := j.options
		o.XID, o.Since = h.XID, since
		o.Table, _ = j.table(name) // one of p.Tables
		t, err := outbox.OpenPruner(ctx, conn, o)
		return &prunedTable{t, j.save}, err
	}
	for _, t := range j.outboxes {
		p.Tables = append(p.Tables, t.String())
	}
	return p.Run(ctx)
}

// prunedTable is an outbox.Pruner as operate sees it.
type prunedTable struct {
	pruner *outbox.Pruner
	save   func([][]byte) error
}

func (t *prunedTable) Next(ctx context.Context) ([]operate.PruneRow, error) {
	found, err := t.pruner.Next(ctx)
	rows := make([]operate.PruneRow, len(found))
	for i, c := range found {
		rows[i] = pruneRow(c)
	}
	return rows, err
}

func pruneRow(c outbox.Candidate) operate.PruneRow {
	return operate.PruneRow{ID: c.ID, Old: c.Old, Passed: c.Passed, Sent: c.Sent, Event: c.Event, Ref: c}
}

func (t *prunedTable) Delete(ctx context.Context, rows []operate.PruneRow) (int, error) {
	chosen := make([]outbox.Candidate, len(rows))
	for i, r := range rows {
		chosen[i] = r.Ref.(outbox.Candidate)
	}
	return t.pruner.Delete(ctx, chosen, t.save)
}

func (t *prunedTable) Partitions(ctx context.Context) ([]operate.PrunePartition, error) {
	found, err := t.pruner.Partitions(ctx)
	all := make([]operate.PrunePartition, len(found))
	for i, p := range found {
		all[i] = operate.PrunePartition{Name: p.Name, Default: p.Default, Old: p.Old, Ref: p}
	}
	return all, err
}

func (t *prunedTable) Drop(ctx context.Context, p operate.PrunePartition, judge func(operate.PruneRow) error) (rows int, locked bool, err error) {
	rows, err = t.pruner.Drop(ctx, p.Ref.(outbox.Partition), func(c outbox.Candidate) error { return judge(pruneRow(c)) }, t.save)
	if errors.Is(err, outbox.ErrLocked) {
		return 0, true, nil
	}
	return rows, false, err
}
