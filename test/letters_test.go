package test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

const (
	letterStream = stream + "_DLQ"
	bucketStream = "KV_walrelay"
)

// The dead-letter stream and the bucket are judged like the stream, by run and by check.
func TestUnfitDeadLetterStreamsAndBuckets(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	r.createStream(nil)
	letters := jetstream.StreamConfig{Name: letterStream, Subjects: []string{"walrelay.dlq." + stream + ".>"}}
	bucket := jetstream.StreamConfig{
		Name: bucketStream, Subjects: []string{"$KV.walrelay.>"}, MaxMsgsPerSubject: 64, AllowRollup: true, DenyDelete: true, Discard: jetstream.DiscardNew,
	}
	for _, c := range []struct {
		name   string
		of     jetstream.StreamConfig
		change func(*jetstream.StreamConfig)
		detail string
		remedy string
	}{
		{"letters in memory", letters, func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }, "in memory", "--dead-letter-stream"},
		{"letters of interest", letters, func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, "interest retention", "--retention limits"},
		{"letters in a work queue", letters, func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy }, "work-queue", "--dead-letter-stream"},
		{"old letters discarded", letters, func(c *jetstream.StreamConfig) { c.MaxMsgs = 3 }, "max_msgs", "--discard new"},
		{"async letters", letters, func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode }, "persist_mode async", "--dead-letter-stream"},
		{"unconfirmed letters", letters, func(c *jetstream.StreamConfig) { c.NoAck = true }, "no_ack", "--ack"},
		{"unbound letters", letters, func(c *jetstream.StreamConfig) { c.Subjects = []string{"elsewhere"} }, "does not bind", "walrelay.dlq." + stream + ".>"},
		{"tiny letters", letters, func(c *jetstream.StreamConfig) { c.MaxMsgSize = 100 }, "max_msg_size 100", "--max-msg-size -1"},
		{"checkpoints in memory", bucket, func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }, "in memory", "--checkpoint-bucket"},
		{"checkpoints that expire", bucket, func(c *jetstream.StreamConfig) { c.MaxAge = time.Minute }, "max_age", "--max-age 0s"},
		{"old checkpoints discarded", bucket, func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 64, jetstream.DiscardOld }, "max_msgs", "--discard new"},
		{"unconfirmed checkpoints", bucket, func(c *jetstream.StreamConfig) { c.NoAck = true }, "no_ack", "--ack"},
		{"tiny checkpoints", bucket, func(c *jetstream.StreamConfig) { c.MaxMsgSize = 300 }, "max_msg_size 300", "--max-msg-size -1"},
	} {
		for _, name := range []string{letterStream, bucketStream} {
			if err := r.js.DeleteStream(t.Context(), name); err != nil && !strings.Contains(err.Error(), "not found") {
				t.Fatal(err)
			}
		}
		config := c.of
		c.change(&config)
		_, err := r.js.CreateStream(t.Context(), config)
		must(t, err)
		check := r.check()
		if check.Code != 3 || !strings.Contains(check.Stdout, c.detail) || !strings.Contains(check.Stdout, c.remedy) {
			t.Errorf("%s: check ended with %d, want 3, %q and %q\n%s%s", c.name, check.Code, c.detail, c.remedy, check.Stdout, check.Stderr)
		}
		r.relay.MustStart(t)
		select {
		case <-r.relay.Done():
		case <-time.After(quick):
			t.Errorf("%s: the relay runs\n%s", c.name, r.relay.Output())
			must(t, r.relay.Kill())
			continue
		}
		code, err := r.relay.Wait(t.Context())
		must(t, err)
		if out := r.relay.Output(); code != 3 || !strings.Contains(out, c.detail) || !strings.Contains(out, c.remedy) {
			t.Errorf("%s: exit code %d, want 3, %q and %q\n%s", c.name, code, c.detail, c.remedy, out)
		}
	}
}

// check runs the preflight.
func (r *rig) check() (ran harness.Ran) {
	return harness.MustRun(r.t, nil, "check", "--dsn", r.dsn, "--nats-url", r.natsURL, "--stream", stream, "--table", r.table, "--slot", slot, "--publication", publication)
}

// Settings that are changed while the relay runs count, too: it looks before it parks.
func TestDeadLetterStreamIsJudgedBeforeParking(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		change func(*jetstream.StreamConfig)
		detail string
	}{
		"no_ack":      {func(c *jetstream.StreamConfig) { c.NoAck = true }, "no_ack"},
		"sealed":      {func(c *jetstream.StreamConfig) { c.Sealed = true }, "sealed"},
		"unbound":     {func(c *jetstream.StreamConfig) { c.Subjects = []string{"elsewhere"} }, "does not bind"},
		"discard old": {func(c *jetstream.StreamConfig) { c.MaxMsgs = 3 }, "max_msgs"},
		"interest":    {func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, "interest"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: impatient})
			r.limited(2000)
			r.relay.MustStart(t)
			r.exec(large("a", "one"))
			r.messages(1)
			st, err := r.js.Stream(t.Context(), letterStream)
			must(t, err)
			config := st.CachedInfo().Config
			c.change(&config)
			_, err = r.js.UpdateStream(t.Context(), config)
			must(t, err)
			// The second is later than the time for which the settings of the first are taken as known.
			r.await(quick, "a refusal", func() bool {
				if r.relay.Running() {
					r.exec(large("a", fmt.Sprint("more", time.Now().UnixNano())))
				}
				return !r.relay.Running()
			})
			code, err := r.relay.Wait(t.Context())
			must(t, err)
			if out := r.relay.Output(); code != 3 || !strings.Contains(out, c.detail) || !strings.Contains(out, "hint") {
				t.Errorf("exit code %d, want 3 and %q\n%s", code, c.detail, out)
			}
		})
	}
}

