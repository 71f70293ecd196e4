package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// experiments in the order in which they run.
var experiments = []string{"drain", "start", "latency", "memory", "growth", "profile", "shards", "sync"}

type plan struct {
	bin, out string
	only     []string
	against  []string // other builds of the relay, compared in the drains
	rows     []int
	drains   []string // contenders
	rounds   int
	events   int
	round    time.Duration
	idle     time.Duration
	down     time.Duration
	patience time.Duration
	repeats  int
}

func main() {
	var p plan
	var contender peer
	var only, against, rows, contenders string
	flag.StringVar(&p.bin, "walrelay", "", "the program to measure; built when not given")
	flag.StringVar(&p.out, "out", "bin/bench", "folder for results.json, table.txt and the plots")
	flag.StringVar(&only, "only", strings.Join(experiments[:5], ","), "experiments to run, of "+strings.Join(experiments, ","))
	flag.StringVar(&rows, "rows", "10,1,1000", "sizes of transaction to drain, in rows")
	flag.StringVar(&contenders, "contenders", strings.Join(peers, ","), "of the drains, beside the relay")
	flag.StringVar(&against, "against", "", "other builds of the relay that take part in the drains")
	flag.IntVar(&p.rounds, "n", 5, "rounds, of which medians are taken")
	flag.IntVar(&p.events, "events", 200_000, "events in a backlog")
	flag.DurationVar(&p.round, "round", 10*time.Second, "length of a round at a steady rate")
	flag.DurationVar(&p.idle, "idle", 10*time.Second, "how long the idle relay is watched")
	flag.DurationVar(&p.down, "down", time.Minute, "how long the broker is down")
	flag.DurationVar(&p.patience, "patience", 30*time.Second, "how long to wait for a quiet machine before each run")
	flag.IntVar(&p.repeats, "repeats", 3, "how often a run that other processes disturbed is repeated")
	flag.StringVar(&contender.role, "role", "", "be a contender; for the bench itself")
	flag.StringVar(&contender.dsn, "dsn", "", "of a contender")
	flag.StringVar(&contender.natsURL, "nats-url", "", "of a contender")
	flag.StringVar(&contender.slot, "slot", "", "of a contender")
	flag.IntVar(&contender.size, "size", 256, "of a contender's payloads")
	flag.Parse()
	contender.events = p.events
	p.only, p.against, p.drains = list(only), list(against), list(contenders)

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if contender.role != "" {
		if err := contender.run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "error:", err)
			os.Exit(1)
		}
		return
	}
	err := p.check(rows)
	if err == nil {
		err = p.run(ctx)
	}
	if down := harness.Shutdown(); err == nil {
		err = down
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// list is what a flag with commas holds.
func list(s string) []string {
	return slices.DeleteFunc(strings.Split(s, ","), func(s string) bool { return s == "" })
}

func (p *plan) check(rows string) error {
	for _, name := range p.only {
		if !slices.Contains(experiments, name) {
			return fmt.Errorf("unknown experiment %q: known are %s", name, strings.Join(experiments, ", "))
		}
	}
	for _, c := range p.drains {
		if !slices.Contains(peers, c) {
			return fmt.Errorf("unknown contender %q: known are %s", c, strings.Join(peers, ", "))
		}
	}
	for _, bin := range p.against {
		if _, err := os.Stat(bin); err != nil {
			return fmt.Errorf("relay to compare with: %w", err)
		}
	}
	for _, n := range list(rows) {
		size, err := strconv.Atoi(n)
		if err != nil || size < 1 {
			return fmt.Errorf("%q is no number of rows: want a list such as 10,1,1000", n)
		}
		p.rows = append(p.rows, size)
	}
	if p.rounds < 1 || p.events < 1000 {
		return fmt.Errorf("want at least 1 round and 1000 events, not %d and %d", p.rounds, p.events)
	}
	if p.bin != "" {
		return os.Setenv("WALRELAY_BIN", p.bin) // what harness.BuildRelay takes
	}
	return nil
}

func (p plan) run(ctx context.Context) error {
	l, err := openLab(ctx, p)
	if err != nil {
		return err
	}
	r := &results{Machine: thisMachine(l.versions(ctx)), Began: time.Now().UTC().Format(time.RFC3339), Rounds: p.rounds}
	say("%s, %d cores, %s, load %s", r.Machine.CPU, r.Machine.Cores, r.Machine.Versions, r.Machine.Load)
	for _, name := range experiments {
		if !slices.Contains(p.only, name) {
			continue
		}
		switch name {
		case "drain":
			r.Drains, err = l.drainAll(ctx, p)
		case "start":
			r.Start, err = l.starts(ctx, p.rounds)
		case "latency":
			r.Steady, err = l.pace(ctx, p.rounds, p.round)
		case "memory":
			r.Memory, err = l.states(ctx, p.events, p.idle, p.down)
		case "growth":
			r.Growth, err = l.grow(ctx, p.events, min(p.rounds, 3))
		case "sync":
			r.Sync, err = l.syncs(ctx, p.events/10, p.rounds)
		case "profile":
			r.Stages, err = l.profile(ctx, p.events, p.out)
		case "shards":
			r.Shards, err = l.shards(ctx, p.events, p.rounds)
		}
		if err != nil {
			return err
		}
		// What is there so far is worth keeping if a later experiment fails.
		r.measures()
		if err := r.save(p.out); err != nil {
			return fmt.Errorf("save results: %w", err)
		}
	}
	fmt.Printf("%s, %d cores, %s, %s, %d rounds, load %s at the start, %s at the end\n\n",
		r.Machine.CPU, r.Machine.Cores, r.Machine.Versions, r.Machine.Go, r.Rounds, r.Machine.Load, load())
	r.table(os.Stdout)
	fmt.Printf("\nresults.json, table.txt and plots are in %s\n", p.out)
	return nil
}
