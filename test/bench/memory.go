package main

import (
	"context"
	"fmt"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// state is the memory of a relay in one of the four states.
type state struct {
	Name   string `json:"name"`
	Memory memory `json:"memory"`
}

// states measures the resident memory of the relay: idle, in a drain, in one
// huge transaction, and with the broker down in front of a large backlog.
func (l *lab) states(ctx context.Context, events int, idle, down time.Duration) ([]state, error) {
	var all []state
	add := func(name string, m memory) {
		all = append(all, state{name, m})
		say("  %-40s peak %.1f MB, %.1f MB now, of which %.1f MB anonymous", name, mb(m.Peak), mb(m.RSS), mb(m.Anon))
	}
	say("memory in four states")
	if _, err := l.write(ctx, backlog{Events: 0, Rows: 1, Size: 256}); err != nil {
		return nil, err
	}
	m, err := l.rest(ctx, idle)
	if err != nil {
		return nil, fmt.Errorf("memory of an idle relay: %w", err)
	}
	add("idle", m)
	for _, s := range []struct {
		name string
		b    backlog
	}{
		{"draining " + count(events) + " events", backlog{events, 10, 256, ""}},
		{"one transaction of " + count(5*events) + " rows", backlog{5 * events, 5 * events, 256, ""}},
	} {
		b, err := l.write(ctx, s.b)
		if err != nil {
			return all, err
		}
		r, err := l.drain(ctx, theRelay, b)
		if err != nil {
			return all, err
		}
		add(s.name, r.Memory)
	}
	b, err := l.write(ctx, backlog{Events: 5 * events, Rows: 100, Size: 1000})
	if err != nil {
		return all, err
	}
	if m, err = l.stuck(ctx, b, down); err != nil {
		return all, fmt.Errorf("memory while the broker is down: %w", err)
	}
	add(fmt.Sprintf("broker down for %s, backlog of %.1f GB", down, float64(b.Events)*float64(b.Size)/1e9), m)
	return all, nil
}

func mb(n int64) float64 { return float64(n) / 1e6 }

// rest starts a relay that has nothing to do.
func (l *lab) rest(ctx context.Context, d time.Duration) (memory, error) {
	if err := l.newStream(ctx); err != nil {
		return memory{}, err
	}
	p, slot, err := l.streaming(ctx)
	if err != nil {
		return memory{}, err
	}
	defer p.Kill()
	if err := pause(ctx, d); err != nil {
		return memory{}, err
	}
	m := memoryOf(p.PID())
	return m, l.finish(ctx, p, slot)
}

func (l *lab) streaming(ctx context.Context) (*harness.Relay, string, error) {
	p, slot, err := l.contender(ctx, theRelay, backlog{})
	if err != nil {
		return nil, "", err
	}
	if err := p.Start(); err != nil {
		return nil, "", err
	}
	_, err = p.AwaitText(ctx, "streaming")
	return p, slot, err
}

// stuck takes the broker away in the middle of a drain, then gives it back and
// wants the rest.
func (l *lab) stuck(ctx context.Context, b backlog, down time.Duration) (memory, error) {
	if err := l.newStream(ctx); err != nil {
		return memory{}, err
	}
	p, slot, err := l.streaming(ctx)
	if err != nil {
		return memory{}, err
	}
	defer p.Kill()
	if _, err := l.state(ctx, b.Events/20); err != nil {
		return memory{}, err
	}
	if err := l.nats.Kill(); err != nil {
		return memory{}, err
	}
	if err := pause(ctx, down); err != nil {
		return memory{}, err
	}
	m := memoryOf(p.PID())
	say("  peak %.1f MB before the broker is back, %.1f MB anonymous", mb(m.Peak), mb(m.Anon))
	if err := l.nats.Start(ctx); err != nil {
		return m, err
	}
	if _, err := l.state(ctx, b.Events); err != nil {
		return m, fmt.Errorf("%w\n%s", err, p.Output())
	}
	m.Peak = memoryOf(p.PID()).Peak
	return m, l.finish(ctx, p, slot)
}
