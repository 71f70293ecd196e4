package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/metrics"
	"github.com/walrelay/walrelay/publisher"
)

func ptr[T any](v T) *T { return &v }

// aStatus is of a relay that streams, with everything there is to show.
func aStatus() status {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	s := status{At: at, Source: fromServers, Role: roleUnknown, Slot: "walrelay", Database: "shop", Stream: "OUTBOX"}
	s.Relay.Address = "127.0.0.1:9187"
	s.heard(&metrics.Report{
		Live: true, Ready: true, State: "streaming", Since: at.Add(-3 * time.Hour), Slot: "orders", Database: "shop", Stream: "ORDERS", Version: "v1.2.3",
		Published: 1000, InFlight: 17, Window: 512, PublishMode: "chain", PublishWhy: "asked for", Reconnects: map[string]uint64{"nats": 2},
		LagSeconds: ptr(0.25), LagBasis: "event",
		Postgres: metrics.PostgresReport{Up: true, WALEnd: 1 << 30, Confirmed: 1<<30 - 4096, LagBytes: 4096, RetainedBytes: 16 << 20, SafeBytes: ptr(int64(1 << 30)), SlotActive: true, WALStatus: "reserved"},
		Estimate: metrics.Estimate{EventsPerSecond: ptr(1234.0), WALPerSecond: ptr(1e6), DrainSeconds: ptr(12.0), LossSeconds: ptr(7200.0)},
	})
	s.NATS.Holds = &publisher.Inspection{
		Stream:      publisher.StreamState{Name: "ORDERS", Messages: 123456, Bytes: 1 << 30, LastSequence: 123456, LastTime: ptr(at.Add(-time.Second))},
		DeadLetters: &publisher.StreamState{Name: "ORDERS_DLQ", Messages: 3},
		Checkpoint:  &publisher.Place{Slot: "orders", Sequence: 123400, Position: "1:0/4000000:0/3FFFF00:0", CommitTime: at.Add(-2 * time.Second)},
	}
	return s
}

