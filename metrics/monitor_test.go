package metrics

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	dto "github.com/prometheus/client_model/go"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/relay"
)

var errTest = event.Fail(event.Transient, "start it", "connection refused")

// bench is a Monitor whose clock is that of a synctest bubble.
type bench struct {
	*testing.T
	*Monitor
	inFlight uint64
	oldest   time.Time
	how      Publishing
}

func newBench(t *testing.T) *bench {
	b := &bench{T: t}
	b.Monitor = New(Options{
		Slot: "orders", Database: "shop", Stream: "ORDERS", Version: "v1", Commit: "abc",
		InFlight:   func() (uint64, time.Time) { return b.inFlight, b.oldest },
		Publishing: func() Publishing { return b.how },
		Failures:   []string{"ack_timeout", "connection"},
		Skipped:    func() map[string]uint64 { return map[string]uint64{"stream_abort": 1, "update": 0} },
	})
	return b
}

func bubble(t *testing.T, f func(b *bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { f(newBench(t)) })
}

func (b *bench) pass(d time.Duration) { <-time.After(d) }

// gather is what a scrape gets, by name.
func (b *bench) gather() map[string]*dto.MetricFamily {
	b.Helper()
	families, err := b.Registry().Gather()
	if err != nil {
		b.Fatal(err)
	}
	all := map[string]*dto.MetricFamily{}
	for _, f := range families {
		all[f.GetName()] = f
	}
	return all
}

// value finds a metric by name and, when it has one of its own, the value of its label.
func (b *bench) value(name, label string) (float64, bool) {
	b.Helper()
	f := b.gather()["walrelay_"+name]
	for _, m := range f.GetMetric() {
		match := label == ""
		for _, l := range m.Label {
			match = match || l.GetValue() == label
		}
		if match {
			if c := m.GetCounter(); c != nil {
				return c.GetValue(), true
			}
			return m.GetGauge().GetValue(), true
		}
	}
	return 0, false
}

func (b *bench) want(name, label string, want float64) {
	b.Helper()
	if got, ok := b.value(name, label); !ok || got != want {
		b.Errorf("%s{%s}: got %g, %t, want %g", name, label, got, ok, want)
	}
}

func (b *bench) wantNone(name, label string) {
	b.Helper()
	if got, ok := b.value(name, label); ok {
		b.Errorf("%s{%s}: got %g, want none", name, label, got)
	}
}

func (b *bench) sample(end, confirmed event.LSN) {
	b.Sampled(Sample{
		At: time.Now(), WALEnd: end, Confirmed: confirmed, LagBytes: int64(end - confirmed), RetainedBytes: int64(end),
		Active: true, WALStatus: "reserved",
	}, nil)
}

// streams lets the relay be where everything is fine, with every metric there is.
func (b *bench) streams() {
	b.Entered(relay.Status{State: relay.Connecting, Trying: true})
	b.Entered(relay.Status{State: relay.Streaming})
	b.Ticked(relay.Tick{Activity: relay.Reading, Received: 1000, Recorded: 1000})
	b.sample(1000, 1000)
}

