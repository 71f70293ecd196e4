//go:build examples

// Package fastapi_test runs the example against real servers and the real relay.
package fastapi_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

const (
	stream   = "OUTBOX"
	consumer = "shipping"
	quick    = 30 * time.Second
)

// TestMain ends every server and removes every folder, whatever happened.
func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// shop is the example with all it needs.
type shop struct {
	t     *testing.T
	pg    *harness.Postgres
	nats  *harness.NATS
	link  *harness.Proxy // between the consumer and the broker
	js    jetstream.JetStream
	url   string         // of the service
	ships *harness.Relay // the consumer
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{t: t, pg: harness.RunPostgres(t, harness.PostgresOptions{}), nats: harness.RunNATS(t, harness.NATSOptions{})}
	s.link, s.js = harness.RunProxy(t, s.nats.Addr()), s.nats.JetStream(t)

	env := []string{"WALRELAY_DSN=" + s.pg.DSN("postgres"), "WALRELAY_NATS_URL=" + s.nats.URL()}
	for _, args := range []string{"init --apply", "init --apply --inbox", "slot create"} {
		if ran := harness.MustRun(t, env, strings.Fields(args)...); ran.Code != 0 {
			t.Fatalf("walrelay %s: exit code %d\n%s", args, ran.Code, ran.Stderr)
		}
	}
	relay := harness.NewRelay(t, "run", "--create-stream", "--log-format", "text")
	relay.Env = env
	relay.MustStart(t)
	relay.MustAwait(t, quick, "streaming")

	port, err := harness.FreePort()
	must(t, err)
	s.url = "http://" + net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	tables := s.python("-m", "shop.tables")
	must(t, tables.Start())
	ctx, cancel := context.WithTimeout(t.Context(), quick)
	defer cancel()
	if code, err := tables.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("make the tables: exit code %d, %v", code, err)
	}
	service := s.python("-m", "uvicorn", "shop.service:app", "--port", strconv.Itoa(port))
	must(t, service.Start())
	service.MustAwait(t, quick, "Uvicorn running")
	s.ships = s.python("-m", "shop.consumer")
	return s
}

// python is a program of the example, ended with the test.
func (s *shop) python(args ...string) *harness.Relay {
	s.t.Helper()
	repo, err := harness.Repo()
	must(s.t, err)
	find := exec.CommandContext(s.t.Context(), filepath.Join(repo, "tools", "python.sh"))
	find.Stderr = os.Stderr
	bin, err := find.Output()
	if err != nil {
		s.t.Fatalf("find Python: %v", err)
	}
	p := &harness.Relay{Bin: strings.TrimSpace(string(bin)), Args: args, Env: []string{
		"PYTHONPATH=" + filepath.Join(repo, "examples", "fastapi"),
		"PYTHONDONTWRITEBYTECODE=1",
		"PYTHONUNBUFFERED=1",
		"DATABASE_URL=" + strings.Replace(s.pg.DSN("postgres"), "postgres:", "postgresql+psycopg:", 1),
		"NATS_URL=nats://" + s.link.Addr(),
	}}
	s.t.Cleanup(func() {
		if err := p.Kill(); err != nil {
			s.t.Errorf("kill %v: %v", args, err)
		}
		if s.t.Failed() {
			s.t.Logf("output of %v:\n%s", args, p.Output())
		}
	})
	return p
}

// order posts an order and returns its id. Any goroutine may call it.
func (s *shop) order(country string) string {
	s.t.Helper()
	code, body, err := s.post(1, country)
	var placed struct{ ID string }
	if err == nil && code == http.StatusCreated {
		err = json.Unmarshal(body, &placed)
	}
	if placed.ID == "" {
		s.t.Errorf("an order is answered with %d: %s, %v", code, body, err)
	}
	return placed.ID
}

func (s *shop) post(quantity int, country string) (code int, body []byte, err error) {
	order := fmt.Sprintf(`{"product": "pen", "quantity": %d, "country": %q}`, quantity, country)
	req, err := http.NewRequestWithContext(s.t.Context(), http.MethodPost, s.url+"/orders", strings.NewReader(order))
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	body, err = io.ReadAll(resp.Body)
	return resp.StatusCode, body, err
}

// count returns one number.
func (s *shop) count(sql string) int {
	s.t.Helper()
	conn, err := s.pg.Conn(s.t.Context())
	must(s.t, err)
	defer conn.Close(context.Background())
	var n int
	if err := conn.QueryRow(s.t.Context(), sql).Scan(&n); err != nil {
		s.t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// await polls until ok, since Postgres does not signal what is waited for.
func (s *shop) await(limit time.Duration, what string, ok func() bool) {
	s.t.Helper()
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-deadline.C:
			s.t.Fatalf("after %s still not: %s", limit, what)
		}
	}
}

func (s *shop) shipped() int { return s.count("select count(*) from shipments") }

