package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/slotmgr"
	"github.com/walrelay/walrelay/test/harness"
)

// both is a Postgres and a broker, and the environment that names them.
type both struct {
	t    *testing.T
	pg   *harness.Postgres
	nats *harness.NATS
	js   jetstream.JetStream
	env  []string
}

func newBoth(t *testing.T, o harness.PostgresOptions) *both {
	t.Helper()
	b := &both{t: t, pg: harness.RunPostgres(t, o), nats: harness.RunNATS(t, harness.NATSOptions{})}
	b.js = b.nats.JetStream(t)
	b.env = []string{"WALRELAY_DSN=" + b.pg.DSN("postgres"), "WALRELAY_NATS_URL=" + b.nats.URL()}
	return b
}

func (b *both) run(args ...string) outcome {
	b.t.Helper()
	return walrelay(b.t, b.env, args...)
}

// insert commits a row in a transaction of its own and returns that one's number.
func (b *both) insert(n int) string {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 10*time.Second)
	defer cancel()
	conn, err := b.pg.Conn(ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Close(ctx)
	var xid string
	err = conn.QueryRow(ctx, `insert into outbox (aggregate_type, aggregate_id, event_type, payload)
		values ('order', $1, 'placed', jsonb_build_object('n', $2::int)) returning pg_current_xact_id()::text`, fmt.Sprint(n), n).Scan(&xid)
	if err != nil {
		b.t.Fatal(err)
	}
	return xid
}

// relay runs a relay in this process; the function that is returned stops it.
func (b *both) relay(args ...string) (stop func() outcome) {
	b.t.Helper()
	ctx, cancel := context.WithCancelCause(b.t.Context())
	done := make(chan outcome, 1)
	go func() {
		done <- runWith(ctx, b.env, append([]string{"run", "--create-stream", "--status-interval", "50ms", "--backoff-max", "200ms"}, args...)...)
	}()
	return func() outcome {
		cancel(errSignal)
		return <-done
	}
}

// ended waits until a relay stops by itself.
func (b *both) ended(args ...string) outcome {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	return runWith(ctx, b.env, append([]string{"run", "--create-stream"}, args...)...)
}

func (b *both) stored(n int) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.t.Context(), 30*time.Second)
	defer cancel()
	if err := harness.AwaitMessages(ctx, b.js, "OUTBOX", n); err != nil {
		b.t.Fatal(err)
	}
}

// numbers are the n of the payloads that the stream holds.
func (b *both) numbers() string {
	b.t.Helper()
	all, err := harness.ReadStream(b.t.Context(), b.js, "OUTBOX")
	if err != nil {
		b.t.Fatal(err)
	}
	var ns []string
	for _, m := range all {
		ns = append(ns, strings.Trim(string(m.Payload), `{}"n: `))
	}
	return strings.Join(ns, " ")
}

func (b *both) peeked(args ...string) string {
	b.t.Helper()
	o := b.run(append([]string{"slot", "peek", "-o", "json"}, args...)...)
	o.want(b.t, exitOK)
	var events []operate.Event
	if err := json.Unmarshal([]byte(o.out), &events); err != nil {
		b.t.Fatalf("%v in %s", err, o.out)
	}
	var ns []string
	for _, e := range events {
		if e.Subject != "outbox.order.placed" || e.ID == "" || e.Position.IsZero() || e.CommitTime.IsZero() {
			b.t.Errorf("peeked %+v", e)
		}
		ns = append(ns, e.AggregateID)
	}
	return strings.Join(ns, " ")
}

func (b *both) show() shown {
	b.t.Helper()
	o := b.run("slot", "show", "-o", "json")
	o.want(b.t, exitOK)
	var s shown
	if err := json.Unmarshal([]byte(strings.ReplaceAll(o.out, `"level": "WARN"`, `"level": 1`)), &s); err != nil {
		b.t.Fatalf("%v in %s", err, o.out)
	}
	return s
}

