package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/slotmgr"
)

func slotSplitCommand(p *process) *cobra.Command {
	var into []string
	cmd := &cobra.Command{
		Use: "split [name] [flags]", Short: "Let the slots of shards begin where a slot ends",
		Long: `Moves the slots that --into names on to the place where the relay of this slot has
stopped, so that the relays of the new ones publish exactly what it did not. The new
slots must exist before that relay stops; --stream is the stream that it published to.

It refuses when the stream holds events that are not confirmed, such as those of a
transaction that was published half. It can be repeated. This slot stays as it is:
drop it when the new relays run, so that it keeps no log.`,
		Example: `  walrelay slot split --into walrelay_0,walrelay_1
  walrelay slot split walrelay_0 --stream OUTBOX_0 --into four_0,four_2`,
		Args: atMost(1),
	}
	cmd.Flags().StringSliceVar(&into, "into", nil, "slots that go on where this one ends; repeatable")
	return command(p, cmd, bothEnds, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		name, err := slotOf(cmd, args, cfg)
		if err != nil {
			return err
		}
		if len(into) == 0 {
			return event.Fail(event.Usage, "name the slots of the shards with --into", "it is not said which slots go on")
		}
		for _, shard := range into {
			if err := slotmgr.CheckName(shard); err != nil {
				return err
			}
			if shard == name {
				return event.Fail(event.Usage, "name other slots", "slot %q cannot go on where it ends itself", name)
			}
		}
		return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
			end, err := splitAt(ctx, cfg, conn, name)
			if err != nil {
				return err
			}
			for _, shard := range into {
				if err := splittable(ctx, conn, shard, name, end); err != nil {
					return err
				}
			}
			for _, shard := range into {
				at, err := slotmgr.Advance(ctx, conn, shard, end)
				if err != nil {
					return err
				}
				if _, err := fmt.Fprintf(cmd.OutOrStdout(), "slot %s begins at %s, where %s ended\n", shard, at, name); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

// splitAt is where a slot ends whose stream holds all that was committed before, and nothing else.
func splitAt(ctx context.Context, cfg *config.Config, conn *pgx.Conn, name string) (event.LSN, error) {
	slot, err := slotmgr.Advanceable(ctx, conn, name)
	if err != nil {
		return 0, err
	}
	survey, err := surveyOf(ctx, cfg, slot)
	if err == nil {
		err = survey.Err
	}
	if err != nil {
		return 0, event.Fail(event.ClassOf(err), event.HintOf(err), "the stream does not tell what it holds: %w", err)
	}
	return slot.ConfirmedFlush, ahead(survey, slot, cfg.Stream.Name)
}

// ahead refuses a stream with events that Postgres would send again. It sends a
// transaction whose commit record begins at the confirmed LSN or later (SnapBuildXactNeedsSkip).
func ahead(s publisher.Survey, slot slotmgr.Slot, stream string) error {
	if s.Resume.Gone == 0 && s.Resume.After.Commit < slot.ConfirmedFlush {
		return nil
	}
	return event.Fail(event.Precondition,
		"start its relay again, without --confirm-delay, and stop it once `walrelay status` says that nothing is behind",
		"stream %s holds events behind %s, up to where slot %q is confirmed: its relay has not stopped between two transactions", stream, slot.ConfirmedFlush, slot.Name)
}

func splittable(ctx context.Context, conn *pgx.Conn, shard, name string, end event.LSN) error {
	slot, err := slotmgr.Advanceable(ctx, conn, shard)
	if err != nil {
		return err
	}
	if slot.ConfirmedFlush <= end {
		return nil
	}
	return event.Fail(event.Precondition,
		strings.Join([]string{
			fmt.Sprintf("start the relay of %s again, and stop it once it is past %s", name, slot.ConfirmedFlush),
			"a slot that a relay has used already cannot begin anew: drop it and create another",
		}, "\n"),
		"slot %q begins at %s, behind %s, where %q ended: what was committed in between would not be published", shard, slot.ConfirmedFlush, end, name)
}
