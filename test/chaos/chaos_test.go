package chaos

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// TestMain ends every server and removes every folder, whatever happened.
func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// modes are what --publish-mode takes.
var modes = []string{"auto", "chain", "sparse", "atomic"}

// TestSchedules runs a fixed set, or what CHAOS_SEED, CHAOS_N, CHAOS_REPLICAS
// and CHAOS_MODE say.
func TestSchedules(t *testing.T) {
	if _, ok := os.LookupEnv("CHAOS_SEED"); ok {
		seed, n, replicas := setting(t, "CHAOS_SEED", 1), setting(t, "CHAOS_N", 1), setting(t, "CHAOS_REPLICAS", 1)
		if replicas != 1 && replicas != 3 {
			t.Fatalf("CHAOS_REPLICAS is %d, want 1 or 3", replicas)
		}
		mode := cmp.Or(os.Getenv("CHAOS_MODE"), modes[0])
		if !slices.Contains(modes, mode) {
			t.Fatalf("CHAOS_MODE is %q, want one of %s", mode, strings.Join(modes, ", "))
		}
		for i := range n {
			schedule(t, seed+i, int(replicas), mode)
		}
		return
	}
	// Most of them as a relay is without flags.
	mixed := []string{"auto", "auto", "atomic", "auto", "sparse"}
	for seed := range uint64(22) {
		schedule(t, seed+1, 1, mixed[seed%5])
	}
	for seed := range uint64(5) {
		schedule(t, seed+1, 3, mixed[seed%5])
	}
}

func setting(t *testing.T, name string, def uint64) uint64 {
	text := os.Getenv(name)
	if text == "" {
		return def
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s is %q, want a number", name, text)
	}
	return n
}

func schedule(t *testing.T, seed uint64, replicas int, mode string) {
	t.Run(fmt.Sprintf("R%d/%s/%d", replicas, mode, seed), func(t *testing.T) {
		t.Parallel()
		p := newPlan(seed, replicas, mode)
		t.Log(p)
		w := newWorld(t, p)
		w.run(t.Context())
		for _, text := range w.failures {
			t.Error(text)
		}
		if t.Failed() {
			t.Logf("to repeat: %s", p.again())
			t.Logf("what happened:\n%s", strings.Join(w.notes, "\n"))
			for _, r := range w.relays {
				b, _ := os.ReadFile(r.log)
				t.Logf("log of %s:\n%s", r.name, b)
				w.keep(r.name, b)
			}
			for _, n := range w.nodes {
				w.keep(n.Name, []byte(n.Log()))
			}
			w.keep("postgres", []byte(w.pg.Log()))
		}
	})
}

// keep saves a log beside others of the schedule, where CHAOS_LOGS says.
func (w *world) keep(name string, b []byte) {
	dir := os.Getenv("CHAOS_LOGS")
	if dir == "" {
		return
	}
	name = fmt.Sprintf("R%d-%s-%d-%s.log", w.plan.replicas, w.plan.mode, w.plan.seed, name)
	if err := os.WriteFile(filepath.Join(dir, name), b, 0o644); err != nil {
		w.t.Log(err)
	}
}

// run lets writers commit while the faults of the plan happen, then wants
// everything to be stored once, in order, and confirmed.
func (w *world) run(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	p := w.plan
	load := harness.NewWriters(harness.Workload{
		DSN: w.pg.DSN("postgres"), Writers: 4, Rows: p.rows, Padding: p.padding, Rate: p.rate, Seed: p.seed,
	})
	w.diary = load.Diary
	for _, r := range w.relays {
		if err := r.start(w); err != nil {
			w.t.Fatal(err)
		}
	}
	if !until(ctx, 10*time.Millisecond, func() bool { _, err := w.stream(ctx); return err == nil || w.failed() }) {
		w.fail("the stream is not created")
	}
	w.note("begins")

	var witnesses, writers, harm sync.WaitGroup
	watching, stopWatching := context.WithCancel(ctx)
	defer stopWatching()
	writing, stopWriting := context.WithCancel(ctx)
	defer stopWriting()
	witnesses.Go(func() { w.witness.watch(watching, w.pg, w.nodes) })
	witnesses.Go(func() { w.witness.count(watching, w.relays) })
	writers.Go(func() {
		if err := load.Run(writing, -1); err != nil {
			w.fail("%v", err)
		}
	})
	for _, s := range p.steps {
		harm.Go(func() { w.harm(ctx, s) })
	}
	harm.Wait()
	if err := w.heal(ctx); err != nil {
		w.fail("heal: %v", err)
		stopWriting()
		writers.Wait()
		return
	}
	healed := time.Now()
	w.note("healed")
	pause(ctx, 300*time.Millisecond)
	stopWriting()
	writers.Wait()

	took, ok := w.drain(ctx)
	w.note("drained: %t, %s after the last fault", ok, time.Since(healed).Round(time.Millisecond))
	stopWatching()
	witnesses.Wait()
	w.stopRelays()
	w.judge(ctx, took, ok)
}

