package main

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
)

// levels changes the log level of a program that runs.
type levels struct {
	log   *slog.Logger
	level *slog.LevelVar
	calm  slog.Level // where toggle goes back to

	mu sync.Mutex // orders changes
}

func newLevels(log *slog.Logger, level *slog.LevelVar) *levels {
	calm := level.Level()
	if calm <= slog.LevelDebug {
		calm = slog.LevelInfo
	}
	return &levels{log: log, level: level, calm: calm}
}

// toggle goes to debug, or back from it.
func (l *levels) toggle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.level.Level() == slog.LevelDebug {
		l.set(l.calm)
	} else {
		l.set(slog.LevelDebug)
	}
}

// set tells the change at whichever of both levels says more.
func (l *levels) set(to slog.Level) {
	was := l.level.Level()
	if was == to {
		return
	}
	l.level.Set(min(was, to))
	l.log.Info("log level changed", "from", name(was), "to", name(to))
	l.level.Set(to)
}

func name(l slog.Level) string { return strings.ToLower(l.String()) }

// ServeHTTP tells the level to GET, and sets it to the body of a PUT from this machine.
func (l *levels) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.Method {
	case http.MethodGet, http.MethodHead:
	case http.MethodPut:
		if !isLoopback(r) {
			refuse(w, http.StatusForbidden, "the log level can be set from this machine only")
			return
		}
		body, err := io.ReadAll(io.LimitReader(r.Body, 16))
		if err != nil {
			refuse(w, http.StatusBadRequest, "%v", err)
			return
		}
		var to slog.Level
		switch text := strings.ToLower(strings.TrimSpace(string(body))); text {
		case "debug", "info", "warn", "error":
			_ = to.UnmarshalText([]byte(text)) // it knows these
		default:
			refuse(w, http.StatusBadRequest, "write debug, info, warn or error")
			return
		}
		l.mu.Lock()
		l.set(to)
		l.mu.Unlock()
	default:
		w.Header().Set("Allow", "GET, PUT")
		refuse(w, http.StatusMethodNotAllowed, "GET tells the log level, PUT sets it")
		return
	}
	_, _ = fmt.Fprintln(w, name(l.level.Level()))
}
