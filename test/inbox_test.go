package test

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/inbox"
	"github.com/walrelay/walrelay/test/harness"
)

// The test's own program is the consumer, too, when it is started with this.
const inboxEnv = "INBOX_TEST_CONSUMER"

func init() {
	if arg := os.Getenv(inboxEnv); arg != "" {
		dsn, url, _ := strings.Cut(arg, " ")
		if err := consume(dsn, url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

var errFirstTry = errors.New("the first try fails")

// consume writes a row of the ledger and counts for each event. Some events fail at
// the first try, after their effects, which must go.
func consume(dsn, url string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	nc, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	cons, err := js.Consumer(ctx, stream, "ledger")
	if err != nil {
		return err
	}
	return inbox.Run(ctx, inbox.Options{
		JetStream: js, Consumer: cons, DB: pool, DeadLetter: "dead.ledger", Workers: 3,
		Backoff: []time.Duration{20 * time.Millisecond},
		Handle: func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			if _, err := tx.Exec(ctx, "INSERT INTO ledger (id, aggregate, seq) VALUES ($1, $2, $3)", m.ID, m.AggregateID, int64(m.Sequence)); err != nil {
				return err
			}
			if _, err := tx.Exec(ctx, "INSERT INTO counters VALUES ($1, 1) ON CONFLICT (aggregate) DO UPDATE SET n = counters.n + 1", m.AggregateID); err != nil {
				return err
			}
			h := fnv.New32a()
			h.Write([]byte(m.ID))
			if m.Try == 1 && h.Sum32()%16 == 0 {
				return errFirstTry
			}
			return nil
		},
	})
}

// A consumer that is killed at random moments, while the relay publishes:
// every event takes effect once, and those of an aggregate in their order.
func TestInboxAcrossKills(t *testing.T) {
	t.Parallel()
	const events, kills = 3000, 15
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	r := newRig(t, rigOptions{})
	r.exec("CREATE DATABASE consumer")
	dsn := r.pg.DSN("consumer")
	r.must("init", "--apply", "--inbox", "--dsn", dsn)
	pool, err := pgxpool.New(t.Context(), dsn)
	must(t, err)
	defer pool.Close()
	for _, sql := range []string{
		"CREATE TABLE ledger (n bigserial, id text, aggregate text, seq bigint)",
		"CREATE TABLE counters (aggregate text PRIMARY KEY, n bigint)",
	} {
		_, err := pool.Exec(t.Context(), sql)
		must(t, err)
	}
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	_, err = r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "DEAD", Subjects: []string{"dead.>"}})
	must(t, err)
	cons, err := r.js.CreateConsumer(t.Context(), stream, jetstream.ConsumerConfig{
		Durable: "ledger", AckPolicy: jetstream.AckExplicitPolicy, AckWait: time.Second, MaxAckPending: 100, MaxDeliver: -1,
	})
	must(t, err)
	consumer := harness.NewRelay(t)
	consumer.Bin, err = os.Executable()
	must(t, err)
	consumer.Env = []string{inboxEnv + "=" + dsn + " " + r.nats.URL()}

	ws := harness.NewWriters(harness.Workload{DSN: r.dsn, Table: r.table, Rate: 60, Seed: seed, Padding: 50})
	written := in(func() error { return ws.Run(t.Context(), events) })
	for range kills {
		consumer.MustStart(t)
		moment := time.NewTimer(300*time.Millisecond + time.Duration(rng.Int64N(1700))*time.Millisecond)
		if rng.IntN(4) == 0 {
			moment.Reset(time.Duration(rng.Int64N(300)) * time.Millisecond) // in its start
		}
		<-moment.C
		must(t, consumer.Kill())
	}
	consumer.MustStart(t)
	consumer.MustAwait(t, quick, "handling events") // from then on it hears signals
	must(t, written())
	r.drained(ws, time.Minute)
	value := func(sql string) (n int) {
		t.Helper()
		must(t, pool.QueryRow(t.Context(), sql).Scan(&n))
		return n
	}
	stored := len(r.read())
	r.await(time.Minute, "all events are handled", func() bool { return value("SELECT count(*) FROM inbox") >= stored })
	r.await(quick, "all events are acked", func() bool {
		info, err := cons.Info(t.Context())
		must(t, err)
		return info.NumAckPending == 0 && info.NumPending == 0
	})
	if code := consumer.MustStop(t, quick); code != 0 {
		t.Errorf("the consumer ended with exit code %d", code)
	}
	for _, c := range []struct {
		what, sql string
		want      int
	}{
		{"effects", "SELECT count(*) FROM ledger", stored},
		{"different events", "SELECT count(DISTINCT id) FROM ledger", stored},
		{"different messages", "SELECT count(DISTINCT seq) FROM ledger", stored},
		{"counted", "SELECT sum(n)::bigint FROM counters", stored},
		{"events out of order", "SELECT count(*) FROM (SELECT seq, max(seq) OVER (PARTITION BY aggregate ORDER BY n) m FROM ledger) l WHERE seq < m", 0},
	} {
		if got := value(c.sql); got != c.want {
			t.Errorf("%s: %d, want %d", c.what, got, c.want)
		}
	}
	dead, err := r.js.Stream(t.Context(), "DEAD")
	must(t, err)
	if n := dead.CachedInfo().State.Msgs; n != 0 {
		t.Errorf("%d events became dead letters", n)
	}
	r.ends(0)
}
