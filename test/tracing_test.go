package test

import (
	"bytes"
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"
)

// collector keeps what is sent to it.
type collector struct {
	mu   sync.Mutex
	body []byte
	away bool
}

func (c *collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	b, _ := io.ReadAll(r.Body)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.away || r.URL.Path != "/v1/traces" {
		http.Error(w, "away", http.StatusServiceUnavailable)
		return
	}
	c.body = append(c.body, b...)
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func (c *collector) has(text []byte) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return bytes.Contains(c.body, text)
}

func (c *collector) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.away = true
}

func TestSpansReachACollector(t *testing.T) {
	t.Parallel()
	const traceID, spanID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	const parent = "00-" + traceID + "-" + spanID + "-01"
	c := &collector{}
	srv := httptest.NewServer(c)
	defer srv.Close()

	r := newRig(t, rigOptions{})
	r.relay.Env = []string{"OTEL_EXPORTER_OTLP_ENDPOINT=" + srv.URL, "OTEL_BSP_SCHEDULE_DELAY=100"}
	r.relay.MustStart(t)
	r.exec(`insert into outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
		values (gen_random_uuid(), 'order', '1', 'paid', '{"secret": "hunter2"}', '{"traceparent": "` + parent + `"}')`)
	r.stored(1, 20*time.Second)
	for _, id := range []string{traceID, spanID} {
		raw, err := hex.DecodeString(id)
		must(t, err)
		r.await(10*time.Second, "a span with "+id, func() bool { return c.has(raw) })
	}
	for _, text := range []string{"send " + stream, "outbox.order.paid", "walrelay.position", "service.name"} {
		if !c.has([]byte(text)) {
			t.Errorf("no span has %q", text)
		}
	}
	if c.has([]byte("hunter2")) {
		t.Error("a span has the payload")
	}
	if got := r.header(1, "traceparent"); got != parent {
		t.Errorf("the message has the traceparent %q, want that of the row", got)
	}

	// A collector that is away costs a warning, and no event.
	c.leave()
	for range 5 {
		r.exec(`insert into outbox (id, aggregate_type, aggregate_id, event_type, payload, headers)
			values (gen_random_uuid(), 'order', '1', 'paid', '{}', '{"traceparent": "` + parent + `"}')`)
	}
	r.stored(6, 20*time.Second)
	if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}

// header reads a header of a message.
func (r *rig) header(seq uint64, name string) string {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	m, err := st.GetMsg(r.t.Context(), seq)
	must(r.t, err)
	return m.Header.Get(name)
}
