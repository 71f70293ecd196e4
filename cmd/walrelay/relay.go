package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/relay"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/slotmgr"
	"github.com/walrelay/walrelay/tracing"
)

// runRelay builds the relay from cfg and runs it until ctx ends.
func runRelay(ctx context.Context, cfg *config.Config, levels *levels) error {
	log := levels.log
	pg, err := pgConfig(cfg)
	if err != nil {
		return err
	}
	outboxes, err := tables(cfg)
	if err != nil {
		return err
	}
	var pub *publisher.Publisher
	mapper, err := newMapper(cfg, outboxes, outbox.ReplayOptions{Key: replayKey(cfg, &pub), Forged: forged(log)})
	if err != nil {
		return err
	}
	connect, err := natsOptions(cfg)
	if err != nil {
		return err
	}
	var watch *watchpost
	var skipped replication.Skipped
	var meter publisher.Meter
	var observer relay.Observer = relay.Unobserved{}
	if cfg.HTTPAddr != "" {
		watch = newWatchpost(cfg, pg, levels, func() *publisher.Publisher { return pub }, skipped.Counts)
		meter, observer = watch.monitor, watch.monitor
	}
	var pruned func(int64, error)
	if watch != nil {
		pruned = watch.monitor.Pruned
	}
	gardener, err := newGardener(cfg, log, pruned)
	if err != nil {
		return err
	}
	if gardener != nil {
		observer = leaderWatch{observer, gardener}
	}
	options := publisherOptions(cfg, mapper, connect)
	options.Meter, options.Log = meter, log
	if pub, err = publisher.New(options); err != nil {
		return err
	}
	conf := replicationConfig(cfg, pg, cfg.Slot)
	conf.Skipped, conf.Unconverted = &skipped, new(replication.Unconverted)
	conf.Warn = func(text, hint string) {
		log.Warn("postgres holds events back", "warning", text, "hint", hint)
	}
	source := &sourceOpener{
		pg:  pg,
		pub: pub,
		watch: &publicationWatch{
			pg: pg, slot: cfg.Slot, publications: cfg.Publications, tables: wanted(outboxes),
		},
		mapper: mapper,
		tables: outboxes,
		log:    log,
		want:   wantOf(cfg, pg, outboxes),
		config: conf,
	}
	tracer, err := tracing.Start(ctx, tracing.Options{Stream: cfg.Stream.Name, Version: built().Version, Log: log})
	if err != nil {
		return err
	}
	if tracer != nil {
		log.Info("sending spans of sampled events")
		defer stopTracing(tracer, log)
	}
	parked := cfg.MaxParkedInRow
	if parked == 0 {
		parked = math.MaxInt
	}
	sessions := slotmgr.NewWatcher(pg, cfg.Slot)
	ahead := &dialAhead{pub: pub}
	defer ahead.drop()
	r, err := relay.New(relay.Options{
		OpenSource: func(ctx context.Context) (relay.Source, error) {
			ahead.begin(ctx)
			src, err := source.open(ctx)
			if err != nil {
				ahead.drop()
			}
			return src, err
		},
		OpenSink: func(ctx context.Context, fail func(error)) (relay.Sink, error) {
			defer forgetPages()
			line, err := ahead.take(ctx)
			if err != nil {
				return nil, err
			}
			s, err := pub.OpenOver(ctx, line, fail)
			if err != nil {
				return nil, err
			}
			for _, after := range beginnings {
				time.AfterFunc(after, forgetPages)
			}
			if tracer != nil {
				return tracer.Wrap(s), nil
			}
			return s, nil
		},
		Mapper:         mapper,
		Watcher:        watcher{sessions, source},
		Sent:           sessions.Sent,
		Vouch:          source.watch.Vouch,
		Silence:        cfg.WALSenderTimeout, // either side gives up after the same time
		Standby:        func(err error) bool { return errors.Is(err, replication.ErrSlotActive) },
		Halt:           cfg.OnPoison == config.Halt,
		MaxParkedInRow: parked,
		StatusInterval: cfg.StatusInterval,
		ConfirmDelay:   cfg.ConfirmDelay,
		DrainTimeout:   cfg.DrainTimeout,
		BackoffMin:     cfg.Backoff.Min,
		BackoffMax:     cfg.Backoff.Max,
		Observer:       thrifty{observer},
		Log:            log,
	})
	if err != nil {
		return err
	}
	if watch != nil {
		stop, err := watch.start(ctx)
		if err != nil {
			return err
		}
		defer stop()
	}
	if gardener != nil {
		defer gardener.start(ctx)()
	}
	defer onUser1(levels.toggle)()
	return r.Run(ctx)
}

