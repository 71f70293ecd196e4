package chaos

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

const (
	slot        = "walrelay"
	publication = "walrelay"
	stream      = "OUTBOX"
	table       = "public.outbox"
	maxPayload  = 64 << 10
)

// world is all that takes part in one schedule.
type world struct {
	t     testing.TB
	plan  *plan
	began time.Time

	pg      *harness.Postgres
	cluster *harness.Cluster // nil with one server
	nodes   []*harness.NATS
	nc      *nats.Conn
	js      jetstream.JetStream
	relays  []*relay
	locks   map[string]*sync.Mutex
	diary   *harness.Diary
	txs     atomic.Int64
	witness *witness

	mu       sync.Mutex
	failures []string
	notes    []string
}

// relay is a process on links of its own.
type relay struct {
	*harness.Relay
	name       string
	toPostgres *harness.Proxy
	toNATS     []*harness.Proxy
	log        string
	started    time.Time

	mu    sync.Mutex
	ended bool // by us
}

func newWorld(t testing.TB, p *plan) *world {
	t.Helper()
	w := &world{
		t: t, plan: p, began: time.Now(), locks: map[string]*sync.Mutex{},
		diary: harness.NewDiary(), witness: newWitness(),
	}
	for _, f := range faults {
		for i := range p.relays {
			w.locks[f.lock(i)] = &sync.Mutex{}
		}
	}
	w.pg = harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{"logical_decoding_work_mem": "64kB"}}) // spills large transactions
	o := harness.NATSOptions{MaxPayload: maxPayload, MaxStore: p.store}
	if p.mode == "atomic" && p.replicas == 1 && p.seed%2 == 1 {
		o.SyncInterval = "always" // where batches take another way through the server
	}
	if p.replicas == 1 {
		w.nodes = []*harness.NATS{harness.RunNATS(t, o)}
		w.nc = w.nodes[0].MustConn(t)
	} else {
		w.cluster = harness.RunCluster(t, 3, o)
		w.nodes = w.cluster.Nodes
		w.nc = w.cluster.MustConn(t)
	}
	var err error
	if w.js, err = jetstream.New(w.nc); err != nil {
		t.Fatal(err)
	}
	w.must("init", "--apply", "--dsn", w.pg.DSN("postgres"), "--table", table, "--publication", publication)
	w.must("slot", "create", slot, "--dsn", w.pg.DSN("postgres"), "--publication", publication)
	for i := range p.relays {
		w.relays = append(w.relays, w.newRelay(i))
	}
	return w
}

func (w *world) must(args ...string) {
	w.t.Helper()
	if ran := harness.MustRun(w.t, nil, args...); ran.Code != 0 {
		w.t.Fatalf("walrelay %s: exit code %d\n%s%s", strings.Join(args, " "), ran.Code, ran.Stdout, ran.Stderr)
	}
}

func (w *world) newRelay(i int) *relay {
	w.t.Helper()
	r := &relay{name: fmt.Sprintf("relay%d", i), toPostgres: harness.RunProxy(w.t, w.pg.Addr())}
	var urls []string
	for _, n := range w.nodes {
		p := harness.RunProxy(w.t, n.Addr())
		r.toNATS = append(r.toNATS, p)
		urls = append(urls, "nats://"+p.Addr())
	}
	dsn := url.URL{
		Scheme: "postgres", User: url.User("postgres"), Host: r.toPostgres.Addr(), Path: "/postgres",
		RawQuery: url.Values{"sslmode": {"disable"}, "application_name": {r.name}}.Encode(),
	}
	p := w.plan
	r.Relay = harness.NewRelay(w.t, "run", "--dsn", dsn.String(), "--nats-url", strings.Join(urls, ","),
		"--table", table, "--slot", slot, "--publication", publication,
		"--stream", stream, "--create-stream", "--stream-replicas", fmt.Sprint(p.replicas),
		"--publish-mode", p.mode, "--window", fmt.Sprint(p.window), "--status-interval", p.status.String(), "--ack-timeout", p.ack.String(),
		"--wal-sender-timeout", p.walSender.String(),
		"--backoff-max", p.backoff.String(), "--log-format", "text", "--log-level", "debug")
	dir, err := harness.Folder("relay")
	if err != nil {
		w.t.Fatal(err)
	}
	r.log = filepath.Join(dir, "log")
	r.Detach = r.log
	return r
}

// start starts the process and has its end told as a failure, unless it is ours.
func (r *relay) start(w *world) error {
	r.mu.Lock()
	r.ended = false
	r.mu.Unlock()
	r.started = time.Now()
	if err := r.Start(); err != nil {
		return err
	}
	go func(done <-chan struct{}) {
		<-done
		r.mu.Lock()
		defer r.mu.Unlock()
		if !r.ended {
			w.fail("%s ended by itself", r.name)
		}
	}(r.Done())
	return nil
}

// ending says that the process is about to be ended.
func (r *relay) ending() error {
	if !r.Running() {
		return fmt.Errorf("%s does not run", r.name)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	return nil
}

func (r *relay) kill() error {
	if err := r.ending(); err != nil {
		return err
	}
	return r.Kill()
}

// stop sends SIGTERM and returns the exit code.
func (r *relay) stop() (int, error) {
	if err := r.ending(); err != nil {
		return -1, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 25*time.Second)
	defer cancel()
	if err := r.Term(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return -1, err
	}
	return r.Wait(ctx)
}

// fail records a broken promise, so that the schedule can go on to its end.
func (w *world) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	w.note("FAILED: %s", text)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures = append(w.failures, text)
}