// The golden file is what operators build dashboards on. With GOLDEN=write it is written.
func TestNamesHelpAndLabels(t *testing.T) {
	b := newBench(t)
	b.streams()
	safe := int64(5)
	b.how = Publishing{Mode: "chain", Window: 2048}
	b.Sampled(Sample{At: time.Now(), WALEnd: 1, SafeBytes: &safe, WALStatus: "reserved"}, nil)
	b.Acked(1, time.Millisecond, time.Microsecond)
	b.Rest()
	var out strings.Builder
	families, err := b.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if !strings.HasPrefix(f.GetName(), "walrelay_") {
			continue
		}
		fmt.Fprintf(&out, "%s %s\n  %s\n", f.GetName(), strings.ToLower(f.GetType().String()), f.GetHelp())
		labels := map[string][]string{}
		for _, m := range f.Metric {
			for _, l := range m.Label {
				switch {
				case l.GetName() == "goversion":
				case !slices.Contains(labels[l.GetName()], l.GetValue()):
					labels[l.GetName()] = append(labels[l.GetName()], l.GetValue())
				}
			}
		}
		if !slices.Equal(labels["slot_name"], []string{"orders"}) || !slices.Equal(labels["database"], []string{"shop"}) {
			t.Errorf("%s: constant labels are %v", f.GetName(), labels)
		}
		for _, l := range f.Metric[0].Label {
			if name := l.GetName(); name != "slot_name" && name != "database" {
				fmt.Fprintf(&out, "  %s: %s\n", name, strings.Join(labels[name], ", "))
			}
		}
	}
	const file = "testdata/metrics.txt"
	if os.Getenv("GOLDEN") == "write" {
		if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestLinter(t *testing.T) {
	b := newBench(t)
	b.streams()
	families, err := b.Registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	families = slices.DeleteFunc(families, func(f *dto.MetricFamily) bool { return !strings.HasPrefix(f.GetName(), "walrelay_") })
	if len(families) < 19 {
		t.Errorf("only %d families", len(families))
	}
	problems, err := promlint.NewWithMetricFamilies(families).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestLagWhileStreaming(t *testing.T) {
	bubble(t, func(b *bench) {
		b.streams()
		b.want("replication_lag_seconds", "event", 0)
		b.want("replication_lag_bytes", "", 0)
		b.want("received_lsn", "", 1000)

		// The publisher hangs: the age of the oldest event grows without anybody telling anything.
		b.inFlight, b.oldest = 3, time.Now().Add(-time.Second)
		b.pass(4 * time.Second)
		b.want("replication_lag_seconds", "event", 5)
		b.wantNone("replication_lag_seconds", "wal")

		// Also without Postgres, whose gauges are gone then.
		b.pass(2 * time.Second)
		b.want("replication_lag_seconds", "event", 7)
		b.wantNone("replication_lag_bytes", "")
		b.want("up", "postgres", 0)

		// Nothing in flight, and nobody knows.
		b.inFlight = 0
		b.wantNone("replication_lag_seconds", "event")
		b.sample(1000, 1000)
		b.want("replication_lag_seconds", "event", 0)

		// A clock that is behind that of Postgres.
		b.inFlight, b.oldest = 1, time.Now().Add(time.Minute)
		b.want("replication_lag_seconds", "event", 0)
		b.oldest = time.Time{}
		b.want("replication_lag_seconds", "event", 0)
	})
}

// The session is there, but the log does not come.
func TestLagWhileNothingIsReceived(t *testing.T) {
	bubble(t, func(b *bench) {
		b.streams()
		for range 5 {
			b.pass(time.Second)
			b.sample(2000, 1000)
			b.want("replication_lag_seconds", "event", 0)
		}
		b.pass(2 * time.Second)
		b.sample(3000, 1000)
		b.want("replication_lag_seconds", "wal", 6)
		b.Ticked(relay.Tick{Activity: relay.Reading, Received: 2500, Recorded: 1000})
		b.want("replication_lag_seconds", "event", 0)
	})
}

func TestLagWhileNotStreaming(t *testing.T) {
	bubble(t, func(b *bench) {
		b.streams()
		b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest})
		b.sample(1000, 1000)
		b.want("replication_lag_seconds", "wal", 0)
		b.wantNone("received_lsn", "")

		b.pass(time.Second)
		b.sample(1500, 1000)
		for i := range 3 {
			b.pass(time.Second)
			b.sample(event.LSN(2000+100*i), 1000)
		}
		b.want("replication_lag_seconds", "wal", 3)
		b.want("replication_lag_bytes", "", 1200)
		b.pass(2 * time.Second) // between two samples it grows, too
		b.want("replication_lag_seconds", "wal", 5)

		// Part of it is confirmed: the next mark counts.
		b.sample(2200, 1500)
		b.want("replication_lag_seconds", "wal", 4)

		// A failed read shows as such, never as the old value.
		b.Sampled(Sample{}, errTest)
		b.wantNone("replication_lag_seconds", "wal")
		b.wantNone("replication_lag_bytes", "")
		b.wantNone("slot_retained_wal_bytes", "")
		b.wantNone("slot_wal_status", "reserved")
		b.wantNone("confirmed_flush_lsn", "")
		b.want("up", "postgres", 0)
		b.pass(10 * time.Second)
		b.sample(2200, 1500)
		b.want("replication_lag_seconds", "wal", 14)
		b.want("up", "postgres", 1)
		b.sample(2200, 2200)
		b.want("replication_lag_seconds", "wal", 0)

		// A sampler that has died shows, too.
		b.pass(sampleLimit + 1)
		b.want("up", "postgres", 0)
		b.wantNone("replication_lag_bytes", "")
	})
}