// beginnings are times after the sink is open at which a session has done some
// more of what it does only once.
var beginnings = []time.Duration{20 * time.Millisecond, 200 * time.Millisecond, 2 * time.Second}

// thrifty gives pages back when the relay enters another state, such as when the
// stream has been read back.
type thrifty struct{ relay.Observer }

func (t thrifty) Entered(s relay.Status) {
	forgetPages()
	t.Observer.Entered(s)
}

// spanPatience is how long the last spans may take to be sent.
const spanPatience = 2 * time.Second

func stopTracing(t *tracing.Tracer, log *slog.Logger) {
	ctx, cancel := context.WithTimeout(context.Background(), spanPatience)
	defer cancel()
	if err := t.Stop(ctx); err != nil {
		log.Warn("spans are lost", "err", err)
	}
}

// dialAhead dials NATS and asks for the streams while Postgres is asked for the
// first time, which takes longer. What comes of it is told only when it is NATS's turn; later sessions
// try one side after the other. One goroutine uses it.
type dialAhead struct {
	pub   *publisher.Publisher
	begun bool               // once
	stop  context.CancelFunc // nil when nothing was dialled, or it is taken

	done chan struct{} // closed when line and err are set
	line *publisher.Line
	err  error
}

func (a *dialAhead) begin(ctx context.Context) {
	if a.begun {
		return
	}
	a.begun = true
	ctx, a.stop = context.WithCancel(ctx)
	a.done = make(chan struct{})
	go func() {
		defer close(a.done)
		if a.line, a.err = a.pub.Dial(ctx); a.err == nil {
			a.pub.Ask(ctx, a.line)
		}
	}()
}

// take returns the line that was dialled, or dials.
func (a *dialAhead) take(ctx context.Context) (*publisher.Line, error) {
	if a.stop == nil {
		return a.pub.Dial(ctx)
	}
	<-a.done
	a.stop()
	a.stop = nil
	return a.line, a.err
}

// drop hangs up what was not taken.
func (a *dialAhead) drop() {
	if a.stop == nil {
		return
	}
	a.stop()
	a.stop = nil
	<-a.done
	if a.err == nil {
		a.line.Close()
	}
}

// sourceOpener opens replication sessions, after it has once found both the
// server and the database as the relay needs them. One goroutine uses it.
type sourceOpener struct {
	pg      *pgx.ConnConfig
	pub     *publisher.Publisher
	watch   *publicationWatch
	want    slotmgr.Want
	config  replication.Config
	mapper  *outbox.Mapper
	tables  []outbox.Table
	log     *slog.Logger
	checked bool
	opened  bool // once
}

func (o *sourceOpener) open(ctx context.Context) (relay.Source, error) {
	defer forgetPages()
	var conn *pgx.Conn
	if !o.checked {
		var err error
		if conn, err = o.preflight(ctx); err != nil {
			return nil, o.patient(err)
		}
		forgetPages()
		o.checked = true
	}
	published, err := o.watch.begin(ctx, conn)
	if err != nil {
		return nil, o.patient(err)
	}
	for i, t := range o.tables {
		o.mapper.Know(t, published.OIDs[i])
	}
	stream, err := replication.Open(ctx, o.config)
	if err != nil {
		o.watch.end()
		return nil, o.patient(err)
	}
	source := &watchedSource{Stream: stream, watch: o.watch, tables: published.Entries}
	if source.now, err = o.watch.moment(ctx); err != nil {
		_ = source.Close() // the first failure is the one that counts
		return nil, o.patient(err)
	}
	o.opened = true
	return source, nil
}

