package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/slotmgr"
)

func initCommand(p *process) *cobra.Command {
	var apply, grantDelete bool
	var role string
	var partitioned partitioning
	var shards int
	var emit outbox.Emitting
	var in inboxFlags
	cmd := &cobra.Command{
		Use: "init [flags]", Short: "Make the outbox table, its publication and the relay's role",
		Long: `Prints the SQL that makes what is missing of the outbox tables, the publication
and, with --role, the rights of the relay's role. With --apply it runs it and says
what it did. It can be repeated without harm. An existing table is never altered:
where it differs, the differences are told.

With --partitioned the table has partitions by time; run it again from time to time to
make those to come, and drop old ones.

--shards makes publications of the same name with _0, _1 and so on at its end, each with
the rows of its share of the aggregates, for as many relays; it needs Postgres 15.

--emit-function adds the SQL function walrelay_emit, which makes an event without a
row; the relay takes those with --messages. Any role can emit logical messages
unless --emit-grant names those that may.

--inbox makes the table in which consumers record what they have handled, and nothing
else: it belongs into the consumer's database, which --dsn names.`,
		Example: `  walrelay init | less
  walrelay init --apply --role relay
  walrelay init --table sales.outbox --publication sales
  walrelay init --apply --shards 4
  walrelay init --apply --table none --messages --emit-function --emit-grant shop
  walrelay init --apply --inbox --inbox-grant mailer --dsn postgres://owner@localhost/mail`,
		Args: atMost(0),
	}
	cmd.Flags().BoolVar(&apply, "apply", false, "run the SQL instead of printing it")
	cmd.Flags().StringVar(&role, "role", "", "role that the relay connects as; made when it is missing")
	cmd.Flags().BoolVar(&grantDelete, "grant-delete", false, "let that role delete rows, too, for walrelay prune and --prune-after")
	cmd.Flags().Var(&partitioned, "partitioned", "make a table of partitions by created_at, one a day, week or month")
	_ = cmd.RegisterFlagCompletionFunc("partitioned", cobra.FixedCompletions(partitioned.choices(), cobra.ShellCompDirectiveNoFileComp))
	cmd.Flags().IntVar(&shards, "shards", 0, "make so many publications, for relays that share the aggregates; 0 makes one for all")
	cmd.Flags().BoolVar(&emit.Function, "emit-function", false, "make the SQL function walrelay_emit, for events without a row")
	cmd.Flags().StringArrayVar(&emit.Emitters, "emit-grant", nil, "role that may emit logical messages, which no other role then may; repeatable")
	in.add(cmd)
	return command(p, cmd, []config.Group{config.Postgres, config.Publications, config.Tables},
		func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
			if in.used(cmd) {
				s, err := in.schema(cmd)
				if err != nil {
					return err
				}
				return finish(cmd, cfg, apply, []step{s})
			}
			all, err := schemas(cfg, role, outbox.Span(partitioned), shards)
			if err != nil {
				return err
			}
			if grantDelete && role == "" {
				return event.Fail(event.Usage, "name the role with --role", "--grant-delete names no role")
			}
			steps := make([]step, 0, len(all)+1)
			for _, s := range all {
				s.Delete = grantDelete
				steps = append(steps, tableStep{s})
			}
			if cfg.Messages || emit.Function || len(emit.Emitters) > 0 {
				emit.Prefix = cfg.MessagePrefix
				if len(all) > 0 {
					emit.Schema = all[0].Table.Schema
				} else {
					emit.Publication = cfg.Publications[0]
				}
				if err := emit.Validate(); err != nil {
					return err
				}
				steps = append(steps, emit)
			}
			return finish(cmd, cfg, apply, steps)
		})
}

// partitioning is the value of --partitioned; "" is no partitions.
type partitioning outbox.Span

func (s *partitioning) String() string { return string(*s) }
func (s *partitioning) Type() string   { return "span" }
func (s *partitioning) choices() []string {
	return []string{string(outbox.Day), string(outbox.Week), string(outbox.Month)}
}

func (s *partitioning) Set(text string) error {
	if text != "" && !slices.Contains(s.choices(), text) {
		return errNoChoice
	}
	*s = partitioning(text)
	return nil
}

// finish runs the steps, or prints what they would run.
func finish(cmd *cobra.Command, cfg *config.Config, apply bool, steps []step) error {
	if apply {
		return applySteps(cmd, cfg, steps)
	}
	parts := make([]string, 0, len(steps))
	for _, s := range steps {
		parts = append(parts, s.SQL())
	}
	_, err := io.WriteString(cmd.OutOrStdout(), strings.Join(parts, "\n"))
	return err
}

// step is a part of what init makes.
type step interface {
	SQL() string
	Apply(ctx context.Context, conn *pgx.Conn) (changes []string, err error)
}

type tableStep struct{ outbox.Schema }

func (s tableStep) Apply(ctx context.Context, conn *pgx.Conn) ([]string, error) {
	return outbox.Apply(ctx, conn, s.Schema)
}

func schemas(cfg *config.Config, role string, partitioned outbox.Span, shards int) ([]outbox.Schema, error) {
	if len(cfg.Publications) != 1 {
		return nil, event.Fail(event.Usage, "name one with --publication", "init makes one publication at a time, and %d are configured", len(cfg.Publications))
	}
	if len(cfg.Tables) == 0 && role != "" {
		return nil, event.Fail(event.Usage, "for logical messages alone the role needs nothing more: CREATE ROLE "+quoteIdent(role)+" LOGIN REPLICATION",
			"the rights of --role are on a table, and there is none")
	}
	if len(cfg.Tables) == 0 && shards != 0 {
		return nil, event.Fail(event.Usage, "leave --shards out: logical messages reach every slot, so one relay publishes all of them",
			"--shards divides the rows of a table, and there is none")
	}
	names, err := tables(cfg)
	if err != nil {
		return nil, err
	}
	var all []outbox.Schema
	for _, t := range names {
		s := outbox.Schema{Table: t, Publication: cfg.Publications[0], Role: role, Partitioned: partitioned, Shards: shards}
		if err := s.Validate(); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func applySteps(cmd *cobra.Command, cfg *config.Config, all []step) error {
	pg, err := pgConfig(cfg)
	if err != nil {
		return err
	}
	conn, err := slotmgr.Connect(cmd.Context(), pg)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	// A limit that keeps DDL from queueing before everybody else is meant for these statements.
	if _, err := conn.Exec(cmd.Context(), "reset lock_timeout"); err != nil {
		return err
	}
	idle := true
	for _, s := range all {
		changes, err := s.Apply(cmd.Context(), conn)
		if err != nil {
			return err
		}
		for _, c := range changes {
			idle = idle && isNote(c)
			if _, err := fmt.Fprintln(cmd.OutOrStdout(), c); err != nil {
				return err
			}
		}
	}
	if idle {
		_, err = fmt.Fprintln(cmd.OutOrStdout(), "nothing to do")
	}
	return err
}