func TestJudgementOfAStatus(t *testing.T) {
	direct := func(s *status) {
		s.Source, s.Role, s.Relay.Report, s.Relay.Address = fromServers, roleUnknown, nil, ""
	}
	for _, c := range []struct {
		name   string
		change func(s *status)
		want   []string // problems
	}{
		{"all is well", func(*status) {}, nil},
		{"standby that is behind", func(s *status) { s.Relay.Report.State, s.Role, s.LagSeconds = "standby", roleStandby, ptr(1e6) }, nil},
		{"behind", func(s *status) { s.LagSeconds = ptr(61.0) }, []string{"events wait for 1m1s, more than 1m0s"}},
		{"not ready", func(s *status) { s.Relay.Report.Ready, s.Relay.Report.NotReady = false, "waiting: no route" }, []string{"not ready: waiting: no route"}},
		{"stuck", func(s *status) { s.Relay.Report.Live, s.Relay.Report.Stuck = false, "it stands still" }, []string{"stuck: it stands still"}},
		{"slot lost", func(s *status) { s.Postgres.WALStatus = "lost" }, []string{"slot orders is lost"}},
		{"slot in danger", func(s *status) { s.Postgres.WALStatus = "unreserved" }, []string{"may be lost"}},
		{"broker hidden from here", func(s *status) { s.NATS.Error, s.NATS.Holds = "no route", nil }, nil},
		{"relay down", func(s *status) {
			direct(s)
			s.Relay.Error, s.Postgres.SlotActive = "connection refused", false
		}, []string{"does not answer", "nobody reads slot orders"}},
		{"not asked", direct, nil},
		{"not asked, Postgres down", func(s *status) { direct(s); s.Postgres = metrics.PostgresReport{Error: "no Postgres"} }, []string{"no Postgres"}},
		{"not asked, broker down", func(s *status) { direct(s); s.NATS = natsStatus{Error: "no NATS"} }, []string{"no NATS"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := aStatus()
			c.change(&s)
			s.judge(time.Minute)
			if len(s.Problems) != len(c.want) || s.Healthy != (len(c.want) == 0) {
				t.Fatalf("healthy %t, problems %q, want %q", s.Healthy, s.Problems, c.want)
			}
			for i, want := range c.want {
				if !strings.Contains(s.Problems[i], want) {
					t.Errorf("got %q, want %q", s.Problems[i], want)
				}
			}
			if err := s.err(); (err == nil) != s.Healthy || err != nil && (event.ClassOf(err) != event.Precondition || event.HintOf(err) == "") {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestScreenKeepsToItsWidth(t *testing.T) {
	long := strings.Repeat("a very long error with \x1b[31mcolours\n", 20)
	for _, look := range []looks{{}, {utf8: true}, {moves: true}, {moves: true, utf8: true, colour: true}} {
		for _, change := range []func(*status){
			func(*status) {},
			func(s *status) {
				s.Database, s.Slot = strings.Repeat("d", 63), strings.Repeat("s", 63)
				s.Relay.Report.Error, s.Relay.Report.Hint = long, long
				s.Relay.Report.Ready, s.Relay.Report.NotReady = false, long
			},
			func(s *status) {
				s.Relay.Report, s.Relay.Error = nil, long
				s.NATS = natsStatus{Error: long}
				s.Postgres = metrics.PostgresReport{Error: long}
				s.LagSeconds, s.Estimate = nil, metrics.Estimate{}
			},
		} {
			var out bytes.Buffer
			v := screen{out: &out, look: look}
			for i := range 40 {
				s := aStatus()
				s.EventsPerSecond = ptr(float64(i * 100))
				change(&s)
				s.judge(time.Minute)
				if err := v.show(&s); err != nil {
					t.Fatal(err)
				}
				for _, line := range v.lines(&s) {
					visible := strings.NewReplacer("\x1b[32m", "", "\x1b[1;31m", "", "\x1b[0m", "").Replace(line)
					if n := utf8.RuneCountInString(visible); n > width || strings.ContainsAny(visible, "\x1b\n\r") {
						t.Fatalf("%d columns: %q", n, visible)
					}
				}
				if n := len(v.lines(&s)); n > 24 {
					t.Fatalf("%d lines", n)
				}
			}
			v.end()
			v.end()
			text := out.String()
			if !look.moves && strings.Contains(text, "\x1b") {
				t.Errorf("%+v: moves on a terminal that cannot", look)
			}
			if !look.colour && (strings.Contains(text, "\x1b[32m") || strings.Contains(text, "\x1b[1;31m")) {
				t.Errorf("%+v: colours", look)
			}
			if !look.utf8 && strings.ContainsFunc(text, func(r rune) bool { return r > 0x7e }) {
				t.Errorf("%+v: not ASCII", look)
			}
			if look.moves && strings.Count(text, "\x1b[?25h") != 1 {
				t.Errorf("%+v: the cursor comes back %d times", look, strings.Count(text, "\x1b[?25h"))
			}
		}
	}
}

func TestScreenShowsEverything(t *testing.T) {
	var out bytes.Buffer
	s := aStatus()
	s.judge(time.Minute)
	if err := (&screen{out: &out}).print(&s); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &out)
	for _, want := range []string{
		"shop.orders > ORDERS", "healthy", "leader, streaming for 3h0m, version v1.2.3", "1234 events/s", "250ms", "4.0 KiB", "in flight    17",
		"in about 12s", "active, reserved", "keeps 16.0 MiB", "after 1.0 GiB more of log, in about 2h0m", "123456 messages", "last 123456, 1s ago",
		"sequence 123400, at 1:0/4000000", "3 in ORDERS_DLQ", "NATS 2",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("missing %q", want)
		}
	}
}

func TestWordsForADrain(t *testing.T) {
	for _, c := range []struct {
		change func(s *status)
		want   string
	}{
		{func(*status) {}, "in about 12s"},
		{func(s *status) { s.DrainSeconds = ptr(0.0) }, "yes"},
		{func(s *status) { s.DrainSeconds = nil }, "keeps up with what is written"},
		{func(s *status) { s.DrainSeconds, s.LagSeconds = nil, ptr(60.0) }, "not at this rate: the lag does not shrink"},
		{func(s *status) { s.DrainSeconds, s.LagSeconds, s.LagBasis = nil, nil, "" }, "not at this rate: the lag does not shrink"},
		{func(s *status) { s.DrainSeconds, s.WALPerSecond = nil, nil }, "not known yet"},
		{func(s *status) { s.DrainSeconds, s.LagSeconds, s.LagBasis, s.EventsPerSecond = nil, nil, "", nil }, "not in sight: the lag does not shrink"},
		{func(s *status) { s.DrainSeconds, s.LagSeconds, s.LagBasis, s.Postgres.SlotActive = nil, nil, "", false }, "no: nobody reads the slot"},
		{func(s *status) { s.Postgres.SlotActive = false }, "in about 12s"},
		{func(s *status) { s.Postgres.Up = false }, "unknown"},
	} {
		s := aStatus()
		c.change(&s)
		if got := drained(&s); got != c.want {
			t.Errorf("got %q, want %q", got, c.want)
		}
	}
}

func TestWordsForASlot(t *testing.T) {
	direct := func(s *status) {
		s.Relay.Report, s.Source = nil, fromServers
		s.Postgres = metrics.PostgresReport{Error: "what went wrong"}
	}
	for _, c := range []struct {
		change func(s *status)
		want   string
	}{
		{func(*status) {}, "active, reserved"},
		{direct, "slot         unknown: Postgres does not answer"},
		{func(s *status) { direct(s); s.missing = true }, "slot         does not exist"},
		{func(s *status) { s.Postgres = metrics.PostgresReport{Error: "what went wrong"} }, "slot         unknown: what went wrong"},
		{func(s *status) { s.LossSeconds = nil }, "more of log, not coming nearer"},
		{func(s *status) { s.LossSeconds, s.WALPerSecond = nil, nil }, "slot loss    after 1.0 GiB more of log\n"},
	} {
		s := aStatus()
		c.change(&s)
		if got := strings.Join((&screen{}).lines(&s), "\n"); !strings.Contains(got, c.want) {
			t.Errorf("missing %q in\n%s", c.want, got)
		}
	}
}

func TestLooksFollowTheEnvironment(t *testing.T) {
	if l := lookOf(&process{out: &bytes.Buffer{}, environ: []string{"TERM=xterm", "LANG=C.UTF-8"}}); l.moves || l.colour || !l.utf8 {
		t.Errorf("of a pipe: %+v", l)
	}
	if l := lookOf(&process{out: &bytes.Buffer{}, environ: []string{"LANG=de_DE.UTF-8", "LC_ALL=C"}}); l.utf8 {
		t.Errorf("of the locale C: %+v", l)
	}
}

// A relay that answers is enough: neither server is asked for what it told.
func TestStatusOfARelayThatAnswers(t *testing.T) {
	var ready atomic.Bool
	ready.Store(true)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		r := *aStatus().Relay.Report
		if r.Ready = ready.Load(); !r.Ready {
			r.NotReady, r.State, r.Hint = "waiting: it is down", "waiting", "start it"
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		_ = json.NewEncoder(w).Encode(r)
	}))
	defer srv.Close()
	addr := strings.TrimPrefix(srv.URL, "http://")
	nobody := fmt.Sprintf("127.0.0.1:%d", closedPort(t))
	env := []string{"WALRELAY_DSN=postgres://u:hunter2@" + nobody + "/d", "NATS_URL=nats://u:hunter2@" + nobody}

	walrelay(t, env, "status", "--http-addr", addr).want(t, exitOK, "leader, streaming", "ORDERS", "not read: ")
	o := walrelay(t, env, "status", "--http-addr", addr, "-o", "json")
	var s status
	if err := json.Unmarshal([]byte(o.out), &s); err != nil || !s.Healthy || s.Role != roleLeader || s.Slot != "orders" || *s.EventsPerSecond != 1234 {
		t.Errorf("%v: %s", err, o.out)
	}
	ready.Store(false)
	walrelay(t, env, "status", "--http-addr", addr).want(t, exitPrecondition, "NOT HEALTHY", "not ready: waiting: it is down", "hint: start it")

	o = walrelay(t, env, "status", "--http-addr", nobody)
	o.want(t, exitPrecondition, "does not answer", "connection refused")
	if strings.Contains(o.out+o.err, "hunter2") {
		t.Errorf("a password is shown: %s%s", o.out, o.err)
	}
	walrelay(t, env, "status", "--interval", "1ms").want(t, exitUsage, "--interval")
}

func TestStatusWatchesUntilInterrupted(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(aStatus().Relay.Report)
	}))
	defer srv.Close()
	env := []string{"NATS_URL=nats://" + fmt.Sprintf("127.0.0.1:%d", closedPort(t)), "WALRELAY_DSN=" + fmt.Sprintf("host=127.0.0.1 port=%d", closedPort(t))}
	ctx, cancel := context.WithCancelCause(t.Context())
	told := &signalWriter{text: "healthy leader 1234 events/s lag 250ms 4.0 KiB\n", found: make(chan struct{})}
	done := make(chan int, 1)
	go func() {
		done <- execute(ctx, &process{
			args:    []string{"status", "--watch", "--interval", "100ms", "--http-addr", strings.TrimPrefix(srv.URL, "http://")},
			environ: env, in: strings.NewReader(""), out: told, err: &bytes.Buffer{},
		})
	}()
	<-told.found
	cancel(errSignal)
	if code := <-done; code != exitOK {
		t.Errorf("exit code %d", code)
	}
}
