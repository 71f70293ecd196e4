package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/walrelay/walrelay/event"
)

// Options of a Tracer.
type Options struct {
	Stream  string
	Version string
	Log     *slog.Logger
}

// Tracer makes spans and sends them, in the background and in batches.
type Tracer struct {
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
	stream   string
}

// rootRatio is how many of the events without a traceparent are sampled.
const rootRatio = 0.01

// endpoints are the variables that turn tracing on.
var endpoints = []string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"}

// enabled reports whether the variables want traces to be sent.
func enabled() bool {
	if strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return false
	}
	if e := os.Getenv("OTEL_TRACES_EXPORTER"); e != "" && e != "otlp" {
		return false
	}
	for _, name := range endpoints {
		if os.Getenv(name) != "" {
			return true
		}
	}
	return false
}

// Start makes a Tracer of the OTEL_* variables and starts what sends its spans.
// It is nil when no variable names an endpoint. It connects to nothing yet. A
// protocol other than http/protobuf is a Usage failure.
func Start(ctx context.Context, o Options) (*Tracer, error) {
	if !enabled() {
		return nil, nil
	}
	for _, name := range []string{"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"} {
		p := os.Getenv(name)
		if p == "" {
			continue
		}
		if p != "http/protobuf" {
			return nil, event.Fail(event.Usage, "set it to http/protobuf, with an endpoint such as http://collector:4318", "%s is not a protocol that traces are sent by", name)
		}
		break
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return nil, event.Fail(event.Usage, "check the variables OTEL_EXPORTER_OTLP_*", "set up tracing: %w", err)
	}
	otel.SetErrorHandler(&quiet{log: o.Log})
	return start(ctx, o, sdktrace.WithBatcher(exporter))
}

func start(ctx context.Context, o Options, export sdktrace.TracerProviderOption) (*Tracer, error) {
	about, err := resource.New(ctx,
		resource.WithAttributes(attribute.String("service.name", "walrelay"), attribute.String("service.version", o.Version)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		return nil, event.Fail(event.Usage, "check OTEL_RESOURCE_ATTRIBUTES", "set up tracing: %w", err)
	}
	opts := []sdktrace.TracerProviderOption{export, sdktrace.WithResource(about)}
	if os.Getenv("OTEL_TRACES_SAMPLER") == "" {
		opts = append(opts, sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(rootRatio))))
	}
	provider := sdktrace.NewTracerProvider(opts...)
	return &Tracer{provider: provider, tracer: provider.Tracer("github.com/walrelay/walrelay/tracing"), stream: o.Stream}, nil
}

// Stop sends what is left. It blocks until that is done or ctx ends.
func (t *Tracer) Stop(ctx context.Context) error {
	if err := t.provider.Shutdown(ctx); err != nil {
		return fmt.Errorf("send the last spans: %w", err)
	}
	return nil
}

// quiet logs errors of the exporter once a while: a collector that is away is
// no trouble for events.
type quiet struct {
	log *slog.Logger

	mu    sync.Mutex
	last  time.Time
	since int
}

const quietTime = time.Minute

// Handle implements otel.ErrorHandler.
func (q *quiet) Handle(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.since++
	if !q.last.IsZero() && time.Since(q.last) < quietTime {
		return
	}
	q.log.Warn("spans are not sent", "err", err, "times", q.since)
	q.last, q.since = time.Now(), 0
}
