package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// sharding measures relays that share the aggregates of one backlog.
type sharding struct {
	Backlog backlog    `json:"backlog"`
	Runs    []shardRun `json:"runs"`
	// Left are walsenders that decode the whole backlog and send nothing of it.
	Left []run `json:"left_out"`
}

// shardRun is one drain by all shards at once.
type shardRun struct {
	Shards   int           `json:"shards"`
	Gathered bool          `json:"gathered"` // into one stream, which was waited for, too
	Events   int           `json:"events"`
	Took     time.Duration `json:"took_ns"` // from the start of the processes until the last event was stored
	CPU      time.Duration `json:"cpu_ns"`  // of all relays
	NATS     time.Duration `json:"nats_cpu_ns"`
	Postgres time.Duration `json:"postgres_cpu_ns"`
	Others   float64       `json:"others"`

	// Source is how long a stream took to take in what the others held already.
	Source    time.Duration `json:"source_ns,omitempty"`
	SourceCPU time.Duration `json:"source_cpu_ns,omitempty"` // of NATS
}

func (r shardRun) rate() float64 { return float64(r.Events) / r.Took.Seconds() }

const (
	allShards = "ALL"
	byFilter  = "left_out"  // a publication with a filter that no row passes
	byTable   = "elsewhere" // a publication of another table
)

var shardCounts = []int{1, 2, 4}

func shardStream(i int) string { return fmt.Sprint("SHARD_", i) }

// shardPublications are those of n shards.
func shardPublications(n int) []string {
	if n == 1 {
		return []string{publication}
	}
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("of%d_%d", n, i)
	}
	return names
}

func (l *lab) shards(ctx context.Context, events, rounds int) (*sharding, error) {
	// Publications before the slot, which does not know later ones.
	for _, n := range shardCounts[1:] {
		ran, err := harness.Run(ctx, l.relay, nil, "init", "--apply", "--dsn", l.pg.DSN("postgres"), "--publication", fmt.Sprint("of", n), "--shards", fmt.Sprint(n))
		if err != nil || ran.Code != 0 {
			return nil, fmt.Errorf("walrelay init: %w\n%s", err, ran.Stderr)
		}
	}
	if err := l.pg.Exec(ctx,
		"CREATE TABLE elsewhere (n int)", "CREATE PUBLICATION "+byTable+" FOR TABLE elsewhere WITH (publish = 'insert')",
		"CREATE PUBLICATION "+byFilter+" FOR TABLE outbox WHERE ((coalesce(hashtextextended(aggregate_id, 0), 0) & 9223372036854775807) % 1000003 = 1000002) WITH (publish = 'insert')",
	); err != nil {
		return nil, err
	}
	b, err := l.write(ctx, backlog{Events: events, Rows: 10, Size: 256})
	s := &sharding{Backlog: b}
	if err != nil {
		return s, err
	}
	say("shards of a backlog of %s", b)
	for range rounds {
		for _, gathered := range []bool{false, true} {
			for _, n := range shardCounts {
				r, err := undisturbed(ctx, l, func() (shardRun, error) { return l.drainShards(ctx, n, gathered, b) }, func(r shardRun) float64 { return r.Others })
				if err != nil {
					return s, fmt.Errorf("drain with %d shards: %w", n, err)
				}
				s.Runs = append(s.Runs, r)
				say("  %d shards, gathered %-5v  %8.0f events/s  relays %.2f µs an event, NATS %.1f, Postgres %.1f  others %.2f cores", n, gathered, r.rate(),
					perEvent(r.CPU, b.Events), perEvent(r.NATS, b.Events), perEvent(r.Postgres, b.Events), r.Others)
			}
		}
		for _, pub := range []string{byTable, byFilter} {
			r, err := undisturbed(ctx, l, func() (run, error) { return l.discard(ctx, pub, b) }, func(r run) float64 { return r.Others })
			if err != nil {
				return s, fmt.Errorf("decode and send nothing: %w", err)
			}
			s.Left = append(s.Left, r)
			say("  nothing sent, %-9s  %8.0f events/s  Postgres %.2f µs an event", pub, r.Rate(), perEvent(r.Postgres, b.Events))
		}
	}
	return s, nil
}