func TestSlotIsSeenAndMovedOnBothEnds(t *testing.T) {
	b := newBoth(t, harness.PostgresOptions{})
	b.run("init", "--apply").want(t, exitOK)
	b.run("init", "--apply", "--inbox").want(t, exitOK, `table "public"."inbox" created`)
	b.run("init", "--apply", "--inbox").want(t, exitOK, "nothing to do")
	b.run("slot", "create").want(t, exitOK)
	b.run("slot", "peek").want(t, exitOK, "nothing is waiting")
	for n := range 3 {
		b.insert(n)
	}

	b.run("slot", "peek").want(t, exitOK, "SUBJECT", "outbox.order.placed", `{"n": 2}`)
	if got := b.peeked(); got != "0 1 2" {
		t.Errorf("peeked %s", got)
	}
	b.run("slot", "peek", "--limit", "2").want(t, exitOK, "more are waiting than these 2")
	if got := b.peeked("--limit", "1"); got != "0" {
		t.Errorf("peeked %s", got)
	}
	b.run("slot", "show").want(t, exitOK, "not in use", "nobody reads slot", "walrelay run --slot walrelay", "checkpoint:")

	stop := b.relay()
	b.stored(3)
	t.Run("while the relay runs", func(t *testing.T) {
		if got := b.peeked(); got != "" {
			t.Errorf("peeked %s, which are stored", got)
		}
		b.run("slot", "show").want(t, exitOK, "in use by pid ", `application "walrelay"`, "sequence 3", "Nothing is wrong.")
		b.run("slot", "advance", "--to-now", "--yes").want(t, exitPrecondition, "in use by pid ", "stop the relay")
		b.run("check").want(t, exitOK, "WARN  active")
	})
	stop().want(t, exitOK)

	x := b.insert(3)
	for n := range 2 {
		b.insert(4 + n)
	}
	if got := b.peeked(); got != "3 4 5" {
		t.Errorf("peeked %s", got)
	}
	before := b.show()
	if d := before.Stream.Distance; before.Stream.Checkpoint == nil || d == nil || d.Relay == 0 || d.Stream != 0 {
		t.Errorf("shown %+v", before.Stream)
	}

	t.Run("advance", func(t *testing.T) {
		o := b.run("slot", "advance", "--past-transaction", x)
		o.want(t, exitUsage, `{"n": 3}`, "skips 1 events", "--yes")
		if strings.Contains(o.out, `{"n": 4}`) {
			t.Errorf("lists what is not skipped:\n%s", o.out)
		}
		if got := b.peeked(); got != "3 4 5" {
			t.Errorf("the slot was moved without --yes: %s", got)
		}
		b.run("slot", "advance", "--past-transaction", "4242424", "--yes").want(t, exitPrecondition, "will not send a transaction 4242424", "slot peek")
		b.run("slot", "advance", "--to", "0/1", "--yes").want(t, exitPrecondition, "cannot go back")
		b.run("slot", "advance", "--to", "FF/0", "--yes").want(t, exitPrecondition, "--to-now")

		o = b.run("slot", "advance", "--past-transaction", x, "--yes")
		o.want(t, exitOK, "1 events skipped")
		var skipped operate.Event
		if err := json.Unmarshal([]byte(o.out), &skipped); err != nil || string(skipped.Body()) != `{"n": 3}` || skipped.AggregateID != "3" || len(skipped.Headers) == 0 {
			t.Errorf("%v, audit %s", err, o.out)
		}
		if got := b.peeked(); got != "4 5" {
			t.Errorf("peeked %s", got)
		}
		after := b.show()
		if after.ConfirmedFlush <= before.ConfirmedFlush || after.Stream.Checkpoint.Confirm < after.ConfirmedFlush {
			t.Errorf("slot %s, checkpoint %s, slot before %s", after.ConfirmedFlush, after.Stream.Checkpoint.Confirm, before.ConfirmedFlush)
		}
	})

	stop = b.relay()
	b.stored(5)
	stop().want(t, exitOK)
	if got := b.numbers(); got != "0 1 2 4 5" {
		t.Errorf("the stream has %s", got)
	}

	t.Run("without the checkpoint", func(t *testing.T) {
		b.insert(6)
		b.run("slot", "advance", "--to-now", "--leave-checkpoint", "--yes").want(t, exitOK, `"aggregate_id":"6"`, "--accept-gap")
		b.ended().want(t, exitLost, "past the checkpoint", "--accept-gap")
		b.run("slot", "show").want(t, exitOK, "FAIL: ", "--accept-gap")
		b.run("check").want(t, exitPrecondition, "FAIL  resume")
		stop := b.relay("--accept-gap")
		b.insert(7)
		b.stored(6)
		stop().want(t, exitOK)
		if got := b.numbers(); got != "0 1 2 4 5 7" {
			t.Errorf("the stream has %s", got)
		}
	})

	t.Run("past a poison event", func(t *testing.T) {
		b.pg.MustExec(t, `insert into outbox (aggregate_type, aggregate_id, event_type, payload, headers) values
			('order', '8', 'placed', '{"n": 8}', null), ('order', '9', 'placed', '{"n": 9}', '[]'), ('order', '10', 'placed', '{"n": 10}', null)`)
		b.insert(11)
		b.ended("--on-poison", "halt").want(t, exitHalted, "headers")
		o := b.run("slot", "peek")
		o.want(t, exitOK, "(headers: the headers are not a JSON object)", `{"n": 10}`)
		if strings.Contains(o.out, `{"n": 8}`) {
			t.Errorf("peeked what is stored:\n%s", o.out)
		}
		var events []operate.Event
		if err := json.Unmarshal([]byte(b.run("slot", "peek", "-o", "json").out), &events); err != nil || len(events) != 3 {
			t.Fatalf("%v, peeked %+v", err, events)
		}
		o = b.run("slot", "advance", "--past-transaction", events[0].Position.String(), "--yes")
		o.want(t, exitOK, "2 events skipped", "not a JSON object", `{\"n\": 10}`)
		stop := b.relay("--on-poison", "halt")
		b.stored(8)
		stop().want(t, exitOK)
		if got := b.numbers(); got != "0 1 2 4 5 7 8 11" {
			t.Errorf("the stream has %s", got)
		}
	})

	t.Run("without looking", func(t *testing.T) {
		b.insert(12)
		b.run("slot", "advance", "--blind", "--past-transaction", "7", "--yes").want(t, exitUsage, "--blind")
		b.run("slot", "advance", "--blind", "--to-now").want(t, exitUsage, "whatever lies between")
		if o := b.run("slot", "advance", "--blind", "--to-now", "--yes"); o.code != exitOK || o.out != "" {
			t.Errorf("got %+v", o)
		}
		if got := b.peeked(); got != "" {
			t.Errorf("peeked %s", got)
		}
	})

	t.Run("drop all of it", func(t *testing.T) {
		b.run("slot", "drop", "--with-checkpoint", "--stream", "OTHER", "--yes").want(t, exitOK, "slot walrelay dropped", "checkpoint of stream OTHER does not exist")
		b.run("slot", "drop", "--yes").want(t, exitPrecondition, "does not exist")
		b.run("slot", "drop", "--with-publication", "--with-checkpoint", "--yes").
			want(t, exitOK, "does not exist", "publication walrelay dropped", "checkpoint of stream OUTBOX removed")
		b.run("slot", "drop", "--with-publication", "--with-checkpoint", "--yes").
			want(t, exitOK, "publication walrelay does not exist", "checkpoint of stream OUTBOX does not exist")
	})
}

