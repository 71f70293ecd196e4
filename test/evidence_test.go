package test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// insertEvents commits events of the given numbers, one transaction each.
func (r *rig) insertEvents(from, to int) {
	r.t.Helper()
	for i := from; i <= to; i++ {
		r.exec(fmt.Sprintf(`INSERT INTO outbox (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '%d', 'paid', '{"n": %d}')`, i, i))
	}
}

// bodies are those of the messages in the stream, in order.
func (r *rig) bodies() string {
	r.t.Helper()
	var all []string
	st := r.streamOf()
	for seq := range r.state().LastSeq {
		m, err := st.GetMsg(r.t.Context(), seq+1)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue
		}
		must(r.t, err)
		all = append(all, strings.TrimSuffix(strings.TrimPrefix(string(m.Data), `{"n": `), "}"))
	}
	return strings.Join(all, " ")
}

func (r *rig) wantBodies(want string) {
	r.t.Helper()
	if got := r.bodies(); got != want {
		r.t.Errorf("the stream holds %s, want %s", got, want)
	}
}

func (r *rig) streamOf() jetstream.Stream {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	return st
}

// lastSeq blocks until the stream's last sequence is n.
func (r *rig) lastSeq(n uint64) {
	r.t.Helper()
	r.await(30*time.Second, fmt.Sprintf("last sequence %d", n), func() bool { return r.state().LastSeq == n })
}

// allConfirmed blocks until the slot is confirmed up to what the WAL holds now.
func (r *rig) allConfirmed() {
	r.t.Helper()
	end := query[string](r, "select pg_current_wal_insert_lsn()::text")
	r.await(30*time.Second, "everything is confirmed", func() bool {
		return query[bool](r, "select confirmed_flush_lsn >= $2::pg_lsn from pg_replication_slots where slot_name = $1", slot, end)
	})
}

// lost starts the relay, which must end with exit code 5, and returns what it printed.
func (r *rig) lost(want ...string) string {
	r.t.Helper()
	r.relay.MustStart(r.t)
	code, err := r.relay.Wait(r.t.Context())
	must(r.t, err)
	out := r.relay.Output()
	if code != 5 {
		r.t.Fatalf("exit code %d, want 5:\n%s", code, out)
	}
	for _, text := range want {
		if !strings.Contains(out, text) {
			r.t.Errorf("no %q in\n%s", text, out)
		}
	}
	return out
}

// restart starts a relay that was stopped and waits until it streams.
func (r *rig) restart(args ...string) {
	r.t.Helper()
	was := r.relay.Args
	r.relay.Args = append(append([]string{}, was...), args...)
	r.relay.MustStart(r.t)
	r.relay.Args = was
	r.relay.MustAwait(r.t, 30*time.Second, "msg=streaming")
}

// The stream's last sequence moves without the relay: by a purge with a sequence
// beyond its end, and by messages of others that are gone. No event is taken for stored.
func TestLastSequenceThatIsNotOfTheRelay(t *testing.T) {
	foreign := func(r *rig) uint64 {
		ack, err := r.js.PublishMsg(r.t.Context(), &nats.Msg{Subject: "outbox.foreign", Data: []byte("not of the relay")})
		must(r.t, err)
		return ack.Sequence
	}
	for name, c := range map[string]struct {
		edit func(*jetstream.StreamConfig)
		move func(r *rig)
	}{
		"purged beyond its end": {move: func(r *rig) {
			must(r.t, r.streamOf().Purge(r.t.Context(), jetstream.WithPurgeSequence(20)))
		}},
		"a foreign message purged": {move: func(r *rig) {
			foreign(r)
			must(r.t, r.streamOf().Purge(r.t.Context()))
		}},
		"foreign messages deleted": {move: func(r *rig) {
			for range 3 {
				must(r.t, r.streamOf().DeleteMsg(r.t.Context(), foreign(r)))
			}
		}},
		"a foreign message consumed": {
			edit: func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy },
			move: func(r *rig) {
				foreign(r)
				c, err := r.streamOf().CreateConsumer(r.t.Context(), jetstream.ConsumerConfig{FilterSubject: "outbox.foreign"})
				must(r.t, err)
				m, err := c.Next()
				must(r.t, err)
				must(r.t, m.DoubleAck(r.t.Context()))
			},
		},
		"a foreign message expired": {
			edit: func(c *jetstream.StreamConfig) { c.AllowMsgTTL = true },
			move: func(r *rig) {
				_, err := r.js.PublishMsg(r.t.Context(), &nats.Msg{Subject: "outbox.foreign", Header: nats.Header{"Nats-TTL": {"1s"}}})
				must(r.t, err)
				r.await(20*time.Second, "the foreign message expires", func() bool {
					_, err := r.streamOf().GetLastMsgForSubject(r.t.Context(), "outbox.foreign")
					return err != nil
				})
			},
		},
	} {
		for _, running := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, running %v", name, running), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, rigOptions{args: []string{"--status-interval", "50ms"}})
				r.createStream(c.edit)
				r.restart()
				r.insertEvents(1, 3)
				r.lastSeq(3)
				r.allConfirmed()
				if !running {
					if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
						t.Fatalf("exit code %d", code)
					}
				}
				c.move(r)
				moved := r.state().LastSeq
				if !running {
					r.insertEvents(4, 5)
					r.restart()
					r.relay.MustAwait(t, 10*time.Second, "was moved by a purge or by messages of another client")
				} else {
					// One in flight: of two, the first can be refused and the second fit. See refitted.
					r.insertEvents(4, 4)
					r.lastSeq(moved + 1)
					r.insertEvents(5, 5)
				}
				r.insertEvents(6, 8)
				r.lastSeq(moved + 5)
				if got := r.bodies(); !strings.HasSuffix(got, "4 5 6 7 8") || strings.Count(got, "4") != 1 {
					t.Errorf("the stream holds %s", got)
				}
				r.allConfirmed()
				r.prunes(8)
				if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
					t.Errorf("exit code %d", code)
				}
			})
		}
	}
}