// drain waits until an event that is behind all others is stored and confirmed.
func (w *world) drain(ctx context.Context) (time.Duration, bool) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, 45*time.Second)
	defer cancel()
	var err error
	if !until(ctx, 50*time.Millisecond, func() bool { err = w.write(ctx, "last", 1); return err == nil }) {
		w.fail("write the last event: %v", err)
		return 0, false
	}
	last := fmt.Sprintf("last%d", -w.txs.Load())
	var pos event.Position
	if !until(ctx, 20*time.Millisecond, func() bool {
		var m *harness.Stored
		if m, err = w.lastMessage(ctx); err != nil || m == nil || m.Aggregate != last {
			return w.failed()
		}
		pos, err = event.ParsePosition(m.Pos)
		return true
	}) || pos.IsZero() {
		w.fail("the last event is not stored %s after everything was mended: %v", time.Since(began).Round(time.Second), err)
		return 0, false
	}
	took := time.Since(began)
	var confirmed event.LSN
	if !until(ctx, 20*time.Millisecond, func() bool {
		confirmed, err = w.confirmed(ctx)
		return confirmed > pos.Commit || w.failed()
	}) {
		w.fail("%s is confirmed, the last event is at %s: %v", confirmed, pos, err)
		return took, false
	}
	return took, true
}

func (w *world) confirmed(ctx context.Context) (event.LSN, error) {
	c, err := w.pg.Conn(ctx)
	if err != nil {
		return 0, err
	}
	defer c.Close(ctx)
	var text string
	if err := c.QueryRow(ctx, "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = $1", slot).Scan(&text); err != nil {
		return 0, err
	}
	return event.ParseLSN(text)
}

func (w *world) stopRelays() {
	for _, r := range w.relays {
		if !r.Running() {
			continue // told already
		}
		if code, err := r.stop(); err != nil || code != 0 {
			w.fail("%s: exit code %d after everything was stored: %v", r.name, code, err)
		}
	}
}

// judge compares what was stored with what was committed.
func (w *world) judge(ctx context.Context, took time.Duration, drained bool) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	c, err := w.pg.Conn(ctx)
	if err == nil {
		defer c.Close(ctx)
		err = w.diary.Resolve(ctx, c, table)
	}
	if err == nil {
		_, err = w.witness.read(ctx, w.js)
	}
	if err != nil {
		w.fail("judge: %v", err)
		return
	}
	stored := w.witness.stored()
	res := harness.Compare(w.diary, stored)
	if !res.OK() {
		w.fail("stream and table disagree: %s", res)
	}
	for _, text := range w.witness.changed {
		w.fail("the broker changed a message: %s", text)
	}
	if early := w.witness.early(stored); len(early) > 0 {
		w.fail("confirmed before stored, %d times of %d: %s", len(early), len(w.witness.samples), early[0])
	}
	if drained {
		w.deadLetters(ctx, stored)
	}
	w.t.Logf("seed=%d mode=%s %s steps=%d samples=%d recovery=%s connections_a_second=%d", w.plan.seed, w.plan.mode, res, len(w.plan.steps), len(w.witness.samples), took.Round(time.Millisecond), w.witness.busiest)
}

// deadLetters wants a dead letter for each marker, and no other.
func (w *world) deadLetters(ctx context.Context, stored []harness.Stored) {
	letters, err := harness.ReadStream(ctx, w.js, stream+"_DLQ")
	if err != nil {
		w.fail("%v", err)
		return
	}
	parked := map[string]int{}
	for _, m := range stored {
		if m.Marker() {
			parked[m.Pos]++
		}
	}
	for _, m := range letters {
		parked[m.Pos]--
	}
	for pos, n := range parked {
		if n != 0 {
			w.fail("event at %s: %d more markers than dead letters", pos, n)
		}
	}
}

// lastMessage is the stream's last message, nil when it is gone.
func (w *world) lastMessage(ctx context.Context) (*harness.Stored, error) {
	st, err := w.stream(ctx)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	m, err := st.GetMsg(ctx, st.CachedInfo().State.LastSeq)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &harness.Stored{
		Seq: m.Sequence, Pos: m.Header.Get(event.HeaderPos), Aggregate: m.Header.Get(event.HeaderAggregateID),
	}, nil
}