// refuseMarkers makes the stream full, so that a dead letter is stored and its marker is not.
func (r *rig) refuseMarkers() {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	c := st.CachedInfo().Config
	c.MaxMsgs, c.Discard = int64(st.CachedInfo().State.Msgs), jetstream.DiscardNew
	_, err = r.js.UpdateStream(r.t.Context(), c)
	must(r.t, err)
}

// takeMarkers ends what refuseMarkers did, with another limit for messages.
func (r *rig) takeMarkers(limit int32) {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream)
	must(r.t, err)
	c := st.CachedInfo().Config
	c.MaxMsgs, c.MaxMsgSize = -1, limit
	_, err = r.js.UpdateStream(r.t.Context(), c)
	must(r.t, err)
}

// An event whose dead letter is stored and whose marker is not stays parked, though it would fit by
// now: published, too, it would be stored twice once the dead letter is replayed.
func TestDeadLetterWithoutItsMarkerStays(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]string{"park": "park", "park-aggregate": "park-aggregate"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: append([]string{"--on-poison", policy}, impatient...)})
			r.limited(2000)
			r.relay.MustStart(t)
			r.exec(into + "values ('order', 'a', 'first', '{}')")
			r.messages(1)
			r.refuseMarkers()
			r.exec(large("a", "large"), into+"values ('order', 'a', 'last', '{}')")
			r.await(quick, "the dead letter is stored", func() bool { return r.countLetters() == 1 })
			must(t, r.relay.Kill())
			r.takeMarkers(100_000)
			r.relay.MustStart(t)
			ms := r.messages(3)
			want, letters := "first ! last", 1
			if policy == "park-aggregate" {
				want, letters = "first ! !", 2
			}
			if got := outline(ms); got != want || r.countLetters() != letters {
				t.Fatalf("the stream has %s and there are %d dead letters, want %s and %d", got, r.countLetters(), want, letters)
			}
			wantExit(t, r.dlq("replay", "--all", "--yes"), 0, fmt.Sprint(letters, " stored, 0 refused"))
			got := outline(r.messages(3 + letters))
			if want := want + " large last"; !strings.HasPrefix(want, got) || r.countLetters() != 0 {
				t.Fatalf("the stream has %s and there are %d dead letters", got, r.countLetters())
			}
			r.ends(0)
		})
	}
}

// A relay that halts on poison names the dead letter; one that was removed holds nothing up.
func TestDeadLetterWithoutItsMarkerHalts(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.limited(2000)
	r.relay.MustStart(t)
	r.exec(into + "values ('order', 'a', 'first', '{}')")
	r.messages(1)
	r.refuseMarkers()
	r.exec(large("a", "large"))
	r.await(quick, "the dead letter is stored", func() bool { return r.countLetters() == 1 })
	must(t, r.relay.Kill())
	r.takeMarkers(100_000)
	halting := harness.NewRelay(t, append(slices.Clone(r.relay.Args), "--on-poison", "halt")...)
	halting.MustStart(t)
	halting.MustAwait(t, quick, "has dead letter 1 in stream "+letterStream)
	if code, err := halting.Wait(t.Context()); code != 4 || err != nil {
		t.Fatalf("exit code %d, want 4 (%v)\n%s", code, err, halting.Output())
	}
	wantExit(t, r.dlq("purge", "--all", "--yes"), 0, "1 dead letters removed")
	halting.MustStart(t)
	if got := outline(r.messages(2)); got != "first large" {
		t.Fatalf("the stream has %s", got)
	}
	halting.MustStop(t, quick)
}

// parkTwice parks one event, calls between with the broker stopped, and parks two more.
func (r *rig) parkTwice(between func(store string)) {
	r.t.Helper()
	r.limited(2000)
	r.relay.MustStart(r.t)
	r.exec(large("a", "one"))
	r.messages(1)
	r.relay.MustStop(r.t, quick)
	must(r.t, r.nats.Stop())
	between(filepath.Join(r.nats.Store(), "jetstream", "$G", "streams", letterStream))
	r.nats.MustStart(r.t)
	r.js = r.nats.JetStream(r.t)
	r.relay.MustStart(r.t)
	r.exec(large("a", "two"), large("b", "three"), into+"values ('order', 'a', 'four', '{}')")
	r.messages(4)
	r.relay.MustStop(r.t, quick)
}

