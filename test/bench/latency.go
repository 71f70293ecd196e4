package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

const (
	rate    = 1000 // single-row transactions a second
	writers = 4
	warmUp  = time.Second // of each round, not counted
)

// paced is one round at a steady rate.
type paced struct {
	Contender string          `json:"contender"`
	Events    int             `json:"events"`
	P50       time.Duration   `json:"p50_ns"` // from COMMIT's return to the message's timestamp
	P99       time.Duration   `json:"p99_ns"`
	Core      float64         `json:"core"`   // of a processor core, used by the contender
	Latencies []time.Duration `json:"-"`      // sorted
	Others    float64         `json:"others"` // cores
}

// pace lets relay and bare listener take turns at a steady rate.
func (l *lab) pace(ctx context.Context, rounds int, round time.Duration) ([]paced, error) {
	say("%d transactions a second for %s a round", rate, round)
	if _, err := l.write(ctx, backlog{Events: 0, Rows: 1, Size: 256}); err != nil {
		return nil, err
	}
	var all []paced
	contenders := []string{theRelay, listener}
	for i := range rounds {
		k := i % len(contenders)
		for _, c := range slices.Concat(contenders[k:], contenders[:k]) {
			p, err := undisturbed(ctx, l, func() (paced, error) { return l.paced(ctx, c, round) }, func(p paced) float64 { return p.Others })
			if err != nil {
				return all, fmt.Errorf("%s at a steady rate: %w", c, err)
			}
			all = append(all, p)
			say("  round %d  %-10s p50 %s  p99 %s  %.1f %% of a core  others %.2f cores", i+1, c, p.P50, p.P99, 100*p.Core, p.Others)
		}
	}
	return all, nil
}

func (l *lab) paced(ctx context.Context, contender string, round time.Duration) (paced, error) {
	p := paced{Contender: contender}
	ctx, cancel := context.WithTimeoutCause(ctx, round+time.Minute, errors.New("took too long"))
	defer cancel()
	if err := l.newStream(ctx); err != nil {
		return p, err
	}
	// A slot of its own at the end of the log: what came before is another round's.
	if _, err := l.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", base); err != nil {
		return p, err
	}
	if _, err := l.conn.Exec(ctx, "SELECT pg_create_logical_replication_slot($1, 'pgoutput')", base); err != nil {
		return p, err
	}
	proc, slot, err := l.contender(ctx, contender, backlog{})
	if err != nil {
		return p, err
	}
	if err := proc.Start(); err != nil {
		return p, err
	}
	defer proc.Kill()
	if _, err := proc.AwaitText(ctx, "streaming"); err != nil {
		return p, err
	}
	diary := harness.NewDiary()
	if err := l.commitPaced(ctx, diary, warmUp); err != nil {
		return p, err
	}
	before, cpu := l.meter(), cpuOf(proc.PID())
	if err := l.commitPaced(ctx, diary, round); err != nil {
		return p, err
	}
	used, now := cpuOf(proc.PID())-cpu, l.meter()
	p.Core = float64(used) / float64(now.at.Sub(before.at))
	p.Others = now.others(before, used)
	if _, err := l.state(ctx, diary.Committed()); err != nil {
		return p, err
	}
	if err := l.finish(ctx, proc, slot); err != nil {
		return p, err
	}
	stored, err := harness.ReadStream(ctx, l.js, stream)
	if err != nil {
		return p, err
	}
	p.Latencies = harness.Latencies(diary, stored, before.at)
	p.Events = len(p.Latencies)
	p.P50, p.P99 = harness.Percentile(p.Latencies, 0.5), harness.Percentile(p.Latencies, 0.99)
	return p, nil
}

// commitPaced commits single-row transactions at the rate. Each has its time,
// so one that is late does not delay the next ones.
func (l *lab) commitPaced(ctx context.Context, diary *harness.Diary, d time.Duration) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var all sync.WaitGroup
	from := time.Now()
	for w := range writers {
		all.Go(func() {
			if err := l.writePaced(ctx, diary, from, d, w); err != nil {
				cancel(err)
			}
		})
	}
	all.Wait()
	if err := context.Cause(ctx); err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return nil
}

func (l *lab) writePaced(ctx context.Context, diary *harness.Diary, from time.Time, d time.Duration, w int) error {
	conn, err := l.pg.Conn(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	body := `{"n": 1, "pad": "` + strings.Repeat("x", 237) + `"}`
	t := time.NewTimer(0)
	defer t.Stop()
	for at := from.Add(time.Duration(w) * time.Second / rate); at.Sub(from) < d; at = at.Add(writers * time.Second / rate) {
		t.Reset(time.Until(at))
		select {
		case <-t.C:
		case <-ctx.Done():
			return nil
		}
		id := uuid()
		if _, err := conn.Exec(ctx, `INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
			VALUES ($1, 'order', $2, 'created', $3)`, id, fmt.Sprintf("order-%d", w), body); err != nil {
			return err
		}
		diary.Add(harness.Entry{ID: id, Outcome: harness.Committed, At: time.Now()})
	}
	return nil
}

// steady is the median over a contender's rounds.
func steady(all []paced, contender string, value func(paced) float64) float64 {
	var vs []float64
	for _, p := range all {
		if p.Contender == contender {
			vs = append(vs, value(p))
		}
	}
	return median(vs)
}

// steadyRatio is the median over the rounds of the relay's value against the
// bare listener's in the same round.
func steadyRatio(all []paced, value func(paced) float64) float64 {
	var ours, theirs, vs []float64
	for _, p := range all {
		if p.Contender == theRelay {
			ours = append(ours, value(p))
		} else {
			theirs = append(theirs, value(p))
		}
	}
	for i := range min(len(ours), len(theirs)) {
		vs = append(vs, ours[i]/theirs[i])
	}
	return median(vs)
}