// With a confirm delay the slot is behind what is stored and recorded.
func TestLagDoesNotCountTheConfirmDelay(t *testing.T) {
	bubble(t, func(b *bench) {
		b.streams()
		for i := range 100 {
			b.pass(time.Second)
			b.sample(event.LSN(2000+i), 1000)
			b.Ticked(relay.Tick{Activity: relay.Reading, Received: event.LSN(2000 + i), Recorded: event.LSN(2000 + i)})
		}
		b.want("replication_lag_seconds", "event", 0)
		b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest})
		b.want("replication_lag_seconds", "wal", 0)
		b.Entered(relay.Status{State: relay.Streaming})
		b.want("replication_lag_seconds", "event", 0)
		b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest})
		b.sample(3000, 1000)
		b.pass(2 * time.Second)
		b.want("replication_lag_seconds", "wal", 2)
		// Another server, whose log is shorter: what was recorded says nothing of it.
		b.sample(1800, 1500)
		b.pass(time.Second)
		b.want("replication_lag_seconds", "wal", 1)
	})
}

func TestHistoryIsBoundedAndNeverTooYoung(t *testing.T) {
	var h history
	began := time.Unix(0, 0)
	at := func(i int) time.Time { return began.Add(time.Duration(i) * time.Second) }
	const n = 100_000
	for i := 1; i <= n; i++ {
		h.add(at(i), event.LSN(i), 0)
		h.add(at(i), event.LSN(i), 0)
		if len(h.marks) > historyLimit {
			t.Fatalf("%d marks", len(h.marks))
		}
	}
	for lsn := range n - 1 {
		if since := h.since(event.LSN(lsn)); since.After(at(lsn + 1)) {
			t.Fatalf("log after %d: since %v, it was there at %v", lsn, since, at(lsn+1))
		}
	}
	if !h.since(n).IsZero() {
		t.Error("something is after the end")
	}
	h.add(at(n+1), n+1, n)
	if len(h.marks) != 1 {
		t.Errorf("%d marks after everything was done", len(h.marks))
	}
}

func TestCounters(t *testing.T) {
	b := newBench(t)
	b.want("publish_errors_total", "connection", 0)
	b.want("dead_letters_total", "too_large", 0)
	b.want("reconnects_total", "nats", 0)
	b.wantNone("publish_errors_total", other)
	b.Monitor.Failed("connection", false)
	b.Monitor.Failed("duplicate", true)
	b.Monitor.Failed("who knows", false)
	b.want("publish_errors_total", "connection", 1)
	b.want("publish_errors_total", other, 2)
	b.want("publish_duplicates_total", "", 1)
	b.Parked(event.ReasonTooLarge)
	b.Parked("new")
	b.want("dead_letters_total", "too_large", 1)
	b.want("dead_letters_total", other, 1)
	b.want("replays_refused_total", "replayed", 0)
	b.Refused(event.ReasonReplayed)
	b.want("replays_refused_total", "replayed", 1)
	b.Acked(7, time.Second, time.Millisecond)
	b.Acked(2, -1, time.Millisecond)
	b.want("events_published_total", "", 0)
	b.Rest()
	b.want("events_published_total", "", 9)
	h := b.gather()["walrelay_delivery_lag_seconds"].Metric[0].Histogram
	if h.GetSampleCount() != 7 || h.GetSampleSum() != 7 || len(h.PositiveSpan) == 0 || len(h.Bucket) != len(bounds) {
		t.Errorf("got %v", h)
	}

	// A lost session is told early, and again with the pause; tries and standby count nothing.
	lost := relay.Status{State: relay.Waiting, Side: "nats", Err: errTest}
	b.Entered(lost)
	b.want("reconnects_total", "nats", 0)
	lost.Pause = time.Second
	b.Entered(lost)
	b.want("reconnects_total", "nats", 1)
	lost.Pause, lost.Trying = 0, true
	b.Entered(lost)
	b.Entered(relay.Status{State: relay.Standby, Side: "postgres", Err: errTest, Pause: time.Second})
	b.want("reconnects_total", "nats", 1)
	b.want("reconnects_total", "postgres", 0)
}

func TestLeaderStateAndSides(t *testing.T) {
	b := newBench(t)
	b.wantNone("up", "nats")
	b.want("up", "postgres", 0)
	b.want("state", "connecting", 1)
	b.streams()
	b.want("up", "nats", 1)
	b.want("up", "postgres", 1)
	b.want("leader", "", 1)
	b.want("state", "connecting", 0)
	b.want("state", "streaming", 1)
	b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest})
	b.want("up", "nats", 0)
	b.want("leader", "", 0)
	b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest, Trying: true})
	b.want("up", "nats", 0)
	b.Entered(relay.Status{State: relay.Waiting, Side: "postgres", Err: errTest})
	b.wantNone("up", "nats")
	b.Entered(relay.Status{State: relay.Standby, Side: "postgres", Err: errTest})
	b.wantNone("up", "nats")
	b.want("state", "standby", 1)
	b.Entered(relay.Status{State: relay.Streaming})
	b.Entered(relay.Status{State: relay.Draining})
	b.want("leader", "", 1)
	b.Entered(relay.Status{State: relay.Stopped})
	b.want("leader", "", 0)
}

