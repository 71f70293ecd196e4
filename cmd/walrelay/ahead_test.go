package main

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/test/harness"
)

func aheadOf(t *testing.T, url string) *dialAhead {
	t.Helper()
	pub, err := publisher.New(publisher.Options{URL: url, Stream: "orders", Subjects: []string{"orders.>"}})
	if err != nil {
		t.Fatal(err)
	}
	return &dialAhead{pub: pub}
}

func TestDialAheadIsForTheFirstSession(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	proxy := harness.RunProxy(t, n.Addr())
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	a := aheadOf(t, "nats://"+proxy.Addr())
	a.begin(ctx)
	if err := proxy.AwaitOpen(ctx, 2); err != nil {
		t.Fatal(err)
	}
	a.drop()
	if err := proxy.AwaitOpen(ctx, 0); err != nil {
		t.Fatal(err)
	}
	// While Postgres is down NATS is left in peace.
	a.begin(ctx)
	if a.stop != nil {
		t.Error("dialled ahead of a later session")
	}
	line, err := a.take(ctx)
	if err != nil {
		t.Fatal(err)
	}
	line.Close()
}

func TestDialAheadOfASilentServer(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	a := aheadOf(t, "nats://"+silent.Addr().String())
	ctx, cancel := context.WithCancelCause(t.Context())
	began := time.Now()
	a.begin(ctx)
	a.drop() // when Postgres has refused
	if took := time.Since(began); took > time.Second {
		t.Errorf("to drop it took %s", took)
	}

	a = aheadOf(t, "nats://"+silent.Addr().String())
	a.begin(ctx)
	stopped := errors.New("stopped")
	cancel(stopped)
	if _, err := a.take(ctx); !errors.Is(err, stopped) {
		t.Errorf("got %v, want that the relay was stopped", err)
	}
}