// A dead-letter stream that is restored from an older copy, or deleted, is noticed. While Postgres
// has the WAL the dead letters are stored again; otherwise the relay ends with the choice.
func TestDeadLetterStreamThrownBack(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name     string
		delay    string // of confirms
		recreate bool
	}{
		{"restored, WAL there", "1h", false},
		{"recreated, WAL there", "1h", true},
		{"restored, WAL gone", "0s", false},
		{"recreated, WAL gone", "0s", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{args: append([]string{"--confirm-delay", c.delay, "--status-interval", "50ms"}, impatient...)})
			var store, copied string
			r.parkTwice(func(dir string) {
				store, copied = dir, filepath.Join(t.TempDir(), "copy")
				must(t, os.CopyFS(copied, os.DirFS(dir)))
			})
			if c.recreate {
				must(t, r.js.DeleteStream(t.Context(), letterStream))
			} else {
				must(t, r.nats.Stop())
				must(t, os.RemoveAll(store))
				must(t, os.CopyFS(store, os.DirFS(copied)))
				r.nats.MustStart(t)
				r.js = r.nats.JetStream(t)
			}
			left := 1
			if c.recreate {
				left = 0
			}
			r.relay.MustStart(t)
			if c.delay == "0s" {
				code, err := r.relay.Wait(t.Context())
				if out := r.relay.Output(); err != nil || code != 5 || !strings.Contains(out, "--accept-gap") || !strings.Contains(out, "walrelay replay --id") {
					t.Fatalf("exit code %d, want 5 with the choice\n%s", code, out)
				}
				if check := r.check(); !strings.Contains(check.Stdout, "dead-letter stream \""+letterStream+"\"") || c.recreate != strings.Contains(check.Stdout, "recreated") {
					t.Errorf("check ended with %d\n%s", check.Code, check.Stdout)
				}
				accepting := harness.NewRelay(t, append(slices.Clone(r.relay.Args), "--accept-gap")...)
				accepting.MustStart(t)
				r.exec(into + "values ('order', 'a', 'five', '{}')")
				if got := outline(r.messages(5)); got != "! ! ! four five" || r.countLetters() != left {
					t.Errorf("the stream has %s, and there are %d dead letters, want %d", got, r.countLetters(), left)
				}
				accepting.MustStop(t, quick)
				r.relay.MustStart(t)
				r.relay.MustAwait(t, quick, "streaming")
				r.ends(0)
				return
			}
			r.await(quick, "the dead letters are there again", func() bool { return r.countLetters() == 3 })
			r.exec(into + "values ('order', 'a', 'five', '{}')")
			if got := outline(r.messages(5)); got != "! ! ! four five" {
				t.Errorf("the stream has %s", got)
			}
			r.ends(0)
			// What was stored again is known by the next checkpoint.
			r.relay.MustStart(t)
			r.relay.MustAwait(t, quick, "streaming")
			if strings.Contains(r.relay.Output(), "missing dead letter") {
				t.Errorf("they are stored again once more\n%s", r.relay.Output())
			}
			r.resize(100_000)
			wantExit(t, r.dlq("replay", "--all", "--yes"), 0, "3 stored, 0 refused")
			if got := outline(r.messages(8)); got != "! ! ! four five one two three" {
				t.Errorf("the stream has %s", got)
			}
			r.ends(0)
		})
	}
}

// Wherever the relay dies while a limit is raised and lowered, an event is parked or published, never both.
func TestRelayDiesWhileItParks(t *testing.T) {
	t.Parallel()
	const rounds, each = 12, 10
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	r := newRig(t, rigOptions{args: append([]string{"--max-parked-in-row", "0", "--status-interval", "20ms"}, impatient...)})
	r.limited(2000)
	for i := range rounds {
		r.relay.MustStart(t)
		for j := range each {
			r.exec(large("a", fmt.Sprint("e", i*each+j)))
		}
		pause(t, time.Duration(rng.IntN(300))*time.Millisecond)
		must(t, r.relay.Kill())
		r.resize([]int32{2000, 100_000}[(i+1)%2])
	}
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	ms := r.messages(rounds * each)
	letters := map[string]bool{}
	for _, m := range r.letters() {
		letters[m.Header.Get(event.HeaderID)] = true
	}
	parked, fates := 0, map[string]int{}
	for _, m := range ms {
		id := m.Header.Get(event.HeaderID)
		marker := m.Header.Get(event.HeaderReason) != ""
		if marker {
			parked++
		}
		if fates[id]++; fates[id] > 1 || marker != letters[id] {
			t.Errorf("seed %d: event %s: %d messages, a marker: %t, a dead letter: %t", seed, id, fates[id], marker, letters[id])
		}
	}
	if parked != len(letters) || parked == 0 || parked == len(ms) {
		t.Errorf("seed %d: %d markers and %d dead letters of %d events", seed, parked, len(letters), len(ms))
	}
	r.ends(0)
}
