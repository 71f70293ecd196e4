package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// site is a stream with a consumer, a stream of dead letters, and a database
// with an inbox and a ledger of what was handled, in the order of the commits.
type site struct {
	t    *testing.T
	js   jetstream.JetStream
	cons jetstream.Consumer
	pool *pgxpool.Pool
	sent int
}

const deadLetters = "dead.mail"

func newSite(t *testing.T, n *harness.NATS, ackWait time.Duration) *site {
	t.Helper()
	s := &site{t: t, js: n.JetStream(t), pool: database(t)}
	exec(t, s.pool, "CREATE TABLE ledger (n bigserial, id text, aggregate text, seq bigint, try int)")
	_, err := s.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OUTBOX", Subjects: []string{"outbox.>", "walrelay.parked.OUTBOX"}})
	check(t, err)
	_, err = s.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "DEAD", Subjects: []string{"dead.>"}})
	check(t, err)
	s.consumer(func(c *jetstream.ConsumerConfig) { c.AckWait = ackWait })
	return s
}

func (s *site) consumer(change func(*jetstream.ConsumerConfig)) {
	s.t.Helper()
	cfg := jetstream.ConsumerConfig{Durable: "mail", AckPolicy: jetstream.AckExplicitPolicy, MaxAckPending: 200, MaxDeliver: -1}
	change(&cfg)
	var err error
	s.cons, err = s.js.CreateOrUpdateConsumer(s.t.Context(), "OUTBOX", cfg)
	check(s.t, err)
}

// publish stores one event of an aggregate, as the relay does.
func (s *site) publish(aggregate, id string) {
	s.t.Helper()
	s.sent++
	m := nats.NewMsg("outbox.order.changed")
	m.Header.Set(event.HeaderID, id)
	m.Header.Set(event.HeaderAggregateType, "order")
	m.Header.Set(event.HeaderAggregateID, aggregate)
	m.Header.Set(event.HeaderEventType, "changed")
	m.Header.Set("Nats-Msg-Id", fmt.Sprint(id, ":r:", s.sent))
	m.Data = []byte("{}")
	_, err := s.js.PublishMsg(s.t.Context(), m)
	check(s.t, err)
}

func (s *site) options(change func(*Options)) Options {
	o := Options{
		JetStream: s.js, Consumer: s.cons, DB: s.pool, Handle: record, DeadLetter: deadLetters,
		Backoff: []time.Duration{10 * time.Millisecond, 20 * time.Millisecond},
		Log:     slog.New(slog.NewTextHandler(s.t.Output(), nil)),
	}
	if change != nil {
		change(&o)
	}
	return o
}

// run runs a consumer until the test ends or stop is called, which returns Run's error.
func (s *site) run(change func(*Options)) (stop func() error) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	o := s.options(change)
	go func() { done <- Run(ctx, o) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	s.t.Cleanup(func() { stop() })
	return stop
}

func record(ctx context.Context, tx pgx.Tx, m *Message) error {
	_, err := tx.Exec(ctx, "INSERT INTO ledger (id, aggregate, seq, try) VALUES ($1, $2, $3, $4)", m.ID, m.AggregateID, int64(m.Sequence), m.Try)
	return err
}

func (s *site) handled() int { return ask[int](s.t, s.pool, "SELECT count(*) FROM ledger") }

// settled blocks until the server waits for nothing and has nothing left.
func (s *site) settled() {
	s.t.Helper()
	await(s.t, "everything is acked", func() bool {
		info, err := s.cons.Info(s.t.Context())
		check(s.t, err)
		return info.NumAckPending == 0 && info.NumPending == 0
	})
}