// get asks the handler.
func (b *bench) get(path string, accept string) (int, string) {
	b.Helper()
	r := httptest.NewRequest(http.MethodGet, path, nil)
	if accept != "" {
		r.Header.Set("Accept", accept)
	}
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func (b *bench) wantHealth(path string, code int, text string) {
	b.Helper()
	if got, body := b.get(path, ""); got != code || !strings.Contains(body, text) {
		b.Errorf("%s: got %d %q, want %d %q", path, got, body, code, text)
	}
}

func TestReady(t *testing.T) {
	bubble(t, func(b *bench) {
		b.wantHealth("/readyz", 503, "connecting")
		b.Entered(relay.Status{State: relay.Connecting, Trying: true})
		b.Entered(relay.Status{State: relay.Streaming})
		b.wantHealth("/readyz", 503, "Postgres does not answer")
		b.sample(1, 1)
		b.wantHealth("/readyz", 200, "ok")
		b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest})
		b.wantHealth("/readyz", 503, "waiting: connection refused")
		standby := relay.Status{State: relay.Standby, Side: "postgres", Err: errors.New("slot is active"), Pause: time.Second}
		b.Entered(standby)
		b.wantHealth("/readyz", 200, "ok")
		standby.Trying = true
		b.Entered(standby)
		b.wantHealth("/readyz", 200, "ok")
		b.Sampled(Sample{}, errors.New("timeout"))
		b.wantHealth("/readyz", 503, "timeout")
		b.sample(1, 1)
		b.wantHealth("/readyz", 200, "ok")
		b.pass(b.ReadyLimit() + 1)
		b.wantHealth("/readyz", 503, "Postgres does not answer")
		b.sample(1, 1)
		b.Entered(relay.Status{State: relay.Draining})
		b.wantHealth("/readyz", 503, "draining")
	})
}

func TestReportAsJSON(t *testing.T) {
	bubble(t, func(b *bench) {
		b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest})
		for _, ask := range []struct{ path, accept string }{{"/readyz?verbose", ""}, {"/livez", "application/json"}} {
			code, body := b.get(ask.path, ask.accept)
			var r Report
			dec := json.NewDecoder(bytes.NewBufferString(body))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&r); err != nil {
				t.Fatalf("%v: %s", err, body)
			}
			if r.Live != true || r.Ready || r.State != "waiting" || r.Error != "connection refused" || r.Hint != "start it" || r.LagSeconds != nil || r.NATS.Up == nil || *r.NATS.Up {
				t.Errorf("got %d %s", code, body)
			}
			if want := map[string]int{"/readyz?verbose": 503, "/livez": 200}[ask.path]; code != want {
				t.Errorf("%s: got %d, want %d", ask.path, code, want)
			}
		}
		b.streams()
		if r := b.Report(); !r.Ready || r.LagSeconds == nil || *r.LagSeconds != 0 || r.LagBasis != "event" || r.Received != 1000 || !r.Postgres.Up || r.Postgres.WALStatus != "reserved" {
			t.Errorf("got %+v", r)
		}
	})
}

// tick lets the ticker say the same again and again.
func (b *bench) tick(n int, t relay.Tick) {
	for range n {
		b.pass(time.Second)
		b.Ticked(t)
	}
}