func (w *world) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.failures) > 0
}

// note keeps a line for the account of the schedule.
func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	now := time.Now()
	w.notes = append(w.notes, fmt.Sprintf("%s %7s %s", now.UTC().Format("15:04:05.000"),
		now.Sub(w.began).Round(time.Millisecond), fmt.Sprintf(format, args...)))
}

// lock is the name of what a fault of relay i holds.
func (f *fault) lock(i int) string {
	if f.ofRelay && f.on != "relay" {
		return f.on + string(rune('0'+i))
	}
	return f.on
}

// harm runs a step to its end.
func (w *world) harm(ctx context.Context, s step) {
	if !pause(ctx, s.at) {
		return
	}
	if s.fault.on != "" {
		mu := w.locks[s.fault.lock(s.relay)]
		mu.Lock()
		defer mu.Unlock()
	}
	w.note("%s (relay%d, %s)", s.fault.name, s.relay, s.hold.Round(time.Millisecond))
	if err := s.fault.run(ctx, w, s); err != nil {
		w.fail("%s: %v", s.fault.name, err)
	}
	w.note("%s over", s.fault.name)
}

// pause reports whether the time passed without the end of ctx.
func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// until asks for what gives no signal.
func until(ctx context.Context, every time.Duration, ok func() bool) bool {
	for !ok() {
		if !pause(ctx, every) {
			return false
		}
	}
	return true
}

// heal sees to it that everything runs again.
func (w *world) heal(ctx context.Context) error {
	var errs []error
	for _, r := range w.relays {
		if !r.Running() {
			errs = append(errs, fmt.Errorf("%s does not run", r.name))
		}
	}
	if !w.pg.Running() {
		errs = append(errs, errors.New("postgres does not run"))
	}
	if w.cluster != nil {
		errs = append(errs, w.cluster.Start(ctx))
	} else {
		errs = append(errs, w.nodes[0].Ready(ctx))
	}
	errs = append(errs, w.lift(ctx))
	return errors.Join(errs...)
}

// active finds the relay that holds the slot.
func (w *world) active(ctx context.Context) (int, bool) {
	name := w.holder(ctx)
	for i, r := range w.relays {
		if r.name == name {
			return i, true
		}
	}
	return 0, false
}

// holder is the name of the relay that holds the slot, or "".
func (w *world) holder(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	c, err := w.pg.Conn(ctx)
	if err != nil {
		return ""
	}
	defer c.Close(ctx)
	var name string
	if c.QueryRow(ctx, "select application_name from pg_stat_replication").Scan(&name) != nil {
		return ""
	}
	return name
}

// stream asks for the stream. A request that is lost on its way is never
// answered, so each has a short time.
func (w *world) stream(ctx context.Context) (jetstream.Stream, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return w.js.Stream(ctx, stream)
}

// leader is the server that leads the stream, nil when there is none.
func (w *world) leader(ctx context.Context) *harness.NATS {
	st, err := w.stream(ctx)
	if err != nil || st.CachedInfo().Cluster == nil {
		return nil
	}
	return w.cluster.Node(st.CachedInfo().Cluster.Leader)
}

func (w *world) reconfigure(ctx context.Context, change func(*jetstream.StreamConfig, jetstream.StreamState)) error {
	st, err := w.stream(ctx)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	c := st.CachedInfo().Config
	change(&c, st.CachedInfo().State)
	_, err = w.js.UpdateStream(ctx, c)
	return err
}

// lift takes the stream's limits away, as soon as it can be reached.
func (w *world) lift(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var err error
	if !until(ctx, 50*time.Millisecond, func() bool {
		err = w.reconfigure(ctx, func(c *jetstream.StreamConfig, _ jetstream.StreamState) {
			c.MaxMsgs, c.MaxBytes, c.MaxMsgSize = -1, -1, -1
		})
		return err == nil || errors.Is(err, jetstream.ErrStreamNotFound)
	}) {
		return fmt.Errorf("lift the limits of the stream: %w", err)
	}
	return nil
}

// write commits one transaction with an event for each padding, all of one aggregate.
func (w *world) write(ctx context.Context, aggregate string, paddings ...int) error {
	c, err := w.pg.Conn(ctx)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		c.Close(ctx)
	}()
	tx, err := c.Begin(ctx)
	if err != nil {
		return err
	}
	id := w.txs.Add(-1) // the writers' are positive
	aggregate = fmt.Sprintf("%s%d", aggregate, -id)
	var entries []harness.Entry
	for i, n := range paddings {
		e := harness.Entry{
			ID: uuid(), Aggregate: aggregate, N: i + 1, Tx: id,
			Payload: []byte(fmt.Sprintf(`{"n": %d, "pad": "%s"}`, i+1, strings.Repeat("p", n))),
		}
		entries = append(entries, e)
		if _, err := tx.Exec(ctx, "insert into "+table+" (id, aggregate_type, aggregate_id, event_type, payload) values ($1, 'order', $2, 'made', $3)",
			e.ID, e.Aggregate, e.Payload); err != nil {
			return err
		}
	}
	err = tx.Commit(ctx)
	outcome := harness.Unknown
	var pg *pgconn.PgError
	switch {
	case err == nil:
		outcome = harness.Committed
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR":
		outcome = harness.RolledBack
	}
	for i := range entries {
		entries[i].Outcome, entries[i].At = outcome, time.Now()
	}
	w.diary.Add(entries...)
	return err
}

func uuid() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