// drainShards lets n relays drain the backlog.
func (l *lab) drainShards(ctx context.Context, n int, gathered bool, b backlog) (shardRun, error) {
	r := shardRun{Shards: n, Gathered: gathered, Events: b.Events}
	ctx, cancel := context.WithTimeoutCause(ctx, runLimit, errors.New("it took too long"))
	defer cancel()
	wait, err := l.shardStreams(ctx, n, gathered)
	if err != nil {
		return r, err
	}
	relays := make([]*harness.Relay, n)
	slots := make([]string, n)
	for i, pub := range shardPublications(n) {
		if slots[i], err = l.slot(ctx); err != nil {
			return r, err
		}
		relays[i] = &harness.Relay{Bin: l.relay, Args: []string{
			"run", "--dsn", l.pg.DSN("postgres"), "--nats-url", l.nats.URL(), "--slot", slots[i], "--publication", pub,
			"--stream", shardStream(i), "--subject", fmt.Sprintf("shard_%d.outbox.{aggregate_type}.{event_type}", i), "--create-stream", "--log-format", "text",
		}}
		defer relays[i].Kill()
	}
	before := l.meter()
	for _, p := range relays {
		if err := p.Start(); err != nil {
			return r, err
		}
	}
	last, err := l.lastOf(ctx, relays, wait, b.Events)
	if err != nil {
		return r, err
	}
	r.Took = last.Sub(before.at)
	for _, p := range relays {
		r.CPU += cpuOf(p.PID())
	}
	now := l.meter()
	r.NATS, r.Postgres, r.Others = now.nats-before.nats, now.pg-before.pg, now.others(before, r.CPU)
	for i, p := range relays {
		if err := l.finish(ctx, p, slots[i]); err != nil {
			return r, err
		}
	}
	if !gathered {
		return r, l.source(ctx, &r)
	}
	return r, nil
}

// source makes the stream that gathers the shards when these are full.
func (l *lab) source(ctx context.Context, r *shardRun) error {
	before := l.meter()
	if err := l.gather(ctx, r.Shards); err != nil {
		return err
	}
	last, err := l.lastOf(ctx, nil, []string{allShards}, r.Events)
	r.Source, r.SourceCPU = last.Sub(before.at), l.meter().nats-before.nats
	return err
}

// gather makes the stream that takes in those of n shards.
func (l *lab) gather(ctx context.Context, n int) error {
	all := jetstream.StreamConfig{Name: allShards, Storage: jetstream.FileStorage}
	for i, name := range streamsOf(n) {
		all.Sources = append(all.Sources, &jetstream.StreamSource{
			Name: name, SubjectTransforms: []jetstream.SubjectTransformConfig{{Source: fmt.Sprintf("shard_%d.>", i), Destination: ">"}},
		})
	}
	if _, err := l.js.CreateStream(ctx, all); err != nil {
		return fmt.Errorf("create stream: %w", err)
	}
	return nil
}

// shardStreams makes the streams anew and returns those that the events are waited for in.
func (l *lab) shardStreams(ctx context.Context, n int, gathered bool) (wait []string, err error) {
	if err := l.newStream(ctx); err != nil { // the checkpoints go with it
		return nil, err
	}
	for _, name := range append([]string{allShards}, streamsOf(slices.Max(shardCounts))...) {
		if err := l.js.DeleteStream(ctx, name); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
			return nil, fmt.Errorf("delete stream: %w", err)
		}
	}
	for i, name := range streamsOf(n) {
		_, err := l.js.CreateStream(ctx, jetstream.StreamConfig{
			Name: name, Subjects: []string{fmt.Sprintf("shard_%d.outbox.>", i), "walrelay.parked." + name}, Storage: jetstream.FileStorage, AllowDirect: true,
		})
		if err != nil {
			return nil, fmt.Errorf("create stream: %w", err)
		}
	}
	if !gathered {
		return streamsOf(n), nil
	}
	return []string{allShards}, l.gather(ctx, n)
}

func streamsOf(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = shardStream(i)
	}
	return names
}

