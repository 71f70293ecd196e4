package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/slotmgr"
)

// bothEnds are the options of commands that look at Postgres and NATS.
var bothEnds = []config.Group{
	config.Postgres, config.Slot, config.Publications, config.Tables, config.Broker, config.Streams,
}

// ends are the two sides for commands that need both, and do not relay.
type ends struct {
	cfg      *config.Config
	pg       *pgx.ConnConfig
	outboxes []outbox.Table
	mapper   *outbox.Mapper
	pub      *publisher.Publisher
}

// newEnds builds both and connects to neither. A nil log is for a command that
// tells all by its output.
func newEnds(cfg *config.Config, log *slog.Logger) (*ends, error) {
	e := &ends{cfg: cfg}
	var err error
	if e.pg, err = pgConfig(cfg); err != nil {
		return nil, err
	}
	if e.outboxes, err = tables(cfg); err != nil {
		return nil, err
	}
	if e.mapper, err = newMapper(cfg, e.outboxes, outbox.ReplayOptions{Key: replayKey(cfg, &e.pub)}); err != nil {
		return nil, err
	}
	connect, err := natsOptions(cfg)
	if err != nil {
		return nil, err
	}
	options := publisherOptions(cfg, e.mapper, connect)
	options.Log = log
	e.pub, err = publisher.New(options)
	return e, err
}

// table is the outbox table of a name, as schema.table.
func (e *ends) table(name string) (outbox.Table, bool) {
	for _, t := range e.outboxes {
		if t.String() == name {
			return t, true
		}
	}
	return outbox.Table{}, false
}

// currentDatabase is the name of the connection's database.
func currentDatabase(ctx context.Context, conn *pgx.Conn) (name string, err error) {
	if err := conn.QueryRow(ctx, "select current_database()::text").Scan(&name); err != nil {
		return "", fmt.Errorf("read the name of the database: %w", err)
	}
	return name, nil
}

func publisherOptions(cfg *config.Config, mapper *outbox.Mapper, connect []nats.Option) publisher.Options {
	return publisher.Options{
		URL: cfg.NATS.URL.Reveal(), Connect: connect,
		Stream: cfg.Stream.Name, Subjects: mapper.Subjects(),
		Create: cfg.Stream.Create, Replicas: cfg.Stream.Replicas, Shared: cfg.Stream.Shared,
		DeadLetters: cfg.Stream.DeadLetters, Park: cfg.OnPoison != config.Halt, Hold: cfg.OnPoison == config.ParkAggregate,
		Bucket: cfg.Stream.CheckpointBucket,
		Mode:   publisher.Mode(cfg.Stream.PublishMode), Sync: publisher.Sync(cfg.NATS.Sync),
		Window: cfg.Window, WindowBytes: int(cfg.WindowBytes), AckTimeout: cfg.AckTimeout,
		Adopt: cfg.Stream.Adopt, AcceptGap: cfg.Stream.AcceptGap,
	}
}

func replicationConfig(cfg *config.Config, pg *pgx.ConnConfig, slot string) replication.Config {
	return replication.Config{
		Conn: &pg.Config, Slot: slot, Publications: cfg.Publications, Messages: true, // replays come as such
		WALSenderTimeout: cfg.WALSenderTimeout, Fingerprint: fingerprint(cfg),
	}
}

func wantOf(cfg *config.Config, pg *pgx.ConnConfig, outboxes []outbox.Table) slotmgr.Want {
	return slotmgr.Want{
		Slot: cfg.Slot, Publications: cfg.Publications, Tables: wanted(outboxes),
		ApplicationName: applicationName(pg), Messages: cfg.Messages, WALSenderTimeout: cfg.WALSenderTimeout,
	}
}

// origin is the log that the slot reads, as a session would see it. The slot
// was read before: under a relay that runs, its confirmed LSN must not be newer
// than the checkpoint that is read after it.
func (e *ends) origin(ctx context.Context, slot slotmgr.Slot) (event.Origin, error) {
	o, err := replication.Identify(ctx, replicationConfig(e.cfg, e.pg, slot.Name))
	o.ConfirmedFlush = slot.ConfirmedFlush
	return o, err
}

// log reads the slot over an ordinary connection.
func (e *ends) log(conn *pgx.Conn, origin event.Origin) operate.Log {
	return peekedLog{conn: conn, origin: origin, options: slotmgr.PeekOptions{
		Slot: origin.Slot, Plugin: plugin(e.cfg),
	}}
}

func plugin(cfg *config.Config) []string { return replication.PluginOptions(cfg.Publications, true) }

// peekedLog is an operate.Log of a slot that is not moved.
type peekedLog struct {
	conn    *pgx.Conn
	origin  event.Origin
	options slotmgr.PeekOptions
}

func (l peekedLog) Read(ctx context.Context, upTo event.LSN, changes int, each func(*event.Record) error, unread func(operate.Unread) error) (int, error) {
	o := l.options
	o.UpTo, o.Changes = upTo, changes
	at := func(commit, change event.LSN) event.Position {
		return event.Position{Timeline: l.origin.Timeline, Commit: commit, Change: change}
	}
	o.Unread = func(u slotmgr.Unread) error {
		return unread(operate.Unread{Position: at(u.Commit, u.Change), End: u.End, Err: u.Err})
	}
	dec := replication.NewDecoder(l.origin)
	defer dec.Convert(l.conn.PgConn(), &l.conn.Config().Config)()
	return slotmgr.Peek(ctx, l.conn, o, func(lsn event.LSN, data []byte) error {
		rec, err := dec.Decode(lsn, data)
		switch {
		case err != nil:
			return unread(operate.Unread{Position: at(0, lsn), Err: err})
		case rec == nil:
			return nil
		}
		return each(rec)
	})
}

// checkpointOf moves the checkpoint of an origin.
type checkpointOf struct {
	pub    *publisher.Publisher
	origin event.Origin
}

func (c checkpointOf) Pass(ctx context.Context, to event.LSN) (bool, error) {
	return c.pub.Pass(ctx, c.origin, to)
}

// slotOn advances a slot over a connection.
type slotOn struct {
	conn *pgx.Conn
	name string
}

func (s slotOn) Advance(ctx context.Context, to event.LSN) (event.LSN, error) {
	return slotmgr.Advance(ctx, s.conn, s.name, to)
}
