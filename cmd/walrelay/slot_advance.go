package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/slotmgr"
)

// advance is what the flags of slot advance say.
type advance struct {
	to    string
	past  string
	toNow bool
	yes   bool
	leave bool // the checkpoint as it is
	blind bool // do not read what is skipped
}

func slotAdvanceCommand(p *process) *cobra.Command {
	var a advance
	cmd := &cobra.Command{
		Use: "advance [name] [flags]", Short: "Skip events that are not to be published",
		Long: `Moves the slot on, so that the events up to there are never published. The slot must not
be in use: stop its relay first. The events that are skipped are written to stdout,
one JSON object a line, before anything is changed: keep them, to publish them later.
Without --yes they are listed, and on a terminal it asks.

A transaction that the server cannot decode is skipped unread: its line says where it
is and why, and its events are in the table at best.

--past-transaction takes the number or the LSN of a transaction, as slot peek shows them.
Everything that was committed before it is skipped, too. The checkpoint beside the
stream moves along, so that the relay takes the gap for intended.

Postgres writes the slot's new place down at its next checkpoint. Should it crash
before, it sends the skipped events again.`,
		Example: `  walrelay slot advance --past-transaction 7716
  walrelay slot advance orders --to 16/B374D848 --yes >skipped.jsonl
  walrelay slot advance orders --to-now --yes >skipped.jsonl`,
		Args: atMost(1),
	}
	cmd.Flags().StringVar(&a.to, "to", "", "skip what was committed before this LSN")
	cmd.Flags().StringVar(&a.past, "past-transaction", "", "skip up to and with this transaction, by its number (xid) or its LSN")
	cmd.Flags().BoolVar(&a.toNow, "to-now", false, "skip everything that is committed now")
	cmd.Flags().BoolVar(&a.yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&a.leave, "leave-checkpoint", false, "do not move the checkpoint, when NATS is away; the relay then needs --accept-gap once")
	cmd.Flags().BoolVar(&a.blind, "blind", false, "do not look at what is skipped, when it cannot be read; then nothing is written to stdout")
	return command(p, cmd, bothEnds, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		name, err := slotOf(cmd, args, cfg)
		if err != nil {
			return err
		}
		target, err := a.target()
		if err != nil {
			return err
		}
		e, err := newEnds(cfg, nil)
		if err != nil {
			return err
		}
		return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
			return a.run(ctx, cmd, e, conn, name, target, isTerminal(p.in))
		})
	})
}

// target says where to advance to: exactly one of the three.
type target struct {
	to  event.LSN
	tx  operate.Transaction
	now bool
}

func (a *advance) target() (target, error) {
	given := 0
	for _, is := range []bool{a.to != "", a.past != "", a.toNow} {
		if is {
			given++
		}
	}
	if given != 1 {
		return target{}, event.Fail(event.Usage, "give one of --to, --past-transaction and --to-now", "it is not said where to advance to")
	}
	if a.blind && a.past != "" {
		return target{}, event.Fail(event.Usage, "give its end with --to, or use --to-now", "--blind cannot look for a transaction")
	}
	const lsn = "write an LSN such as 16/B374D848"
	switch {
	case a.toNow:
		return target{now: true}, nil
	case a.to != "":
		to, err := event.ParseLSN(a.to)
		if err != nil || to == 0 {
			return target{}, event.Fail(event.Usage, lsn, "--to %q is no LSN", a.to)
		}
		return target{to: to}, nil
	}
	if p, err := event.ParsePosition(a.past); err == nil { // as the header Outbox-Pos has it
		return target{tx: operate.Transaction{LSN: p.Commit}}, nil
	}
	if strings.Contains(a.past, "/") {
		at, err := event.ParseLSN(a.past)
		if err != nil || at == 0 {
			return target{}, event.Fail(event.Usage, lsn, "--past-transaction %q is no LSN", a.past)
		}
		return target{tx: operate.Transaction{LSN: at}}, nil
	}
	xid, err := strconv.ParseUint(a.past, 10, 32)
	if err != nil || xid == 0 {
		return target{}, event.Fail(event.Usage, "write the number of the transaction, or an LSN such as 16/B374D848", "--past-transaction %q is neither a transaction's number nor an LSN", a.past)
	}
	return target{tx: operate.Transaction{XID: uint32(xid)}}, nil
}

// errList ends an advance that only lists.
var errList = errors.New("listed")