// lastOf waits until the streams hold n messages together, and returns when the last one was stored.
// A source keeps the times of its messages, so the stream that gathers is timed by when it is seen.
func (l *lab) lastOf(ctx context.Context, relays []*harness.Relay, streams []string, n int) (last time.Time, err error) {
	err = until(ctx, 10*time.Millisecond, func() (bool, error) {
		for _, p := range relays {
			if !p.Running() {
				return false, fmt.Errorf("a relay has ended\n%s", p.Output())
			}
		}
		total := uint64(0)
		for _, name := range streams {
			st, err := l.js.Stream(ctx, name)
			if err != nil {
				return false, err
			}
			s := st.CachedInfo().State
			total += s.Msgs
			if s.LastTime.After(last) {
				last = s.LastTime
			}
		}
		return total >= uint64(n), nil
	})
	if len(streams) == 1 && streams[0] == allShards {
		last = time.Now()
	}
	return last, err
}

// discard lets a walsender decode the backlog for a publication that has nothing of it.
func (l *lab) discard(ctx context.Context, pub string, b backlog) (run, error) {
	r := run{Contender: pub, Events: b.Events}
	slot, err := l.slot(ctx)
	if err != nil {
		return r, err
	}
	before := l.meter()
	cmd := exec.CommandContext(ctx, l.recvlogical, "-d", l.pg.DSN("postgres"), "--slot", slot, "--start", "--endpos", b.end,
		"-o", "proto_version=1", "-o", "publication_names="+pub, "-f", os.DevNull)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return r, fmt.Errorf("%w\n%s", err, out)
	}
	r.Took = time.Since(before.at)
	r.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	l.spent(before, &r)
	return r, l.dropSlot(ctx, slot)
}

// median over the runs with so many shards.
func (s *sharding) median(n int, gathered bool, value func(shardRun) float64) float64 {
	var vs []float64
	for _, r := range s.Runs {
		if r.Shards == n && r.Gathered == gathered {
			vs = append(vs, value(r))
		}
	}
	return median(vs)
}

// rows are the lines of the table.
func (s *sharding) rows() []row {
	var rows []row
	for _, gathered := range []bool{false, true} {
		what := "one stream each"
		if gathered {
			what = "gathered in one"
		}
		for _, n := range shardCounts {
			per := func(value func(shardRun) time.Duration) float64 {
				return s.median(n, gathered, func(r shardRun) float64 { return perEvent(value(r), r.Events) })
			}
			rows = append(rows, row{
				Measure: fmt.Sprintf("shards, %s: %d", what, n), Value: s.median(n, gathered, shardRun.rate) / 1000, Unit: "k events/s",
				Got: fmt.Sprintf("%.2f of one; processor time an event: relays %.2f µs, NATS %.1f, Postgres %.1f",
					s.median(n, gathered, shardRun.rate)/s.median(1, gathered, shardRun.rate),
					per(func(r shardRun) time.Duration { return r.CPU }), per(func(r shardRun) time.Duration { return r.NATS }),
					per(func(r shardRun) time.Duration { return r.Postgres })),
			})
		}
	}
	for _, n := range shardCounts {
		rows = append(rows, row{
			Measure: fmt.Sprintf("taking in full streams: %d", n), Unit: "k events/s",
			Value: s.median(n, false, func(r shardRun) float64 { return float64(r.Events) / r.Source.Seconds() / 1000 }),
			Got:   fmt.Sprintf("NATS %.1f µs an event", s.median(n, false, func(r shardRun) float64 { return perEvent(r.SourceCPU, r.Events) })),
		})
	}
	left := drains{Runs: s.Left}
	for _, pub := range []string{byTable, byFilter} {
		rows = append(rows, row{
			Measure: "decoded and not sent, " + map[string]string{byTable: "not published", byFilter: "left out by a filter"}[pub],
			Value:   left.median(pub, func(r run) float64 { return perEvent(r.Postgres, r.Events) }), Unit: "µs an event",
			Got: fmt.Sprintf("%.0fk/s, the start included", left.median(pub, run.Rate)/1000),
		})
	}
	return rows
}

func (s *sharding) plot(dir string) error {
	var labels []string
	var values [][]float64
	for _, n := range shardCounts {
		labels = append(labels, fmt.Sprintf("%d relays", n))
		values = append(values, []float64{s.median(n, false, shardRun.rate), s.median(n, true, shardRun.rate)})
	}
	labels[0] = "one relay"
	return plotBars(under(dir, "shards.svg"), "Drain of a backlog by shards, medians", "events a second", labels,
		[]string{"a stream each", "gathered in one stream"}, values)
}