// patient makes a refused login pass once a login has worked: passwords are
// changed, and pg_hba.conf is, under a relay that runs. Only at the start is it
// a mistake to stop for.
func (o *sourceOpener) patient(err error) error {
	const invalidAuthorization = "28" // class of SQLSTATE
	var pg *pgconn.PgError
	if !o.opened || event.ClassOf(err) != event.Precondition || !errors.As(err, &pg) || !strings.HasPrefix(pg.Code, invalidAuthorization) {
		return err
	}
	return event.Fail(event.Transient, event.HintOf(err)+"; a new password takes a restart of walrelay", "%w", err)
}

// preflight returns the connection over which it has found all as it should be.
func (o *sourceOpener) preflight(ctx context.Context) (*pgx.Conn, error) {
	conn, err := slotmgr.Connect(ctx, o.pg)
	if err != nil {
		return nil, err
	}
	if err := o.check(ctx, conn); err != nil {
		hangUp(conn)
		return nil, err
	}
	return conn, nil
}

func (o *sourceOpener) check(ctx context.Context, conn *pgx.Conn) error {
	found, err := slotmgr.Preflight(ctx, conn, o.want)
	if err != nil {
		return err
	}
	for _, t := range o.tables {
		advice, err := advise(ctx, conn, o.mapper, t, o.want.Slot, o.want.Publications)
		if err != nil {
			return err
		}
		found = append(found, advice...)
	}
	for _, f := range found {
		if f.Level == event.WARN {
			o.log.Warn(f.Detail, "check", f.Name, "hint", f.Remedy)
		}
	}
	err = found.Err()
	unfit := func(f event.Finding) bool { return f.Level == event.FAIL && f.Name != "slot" }
	if err != nil && !slices.ContainsFunc(found, unfit) {
		if lost := o.missing(ctx, conn); lost != nil {
			return lost
		}
	}
	return err
}

// missing tells a slot that was never made, which the preflight finds, from one
// that the stream was written from and that is gone.
func (o *sourceOpener) missing(ctx context.Context, conn *pgx.Conn) error {
	_, exists, err := slotmgr.Lookup(ctx, conn, o.want.Slot)
	if err != nil || exists {
		return err
	}
	database, err := currentDatabase(ctx, conn)
	if err != nil {
		return err
	}
	state, err := o.pub.Examine(ctx, o.want.Slot, database)
	switch {
	case ctx.Err() != nil:
		return err
	case err != nil:
		hint := "make NATS answer first: the stream tells whether there was a slot that is lost\n" +
			fmt.Sprintf("if there never was one: walrelay slot create %s --publication %s", o.want.Slot, strings.Join(o.want.Publications, ","))
		return event.Fail(event.Precondition, strings.TrimPrefix(event.HintOf(err)+"\n"+hint, "\n"),
			"slot %q does not exist, and the stream cannot be asked for what became of it: %w", o.want.Slot, err)
	case state.Interrupted:
		return interrupted(o.want.Slot, state)
	case state.Claimed:
		return slotmgr.Gone(o.want.Slot)
	}
	return nil
}

// watcher is a slotmgr.Watcher that asks over a connection of its source.
type watcher struct {
	*slotmgr.Watcher
	source *sourceOpener
}

func (w watcher) Confirmed(ctx context.Context) (lsn event.LSN, err error) {
	err = w.source.watch.ask(func(conn *pgx.Conn) error {
		lsn, err = w.Watcher.Confirmed(ctx, conn)
		return err
	})
	return lsn, err
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
