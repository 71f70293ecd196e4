package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/slotmgr"
)

// drop is what the flags of slot drop say.
type drop struct {
	yes          bool
	publications bool // drop them, too
	checkpoint   bool // remove it, too
}

func slotDropCommand(p *process) *cobra.Command {
	var d drop
	cmd := &cobra.Command{
		Use: "drop [name] [flags]", Short: "Drop the slot and give its log free",
		Long: `Drops a slot. Events that the relay has not confirmed then can no longer be read from
the log. A slot in use is not dropped: stop its relay first. It asks before, on a
terminal; elsewhere it needs --yes.

For a relay that is gone for good, --with-publication also drops the publications that
--publication names, and --with-checkpoint removes the checkpoint beside the stream. On
a terminal both are offered. The table, the stream and its messages stay.`,
		Example: `  walrelay slot drop
  walrelay slot drop orders --yes
  walrelay slot drop orders --yes --with-publication --publication orders --with-checkpoint --stream ORDERS`,
		Args: atMost(1),
	}
	cmd.Flags().BoolVar(&d.yes, "yes", false, "do not ask")
	cmd.Flags().BoolVar(&d.publications, "with-publication", false, "drop the publication, too")
	cmd.Flags().BoolVar(&d.checkpoint, "with-checkpoint", false, "remove the checkpoint of the stream, too")
	return command(p, cmd, bothEnds, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		name, err := slotOf(cmd, args, cfg)
		if err != nil {
			return err
		}
		if !d.yes && !isTerminal(p.in) {
			return event.Fail(event.Usage, "add --yes to drop it without being asked", "slot drop asks before it drops slot %s, and this is no terminal", name)
		}
		return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
			return d.run(ctx, cmd, cfg, conn, name)
		})
	})
}

func (d drop) run(ctx context.Context, cmd *cobra.Command, cfg *config.Config, conn *pgx.Conn, name string) error {
	err := d.slot(ctx, cmd, conn, name)
	if err != nil && (event.ClassOf(err) != event.Precondition || !d.gone(ctx, conn, name)) {
		return err
	}
	if err != nil {
		// What is beside it may be left from a try that was cut short.
		if !d.publications && !d.checkpoint {
			return err
		}
		cmd.PrintErrf("note: %v\n", err)
	}
	if err := d.ask(ctx, cmd, &d.publications, "drop publication "+strings.Join(cfg.Publications, ", ")+", too?"); err != nil {
		return err
	}
	if d.publications {
		if err := dropPublications(ctx, cmd, conn, cfg.Publications); err != nil {
			return unfinished(ctx, name, "publications", err)
		}
	}
	if err := d.ask(ctx, cmd, &d.checkpoint, "remove the checkpoint of stream "+cfg.Stream.Name+", too?"); err != nil {
		return err
	}
	if d.checkpoint {
		if err := d.forget(ctx, cmd, cfg, conn, name); err != nil {
			return unfinished(ctx, name, "checkpoint", err)
		}
	}
	return nil
}

// unfinished says what is gone already, and that the rest can be done later.
func unfinished(ctx context.Context, name, rest string, err error) error {
	classed := classify(ctx, begun{err})
	if errors.Is(classed, errForced) {
		return err
	}
	const again = "then run the same command again: it goes on with what is left"
	return event.Fail(event.ClassOf(classed), strings.TrimPrefix(event.HintOf(classed)+"\n"+again, "\n"),
		"slot %s is dropped, but not what belongs to it, the %s: %w", name, rest, err)
}

// ask offers on a terminal what no flag has asked for.
func (d drop) ask(ctx context.Context, cmd *cobra.Command, also *bool, question string) (err error) {
	if d.yes || *also {
		return nil
	}
	*also, err = confirm(ctx, cmd, question)
	return err
}

func (d drop) slot(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, name string) error {
	slot, err := slotmgr.Inspect(ctx, conn, name)
	if err != nil {
		return err
	}
	if !d.yes && !slot.Active { // Drop refuses an active one
		sure, err := confirm(ctx, cmd, fmt.Sprintf("drop slot %s, which keeps %s of log, %s of it unconfirmed?", name, size(slot.RetainedBytes), size(slot.LagBytes)))
		if err != nil {
			return err
		}
		if !sure {
			return event.Fail(event.Precondition, "answer yes, or add --yes", "slot %s is not dropped", name)
		}
	}
	if err := slotmgr.Drop(ctx, conn, name); err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "slot %s dropped, %s of log free to go\n", name, size(slot.RetainedBytes))
	return err
}

// gone reports whether there is no such slot.
func (d drop) gone(ctx context.Context, conn *pgx.Conn, name string) bool {
	_, err := slotmgr.Inspect(ctx, conn, name)
	return event.ClassOf(err) == event.Precondition
}

func dropPublications(ctx context.Context, cmd *cobra.Command, conn *pgx.Conn, names []string) error {
	for _, name := range names {
		dropped, err := slotmgr.DropPublication(ctx, conn, name)
		if err != nil {
			return err
		}
		what := "dropped"
		if !dropped {
			what = "does not exist"
		}
		if _, err := fmt.Fprintf(cmd.OutOrStdout(), "publication %s %s\n", name, what); err != nil {
			return err
		}
	}
	return nil
}

func (d drop) forget(ctx context.Context, cmd *cobra.Command, cfg *config.Config, conn *pgx.Conn, name string) error {
	e, err := newEnds(cfg, nil)
	if err != nil {
		return err
	}
	database, err := currentDatabase(ctx, conn)
	if err != nil {
		return err
	}
	removed, err := e.pub.Forget(ctx, name, database)
	if err != nil {
		return err
	}
	what := "removed"
	if !removed {
		what = "does not exist"
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "checkpoint of stream %s %s\n", cfg.Stream.Name, what)
	return err
}
