package main

import (
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
)

func runCommand(p *process) *cobra.Command {
	return command(p, &cobra.Command{
		Use: "run [flags]", Short: "Relay events until stopped",
		Long: `Reads the slot, publishes every committed outbox row to the stream in commit
order, and confirms to Postgres what the stream has acknowledged.

It reconnects by itself to either side, for as long as it takes. SIGTERM or
Ctrl-C lets the events in flight settle first, a second one stops at once.
SIGUSR1 turns debug logs on, and off again.

--backfill publishes the rows that are in the table already, in the order of seq, and
makes the slot that goes on where they end. Killed in it and started again it goes on.

--http-addr serves /metrics for Prometheus, /livez and /readyz (?verbose for
JSON), and /loglevel, which takes a level by PUT from this machine.`,
		Example: `  walrelay run --dsn postgres://relay@db/shop --nats-url nats://nats:4222 --create-stream
  walrelay run --config /etc/walrelay.yaml --http-addr 9187
  walrelay run --table public.outbox --table billing.outbox,preset=debezium`,
		Args: atMost(0),
	}, []config.Group{
		config.Postgres, config.Slot, config.Publications, config.Tables,
		config.Broker, config.Streams, config.Relay, config.Serving, config.Logging,
	}, func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
		levels := newLevels(newLogger(p, cfg.Log))
		err := func() error {
			if cfg.Backfill {
				if ready, err := backfill(cmd.Context(), cfg, levels.log, p.err); err != nil || !ready {
					return err
				}
			}
			return runRelay(cmd.Context(), cfg, levels)
		}()
		return unpublished(cmd.Context(), cfg, levels.log, err)
	})
}
