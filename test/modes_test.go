package test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// publishing is what status says of the mode and the window.
func (r *rig) publishing(url string) (mode, reason string, window uint64) {
	r.t.Helper()
	ran := harness.MustRun(r.t, nil, "status", "-o", "json", "--dsn", r.dsn, "--nats-url", r.natsURL, "--http-addr", strings.TrimPrefix(url, "http://"))
	var s struct {
		Relay struct {
			Report *struct {
				Mode   string `json:"publish_mode"`
				Reason string `json:"publish_mode_reason"`
				Window uint64 `json:"window_events"`
			} `json:"report"`
		} `json:"relay"`
	}
	if err := json.Unmarshal([]byte(ran.Stdout), &s); err != nil || s.Relay.Report == nil {
		r.t.Fatalf("%v: %s%s", err, ran.Stdout, ran.Stderr)
	}
	return s.Relay.Report.Mode, s.Relay.Report.Reason, s.Relay.Report.Window
}

// On a server that syncs always, batches are chosen, survive kills of both
// sides and store each event once and in order.
func TestAtomicBatchesOnAServerThatSyncsAlways(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		nats: harness.NATSOptions{SyncInterval: "always"},
		args: append([]string{"--nats-sync", "always", "--status-interval", "100ms", "--backoff-max", "500ms"}, serving...),
	})
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 4, Rows: 20, Seed: 7})
	if err := ws.Run(t.Context(), 20_000); err != nil {
		t.Fatal(err)
	}
	for i := range 4 {
		r.relay.MustStart(t)
		r.relay.MustAwait(t, 20*time.Second, "mode=atomic")
		r.stored((i+1)*2500, time.Minute)
		must(t, r.relay.Kill())
	}
	r.relay.MustStart(t)
	url := address(t, r.relay)
	r.stored(12_500, time.Minute)
	must(t, r.nats.Kill())
	r.nats.MustStart(t)
	t.Log(r.drained(ws, time.Minute))
	if mode, reason, window := r.publishing(url); mode != "atomic" || !strings.Contains(reason, "syncs always") || window < 16 {
		t.Errorf("status: %s, %s, window %d", mode, reason, window)
	}
	// A lone event is no batch.
	r.insert(1)
	r.await(10*time.Second, "the last event is a plain message", func() bool {
		st, err := r.js.Stream(t.Context(), stream)
		must(t, err)
		m, err := st.GetMsg(t.Context(), st.CachedInfo().State.LastSeq)
		return err == nil && m.Header.Get("Nats-Batch-Id") == "" && m.Header.Get("Nats-Expected-Last-Sequence") != ""
	})
	r.ends(0)
}

// A stream that was made without allow_atomic keeps the chain, and both relay
// and check say how to change that.
func TestStreamWithoutAtomicBatches(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		nats: harness.NATSOptions{SyncInterval: "always"},
		args: append([]string{"--nats-sync", "always"}, serving...),
	})
	r.createStream(nil)
	r.relay.MustStart(t)
	url := address(t, r.relay)
	r.relay.MustAwait(t, 20*time.Second, "takes no atomic batches")
	r.relay.MustAwait(t, 20*time.Second, "mode=chain")
	r.insert(10)
	r.stored(10, 20*time.Second)
	if mode, reason, _ := r.publishing(url); mode != "chain" || !strings.Contains(reason, "no atomic batches") {
		t.Errorf("status: %s, %s", mode, reason)
	}
	both := []string{"--dsn", r.dsn, "--nats-url", r.natsURL, "--slot", slot, "--publication", publication, "--stream", stream}
	ran := harness.MustRun(t, nil, append([]string{"check", "--nats-sync", "always"}, both...)...)
	if !strings.Contains(ran.Stdout+ran.Stderr, "nats stream edit OUTBOX --allow-batch") {
		t.Errorf("check: exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
	}
	r.ends(0)

	ran = harness.MustRun(t, nil, append([]string{"run", "--publish-mode", "atomic"}, both...)...)
	if ran.Code != 3 || !strings.Contains(ran.Stderr, "--allow-batch") {
		t.Errorf("run --publish-mode atomic: exit code %d\n%s", ran.Code, ran.Stderr)
	}
	// Edited, it is taken at the next session.
	st, err := r.js.Stream(t.Context(), stream)
	must(t, err)
	c := st.CachedInfo().Config
	c.AllowAtomicPublish = true
	_, err = r.js.UpdateStream(t.Context(), c)
	must(t, err)
	r.relay.MustStart(t)
	r.relay.MustAwait(t, 20*time.Second, "mode=atomic")
	r.insert(10)
	r.stored(20, 20*time.Second)
	r.ends(0)
}

// A broker that syncs each message by itself is slow, and few events wait in it.
func TestWindowIsSmallWithASlowBroker(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		nats: harness.NATSOptions{SyncInterval: "always"},
		args: append([]string{"--publish-mode", "chain"}, serving...),
		prepare: func(r *rig) {
			r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = time.Minute })
		},
	})
	r.exec(into + "select 'order', '1', 'many', '{}' from generate_series(1, 200000)")
	r.relay.MustStart(t)
	url := address(t, r.relay)
	r.stored(3000, time.Minute)
	// When the disk was busy in the first round trip, all of them are taken for long until it is measured again.
	r.await(30*time.Second, "a small window", func() bool {
		_, _, window := r.publishing(url)
		return window >= 16 && window <= 1024
	})
	must(t, r.relay.Kill())
}

func TestShareAndModeDoNotGoTogether(t *testing.T) {
	t.Parallel()
	ran := harness.MustRun(t, nil, "run", "--dsn", "postgres://127.0.0.1:1/none", "--shared-stream", "--publish-mode", "sparse")
	if ran.Code != 2 || !strings.Contains(ran.Stderr, "sparse") || !strings.Contains(ran.Stderr, "hint: ") {
		t.Errorf("exit code %d\n%s", ran.Code, ran.Stderr)
	}
}
