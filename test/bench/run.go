package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// The contenders.
const (
	theRelay    = "walrelay"
	recvlogical = "pg_recvlogical"
	publishOnly = "publish"
	polling     = "poll"
	listener    = "listen"
)

// peers of the relay in a drain.
var peers = []string{recvlogical, publishOnly, polling}

// runLimit bounds one run of a contender.
const runLimit = 10 * time.Minute

// run is one drain by one contender. Its times count from the start of the process.
type run struct {
	Contender string        `json:"contender"`
	Events    int           `json:"events"`
	First     time.Duration `json:"first_ns,omitempty"` // until the first event was stored
	Took      time.Duration `json:"took_ns"`            // until the last one was
	CPU       time.Duration `json:"cpu_ns"`             // of the contender: user and system, start included
	StartCPU  time.Duration `json:"start_cpu_ns,omitempty"`
	NATS      time.Duration `json:"nats_cpu_ns,omitempty"`
	Postgres  time.Duration `json:"postgres_cpu_ns,omitempty"`
	Memory    memory        `json:"memory"`
	Others    float64       `json:"others"` // cores that other processes of the machine kept busy meanwhile
}

// Rate is events a second, the start of the process included.
func (r run) Rate() float64 { return float64(r.Events) / r.Took.Seconds() }

// Steady is events a second from the first stored event on.
func (r run) Steady() float64 { return float64(r.Events-1) / (r.Took - r.First).Seconds() }

// PerEvent is the contender's processor time an event in microseconds, without what
// the start took.
func (r run) PerEvent() float64 {
	return float64((r.CPU - r.StartCPU).Nanoseconds()) / 1000 / float64(r.Events)
}

func (r run) natsPerEvent() float64     { return perEvent(r.NATS, r.Events) }
func (r run) postgresPerEvent() float64 { return perEvent(r.Postgres, r.Events) }

// drain runs a contender over the backlog once.
func (l *lab) drain(ctx context.Context, contender string, b backlog) (run, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, runLimit, fmt.Errorf("%s took longer than %s", contender, runLimit))
	defer cancel()
	r := run{Contender: contender, Events: b.Events}
	var err error
	if contender == recvlogical {
		err = l.receive(ctx, b, &r)
	} else {
		err = l.store(ctx, b, &r)
	}
	if err != nil {
		return r, fmt.Errorf("drain with %s: %w", contender, err)
	}
	return r, nil
}

// receive runs pg_recvlogical, which ends by itself at the end of the backlog.
func (l *lab) receive(ctx context.Context, b backlog, r *run) error {
	slot, err := l.slot(ctx)
	if err != nil {
		return err
	}
	before := l.meter()
	cmd := exec.CommandContext(ctx, l.recvlogical, "-d", l.pg.DSN("postgres"), "--slot", slot, "--start", "--endpos", b.end,
		"-o", "proto_version=1", "-o", "publication_names="+publication, "-f", os.DevNull)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	from := time.Now()
	out, err := cmd.CombinedOutput()
	r.Took = time.Since(from)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	r.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	l.spent(before, r)
	r.NATS = 0
	return l.dropSlot(ctx, slot)
}

// store runs a contender that publishes to the stream.
func (l *lab) store(ctx context.Context, b backlog, r *run) error {
	if err := l.newStream(ctx); err != nil {
		return err
	}
	p, slot, err := l.contender(ctx, r.Contender, b)
	if err != nil {
		return err
	}
	defer p.Kill()
	before := l.meter()
	from := before.at
	if err := p.Start(); err != nil {
		return err
	}
	began := make(chan time.Duration, 1)
	go func() {
		_, _ = p.AwaitText(ctx, "streaming") // what the other contenders say, too
		began <- cpuOf(p.PID())
	}()
	s, err := l.state(ctx, b.Events)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, p.Output())
	}
	r.CPU = cpuOf(p.PID())
	r.StartCPU = min(<-began, r.CPU)
	r.First, r.Took = s.FirstTime.Sub(from), s.LastTime.Sub(from)
	r.Memory = memoryOf(p.PID())
	l.spent(before, r)
	if s.Msgs != uint64(b.Events) {
		return fmt.Errorf("%d messages are stored for %d events", s.Msgs, b.Events)
	}
	return l.finish(ctx, p, slot)
}

