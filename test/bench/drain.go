package main

import (
	"context"
	"path/filepath"
	"slices"
	"time"
)

// drains measures the contenders over one backlog, in turns.
type drains struct {
	Backlog backlog  `json:"backlog"`
	Builds  []string `json:"builds,omitempty"` // other builds of the relay
	Runs    []run    `json:"runs"`
}

// of are the runs of one contender, in order.
func (d drains) of(contender string) []run {
	return slices.DeleteFunc(slices.Clone(d.Runs), func(r run) bool { return r.Contender != contender })
}

// median over the runs of a contender; 0 when it did not run.
func (d drains) median(contender string, value func(run) float64) float64 {
	var vs []float64
	for _, r := range d.of(contender) {
		vs = append(vs, value(r))
	}
	return median(vs)
}

// ratio is the median over the rounds of the relay's rate against a contender's in the same round.
func (d drains) ratio(contender string, value func(run) float64) float64 {
	ours, theirs := d.of(theRelay), d.of(contender)
	var vs []float64
	for i := range min(len(ours), len(theirs)) {
		vs = append(vs, value(ours[i])/value(theirs[i]))
	}
	return median(vs)
}

func median(vs []float64) float64 {
	if len(vs) == 0 {
		return 0
	}
	vs = slices.Sorted(slices.Values(vs))
	n := len(vs)
	return (vs[(n-1)/2] + vs[n/2]) / 2
}

// race lets the contenders take turns for some rounds. Who begins changes from
// round to round, since a run can profit or suffer from the one before it.
func (l *lab) race(ctx context.Context, b backlog, rounds int, contenders ...string) (drains, error) {
	say("backlog of %s", b)
	b, err := l.write(ctx, b)
	d := drains{Backlog: b}
	for _, c := range contenders {
		if slices.Contains(l.against, c) {
			d.Builds = append(d.Builds, c)
		}
	}
	if err != nil {
		return d, err
	}
	if slices.Contains(contenders, polling) {
		if err := l.openPoll(ctx); err != nil {
			return d, err
		}
	}
	for i := range rounds {
		k := i % len(contenders)
		for _, c := range slices.Concat(contenders[k:], contenders[:k]) {
			r, err := undisturbed(ctx, l, func() (run, error) { return l.drain(ctx, c, b) }, func(r run) float64 { return r.Others })
			if err != nil {
				return d, err
			}
			d.Runs = append(d.Runs, r)
			say("  round %d  %-14.14s %8.0f events/s  %5.2f µs an event (NATS %.1f, Postgres %.1f)  first after %s  others %.2f cores", i+1, filepath.Base(c), r.Rate(), r.PerEvent(),
				perEvent(r.NATS, r.Events), perEvent(r.Postgres, r.Events), r.First.Round(time.Millisecond), r.Others)
		}
	}
	for _, c := range contenders {
		say("  median   %-14.14s %8.0f events/s  %5.2f µs an event (NATS %.1f, Postgres %.1f)", filepath.Base(c), d.median(c, run.Rate), d.median(c, run.PerEvent),
			d.median(c, run.natsPerEvent), d.median(c, run.postgresPerEvent))
	}
	return d, nil
}

func perEvent(d time.Duration, events int) float64 {
	return float64(d.Nanoseconds()) / 1000 / float64(events)
}

// drainAll is the drain of the issue: three sizes of transaction.
func (l *lab) drainAll(ctx context.Context, p plan) ([]drains, error) {
	var all []drains
	for i, rows := range p.rows {
		contenders := slices.Concat([]string{theRelay}, p.against)
		for _, c := range p.drains {
			// They do not depend on transactions.
			if i == 0 || c == recvlogical {
				contenders = append(contenders, c)
			}
		}
		d, err := l.race(ctx, backlog{Events: p.events, Rows: rows, Size: 256}, p.rounds, contenders...)
		if err != nil {
			return all, err
		}
		all = append(all, d)
	}
	return all, nil
}

// starts measures how soon a relay's first event is stored.
func (l *lab) starts(ctx context.Context, rounds int) (drains, error) {
	return l.race(ctx, backlog{Events: 10, Rows: 10, Size: 256}, 2*rounds, theRelay)
}

// growth measures the relay while one property of the backlog grows.
type growth struct {
	What   string   `json:"what"`
	Points []drains `json:"points"`
}

func (l *lab) grow(ctx context.Context, events, rounds int) ([]growth, error) {
	backlogs := growth{What: "backlog"}
	for n := 10_000; n <= 5*events; n *= 10 {
		backlogs.Points = append(backlogs.Points, drains{Backlog: backlog{n, 10, 256, ""}})
	}
	rows := growth{What: "transaction"}
	for n := 1; n <= events/2; n *= 10 {
		rows.Points = append(rows.Points, drains{Backlog: backlog{events, n, 256, ""}})
	}
	payloads := growth{What: "payload"}
	for size := 100; size <= 100_000; size *= 10 {
		n := min(events, max(2000, events*1000/size))
		payloads.Points = append(payloads.Points, drains{Backlog: backlog{n, 10, size, ""}})
	}
	all := []growth{backlogs, rows, payloads}
	for _, g := range all {
		for i := range g.Points {
			d, err := l.race(ctx, g.Points[i].Backlog, rounds, theRelay)
			if err != nil {
				return all, err
			}
			g.Points[i] = d
		}
	}
	return all, nil
}
