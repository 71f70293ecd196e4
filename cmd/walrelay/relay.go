package main

import (
	"context"
	"errors"
	"log/slog"
	"math"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/relay"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/slotmgr"
)

// runRelay builds the relay from cfg and runs it until ctx ends.
func runRelay(ctx context.Context, cfg *config.Config, log *slog.Logger) error {
	pg, err := pgConfig(cfg)
	if err != nil {
		return err
	}
	outboxes, err := tables(cfg)
	if err != nil {
		return err
	}
	mapper, err := outbox.NewMapper(outbox.Mapping{
		Tables: outboxes, Subject: cfg.Subject, Messages: cfg.Messages, Prefix: cfg.MessagePrefix,
	})
	if err != nil {
		return err
	}
	connect, err := natsOptions(cfg)
	if err != nil {
		return err
	}
	pub, err := publisher.New(publisher.Options{
		URL: cfg.NATS.URL.Reveal(), Connect: connect,
		Stream: cfg.Stream.Name, Subjects: mapper.Subjects(),
		Create: cfg.Stream.Create, Replicas: cfg.Stream.Replicas,
		DeadLetters: cfg.Stream.DeadLetters, Park: cfg.OnPoison == config.Park,
		Bucket: cfg.Stream.CheckpointBucket,
		Window: cfg.Window, WindowBytes: int(cfg.WindowBytes), AckTimeout: cfg.AckTimeout,
		Adopt: cfg.Stream.Adopt, AcceptGap: cfg.Stream.AcceptGap,
		Log: log,
	})
	if err != nil {
		return err
	}
	source := &sourceOpener{
		pg:  pg,
		log: log,
		want: slotmgr.Want{
			Slot: cfg.Slot, Publications: cfg.Publications, Tables: wanted(outboxes),
			ApplicationName: applicationName(pg),
		},
		config: replication.Config{
			Conn: &pg.Config, Slot: cfg.Slot, Publications: cfg.Publications, Messages: cfg.Messages,
			WALSenderTimeout: cfg.WALSenderTimeout, Fingerprint: fingerprint(cfg),
		},
	}
	parked := cfg.MaxParkedInRow
	if parked == 0 {
		parked = math.MaxInt
	}
	r, err := relay.New(relay.Options{
		OpenSource: source.open,
		OpenSink: func(ctx context.Context, fail func(error)) (relay.Sink, error) {
			return pub.Open(ctx, fail)
		},
		Mapper:         mapper,
		Watcher:        slotmgr.NewWatcher(pg, cfg.Slot),
		Standby:        func(err error) bool { return errors.Is(err, replication.ErrSlotActive) },
		Halt:           cfg.OnPoison == config.Halt,
		MaxParkedInRow: parked,
		StatusInterval: cfg.StatusInterval,
		DrainTimeout:   cfg.DrainTimeout,
		BackoffMin:     cfg.Backoff.Min,
		BackoffMax:     cfg.Backoff.Max,
		Log:            log,
	})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// sourceOpener opens replication sessions, after it has once found both the
// server and the database as the relay needs them.
type sourceOpener struct {
	pg      *pgx.ConnConfig
	want    slotmgr.Want
	config  replication.Config
	log     *slog.Logger
	checked bool
}

func (o *sourceOpener) open(ctx context.Context) (relay.Source, error) {
	if !o.checked {
		if err := o.preflight(ctx); err != nil {
			return nil, err
		}
		o.checked = true
	}
	return replication.Open(ctx, o.config)
}

func (o *sourceOpener) preflight(ctx context.Context) error {
	conn, err := slotmgr.Connect(ctx, o.pg)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	found, err := slotmgr.Preflight(ctx, conn, o.want)
	if err != nil {
		return err
	}
	for _, f := range found {
		if f.Level == slotmgr.WARN {
			o.log.Warn(f.Detail, "check", f.Name, "hint", f.Remedy)
		}
	}
	return found.Err()
}

func wanted(ts []outbox.Table) []slotmgr.Table {
	ws := make([]slotmgr.Table, len(ts))
	for i, t := range ts {
		ws[i] = slotmgr.Table{Schema: t.Schema, Name: t.Name}
	}
	return ws
}

func applicationName(pg *pgx.ConnConfig) string {
	if name := pg.RuntimeParams["application_name"]; name != "" {
		return name
	}
	return "walrelay"
}
