package publisher

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestStreamsOfTheWrongKind(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	js := n.JetStream(t)
	for _, c := range []struct {
		name   string
		change func(*jetstream.StreamConfig)
		text   string
	}{
		{"no_ack", func(c *jetstream.StreamConfig) { c.NoAck = true }, "no_ack"},
		{"mirror", func(c *jetstream.StreamConfig) {
			c.Subjects, c.Mirror = nil, &jetstream.StreamSource{Name: "kind-origin"}
		}, "mirror"},
		{"sources", func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "kind-origin"}} }, "sources"},
		{"memory", func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage }, "memory"},
		{"schedules", func(c *jetstream.StreamConfig) { c.AllowMsgSchedules = true }, "schedules"},
		{"markers", func(c *jetstream.StreamConfig) {
			c.AllowMsgTTL, c.AllowRollup, c.SubjectDeleteMarkerTTL = true, true, time.Minute
		}, "delete_marker"},
		{"async", func(c *jetstream.StreamConfig) { c.PersistMode = jetstream.AsyncPersistMode }, "persist_mode"},
		{"unmarked", func(c *jetstream.StreamConfig) { c.Subjects = c.Subjects[:1] }, "walrelay.parked.kind-unmarked"},
	} {
		t.Run(c.name, func(t *testing.T) {
			stream := "kind-" + c.name
			cfg := jetstream.StreamConfig{Name: stream, Subjects: []string{stream + ".>", "walrelay.parked." + stream}}
			c.change(&cfg)
			if _, err := js.CreateStream(t.Context(), cfg); err != nil {
				t.Fatal(err)
			}
			err := refusedOpen(t, optionsFor(n, stream))
			wantFailure(t, err, event.Precondition, "")
			if !strings.Contains(err.Error(), c.text) || event.HintOf(err) == "" {
				t.Fatalf("got %v, hint %q", err, event.HintOf(err))
			}
		})
	}
	t.Run("sealed", func(t *testing.T) {
		cfg := jetstream.StreamConfig{Name: "kind-sealed", Subjects: []string{"kind-sealed.>", "walrelay.parked.kind-sealed"}}
		if _, err := js.CreateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		cfg.Sealed = true
		if _, err := js.UpdateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		err := refusedOpen(t, optionsFor(n, "kind-sealed"))
		wantFailure(t, err, event.Precondition, "")
		if !strings.Contains(err.Error(), "sealed") {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("several faults at once", func(t *testing.T) {
		cfg := jetstream.StreamConfig{Name: "kind-bad", Subjects: []string{"kind-bad.>"}, NoAck: true, Storage: jetstream.MemoryStorage}
		if _, err := js.CreateStream(t.Context(), cfg); err != nil {
			t.Fatal(err)
		}
		err := refusedOpen(t, optionsFor(n, "kind-bad"))
		for _, want := range []string{"no_ack", "memory", "walrelay.parked"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%q is missing in %v", want, err)
			}
		}
	})
}

func TestMissingStreams(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "missing")
	o.Create = false
	err := refusedOpen(t, o)
	wantFailure(t, err, event.Precondition, "nats stream add missing --subjects 'missing.>,walrelay.parked.missing'")

	if _, err := n.JetStream(t).CreateStream(t.Context(), jetstream.StreamConfig{Name: "missing", Subjects: []string{"missing.>", "walrelay.parked.missing"}}); err != nil {
		t.Fatal(err)
	}
	err = refusedOpen(t, o)
	wantFailure(t, err, event.Precondition, "nats stream add missing_DLQ --subjects 'walrelay.dlq.missing.>'")

	o.Park = false
	begin(t, newPublisher(t, o))
}

func TestCreatedStreams(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	js := n.JetStream(t)
	o := optionsFor(n, "created")
	begin(t, newPublisher(t, o)).Close()
	begin(t, newPublisher(t, o)).Close() // they exist now
	for name, subjects := range map[string]string{
		"created": "created.>,walrelay.parked.created", "created_DLQ": "walrelay.dlq.created.>", "KV_walrelay": "$KV.walrelay.>",
	} {
		st, err := js.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		c := st.CachedInfo().Config
		if strings.Join(c.Subjects, ",") != subjects || c.Storage != jetstream.FileStorage || c.Retention != jetstream.LimitsPolicy {
			t.Errorf("%s: %+v", name, c)
		}
		if name == "KV_walrelay" && c.MaxMsgsPerSubject != 64 {
			t.Errorf("history %d", c.MaxMsgsPerSubject)
		}
	}
	// Subjects that another stream has are the operator's to sort out.
	o = optionsFor(n, "created2")
	o.Subjects = []string{"created.>"}
	wantFailure(t, refusedOpen(t, o), event.Precondition, "")
}

func TestNewReportsAllMistakes(t *testing.T) {
	for name, c := range map[string]struct {
		o    Options
		want []string
	}{
		"empty":  {Options{}, []string{"no stream", "no subjects"}},
		"names":  {Options{Stream: "a.b", DeadLetters: "x y", Bucket: "b.c", Subjects: []string{"a"}}, []string{`"a.b"`, `"x y"`, `"b.c"`}},
		"key":    {Options{Stream: "ä", Subjects: []string{"a"}}, []string{"key of a checkpoint"}},
		"itself": {Options{Stream: "a", DeadLetters: "a", Subjects: []string{"a"}}, []string{"stream itself"}},
		"window": {Options{Stream: "a", Subjects: []string{"a"}, Window: -1, AckTimeout: -1}, []string{"window", "ack timeout"}},
	} {
		_, err := New(c.o)
		if event.ClassOf(err) != event.Usage {
			t.Errorf("%s: got %v", name, err)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q is missing in %v", name, w, err)
			}
		}
	}
	p, err := New(Options{Stream: "orders", Subjects: []string{"a"}})
	if err != nil {
		t.Fatal(err)
	}
	if o := p.o; o.DeadLetters != "orders_DLQ" || o.Bucket != "walrelay" || o.Window != 4096 || o.WindowBytes != 16<<20 || o.AckTimeout != 2*time.Second || o.Replicas != 1 {
		t.Errorf("defaults: %+v", o)
	}
}

func TestFiltersThatCollide(t *testing.T) {
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"a.b", "a.b", true},
		{"a.b", "a.c", false},
		{"a.*", "a.b", true},
		{"a.*", "*.b", true},
		{"a.*", "a.b.c", false},
		{"a.>", "a.b.c", true},
		{"a.>", "a", false},
		{">", "a", true},
		{"a.*.c", "a.>", true},
		{"a.*.c", "b.>", false},
	} {
		if got := collide(c.a, c.b); got != c.want || collide(c.b, c.a) != got {
			t.Errorf("%s and %s: got %t, want %t", c.a, c.b, got, c.want)
		}
	}
}
