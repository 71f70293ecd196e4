package chaos

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// fault is one kind of harm. run does it, waits and mends it again; an error
// is a broken promise or a broken test, never the fault itself.
type fault struct {
	name     string
	on       string // what no other fault may touch meanwhile; empty for nothing
	ofRelay  bool
	replicas int // only with so many; 0 for any
	relays   int // only with at least so many
	hold     func(p *plan, rng *rand.Rand) time.Duration
	run      func(ctx context.Context, w *world, s step) error
}

func short(_ *plan, rng *rand.Rand) time.Duration {
	return between(rng, 0, 800*time.Millisecond)
}

func moment(*plan, *rand.Rand) time.Duration { return 0 }

// long is longer than the ack timeout, and now and then than the walsender's.
func long(p *plan, rng *rand.Rand) time.Duration {
	if rng.IntN(3) == 0 {
		return p.walSender + between(rng, 300*time.Millisecond, time.Second)
	}
	return p.ack + between(rng, 100*time.Millisecond, time.Second)
}

func either(a, b func(*plan, *rand.Rand) time.Duration) func(*plan, *rand.Rand) time.Duration {
	return func(p *plan, rng *rand.Rand) time.Duration {
		if rng.IntN(2) == 0 {
			return a(p, rng)
		}
		return b(p, rng)
	}
}

// faults are all kinds. Their order is part of what a seed means.
var faults = []*fault{
	{name: "relay SIGKILL", on: "relay", ofRelay: true, hold: short, run: killRelay},
	{name: "relay SIGSTOP", on: "relay", ofRelay: true, hold: long, run: freezeRelay},
	{name: "relay SIGTERM", on: "relay", ofRelay: true, hold: short, run: termRelay},
	{name: "active relay SIGKILL", on: "relay", relays: 2, hold: long, run: onActive(killRelay)},
	{name: "active relay SIGSTOP, wakes after takeover", on: "relay", relays: 2, hold: outlast, run: onActive(freezeRelay)},

	{name: "broker SIGKILL", on: "broker", replicas: 1, hold: short, run: killNodes(1)},
	{name: "broker SIGTERM", on: "broker", replicas: 1, hold: short, run: stopNode},
	{name: "broker SIGSTOP", on: "broker", replicas: 1, hold: either(short, long), run: freezeNode},

	{name: "node SIGKILL", on: "broker", replicas: 3, hold: short, run: killNodes(1)},
	{name: "node SIGTERM", on: "broker", replicas: 3, hold: short, run: stopNode},
	{name: "node SIGSTOP", on: "broker", replicas: 3, hold: either(short, long), run: freezeNode},
	{name: "stream leader SIGKILL", on: "broker", replicas: 3, hold: short, run: onLeader(killNode)},
	{name: "stream leader SIGSTOP", on: "broker", replicas: 3, hold: long, run: onLeader(freeze)},
	{name: "stream leader step-down", replicas: 3, hold: moment, run: stepDown(stream)},
	{name: "checkpoint leader step-down", replicas: 3, hold: moment, run: stepDown("KV_walrelay")},
	{name: "majority SIGKILL", on: "broker", replicas: 3, hold: short, run: killNodes(2)},
	{name: "all nodes SIGKILL", on: "broker", replicas: 3, hold: short, run: killNodes(3)},

	{name: "postgres fast restart", on: "postgres", hold: short, run: restart(harness.Fast)},
	{name: "postgres immediate restart", on: "postgres", hold: short, run: restart(harness.Immediate)},
	{name: "postgres SIGKILL", on: "postgres", hold: short, run: killPostgres},
	{name: "postgres SIGSTOP", on: "postgres", hold: either(short, long), run: freezePostgres},
	{name: "walsender terminated", hold: moment, run: terminate("select pg_terminate_backend(pid) from pg_stat_replication")},
	{name: "watcher terminated", hold: moment, run: terminate("select pg_terminate_backend(pid) from pg_stat_activity where backend_type = 'client backend' and application_name like 'relay%'")},

	{name: "postgres link cut", on: "postgres link", ofRelay: true, hold: short, run: onLink(postgresLink, (*harness.Proxy).Cut)},
	{name: "postgres link stalled", on: "postgres link", ofRelay: true, hold: either(short, long), run: onLink(postgresLink, (*harness.Proxy).Stall)},
	{name: "postgres link half open", on: "postgres link", ofRelay: true, hold: short, run: halfOpen(postgresLink)},
	{name: "postgres link delayed", on: "postgres link", ofRelay: true, hold: short, run: delayed(postgresLink)},
	{name: "postgres link throttled", on: "postgres link", ofRelay: true, hold: short, run: throttled(postgresLink)},
	{name: "postgres link cut after k bytes", on: "postgres link", ofRelay: true, hold: short, run: cutAfter(postgresLink)},
	{name: "nats link cut", on: "nats link", ofRelay: true, hold: short, run: onLink(natsLink, (*harness.Proxy).Cut)},
	{name: "nats link stalled", on: "nats link", ofRelay: true, hold: either(short, long), run: onLink(natsLink, (*harness.Proxy).Stall)},
	{name: "nats link half open", on: "nats link", ofRelay: true, hold: short, run: halfOpen(natsLink)},
	{name: "nats link delayed", on: "nats link", ofRelay: true, hold: short, run: delayed(natsLink)},
	{name: "nats link throttled", on: "nats link", ofRelay: true, hold: short, run: throttled(natsLink)},
	{name: "nats link cut after k bytes", on: "nats link", ofRelay: true, hold: short, run: cutAfter(natsLink)},
	// The relay opens the connection that it publishes on last, so the one for
	// checkpoints goes on.
	{name: "publishes and acks late", on: "nats link", ofRelay: true, hold: either(short, long), run: onLink(natsLink, (*harness.Proxy).HoldNewest)},

	{name: "stream full", on: "stream", hold: either(short, long), run: fullStream},
	{name: "stream purged", on: "stream", hold: moment, run: purge},
	{name: "poison event", hold: moment, run: poison},
	{name: "poison until a limit is raised", on: "stream", hold: short, run: raisedLimit},

	{name: "column added and dropped", hold: moment, run: terminate("alter table " + table + " add odd text default 'x'; alter table " + table + " drop odd")},
	{name: "column renamed and back", hold: moment, run: terminate("alter table " + table + " rename payload to body; alter table " + table + " rename body to payload")},
	// Postgres 18 sends a stream-abort message for it.
	{name: "transaction spilled after a savepoint and rolled back", hold: moment, run: terminate("create table if not exists spilled (v text)",
		"begin; savepoint a; insert into spilled values ('a'); release a; insert into spilled select repeat('x', 200) from generate_series(1, 2000); rollback")},
}

