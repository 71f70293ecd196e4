package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/slotmgr"
)

func initCommand(p *process) *cobra.Command {
	var apply bool
	var role, partitioned string
	cmd := &cobra.Command{
		Use: "init [flags]", Short: "Make the outbox table, its publication and the relay's role",
		Long: `Prints the SQL that makes what is missing of the outbox tables, the publication
and, with --role, the rights of the relay's role. With --apply it runs it and says
what it did. It can be repeated without harm. An existing table is never altered:
where it differs, the differences are told. With --partitioned the table has partitions by
time; run it again from time to time to make those to come, and drop old ones.`,
		Example: `  walrelay init | less
  walrelay init --apply --role relay
  walrelay init --table sales.outbox --publication sales`,
		Args: atMost(0),
	}
	cmd.Flags().BoolVar(&apply, "apply", false, "run the SQL instead of printing it")
	cmd.Flags().StringVar(&role, "role", "", "role that the relay connects as; made when it is missing")
	cmd.Flags().StringVar(&partitioned, "partitioned", "", "make a table of partitions by created_at, one a day, week or month")
	return command(p, cmd, []config.Group{config.Postgres, config.Publications, config.Tables},
		func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
			all, err := schemas(cfg, role, outbox.Span(partitioned))
			if err != nil {
				return err
			}
			if apply {
				return applySchemas(cmd, cfg, all)
			}
			parts := make([]string, 0, len(all)+1)
			for _, s := range all {
				parts = append(parts, s.SQL())
			}
			if cfg.Messages {
				parts = append(parts, messagesSQL)
			}
			_, err = io.WriteString(cmd.OutOrStdout(), strings.Join(parts, "\n"))
			return err
		})
}

// messagesSQL is offered as a comment, because it concerns every role of the
// database. From 17 the functions have a fourth argument.
const messagesSQL = `-- Any role can emit logical messages, and so make events. To allow it to chosen roles only:
-- DO $$ DECLARE f regprocedure; BEGIN
--     FOR f IN SELECT oid FROM pg_proc WHERE proname = 'pg_logical_emit_message' LOOP
--         EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f);
--         EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO my_service', f);
--     END LOOP;
-- END $$;
`

func schemas(cfg *config.Config, role string, partitioned outbox.Span) ([]outbox.Schema, error) {
	if len(cfg.Publications) != 1 {
		return nil, event.Fail(event.Usage, "name one with --publication", "init makes one publication at a time, and %d are configured", len(cfg.Publications))
	}
	if len(cfg.Tables) == 0 {
		return nil, event.Fail(event.Usage, "name a table with --table; for logical messages alone an empty publication is enough: CREATE PUBLICATION "+quoteIdent(cfg.Publications[0])+";",
			"there is no outbox table to make")
	}
	names, err := tables(cfg)
	if err != nil {
		return nil, err
	}
	var all []outbox.Schema
	for _, t := range names {
		s := outbox.Schema{Table: t, Publication: cfg.Publications[0], Role: role, Partitioned: partitioned}
		if err := s.Validate(); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, nil
}

func applySchemas(cmd *cobra.Command, cfg *config.Config, all []outbox.Schema) error {
	pg, err := pgConfig(cfg)
	if err != nil {
		return err
	}
	conn, err := slotmgr.Connect(cmd.Context(), pg)
	if err != nil {
		return err
	}
	defer hangUp(conn)
	idle := true
	for _, s := range all {
		changes, err := outbox.Apply(cmd.Context(), conn, s)
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
