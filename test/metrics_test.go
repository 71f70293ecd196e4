package test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/walrelay/walrelay/metrics"
	"github.com/walrelay/walrelay/test/harness"
)

// readyLimit is what README promises for a server that does not answer, with
// some room for a machine that is busy with other tests.
const readyLimit = 5*time.Second + 2*time.Second

// address is where a relay serves its metrics.
func address(t testing.TB, r *harness.Relay) string {
	t.Helper()
	line := r.MustAwait(t, 20*time.Second, "serving metrics and health")
	_, rest, _ := strings.Cut(line, "address=")
	addr, _, _ := strings.Cut(rest, " ")
	return "http://" + addr
}

func get(t testing.TB, url string) (int, string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// scraped are the samples of walrelay by their names without prefix, with the
// labels that are not constant.
type scraped map[string]float64

func scrape(t testing.TB, url string) scraped {
	t.Helper()
	code, body := get(t, url+"/metrics")
	if code != http.StatusOK {
		t.Fatalf("scrape: status %d: %s", code, body)
	}
	s := scraped{}
	for lines := bufio.NewScanner(strings.NewReader(body)); lines.Scan(); {
		name, ours := strings.CutPrefix(lines.Text(), "walrelay_")
		i := strings.LastIndexByte(name, ' ')
		if !ours || i < 0 {
			continue
		}
		v, err := strconv.ParseFloat(name[i+1:], 64)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		name, labels, _ := strings.Cut(strings.TrimSuffix(name[:i], "}"), "{")
		own := slices.DeleteFunc(strings.Split(labels, ","), func(l string) bool {
			return l == `database="postgres"` || l == `slot_name="`+slot+`"`
		})
		if len(own) > 0 {
			name += "{" + strings.Join(own, ",") + "}"
		}
		s[name] = v
	}
	return s
}

// lag is the lag in seconds, on whatever basis; -1 when none is told.
func (s scraped) lag() float64 {
	for _, basis := range []string{"event", "wal"} {
		if v, ok := s[`replication_lag_seconds{basis="`+basis+`"}`]; ok {
			return v
		}
	}
	return -1
}

func (s scraped) want(t testing.TB, name string, want float64) {
	t.Helper()
	if got, ok := s[name]; !ok || got != want {
		t.Errorf("%s: got %g, %t, want %g", name, got, ok, want)
	}
}

func (s scraped) wantNone(t testing.TB, names ...string) {
	t.Helper()
	for _, name := range names {
		if got, ok := s[name]; ok {
			t.Errorf("%s: got %g, want none", name, got)
		}
	}
}

// reporting is the JSON of a health path.
func reporting(t testing.TB, url string) (code int, r metrics.Report) {
	t.Helper()
	code, body := get(t, url+"/readyz?verbose")
	if err := json.Unmarshal([]byte(body), &r); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return code, r
}

func isReady(t testing.TB, url string) bool {
	t.Helper()
	code, _ := get(t, url+"/readyz")
	return code == http.StatusOK
}

func isLive(t testing.TB, url string) {
	t.Helper()
	if code, body := get(t, url+"/livez"); code != http.StatusOK {
		t.Errorf("not live: %s", body)
	}
}

var serving = []string{"--http-addr", "127.0.0.1:0"}

func TestMetricsRightAfterALoad(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: serving})
	r.relay.MustStart(t)
	url := address(t, r.relay)
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 4, Seed: 61})
	if err := ws.Run(t.Context(), 5_000); err != nil {
		t.Fatal(err)
	}
	res := r.drained(ws, time.Minute)
	n := float64(res.Stored)
	var s scraped
	r.await(10*time.Second, "every ack is counted, and the slot was read since", func() bool {
		s = scrape(t, url)
		return s["events_published_total"] == n && s["slot_active"] == 1
	})
	s.want(t, "events_published_total", n)
	s.want(t, "inflight_events", 0)
	s.want(t, `replication_lag_seconds{basis="event"}`, 0)
	s.want(t, `up{side="postgres"}`, 1)
	s.want(t, `up{side="nats"}`, 1)
	s.want(t, "leader", 1)
	s.want(t, `state{state="streaming"}`, 1)
	s.want(t, `slot_wal_status{status="reserved"}`, 1)
	s.want(t, "publish_duplicates_total", 0)
	s.want(t, `reconnects_total{side="nats"}`, 0)
	s.want(t, "delivery_lag_seconds_count", n)
	s.want(t, "publish_ack_seconds_count", n)
	s.wantNone(t, "slot_safe_wal_bytes") // there is no limit
	commit, ack := s["delivery_lag_seconds_sum"]/n, s["publish_ack_seconds_sum"]/n
	t.Logf("mean %.2f ms from commit to ack, %.2f ms from send to ack", commit*1e3, ack*1e3)
	if commit < ack || ack <= 0 || commit > 10 {
		t.Errorf("mean %g s from commit to ack, %g s from send to ack", commit, ack)
	}
	// Idle, everything is confirmed.
	r.await(10*time.Second, "a lag of 0 bytes", func() bool { return scrape(t, url)["replication_lag_bytes"] == 0 })
	s = scrape(t, url)
	if s["received_lsn"] < s["confirmed_flush_lsn"] || s["confirmed_flush_lsn"] == 0 {
		t.Errorf("received up to %g, confirmed up to %g", s["received_lsn"], s["confirmed_flush_lsn"])
	}
	if !isReady(t, url) {
		t.Error("not ready")
	}
	isLive(t, url)

	// A scrape asks Postgres nothing, and takes little.
	queries := func() int64 {
		return query[int64](r, "select count(*) from pg_stat_activity where application_name = 'walrelay' and backend_type = 'client backend'")
	}
	if n := queries(); n != 3 { // the sampler, the watcher of the shutdown, and the watch over the publications
		t.Errorf("%d ordinary connections, want 3", n)
	}
	var took []time.Duration
	for range 50 {
		began := time.Now()
		get(t, url+"/metrics")
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	t.Logf("scrape: p50 %s, p90 %s", took[25], took[45])

	// The log level while it runs.
	must(t, r.relay.Signal(syscall.SIGUSR1))
	r.relay.MustAwait(t, 10*time.Second, "to=debug")
	must(t, r.relay.Signal(syscall.SIGUSR1))
	r.relay.MustAwait(t, 10*time.Second, "to=info")

	// A second relay stands by, is ready, and takes over.
	second := harness.NewRelay(t, r.relay.Args...)
	second.MustStart(t)
	other := address(t, second)
	r.await(20*time.Second, "the second relay is ready", func() bool { return isReady(t, other) })
	s = scrape(t, other)
	s.want(t, "leader", 0)
	s.want(t, `state{state="standby"}`, 1)
	s.want(t, `reconnects_total{side="postgres"}`, 0)
	if _, rep := reporting(t, other); rep.State != "standby" || !rep.Live || rep.Error == "" || !rep.Postgres.SlotActive {
		t.Errorf("report of the standby: %+v", rep)
	}
	if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d after SIGTERM, want 0", code)
	}
	r.await(20*time.Second, "the second relay leads", func() bool { return scrape(t, other)["leader"] == 1 })
	if !isReady(t, other) {
		t.Error("the new leader is not ready")
	}
}

