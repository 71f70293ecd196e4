package slotmgr

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// Sampler reads the lag of a slot at an interval, over an ordinary connection
// of its own, so that it tells the truth whatever the relay is about.
type Sampler struct {
	cfg   *pgx.ConnConfig
	slot  string
	every time.Duration

	patience time.Duration // for one connection and its question
	renewal  time.Duration // age at which the connection is replaced
}

// NewSampler makes a Sampler. It opens nothing.
func NewSampler(cfg *pgx.ConnConfig, slot string, every time.Duration) *Sampler {
	cfg = cfg.Copy()
	delete(cfg.RuntimeParams, "replication")
	cfg.DefaultQueryExecMode = pgx.QueryExecModeExec // as a Watcher's
	return &Sampler{cfg: cfg, slot: slot, every: every, patience: 3 * time.Second, renewal: 15 * time.Second}
}

// Run tells every sample, or why there is none, until ctx ends. One failure
// follows the last sample within the interval and three seconds. While no
// connection can be had it tries less and less often, every five seconds at last.
//
// A smart shutdown waits for ordinary sessions and tells them nothing, so the
// connection is replaced every 15 seconds: the new one is refused then.
func (s *Sampler) Run(ctx context.Context, tell func(Lag, error)) {
	var conn *pgx.Conn
	defer func() {
		if conn != nil {
			hangUp(conn)
		}
	}()
	var opened time.Time
	pause := s.every
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		if conn != nil && time.Since(opened) >= s.renewal {
			hangUp(conn)
			conn = nil
		}
		if conn == nil {
			opened = time.Now()
		}
		var lag Lag
		var err error
		lag, conn, err = s.sample(ctx, conn)
		if ctx.Err() != nil {
			return
		}
		tell(lag, err)
		if conn != nil {
			pause = s.every
		} else {
			pause = min(2*pause, longestPause)
		}
		timer.Reset(pause)
	}
}

// sample reads the lag over conn, or over a new connection when that is nil. It
// returns the connection that can be used again.
func (s *Sampler) sample(ctx context.Context, conn *pgx.Conn) (Lag, *pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.patience)
	defer cancel()
	fresh := conn == nil
	if fresh {
		var err error
		if conn, err = Connect(ctx, s.cfg); err != nil {
			return Lag{}, nil, err
		}
	}
	lag, err := Sample(ctx, conn, s.slot)
	switch {
	case !conn.IsClosed():
		return lag, conn, err
	case ctx.Err() != nil:
		return Lag{}, nil, fmt.Errorf("read slot %q: no answer for %s", s.slot, s.patience)
	case fresh:
		return Lag{}, nil, err
	}
	return s.sample(ctx, nil) // an administrator or a proxy may have ended the old one
}
