package publisher

import (
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// opened opens a session over a line and resumes.
func opened(t *testing.T, p *Publisher, l *Line) *run {
	t.Helper()
	r := &run{fails: make(chan error, 8)}
	s, err := p.OpenOver(t.Context(), l, func(err error) { r.fails <- err })
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	r.Session = s
	t.Cleanup(func() { s.Close() })
	if r.resume, err = s.Resume(t.Context(), testOrigin()); err != nil {
		t.Fatalf("resume: %v", err)
	}
	return r
}

func dialed(t *testing.T, p *Publisher) *Line {
	t.Helper()
	l, err := p.Dial(t.Context())
	if err != nil {
		t.Fatalf("dial: %v", err)
	}
	p.Ask(t.Context(), l)
	return l
}

// What Ask hears may have changed by the time a session is opened.
func TestLineThatWasAskedAhead(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	o := optionsFor(n, "ahead")
	p := newPublisher(t, o)
	unused := dialed(t, p)
	unused.Close()

	l := dialed(t, p)
	if _, err := n.JetStream(t).Stream(t.Context(), "ahead"); !errors.Is(err, jetstream.ErrStreamNotFound) {
		t.Fatalf("dialling has made the stream: %v", err)
	}
	begin(t, newPublisher(t, o)).Close() // another relay makes everything meanwhile
	r := opened(t, p, l)
	events := numberedLog("ahead", 3)
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	r.Close()

	l = dialed(t, p)
	if r = opened(t, p, l); r.resume.After != events[2].Position {
		t.Errorf("resumes after %s, want %s", r.resume.After, events[2].Position)
	}
	more := numberedLog("ahead", 4)[3:]
	if err := r.publish(t.Context(), more); err != nil {
		t.Fatal(err)
	}
	r.Close()

	// The stream is read when the session resumes, not when it was asked for.
	l = dialed(t, p)
	r = begin(t, newPublisher(t, o))
	last := numberedLog("ahead", 5)[4:]
	if err := r.publish(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	r.Close()
	if r = opened(t, newPublisher(t, o), l); r.resume.After != last[0].Position {
		t.Errorf("resumes after %s, want %s", r.resume.After, last[0].Position)
	}
}

func TestLineToAServerThatIsGone(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	p := newPublisher(t, optionsFor(n, "gone"))
	l := dialed(t, p)
	if err := n.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := p.OpenOver(t.Context(), l, func(error) {}); err == nil || event.ClassOf(err) != event.Transient {
		t.Errorf("got %v, want a transient failure", err)
	}
}
