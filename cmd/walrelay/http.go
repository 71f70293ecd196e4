package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/metrics"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/slotmgr"
)

// sampleInterval is the time between two reads of the slot's lag.
const sampleInterval = time.Second

// httpPatience is how long a request that is under way may take at the end.
const httpPatience = time.Second

// watchpost is what watches a run and answers about it: the monitor, the
// sampler of the lag, and the HTTP server.
type watchpost struct {
	monitor *metrics.Monitor
	sampler *slotmgr.Sampler
	server  *http.Server
	log     *slog.Logger
}

// newWatchpost makes the watchpost of cfg, which has an address. pub is called
// only when something is asked.
func newWatchpost(cfg *config.Config, pg *pgx.ConnConfig, levels *levels, pub func() *publisher.Publisher, skipped func() map[string]uint64) *watchpost {
	b := built()
	m := metrics.New(metrics.Options{
		Slot: cfg.Slot, Database: databaseOf(pg), Stream: cfg.Stream.Name, Version: b.Version, Commit: b.Commit,
		InFlight: func() (uint64, time.Time) { return pub().InFlight() },
		Publishing: func() metrics.Publishing {
			choice, window := pub().Publishing()
			return metrics.Publishing{Mode: string(choice.Mode), Reason: choice.Reason, Window: window}
		},
		Skipped:        skipped,
		Failures:       publisher.Failures,
		StatusInterval: cfg.StatusInterval, AckTimeout: cfg.AckTimeout,
	})
	mux := http.NewServeMux()
	mux.Handle("/", m.Handler())
	mux.Handle("/loglevel", levels)
	if cfg.PProf {
		// The package would put them on the default mux, which is not served.
		mux.HandleFunc("/debug/pprof/", pprof.Index)
		mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
		mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
		mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
		mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	}
	return &watchpost{
		monitor: m,
		sampler: slotmgr.NewSampler(pg, cfg.Slot, sampleInterval),
		server: &http.Server{
			Addr: cfg.HTTPAddr, Handler: mux,
			ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second,
			WriteTimeout: 2 * time.Minute, // as long as a profile may take
			IdleTimeout:  2 * time.Minute, MaxHeaderBytes: 16 << 10,
			ErrorLog: slog.NewLogLogger(levels.log.Handler(), slog.LevelDebug),
		},
		log: levels.log,
	}
}

// start binds the address and begins to watch. stop ends both; it returns when
// requests under way are answered, or have had their time.
func (w *watchpost) start(ctx context.Context) (stop func(), err error) {
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", w.server.Addr)
	if err != nil {
		return nil, event.Fail(event.Precondition, "choose another address with --http-addr, or stop what listens there",
			"serve metrics and health: %w", err)
	}
	w.log.Info("serving metrics and health", "address", l.Addr().String())
	// Both go on while the relay drains.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	running.Go(func() { w.sampler.Run(ctx, w.sampled) })
	running.Go(func() {
		if err := w.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			w.log.Error("metrics and health are not served any more", "err", err)
		}
	})
	return func() {
		cancel()
		ctx, cancel := context.WithTimeout(context.Background(), httpPatience)
		defer cancel()
		if w.server.Shutdown(ctx) != nil {
			_ = w.server.Close() // of connections that nobody waits for any more
		}
		running.Wait()
	}, nil
}

func (w *watchpost) sampled(lag slotmgr.Lag, err error) {
	w.monitor.Sampled(sampleOf(lag), err)
	if err != nil {
		w.log.Debug("no sample of the slot", "err", err)
	}
}

func sampleOf(lag slotmgr.Lag) metrics.Sample {
	return metrics.Sample{
		At: lag.At, WALEnd: lag.Current, Confirmed: lag.Confirmed,
		LagBytes: lag.Bytes, RetainedBytes: lag.RetainedBytes, SafeBytes: lag.SafeWALSize,
		Active: lag.Active, WALStatus: lag.WALStatus,
	}
}

// databaseOf is the name that the server takes when none is given.
func databaseOf(pg *pgx.ConnConfig) string {
	if pg.Database == "" {
		return pg.User
	}
	return pg.Database
}

// isLoopback reports whether a request comes from this machine.
func isLoopback(r *http.Request) bool {
	host, _, err := net.SplitHostPort(r.RemoteAddr)
	ip := net.ParseIP(host)
	return err == nil && ip != nil && ip.IsLoopback()
}

// refuse answers a request that is not granted.
func refuse(w http.ResponseWriter, code int, format string, args ...any) {
	http.Error(w, fmt.Sprintf(format, args...), code)
}
