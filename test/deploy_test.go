package test

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

const rulesFolder = "../deploy/prometheus"

func readFile(t testing.TB, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// rule is one of a file of Prometheus rules.
type rule struct {
	Record, Alert, Expr, For string
	Labels, Annotations      map[string]string
}

func readRules(t testing.TB, name string) []rule {
	t.Helper()
	var file struct{ Groups []struct{ Rules []rule } }
	if err := yaml.Unmarshal([]byte(readFile(t, filepath.Join(rulesFolder, name))), &file); err != nil {
		t.Fatal(err)
	}
	var all []rule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) == 0 {
		t.Fatalf("%s has no rules", name)
	}
	return all
}

func TestRulesPassPromtool(t *testing.T) {
	t.Parallel()
	bin, err := harness.FindPrometheus(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"check", "rules", "--lint=all", "--lint-fatal", "recording.yml", "alerts.yml"},
		{"test", "rules", "rules_test.yml"},
	} {
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "promtool"), args...)
		cmd.Dir = rulesFolder
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	tests := readFile(t, filepath.Join(rulesFolder, "rules_test.yml"))
	for _, r := range readRules(t, "alerts.yml") {
		if !strings.Contains(tests, `alertname="`+r.Alert+`"`) {
			t.Errorf("%s: no test of promtool's sees it fire", r.Alert)
		}
	}
}

// Whoever is woken finds what to do, with a command to begin with.
func TestEveryAlertHasItsSectionOfTheRunbook(t *testing.T) {
	t.Parallel()
	sections := map[string]string{}
	for _, s := range strings.Split(readFile(t, "../docs/runbook.md"), "\n## ")[1:] {
		name, text, _ := strings.Cut(s, "\n")
		sections[name] = text
	}
	const page = "https://github.com/walrelay/walrelay/blob/main/docs/runbook.md#"
	command := regexp.MustCompile("(?s)```sh\n(walrelay|nats|psql) .+?```")
	for _, r := range readRules(t, "alerts.yml") {
		text, ok := sections[r.Alert]
		if !ok || !command.MatchString(text) {
			t.Errorf("%s: no section with a command", r.Alert)
		}
		delete(sections, r.Alert)
		if want := page + strings.ToLower(r.Alert); r.Annotations["runbook_url"] != want {
			t.Errorf("%s: runbook_url %q, want %q", r.Alert, r.Annotations["runbook_url"], want)
		}
		if s := r.Labels["severity"]; s != "page" && s != "ticket" || r.Annotations["summary"] == "" || r.Annotations["description"] == "" {
			t.Errorf("%s: severity %q, annotations %v", r.Alert, s, r.Annotations)
		}
	}
	for name := range sections {
		t.Errorf("the section %s is of no alert", name)
	}
	all := readFile(t, "../docs/runbook.md")
	for _, r := range event.Reasons {
		if !strings.Contains(all, "`"+string(r)+"`") {
			t.Errorf("the runbook says nothing of the reason %s", r)
		}
	}
	for _, link := range regexp.MustCompile(`\]\(#([a-z]+)\)`).FindAllStringSubmatch(all, -1) {
		if !slices.ContainsFunc(readRules(t, "alerts.yml"), func(r rule) bool { return strings.ToLower(r.Alert) == link[1] }) {
			t.Errorf("the runbook leads to #%s, where nothing is", link[1])
		}
	}
}

// dashboard is what is checked of Grafana's model of a dashboard.
type dashboard struct {
	UID           string
	Title         string
	SchemaVersion int
	Templating    struct {
		List []struct {
			Name, Type string
			Query      json.RawMessage
		}
	}
	Annotations struct {
		List []struct{ Name, Expr string }
	}
	Panels []dashPanel
}

type dashPanel struct {
	ID                       int
	Type, Title, Description string
	Datasource               struct{ Type, UID string }
	GridPos                  struct{ X, Y, W, H int }
	FieldConfig              struct {
		Defaults struct{ Unit string }
	}
	Targets []struct {
		Expr, RefID, LegendFormat string
		Datasource                struct{ Type, UID string }
	}
}

func readDashboard(t testing.TB) dashboard {
	t.Helper()
	var d dashboard
	if err := json.Unmarshal([]byte(readFile(t, "../deploy/grafana/walrelay.json")), &d); err != nil {
		t.Fatal(err)
	}
	return d
}

// Panel types and units of Grafana from 10 on. graph, singlestat, table-old and
// worldmap were taken away with Angular.
var (
	panelTypes = []string{"row", "stat", "timeseries", "state-timeline", "table"}
	panelUnits = []string{"short", "s", "bytes", "Bps", "cps"}
)

