package chaos

import (
	"context"
	"encoding/binary"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// calm is a plan without faults, for scenarios that make their own.
func calm() *plan {
	return &plan{
		mode:     modes[0],
		replicas: 1, relays: 1, window: 128, rows: 5, padding: 200, rate: 100,
		status: 200 * time.Millisecond, ack: time.Second, walSender: 3 * time.Second, backoff: 2 * time.Second,
	}
}

// scene is a world with one relay that streams.
type scene struct {
	*world
	t       *testing.T
	relay   *relay
	writers *harness.Writers
}

func newScene(t *testing.T, p *plan) *scene {
	t.Helper()
	s := &scene{world: newWorld(t, p), t: t}
	s.writers = harness.NewWriters(harness.Workload{DSN: s.pg.DSN("postgres"), Writers: 4, Rate: p.rate, Seed: 1})
	s.diary = s.writers.Diary
	s.relay = s.relays[0]
	s.relay.Detach = "" // its lines are waited for
	s.relay.MustStart(t)
	s.relay.MustAwait(t, 20*time.Second, "msg=streaming")
	return s
}

// commit writes n events while everything is well, or is not.
func (s *scene) commit(n int) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 30*time.Second)
	defer cancel()
	if err := s.writers.Run(ctx, n); err != nil {
		s.t.Fatal(err)
	}
}

// await polls for what gives no signal.
func (s *scene) await(limit time.Duration, what string, ok func() bool) time.Duration {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), limit)
	defer cancel()
	began := time.Now()
	if !until(ctx, 10*time.Millisecond, ok) {
		s.t.Fatalf("after %s still not: %s", limit, what)
	}
	return time.Since(began)
}

// logged counts the relay's lines that hold text.
func (s *scene) logged(text string) int {
	n := 0
	for _, line := range s.relay.Lines() {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// told are the relay's lines after the first n, but for those of level debug,
// which an operator does not get unless asked for.
func (s *scene) told(n int) []string {
	return slices.DeleteFunc(slices.Clone(s.relay.Lines()[n:]), func(line string) bool { return strings.Contains(line, "level=DEBUG") })
}

const ended = "session ended, trying again"

// recovered wants all that was committed to be stored soon, each once and in order.
func (s *scene) recovered(limit time.Duration) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), limit)
	defer cancel()
	if err := s.diary.Resolve(ctx, s.pg.MustConn(s.t), table); err != nil {
		s.t.Fatal(err)
	}
	if err := harness.AwaitMessages(ctx, s.js, stream, s.diary.Committed()); err != nil {
		s.t.Error(err)
	}
	all, err := harness.ReadStream(ctx, s.js, stream)
	if err != nil {
		s.t.Fatal(err)
	}
	if res := harness.Compare(s.diary, all); !res.OK() {
		s.t.Errorf("stream and table disagree: %s", res)
	}
	if !s.relay.Running() {
		s.t.Error("the relay ended by itself")
	}
}

func TestFrozenServersAreNoticed(t *testing.T) {
	for _, c := range []struct {
		name         string
		limit        time.Duration // until it is told
		freeze, thaw func(s *scene)
	}{
		// The silence that is allowed, as long for the question, and then for closing and the diagnosis.
		{"postgres", 18 * time.Second, func(s *scene) { s.pg.Freeze() }, func(s *scene) { s.pg.Thaw() }},
		{"broker", 8 * time.Second, func(s *scene) { s.nodes[0].Freeze() }, func(s *scene) { s.nodes[0].Thaw() }},
		{
			"postgres link stalled", 14 * time.Second,
			func(s *scene) { s.relay.toPostgres.Stall() },
			func(s *scene) { s.relay.toPostgres.Heal() },
		},
		{
			"postgres link half open", 14 * time.Second,
			func(s *scene) { s.relay.toPostgres.HalfOpen(harness.ToClient) },
			func(s *scene) {},
		},
		{
			"nats link half open", 8 * time.Second,
			func(s *scene) { s.relay.toNATS[0].HalfOpen(harness.ToClient) },
			func(s *scene) {},
		},
	} {
		for _, load := range []bool{false, true} {
			name := c.name + ", idle"
			if load {
				name = c.name + ", under load"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				s := newScene(t, calm())
				s.commit(50)
				var writing sync.WaitGroup
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				if load {
					writing.Go(func() { s.writers.Run(ctx, -1) })
				} else {
					s.recovered(10 * time.Second)
				}
				c.freeze(s)
				took := s.await(c.limit, "the relay says that the session ended", func() bool { return s.logged(ended) > 0 })
				t.Logf("noticed after %s", took.Round(time.Millisecond))
				c.thaw(s)
				stop()
				writing.Wait()
				s.commit(20)
				s.recovered(20 * time.Second)
			})
		}
	}
}