// audit checks that each of n events took effect once, in order of its aggregate.
func (s *site) audit(n int) {
	s.t.Helper()
	if got := s.handled(); got != n {
		s.t.Errorf("%d effects, want %d", got, n)
	}
	if got := ask[int](s.t, s.pool, "SELECT count(*) - count(DISTINCT id) FROM ledger"); got != 0 {
		s.t.Errorf("%d events took effect more than once", got)
	}
	if got := ask[int](s.t, s.pool, "SELECT count(*) FROM ledger a JOIN ledger b USING (aggregate) WHERE a.n < b.n AND a.seq > b.seq"); got != 0 {
		s.t.Errorf("%d pairs of one aggregate are out of order", got)
	}
}

func (s *site) letters() (all []*jetstream.RawStreamMsg) {
	s.t.Helper()
	st, err := s.js.Stream(s.t.Context(), "DEAD")
	check(s.t, err)
	for seq := uint64(1); seq <= st.CachedInfo().State.LastSeq; seq++ {
		m, err := st.GetMsg(s.t.Context(), seq)
		check(s.t, err)
		all = append(all, m)
	}
	return all
}

func TestConsumerHandlesEachEventOnceAndInOrder(t *testing.T) {
	t.Parallel()
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 10*time.Second)
	const events = 300
	for i := range events {
		s.publish(fmt.Sprint(i%7), fmt.Sprint("e", i))
		if i%10 == 9 {
			s.publish(fmt.Sprint((i-5)%7), fmt.Sprint("e", i-5)) // a replay
		}
	}
	var tries atomic.Int64
	stop := s.run(func(o *Options) {
		o.Handle = func(ctx context.Context, tx pgx.Tx, m *Message) error {
			if err := record(ctx, tx, m); err != nil {
				return err
			}
			if m.Try == 1 && m.Sequence%9 == 0 {
				tries.Add(1)
				return errHandler // after its effect, which must go
			}
			return nil
		}
	})
	s.settled()
	check(t, stop())
	s.audit(events)
	if tries.Load() == 0 || len(s.letters()) != 0 {
		t.Errorf("%d tries failed, %d dead letters", tries.Load(), len(s.letters()))
	}
}

func TestPoisonBecomesADeadLetter(t *testing.T) {
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{MaxPayload: 64 << 10}), 10*time.Second)
	ids := []string{"first", "fails", "panics", "rejected", "aborted", "deferred", "later", "last"}
	for _, id := range ids {
		s.publish("1", id)
	}
	exec(t, s.pool, "CREATE TABLE parent (id int PRIMARY KEY)")
	exec(t, s.pool, "CREATE TABLE child (id int REFERENCES parent DEFERRABLE INITIALLY DEFERRED)")
	calls := map[string]int{} // one aggregate, so one at a time
	stop := s.run(func(o *Options) {
		o.MaxDeliver = 3
		o.Handle = func(ctx context.Context, tx pgx.Tx, m *Message) error {
			calls[m.ID]++
			if err := record(ctx, tx, m); err != nil {
				return err
			}
			switch m.ID {
			case "fails":
				return errors.New("no such customer\nat all")
			case "panics":
				panic("out of range")
			case "rejected":
				return Reject(errHandler)
			case "aborted":
				_, _ = tx.Exec(ctx, "SELECT 1/0")
			case "deferred":
				_, err := tx.Exec(ctx, "INSERT INTO child VALUES (1)")
				return err
			case "later":
				if calls[m.ID] < 7 {
					return fmt.Errorf("wrapped: %w", Later(errHandler))
				}
			}
			return nil
		}
	})
	s.settled()
	check(t, stop())
	s.audit(3)
	for id, want := range map[string]int{"first": 1, "fails": 3, "panics": 3, "rejected": 1, "aborted": 3, "deferred": 3, "later": 7, "last": 1} {
		if calls[id] != want {
			t.Errorf("%s was tried %d times, want %d", id, calls[id], want)
		}
	}
	letters := s.letters()
	for i, want := range []struct{ id, reason, tries string }{
		{"fails", "no such customer at all", "3"},
		{"panics", "panic: out of range", "3"},
		{"rejected", "no", "1"},
		{"aborted", "commit: ", "3"},
		{"deferred", "commit: ", "3"},
	} {
		if i >= len(letters) {
			t.Fatalf("%d dead letters", len(letters))
		}
		h := letters[i].Header
		if h.Get(event.HeaderID) != want.id || !strings.HasPrefix(h.Get(event.HeaderReason), want.reason) || h.Get(headerTries) != want.tries ||
			h.Get(event.HeaderSubject) != "outbox.order.changed" || h.Get(headerConsumer) != "OUTBOX/mail" || string(letters[i].Data) != "{}" {
			t.Errorf("dead letter %d: %v", i+1, h)
		}
	}
	if len(letters) != 5 {
		t.Errorf("%d dead letters", len(letters))
	}
	if got := ask[int](t, s.pool, "SELECT count(*) FROM inbox"); got != len(ids) {
		t.Errorf("%d are recorded, want %d", got, len(ids))
	}
}

