package metrics

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler serves /metrics, /livez and /readyz. Both of the latter answer 200 or
// 503 with one line of text, or with the Report to ?verbose and to clients that
// accept JSON.
func (m *Monitor) Handler() http.Handler {
	mux := http.NewServeMux()
	registry := m.Registry()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{Registry: registry, MaxRequestsInFlight: 8}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, r *http.Request) {
		report := m.Report()
		answer(w, r, &report, report.Stuck)
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		report := m.Report()
		answer(w, r, &report, report.NotReady)
	})
	return mux
}

// answer is 200 when there is no problem.
func answer(w http.ResponseWriter, r *http.Request, report *Report, problem string) {
	code := http.StatusOK
	if problem != "" {
		code = http.StatusServiceUnavailable
	}
	w.Header().Set("Cache-Control", "no-store")
	if r.URL.Query().Has("verbose") || strings.Contains(r.Header.Get("Accept"), "application/json") {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		enc := json.NewEncoder(w)
		enc.SetIndent("", "  ")
		enc.SetEscapeHTML(false)
		_ = enc.Encode(report) // to a client that may be gone
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	if problem == "" {
		problem = "ok"
	}
	_, _ = io.WriteString(w, problem+"\n")
}