func (a *advance) run(ctx context.Context, cmd *cobra.Command, e *ends, conn *pgx.Conn, name string, t target, terminal bool) error {
	slot, err := slotmgr.Advanceable(ctx, conn, name)
	if err != nil {
		return err
	}
	origin, err := e.origin(ctx, slot)
	if err != nil {
		return err
	}
	log := e.log(conn, origin)
	job := operate.Advance{Log: log, Mapper: e.mapper, Slot: slotOn{conn, name}}
	if a.blind {
		job.Log = nil
	}
	if !a.leave {
		survey, err := e.pub.Survey(ctx, origin)
		if err == nil {
			err = survey.Err
		}
		if err != nil {
			return event.Fail(event.ClassOf(err), strings.TrimPrefix(event.HintOf(err)+"\nor add --leave-checkpoint, and start the relay with --accept-gap once", "\n"),
				"the stream does not tell what it holds: %w", err)
		}
		job.Resume = survey.Resume
		job.Checkpoint = checkpointOf{e.pub, origin}
	}
	if job.To, err = destination(ctx, conn, log, slot, t, plugin(e.cfg)); err != nil {
		return err
	}

	if !a.yes {
		what := "whatever lies between"
		if !a.blind {
			found, err := list(ctx, cmd, job, terminal)
			if err != nil {
				return err
			}
			what = amount(found)
		}
		err := consent{
			ask:     fmt.Sprintf("advance slot %s from %s to %s and never publish %s?", name, slot.ConfirmedFlush, job.To, what),
			unasked: fmt.Sprintf("slot advance asks before it skips %s, and this is no terminal", what),
			hint:    "add --yes to skip them without being asked", refused: fmt.Sprintf("slot %s is not advanced", name),
		}.get(cmd, terminal, false)
		if err != nil {
			return err
		}
	}
	enc := json.NewEncoder(cmd.OutOrStdout())
	enc.SetEscapeHTML(false)
	job.Skip = func(ev *operate.Event) error { return enc.Encode(ev) }
	job.Sure = func(operate.Advanced) error { return nil }
	done, err := job.Run(ctx)
	if err != nil {
		return err
	}
	what := amount(done)
	if a.blind {
		what = "whatever was between"
	}
	cmd.PrintErrf("slot %s advanced from %s to %s, %s skipped\n", name, slot.ConfirmedFlush, done.Slot, what)
	if a.leave {
		cmd.PrintErrln("the checkpoint is left as it was: start the relay with --accept-gap once")
	}
	return nil
}

// destination is the LSN to advance to.
func destination(ctx context.Context, conn *pgx.Conn, log operate.Log, slot slotmgr.Slot, t target, plugin []string) (event.LSN, error) {
	if t.tx != (operate.Transaction{}) {
		return operate.FindEnd(ctx, log, t.tx)
	}
	end, err := slotmgr.End(ctx, conn)
	if err != nil {
		return 0, err
	}
	switch {
	case t.now:
		return end, nil
	case t.to > end:
		return 0, event.Fail(event.Precondition, "use --to-now for everything", "the log ends at %s, before %s", end, t.to)
	case t.to < slot.ConfirmedFlush:
		return 0, event.Fail(event.Precondition, "name a later LSN", "slot %q is confirmed up to %s and cannot go back to %s", slot.Name, slot.ConfirmedFlush, t.to)
	}
	return slotmgr.Boundary(ctx, conn, slot, t.to, plugin)
}

// amount says what is skipped, and what of it nobody could read.
func amount(a operate.Advanced) string {
	s := fmt.Sprintf("%d events", a.Skipped)
	if a.Unread > 0 {
		s += fmt.Sprintf(" and, unread, %d transactions that cannot be decoded", a.Unread)
	}
	return s
}

// listLimit is how many of the events a list shows.
const listLimit = 1000

// list shows what would be skipped and changes nothing.
func list(ctx context.Context, cmd *cobra.Command, job operate.Advance, terminal bool) (operate.Advanced, error) {
	var events []*operate.Event
	var found operate.Advanced
	job.Skip = func(ev *operate.Event) error {
		if len(events) < listLimit {
			events = append(events, ev)
		}
		return nil
	}
	job.Sure = func(all operate.Advanced) error {
		found = all
		return errList
	}
	if _, err := job.Run(ctx); !errors.Is(err, errList) {
		return found, err
	}
	w := cmd.OutOrStdout()
	if terminal {
		w = cmd.ErrOrStderr() // stdout is for the audit
	}
	if err := writeEvents(w, events); err != nil {
		return found, err
	}
	if n := found.Skipped + found.Unread; n > len(events) {
		cmd.PrintErrf("and %d more\n", n-len(events))
	}
	return found, nil
}