// A relay is killed before it writes a checkpoint, and the messages of its last events are gone.
func TestGoneMessagesNeedEvidence(t *testing.T) {
	killed := func(t *testing.T) *rig {
		r := newRig(t, rigOptions{args: []string{"--status-interval", "1h"}})
		r.createStream(nil)
		r.restart()
		r.insertEvents(1, 5)
		r.lastSeq(5)
		must(t, r.relay.Kill())
		r.await(20*time.Second, "the server has let go of the dead relay", func() bool { return r.clients("walrelay") == 0 })
		return r
	}
	purge := func(r *rig, opts ...jetstream.StreamPurgeOpt) { must(r.t, r.streamOf().Purge(r.t.Context(), opts...)) }

	t.Run("the dedup window knows the events", func(t *testing.T) {
		t.Parallel()
		r := killed(t)
		purge(r)
		r.insertEvents(6, 8)
		r.restart()
		r.lastSeq(8)
		r.wantBodies("6 7 8")
		r.insertEvents(9, 9)
		r.lastSeq(9)
		r.wantBodies("6 7 8 9")
	})
	t.Run("rows that only the dedup window proves stay until a later event is stored", func(t *testing.T) {
		t.Parallel()
		r := killed(t)
		purge(r)
		r.relay.Args = append(r.relay.Args, "--status-interval", "50ms")
		r.restart()
		r.allConfirmed()
		if ran := r.prune(); ran.Code != 3 || !strings.Contains(ran.Stderr, "only the dedup window") {
			t.Errorf("exit code %d\n%s", ran.Code, ran.Stderr)
		}
		r.insertEvents(6, 6)
		r.lastSeq(6)
		r.allConfirmed()
		r.prunes(6)
	})
	t.Run("nothing else was committed before the restart", func(t *testing.T) {
		t.Parallel()
		r := killed(t)
		purge(r, jetstream.WithPurgeSequence(20))
		r.restart()
		r.relay.MustAwait(t, 30*time.Second, "no event follows")
		r.insertEvents(6, 8)
		r.lastSeq(22)
		r.wantBodies("6 7 8")
	})
	t.Run("an event may be one of those that are gone", func(t *testing.T) {
		t.Parallel()
		r := killed(t)
		purge(r, jetstream.WithPurgeSequence(20))
		r.insertEvents(6, 8)
		r.lost(`14 messages of stream "OUTBOX" after sequence 5 are gone`, "go on with --accept-gap", "all events after sequence 0 are published again")
		r.wantBodies("")
		r.restart("--accept-gap")
		r.insertEvents(9, 9)
		r.await(30*time.Second, "the last event", func() bool { return strings.HasSuffix(r.bodies(), " 9") })
		if got := r.bodies(); !strings.HasSuffix(got, "6 7 8 9") {
			t.Errorf("the stream holds %s", got)
		}
	})
	t.Run("the broker has forgotten the ids", func(t *testing.T) {
		t.Parallel()
		r := killed(t)
		purge(r)
		must(t, r.nats.Kill())
		must(t, r.nats.Start(t.Context()))
		r.insertEvents(6, 8)
		r.lost(`5 messages of stream "OUTBOX" after sequence 0 are gone`, "it was restarted")
		r.wantBodies("")
	})
	t.Run("all messages expired", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, rigOptions{args: []string{"--status-interval", "50ms"}})
		r.createStream(func(c *jetstream.StreamConfig) { c.MaxAge, c.Duplicates = time.Second, time.Second })
		for i := range 4 {
			r.restart()
			r.insertEvents(i*3+1, i*3+2)
			r.lastSeq(uint64(i*3 + 2))
			if i%2 == 0 {
				r.allConfirmed()
				must(t, r.relay.Kill())
			} else if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}
			r.await(20*time.Second, "all messages expire", func() bool { return r.state().Msgs == 0 })
			r.insertEvents(i*3+3, i*3+3)
			r.restart()
			r.lastSeq(uint64(i*3 + 3))
			if got := r.bodies(); got != fmt.Sprint(i*3+3) {
				t.Errorf("the stream holds %s, want %d", got, i*3+3)
			}
			if code := r.relay.MustStop(t, 15*time.Second); code != 0 {
				t.Fatalf("exit code %d", code)
			}
		}
	})
}

