package slotmgr

import (
	"errors"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

var pluginOptions = []string{"proto_version", "1", "publication_names", `"Events"`}

// kinds are the first bytes of what a peek returns.
func kinds(t *testing.T, dsn string, o PeekOptions) (string, error) {
	t.Helper()
	o.Plugin = pluginOptions
	var got []byte
	n, err := Peek(within(t, 10*time.Second), connect(t, dsn), o, func(lsn event.LSN, data []byte) error {
		if data[0] == 'I' && lsn == 0 {
			t.Error("a row without an LSN")
		}
		got = append(got, data[0])
		return nil
	})
	if err == nil && n != len(got) {
		t.Errorf("counted %d of %d changes", n, len(got))
	}
	return string(got), err
}

func TestPeekAndAdvance(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, outboxTable, `create publication "Events" for table outbox with (publish = 'insert')`)
	dsn := pg.DSN("postgres")
	conn := connect(t, dsn)
	mustCreate(t, conn, CreateOptions{Name: "orders", Publications: []string{"Events"}})
	pg.MustExec(t, "insert into outbox (payload) values ('1')")
	middle, err := End(within(t, 10*time.Second), conn)
	if err != nil {
		t.Fatal(err)
	}
	pg.MustExec(t, "insert into outbox (payload) values ('2'), ('3')")

	expect := func(o PeekOptions, want string) {
		t.Helper()
		o.Slot = "orders"
		if got, err := kinds(t, dsn, o); err != nil || got != want {
			t.Errorf("%+v: got %s, %v, want %s", o, got, err, want)
		}
	}
	expect(PeekOptions{}, "BRICBIIC")
	expect(PeekOptions{Changes: 2}, "BRIC")
	expect(PeekOptions{UpTo: middle}, "BRIC")
	stop := errors.New("stop")
	if _, err := Peek(within(t, 10*time.Second), conn, PeekOptions{Slot: "orders", Plugin: pluginOptions}, func(event.LSN, []byte) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("got %v", err)
	}
	if slots, err := List(t.Context(), conn, true); err != nil || len(slots) != 1 {
		t.Errorf("a peek left %+v, %v", slots, err)
	}

	// Under a reader it works, too, and nothing can be moved.
	reader := hold(t, pg, "orders", "Events")
	expect(PeekOptions{}, "BRICBIIC")
	_, err = Advance(within(t, 10*time.Second), conn, "orders", middle)
	wantFailure(t, err, event.Precondition, "in use by pid", "stop the relay")
	if err := reader.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	released(t, conn, "orders")

	at, err := Advance(within(t, 10*time.Second), conn, "orders", middle)
	if err != nil || at != middle {
		t.Errorf("advanced to %s, %v, want %s", at, err, middle)
	}
	expect(PeekOptions{}, "BRIIC")
	_, err = Advance(within(t, 10*time.Second), conn, "orders", middle-8)
	wantFailure(t, err, event.Precondition, "cannot go back", "later LSN")
	_, err = kinds(t, dsn, PeekOptions{Slot: "absent"})
	wantFailure(t, err, event.Precondition, "does not exist", "slot create")
}

func TestShowTellsWhatHoldsTheSlotBack(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_slot_wal_keep_size": "64MB"}})
	pg.MustExec(t, outboxTable, `create publication "Events" for table outbox`)
	conn, writer := connect(t, pg.DSN("postgres")), connect(t, pg.DSN("postgres"))
	mustCreate(t, conn, CreateOptions{Name: "orders"})
	for _, sql := range []string{"begin", "insert into outbox (payload) values ('\"secret\"')"} {
		if _, err := writer.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	d, err := Show(within(t, 10*time.Second), conn, "orders")
	if err != nil {
		t.Fatal(err)
	}
	if d.KeepLimit != "64MB" || d.SafeWALSize == nil || d.Decoding == nil || d.Sender != nil || d.HolderCount != 1 ||
		d.Holders[0].PID != int(writer.PgConn().PID()) || d.Holders[0].Query != "insert into outbox (payload) values (?)" {
		t.Errorf("got %+v", d)
	}
	if found := d.Findings("postgres"); len(found) != 1 || found[0].Name != "active" || found[0].Remedy == "" {
		t.Errorf("got %+v", found)
	}
	if found := d.Findings("other"); len(found) != 1 || found[0].Level != FAIL {
		t.Errorf("got %+v", found)
	}
	hold(t, pg, "orders", "Events")
	if d, err = Show(within(t, 10*time.Second), conn, "orders"); err != nil || d.Sender == nil || d.Sender.State == "" || len(d.Findings("postgres")) != 0 {
		t.Errorf("got %+v, %v", d, err)
	}
}

func TestFindingsOfASlot(t *testing.T) {
	const mib = 1 << 20
	good := Slot{Name: "s", SlotType: "logical", Plugin: Plugin, Database: "db", Active: true, WALStatus: "reserved"}
	room := func(n int64) *int64 { return &n }
	old := []Blocker{{PID: 7, Age: time.Hour, Database: "db"}}
	for name, c := range map[string]struct {
		d    Detail
		want string
	}{
		"healthy":      {Detail{Slot: good}, ""},
		"little room":  {Detail{Slot: func() Slot { s := good; s.RetainedBytes, s.SafeWALSize = 300*mib, room(50*mib); return s }()}, "retention"},
		"enough room":  {Detail{Slot: func() Slot { s := good; s.RetainedBytes, s.SafeWALSize = 30*mib, room(50*mib); return s }()}, ""},
		"unreserved":   {Detail{Slot: func() Slot { s := good; s.WALStatus = "unreserved"; return s }()}, "retention"},
		"far behind":   {Detail{Slot: func() Slot { s := good; s.LagBytes, s.RetainedBytes = 2048*mib, 2048*mib; return s }()}, "lag"},
		"held back":    {Detail{Slot: func() Slot { s := good; s.RetainedBytes = 100 * mib; return s }(), Holders: old}, "restart"},
		"a little":     {Detail{Slot: func() Slot { s := good; s.RetainedBytes = 10 * mib; return s }(), Holders: old}, ""},
		"nobody reads": {Detail{Slot: func() Slot { s := good; s.Active = false; return s }()}, "active"},
	} {
		got := ""
		for _, f := range c.d.Findings("db") {
			got += f.Name
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}
