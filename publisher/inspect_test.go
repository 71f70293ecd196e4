package publisher

import (
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestInspectorTellsWhatThereIs(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "INSPECTED")
	i, err := NewInspector(Options{URL: o.URL, Stream: o.Stream})
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	if _, err := i.Inspect(t.Context()); event.ClassOf(err) != event.Precondition || event.HintOf(err) == "" {
		t.Errorf("without a stream: %v", err)
	}
	r := begin(t, newPublisher(t, o))
	got, err := i.Inspect(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got.Stream.Name != "INSPECTED" || got.Stream.LastSequence != 0 || got.Stream.LastTime != nil || got.DeadLetters == nil || got.DeadLetters.Messages != 0 {
		t.Errorf("of an empty stream: %+v", got)
	}
	r.Close()
	if err := n.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := i.Inspect(t.Context()); event.HintOf(err) == "" {
		t.Errorf("without a server: %v", err)
	}
	n.MustStart(t)
	if got, err = i.Inspect(t.Context()); err != nil || got.Stream.Name != "INSPECTED" {
		t.Errorf("after a restart: %+v, %v", got, err)
	}
}
