package slotmgr

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestSlotLivesFromCreateToDrop(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, `create publication "My Pub" for table outbox with (publish = 'insert')`, "create database other")
	conn := connect(t, pg.DSN("postgres"))
	ctx := within(t, 30*time.Second)

	slot, created, err := Create(ctx, conn, CreateOptions{Name: "orders", Publications: []string{"My Pub"}})
	if err != nil || !created {
		t.Fatalf("created %v, %v", created, err)
	}
	if slot.Name != "orders" || slot.Plugin != Plugin || slot.SlotType != "logical" || slot.Database != "postgres" ||
		slot.Active || slot.Lost() || slot.RestartLSN == 0 || slot.ConfirmedFlush < slot.RestartLSN || slot.WALStatus != "reserved" {
		t.Errorf("unexpected %+v", slot)
	}
	for _, sql := range []string{
		"select pg_create_physical_replication_slot('physical')",
		"select pg_create_logical_replication_slot('foreign_plugin', 'test_decoding')",
	} {
		if _, err := conn.Exec(ctx, sql); err != nil && !strings.Contains(err.Error(), "test_decoding") {
			t.Fatal(err)
		}
	}
	mustCreate(t, connect(t, pg.DSN("other")), CreateOptions{Name: "elsewhere"})

	own, err := List(ctx, conn, false)
	if err != nil {
		t.Fatal(err)
	}
	if len(own) != 1 || own[0].Name != "orders" {
		t.Errorf("own slots: got %+v, want orders", own)
	}
	all, err := List(ctx, conn, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 3 || all[0].Name != "elsewhere" {
		t.Errorf("all slots: got %+v", all)
	}

	if _, err := conn.Exec(ctx, "select pg_logical_emit_message(true, 'x', repeat('a', 100000))"); err != nil {
		t.Fatal(err)
	}
	lag, err := Sample(ctx, conn, "orders")
	if err != nil {
		t.Fatal(err)
	}
	if lag.Bytes < 100_000 || lag.RetainedBytes < lag.Bytes || lag.Current != lag.Confirmed+event.LSN(lag.Bytes) || lag.Active || lag.Lost {
		t.Errorf("unexpected lag %+v", lag)
	}

	kept, created, err := Create(ctx, conn, CreateOptions{Name: "orders", IfNotExists: true})
	if err != nil || created || kept.ConfirmedFlush != slot.ConfirmedFlush {
		t.Errorf("second create: got %+v, created %v, %v", kept, created, err)
	}
	_, _, err = Create(ctx, conn, CreateOptions{Name: "physical", IfNotExists: true})
	wantFailure(t, err, event.Precondition, "physical slot", "another name")
	_, _, err = Create(ctx, conn, CreateOptions{Name: "elsewhere", IfNotExists: true})
	wantFailure(t, err, event.Precondition, `belongs to database "other"`, "connect to database")

	if err := Drop(ctx, conn, "orders"); err != nil {
		t.Fatal(err)
	}
	_, err = Inspect(ctx, conn, "orders")
	wantFailure(t, err, event.Precondition, "does not exist", "walrelay slot create orders")
	wantFailure(t, Drop(ctx, conn, "orders"), event.Precondition, "does not exist", "walrelay slot create orders")
	_, err = Sample(ctx, conn, "orders")
	wantFailure(t, err, event.Precondition, "does not exist", "walrelay slot create orders")
}

func TestActiveSlotIsNotDropped(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, "create publication walrelay for table outbox")
	conn := connect(t, pg.DSN("postgres"))
	mustCreate(t, conn, CreateOptions{Name: "orders", Publications: []string{"walrelay"}})
	holder := hold(t, pg, "orders", "walrelay")

	slot, err := Inspect(t.Context(), conn, "orders")
	if err != nil {
		t.Fatal(err)
	}
	if !slot.Active || slot.ActivePID == nil || uint32(*slot.ActivePID) != holder.PID() || slot.ActiveApplication != "holder" || slot.ActiveClient != "127.0.0.1" {
		t.Errorf("unexpected holder in %+v", slot)
	}
	wantFailure(t, Drop(t.Context(), conn, "orders"), event.Precondition, slot.Holder(), "stop the relay")

	if err := holder.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	released(t, conn, "orders")
	if err := Drop(t.Context(), conn, "orders"); err != nil {
		t.Fatal(err)
	}
}

func TestSlotTellsWhatLostIt(t *testing.T) {
	yes, no := true, false
	idle := "idle_timeout"
	for _, c := range []struct {
		slot Slot
		lost bool
		text string
	}{
		{Slot{WALStatus: "reserved"}, false, ""},
		{Slot{WALStatus: "unreserved", Conflicting: &no}, false, ""},
		{Slot{WALStatus: "lost"}, true, "max_slot_wal_keep_size"},
		{Slot{WALStatus: "reserved", Conflicting: &yes}, true, "recovery"},
		{Slot{WALStatus: "lost", InvalidationReason: &idle}, true, "idle_replication_slot_timeout"},
	} {
		if got := c.slot.Lost(); got != c.lost {
			t.Errorf("%+v: lost is %v, want %v", c.slot, got, c.lost)
		}
		if got := c.slot.LostReason(); !strings.Contains(got, c.text) || (got == "") == c.lost {
			t.Errorf("%+v: reason %q, want %q", c.slot, got, c.text)
		}
	}
}

func TestSlotIsPlainJSON(t *testing.T) {
	b, err := json.Marshal(Slot{Name: "orders", RestartLSN: 0x16_B374D848})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"name":"orders"`, `"restart_lsn":"16/B374D848"`, `"confirmed_flush_lsn":"0/0"`, `"active_pid":null`, `"safe_wal_size":null`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("got %s, want %s in it", b, want)
		}
	}
}