func TestFailuresOfPostgresAreNoFaultOfTheEvent(t *testing.T) {
	t.Parallel()
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 2*time.Second)
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	s.pool = connect(t, pg.DSN("postgres"))
	exec(t, s.pool, Schema{}.SQL())
	exec(t, s.pool, "CREATE TABLE ledger (n bigserial, id text, aggregate text, seq bigint, try int)")
	stop := s.run(func(o *Options) { o.MaxDeliver = 1 })
	const events = 60
	for i := range events {
		s.publish(fmt.Sprint(i%5), fmt.Sprint("e", i))
		if i%20 == 10 {
			await(t, "some are handled", func() bool {
				var n int
				err := s.pool.QueryRow(t.Context(), "SELECT count(*) FROM ledger").Scan(&n)
				return err == nil && n > i/2
			})
			check(t, pg.Kill())
		}
		if i%20 == 15 {
			check(t, pg.Start(t.Context()))
		}
	}
	s.settled()
	check(t, stop())
	s.pool = connect(t, pg.DSN("postgres"))
	s.audit(events)
	if n := len(s.letters()); n != 0 {
		t.Errorf("%d dead letters", n)
	}
}

func TestLongWorkKeepsItsDeadline(t *testing.T) {
	t.Parallel()
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), time.Second)
	for i := range 5 {
		s.publish("1", fmt.Sprint("e", i))
	}
	var calls atomic.Int64
	stop := s.run(func(o *Options) {
		o.Handle = func(ctx context.Context, tx pgx.Tx, m *Message) error {
			if calls.Add(1) == 1 {
				pause(ctx, 3*time.Second)
			}
			return record(ctx, tx, m)
		}
	})
	s.settled()
	check(t, stop())
	s.audit(5)
	if info, err := s.cons.Info(t.Context()); err != nil || info.Delivered.Consumer != 5 {
		t.Errorf("%d deliveries of 5 events, %v", info.Delivered.Consumer, err)
	}
}

func TestDrainGivesBackWhatWaits(t *testing.T) {
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), time.Hour)
	const events = 20
	for i := range events {
		s.publish("1", fmt.Sprint("e", i))
	}
	entered, leave := make(chan struct{}), make(chan struct{})
	stop := s.run(func(o *Options) {
		o.Handle = func(ctx context.Context, tx pgx.Tx, m *Message) error {
			entered <- struct{}{}
			<-leave
			return record(ctx, tx, m)
		}
	})
	<-entered
	done := make(chan error, 1)
	go func() { done <- stop() }()
	await(t, "the consumer has stopped pulling", func() bool {
		info, err := s.cons.Info(t.Context())
		check(t, err)
		return info.NumWaiting == 0
	})
	close(leave)
	check(t, <-done)
	s.audit(1)
	stop = s.run(nil) // and the next one need not wait for an hour
	s.settled()
	check(t, stop())
	s.audit(events)
}