// outlast is longer than it takes Postgres to give the slot to the other relay.
func outlast(p *plan, rng *rand.Rand) time.Duration {
	return p.walSender + between(rng, time.Second, 1500*time.Millisecond)
}

func killRelay(ctx context.Context, w *world, s step) error {
	r := w.relays[s.relay]
	if err := r.kill(); err != nil {
		return err
	}
	pause(ctx, s.hold)
	return r.start(w)
}

func freezeRelay(ctx context.Context, w *world, s step) error {
	r := w.relays[s.relay]
	r.Freeze()
	pause(ctx, s.hold)
	r.Thaw()
	return nil
}

func termRelay(ctx context.Context, w *world, s step) error {
	r := w.relays[s.relay]
	young := time.Since(r.started) < time.Second
	code, err := r.stop()
	if err != nil {
		return err
	}
	switch {
	case code == 0:
	case code == 6: // events are in flight when something else is down
	case code == -1 && young: // it was not yet ready to hear the signal
	default:
		w.fail("%s: exit code %d after SIGTERM", r.name, code)
	}
	pause(ctx, s.hold)
	return r.start(w)
}

// onActive does something to the relay that holds the slot.
func onActive(do func(context.Context, *world, step) error) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		if i, ok := w.active(ctx); ok {
			s.relay = i
		}
		w.note("  it is relay%d", s.relay)
		return do(ctx, w, s)
	}
}

func killNodes(n int) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		first := int(s.choice % uint64(len(w.nodes)))
		for i := range n {
			if err := w.nodes[(first+i)%len(w.nodes)].Kill(); err != nil {
				return err
			}
		}
		pause(ctx, s.hold)
		for i := range n {
			if err := w.nodes[(first+i)%len(w.nodes)].Launch(); err != nil {
				return err
			}
			pause(ctx, s.also/time.Duration(n))
		}
		return nil
	}
}

func killNode(ctx context.Context, s step, n *harness.NATS) error {
	if err := n.Kill(); err != nil {
		return err
	}
	pause(ctx, s.hold)
	return n.Launch()
}

func stopNode(ctx context.Context, w *world, s step) error {
	n := w.nodes[s.choice%uint64(len(w.nodes))]
	if err := n.Stop(); err != nil {
		return err
	}
	pause(ctx, s.hold)
	return n.Launch()
}

func freezeNode(ctx context.Context, w *world, s step) error {
	return freeze(ctx, s, w.nodes[s.choice%uint64(len(w.nodes))])
}

func freeze(ctx context.Context, s step, n *harness.NATS) error {
	n.Freeze()
	pause(ctx, s.hold)
	n.Thaw()
	return nil
}

func onLeader(do func(context.Context, step, *harness.NATS) error) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		n := w.leader(ctx)
		if n == nil {
			w.note("  the stream has no leader")
			return nil
		}
		return do(ctx, s, n)
	}
}

