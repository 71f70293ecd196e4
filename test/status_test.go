package test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// looked is what the test needs of status -o json.
type looked struct {
	Healthy  bool     `json:"healthy"`
	Problems []string `json:"problems"`
	Source   string   `json:"source"`
	Role     string   `json:"role"`
	Postgres struct {
		Up         bool  `json:"up"`
		LagBytes   int64 `json:"lag_bytes"`
		SlotActive bool  `json:"slot_active"`
	} `json:"postgres"`
	NATS struct {
		Error string `json:"error"`
		Holds *struct {
			Stream      struct{ Messages uint64 }
			DeadLetters *struct{ Messages uint64 } `json:"dead_letters"`
			Checkpoint  *struct{ Sequence uint64 } `json:"checkpoint"`
		} `json:"holds"`
	} `json:"nats"`
	LagSeconds      *float64 `json:"lag_seconds"`
	EventsPerSecond *float64 `json:"events_per_second"`
	DrainSeconds    *float64 `json:"drain_seconds"`
}

// look runs walrelay status and wants its exit code to agree with what it says.
func (r *rig) look(args ...string) looked {
	r.t.Helper()
	args = append([]string{"status", "-o", "json", "--dsn", r.dsn, "--nats-url", r.natsURL, "--slot", slot, "--stream", stream}, args...)
	ran := harness.MustRun(r.t, nil, args...)
	var s looked
	if err := json.Unmarshal([]byte(ran.Stdout), &s); err != nil {
		r.t.Fatalf("%v: exit code %d\n%s%s", err, ran.Code, ran.Stdout, ran.Stderr)
	}
	want := 3
	if s.Healthy {
		want = 0
	}
	if ran.Code != want {
		r.t.Errorf("exit code %d, want %d: %s", ran.Code, want, ran.Stderr)
	}
	return s
}

func (s looked) want(t testing.TB, healthy bool, source, role, problem string) {
	t.Helper()
	if s.Healthy != healthy || s.Source != source || s.Role != role || !strings.Contains(strings.Join(s.Problems, "; "), problem) {
		t.Errorf("got %+v, want healthy %t, source %s, role %s, problem %q", s, healthy, source, role, problem)
	}
}

func TestStatusTellsTheTruth(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: append(serving, "--backoff-max", "1s")})
	r.look().want(t, false, "servers", "unknown", "nobody reads slot") // and there is no stream yet

	r.relay.MustStart(t)
	url := address(t, r.relay)
	addr := strings.TrimPrefix(url, "http://")
	r.insert(50)
	r.stored(50, 20*time.Second)
	r.caughtUp(url)

	s := r.look("--http-addr", addr)
	s.want(t, true, "relay", "leader", "")
	if h := s.NATS.Holds; h == nil || h.Stream.Messages != 50 || h.DeadLetters == nil || h.DeadLetters.Messages != 0 || h.Checkpoint == nil || h.Checkpoint.Sequence != 50 {
		t.Errorf("of the broker: %+v", s.NATS)
	}
	if s.LagSeconds == nil || *s.LagSeconds != 0 || s.DrainSeconds == nil || *s.DrainSeconds != 0 || s.EventsPerSecond == nil {
		t.Errorf("idle: %+v", s)
	}
	s = r.look() // the servers alone can tell that, too
	s.want(t, true, "servers", "unknown", "")
	if s.LagSeconds == nil || s.EventsPerSecond == nil || s.NATS.Holds == nil {
		t.Errorf("from the servers: %+v", s)
	}

	second := harness.NewRelay(t, r.relay.Args...)
	second.MustStart(t)
	other := address(t, second)
	r.await(20*time.Second, "the second relay is ready", func() bool { return isReady(t, other) })
	r.look("--http-addr", strings.TrimPrefix(other, "http://")).want(t, true, "relay", "standby", "")
	if code := second.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d of the standby", code)
	}

	must(t, r.nats.Kill())
	r.await(readyLimit, "not ready", func() bool { return !isReady(t, url) })
	s = r.look("--http-addr", addr)
	s.want(t, false, "relay", "none", "not ready")
	if s.NATS.Error == "" || s.NATS.Holds != nil {
		t.Errorf("without a broker: %+v", s.NATS)
	}
	r.nats.MustStart(t)
	r.caughtUp(url)

	must(t, r.relay.Kill())
	r.insert(50)
	s = r.look("--http-addr", addr)
	s.want(t, false, "servers", "unknown", "does not answer")
	if !s.Postgres.Up || s.Postgres.SlotActive || s.Postgres.LagBytes < 1000 || s.LagSeconds == nil || *s.LagSeconds <= 0 || s.DrainSeconds != nil {
		t.Errorf("with the relay down: %+v", s)
	}
}
