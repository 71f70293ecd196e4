package main

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// without wants texts to be absent.
func (o outcome) without(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if strings.Contains(o.out+o.err, text) {
			t.Errorf("%q is in\nstdout: %s\nstderr: %s", text, o.out, o.err)
		}
	}
}

// What is missing or in the way is named, each thing once, with what to do.
func TestCommandsNameWhatIsMissing(t *testing.T) {
	b := newBoth(t, harness.PostgresOptions{})
	role := []string{`role "nobody" does not exist`, `CREATE ROLE "nobody" LOGIN;`}
	b.run("init", "--apply", "--table", "none", "--messages", "--emit-function", "--emit-grant", "nobody").want(t, exitPrecondition, role...)
	b.run("init", "--apply", "--inbox", "--inbox-grant", "nobody").want(t, exitPrecondition, role...)
	b.run("init", "--apply", "--role", "pg_relay").want(t, exitPrecondition, "reserved", "choose another name")
	b.run("init", "--apply").want(t, exitOK)

	o := b.run("check", "--publication", "nothing")
	o.want(t, exitPrecondition, `publication "nothing" does not exist`, `CREATE PUBLICATION "nothing" FOR TABLE "public"."outbox" WITH`)
	o.without(t, "ADD TABLE", "…")
	b.run("check", "--publication", "nothing", "--table", "public.none").want(t, exitPrecondition, `publication "nothing" does not exist`, `"none" does not exist`)
	b.run("slot", "recover", "--stream", "ORDERS").want(t, exitPrecondition, `nor a checkpoint of it for stream "ORDERS"`)

	// Postgres answers that the slot is missing, and nobody listens for status.
	o = b.run("status", "--http-addr", fmt.Sprint(closedPort(t)))
	o.want(t, exitPrecondition, "does not answer: connect: connection refused", "slot         does not exist", "hint: walrelay slot create")
	o.without(t, "connect: connect: ", "Postgres does not answer")

	b.run("slot", "create").want(t, exitOK)
	b.insert(1)
	b.run("status").want(t, exitPrecondition, "drained      no: nobody reads the slot")

	// A stream that would be created meets one that has its subjects.
	for name, subject := range map[string]string{"ORDERS": "outbox.order.*", "LETTERS": "walrelay.dlq.>"} {
		if _, err := b.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{subject}}); err != nil {
			t.Fatal(err)
		}
	}
	b.run("check", "--create-stream").want(t, exitPrecondition,
		`FAIL  stream `, `stream "OUTBOX" does not exist, and cannot be created: stream ORDERS has`, "--subject",
		`FAIL  dead_letters `, `stream "OUTBOX_DLQ" does not exist, and cannot be created: stream LETTERS has`, "--on-poison halt")
	b.ended().want(t, exitPrecondition, `create stream "OUTBOX"`, "nats stream ls --subject 'outbox.>'")
	if err := b.js.DeleteStream(t.Context(), "ORDERS"); err != nil {
		t.Fatal(err)
	}
	b.ended().want(t, exitPrecondition, `create dead-letter stream "OUTBOX_DLQ"`, "--dead-letter-stream", "nats stream ls --subject 'walrelay.dlq.OUTBOX.>'")
	if err := b.js.DeleteStream(t.Context(), "LETTERS"); err != nil {
		t.Fatal(err)
	}
	// No stream can have these.
	for subject, why := range map[string]string{
		"{aggregate_type}.{event_type}":   "subject > takes in those of the server's API",
		"walrelay.{event_type}":           "subjects walrelay.> and walrelay.parked.NEW overlap",
		"walrelay.dlq.NEW.{aggregate_id}": "subjects walrelay.dlq.NEW.> and walrelay.dlq.NEW.> overlap",
	} {
		b.run("check", "--create-stream", "--stream", "NEW", "--subject", subject).want(t, exitPrecondition, "FAIL  stream ", why, "begin --subject with a word of its own")
		if !strings.Contains(subject, "dlq") {
			b.ended("--stream", "NEW", "--subject", subject).want(t, exitPrecondition, `error: create stream "NEW": `, "hint: begin --subject with a word of its own")
		}
	}
	stop := b.relay()
	b.stored(1)
	stop().want(t, exitOK)

	// What a drop could not do it can do later.
	if err := b.nats.Kill(); err != nil {
		t.Fatal(err)
	}
	b.run("slot", "drop", "--with-checkpoint", "--yes").want(t, exitPrecondition, "slot walrelay dropped", "slot walrelay is dropped, but not", "checkpoint: connect to NATS", "hint: then run the same command again")

	// Without the broker it is not known what became of a slot.
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	o = runWith(ctx, b.env, "run", "--log-format", "text")
	o.want(t, exitPrecondition, `error: slot "walrelay" does not exist, and the stream cannot be asked`, "connect to NATS",
		"hint: make NATS answer first", "hint: if there never was one: walrelay slot create walrelay --publication walrelay")

	b.nats.MustStart(t)
	b.run("slot", "drop", "--with-checkpoint", "--yes").want(t, exitOK, "checkpoint of stream OUTBOX removed")
}