// grows watches the lag for a while: it is there at every look, and never falls.
func (r *rig) grows(url string, d time.Duration) {
	r.t.Helper()
	began := time.Now()
	last := scrape(r.t, url).lag()
	first := last
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for time.Since(began) < d {
		<-tick.C
		now := scrape(r.t, url).lag()
		// From one basis to the other it may shrink by what lies between two samples.
		if now < last-1.5 {
			r.t.Errorf("after %s the lag fell from %.2f s to %.2f s", time.Since(began).Round(time.Millisecond), last, now)
		}
		last = now
		isLive(r.t, url)
	}
	if grown := last - first; grown < d.Seconds()-2.5 {
		r.t.Errorf("in %s the lag grew by %.2f s, from %.2f s", d, grown, first)
	}
}

func (r *rig) insert(n int) {
	r.t.Helper()
	r.exec(fmt.Sprintf(`insert into outbox (id, aggregate_type, aggregate_id, event_type, payload)
		select gen_random_uuid(), 'order', i::text, 'paid', '{}' from generate_series(1, %d) i`, n))
}

func (r *rig) caughtUp(url string) {
	r.t.Helper()
	r.await(40*time.Second, "no lag, and ready", func() bool {
		s := scrape(r.t, url)
		return s.lag() == 0 && s["leader"] == 1 && s["replication_lag_bytes"] == 0 && isReady(r.t, url)
	})
}

