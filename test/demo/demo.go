package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

const (
	streamName = "OUTBOX"
	slotName   = "walrelay"
	tableName  = "public.outbox"

	burst      = 20_000 // events of the first part, during which the relay is killed
	steadyRate = 400    // transactions a second of the second part
	steadyFor  = 5 * time.Second
)

// errFaults says that the promise was broken.
var errFaults = errors.New("the stream differs from what was committed")

// demo is one run and what it has started.
type demo struct {
	keep bool
	bin  string // of walrelay

	pg    *harness.Postgres
	nats  *harness.NATS
	relay *harness.Relay
	dsn   string
	js    jetstream.JetStream

	steps   int
	summary string // the last line
}

func (d *demo) run(ctx context.Context) error {
	fmt.Println("walrelay turns committed rows of an outbox table into messages of a JetStream stream:\n" +
		"each once and in commit order, whatever is killed on the way. See for yourself.")
	for _, part := range []func(context.Context) error{
		d.startServers, d.prepare, d.startRelay,
	} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	writers := harness.NewWriters(harness.Workload{
		DSN:     d.dsn,
		Table:   tableName,
		Padding: 40,
		Seed:    uint64(time.Now().UnixNano()),
		Also:    saveOrders,
	})
	if err := d.killHalfWay(ctx, writers); err != nil {
		return err
	}
	steady, err := d.steadyLoad(ctx, writers)
	if err != nil {
		return err
	}
	for _, part := range []func(context.Context) error{
		d.subscribe, d.listSlots, d.drain,
	} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return d.compare(ctx, writers, steady)
}

