package harness_test

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/walrelay/walrelay/test/harness"
)

func TestNATSKeepsItsStreamsWhenKilledAndStopped(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n := harness.RunNATS(t, harness.NATSOptions{MaxPayload: 2000, SyncInterval: "always"})
	js := n.JetStream(t)
	if _, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "s.a", make([]byte, 2001)); err == nil {
		t.Error("max_payload is not set")
	}
	for i, down := range []func() error{n.Kill, n.Stop} {
		if _, err := js.Publish(ctx, "s.a", nil); err != nil {
			t.Fatal(err)
		}
		if err := down(); err != nil {
			t.Fatal(err)
		}
		n.MustStart(t)
		s, err := n.JetStream(t).Stream(ctx, "S")
		if err != nil {
			t.Fatal(err)
		}
		if got := s.CachedInfo().State.LastSeq; got != uint64(i+1) {
			t.Errorf("last sequence %d, want %d", got, i+1)
		}
		js = n.JetStream(t)
	}
	n.Freeze()
	if _, err := n.Conn(nats.Timeout(200 * time.Millisecond)); err == nil {
		t.Error("frozen server answers")
	}
	n.Thaw()
	n.MustConn(t)
}

func TestNATSWantsCredentials(t *testing.T) {
	for name, opts := range map[string]harness.NATSOptions{
		"user":  {User: "u", Password: "p@ss word"},
		"token": {Token: "t0ken"},
		"nkey":  {NKey: true},
		"tls":   {TLS: true, VerifyClient: true},
	} {
		t.Run(name, func(t *testing.T) {
			n := harness.RunNATS(t, opts)
			n.MustConn(t)
			if nc, err := nats.Connect(n.URL()); err == nil {
				nc.Close()
				t.Error("server takes clients without credentials")
			}
		})
	}
}

func TestClusterSurvivesItsLeader(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c := harness.RunCluster(t, 3, harness.NATSOptions{})
	js := c.JetStream(t)
	s, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s.>"}, Replicas: 3})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "s.a", nil); err != nil {
		t.Fatal(err)
	}
	leader := c.Node(s.CachedInfo().Cluster.Leader)
	if leader == nil {
		t.Fatal("stream has no leader")
	}
	if err := leader.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := c.Start(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := js.Publish(ctx, "s.a", nil, jetstream.WithExpectLastSequence(1), jetstream.WithRetryAttempts(50)); err != nil {
		t.Fatal(err)
	}
}

func TestRelayOutputAndExitAreSeen(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	t.Setenv("PGHOST", "nowhere")
	r := &harness.Relay{
		Bin:  "/bin/sh",
		Args: []string{"-c", "trap 'echo bye >&2; exit 7' TERM; echo hello $WORD$PGHOST; while :; do sleep 0.01; done"},
		Env:  []string{"WORD=you"},
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	defer r.Kill()
	line, err := r.AwaitText(ctx, "hello")
	if err != nil || line != "hello you" {
		t.Fatalf("got %q, %v", line, err)
	}
	r.Freeze()
	if err := r.Term(); err != nil {
		t.Fatal(err)
	}
	r.Thaw()
	code, err := r.Wait(ctx)
	if err != nil || code != 7 {
		t.Errorf("exit code %d, %v; want 7", code, err)
	}
	<-r.Done()
	if want := []string{"hello you", "bye"}; !slices.Equal(r.Lines(), want) {
		t.Errorf("lines %q, want %q", r.Lines(), want)
	}
	if _, err := r.AwaitText(ctx, "never"); err == nil || !strings.Contains(err.Error(), "ended") {
		t.Errorf("wait for a line of an ended process: %v", err)
	}
	if rss, err := r.RSS(); err != nil || rss < 100_000 {
		t.Errorf("rss %d, %v", rss, err)
	}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	if err := r.Kill(); err != nil {
		t.Fatal(err)
	}
	if code, err := r.Wait(ctx); err != nil || code != -1 {
		t.Errorf("exit code after kill %d, %v; want -1", code, err)
	}
}

// TestNothingIsLeftBehind runs this test binary again as a process that starts
// servers and is then killed.
func TestNothingIsLeftBehind(t *testing.T) {
	if os.Getenv("HARNESS_VICTIM") == "1" {
		pg := harness.RunPostgres(t, harness.PostgresOptions{})
		n := harness.RunNATS(t, harness.NATSOptions{})
		pg.Freeze()
		root, err := harness.Root()
		if err != nil {
			t.Fatal(err)
		}
		println("victim", root, pg.PID(), n.PID())
		select {}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := &harness.Relay{Bin: exe, Args: []string{"-test.run=^TestNothingIsLeftBehind$"}, Env: []string{"HARNESS_VICTIM=1"}}
	if err := r.Start(); err != nil {
		t.Fatal(err)
	}
	defer r.Kill()
	line, err := r.AwaitText(ctx, "victim ")
	if err != nil {
		t.Fatalf("%v\n%s", err, r.Output())
	}
	f := strings.Fields(line)
	// Only the process itself: its servers are the reaper's business.
	if err := r.Signal(9); err != nil {
		t.Fatal(err)
	}
	if err := harness.AwaitGone(ctx, f[1], f[2:]...); err != nil {
		t.Error(err)
	}
}
