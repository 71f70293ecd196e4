package tracing

import (
	"context"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/relay"
)

// lookEvery is how often acks are looked for while a sampled event waits for
// its own, and so how exact the end of a span is.
const lookEvery = time.Millisecond

// Wrap returns a sink that does as the given one, and makes spans of its events.
func (t *Tracer) Wrap(s relay.Sink) relay.Sink {
	return &sink{Sink: s, t: t, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

// sink makes spans of the events that pass through. What belongs to the
// goroutine that appends says so; the others are its own.
type sink struct {
	relay.Sink
	t *Tracer

	count uint64 // events of the session so far, as Settled counts; of the goroutine that appends

	mu      sync.Mutex
	waiting []waiting // in order

	wake    chan struct{}
	done    chan struct{}
	once    sync.Once
	running sync.WaitGroup
}

// waiting is a sampled event without its ack.
type waiting struct {
	number uint64
	span   trace.Span
}

// Resume implements relay.Sink.
func (s *sink) Resume(ctx context.Context, origin event.Origin) (event.Resume, error) {
	r, err := s.Sink.Resume(ctx, origin)
	if err != nil {
		return r, err
	}
	s.running.Go(s.look)
	return r, nil
}

// Append implements relay.Sink.
func (s *sink) Append(ev *event.Event) error {
	if err := s.Sink.Append(ev); err != nil {
		return err
	}
	s.count++
	s.begin(ev, nil)
	return nil
}

// Park implements relay.Sink. The span ends with the ack of the marker.
func (s *sink) Park(ctx context.Context, ev *event.Event, why *event.Poison) error {
	if err := s.Sink.Park(ctx, ev, why); err != nil {
		return err
	}
	s.count++
	s.begin(ev, why)
	return nil
}

// Redeliver implements relay.Sink.
func (s *sink) Redeliver(ctx context.Context, ev *event.Event, why *event.Poison) (*event.Poison, error) {
	refused, err := s.Sink.Redeliver(ctx, ev, why)
	if err == nil {
		s.count++
		s.begin(ev, refused)
	}
	return refused, err
}

// Refuse implements relay.Sink. The span ends with the ack of the marker.
func (s *sink) Refuse(ctx context.Context, ev *event.Event, why *event.Poison) error {
	if err := s.Sink.Refuse(ctx, ev, why); err != nil {
		return err
	}
	s.count++
	s.begin(ev, why)
	return nil
}

// Close implements relay.Sink. Events without an ack are published again by
// another session, or found to be stored.
func (s *sink) Close() error {
	err := s.Sink.Close()
	s.once.Do(func() { close(s.done) })
	s.running.Wait()
	s.settle()
	for _, w := range s.waiting {
		w.span.SetStatus(codes.Error, "the session ended before the ack")
		w.span.End()
	}
	s.waiting = nil
	return err
}

// begin makes the span of an event that was appended, if it is sampled.
func (s *sink) begin(ev *event.Event, why *event.Poison) {
	now := time.Now()
	began := ev.CommitTime
	if began.IsZero() || began.After(now) { // by another clock
		began = now
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), carrier(ev.Headers))
	_, span := s.t.tracer.Start(ctx, "send "+s.t.stream, trace.WithSpanKind(trace.SpanKindProducer), trace.WithTimestamp(began))
	if !span.IsRecording() {
		return
	}
	// The names of OpenTelemetry's conventions for messaging, then our own.
	span.SetAttributes(
		attribute.String("messaging.system", "nats"),
		attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.operation.name", "publish"),
		attribute.String("messaging.destination.name", text(ev.Subject)),
		attribute.String("messaging.message.id", text(ev.ID)),
		attribute.Int("messaging.message.body.size", len(ev.Payload)),
		attribute.String("walrelay.stream", s.t.stream),
		attribute.String("walrelay.table", ev.Table),
		attribute.String("walrelay.position", ev.Position.String()),
		attribute.String("walrelay.aggregate_type", text(ev.AggregateType)),
		attribute.String("walrelay.event_type", text(ev.EventType)),
	)
	span.AddEvent("appended", trace.WithTimestamp(now))
	if why != nil {
		span.SetAttributes(attribute.String("walrelay.parked", string(why.Reason)))
		span.SetStatus(codes.Error, "parked: "+string(why.Reason))
	}
	s.mu.Lock()
	s.waiting = append(s.waiting, waiting{s.count, span})
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// textLimit keeps what an event may make long.
const textLimit = 512

func text(b []byte) string { return strings.ToValidUTF8(string(b[:min(len(b), textLimit)]), "?") }

// look ends the spans of events whose acks have arrived, until Close.
func (s *sink) look() {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		tick.Stop()
		select {
		case <-s.wake:
		case <-s.done:
			return
		}
		tick.Reset(lookEvery)
		for s.settle() {
			select {
			case <-tick.C:
			case <-s.done:
				return
			}
		}
	}
}

// settle ends the spans that can be ended, and reports whether others wait.
func (s *sink) settle() bool {
	settled := s.Settled()
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < len(s.waiting) && s.waiting[n].number <= settled {
		s.waiting[n].span.End()
		n++
	}
	s.waiting = append(s.waiting[:0], s.waiting[n:]...)
	return len(s.waiting) > 0
}

// carrier reads the headers of an event.
type carrier []event.Header

// Get implements propagation.TextMapCarrier.
func (c carrier) Get(key string) string {
	for _, h := range c {
		if strings.EqualFold(h.Name, key) {
			return string(h.Value)
		}
	}
	return ""
}

// Set implements propagation.TextMapCarrier; nothing is injected.
func (carrier) Set(string, string) {}

// Keys implements propagation.TextMapCarrier.
func (c carrier) Keys() []string {
	keys := make([]string, len(c))
	for i, h := range c {
		keys[i] = h.Name
	}
	return keys
}
