package tracing

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/relay"
)

// fake is a sink whose acks come when the test says so.
type fake struct {
	relay.Sink
	settled atomic.Uint64
	poison  error
}

func (f *fake) Resume(context.Context, event.Origin) (event.Resume, error) {
	return event.Resume{}, nil
}
func (f *fake) Append(*event.Event) error                               { return f.poison }
func (f *fake) Park(context.Context, *event.Event, *event.Poison) error { return nil }
func (f *fake) Settled() uint64                                         { return f.settled.Load() }
func (f *fake) Close() error                                            { return nil }

const (
	traceID = "4bf92f3577b34da6a3ce929d0e0e4736"
	spanID  = "00f067aa0ba902b7"
)

func order(traceparent string) *event.Event {
	ev := &event.Event{
		ID: []byte("id-1"), Subject: []byte("outbox.order.paid"), Payload: []byte("secret"), Table: "public.outbox",
		AggregateType: []byte("order"), EventType: []byte("paid"), CommitTime: time.Now().Add(-time.Second),
	}
	if traceparent != "" {
		ev.Headers = []event.Header{{Name: "Traceparent", Value: []byte(traceparent)}}
	}
	return ev
}

func traced(t *testing.T, f func(s relay.Sink, under *fake, spans func() tracetest.SpanStubs)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		exporter := tracetest.NewInMemoryExporter()
		tracer, err := start(t.Context(), Options{Stream: "ORDERS", Version: "v1"}, sdktrace.WithSyncer(exporter))
		if err != nil {
			t.Fatal(err)
		}
		under := &fake{}
		under.settled.Store(0)
		s := tracer.Wrap(under)
		if _, err := s.Resume(t.Context(), event.Origin{}); err != nil {
			t.Fatal(err)
		}
		f(s, under, exporter.GetSpans)
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := s.Close(); err != nil { // again
			t.Error(err)
		}
	})
}

func TestSpanFromCommitToAck(t *testing.T) {
	traced(t, func(s relay.Sink, under *fake, spans func() tracetest.SpanStubs) {
		ev := order("00-" + traceID + "-" + spanID + "-01")
		committed := ev.CommitTime
		if err := s.Append(ev); err != nil {
			t.Fatal(err)
		}
		<-time.After(50 * time.Millisecond)
		if n := len(spans()); n != 0 {
			t.Fatalf("%d spans before the ack", n)
		}
		acked := time.Now()
		under.settled.Store(1)
		<-time.After(5 * time.Millisecond)
		all := spans()
		if len(all) != 1 {
			t.Fatalf("%d spans", len(all))
		}
		got := all[0]
		if got.Name != "send ORDERS" || got.SpanKind != trace.SpanKindProducer || got.Status.Code == codes.Error {
			t.Errorf("span %s, kind %s, status %v", got.Name, got.SpanKind, got.Status)
		}
		if got.SpanContext.TraceID().String() != traceID || got.Parent.SpanID().String() != spanID {
			t.Errorf("trace %s, parent %s", got.SpanContext.TraceID(), got.Parent.SpanID())
		}
		if !got.StartTime.Equal(committed) || got.EndTime.Sub(acked).Abs() > 2*lookEvery {
			t.Errorf("from %s to %s, want from %s to %s", got.StartTime, got.EndTime, committed, acked)
		}
		values := map[string]string{}
		for _, a := range got.Attributes {
			values[string(a.Key)] = a.Value.String()
			if a.Value.String() == "secret" {
				t.Errorf("%s has the payload", a.Key)
			}
		}
		if values["messaging.message.id"] != "id-1" || values["messaging.destination.name"] != "outbox.order.paid" || values["messaging.message.body.size"] != "6" {
			t.Errorf("attributes %v", values)
		}
	})
}

func TestParentDecidesWhatIsSampled(t *testing.T) {
	traced(t, func(s relay.Sink, under *fake, spans func() tracetest.SpanStubs) {
		for range 10 {
			if err := s.Append(order("00-" + traceID + "-" + spanID + "-00")); err != nil {
				t.Fatal(err)
			}
		}
		const roots = 2000
		for range roots {
			if err := s.Append(order("")); err != nil {
				t.Fatal(err)
			}
		}
		under.settled.Store(10 + roots)
		<-time.After(5 * time.Millisecond)
		n := 0
		for _, got := range spans() {
			if got.SpanContext.TraceID().String() == traceID {
				t.Error("an event is sampled whose parent is not")
			}
			n++
		}
		if n == 0 || n > roots/20 {
			t.Errorf("%d of %d roots are sampled, want about %g", n, roots, roots*rootRatio)
		}
	})
}

func TestSpanOfAParkedEvent(t *testing.T) {
	traced(t, func(s relay.Sink, under *fake, spans func() tracetest.SpanStubs) {
		ev := order("00-" + traceID + "-" + spanID + "-01")
		why := &event.Poison{Reason: event.ReasonTooLarge}
		under.poison = why
		if err := s.Append(ev); !errors.Is(err, why) {
			t.Fatal(err)
		}
		if err := s.Park(t.Context(), ev, why); err != nil {
			t.Fatal(err)
		}
		under.settled.Store(1)
		<-time.After(5 * time.Millisecond)
		if all := spans(); len(all) != 1 || all[0].Status.Code != codes.Error || all[0].Status.Description != "parked: too_large" {
			t.Errorf("spans %+v", all)
		}
	})
}

func TestSpansEndWithTheSession(t *testing.T) {
	traced(t, func(s relay.Sink, under *fake, spans func() tracetest.SpanStubs) {
		for range 2 {
			if err := s.Append(order("00-" + traceID + "-" + spanID + "-01")); err != nil {
				t.Fatal(err)
			}
		}
		under.settled.Store(1)
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		all := spans()
		if len(all) != 2 || all[0].Status.Code == codes.Error || all[1].Status.Code != codes.Error {
			t.Errorf("spans %+v", all)
		}
	})
}

func TestVariablesTurnTracingOn(t *testing.T) {
	for _, name := range append(endpoints, "OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") {
		t.Setenv(name, "")
	}
	o := Options{Stream: "ORDERS", Log: slog.New(slog.DiscardHandler)}
	on := func(want bool) {
		t.Helper()
		tracer, err := Start(t.Context(), o)
		if err != nil || (tracer != nil) != want {
			t.Errorf("on %t, %v, want on %t", tracer != nil, err, want)
		}
		if tracer != nil {
			if err := tracer.Stop(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	on(false)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
	on(true)
	t.Setenv("OTEL_SDK_DISABLED", "true")
	on(false)
	t.Setenv("OTEL_SDK_DISABLED", "")
	t.Setenv("OTEL_TRACES_EXPORTER", "none")
	on(false)
	t.Setenv("OTEL_TRACES_EXPORTER", "")
	t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
	if _, err := Start(t.Context(), o); event.ClassOf(err) != event.Usage || event.HintOf(err) == "" {
		t.Errorf("grpc: %v", err)
	}
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
	on(true)
}