func TestDrainTimeoutEndsHandlers(t *testing.T) {
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), time.Hour)
	s.publish("1", "e")
	entered := make(chan struct{}, 1)
	stop := s.run(func(o *Options) {
		o.DrainTimeout = 50 * time.Millisecond
		o.Handle = func(ctx context.Context, _ pgx.Tx, _ *Message) error {
			entered <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}
	})
	<-entered
	check(t, stop())
	stop = s.run(nil)
	s.settled()
	check(t, stop())
	s.audit(1)
}

// What another process has taken and not handled comes first.
func TestOrderSurvivesLostDeliveries(t *testing.T) {
	t.Parallel()
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 2*time.Second)
	const events = 40
	for i := range events {
		s.publish(fmt.Sprint(i%3), fmt.Sprint("e", i))
	}
	batch, err := s.cons.Fetch(11)
	check(t, err)
	for m := range batch.Messages() {
		if meta, _ := m.Metadata(); meta.Sequence.Stream%2 == 0 {
			check(t, m.InProgress()) // so that they come back in another order
		}
	}
	stop := s.run(nil)
	await(t, "some are handled", func() bool { return s.handled() > 20 })
	// And in the middle of it.
	batch, err = s.cons.FetchNoWait(3)
	check(t, err)
	for range batch.Messages() {
	}
	for i := range events {
		s.publish(fmt.Sprint(i%3), fmt.Sprint("f", i))
	}
	s.settled()
	check(t, stop())
	s.audit(2 * events)
}

func TestOneProcessHandlesAndOthersStandBy(t *testing.T) {
	t.Parallel()
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 2*time.Second)
	var by [2]atomic.Int64
	for i := range by {
		s.run(func(o *Options) {
			o.Handle = func(ctx context.Context, tx pgx.Tx, m *Message) error {
				by[i].Add(1)
				return record(ctx, tx, m)
			}
		})
	}
	sent := 0
	send := func(n int) {
		for range n {
			s.publish(fmt.Sprint(sent%3), fmt.Sprint("e", sent))
			sent++
		}
	}
	send(30)
	s.settled()
	if by[0].Load() > 0 && by[1].Load() > 0 {
		t.Errorf("both handled: %d and %d", by[0].Load(), by[1].Load())
	}
	for range 3 {
		send(10)
		exec(t, s.pool, "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())")
		send(20)
		s.settled()
	}
	s.audit(sent)
}

// A connection that the network has swallowed is no lock.
func TestLockIsNotTrustedWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	proxy := harness.RunProxy(t, pg.Addr())
	pool := connect(t, strings.Replace(pg.DSN("postgres"), pg.Addr(), proxy.Addr(), 1))
	c := &Consumer{o: Options{DB: pool}, name: "mail", log: slog.New(slog.DiscardHandler)}
	lost, free, err := c.own(t.Context())
	check(t, err)
	defer free()
	conn := pg.MustConn(t)
	await(t, "the lock is asked about", func() bool {
		select {
		case <-lost:
			t.Fatal("lost")
		default:
		}
		return ask[bool](t, conn, "SELECT query = 'SELECT' FROM pg_stat_activity JOIN pg_locks USING (pid) WHERE locktype = 'advisory'")
	})
	proxy.Stall()
	select {
	case <-lost:
	case <-time.After(30 * time.Second):
		t.Error("it still counts as held")
	}
	check(t, proxy.Heal())
}

func TestUnorderedConsumersShareTheWork(t *testing.T) {
	t.Parallel()
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 10*time.Second)
	s.consumer(func(c *jetstream.ConsumerConfig) { c.AckWait, c.MaxAckPending = 10*time.Second, 10 })
	var by [2]atomic.Int64
	both := make(chan struct{})
	for i := range by {
		s.run(func(o *Options) {
			o.Unordered = true
			o.Handle = func(ctx context.Context, tx pgx.Tx, m *Message) error {
				if by[i].Add(1) == 1 && by[1-i].Load() > 0 {
					close(both)
				}
				if m.ID == "e0" {
					<-both // holds up nobody of its aggregate
				}
				return record(ctx, tx, m)
			}
		})
	}
	const events = 200
	for i := range events {
		s.publish("1", fmt.Sprint("e", i))
	}
	s.settled()
	if got := ask[int](t, s.pool, "SELECT count(DISTINCT id) FROM ledger"); got != events || s.handled() != events {
		t.Errorf("%d effects of %d events, want %d", s.handled(), got, events)
	}
}