func TestLagGrowsWhileTheBrokerIsFrozen(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: append(serving, "--backoff-max", "2s")})
	r.relay.MustStart(t)
	url := address(t, r.relay)
	r.insert(10)
	r.stored(10, 20*time.Second)
	r.caughtUp(url)

	// Idle: only the missing answers to PING can tell.
	r.nats.Freeze()
	frozen := time.Now()
	r.await(readyLimit, "not ready", func() bool { return !isReady(t, url) })
	t.Logf("idle: not ready %s after the freeze", time.Since(frozen).Round(time.Millisecond))
	scrape(t, url).want(t, `up{side="nats"}`, 0)
	isLive(t, url)
	r.nats.Thaw()
	r.caughtUp(url)

	r.nats.Freeze()
	frozen = time.Now()
	r.insert(100)
	r.grows(url, 3*time.Second)
	r.await(max(readyLimit-time.Since(frozen), 0)+100*time.Millisecond, "not ready", func() bool { return !isReady(t, url) })
	r.grows(url, 8*time.Second)
	s := scrape(t, url)
	s.want(t, `up{side="nats"}`, 0)
	s.want(t, `up{side="postgres"}`, 1)
	s.want(t, "leader", 0)
	s.want(t, `publish_errors_total{reason="ack_timeout"}`, 1)
	if code, rep := reporting(t, url); code != http.StatusServiceUnavailable || rep.State != "waiting" || rep.Side != "nats" || rep.Error == "" || !rep.Live {
		t.Errorf("report: %d %+v", code, rep)
	}
	if n := s["replication_lag_bytes"]; n < 5_000 {
		t.Errorf("a lag of %g bytes with 100 events waiting", n)
	}
	r.nats.Thaw()
	r.stored(110, 40*time.Second)
	r.caughtUp(url)
	scrape(t, url).want(t, `up{side="nats"}`, 1)
}

func TestSidesGoDownAndComeBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: append(serving, "--backoff-max", "2s")})
	r.relay.MustStart(t)
	url := address(t, r.relay)
	r.caughtUp(url)

	must(t, r.nats.Kill())
	r.await(readyLimit, "not ready", func() bool { return !isReady(t, url) })
	r.insert(100)
	r.await(5*time.Second, "some lag", func() bool { return scrape(t, url).lag() > 0 })
	r.grows(url, 5*time.Second)
	s := scrape(t, url)
	s.want(t, `up{side="nats"}`, 0)
	s.want(t, "slot_active", 0)
	if s[`reconnects_total{side="nats"}`] < 1 || s["replication_lag_bytes"] < 5_000 {
		t.Errorf("%g reconnects, a lag of %g bytes", s[`reconnects_total{side="nats"}`], s["replication_lag_bytes"])
	}
	r.nats.MustStart(t)
	r.stored(100, 30*time.Second)
	r.caughtUp(url)
	scrape(t, url).want(t, "events_published_total", 100)

	gauges := []string{"replication_lag_bytes", "slot_active", "slot_retained_wal_bytes", "confirmed_flush_lsn", `slot_wal_status{status="reserved"}`}
	if _, err := r.pg.Stop(harness.Fast, 20*time.Second); err != nil {
		t.Fatal(err)
	}
	r.await(readyLimit, "Postgres is seen to be down", func() bool { return scrape(t, url)[`up{side="postgres"}`] == 0 && !isReady(t, url) })
	scrape(t, url).wantNone(t, gauges...)
	isLive(t, url)
	if _, rep := reporting(t, url); rep.Postgres.Up || rep.Postgres.Error == "" || rep.Side != "postgres" || rep.NATS.Up != nil {
		t.Errorf("report without Postgres: %+v", rep)
	}
	r.pg.MustStart(t)
	r.caughtUp(url)
	if n := scrape(t, url)[`reconnects_total{side="postgres"}`]; n < 1 {
		t.Errorf("%g reconnects to Postgres", n)
	}

	// Frozen, its connections look as they did before.
	r.pg.Freeze()
	frozen := time.Now()
	r.await(readyLimit, "Postgres is seen to be frozen", func() bool { return scrape(t, url)[`up{side="postgres"}`] == 0 && !isReady(t, url) })
	t.Logf("not ready %s after the freeze of Postgres", time.Since(frozen).Round(time.Millisecond))
	s = scrape(t, url)
	s.wantNone(t, gauges...)
	if lag := s.lag(); lag >= 0 {
		t.Errorf("a lag of %g s, which nobody can know", lag)
	}
	isLive(t, url)
	r.pg.Thaw()
	r.caughtUp(url)
}
