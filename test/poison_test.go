package test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// letters reads the dead letters, oldest first.
func (r *rig) letters() []*jetstream.RawStreamMsg {
	r.t.Helper()
	st, err := r.js.Stream(r.t.Context(), stream+"_DLQ")
	must(r.t, err)
	var all []*jetstream.RawStreamMsg
	state := st.CachedInfo().State
	for seq := state.FirstSeq; seq <= state.LastSeq && state.Msgs > 0; seq++ {
		m, err := st.GetMsg(r.t.Context(), seq)
		if errors.Is(err, jetstream.ErrMsgNotFound) {
			continue // removed since
		}
		must(r.t, err)
		all = append(all, m)
	}
	return all
}

// outline is the stream as one word a message: its type of event, or "!" for a marker.
func outline(ms []*jetstream.RawStreamMsg) string {
	var words []string
	for _, m := range ms {
		word := m.Header.Get(event.HeaderEventType)
		if m.Header.Get(event.HeaderReason) != "" {
			word = "!"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

func TestPoisonInEveryForm(t *testing.T) {
	for _, mode := range []string{"chain", "sparse", "atomic"} {
		t.Run(mode, func(t *testing.T) { poisonInEveryForm(t, mode) })
	}
}

func poisonInEveryForm(t *testing.T, mode string) {
	t.Parallel()
	const id = "0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d"
	r := newRig(t, rigOptions{
		args: []string{"--publish-mode", mode},
		nats: harness.NATSOptions{
			MaxPayload: 128 << 10, User: "relay", Password: "x",
			Config: `authorization { users = [
				{ user: relay, password: x, permissions: { publish: { allow: ">", deny: "outbox.order.forbidden" } } }
			] }`,
		},
		natsURL: func(n *harness.NATS) string { return strings.Replace(n.URL(), "://", "://relay:x@", 1) },
		prepare: func(r *rig) {
			// No unique id and NULL where the contract has none, as in a table that somebody else made.
			r.exec(`create table public.outbox (seq bigint generated always as identity primary key, id uuid not null default gen_random_uuid(),
				aggregate_type text not null, aggregate_id text not null, event_type text not null, payload jsonb, headers jsonb, created_at timestamptz not null default now())`)
		},
	})
	r.exec("alter table outbox alter id drop not null")
	r.createStream(func(c *jetstream.StreamConfig) {
		c.Subjects = []string{"outbox.order.>", "walrelay.parked." + stream}
		c.MaxMsgSize = 100 << 10
		c.AllowAtomicPublish = mode == "atomic"
	})
	r.relay.MustStart(t)
	r.exec(
		into+"values ('order', '1', 'one', '{}')",
		into+"values ('order', '1', 'server', to_jsonb(repeat('x', 140000)))",
		into+"values ('order', '1', 'two', '{}'), ('order', '1', 'stream', to_jsonb(repeat('x', 110000))), ('order', '1', 'three', '{}')",
		"insert into outbox (aggregate_type, aggregate_id, event_type, headers) values ('order', '1', 'headers', jsonb_build_object('x', repeat('x', 66000)))",
		into+"values ('order', '1', 'four', '{}'), ('invoice', '1', 'unbound', '{}')",
		"insert into outbox (aggregate_type, aggregate_id, event_type, headers) values ('order', '1', 'name', '{\"a b\": 1}'), ('order', '1', 'list', '[]')",
		"insert into outbox (id, aggregate_type, aggregate_id, event_type) values (null, 'order', '1', 'nameless')",
		into+"values ('order', '1', 'five', '{}'), ('order', '1', 'forbidden', '{}'), ('order', '1', 'six', '{}')",
		"insert into outbox (id, aggregate_type, aggregate_id, event_type, payload) values ('"+id+"', 'order', '1', 'original', '1'), ('"+id+"', 'order', '1', 'twin', '2')",
		into+"values ('order', '1', 'last', '{}')",
	)
	ms := r.messages(17)
	want := "one ! two ! three ! four ! ! ! ! five ! six original ! last"
	if got := outline(ms); got != want {
		t.Errorf("the stream has\n%s, want\n%s", got, want)
	}
	letters := r.letters()
	for i, c := range []struct{ reason, typ, subject, omitted string }{
		{"too_large: ", "server", "outbox.order.server", "140002"},
		{"too_large: ", "stream", "outbox.order.stream", ""},
		{"headers: headers of ", "headers", "outbox.order.headers", ""},
		{"subject: ", "unbound", "outbox.invoice.unbound", ""},
		{`headers: "a b" cannot be a header's name`, "name", "outbox.order.name", ""},
		{"headers: the headers are not a JSON object", "list", "outbox.order.list", ""},
		{"null_id: ", "nameless", "outbox.order.nameless", ""},
		{"not_authorized: ", "forbidden", "outbox.order.forbidden", ""},
		{"duplicate_id: its id was used before, by the message with sequence 15", "twin", "outbox.order.twin", ""},
	} {
		if i >= len(letters) {
			t.Fatalf("%d dead letters", len(letters))
		}
		h := letters[i].Header
		if got := h.Get(event.HeaderReason); !strings.HasPrefix(got, c.reason) {
			t.Errorf("dead letter %d has reason %q, want %q", i+1, got, c.reason)
		}
		if h.Get(event.HeaderEventType) != c.typ || h.Get(event.HeaderSubject) != c.subject || h.Get("Outbox-Body-Omitted") != c.omitted {
			t.Errorf("dead letter %d: %v", i+1, h)
		}
		at := slices.IndexFunc(ms, func(m *jetstream.RawStreamMsg) bool { return m.Header.Get(event.HeaderPos) == h.Get(event.HeaderPos) })
		if at < 0 || ms[at].Subject != "walrelay.parked."+stream || ms[at].Header.Get(event.HeaderReason) != h.Get(event.HeaderReason) {
			t.Errorf("dead letter %d has no marker at %s", i+1, h.Get(event.HeaderPos))
		}
	}
	if len(letters) != 9 {
		t.Errorf("%d dead letters, want 9", len(letters))
	}
	r.await(10*time.Second, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
	r.ends(0)
}

func TestAggregateWaitsForItsDeadLetters(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		nats: harness.NATSOptions{MaxPayload: 64 << 10},
		args: []string{"--on-poison", "park-aggregate", "--max-parked-in-row", "3", "--status-interval", "50ms"},
	})
	r.relay.MustStart(t)
	r.exec(
		into+"values ('order', 'a', 'one', '{}'), ('order', 'b', 'one', '{}')",
		into+"values ('order', 'a', 'large', to_jsonb(repeat('x', 100000))), ('order', 'b', 'two', '{}'), ('order', 'a', 'three', '{}')",
		// More than --max-parked-in-row wait, which is no fault of the configuration.
		into+"select 'order', 'a', 'wait', '{}' from generate_series(1, 8)",
		into+"values ('order', 'b', 'three', '{}'), ('invoice', 'a', 'other', '{}')",
	)
	ms := r.messages(15)
	if got, want := outline(ms), "one one ! two ! ! ! ! ! ! ! ! ! three other"; got != want {
		t.Errorf("the stream has\n%s, want\n%s", got, want)
	}
	letters := r.letters()
	if len(letters) != 10 {
		t.Fatalf("%d dead letters, want 10", len(letters))
	}
	for i, m := range letters {
		want := "aggregate: an earlier event of its aggregate is parked"
		if i == 0 {
			want = "too_large: "
		}
		if got := m.Header.Get(event.HeaderReason); !strings.HasPrefix(got, want) || m.Header.Get(event.HeaderAggregateID) != "a" {
			t.Errorf("dead letter %d is of %s for %q", i+1, m.Header.Get(event.HeaderAggregateID), got)
		}
	}

	// After a crash it is still so.
	must(t, r.relay.Kill())
	r.exec(into + "values ('order', 'a', 'four', '{}'), ('order', 'b', 'four', '{}')")
	r.relay.MustStart(t)
	ms = r.messages(17)
	if got := outline(ms[15:]); got != "! four" {
		t.Errorf("after the crash: %s", got)
	}

	// As long as one dead letter is left, and not longer.
	dlq, err := r.js.Stream(t.Context(), stream+"_DLQ")
	must(t, err)
	for seq := uint64(1); seq <= 10; seq++ {
		must(t, dlq.DeleteMsg(t.Context(), seq))
	}
	r.exec(into + "values ('order', 'a', 'five', '{}')")
	if got := outline(r.messages(18)[17:]); got != "!" {
		t.Errorf("with one dead letter left: %s", got)
	}
	must(t, dlq.Purge(t.Context()))
	r.exec(into + "values ('order', 'a', 'six', '{}'), ('order', 'b', 'six', '{}')")
	if got := outline(r.messages(20)[18:]); got != "six six" {
		t.Errorf("without dead letters: %s", got)
	}
	r.ends(0)
}

// A crash anywhere between dead letter and marker leaves neither out.
func TestAggregateIsHeldAcrossKills(t *testing.T) {
	t.Parallel()
	const rounds, aggregates = 40, 5
	r := newRig(t, rigOptions{
		nats: harness.NATSOptions{MaxPayload: 64 << 10},
		args: []string{"--on-poison", "park-aggregate", "--status-interval", "50ms", "--backoff-min", "10ms"},
	})
	for i := range rounds {
		r.exec(fmt.Sprintf(into+"select 'order', a::text, 'e%d', '{}' from generate_series(1, %d) a", i, aggregates))
		if i == rounds/4 {
			r.exec(into + "values ('order', '2', 'large', to_jsonb(repeat('x', 100000))), ('order', '4', 'large', to_jsonb(repeat('x', 100000)))")
		}
	}
	total := rounds*aggregates + 2
	for i := range 6 {
		r.relay.MustStart(t)
		r.stored(total/4+i*total/10, 30*time.Second)
		must(t, r.relay.Kill())
	}
	r.relay.MustStart(t)
	r.relay.MustAwait(t, quick, "streaming")
	ms := r.messages(total)
	seen := map[string]int{}
	for _, m := range ms {
		if m.Header.Get(event.HeaderReason) != "" {
			continue
		}
		id := m.Header.Get(event.HeaderAggregateID)
		if got, want := m.Header.Get(event.HeaderEventType), fmt.Sprint("e", seen[id]); got != want {
			t.Fatalf("aggregate %s: got %s, want %s", id, got, want)
		}
		seen[id]++
	}
	for id := range aggregates {
		want := rounds
		if id == 1 || id == 3 {
			want = rounds/4 + 1
		}
		if got := seen[fmt.Sprint(id+1)]; got != want {
			t.Errorf("aggregate %d has %d events in the stream, want %d", id+1, got, want)
		}
	}
	letters := r.letters()
	if want := 2 + 2*(rounds-rounds/4-1); len(letters) != want {
		t.Errorf("%d dead letters, want %d", len(letters), want)
	}
	last := map[string]string{}
	for _, m := range letters {
		id, typ := m.Header.Get(event.HeaderAggregateID), m.Header.Get(event.HeaderEventType)
		if (last[id] == "") != (typ == "large") {
			t.Errorf("dead letter of aggregate %s: %s after %q", id, typ, last[id])
		}
		last[id] = typ
	}
	r.ends(0)
}

// A fault of the configuration refuses every event: the outbox is not drained into the dead letters.
func TestPermanentFaultIsNoPoison(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		policy string
		nats   harness.NATSOptions
		args   []string
		reason string
		mend   func(r *rig)
	}{
		{
			"subjects that the stream does not bind", "park",
			harness.NATSOptions{},
			[]string{"--subject", "elsewhere.{event_type}"},
			"does not bind",
			func(r *rig) { r.relay.Args = with(r.relay.Args, "--subject", "outbox.{aggregate_type}.{event_type}") },
		},
		{
			"the same, with aggregates held", "park-aggregate",
			harness.NATSOptions{},
			[]string{"--subject", "elsewhere.{event_type}"},
			"does not bind",
			func(r *rig) { r.relay.Args = with(r.relay.Args, "--subject", "outbox.{aggregate_type}.{event_type}") },
		},
		{
			"a user that may not publish", "park",
			harness.NATSOptions{
				User: "relay", Password: "x",
				Config: `authorization { users = [
					{ user: relay, password: x, permissions: { publish: { allow: ">", deny: "outbox.>" } } }
					{ user: other, password: x }
				] }`,
			},
			nil, "not_authorized",
			func(r *rig) {
				r.relay.Args = with(r.relay.Args, "--nats-url", strings.Replace(r.nats.URL(), "://", "://other:x@", 1))
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			const limit, events = 5, 30
			r := newRig(t, rigOptions{
				nats: c.nats, args: append([]string{"--on-poison", c.policy, "--max-parked-in-row", fmt.Sprint(limit), "--backoff-min", "10ms", "--backoff-max", "50ms"}, c.args...),
				natsURL: func(n *harness.NATS) string {
					if c.nats.User == "" {
						return n.URL()
					}
					return strings.Replace(n.URL(), "://", "://relay:x@", 1)
				},
			})
			r.createStream(func(s *jetstream.StreamConfig) { s.Subjects = []string{"outbox.>", "walrelay.parked." + stream} })
			r.exec(fmt.Sprintf(into+"select 'order', i::text, 'e' || i, '{}' from generate_series(1, %d) i", events))
			r.relay.MustStart(t)
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			code, err := r.relay.Wait(ctx)
			must(t, err)
			out := r.relay.Output()
			if code != 3 || !strings.Contains(out, "6 events in a row cannot be stored") || !strings.Contains(out, c.reason) || !strings.Contains(out, "hint: so many in a row") {
				t.Errorf("exit code %d\n%s", code, out)
			}
			if n := len(r.letters()); n != limit {
				t.Errorf("%d dead letters, want %d", n, limit)
			}
			// Once more it stops again, and once it is mended the rest flows.
			c.mend(r)
			r.relay.MustStart(t)
			ms := r.messages(events)
			if got, want := outline(ms[:limit+1]), strings.Repeat("! ", limit)+"e6"; got != want {
				t.Errorf("the stream begins with %s, want %s", got, want)
			}
			if n := len(r.letters()); n != limit {
				t.Errorf("%d dead letters after the mend, want %d", n, limit)
			}
			r.ends(0)
		})
	}
}