func TestSlotAdvanceSaysWhatIsWrongWithItsFlags(t *testing.T) {
	for _, c := range []struct {
		args []string
		text string
	}{
		{nil, "not said where"},
		{[]string{"--to-now", "--to", "0/1"}, "not said where"},
		{[]string{"--to", "x"}, "no LSN"},
		{[]string{"--to", "0/0"}, "no LSN"},
		{[]string{"--past-transaction", "x"}, "neither a transaction's number nor an LSN"},
		{[]string{"--past-transaction", "1/x"}, "no LSN"},
		{[]string{"--past-transaction", "0"}, "neither"},
		{[]string{"a", "b", "--to-now"}, "does not take the argument"},
	} {
		walrelay(t, nil, append([]string{"slot", "advance"}, c.args...)...).want(t, exitUsage, c.text)
	}
	walrelay(t, nil, "slot", "peek", "--limit", "0").want(t, exitUsage, "out of range")
	walrelay(t, nil, "slot", "show", "Bad-Name").want(t, exitUsage, "Bad-Name")
	walrelay(t, nil, "slot", "drop", "--with-checkpoint").want(t, exitUsage, "--yes")
}

func TestSlotOfAnotherKindIsShown(t *testing.T) {
	b := newBoth(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "2", "max_prepared_transactions": "2"}})
	b.run("init", "--apply").want(t, exitOK)
	b.run("slot", "create").want(t, exitOK)
	b.pg.MustExec(t, "select pg_create_physical_replication_slot('physical', true)")
	b.run("slot", "show", "physical").want(t, exitOK, "physical", "not a logical one")
	b.run("slot", "show", "absent").want(t, exitPrecondition, `"absent" does not exist`, "hint: ")
	b.run("slot", "advance", "physical", "--to-now", "--yes").want(t, exitPrecondition, "not a logical one")

	// No slot is free for a copy, so the slot itself is peeked at.
	b.insert(1)
	if got := b.peeked(); got != "1" {
		t.Errorf("peeked %s", got)
	}
	b.run("check", "--create-stream", "--slot", "another").want(t, exitPrecondition, "FAIL  slots", "2 of 2 replication slots are used")

	b.pg.MustExec(t, "drop table if exists held", "create table held (n int)")
	conn := b.pg.MustConn(t)
	for _, sql := range []string{"begin", "insert into held values (1)", "prepare transaction 'forgotten one'"} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	b.run("slot", "show").want(t, exitOK, "held back by:", "a prepared transaction, open for", "forgotten one", "decoded:", "no limit but the disk")

	// Without the broker there is still something to see.
	b.env[1] = fmt.Sprintf("WALRELAY_NATS_URL=nats://127.0.0.1:%d", closedPort(t))
	b.run("slot", "show").want(t, exitOK, "not known", "is nats-server running")
	b.run("slot", "peek").want(t, exitOK, "some of these may be stored already", `{"n": 1}`)
	b.run("slot", "advance", "--to-now", "--yes").want(t, exitPrecondition, "--leave-checkpoint")
	b.run("check").want(t, exitPrecondition, "FAIL  connect", "OK    wal_level")
}