// Without a checkpoint nothing says what was published between the last message and
// the slot's confirmed LSN.
func TestNoCheckpointAndTheSlotIsPastTheLastMessage(t *testing.T) {
	for _, shared := range []bool{false, true} {
		var args []string
		if shared {
			args = []string{"--shared-stream"}
		}
		newRig := func(t *testing.T) *rig {
			r := newRig(t, rigOptions{args: append([]string{"--status-interval", "50ms"}, args...)})
			r.createStream(nil)
			r.restart()
			return r
		}
		stop := func(r *rig) {
			r.t.Helper()
			if code := r.relay.MustStop(r.t, 15*time.Second); code != 0 {
				r.t.Fatalf("exit code %d", code)
			}
		}
		t.Run(fmt.Sprintf("the broker is thrown back, shared %v", shared), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.insertEvents(1, 5)
			r.lastSeq(5)
			r.allConfirmed()
			stop(r)
			must(t, r.nats.Stop())
			older := t.TempDir()
			must(t, os.CopyFS(older, os.DirFS(r.nats.Store())))
			r.nats.MustStart(t)
			r.restart()
			r.insertEvents(6, 10)
			r.lastSeq(10)
			r.allConfirmed()
			stop(r)
			must(t, r.nats.Stop())
			must(t, os.RemoveAll(r.nats.Store()))
			must(t, os.CopyFS(r.nats.Store(), os.DirFS(older)))
			r.nats.MustStart(t)
			must(t, r.js.DeleteKeyValue(t.Context(), "walrelay"))
			r.insertEvents(11, 11)
			r.lost("has no checkpoint", "past its last event, sequence 5", "walrelay slot recover "+slot, "--accept-gap")
			r.wantBodies("1 2 3 4 5")
		})
		t.Run(fmt.Sprintf("the slot is another one, shared %v", shared), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.insertEvents(1, 10)
			r.lastSeq(10)
			r.allConfirmed()
			stop(r)
			natsArgs := []string{"--dsn", r.dsn, "--nats-url", r.natsURL, "--stream", stream}
			r.must(append([]string{"slot", "drop", slot, "--with-checkpoint", "--yes"}, natsArgs...)...)
			r.insertEvents(11, 15)
			r.must("slot", "create", slot, "--dsn", r.dsn, "--publication", publication)
			r.insertEvents(16, 18)
			r.lost("has no checkpoint", "past its last event, sequence 10", "walrelay slot recover "+slot)
			r.wantBodies("1 2 3 4 5 6 7 8 9 10")
		})
	}
	t.Run("the slot sends the last message again", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, rigOptions{args: []string{"--status-interval", "1h"}})
		r.createStream(nil)
		r.restart()
		r.insertEvents(1, 3)
		r.lastSeq(3)
		must(t, r.relay.Kill())
		must(t, r.js.DeleteKeyValue(t.Context(), "walrelay"))
		r.insertEvents(4, 6)
		r.restart()
		r.lastSeq(6)
		r.wantBodies("1 2 3 4 5 6")
	})
}
