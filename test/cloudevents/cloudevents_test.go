// Package cloudevents holds what the relay publishes with --cloudevents
// against the decoder of the CloudEvents Go SDK. It is a module of its own, so
// that the SDK is no dependency of the product.
package cloudevents

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"testing"
	"time"

	"github.com/cloudevents/sdk-go/protocol/nats_jetstream/v2"
	"github.com/cloudevents/sdk-go/v2/binding"
	cloudevents "github.com/cloudevents/sdk-go/v2/event"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

func walrelay(t *testing.T, args ...string) {
	t.Helper()
	if ran := harness.MustRun(t, nil, args...); ran.Code != 0 {
		t.Fatalf("walrelay %v: exit code %d\n%s%s", args, ran.Code, ran.Stdout, ran.Stderr)
	}
}

// plain undoes the encoding of the binding's text, 1.0.3, which asks for one
// round of percent-decoding. The SDK hands values on as they are.
func plain(t *testing.T, s string) string {
	t.Helper()
	v, err := url.PathUnescape(s)
	if err != nil {
		t.Errorf("%q is not percent-encoded: %v", s, err)
	}
	return v
}

func TestSDKDecodesWhatTheRelayPublishes(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	n := harness.RunNATS(t, harness.NATSOptions{})
	dsn := pg.DSN("postgres")
	walrelay(t, "init", "--apply", "--dsn", dsn)
	walrelay(t, "slot", "create", "--dsn", dsn)
	relay := harness.RunRelay(t, "run", "--dsn", dsn, "--nats-url", n.URL(), "--create-stream", "--messages",
		"--cloudevents", "--cloudevents-source", "https://shop.example/orders", "--log-format", "text")
	const id = "0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3"
	pg.MustExec(t,
		`insert into outbox (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at) values
			('`+id+`1', 'order', '42', 'com.example.order.paid', '{"total": 19.90}', '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "ce-tenant": "acme"}', '2024-05-06 07:08:09.5Z'),
			('`+id+`2', 'order', E'Euro € 😀 "100%"', 'with space', null, '{"ce-tenant": "Zoë"}', '2024-05-06 07:08:09Z')`,
		`select pg_logical_emit_message(true, 'walrelay', '{"id": "`+id+`3", "aggregate_type": "order", "aggregate_id": "7", "event_type": "made", "payload_text": "text", "created_at": "2024-05-06T07:08:09Z"}')`,
	)
	js := n.JetStream(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := harness.AwaitMessages(ctx, js, "OUTBOX", 3); err != nil {
		t.Fatalf("%v\n%s", err, relay.Output())
	}
	st, err := js.Stream(ctx, "OUTBOX")
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ typ, subject, contentType, tenant, data string }{
		{"com.example.order.paid", "42", "application/json", "acme", `{"total": 19.90}`},
		{"with space", `Euro € 😀 "100%"`, "application/json", "Zoë", ""},
		{"made", "7", "text/plain; charset=utf-8", "", "text"},
	} {
		ev := decode(t, ctx, st, uint64(i+1))
		if got := ev.ID(); got != fmt.Sprint(id, i+1) {
			t.Errorf("event %d: id %q", i+1, got)
		}
		if ev.SpecVersion() != "1.0" || plain(t, ev.Source()) != "https://shop.example/orders" {
			t.Errorf("event %d: version %q, source %q", i+1, ev.SpecVersion(), ev.Source())
		}
		if got := plain(t, ev.Type()); got != want.typ {
			t.Errorf("event %d: type %q, want %q", i+1, got, want.typ)
		}
		if got := plain(t, ev.Subject()); got != want.subject {
			t.Errorf("event %d: subject %q, want %q", i+1, got, want.subject)
		}
		if got := plain(t, ev.DataContentType()); got != want.contentType {
			t.Errorf("event %d: content type %q, want %q", i+1, got, want.contentType)
		}
		if got := ev.Time().UTC().Format("2006-01-02T15:04:05"); got != "2024-05-06T07:08:09" {
			t.Errorf("event %d: time %s", i+1, got)
		}
		tenant, _ := ev.Extensions()["tenant"].(string)
		if got := plain(t, tenant); got != want.tenant {
			t.Errorf("event %d: extension tenant %q, want %q", i+1, got, want.tenant)
		}
		if got := string(ev.Data()); got != want.data {
			t.Errorf("event %d: data %q, want %q", i+1, got, want.data)
		}
		if trace, _ := ev.Extensions()["traceparent"].(string); (trace != "") != (i == 0) {
			t.Errorf("event %d: traceparent %q", i+1, trace)
		}
	}
}

// decode reads a message as a subscriber of the SDK would.
func decode(t *testing.T, ctx context.Context, st jetstream.Stream, seq uint64) *cloudevents.Event {
	t.Helper()
	raw, err := st.GetMsg(ctx, seq)
	if err != nil {
		t.Fatal(err)
	}
	m := nats_jetstream.NewMessage(&nats.Msg{Subject: raw.Subject, Header: raw.Header, Data: raw.Data})
	if m.ReadEncoding() != binding.EncodingBinary {
		t.Fatalf("message %d is not in binary mode: %v", seq, raw.Header)
	}
	ev, err := binding.ToEvent(ctx, m)
	if err != nil {
		t.Fatalf("message %d: %v", seq, err)
	}
	if err := ev.Validate(); err != nil {
		t.Errorf("message %d: %v", seq, err)
	}
	return ev
}
