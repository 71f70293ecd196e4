package main

import (
	"bufio"
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/slotmgr"
)

func slotCommand(p *process) *cobra.Command {
	cmd := group("slot", "Manage replication slots and look into them",
		`A replication slot is the relay's place in the write-ahead log. It keeps the log
until the relay has confirmed it: drop the slot of a relay that is no longer used.`,
		`  walrelay slot create
  walrelay slot show
  walrelay slot drop orders`)
	cmd.AddCommand(slotCreateCommand(p), slotListCommand(p), slotShowCommand(p), slotPeekCommand(p), slotAdvanceCommand(p),
		slotSplitCommand(p), slotRecoverCommand(p), slotDropCommand(p))
	return cmd
}

func slotCreateCommand(p *process) *cobra.Command {
	var o slotmgr.CreateOptions
	cmd := &cobra.Command{
		Use: "create [name] [flags]", Short: "Create the slot",
		Long: `Creates a logical slot for the plugin pgoutput. From then on no committed event is
missed. The publication must exist. Postgres lets a slot begin only when every write
transaction that is open in any database has ended; those it waits for are told.

A --temporary slot lasts as long as this command, which then waits to be stopped.`,
		Example: `  walrelay slot create
  walrelay slot create orders --if-not-exists --timeout 30s
  walrelay slot create orders --failover`,
		Args: atMost(1),
	}
	cmd.Flags().BoolVar(&o.Failover, "failover", false, "let standbys keep up with the slot; needs Postgres 17")
	cmd.Flags().BoolVar(&o.Temporary, "temporary", false, "drop the slot when this command ends")
	cmd.Flags().BoolVar(&o.IfNotExists, "if-not-exists", false, "leave a slot that fits as it is")
	cmd.Flags().DurationVar(&o.Timeout, "timeout", 0, "longest wait for open transactions; 0 waits for ever")
	return command(p, cmd, []config.Group{config.Postgres, config.Slot, config.Publications},
		func(cmd *cobra.Command, args []string, cfg *config.Config) error {
			var err error
			if o.Name, err = slotOf(cmd, args, cfg); err != nil {
				return err
			}
			if o.Timeout < 0 {
				return event.Fail(event.Usage, "write 0 or more", "--timeout is below zero")
			}
			o.Publications = cfg.Publications
			o.Waiting = func(open []slotmgr.Blocker) {
				for _, b := range open {
					cmd.PrintErrf("waiting for %s\n", b)
				}
			}
			return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
				slot, created, err := slotmgr.Create(ctx, conn, o)
				if err != nil {
					return err
				}
				what := "exists already"
				if created {
					what = "created"
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "slot %s %s, confirmed at %s\n", slot.Name, what, position(slot.ConfirmedFlush))
				if err != nil || !o.Temporary || !created {
					return err
				}
				cmd.PrintErrln("the slot lasts until this command is stopped")
				if _, err := conn.WaitForNotification(ctx); ctx.Err() == nil {
					return fmt.Errorf("keep temporary slot %q: %w", slot.Name, err)
				}
				return nil
			})
		})
}

func slotListCommand(p *process) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "list [flags]", Short: "List slots and the log they keep",
		Long: `Lists the slots of the database for the plugin pgoutput, or with --all every slot of
the server. RETAINED is the log that Postgres keeps for a slot, LAG the part of it that
is not confirmed.`,
		Example: `  walrelay slot list
  walrelay slot list --all -o json`,
		Args: atMost(0),
	}
	cmd.Flags().BoolVar(&all, "all", false, "list the slots of every database and plugin")
	output := outputFlag(cmd)
	return command(p, cmd, []config.Group{config.Postgres},
		func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
			return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
				slots, err := slotmgr.List(ctx, conn, all)
				if err != nil {
					return err
				}
				if *output == formJSON {
					if slots == nil {
						slots = []slotmgr.Slot{}
					}
					return writeJSON(cmd.OutOrStdout(), slots)
				}
				return writeTable(cmd.OutOrStdout(), slotRows(slots, all))
			})
		})
}

func slotRows(slots []slotmgr.Slot, all bool) [][]string {
	head := []string{"NAME", "ACTIVE", "WAL STATUS", "CONFIRMED", "RETAINED", "LAG", "HELD BY"}
	if all {
		head = append(head, "DATABASE", "PLUGIN")
	}
	rows := [][]string{head}
	for _, s := range slots {
		active, status := "no", s.WALStatus
		if s.Active {
			active = "yes"
		}
		if s.Lost() {
			status = "lost: " + s.LostReason()
		}
		row := []string{
			s.Name, active, orDash(status), position(s.ConfirmedFlush),
			size(s.RetainedBytes), size(s.LagBytes), orDash(s.Holder()),
		}
		if all {
			row = append(row, orDash(s.Database), orDash(s.Plugin))
		}
		rows = append(rows, row)
	}
	return rows
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// consent is what a command asks for before it does what cannot be undone.
type consent struct {
	ask     string
	unasked string // why it does nothing where nobody can be asked
	hint    string // how to do without being asked
	refused string // what came of another answer than yes
}

// get asks for it, unless yes was given before.
func (c consent) get(cmd *cobra.Command, terminal, yes bool) error {
	if yes {
		return nil
	}
	if !terminal {
		return event.Fail(event.Usage, c.hint, "%s", c.unasked)
	}
	sure, err := confirm(cmd.Context(), cmd, c.ask)
	if err == nil && !sure {
		err = event.Fail(event.Precondition, "answer yes, or add --yes", "%s", c.refused)
	}
	return err
}

// confirm asks on the terminal.
func confirm(ctx context.Context, cmd *cobra.Command, question string) (bool, error) {
	cmd.PrintErrf("%s [y/N] ", question)
	answer := make(chan string, 1)
	go func() { // ends with the process when nobody answers
		line, _ := bufio.NewReader(cmd.InOrStdin()).ReadString('\n')
		answer <- strings.ToLower(strings.TrimSpace(line))
	}()
	select {
	case a := <-answer:
		return a == "y" || a == "yes", nil
	case <-ctx.Done():
		cmd.PrintErrln()
		return false, ctx.Err()
	}
}

// slotOf is the slot that the argument names, or else the configured one.
func slotOf(cmd *cobra.Command, args []string, cfg *config.Config) (string, error) {
	if len(args) == 0 {
		return cfg.Slot, nil
	}
	if f := cmd.Flags().Lookup("slot"); f.Changed && cfg.Slot != args[0] {
		return "", event.Fail(event.Usage, "give one of them", "the argument and --slot name different slots")
	}
	return args[0], slotmgr.CheckName(args[0])
}

// connected runs do with an ordinary connection.
func connected(ctx context.Context, cfg *config.Config, do func(context.Context, *pgx.Conn) error) error {
	pg, err := pgConfig(cfg)
	if err != nil {
		return err
	}
	conn, err := slotmgr.Connect(ctx, pg)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	return do(ctx, conn)
}

// hangUp closes a connection without waiting for a server that is gone.
func hangUp(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the session is over either way
}
