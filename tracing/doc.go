// Package tracing tells OpenTelemetry how long sampled events take from their
// commit to the stream. It knows no driver of Postgres or NATS.
//
// Callers, in order:
//
//  1. Start a Tracer. It is nil unless OTEL_* variables name an endpoint: then
//     there is nothing to wrap, and nothing of this runs.
//  2. Wrap every sink that the relay opens.
//  3. Stop it when the relay has ended, so that the last spans are sent.
//
// A span begins with the commit and ends with the ack. Its parent is the
// traceparent among the event's headers, which goes to the message as it is:
// consumers hang below the service, beside the relay. What the parent says
// about sampling holds; of events without one, one in a hundred is sampled.
// OTEL_TRACES_SAMPLER changes both.
//
// | file       | holds                                |
// |------------|--------------------------------------|
// | tracer.go  | the variables, the exporter, its end |
// | sink.go    | spans around a relay.Sink            |
package tracing
