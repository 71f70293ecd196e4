package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// The modes that take turns on a server that syncs before every ack.
const (
	inChain   = "chain"
	inBatches = "atomic"
)

// syncs drains a backlog into a server with sync_interval: always, in both modes.
func (l *lab) syncs(ctx context.Context, events, rounds int) (drains, error) {
	o := *l
	d := drains{Backlog: backlog{Events: events, Rows: 10, Size: 256}}
	var err error
	if o.nats, err = harness.CreateNATS(ctx, harness.NATSOptions{MaxStore: 8 << 30, SyncInterval: "always"}); err != nil {
		return d, err
	}
	if err = o.nats.Start(ctx); err != nil {
		return d, err
	}
	nc, err := o.nats.Conn()
	if err != nil {
		return d, err
	}
	defer nc.Close()
	if o.js, err = jetstream.New(nc); err != nil {
		return d, err
	}
	say("backlog of %s, sync_interval: always", d.Backlog)
	if d.Backlog, err = o.write(ctx, d.Backlog); err != nil {
		return d, err
	}
	for i := range rounds {
		order := []string{inChain, inBatches}
		if i%2 == 1 {
			order = []string{inBatches, inChain}
		}
		for _, mode := range order {
			r, err := undisturbed(ctx, &o, func() (run, error) { return o.syncDrain(ctx, mode, d.Backlog) }, func(r run) float64 { return r.Others })
			if err != nil {
				return d, fmt.Errorf("drain in mode %s: %w", mode, err)
			}
			d.Runs = append(d.Runs, r)
			say("  round %d  %-14s %8.0f events/s  %5.2f µs an event (NATS %.1f, Postgres %.1f)  others %.2f cores", i+1, mode, r.Rate(), r.PerEvent(),
				perEvent(r.NATS, r.Events), perEvent(r.Postgres, r.Events), r.Others)
		}
	}
	return d, nil
}

// syncDrain is one run into a stream that the relay makes.
func (l *lab) syncDrain(ctx context.Context, mode string, b backlog) (run, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runLimit, fmt.Errorf("longer than %s", runLimit))
	defer cancel()
	r := run{Contender: mode, Events: b.Events}
	for _, name := range []string{stream, bucket} {
		if err := l.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return r, fmt.Errorf("delete stream: %w", err)
		}
	}
	slot, err := l.slot(ctx)
	if err != nil {
		return r, err
	}
	p := &harness.Relay{Bin: l.relay, Args: l.relayArgs(slot, "--nats-sync", "always", "--publish-mode", mode)}
	defer p.Kill()
	before := l.meter()
	if err := p.Start(); err != nil {
		return r, err
	}
	s, err := l.state(ctx, b.Events)
	if err != nil {
		return r, fmt.Errorf("%w\n%s", err, p.Output())
	}
	r.CPU = cpuOf(p.PID())
	r.First, r.Took = s.FirstTime.Sub(before.at), s.LastTime.Sub(before.at)
	r.Memory = memoryOf(p.PID())
	l.spent(before, &r)
	if s.Msgs != uint64(b.Events) {
		return r, fmt.Errorf("%d messages are stored for %d events", s.Msgs, b.Events)
	}
	return r, l.finish(ctx, p, slot)
}

// syncRow compares the rates from the first stored event on.
func (r *results) syncRow() {
	chain, batches := r.Sync.of(inChain), r.Sync.of(inBatches)
	var ratios []float64
	for i := range min(len(chain), len(batches)) {
		ratios = append(ratios, batches[i].Steady()/chain[i].Steady())
	}
	r.add(row{
		Measure: "sync_interval always: atomic batches to the chain", Value: median(ratios), Unit: "×",
		Got: fmt.Sprintf("%.1fk/s to %.1fk/s", r.Sync.median(inBatches, run.Steady)/1000, r.Sync.median(inChain, run.Steady)/1000),
	})
}