func TestDashboardIsWhole(t *testing.T) {
	t.Parallel()
	d := readDashboard(t)
	if d.UID != "walrelay" || d.Title == "" || d.SchemaVersion < 39 || len(d.Panels) == 0 {
		t.Errorf("uid %q, title %q, schema version %d, %d panels", d.UID, d.Title, d.SchemaVersion, len(d.Panels))
	}
	known := map[string]bool{"__rate_interval": true, "__range": true}
	for _, v := range d.Templating.List {
		known[v.Name] = true
		if !slices.Contains([]string{"datasource", "query"}, v.Type) || len(v.Query) == 0 {
			t.Errorf("variable %s: type %q", v.Name, v.Type)
		}
	}
	variable := regexp.MustCompile(`\$\{?(\w+)`)
	taken := map[[2]int]string{}
	ids := map[int]bool{}
	for _, p := range d.Panels {
		if p.ID == 0 || ids[p.ID] {
			t.Errorf("%s: id %d is none, or there twice", p.Title, p.ID)
		}
		ids[p.ID] = true
		if !slices.Contains(panelTypes, p.Type) {
			t.Errorf("%s: type %q", p.Title, p.Type)
		}
		g := p.GridPos
		if p.Title == "" || g.W < 1 || g.H < 1 || g.X < 0 || g.X+g.W > 24 {
			t.Errorf("%q lies at %+v", p.Title, g)
		}
		for x := g.X; x < g.X+g.W; x++ {
			for y := g.Y; y < g.Y+g.H; y++ {
				if other, ok := taken[[2]int{x, y}]; ok {
					t.Fatalf("%s lies on %s", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || !slices.Contains(panelUnits, p.FieldConfig.Defaults.Unit) || len(p.Targets) == 0 {
			t.Errorf("%s: description %q, unit %q, %d queries", p.Title, p.Description, p.FieldConfig.Defaults.Unit, len(p.Targets))
		}
		if p.Datasource.Type != "prometheus" || p.Datasource.UID != "${datasource}" {
			t.Errorf("%s: data source %+v", p.Title, p.Datasource)
		}
		refs := map[string]bool{}
		for _, q := range p.Targets {
			if q.RefID == "" || refs[q.RefID] || q.Expr == "" || q.Datasource != p.Datasource {
				t.Errorf("%s: query %+v", p.Title, q)
			}
			refs[q.RefID] = true
			for _, v := range variable.FindAllStringSubmatch(q.Expr, -1) {
				if !known[v[1]] {
					t.Errorf("%s: nobody knows $%s", p.Title, v[1])
				}
			}
		}
	}
}

// sixtieth makes minutes of a file of rules seconds: for and the ranges change,
// so that what takes an hour shows in a minute, and no threshold does.
func sixtieth(text string) string {
	return regexp.MustCompile(`(\[|for: )(\d+)([mhd])\b`).ReplaceAllStringFunc(text, func(s string) string {
		m := regexp.MustCompile(`^(\[|for: )(\d+)(.)$`).FindStringSubmatch(s)
		n, _ := strconv.Atoi(m[2])
		return m[1] + strconv.Itoa(n*map[string]int{"m": 1, "h": 60, "d": 24 * 60}[m[3]]) + "s"
	})
}

// post is a Prometheus with the shipped rules, sixty times as fast.
type post struct {
	*rig
	prom  *harness.Prometheus
	phase string
	began time.Time
}

func (p *post) query(expr string) []harness.Series {
	p.t.Helper()
	all, err := p.prom.Query(p.t.Context(), expr)
	if err != nil {
		p.t.Fatal(err)
	}
	return all
}

// firing are the names of the alerts that fire, or did within a time.
func (p *post) firing(within time.Duration) []string {
	p.t.Helper()
	expr := `ALERTS{alertstate="firing"}`
	if within > 0 {
		expr = fmt.Sprintf("max_over_time(%s[%dms])", expr, within.Milliseconds())
	}
	names := map[string]bool{}
	for _, s := range p.query(expr) {
		names[s.Labels["alertname"]] = true
	}
	return slices.Sorted(maps.Keys(names))
}

func (p *post) fires(name string) {
	p.t.Helper()
	p.await(40*time.Second, name+" fires", func() bool { return slices.Contains(p.firing(0), name) })
	p.t.Logf("%s: %s fires after %s", p.phase, name, time.Since(p.began).Round(100*time.Millisecond))
	alerts, err := p.prom.Alerts(p.t.Context())
	if err != nil {
		p.t.Fatal(err)
	}
	for _, a := range alerts {
		for key, text := range a.Annotations {
			if strings.Contains(text, "error") || strings.Contains(text, "<no value>") || strings.Contains(text, "{{") {
				p.t.Errorf("%s: %s is %q", a.Labels["alertname"], key, text)
			}
		}
		if a.Labels["alertname"] == name && (!strings.Contains(a.Annotations["summary"], slot) || a.Labels["severity"] == "") {
			p.t.Errorf("%s: %v %v", name, a.Labels, a.Annotations)
		}
	}
}

// quiet waits until nothing fires, and wants no others to have fired since the
// phase began. Then the next one begins.
func (p *post) quiet(next string, allowed ...string) {
	p.t.Helper()
	p.await(60*time.Second, "nothing fires after "+p.phase, func() bool { return len(p.firing(0)) == 0 })
	p.t.Logf("%s: quiet after %s", p.phase, time.Since(p.began).Round(100*time.Millisecond))
	for _, name := range p.firing(time.Since(p.began)) {
		if !slices.Contains(allowed, name) {
			p.t.Errorf("%s: %s fired, want none but %q", p.phase, name, allowed)
		}
	}
	p.phase, p.began = next, time.Now()
}

// passes lets Prometheus look for a while.
func (p *post) passes(d time.Duration) {
	p.t.Helper()
	until := time.Now().Add(d)
	p.await(d+10*time.Second, "time to pass", func() bool { return time.Now().After(until) })
}

func TestAlertsFireForTheRightThingOnly(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--backoff-max", "1s"}, prepare: func(r *rig) {
		r.exec("alter system set max_slot_wal_keep_size = '1GB'", "select pg_reload_conf()")
	}})
	var targets []string
	var relays []*harness.Relay
	for range 2 { // each on a port of its own, that it finds again when it is restarted
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		relay := harness.NewRelay(t, append(slices.Clone(r.relay.Args), "--http-addr", addr)...)
		relay.MustStart(t)
		r.await(20*time.Second, "a relay that is ready", func() bool {
			conn, err := net.DialTimeout("tcp", addr, time.Second)
			if err != nil {
				return false
			}
			conn.Close()
			return isReady(t, "http://"+addr)
		})
		targets, relays = append(targets, addr), append(relays, relay)
	}
	p := &post{rig: r, phase: "idle", began: time.Now(), prom: harness.RunPrometheus(t, harness.PrometheusOptions{
		Targets: targets, Interval: time.Second, // also the timeout of a scrape, on a busy machine
		Rules: map[string]string{
			"recording": sixtieth(readFile(t, filepath.Join(rulesFolder, "recording.yml"))),
			"alerts":    sixtieth(readFile(t, filepath.Join(rulesFolder, "alerts.yml"))),
		},
	})}
	r.await(20*time.Second, "a leader and a standby are scraped", func() bool {
		return len(p.query("slot:walrelay_streaming:sum == 1 and slot:walrelay_standbys:sum == 1")) == 1
	})
	p.passes(8 * time.Second)
	p.quiet("busy")

	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 2, Seed: 71})
	if err := ws.Run(t.Context(), 25_000); err != nil {
		t.Fatal(err)
	}
	res := r.drained(ws, time.Minute)
	p.passes(5 * time.Second)
	if got := p.query("sum(walrelay_events_published_total)"); len(got) != 1 || got[0].Value != float64(res.Stored) {
		t.Errorf("Prometheus has %v events, the stream %d", got, res.Stored)
	}
	dashboardAnswers(t, p)
	p.quiet("broker down")

	must(t, r.nats.Kill())
	r.insert(20)
	p.fires("WalrelayNotStreaming")
	r.nats.MustStart(t)
	p.quiet("poison", "WalrelayNotStreaming", "WalrelaySlotInactive", "WalrelayNoStandby")

	r.exec(`insert into outbox (id, aggregate_type, aggregate_id, event_type, payload)
		values (gen_random_uuid(), 'order', '1', 'paid', to_jsonb(repeat('x', 2000000)))`)
	p.fires("WalrelayDeadLettersGrow")
	p.quiet("standby down", "WalrelayDeadLettersGrow")

	leads := func(i int) bool { return scrape(t, "http://"+targets[i])["leader"] == 1 }
	i := 0
	if leads(i) {
		i = 1
	}
	if code := relays[i].MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d of the standby", code)
	}
	p.fires("WalrelayNoStandby")
	relays[i].MustStart(t)
	p.quiet("", "WalrelayNoStandby")
}

// dashboardAnswers runs every query of the dashboard.
func dashboardAnswers(t *testing.T, p *post) {
	t.Helper()
	// What only trouble has.
	mayBeEmpty := []string{"Dead letters", "Publishing sessions that failed"}
	for _, panel := range readDashboard(t).Panels {
		for _, q := range panel.Targets {
			expr := strings.NewReplacer("$__rate_interval", "10s", "$__range", "1h", "$database", ".*", "$slot_name", ".*").Replace(q.Expr)
			if got := p.query(expr); len(got) == 0 && !slices.Contains(mayBeEmpty, panel.Title) {
				t.Errorf("%s: no answer to %s", panel.Title, expr)
			}
		}
	}
	for _, a := range readDashboard(t).Annotations.List {
		if a.Expr != "" {
			p.query(strings.NewReplacer("$database", ".*", "$slot_name", ".*").Replace(a.Expr))
		}
	}
}