// holdShipments keeps the consumer in the middle of a transaction. It returns when
// it is there, and what lets it go on.
func (s *shop) holdShipments() (release func()) {
	s.t.Helper()
	conn := s.pg.MustConn(s.t)
	tx, err := conn.Begin(s.t.Context())
	must(s.t, err)
	_, err = tx.Exec(s.t.Context(), "lock table shipments in share mode")
	must(s.t, err)
	s.order("DE")
	s.await(quick, "the consumer is in a transaction", func() bool {
		return s.count("select count(*) from pg_locks where relation = 'shipments'::regclass and not granted") == 1
	})
	return func() {
		s.t.Helper()
		must(s.t, tx.Rollback(s.t.Context()))
	}
}

func TestEachOrderIsShippedOnce(t *testing.T) {
	s := newShop(t)
	var orders []string

	// Killed before the commit: nothing has happened yet.
	s.ships.MustStart(t)
	s.ships.MustAwait(t, quick, "waiting for")
	release := s.holdShipments()
	must(t, s.ships.Kill())
	release()
	s.await(quick, "the consumer's session is gone", func() bool {
		return s.count("select count(*) from pg_locks where relation = 'shipments'::regclass") == 0
	})
	if n := s.shipped() + s.count("select count(*) from inbox"); n != 0 {
		t.Errorf("%d rows of a consumer that was killed before its commit", n)
	}

	// Killed between commit and ack: the inbox knows the event when it comes again.
	s.ships.MustStart(t)
	s.ships.MustAwait(t, quick, "waiting for")
	release = s.holdShipments()
	s.link.Stall()
	release()
	s.await(quick, "the shipment is committed", func() bool { return s.shipped() == 1 })
	must(t, s.ships.Kill())
	s.link.Cut()
	must(t, s.link.Heal())
	s.ships.MustStart(t)
	s.ships.MustAwait(t, quick, "shipped before")

	// Either server is restarted: the consumer goes on by itself.
	s.holdShipments()
	_, err := s.pg.Stop(harness.Fast, quick)
	must(t, err)
	s.pg.MustStart(t)
	s.await(quick, "shipped after a restart of Postgres", func() bool { return s.shipped() == 3 })
	must(t, s.nats.Kill())
	s.nats.MustStart(t)
	orders = append(orders, s.order("DE"))
	s.await(quick, "shipped after a restart of the broker", func() bool { return s.shipped() == 4 })

	// Killed anywhere, while orders come in.
	const clients, each = 4, 25
	var wg sync.WaitGroup
	var mu sync.Mutex
	for range clients {
		wg.Go(func() {
			for range each {
				id := s.order("CH")
				mu.Lock()
				orders = append(orders, id)
				mu.Unlock()
			}
		})
	}
	for i := range 3 {
		s.await(quick, "the consumer gets on", func() bool { return s.shipped() > 10+20*i })
		must(t, s.ships.Kill())
		s.ships.MustStart(t)
	}
	wg.Wait()

	// The insert into the outbox was sent before this one failed.
	if code, body, err := s.post(5000, "DE"); code != http.StatusConflict {
		t.Errorf("an order of more than there is: %d: %s, %v", code, body, err)
	}
	// Nobody goes there: the others do not wait for it.
	impossible := s.order("AQ")
	orders = append(orders, s.order("AT"))
	s.ships.MustAwait(t, time.Minute, "given up")

	const total = 4 + clients*each + 1
	s.await(time.Minute, "all are shipped", func() bool { return s.shipped() >= total })
	if n := s.count("select count(distinct order_id) from shipments"); n != total || s.shipped() != total {
		t.Errorf("%d orders shipped in %d shipments, want %d", n, s.shipped(), total)
	}
	if n := s.count("select count(*) from orders o where not exists (select from shipments where order_id = o.id)"); n != 1 {
		t.Errorf("%d orders are not shipped, want only the impossible one", n)
	}
	if n := s.count("select count(*) from shipments where order_id = '" + impossible + "'"); n != 0 {
		t.Error("the impossible order is shipped")
	}
	if n := s.count("select count(*) from inbox where consumer = '" + consumer + "'"); n != total {
		t.Errorf("the inbox has %d rows, want %d", n, total)
	}

	// One event an order, and none of the one that was rolled back.
	all, err := harness.ReadStream(t.Context(), s.js, stream)
	must(t, err)
	events := map[string]int{}
	for _, m := range all {
		events[m.Aggregate]++
	}
	if len(all) != total+1 || len(events) != total+1 || s.count("select count(*) from orders") != total+1 {
		t.Errorf("%d events of %d orders, want %d", len(all), len(events), total+1)
	}
	if i := slices.IndexFunc(orders, func(id string) bool { return events[id] != 1 }); i >= 0 {
		t.Errorf("order %s has %d events", orders[i], events[orders[i]])
	}

	// Everything is settled, and the consumer ends when it is told to.
	s.await(quick, "all events are acked or given up", func() bool {
		c, err := s.js.Consumer(t.Context(), stream, consumer)
		must(t, err)
		return c.CachedInfo().NumPending == 0 && c.CachedInfo().NumAckPending == 0
	})
	if code := s.ships.MustStop(t, 10*time.Second); code != 0 {
		t.Errorf("the consumer ends with exit code %d", code)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
