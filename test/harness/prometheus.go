package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// FindPrometheus returns the folder of prometheus and promtool: PROMBIN, or
// what tools/prometheus.sh finds or unpacks.
func FindPrometheus(ctx context.Context) (string, error) {
	bin, err := inRepo(ctx, "sh", filepath.Join("tools", "prometheus.sh"))
	if err != nil {
		return "", fmt.Errorf("find Prometheus: %w", err)
	}
	return bin, nil
}

// Prometheus is a server of its own on 127.0.0.1.
type Prometheus struct {
	Dir  string // holds the configuration, the rules, the log and the data
	Port int

	proc *process
}

// PrometheusOptions say what a server scrapes and which rules it has.
type PrometheusOptions struct {
	Targets  []string          // host:port
	Interval time.Duration     // of scrapes and evaluations
	Rules    map[string]string // files of rules, by name
}

// RunPrometheus makes and starts a server that ends with the test.
func RunPrometheus(t testing.TB, o PrometheusOptions) *Prometheus {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	p, err := startPrometheus(ctx, o)
	if p != nil {
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("log of Prometheus, last lines:\n%s", tail(p.Log(), 30))
			}
			if err := p.remove(); err != nil {
				t.Errorf("remove Prometheus: %v", err)
			}
		})
	}
	if err != nil {
		t.Fatalf("start Prometheus: %v", err)
	}
	return p
}

func startPrometheus(ctx context.Context, o PrometheusOptions) (*Prometheus, error) {
	bin, err := FindPrometheus(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := Folder("prometheus")
	if err != nil {
		return nil, err
	}
	p := &Prometheus{Dir: dir}
	if p.Port, err = FreePort(); err != nil {
		return p, err
	}
	var c strings.Builder
	fmt.Fprintf(&c, "global: {scrape_interval: %s, scrape_timeout: %s, evaluation_interval: %s}\nrule_files: ['*.rules.yml']\n", o.Interval, o.Interval, o.Interval)
	c.WriteString("scrape_configs:\n  - job_name: walrelay\n    static_configs:\n      - targets:\n")
	for _, target := range o.Targets {
		fmt.Fprintf(&c, "          - %s\n", target)
	}
	files := map[string]string{"prometheus.yml": c.String()}
	for name, text := range o.Rules {
		files[name+".rules.yml"] = text
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return p, fmt.Errorf("configure Prometheus: %w", err)
		}
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return p, fmt.Errorf("create log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(bin, "prometheus"),
		"--config.file="+filepath.Join(dir, "prometheus.yml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"),
		"--web.listen-address=127.0.0.1:"+strconv.Itoa(p.Port))
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	if p.proc, err = startProcess(cmd); err != nil {
		return p, err
	}
	err = until(ctx, 50*time.Millisecond, "Prometheus to be ready", func() bool {
		return p.proc.ended() || p.get(ctx, "/-/ready", nil) == nil
	})
	if err == nil && p.proc.ended() {
		err = errors.New("it has ended at once")
	}
	return p, err
}

// Log is the server's log so far.
func (p *Prometheus) Log() string {
	b, _ := os.ReadFile(filepath.Join(p.Dir, "log"))
	return string(b)
}

func (p *Prometheus) remove() error {
	if !p.proc.ended() {
		_ = p.proc.signal(syscall.SIGTERM)
		if _, err := p.proc.waitFor(10 * time.Second); err != nil {
			if err := p.proc.kill(); err != nil {
				return err
			}
		}
	}
	return os.RemoveAll(p.Dir)
}

// get reads one of the server's HTTP endpoints; out may be nil.
func (p *Prometheus) get(ctx context.Context, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:"+strconv.Itoa(p.Port)+path, http.NoBody)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %d: %s", resp.StatusCode, b)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(b, out)
}

// Series is one result of a query.
type Series struct {
	Labels map[string]string
	Value  float64
}

// Query evaluates an expression now. A scalar is one series without labels.
func (p *Prometheus) Query(ctx context.Context, expr string) ([]Series, error) {
	var answer struct {
		Data struct {
			ResultType string          `json:"resultType"`
			Result     json.RawMessage `json:"result"`
		} `json:"data"`
	}
	if err := p.get(ctx, "/api/v1/query?query="+url.QueryEscape(expr), &answer); err != nil {
		return nil, fmt.Errorf("query %s: %w", expr, err)
	}
	var rows []struct {
		Metric map[string]string `json:"metric"`
		Value  [2]any            `json:"value"` // time, and the value as text
	}
	if answer.Data.ResultType == "scalar" {
		rows = append(rows, struct {
			Metric map[string]string `json:"metric"`
			Value  [2]any            `json:"value"`
		}{})
		if err := json.Unmarshal(answer.Data.Result, &rows[0].Value); err != nil {
			return nil, fmt.Errorf("query %s: %w", expr, err)
		}
	} else if err := json.Unmarshal(answer.Data.Result, &rows); err != nil {
		return nil, fmt.Errorf("query %s: %w", expr, err)
	}
	var all []Series
	for _, r := range rows {
		text, _ := r.Value[1].(string)
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return nil, fmt.Errorf("query %s: %w", expr, err)
		}
		all = append(all, Series{r.Metric, v})
	}
	return all, nil
}

// Alert is one that is pending or firing.
type Alert struct {
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	State       string            `json:"state"`
}

// Alerts are those that are pending or firing now.
func (p *Prometheus) Alerts(ctx context.Context) ([]Alert, error) {
	var answer struct {
		Data struct {
			Alerts []Alert `json:"alerts"`
		} `json:"data"`
	}
	if err := p.get(ctx, "/api/v1/alerts", &answer); err != nil {
		return nil, fmt.Errorf("read alerts: %w", err)
	}
	return answer.Data.Alerts, nil
}