func TestMarkersArePassedOver(t *testing.T) {
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 10*time.Second)
	marker := func(id string) {
		m := nats.NewMsg("walrelay.parked.OUTBOX")
		m.Header.Set(event.HeaderID, id)
		m.Header.Set(event.HeaderReason, "too_large: more than 1 MB")
		_, err := s.js.PublishMsg(t.Context(), m)
		check(t, err)
	}
	s.publish("1", "e1")
	marker("e2")
	s.publish("1", "e3")
	stop := s.run(nil)
	s.settled()
	check(t, stop())
	s.audit(2)
	marker("e4")
	s.publish("1", "e4") // the event itself, replayed
	var seen []string
	stop = s.run(func(o *Options) {
		o.Parked = func(_ context.Context, _ pgx.Tx, m *Message) error {
			seen = append(seen, m.Header.Get(event.HeaderID)+" "+m.Header.Get(event.HeaderReason))
			return nil
		}
	})
	s.settled()
	check(t, stop())
	s.audit(3)
	if len(seen) != 1 || seen[0] != "e4 too_large: more than 1 MB" {
		t.Errorf("saw %q", seen)
	}
}

// An event that may be what ends the process is counted before it is tried.
func TestEventThatEndsTheProcess(t *testing.T) {
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 10*time.Second)
	s.publish("1", "deadly")
	s.publish("2", "innocent")
	s.publish("1", "after")
	for range 4 {
		batch, err := s.cons.Fetch(3, jetstream.FetchMaxWait(time.Second))
		check(t, err)
		for m := range batch.Messages() {
			check(t, m.Nak())
		}
	}
	exec(t, s.pool, "INSERT INTO inbox_tries (consumer, id, tries) VALUES ('OUTBOX/mail', 'deadly', 3), ('OUTBOX/mail', 'innocent', 1)")
	stop := s.run(func(o *Options) { o.MaxDeliver = 3 })
	s.settled()
	check(t, stop())
	if got := ask[string](t, s.pool, "SELECT string_agg(id, ' ' ORDER BY id) FROM ledger"); got != "after innocent" {
		t.Errorf("handled: %s", got)
	}
	if letters := s.letters(); len(letters) != 1 || !strings.Contains(letters[0].Header.Get(event.HeaderReason), "process ended without an outcome in each of 3 tries") {
		t.Errorf("dead letters: %v", letters)
	}
}

func TestDeadLetterThatIsTooLargeGoesWithoutItsBody(t *testing.T) {
	s := newSite(t, harness.RunNATS(t, harness.NATSOptions{}), 10*time.Second)
	dead, err := s.js.Stream(t.Context(), "DEAD")
	check(t, err)
	cfg := dead.CachedInfo().Config
	cfg.MaxMsgSize = 500
	_, err = s.js.UpdateStream(t.Context(), cfg)
	check(t, err)
	_, err = s.js.Publish(t.Context(), "outbox.large", make([]byte, 1000))
	check(t, err)
	stop := s.run(func(o *Options) {
		o.Handle = func(context.Context, pgx.Tx, *Message) error { return Reject(errHandler) }
	})
	s.settled()
	check(t, stop())
	if l := s.letters(); len(l) != 1 || len(l[0].Data) != 0 || l[0].Header.Get(headerBodyOmitted) != "1000" {
		t.Errorf("dead letters: %v", l)
	}
}

