package publisher

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// What a stream's settings mean depends on what the relay keeps in it.
func TestJudgementOfEachRole(t *testing.T) {
	o := &Options{Stream: "S", DeadLetters: "S_DLQ", Bucket: "walrelay", Subjects: []string{"outbox.>"}, Park: true}
	fit := map[role]jetstream.StreamConfig{
		ofEvents:  {Name: "S", Subjects: []string{"outbox.>", "walrelay.parked.S"}},
		ofLetters: {Name: "S_DLQ", Subjects: []string{"walrelay.dlq.S.>"}},
		ofCheckpoints: {
			Name: "KV_walrelay", Subjects: []string{"$KV.walrelay.>"}, Discard: jetstream.DiscardNew, MaxMsgsPerSubject: 64, AllowRollup: true, DenyDelete: true,
		},
	}
	for r, c := range fit {
		if found := o.judge(r, &c, &c); len(found) > 0 {
			t.Errorf("role %d: %+v", r, found)
		}
	}
	const none = event.OK
	for _, c := range []struct {
		name                         string
		change                       func(*jetstream.StreamConfig)
		events, letters, checkpoints event.Level
	}{
		{"no_ack", func(c *jetstream.StreamConfig) { c.NoAck = true }, event.FAIL, event.FAIL, event.FAIL},
		{"sealed", func(c *jetstream.StreamConfig) { c.Sealed = true }, event.FAIL, event.FAIL, event.FAIL},
		{"mirror", func(c *jetstream.StreamConfig) {
			c.Subjects, c.Mirror = nil, &jetstream.StreamSource{Name: "o"}
		}, event.FAIL, event.FAIL, event.FAIL},
		{"sources", func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "o"}} }, event.FAIL, event.WARN, event.FAIL},
		{"memory", func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }, event.FAIL, event.FAIL, event.FAIL},
		{"async", func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode }, event.FAIL, event.FAIL, event.FAIL},
		{"counters", func(c *jetstream.StreamConfig) { c.AllowMsgCounter = true }, event.FAIL, event.FAIL, event.FAIL},
		{"unbound", func(c *jetstream.StreamConfig) { c.Subjects = []string{"other"} }, event.FAIL, event.FAIL, event.FAIL},
		{"partly bound", func(c *jetstream.StreamConfig) {
			c.Subjects = []string{"walrelay.dlq.S.*.1", "walrelay.parked.S", "outbox.>", "$KV.walrelay.>"}
		}, none, event.FAIL, none},
		{"interest", func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, event.WARN, event.FAIL, event.FAIL},
		{"work queue", func(c *jetstream.StreamConfig) { c.Retention = jetstream.WorkQueuePolicy }, none, event.FAIL, event.FAIL},
		{"max_msgs, discard old", func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 10, jetstream.DiscardOld }, event.WARN, event.FAIL, event.FAIL},
		{"max_bytes, discard old", func(c *jetstream.StreamConfig) { c.MaxBytes, c.Discard = 1<<20, jetstream.DiscardOld }, event.WARN, event.FAIL, event.FAIL},
		{"max_msgs, discard new", func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 10, jetstream.DiscardNew }, none, none, none},
		{"max_age", func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour }, none, event.WARN, event.FAIL},
		{"tiny messages", func(c *jetstream.StreamConfig) { c.MaxMsgSize = 200 }, none, event.FAIL, event.FAIL},
		{"small messages", func(c *jetstream.StreamConfig) { c.MaxMsgSize = 8000 }, none, event.WARN, event.WARN},
		{"no deletes", func(c *jetstream.StreamConfig) { c.DenyDelete = true }, none, event.WARN, none},
		{"history 1", func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 }, none, none, event.WARN},
		{"full per subject", func(c *jetstream.StreamConfig) {
			c.MaxMsgsPerSubject, c.Discard, c.DiscardNewPerSubject = 64, jetstream.DiscardNew, true
		}, none, none, event.FAIL},
	} {
		for r, want := range map[role]event.Level{ofEvents: c.events, ofLetters: c.letters, ofCheckpoints: c.checkpoints} {
			config := fit[r]
			c.change(&config)
			main := fit[ofEvents]
			worst := none
			for _, f := range o.judge(r, &config, &main) {
				worst = max(worst, f.Level)
				if f.Remedy == "" || !strings.Contains(f.Detail, config.Name) {
					t.Errorf("%s, role %d: no remedy or no name in %+v", c.name, r, f)
				}
			}
			if worst != want {
				t.Errorf("%s, role %d: got %v, want %v: %+v", c.name, r, worst, want, o.judge(r, &config, &main))
			}
		}
	}
	few, main := fit[ofLetters], fit[ofEvents]
	few.Replicas, main.Replicas = 1, 3
	found := o.judge(ofLetters, &few, &main)
	if !slices.ContainsFunc(found, func(f event.Finding) bool { return f.Name == "dead_letters_replicas" && f.Level == event.WARN }) {
		t.Errorf("replicas: %+v", found)
	}
}
