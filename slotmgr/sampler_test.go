package slotmgr

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

type sampled struct {
	Lag
	err error
}

// sampling runs a Sampler; next waits for a sample that satisfies ok.
func sampling(t *testing.T, pg *harness.Postgres, renewal time.Duration) (next func(what string, ok func(sampled) bool) sampled) {
	t.Helper()
	cfg := config(t, pg.DSN("postgres"))
	cfg.RuntimeParams["application_name"] = "sampler"
	s := NewSampler(cfg, "orders", 20*time.Millisecond)
	s.patience = 500 * time.Millisecond
	s.renewal = renewal
	ctx, cancel := context.WithCancel(context.Background())
	told := make(chan sampled)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.Run(ctx, func(l Lag, err error) {
			select {
			case told <- sampled{l, err}:
			case <-ctx.Done():
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return func(what string, ok func(sampled) bool) sampled {
		t.Helper()
		limit := time.After(20 * time.Second)
		for {
			select {
			case got := <-told:
				if ok(got) {
					return got
				}
			case <-limit:
				t.Fatalf("never: %s", what)
			}
		}
	}
}

func TestSamplerTellsTheLagWhateverHappens(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, "create publication walrelay for table outbox")
	next := sampling(t, pg, time.Hour)
	works := func(s sampled) bool { return s.err == nil }
	fails := func(s sampled) bool { return s.err != nil }

	wantFailure(t, next("the slot is missing", fails).err, event.Precondition, `slot "orders" does not exist`, "slot create")
	conn := connect(t, pg.DSN("postgres"))
	mustCreate(t, conn, CreateOptions{Name: "orders"})
	first := next("a sample", works)
	pg.MustExec(t, "insert into outbox (payload) select '{}' from generate_series(1, 1000)")
	next("the lag has grown", func(s sampled) bool { return works(s) && s.Bytes > first.Bytes+10_000 })

	var pid, backends int
	ask := func() {
		t.Helper()
		if err := conn.QueryRow(t.Context(), "select max(pid), count(*) from pg_stat_activity where application_name = 'sampler'").Scan(&pid, &backends); err != nil {
			t.Fatal(err)
		}
	}
	ask()
	was := pid
	next("another sample", works)
	if ask(); pid != was || backends != 1 {
		t.Errorf("%d connections, pid %d after %d: want the same one", backends, pid, was)
	}

	// A connection that an administrator ends is replaced without a word.
	pg.MustExec(t, "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sampler'")
	for range 5 {
		if got := next("any", func(sampled) bool { return true }); got.err != nil {
			t.Errorf("a failure where a new connection was to be had: %v", got.err)
		}
	}

	pg.Freeze()
	if err := next("no answer", fails).err; !strings.Contains(err.Error(), "no answer") && !strings.Contains(err.Error(), "timeout") {
		t.Errorf("a server that does not answer: %v", err)
	}
	pg.Thaw()
	next("a sample after the thaw", works)

	// It does not hold up a shutdown, and comes back.
	if took, err := pg.Stop(harness.Fast, 20*time.Second); err != nil || took > 5*time.Second {
		t.Errorf("the server took %s to stop: %v", took, err)
	}
	next("nobody listens", fails)
	pg.MustStart(t)
	next("a sample after the restart", works)
}

func TestSamplerDoesNotHoldUpASmartShutdown(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, "create publication walrelay for table outbox")
	conn := connect(t, pg.DSN("postgres"))
	mustCreate(t, conn, CreateOptions{Name: "orders"})
	hangUp(conn)
	next := sampling(t, pg, 200*time.Millisecond)
	next("a sample", func(s sampled) bool { return s.err == nil })
	stopped := make(chan error, 1)
	go func() {
		_, err := pg.Stop(harness.Smart, 20*time.Second)
		stopped <- err
	}()
	next("refused", func(s sampled) bool { return s.err != nil })
	if err := <-stopped; err != nil {
		t.Error(err)
	}
}