func (d *demo) startServers(ctx context.Context) (err error) {
	d.step("Scratch servers")
	if d.pg, err = harness.CreatePostgres(ctx, harness.PostgresOptions{}); err != nil {
		return err
	}
	if err := d.pg.Start(ctx); err != nil {
		return err
	}
	if err := d.pg.Exec(ctx, "CREATE DATABASE shop"); err != nil {
		return err
	}
	d.dsn = d.pg.DSN("shop")
	conn, err := pgx.Connect(ctx, d.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var version string
	if err := conn.QueryRow(ctx, "SELECT current_setting('server_version')").Scan(&version); err != nil {
		return err
	}
	say("Postgres %s with wal_level=logical   %s", version, d.dsn)
	_, err = conn.Exec(ctx, "CREATE TABLE orders (id text PRIMARY KEY, changes int NOT NULL DEFAULT 1)")
	if err != nil {
		return err
	}

	if d.nats, err = harness.CreateNATS(ctx, harness.NATSOptions{}); err != nil {
		return err
	}
	if err := d.nats.Start(ctx); err != nil {
		return err
	}
	nc, err := d.nats.Conn()
	if err != nil {
		return err
	}
	if d.js, err = jetstream.New(nc); err != nil {
		return err
	}
	say("NATS %s with JetStream   %s", nc.ConnectedServerVersion(), d.nats.URL())
	return nil
}

// prepare creates table, publication and slot with the commands an operator would use.
func (d *demo) prepare(ctx context.Context) (err error) {
	if d.bin == "" {
		if d.bin, err = harness.BuildRelay(ctx); err != nil {
			return err
		}
	} else if d.bin, err = filepath.Abs(d.bin); err != nil {
		return err
	}
	d.step("The outbox table, its publication and the replication slot")
	if err := d.walrelay(ctx, "init", "--dsn", d.dsn, "--table", tableName, "--publication", "walrelay", "--apply"); err != nil {
		return err
	}
	return d.walrelay(ctx, "slot", "create", slotName, "--dsn", d.dsn, "--publication", "walrelay")
}

func (d *demo) startRelay(ctx context.Context) error {
	d.step("The relay")
	root, err := harness.Root()
	if err != nil {
		return err
	}
	d.relay = &harness.Relay{
		Bin: d.bin,
		Args: []string{
			"run", "--dsn", d.dsn, "--nats-url", d.nats.URL(), "--slot", slotName, "--publication", "walrelay",
			"--table", tableName, "--stream", streamName, "--create-stream",
		},
		Detach: filepath.Join(root, "relay.log"),
	}
	command(d.relay.Args)
	return d.relay.Start()
}

// saveOrders is what a service does beside its outbox row, in the same transaction.
func saveOrders(ctx context.Context, tx pgx.Tx, ids []string) error {
	// In order, so that no two transactions wait for each other.
	_, err := tx.Exec(ctx, `INSERT INTO orders (id) SELECT DISTINCT unnest($1::text[]) ORDER BY 1
		ON CONFLICT (id) DO UPDATE SET changes = orders.changes + 1`, ids)
	return err
}

// killHalfWay commits orders as fast as it can and kills the relay in the middle.
func (d *demo) killHalfWay(ctx context.Context, w *harness.Writers) error {
	d.step("Orders from eight connections, and kill -9 half way")
	say("Every transaction changes orders and inserts their outbox rows. Every tenth rolls back,")
	say("some roll back to a savepoint, COPY, or delete their outbox rows at once.")
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	written := make(chan error, 1)
	go func() {
		err := w.Run(ctx, burst)
		if err != nil {
			stop(err)
		}
		written <- err
	}()
	fail := func(err error) error {
		stop(err)
		return cmpErr(<-written, err)
	}

	if err := w.Diary.Await(ctx, burst/2); err != nil {
		return fail(err)
	}
	// The relay must have got to work, or there is nothing to interrupt.
	if err := d.awaitStored(ctx, burst/10); err != nil {
		return fail(err)
	}
	pid := d.relay.PID()
	if err := d.relay.Kill(); err != nil {
		return fail(err)
	}
	stored, err := d.stored(ctx)
	if err != nil {
		return fail(err)
	}
	say("kill -9 %d: %d events committed, %d of them stored when the relay died.", pid, w.Diary.Committed(), stored)
	if err := w.Diary.Await(ctx, burst*3/4); err != nil {
		return fail(err)
	}
	say("Started again at %d committed; it reads from both ends where it has to go on.", w.Diary.Committed())
	if err := d.relay.Start(); err != nil {
		return fail(err)
	}
	if err := <-written; err != nil {
		return err
	}
	if err := d.awaitStored(ctx, w.Diary.Committed()); err != nil {
		return err
	}
	say("%d committed and %d rolled back; the relay has caught up.", w.Diary.Committed(), w.Diary.Count(harness.RolledBack))
	return nil
}

// cmpErr prefers the writers' error, which is the cause, over a wait that ended with it.
func cmpErr(writers, wait error) error {
	if writers != nil && !errors.Is(writers, context.Canceled) {
		return writers
	}
	return wait
}

// steadyLoad commits at a steady rate, from which latency is measured. It
// returns when that began.
func (d *demo) steadyLoad(ctx context.Context, w *harness.Writers) (time.Time, error) {
	d.step("A steady load, to measure the time from COMMIT to the stored message")
	say("%d transactions a second for %s.", steadyRate, steadyFor)
	w.SetRate(steadyRate)
	// The first second warms up the writers' new connections.
	start := time.Now().Add(time.Second)
	load, cancel := context.WithDeadline(ctx, start.Add(steadyFor))
	defer cancel()
	if err := w.Run(load, -1); err != nil {
		return start, err
	}
	if ctx.Err() != nil {
		return start, ctx.Err()
	}
	return start, d.awaitStored(ctx, w.Diary.Committed())
}

// subscribe shows the messages of one order as a consumer gets them.
func (d *demo) subscribe(ctx context.Context) error {
	d.step("What a subscriber sees: the first events of one order")
	consumer, err := d.js.OrderedConsumer(ctx, streamName, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return err
	}
	msgs, err := consumer.Messages()
	if err != nil {
		return err
	}
	defer msgs.Stop()
	defer context.AfterFunc(ctx, msgs.Stop)()
	for shown, order := 0, ""; shown < 3; {
		m, err := msgs.Next()
		if err != nil {
			return errors.Join(ctx.Err(), err)
		}
		h := m.Headers()
		if id := h.Get(event.HeaderAggregateID); order == "" {
			order = id
		} else if id != order {
			continue
		}
		shown++
		fmt.Printf("\n     %s\n", m.Subject())
		for _, name := range slices.Sorted(maps.Keys(h)) {
			fmt.Printf("       %s: %s\n", name, strings.Join(h[name], ", "))
		}
		fmt.Printf("       %s\n", m.Data())
	}
	fmt.Println()
	say("Where a number n is missing, its transaction was rolled back.")
	return nil
}

func (d *demo) listSlots(ctx context.Context) error {
	d.step("What the slot costs Postgres")
	return d.walrelay(ctx, "slot", "list", "--dsn", d.dsn)
}

// drain ends the relay, so that nothing can come after the stream was read.
func (d *demo) drain(ctx context.Context) error {
	d.step("SIGTERM: the relay settles what is in flight, confirms it and ends")
	if err := d.relay.Term(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	code, err := d.relay.Wait(ctx)
	if err != nil {
		return err
	}
	say("Exit code %d.", code)
	if code != 0 {
		return fmt.Errorf("the relay ended with exit code %d", code)
	}
	return nil
}

// compare reads the whole stream and holds it against what the writers know.
func (d *demo) compare(ctx context.Context, w *harness.Writers, steady time.Time) error {
	d.step("The whole stream against what was committed")
	stream, err := harness.ReadStream(ctx, d.js, streamName)
	if err != nil {
		return err
	}
	r := harness.Compare(w.Diary, stream)
	say("Every message is looked up among the committed events: id, order, payload byte for byte.")
	if !r.OK() {
		fmt.Println(r)
	}
	lags := harness.Latencies(w.Diary, stream, steady)
	d.summary = fmt.Sprintf("demo: committed=%d stored=%d lost=%d duplicates=%d out_of_order=%d p50=%s p99=%s",
		r.Committed, r.Stored, len(r.Missing), len(r.Duplicates), len(r.OutOfOrder),
		millis(harness.Percentile(lags, 0.50)), millis(harness.Percentile(lags, 0.99)))
	if !r.OK() {
		return errFaults
	}
	if d.keep {
		return d.relay.Start()
	}
	return nil
}

func millis(d time.Duration) string {
	return fmt.Sprintf("%.2fms", float64(d)/float64(time.Millisecond))
}

// awaitStored waits for messages, and no longer than the relay runs.
func (d *demo) awaitStored(ctx context.Context, n int) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	ended := d.relay.Done()
	go func() {
		select {
		case <-ended:
			stop(errors.New("the relay ended"))
		case <-ctx.Done():
		}
	}()
	if err := harness.AwaitMessages(ctx, d.js, streamName, n); err != nil {
		return errors.Join(context.Cause(ctx), err)
	}
	return nil
}

func (d *demo) stored(ctx context.Context) (uint64, error) {
	s, err := d.js.Stream(ctx, streamName)
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.Msgs, nil
}

// walrelay shows and runs a command and what it prints.
func (d *demo) walrelay(ctx context.Context, args ...string) error {
	command(args)
	ran, err := harness.Run(ctx, d.bin, nil, args...)
	if err != nil {
		return err
	}
	for line := range strings.Lines(ran.Stdout) {
		fmt.Print("     ", line)
	}
	if ran.Code != 0 {
		fmt.Fprint(os.Stderr, ran.Stderr)
		return fmt.Errorf("walrelay %s: exit code %d", args[0], ran.Code)
	}
	return nil
}

// command shows a command line.
func command(args []string) {
	quoted := make([]string, len(args))
	for i, a := range args {
		if strings.ContainsAny(a, "?&* ") {
			a = "'" + a + "'"
		}
		quoted[i] = a
	}
	fmt.Println("   $ walrelay", strings.Join(quoted, " "))
}

// step prints a heading.
func (d *demo) step(title string) {
	d.steps++
	fmt.Printf("\n%d. %s\n", d.steps, title)
}

// say prints a line of explanation.
func say(format string, args ...any) {
	fmt.Printf("   "+format+"\n", args...)
}
