package main

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/relay"
)

// gardener prunes the outbox beside a relay, while that holds the slot.
type gardener struct {
	job    *pruning
	every  time.Duration
	leads  atomic.Bool
	pruned func(rows int64, err error)
	log    *slog.Logger
}

// newGardener is nil when nothing is to be pruned. pruned is told how each pass ended; nil for nobody.
func newGardener(cfg *config.Config, log *slog.Logger, pruned func(int64, error)) (*gardener, error) {
	if cfg.Prune.After == 0 || len(cfg.Tables) == 0 {
		return nil, nil
	}
	// The relay's own publisher belongs to the relay's goroutine.
	e, err := newEnds(cfg, log)
	if err != nil {
		return nil, err
	}
	if pruned == nil {
		pruned = func(int64, error) {}
	}
	return &gardener{
		every: cfg.Prune.Every, pruned: pruned, log: log,
		job: &pruning{
			ends: e, slots: []string{cfg.Slot},
			options: outbox.PruneOptions{Publications: cfg.Publications, OlderThan: cfg.Prune.After, Batch: pruneBatch},
			prune:   operate.Prune{Wait: cfg.ConfirmDelay + pruneWait, Every: pruneLook},
		},
	}, nil
}

// start begins to prune until stop is called, which returns when the batch under way is
// done or given up.
func (g *gardener) start(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	running.Go(func() { g.run(ctx) })
	return func() {
		cancel()
		running.Wait()
	}
}

func (g *gardener) run(ctx context.Context) {
	told := ""
	for {
		pause(ctx, g.every)
		if ctx.Err() != nil {
			return
		}
		if !g.leads.Load() {
			continue
		}
		r, err := g.job.pass(ctx)
		if ctx.Err() != nil {
			err = nil
		}
		g.pruned(r.Deleted(), err)
		if n := r.Deleted(); n > 0 {
			g.log.Info("published rows deleted", "rows", n, "older_than", g.job.options.OlderThan.String())
		}
		text := ""
		if err != nil {
			text = err.Error()
		}
		if err != nil && text != told {
			g.log.Warn("cannot delete published rows, trying again", "err", text, "hint", event.HintOf(err))
		}
		told = text
	}
}

// leaderWatch tells a gardener whether the relay holds the slot, and passes on what it hears.
type leaderWatch struct {
	relay.Observer
	g *gardener
}

func (w leaderWatch) Entered(s relay.Status) {
	w.g.leads.Store(s.State == relay.Streaming)
	w.Observer.Entered(s)
}
