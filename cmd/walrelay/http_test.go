package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/publisher"
)

// record is a log that is read while it is written.
type record struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (r *record) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.Write(b)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.b.String()
}

// posted starts a watchpost whose servers do not exist, and returns its URL.
func posted(t *testing.T, edit func(*config.Config)) (url string, logs *record) {
	t.Helper()
	cfg := &config.Config{
		DSN:  config.NewSecret(fmt.Sprintf("host=127.0.0.1 port=%d user=u dbname=d", closedPort(t)), ""),
		Slot: "orders", HTTPAddr: "127.0.0.1:0", Stream: config.Stream{Name: "S"},
		StatusInterval: time.Second, AckTimeout: time.Second,
	}
	if edit != nil {
		edit(cfg)
	}
	pg, err := pgConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	logs = &record{}
	level := new(slog.LevelVar)
	log := slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: level}))
	w := newWatchpost(cfg, pg, newLevels(log, level), func() *publisher.Publisher { return new(publisher.Publisher) }, nil)
	stop, err := w.start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(logs.String(), "address=")
	address, _, _ := strings.Cut(rest, "\n")
	t.Cleanup(func() {
		stop()
		if c, err := net.Dial("tcp", address); err == nil {
			c.Close()
			t.Error("the address is still served")
		}
	})
	return "http://" + address, logs
}

func ask(t *testing.T, method, url, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
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

func TestProfilesOnlyWhenAsked(t *testing.T) {
	url, _ := posted(t, nil)
	if code, _ := ask(t, "GET", url+"/debug/pprof/", ""); code != 404 {
		t.Errorf("unasked: got %d", code)
	}
	if code, _ := ask(t, "GET", url+"/livez", ""); code != 200 {
		t.Errorf("livez: got %d", code)
	}
	if code, body := ask(t, "GET", url+"/metrics", ""); code != 200 || !strings.Contains(body, `walrelay_up{database="d",side="postgres",slot_name="orders"} 0`) {
		t.Errorf("metrics: got %d %s", code, body)
	}
	url, _ = posted(t, func(c *config.Config) { c.PProf = true })
	if code, body := ask(t, "GET", url+"/debug/pprof/", ""); code != 200 || !strings.Contains(body, "goroutine") {
		t.Errorf("asked: got %d", code)
	}
	if code, _ := ask(t, "GET", url+"/debug/pprof/goroutine?debug=1", ""); code != 200 {
		t.Errorf("goroutines: got %d", code)
	}
}

func TestAddressThatIsTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dsn := fmt.Sprintf("postgres://u:p@127.0.0.1:%d/d", closedPort(t))
	walrelay(t, []string{"WALRELAY_DSN=" + dsn}, "run", "--http-addr", l.Addr().String()).
		want(t, exitPrecondition, "serve metrics and health", "address already in use", "hint: choose another address with --http-addr")
	walrelay(t, []string{"WALRELAY_DSN=" + dsn}, "run", "--http-addr", "no.such.host.invalid:1").want(t, exitPrecondition, "no.such.host.invalid")
}

func TestLogLevelWhileRunning(t *testing.T) {
	url, logs := posted(t, nil)
	if code, body := ask(t, "GET", url+"/loglevel", ""); code != 200 || body != "info\n" {
		t.Errorf("got %d %q", code, body)
	}
	if code, body := ask(t, "PUT", url+"/loglevel", "Debug\n"); code != 200 || body != "debug\n" {
		t.Errorf("got %d %q", code, body)
	}
	if code, _ := ask(t, "PUT", url+"/loglevel", "loud"); code != 400 {
		t.Errorf("nonsense: got %d", code)
	}
	if code, _ := ask(t, "POST", url+"/loglevel", "info"); code != 405 {
		t.Errorf("POST: got %d", code)
	}
	if !strings.Contains(logs.String(), "log level changed") {
		t.Errorf("not told: %s", logs)
	}
}

func TestLogLevelFromAfarIsNotSet(t *testing.T) {
	level := new(slog.LevelVar)
	l := newLevels(slog.New(slog.DiscardHandler), level)
	for _, from := range []string{"192.0.2.1:1234", "[2001:db8::1]:1", "", "@"} {
		r := httptest.NewRequest(http.MethodPut, "/loglevel", strings.NewReader("debug"))
		r.RemoteAddr = from
		w := httptest.NewRecorder()
		l.ServeHTTP(w, r)
		if w.Code != http.StatusForbidden || level.Level() != slog.LevelInfo {
			t.Errorf("from %q: got %d, level %s", from, w.Code, level.Level())
		}
	}
}

func TestToggle(t *testing.T) {
	for was, back := range map[slog.Level]slog.Level{slog.LevelInfo: slog.LevelInfo, slog.LevelError: slog.LevelError, slog.LevelDebug: slog.LevelInfo} {
		level := new(slog.LevelVar)
		level.Set(was)
		l := newLevels(slog.New(slog.DiscardHandler), level)
		if was != slog.LevelDebug {
			l.toggle()
			if level.Level() != slog.LevelDebug {
				t.Errorf("from %s: got %s, want debug", was, level.Level())
			}
		}
		l.toggle()
		if level.Level() != back {
			t.Errorf("from %s and back: got %s, want %s", was, level.Level(), back)
		}
	}
}

// A run without an address asks Postgres for nothing more, and has no address.
func TestNothingIsServedUnasked(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	dsn := fmt.Sprintf("postgres://u:p@127.0.0.1:%d/d", closedPort(t))
	o := runWith(ctx, []string{"WALRELAY_DSN=" + dsn}, "run")
	if o.code != exitOK || strings.Contains(o.err, "serving") {
		t.Errorf("code %d, stderr %s", o.code, o.err)
	}
}
