package main

import (
	"fmt"
	"maps"
	"slices"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/slotmgr"
)

func slotRecoverCommand(p *process) *cobra.Command {
	var yes, all bool
	cmd := &cobra.Command{
		Use: "recover [name] [flags]", Short: "Replace a lost slot and publish what the stream lacks",
		Long: `Makes a new slot in the place of one that was lost, dropped or has missed rows, and
publishes the rows that are in the table and not in the stream, in their order. They are
compared by id with what the stream holds, so nothing is published twice. Rows that come
before the first event that is still in the stream count as published; --all publishes
every row that is not in the stream. What was in the log alone is lost: logical
messages, and rows that are deleted by now.

It can be interrupted and started again at any time. Stop the relay before.`,
		Example: `  walrelay slot recover
  walrelay slot recover orders --stream ORDERS --yes`,
		Args: atMost(1),
	}
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask before a slot that is not lost is replaced")
	cmd.Flags().BoolVar(&all, "all", false, "publish every row that is not in the stream")
	return command(p, cmd, []config.Group{
		config.Postgres, config.Slot, config.Publications, config.Tables,
		config.Broker, config.Streams, config.Relay, config.Logging,
	}, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		name, err := slotOf(cmd, args, cfg)
		if err != nil {
			return err
		}
		cfg.Slot = name
		log, _ := newLogger(p, cfg.Log)
		j, err := newJob(cfg, log)
		if err != nil {
			return err
		}
		s, err := j.look(cmd.Context())
		if err != nil {
			return err
		}
		if err := recoverable(cmd, p, cfg, s, name, yes); err != nil {
			return err
		}
		all = all || s.state.Sequence == 0 // nothing was ever published
		// A backfill that was interrupted goes on as one: it is to publish every row.
		backfill := s.state.Interrupted && !s.state.Recovery
		result, err := j.run(cmd.Context(), p.err, operate.Options{Recover: !backfill, All: all, Drop: j.dropLost})
		if err != nil {
			return err
		}
		if !result.Completed {
			if cmd.Context().Err() != nil {
				return cmd.Context().Err()
			}
			return event.Fail(event.Undrained, "start it again: it goes on after what is stored", "%w", errStopped)
		}
		out := cmd.OutOrStdout()
		what := "made"
		if s.exists {
			what = "replaced"
		}
		fmt.Fprintf(out, "slot %s %s, begins at %s\n", name, what, result.Begin)
		for _, table := range slices.Sorted(maps.Keys(result.From)) {
			fmt.Fprintf(out, "table %s: rows with %s compared with the stream, the others count as published\n", table, result.From[table])
		}
		fmt.Fprintf(out, "%d rows compared: %d were in the stream, %d published, %d of these parked\n",
			result.Seen, result.Stored, result.Published, result.Parked)
		return nil
	})
}

// recoverable refuses what a new slot would make worse.
func recoverable(cmd *cobra.Command, p *process, cfg *config.Config, s situation, name string, yes bool) error {
	switch {
	case !s.exists && !s.state.Claimed:
		return event.Fail(event.Precondition, fmt.Sprintf("walrelay slot create %s makes one that begins now; walrelay run --backfill publishes the table first", name),
			"there is neither a slot %q nor a checkpoint of it for stream %q, so there is nothing to recover", name, cfg.Stream.Name)
	case !s.exists || s.slot.Lost() && s.slot.Database == s.database && s.slot.Plugin == slotmgr.Plugin:
		return nil
	case s.slot.Database != s.database || s.slot.Plugin != slotmgr.Plugin:
		return event.Fail(event.Precondition, "choose another name with --slot, for the relay, too",
			"slot %q is one of database %q and plugin %q: it is not the relay's", name, s.slot.Database, s.slot.Plugin)
	case s.slot.Active:
		return event.Fail(event.Precondition, "stop the relay that reads it first", "slot %q is in use by %s", name, s.slot.Holder())
	}
	return consent{
		ask:     fmt.Sprintf("slot %s is not lost; replace it all the same, and lose what only its log has?", name),
		unasked: fmt.Sprintf("slot %s is not lost, and this is no terminal to ask on", name),
		hint:    "add --yes to replace it without being asked", refused: fmt.Sprintf("slot %s is not replaced", name),
	}.get(cmd, isTerminal(p.in), yes)
}