func stepDown(name string) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if _, err := w.nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+name, nil); err != nil {
			w.note("  step-down: %v", err)
		}
		return nil
	}
}

// stopLimit is how long Postgres may take to shut down: five seconds, when the
// relay cannot hear of it because it is stopped or cut off, after the
// walsender's timeout.
func (p *plan) stopLimit() time.Duration { return 5*time.Second + p.walSender }

func restart(mode harness.StopMode) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		if _, err := w.pg.Stop(mode, w.plan.stopLimit()); err != nil {
			return err
		}
		pause(ctx, s.hold)
		return w.pg.Start(ctx)
	}
}

func killPostgres(ctx context.Context, w *world, s step) error {
	if err := w.pg.Kill(); err != nil {
		return err
	}
	pause(ctx, s.hold)
	return w.pg.Start(ctx)
}

func freezePostgres(ctx context.Context, w *world, s step) error {
	w.pg.Freeze()
	pause(ctx, s.hold)
	w.pg.Thaw()
	return nil
}

func terminate(sql ...string) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		if err := w.pg.Exec(ctx, sql...); err != nil {
			w.note("  terminate: %v", err)
		}
		return nil
	}
}

func postgresLink(r *relay) []*harness.Proxy { return []*harness.Proxy{r.toPostgres} }
func natsLink(r *relay) []*harness.Proxy     { return r.toNATS }

func onLink(link func(*relay) []*harness.Proxy, harm func(*harness.Proxy)) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		ps := link(w.relays[s.relay])
		for _, p := range ps {
			harm(p)
		}
		pause(ctx, s.hold)
		for _, p := range ps {
			if err := p.Heal(); err != nil {
				return err
			}
		}
		return nil
	}
}

func halfOpen(link func(*relay) []*harness.Proxy) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		side := harness.Direction(s.choice % 2)
		return onLink(link, func(p *harness.Proxy) { p.HalfOpen(side) })(ctx, w, s)
	}
}

func delayed(link func(*relay) []*harness.Proxy) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		d := time.Duration(1+s.choice%300) * time.Millisecond
		return onLink(link, func(p *harness.Proxy) { p.Delay(d) })(ctx, w, s)
	}
}

func throttled(link func(*relay) []*harness.Proxy) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		rate := int64(1<<10) << (s.choice % 8)
		return onLink(link, func(p *harness.Proxy) { p.Throttle(rate) })(ctx, w, s)
	}
}

func cutAfter(link func(*relay) []*harness.Proxy) func(context.Context, *world, step) error {
	return func(ctx context.Context, w *world, s step) error {
		side, n := harness.Direction(s.choice%2), int64(1+s.choice>>1%30_000)
		return onLink(link, func(p *harness.Proxy) { p.CutAfter(side, n) })(ctx, w, s)
	}
}

// fullStream lets the stream refuse messages by one of its two limits.
func fullStream(ctx context.Context, w *world, s step) error {
	more := int64(s.choice % 40)
	err := w.reconfigure(ctx, func(c *jetstream.StreamConfig, now jetstream.StreamState) {
		c.Discard = jetstream.DiscardNew
		if s.choice>>8%2 == 0 {
			c.MaxMsgs = max(int64(now.Msgs)+more, 1)
		} else {
			c.MaxBytes = max(int64(now.Bytes)+more*500, 64<<10)
		}
	})
	if err != nil {
		w.note("  fill: %v", err)
	}
	pause(ctx, s.hold)
	return w.lift(ctx)
}

// purge takes away what a consumer has read: all, or all but the last message.
func purge(ctx context.Context, w *world, s step) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	last, err := w.witness.read(ctx, w.js)
	if err == nil && last > 0 {
		var st jetstream.Stream
		if st, err = w.stream(ctx); err == nil {
			err = st.Purge(ctx, jetstream.WithPurgeSequence(last+s.choice%2))
		}
	}
	if err != nil {
		w.note("  purge: %v", err)
	}
	return nil
}

// poison commits an event that is larger than the server takes, between two good ones.
func poison(ctx context.Context, w *world, s step) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if err := w.write(ctx, "poison", 10, maxPayload+1000, 10); err != nil {
		w.note("  poison: %v", err)
	}
	return nil
}

// raisedLimit commits events that the stream does not take until its limit is raised: each is
// parked or stored, never both.
func raisedLimit(ctx context.Context, w *world, s step) error {
	err := w.reconfigure(ctx, func(c *jetstream.StreamConfig, _ jetstream.StreamState) { c.MaxMsgSize = 16 << 10 })
	if err != nil {
		w.note("  limit: %v", err)
		return w.lift(ctx)
	}
	short, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	for range 3 {
		if err := w.write(short, "limited", 10, 30_000, 10); err != nil {
			w.note("  limited: %v", err)
		}
	}
	pause(ctx, s.hold)
	return w.lift(ctx)
}