// isRelay reports whether a contender is a build of the relay.
func (l *lab) isRelay(name string) bool { return name == theRelay || slices.Contains(l.against, name) }

// contender makes the process, and the slot that it reads.
func (l *lab) contender(ctx context.Context, name string, b backlog) (p *harness.Relay, slot string, err error) {
	switch {
	case l.isRelay(name), name == listener:
		if slot, err = l.slot(ctx); err != nil {
			return nil, "", err
		}
	case name == polling:
		if err := l.fillPoll(ctx, b); err != nil {
			return nil, "", err
		}
	}
	switch {
	case name == theRelay:
		return &harness.Relay{Bin: l.relay, Args: l.relayArgs(slot)}, slot, nil
	case l.isRelay(name):
		return &harness.Relay{Bin: name, Args: l.relayArgs(slot)}, slot, nil
	}
	dsn := l.pg.DSN("postgres")
	if name == polling {
		dsn = l.poll.DSN("postgres")
	}
	return &harness.Relay{Bin: l.self, Args: []string{
		"-role", name, "-dsn", dsn, "-nats-url", l.nats.URL(), "-slot", slot,
		"-events", strconv.Itoa(b.Events), "-size", strconv.Itoa(b.Size),
	}}, slot, nil
}

// finish ends a contender in order.
func (l *lab) finish(ctx context.Context, p *harness.Relay, slot string) error {
	if err := p.Term(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	code, err := p.Wait(ctx)
	if err != nil {
		return err
	}
	if code != 0 {
		return fmt.Errorf("exit code %d\n%s", code, p.Output())
	}
	if slot == "" {
		return nil
	}
	return l.dropSlot(ctx, slot)
}

// reading is the processor time that was used by then.
type reading struct {
	at             time.Time
	nats, pg, self time.Duration
	machine        time.Duration
}

func (l *lab) meter() reading {
	r := reading{nats: cpuOf(l.nats.PID()), pg: cpuOfTree(l.pg.PID()), self: cpuOf(os.Getpid()), machine: busy(), at: time.Now()}
	if l.poll != nil {
		r.pg += cpuOfTree(l.poll.PID())
	}
	return r
}

// others is how many cores were kept busy since by processes that are not of
// the benchmark; contender is what that has used.
func (r reading) others(since reading, contender time.Duration) float64 {
	used := r.machine - since.machine
	ours := r.nats - since.nats + r.pg - since.pg + r.self - since.self + contender
	return max(float64(used-ours)/float64(r.at.Sub(since.at)), 0)
}

// spent is what the servers have used since before.
func (l *lab) spent(before reading, r *run) {
	now := l.meter()
	r.NATS, r.Postgres = now.nats-before.nats, now.pg-before.pg
	r.Others = now.others(before, r.CPU)
}

const (
	quietCores        = 0.1 // that others may keep busy before a run
	disturbance       = 0.2 // and in a run
	quietSample       = 200 * time.Millisecond
	quietInSuccession = 5
)

// calm waits for a machine that does nothing else, as long as patience lasts.
func (l *lab) calm(ctx context.Context) error {
	limit := time.Now().Add(l.patience)
	for quiet := 0; quiet < quietInSuccession && time.Now().Before(limit); {
		before := busy()
		if err := pause(ctx, quietSample); err != nil {
			return err
		}
		if quiet++; float64(busy()-before)/float64(quietSample) > quietCores {
			quiet = 0
		}
	}
	return nil
}

// undisturbed measures when the machine is quiet, and again when it was not.
func undisturbed[T any](ctx context.Context, l *lab, measure func() (T, error), others func(T) float64) (T, error) {
	for try := 0; ; try++ {
		var none T
		if err := l.calm(ctx); err != nil {
			return none, err
		}
		v, err := measure()
		if err != nil || others(v) <= disturbance || try >= l.repeats {
			return v, err
		}
		say("  again: other processes kept %.1f cores busy", others(v))
	}
}

// count writes a number with separators.
func count(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// say tells on stderr what is under way.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s  %s\n", time.Now().Format("15:04:05"), strings.TrimSpace(fmt.Sprintf(format, args...)))
}

// under names a file in the output folder.
func under(dir, name string) string { return filepath.Join(dir, name) }