func TestFaultsOfTheConfiguration(t *testing.T) {
	t.Parallel()
	n := harness.RunNATS(t, harness.NATSOptions{})
	s := newSite(t, n, 10*time.Second)
	deleted, err := s.js.CreateConsumer(t.Context(), "OUTBOX", jetstream.ConsumerConfig{Durable: "deleted", AckPolicy: jetstream.AckExplicitPolicy})
	check(t, err)
	check(t, s.js.DeleteConsumer(t.Context(), "OUTBOX", "deleted"))
	consumer := func(name string, change func(*jetstream.ConsumerConfig)) func(*Options) {
		return func(o *Options) {
			cfg := jetstream.ConsumerConfig{Durable: name, AckPolicy: jetstream.AckExplicitPolicy}
			change(&cfg)
			o.Consumer, err = s.js.CreateConsumer(t.Context(), "OUTBOX", cfg)
			check(t, err)
		}
	}
	exec(t, s.pool, "CREATE ROLE weak LOGIN")
	weak := connect(t, strings.Replace(s.pool.Config().ConnString(), "postgres@", "weak@", 1))
	for _, c := range []struct {
		want   string
		class  event.Class
		change func(*Options)
	}{
		{"Handle is missing\nWorkers is -1: want one or more\nDeadLetter is missing", event.Usage, func(o *Options) { o.Handle, o.Workers, o.DeadLetter = nil, -1, "" }},
		{"DB is missing", event.Usage, func(o *Options) { o.DB = nil }},
		{"gives an event up after 3 deliveries", event.Precondition, consumer("gives", func(c *jetstream.ConsumerConfig) { c.MaxDeliver = 3 })},
		{"does not want an ack for every message", event.Precondition, consumer("acks", func(c *jetstream.ConsumerConfig) { c.AckPolicy = jetstream.AckAllPolicy })},
		{"no limit of unacknowledged messages", event.Precondition, consumer("limit", func(c *jetstream.ConsumerConfig) { c.MaxAckPending = -1 })},
		{"delivers no payloads", event.Precondition, consumer("headers", func(c *jetstream.ConsumerConfig) { c.HeadersOnly = true })},
		{"consumer not found", event.Precondition, func(o *Options) { o.Consumer = deleted }},
		{"no stream stores dead letters at nowhere", event.Precondition, func(o *Options) { o.DeadLetter = "nowhere" }},
		{`would go into the stream "OUTBOX"`, event.Precondition, func(o *Options) { o.DeadLetter = "outbox.dead" }},
		{`there is no table "other"`, event.Precondition, func(o *Options) { o.Table.Name = "other" }},
		{`role "weak" lacks SELECT or INSERT`, event.Precondition, func(o *Options) { o.DB = weak }},
	} {
		err := Run(t.Context(), s.options(c.change))
		if err == nil || !strings.Contains(err.Error(), c.want) || event.ClassOf(err) != c.class || c.class == event.Precondition && event.HintOf(err) == "" {
			t.Errorf("want %q, got %v", c.want, err)
		}
	}

	// While it runs, too.
	s.publish("1", "e")
	done := make(chan error, 1)
	go func() { done <- Run(t.Context(), s.options(nil)) }()
	s.settled()
	check(t, s.js.DeleteConsumer(t.Context(), "OUTBOX", "mail"))
	if err := <-done; event.ClassOf(err) != event.Precondition {
		t.Errorf("a deleted consumer: %v", err)
	}
}

// A broker that dies forgets acks and deliveries, and loses what was on its way.
func TestBrokerIsKilled(t *testing.T) {
	t.Parallel()
	n := harness.RunNATS(t, harness.NATSOptions{})
	s := newSite(t, n, time.Second)
	const events = 400
	for i := range events {
		s.publish(fmt.Sprint(i%5), fmt.Sprint("e", i))
	}
	stop := s.run(nil)
	for i := range 3 {
		await(t, "some are handled", func() bool { return s.handled() > 80*(i+1) })
		check(t, n.Kill())
		n.MustStart(t)
	}
	await(t, "everything is acked", func() bool {
		info, err := s.cons.Info(t.Context())
		return err == nil && info.NumAckPending == 0 && info.NumPending == 0
	})
	check(t, stop())
	s.audit(events)
}