// A quiet database is none of these.
func TestQuietIsNotFrozen(t *testing.T) {
	t.Parallel()
	p := calm()
	s := newScene(t, p)
	s.commit(50)
	s.recovered(10 * time.Second)
	pause(t.Context(), 10*time.Second)
	if n := s.logged(ended); n > 0 {
		t.Errorf("%d sessions ended", n)
	}
	s.commit(20)
	s.recovered(10 * time.Second)
}

// A peer that answers keepalives but passes nothing else on is not Postgres, but
// what is between.
func TestPeerThatOnlyAnswersKeepalives(t *testing.T) {
	t.Parallel()
	p := calm()
	w := newWorld(t, p)
	m := newMute(t, w.pg.Addr())
	s := &scene{world: w, t: t, relay: w.relays[0]}
	s.writers = harness.NewWriters(harness.Workload{DSN: w.pg.DSN("postgres"), Writers: 4, Rate: p.rate, Seed: 1})
	s.diary = s.writers.Diary
	for i, arg := range s.relay.Args {
		s.relay.Args[i] = strings.ReplaceAll(arg, s.relay.toPostgres.Addr(), m.addr)
	}
	s.relay.Detach = ""
	s.relay.MustStart(t)
	s.relay.MustAwait(t, 20*time.Second, "msg=streaming")
	s.commit(50)
	s.recovered(10 * time.Second)
	m.muted.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var writing sync.WaitGroup
	writing.Go(func() { s.writers.Run(ctx, -1) })
	took := s.await(15*time.Second, "the relay says that the session ended", func() bool { return s.logged(ended) > 0 })
	t.Logf("noticed after %s", took.Round(time.Millisecond))
	m.muted.Store(false)
	stop()
	writing.Wait()
	s.recovered(20 * time.Second)
}

// mute is a proxy to Postgres that, when told to, drops the data of replication
// streams and lets keepalives through, as if the log stood still.
type mute struct {
	addr  string
	muted atomic.Bool
}

func newMute(t *testing.T, target string) *mute {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &mute{addr: ln.Addr().String()}
	var running sync.WaitGroup
	t.Cleanup(func() {
		ln.Close()
		running.Wait()
	})
	running.Go(func() {
		for {
			client, err := ln.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", target)
			if err != nil {
				client.Close()
				continue
			}
			running.Go(func() {
				defer client.Close()
				defer server.Close()
				io.Copy(server, client)
			})
			running.Go(func() {
				defer client.Close()
				defer server.Close()
				m.pass(client, server)
			})
			context.AfterFunc(t.Context(), func() { client.Close() })
		}
	})
	return m
}

// pass forwards the messages of a server: a type, a length, a body.
func (m *mute) pass(client io.Writer, server io.Reader) {
	var last [8]byte // WAL end of the last keepalive that was passed on as it was
	for {
		var head [5]byte
		if _, err := io.ReadFull(server, head[:]); err != nil {
			return
		}
		msg := make([]byte, 1+binary.BigEndian.Uint32(head[1:]))
		copy(msg, head[:])
		if _, err := io.ReadFull(server, msg[5:]); err != nil {
			return
		}
		if head[0] == 'd' && m.muted.Load() {
			if msg[5] == 'w' {
				continue
			}
			copy(msg[6:14], last[:])
		} else if head[0] == 'd' && msg[5] == 'k' {
			copy(last[:], msg[6:14])
		}
		if _, err := client.Write(msg); err != nil {
			return
		}
	}
}