func TestTemporarySlotLastsAsLongAsItsCommand(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	env := []string{"WALRELAY_DSN=" + pg.DSN("postgres")}
	walrelay(t, env, "init", "--apply").want(t, exitOK)
	ctx, cancel := context.WithCancelCause(t.Context())
	told := &signalWriter{text: "lasts until", found: make(chan struct{})}
	done := make(chan int, 1)
	go func() {
		done <- execute(ctx, &process{args: []string{"slot", "create", "brief", "--temporary"}, environ: env, in: strings.NewReader(""), out: told, err: told})
	}()
	<-told.found
	var slots []slotmgr.Slot
	if err := json.Unmarshal([]byte(walrelay(t, env, "slot", "list", "-o", "json").out), &slots); err != nil || len(slots) != 1 || !slots[0].Temporary {
		t.Errorf("%v, slots %+v", err, slots)
	}
	cancel(errSignal)
	if code := <-done; code != exitOK {
		t.Errorf("exit code %d", code)
	}
	if o := walrelay(t, env, "slot", "create", "kept", "--failover"); strings.Contains(o.err, "needs Postgres 17") {
		o.want(t, exitUsage, "--failover")
	} else {
		o.want(t, exitOK)
		walrelay(t, env, "slot", "show", "kept").want(t, exitOK, "failover", "unused since")
	}
	walrelay(t, env, "slot", "create", "x", "--temporary", "--failover").want(t, exitUsage, "--failover")
}

func TestCheck(t *testing.T) {
	b := newBoth(t, harness.PostgresOptions{})
	b.run("check").want(t, exitPrecondition,
		"FAIL  publication", "walrelay init --apply", "FAIL  slot", "walrelay slot create", "FAIL  stream", "--create-stream", "checks failed")
	b.run("init", "--apply").want(t, exitOK)
	b.run("slot", "create").want(t, exitOK)
	b.run("check", "--create-stream").want(t, exitOK, "OK    slot", "will be created", "has no rows to look at", "begins with what the slot sends first")

	b.pg.MustExec(t,
		"alter table outbox drop constraint outbox_id_key",
		`insert into outbox (aggregate_type, aggregate_id, event_type, payload) select 'order', n::text, 'placed', '{}' from generate_series(1, 10) n`,
		`insert into outbox (aggregate_type, aggregate_id, event_type, payload) values ('invoice', '1', 'sent', jsonb_build_object('x', repeat('x', 1100000)))`,
	)
	if _, err := b.js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: "OUTBOX", Subjects: []string{"outbox.order.*", "walrelay.parked.OUTBOX"}, Duplicates: 2 * time.Hour, AllowRollup: true,
	}); err != nil {
		t.Fatal(err)
	}
	o := b.run("check", "--create-stream", "--messages", "-o", "json")
	o.want(t, exitOK)
	var found []struct {
		Side, Name, Level, Detail, Remedy string
	}
	if err := json.Unmarshal([]byte(o.out), &found); err != nil {
		t.Fatalf("%v in %s", err, o.out)
	}
	for _, want := range []struct{ side, name, level, detail string }{
		{"postgres", "unique_id", "WARN", "no unique index"},
		{"postgres", "payload", "OK", "jsonb"},
		{"postgres", "messages", "WARN", "any role"},
		{"postgres", "slots", "OK", "1 of "},
		{"postgres", "walsenders", "OK", " of "},
		{"postgres", "keep_size", "OK", "unlimited"},
		{"nats", "rollup", "WARN", "rollup"},
		{"nats", "duplicates", "WARN", "2h"},
		{"nats", "durability", "WARN", "one replica"},
		{"nats", "subjects", "WARN", "outbox.>"},
		{"both", "size", "WARN", "largest row"},
		{"both", "coverage", "WARN", "outbox.invoice.sent"},
		{"both", "clocks", "OK", "agree"},
	} {
		seen := false
		for _, f := range found {
			seen = seen || f.Side == want.side && f.Name == want.name && f.Level == want.level && strings.Contains(f.Detail, want.detail)
			if f.Level != event.OK.String() && f.Remedy == "" {
				t.Errorf("no remedy: %+v", f)
			}
		}
		if !seen {
			t.Errorf("no finding %+v in\n%s", want, o.out)
		}
	}
}