func TestLiveWhileThereIsProgressOrAReason(t *testing.T) {
	limit := newBench(t).stallLimit()
	n := int(limit/time.Second) + 5
	live := func(b *bench) {
		b.Helper()
		b.wantHealth("/livez", 200, "ok")
	}
	for name, f := range map[string]func(b *bench){
		"idle": func(b *bench) {
			b.tick(n, relay.Tick{Activity: relay.Reading, Received: 1000})
		},
		"slow broker": func(b *bench) {
			b.inFlight = 10
			for i := range n {
				b.tick(1, relay.Tick{Activity: relay.Settling, Settled: uint64(i / 10)})
			}
		},
		"catching up": func(b *bench) {
			for i := range n {
				b.tick(1, relay.Tick{Activity: relay.Working, Received: event.LSN(2000 + i)})
			}
		},
		"backing off": func(b *bench) {
			for range n {
				b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest, Pause: 2 * time.Second})
				b.pass(2 * time.Second)
				b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest, Trying: true})
				b.pass(10 * time.Second)
			}
		},
		"a long pause": func(b *bench) {
			b.Entered(relay.Status{State: relay.Waiting, Side: "nats", Err: errTest, Pause: time.Hour})
			b.pass(time.Hour)
		},
		"standby": func(b *bench) {
			for range n {
				b.Entered(relay.Status{State: relay.Standby, Side: "postgres", Err: errTest, Pause: time.Second})
				b.pass(time.Second)
				b.Entered(relay.Status{State: relay.Standby, Side: "postgres", Err: errTest, Trying: true})
			}
		},
		"stopped": func(b *bench) {
			b.Entered(relay.Status{State: relay.Stopped})
			b.pass(time.Hour)
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(b *bench) {
				b.streams()
				f(b)
				live(b)
			})
		})
	}
}

func TestNotLiveWithoutProgressOrReason(t *testing.T) {
	limit := newBench(t).stallLimit()
	n := int(limit / time.Second)
	for name, c := range map[string]struct {
		f    func(b *bench)
		then time.Duration
		text string
	}{
		"the loop does not come back": {
			f: func(b *bench) { b.tick(n, relay.Tick{Activity: relay.Working, Received: 1000}) }, then: 2 * time.Second,
			text: "the session has got nowhere for 37s, 0 events in flight, working",
		},
		"acks neither come nor are overdue": {
			f: func(b *bench) {
				b.inFlight = 7
				b.tick(n, relay.Tick{Activity: relay.Settling, Received: 1000})
			},
			then: 2 * time.Second, text: "7 events in flight, waiting for acks",
		},
		"reading with events in flight": {
			f: func(b *bench) {
				b.inFlight = 7
				b.tick(n, relay.Tick{Activity: relay.Reading, Received: 1000})
			},
			then: 2 * time.Second, text: "7 events in flight, reading",
		},
		"no ticks": {
			f:    func(b *bench) { b.pass(limit) },
			then: 2 * time.Second, text: "ticker has stood still",
		},
		"a try without end": {
			f: func(b *bench) {
				b.Entered(relay.Status{State: relay.Waiting, Err: errTest, Trying: true})
				b.pass(openLimit)
			},
			then: time.Second, text: "could not be opened",
		},
		"an end without end": {
			f: func(b *bench) {
				b.Entered(relay.Status{State: relay.Waiting, Err: errTest})
				b.pass(limit)
			},
			then: time.Second, text: "nothing was tried",
		},
		"a pause without end": {
			f: func(b *bench) {
				b.Entered(relay.Status{State: relay.Waiting, Err: errTest, Pause: time.Second})
				b.pass(limit + time.Second)
			},
			then: time.Second, text: "nothing was tried",
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(b *bench) {
				b.streams()
				c.f(b)
				b.wantHealth("/livez", 200, "ok")
				b.pass(c.then)
				if c.text != "ticker has stood still" && b.Report().State == "streaming" {
					b.Ticked(b.ticks.last)
				}
				b.wantHealth("/livez", 503, c.text)
			})
		})
	}
}

func TestPathsAndMethods(t *testing.T) {
	b := newBench(t)
	if code, _ := b.get("/", ""); code != 404 {
		t.Errorf("/: got %d", code)
	}
	if code, body := b.get("/metrics", ""); code != 200 || !strings.Contains(body, "walrelay_leader{") || !strings.Contains(body, "go_goroutines") || !strings.Contains(body, `le="0.0001"`) {
		t.Errorf("/metrics: got %d %s", code, body)
	}
	w := httptest.NewRecorder()
	b.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/readyz", nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST: got %d", w.Code)
	}
	// Native histograms need the other format.
	_, body := b.get("/metrics", "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited")
	if strings.Contains(body, "# HELP") {
		t.Error("got text where protobuf was asked for")
	}
}

func BenchmarkScrape(b *testing.B) {
	m := New(Options{Slot: "s", Database: "d", InFlight: func() (uint64, time.Time) { return 0, time.Time{} }})
	for i := range 1_000_000 {
		m.Acked(1, time.Duration(i)*time.Microsecond, time.Duration(i/10)*time.Microsecond)
	}
	m.Rest()
	h := m.Handler()
	for b.Loop() {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	}
}