// In every state of failure the relay tries a few times a second at most, and
// says once what it waits for.
func TestFailuresAreNeitherSpunOnNorRepeated(t *testing.T) {
	must := func(s *scene, err error) {
		s.t.Helper()
		if err != nil {
			s.t.Fatal(err)
		}
	}
	for _, c := range []struct {
		name       string
		fail, mend func(s *scene)
	}{
		{
			"postgres down", // the proxy accepts and resets, as a load balancer does
			func(s *scene) { must(s, s.pg.Kill()) },
			func(s *scene) { s.pg.MustStart(s.t) },
		},
		{"postgres frozen", func(s *scene) { s.pg.Freeze() }, func(s *scene) { s.pg.Thaw() }},
		{
			"postgres link cut",
			func(s *scene) { s.relay.toPostgres.Cut() },
			func(s *scene) { must(s, s.relay.toPostgres.Heal()) },
		},
		{
			"broker down",
			func(s *scene) { must(s, s.nodes[0].Kill()) },
			func(s *scene) { s.nodes[0].MustStart(s.t) },
		},
		{"broker frozen", func(s *scene) { s.nodes[0].Freeze() }, func(s *scene) { s.nodes[0].Thaw() }},
		{
			"nats link cut",
			func(s *scene) { s.relay.toNATS[0].Cut() },
			func(s *scene) { must(s, s.relay.toNATS[0].Heal()) },
		},
		{
			"stream full",
			func(s *scene) { s.limit(1) },
			func(s *scene) { s.limit(-1) },
		},
		{
			"stream that takes a message now and then", // each session gets somewhere
			func(s *scene) {
				s.limit(1)
				ctx, stop := context.WithCancel(s.t.Context())
				s.t.Cleanup(stop)
				go func() {
					for pause(ctx, 100*time.Millisecond) {
						s.grow(ctx)
					}
				}()
			},
			nil,
		},
		{
			"slot held by another",
			func(s *scene) {
				other := s.newRelay(1)
				s.relay.Freeze()
				must(s, other.start(s.world))
				s.await(20*time.Second, "the other relay took over", func() bool { return s.holder(s.t.Context()) == "relay1" })
				s.relay.Thaw()
				s.t.Cleanup(func() { other.kill() })
			},
			nil,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, calm())
			s.commit(50)
			s.recovered(10 * time.Second)
			before := len(s.relay.Lines())
			c.fail(s)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var writing sync.WaitGroup
			writing.Go(func() { s.writers.Run(ctx, -1) }) // something to do, which cannot be done
			const watched = 6 * time.Second
			pg, nc := s.relay.toPostgres.Accepted(), s.relay.toNATS[0].Accepted()
			pause(t.Context(), watched)
			pg, nc = s.relay.toPostgres.Accepted()-pg, s.relay.toNATS[0].Accepted()-nc
			lines := s.told(before)
			t.Logf("in %s: %d connections to postgres, %d to the broker, %d lines", watched, pg, nc, len(lines))
			// One attempt takes up to four connections to Postgres and two to the broker.
			if pg > 4*4*int64(watched.Seconds()) || nc > 4*2*int64(watched.Seconds()) {
				t.Errorf("%d and %d connections in %s, want no more than four attempts a second", pg, nc, watched)
			}
			if len(lines) > 5 {
				t.Errorf("%d lines in %s:\n%s", len(lines), watched, strings.Join(lines, "\n"))
			}
			if !s.relay.Running() {
				t.Fatal("the relay ended by itself")
			}
			if c.mend != nil {
				c.mend(s)
			}
			stop()
			writing.Wait()
			if c.mend != nil {
				s.commit(20)
				s.recovered(20 * time.Second)
			}
		})
	}
}

// limit makes the stream refuse more than n messages beyond what it holds; -1 lifts that.
func (s *scene) limit(n int64) {
	s.t.Helper()
	if err := s.reconfigure(s.t.Context(), func(c *jetstream.StreamConfig, now jetstream.StreamState) {
		c.Discard, c.MaxMsgs = jetstream.DiscardNew, -1
		if n > 0 {
			c.MaxMsgs = int64(now.Msgs) + n
		}
	}); err != nil {
		s.t.Fatal(err)
	}
}

// grow lets one more message in.
func (s *scene) grow(ctx context.Context) {
	_ = s.reconfigure(ctx, func(c *jetstream.StreamConfig, now jetstream.StreamState) {
		c.MaxMsgs = int64(now.Msgs) + 1
	})
}
