package test

import (
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// A slot with two_phase sends prepared transactions of any table. The relay refuses it, and
// the SQL of the remedy takes two_phase away without losing a row.
func TestSlotWithTwoPhaseIsRefusedWithTheWayOut(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{pg: harness.PostgresOptions{Settings: map[string]string{"max_prepared_transactions": "4"}}})
	r.exec(
		"select pg_drop_replication_slot('walrelay')",
		"select pg_create_logical_replication_slot('walrelay', 'pgoutput', false, true)",
		into+"values ('order', '1', 'one', '{}')",
		"create table other (i int)",
		"begin; insert into other values (1); prepare transaction 'other'",
		"begin; "+into+"values ('order', '1', 'two', '{}'); prepare transaction 'ours'",
		"commit prepared 'ours'",
		into+"values ('order', '1', 'three', '{}')",
	)
	refused(t, refusal{
		code: 3, err: `slot "walrelay" was created with two_phase`, hint: "SELECT pg_copy_logical_replication_slot('walrelay', 'walrelay_one_phase');",
	}, r.relay.Args...)
	refused(t, refusal{code: 3, err: `slot "walrelay" was created with two_phase`, hint: "SELECT pg_copy_logical_replication_slot("},
		"slot", "create", slot, "--if-not-exists", "--dsn", r.dsn, "--publication", publication)
	ran := harness.MustRun(t, nil, "check", "--dsn", r.dsn, "--nats-url", r.natsURL, "--table", r.table, "--slot", slot,
		"--publication", publication, "--stream", stream, "--create-stream")
	_, remedy, ok := strings.Cut(ran.Stdout, "→ SELECT pg_copy_logical_replication_slot(")
	if ran.Code != 3 || !ok {
		t.Fatalf("check: exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
	}
	remedy, _, _ = strings.Cut(remedy, "\n")
	for statement := range strings.SplitSeq("SELECT pg_copy_logical_replication_slot("+remedy, "; ") {
		r.exec(statement)
	}
	r.exec("commit prepared 'other'")
	r.relay.MustStart(t)
	if got, want := outline(r.messages(3)), "one two three"; got != want {
		t.Errorf("the stream has %s, want %s", got, want)
	}
	r.await(10*time.Second, "everything is confirmed", func() bool { return r.unconfirmed() < 1<<16 })
	r.ends(0)
}
