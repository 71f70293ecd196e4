package replication

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// database is one of its own on a real server, with a publication and a slot
// named as the database is.
type database struct {
	pg   *harness.Postgres
	name string
	sql  *pgconn.PgConn
}

func newDatabase(t *testing.T, pg *harness.Postgres, name string, setup ...string) *database {
	t.Helper()
	pg.MustExec(t, "CREATE DATABASE "+name)
	sql, err := pgconn.Connect(t.Context(), pg.DSN(name))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { sql.Close(context.Background()) })
	db := &database{pg: pg, name: name, sql: sql}
	db.exec(t, setup...)
	return db
}

const outboxTable = "CREATE TABLE outbox (id int, payload text)"

// outbox is a database with a small table.
func outbox(t *testing.T, pg *harness.Postgres, name string) *database {
	t.Helper()
	db := newDatabase(t, pg, name, outboxTable, "CREATE PUBLICATION "+name+" FOR TABLE outbox WITH (publish = 'insert')")
	db.slot(t)
	return db
}

func (db *database) slot(t *testing.T) {
	t.Helper()
	db.exec(t, "SELECT pg_create_logical_replication_slot('"+db.name+"', 'pgoutput')")
}

func (db *database) exec(t *testing.T, statements ...string) {
	t.Helper()
	for _, s := range statements {
		if _, err := db.sql.Exec(t.Context(), s).ReadAll(); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
}

func (db *database) value(t *testing.T, query string) string {
	t.Helper()
	res, err := db.sql.Exec(t.Context(), query).ReadAll()
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return string(res[0].Rows[0][0])
}

// end is the end of the log so far.
func (db *database) end(t *testing.T) event.LSN {
	t.Helper()
	lsn, err := event.ParseLSN(db.value(t, "SELECT pg_current_wal_insert_lsn()"))
	if err != nil {
		t.Fatal(err)
	}
	return lsn
}

func (db *database) config(t *testing.T) Config {
	t.Helper()
	conf, err := pgconn.ParseConfig(db.pg.DSN(db.name))
	if err != nil {
		t.Fatal(err)
	}
	return Config{Conn: conf, Slot: db.name, Publications: []string{db.name}}
}

func (db *database) open(t *testing.T, options ...func(*Config)) *Stream {
	t.Helper()
	cfg := db.config(t)
	for _, o := range options {
		o(&cfg)
	}
	s, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { s.Close() })
	// A record that does not come fails the test in time.
	timer := time.AfterFunc(30*time.Second, s.Interrupt)
	t.Cleanup(func() { timer.Stop() })
	return s
}

func messages(cfg *Config) { cfg.Messages = true }

// read returns the events up to the end of the log as it is now, in words, and
// the LSN that is to be confirmed for them.
func (db *database) read(t *testing.T, s *Stream) (events []string, confirm event.LSN) {
	t.Helper()
	end := db.end(t)
	var last event.Position
	for {
		rec, err := s.Next()
		if err != nil {
			t.Fatalf("next: %v (after %d events)", err, len(events))
		}
		switch rec.Kind {
		case event.Row, event.Message:
			if rec.Position.Compare(last) <= 0 {
				t.Fatalf("position %v after %v", rec.Position, last)
			}
			last = rec.Position
			word := fmt.Sprintf("%s %q", rec.Position, rec.Values)
			if rec.Kind == event.Message {
				word = fmt.Sprintf("%s %q %s", rec.Position, rec.Prefix, rec.Content)
			}
			events = append(events, word)
		}
		if rec.Confirm != 0 {
			confirm = rec.Confirm
		}
		if confirm >= end {
			return events, confirm
		}
	}
}

// values cuts the positions off.
func values(events []string) []string {
	var vs []string
	for _, e := range events {
		_, v, _ := strings.Cut(e, " ")
		vs = append(vs, v)
	}
	return vs
}

func wantValues(t *testing.T, events []string, want ...string) {
	t.Helper()
	if got := values(events); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

func TestRealServer(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})

	t.Run("origin", func(t *testing.T) {
		db := outbox(t, pg, "origins")
		end := db.end(t)
		s := db.open(t, func(c *Config) { c.Fingerprint = "f" })
		o := s.Origin()
		if want := db.value(t, "SELECT system_identifier FROM pg_control_system()"); o.SystemID != want {
			t.Errorf("system %q, want %q", o.SystemID, want)
		}
		if o.Database != "origins" || o.Slot != "origins" || o.Timeline != 1 || o.History != nil || o.Fingerprint != "f" || o.WALEnd > db.end(t) || o.WALEnd == 0 {
			t.Errorf("origin %+v, WAL ended at %v before", o, end)
		}
		if got := db.value(t, "SELECT application_name FROM pg_stat_replication WHERE application_name = 'walrelay'"); got != "walrelay" {
			t.Errorf("application_name %q", got)
		}
	})

	t.Run("only what is committed", func(t *testing.T) {
		db := outbox(t, pg, "committed")
		s := db.open(t)
		db.exec(t, "INSERT INTO outbox VALUES (1, 'a')",
			"BEGIN; INSERT INTO outbox VALUES (2, NULL); SAVEPOINT s; INSERT INTO outbox VALUES (3, 'c'); ROLLBACK TO s; INSERT INTO outbox VALUES (4, ''); COMMIT",
			"BEGIN; INSERT INTO outbox VALUES (5, 'e'); ROLLBACK",
			"BEGIN; INSERT INTO outbox VALUES (6, 'f'); DELETE FROM outbox WHERE id = 6; COMMIT",
			"UPDATE outbox SET payload = 'g' WHERE id = 1")
		events, _ := db.read(t, s)
		wantValues(t, events, `["1" "a"]`, `["2" ""]`, `["4" ""]`, `["6" "f"]`)
	})

	t.Run("rows of one WAL record", func(t *testing.T) {
		db := outbox(t, pg, "copies")
		const rows = 3000
		copyRows := func() {
			var in strings.Builder
			for i := range rows {
				fmt.Fprintf(&in, "%d\tpayload %d\n", i, i)
			}
			if _, err := db.sql.CopyFrom(t.Context(), strings.NewReader(in.String()), "COPY outbox FROM STDIN"); err != nil {
				t.Fatal(err)
			}
		}
		copyRows()
		db.exec(t, "INSERT INTO outbox SELECT i, 'x' FROM generate_series(1, 10) i")
		s := db.open(t)
		first, _ := db.read(t, s) // checks that positions increase
		if len(first) != rows+10 {
			t.Fatalf("%d events, want %d", len(first), rows+10)
		}
		if !strings.Contains(first[1], ":1 [") {
			t.Errorf("second row %q does not share its LSN with the first %q", first[1], first[0])
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		second, _ := db.read(t, db.open(t))
		if !slices.Equal(first, second) {
			t.Error("positions are not the same when read again")
		}
	})

	t.Run("messages", func(t *testing.T) {
		db := outbox(t, pg, "messages")
		db.exec(t,
			// Nothing is between the message's record and the commit's.
			"BEGIN; INSERT INTO outbox VALUES (1, 'a'); SELECT pg_logical_emit_message(false, 'walrelay', 'at once'); COMMIT",
			// Nor here between the message's and the row's.
			"BEGIN; INSERT INTO outbox VALUES (2, 'b'); SELECT pg_logical_emit_message(true, 'walrelay', 'first'); INSERT INTO outbox VALUES (3, 'c'); COMMIT",
			"BEGIN; INSERT INTO outbox VALUES (4, 'd'); SAVEPOINT s; SELECT pg_logical_emit_message(true, 'walrelay', 'sub'); RELEASE s; INSERT INTO outbox VALUES (5, 'e'); COMMIT",
			"BEGIN; SAVEPOINT s; INSERT INTO outbox VALUES (6, 'f'); RELEASE s; SELECT pg_logical_emit_message(true, 'walrelay', 'top'); SAVEPOINT s; INSERT INTO outbox VALUES (7, 'g'); RELEASE s; COMMIT",
			"BEGIN; SELECT pg_logical_emit_message(true, 'walrelay', 'rolled back'), pg_logical_emit_message(false, 'walrelay', 'stays'); ROLLBACK",
		)
		s := db.open(t, messages)
		events, _ := db.read(t, s)
		// Where a subtransaction is involved the server may put the row that
		// starts at the message's end before the message; read has seen that
		// positions increase all the same.
		wantValues(t, events[:5], `"walrelay" at once`, `["1" "a"]`, `["2" "b"]`, `"walrelay" first`, `["3" "c"]`)
		got := values(events[5:])
		slices.Sort(got)
		if want := []string{`"walrelay" stays`, `"walrelay" sub`, `"walrelay" top`, `["4" "d"]`, `["5" "e"]`, `["6" "f"]`, `["7" "g"]`}; !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		// Rows have the same positions when messages are not asked for.
		without, _ := db.read(t, db.open(t))
		events = slices.DeleteFunc(events, func(e string) bool { return strings.Contains(e, `"walrelay"`) })
		if !slices.Equal(without, events) {
			t.Errorf("without messages rows are\n%q\nwith them\n%q", without, events)
		}
	})

	t.Run("restart from the confirmed LSN", func(t *testing.T) {
		db := outbox(t, pg, "restarts")
		db.exec(t, "INSERT INTO outbox VALUES (1, 'a')", "INSERT INTO outbox VALUES (2, 'b')")
		s := db.open(t)
		_, confirm := db.read(t, s)
		if err := s.Confirm(confirm); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		// Close has waited for the server: the status is in and the slot free.
		if got := db.value(t, "SELECT active::text || ' ' || (confirmed_flush_lsn >= '"+confirm.String()+"')::text FROM pg_replication_slots WHERE slot_name = 'restarts'"); got != "false true" {
			t.Errorf("active and confirmed after close: %s", got)
		}
		db.exec(t, "INSERT INTO outbox VALUES (3, 'c')")
		events, _ := db.read(t, db.open(t))
		wantValues(t, events, `["3" "c"]`)
	})

	t.Run("commit's confirm is its end", func(t *testing.T) {
		db := outbox(t, pg, "ends")
		db.exec(t, "INSERT INTO outbox VALUES (1, 'a')", "INSERT INTO outbox VALUES (2, 'b')")
		s := db.open(t)
		for {
			rec, err := s.Next()
			if err != nil {
				t.Fatal(err)
			}
			if rec.Kind == event.Commit {
				if err := s.Confirm(rec.Confirm); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		s.Close()
		events, _ := db.read(t, db.open(t))
		wantValues(t, events, `["2" "b"]`)
	})

	t.Run("odd publication names", func(t *testing.T) {
		db := newDatabase(t, pg, "oddnames", outboxTable, `CREATE TABLE other (id int)`,
			`CREATE PUBLICATION "My-Pub, x" FOR TABLE outbox`, `CREATE PUBLICATION "it's ""q""" FOR TABLE other`)
		db.slot(t)
		db.exec(t, "INSERT INTO outbox VALUES (1, 'a')", "INSERT INTO other VALUES (2)")
		s := db.open(t, func(c *Config) { c.Publications = []string{"My-Pub, x", `it's "q"`} })
		events, _ := db.read(t, s)
		wantValues(t, events, `["1" "a"]`, `["2"]`)
	})

	t.Run("settings of the role", func(t *testing.T) {
		db := newDatabase(t, pg, "settings", "CREATE TABLE outbox (t timestamptz, b bytea, f float8)", "CREATE PUBLICATION settings FOR TABLE outbox",
			"ALTER DATABASE settings SET datestyle = 'German'", "ALTER DATABASE settings SET timezone = 'Asia/Tokyo'",
			"ALTER DATABASE settings SET bytea_output = 'escape'", "ALTER DATABASE settings SET extra_float_digits = -10")
		db.slot(t)
		db.exec(t, `INSERT INTO outbox VALUES ('2001-02-03 04:05:06.789Z', '\x00ff', 0.1::float8 + 0.2)`)
		events, _ := db.read(t, db.open(t))
		wantValues(t, events, `["2001-02-03 04:05:06.789+00" "\\x00ff" "0.30000000000000004"]`)
	})

	t.Run("slot active", func(t *testing.T) {
		db := outbox(t, pg, "actives")
		first := db.open(t)
		_, err := Open(t.Context(), db.config(t))
		if !errors.Is(err, ErrSlotActive) || event.ClassOf(err) != event.Transient {
			t.Fatalf("got %v, want ErrSlotActive", err)
		}
		pid := db.value(t, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'actives'")
		if !strings.Contains(err.Error(), `"actives"`) || !strings.Contains(err.Error(), pid) {
			t.Errorf("%q names not both slot and process %s", err, pid)
		}
		first.Close()
		db.open(t) // free as soon as Close has returned
	})

	t.Run("failures", func(t *testing.T) {
		db := outbox(t, pg, "failures")
		outbox(t, pg, "elsewhere")
		db.exec(t, "SELECT pg_create_logical_replication_slot('plugin', 'test_decoding')",
			"CREATE ROLE plain LOGIN", "CREATE ROLE repl LOGIN REPLICATION")
		for name, c := range map[string]struct {
			change func(*Config)
			class  event.Class
			hint   string
		}{
			"slot missing":      {func(c *Config) { c.Slot = "Missing" }, event.Precondition, "walrelay slot create"},
			"slot of another":   {func(c *Config) { c.Slot = "elsewhere" }, event.Transient, ""},
			"other plugin":      {func(c *Config) { c.Slot = "plugin" }, event.Precondition, "pgoutput"},
			"no replication":    {func(c *Config) { c.Conn.User = "plain" }, event.Precondition, `ALTER ROLE "plain" REPLICATION`},
			"no such database":  {func(c *Config) { c.Conn.Database = "nowhere" }, event.Precondition, "database"},
			"unknown parameter": {func(c *Config) { c.Conn.RuntimeParams["nonsense"] = "1" }, event.Precondition, "PGOPTIONS"},
			"nobody listens":    {func(c *Config) { c.Conn.Port = 1; c.Conn.Fallbacks = nil }, event.Transient, ""},
		} {
			cfg := db.config(t)
			c.change(&cfg)
			s, err := Open(t.Context(), cfg)
			if err == nil {
				s.Close()
				t.Errorf("%s: opened", name)
				continue
			}
			if got := event.ClassOf(err); got != c.class || !strings.Contains(event.HintOf(err), c.hint) {
				t.Errorf("%s: %v: class %d, hint %q", name, err, got, event.HintOf(err))
			}
		}
		cfg := db.config(t)
		cfg.Conn.User = "repl"
		s, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatalf("a role with REPLICATION and nothing else: %v", err)
		}
		s.Close()
	})

	t.Run("publication missing", func(t *testing.T) {
		db := newDatabase(t, pg, "nopub", outboxTable)
		db.slot(t)
		db.exec(t, "INSERT INTO outbox VALUES (1, 'a')")
		s := db.open(t)
		var err error
		for err == nil {
			_, err = s.Next()
		}
		if event.ClassOf(err) != event.Precondition || !strings.Contains(event.HintOf(err), `CREATE PUBLICATION "nopub"`) {
			t.Errorf("got %v, hint %q", err, event.HintOf(err))
		}
	})

	t.Run("session killed", func(t *testing.T) {
		db := outbox(t, pg, "killed")
		s := db.open(t)
		db.exec(t, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = 'killed'")
		var err error
		for err == nil {
			_, err = s.Next()
		}
		var pe *pgconn.PgError
		if !errors.As(err, &pe) || pe.Code != "57P01" || event.ClassOf(err) != event.Transient {
			t.Errorf("got %v, want 57P01", err)
		}
	})

	t.Run("server's timeout is kept off by statuses", func(t *testing.T) {
		db := outbox(t, pg, "timeouts")
		s := db.open(t, func(c *Config) { c.WALSenderTimeout = 600 * time.Millisecond })
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		done := make(chan error, 1)
		go func() {
			for {
				if _, err := s.Next(); err != nil {
					done <- err
					return
				}
			}
		}()
		for range 20 {
			<-ticker.C
			if err := s.Confirm(0); err != nil {
				t.Fatal(err)
			}
		}
		if err := <-done; err == nil || errors.Is(err, ErrInterrupted) || event.ClassOf(err) != event.Transient {
			t.Errorf("without statuses: got %v, want the server's hang-up", err)
		}
	})
}

// TestFastShutdown: a server that waits for us because not everything is
// confirmed is recognised, and is down when the session is closed.
func TestFastShutdown(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	db := outbox(t, pg, "shutdown")
	s := db.open(t)
	db.exec(t, "INSERT INTO outbox VALUES (1, 'a')")
	db.read(t, s)

	stopped := make(chan error, 1)
	go func() {
		_, err := pg.Stop(harness.Fast, 20*time.Second)
		stopped <- err
	}()
	ended := make(chan error, 1)
	go func() {
		for {
			if _, err := s.Next(); err != nil {
				ended <- err
				return
			}
		}
	}()
	ticker := time.NewTicker(300 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if err := s.Confirm(0); err != nil {
				t.Fatal(err)
			}
			continue
		case err := <-stopped:
			t.Fatalf("server stopped by itself: %v", err)
		case err := <-ended:
			if !errors.Is(err, ErrShutdown) {
				t.Errorf("got %v, want ErrShutdown", err)
			}
		}
		break
	}
	s.Close()
	if err := <-stopped; err != nil {
		t.Errorf("stop: %v", err)
	}
}

func TestWALLevelReplica(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{WALLevel: "replica"})
	conf, err := pgconn.ParseConfig(pg.DSN("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), Config{Conn: conf, Slot: "s", Publications: []string{"p"}})
	if event.ClassOf(err) != event.Precondition || !strings.Contains(event.HintOf(err), "wal_level = logical") {
		t.Errorf("got %v, hint %q", err, event.HintOf(err))
	}
}

// TestRecord records the goldens when asked to with -update. Each is the stream
// of a database of its own.
func TestRecord(t *testing.T) {
	if !*update {
		return
	}
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	const wide = `CREATE TYPE mood AS ENUM ('sad', 'ok');
		CREATE TABLE outbox (id uuid PRIMARY KEY, seq bigint GENERATED ALWAYS AS IDENTITY, aggregate_type text, aggregate_id varchar(80),
			event_type text, payload jsonb, raw bytea, plain json, created_at timestamptz, schema_version int, m mood);
		CREATE SCHEMA "Odd Schema"; CREATE TABLE "Odd Schema"."Ta""ble" ("Id" bigint, "päyload" text)`
	for name, statements := range map[string][]string{
		"types": {
			wide, "CREATE PUBLICATION types FOR ALL TABLES WITH (publish = 'insert')", "SELECT pg_create_logical_replication_slot('types', 'pgoutput')",
			`INSERT INTO outbox VALUES ('0190d3a8-7a9c-7c3e-8b1f-2d4e5f6a7b8c', DEFAULT, 'order', 'o-1', 'created', '{"n": 18446744073709551615, "x": 1.10}', '\x00ff10', '{"a":1,  "a":2}', '2024-05-06 07:08:09.123456Z', 3, 'ok')`,
			`INSERT INTO outbox (id, payload, plain, aggregate_type) VALUES ('0190d3a8-7a9c-7c3e-8b1f-2d4e5f6a7b8d', NULL, '"\u0000 ünï 🐘"', '')`,
			`INSERT INTO "Odd Schema"."Ta""ble" VALUES (9223372036854775807, repeat('x', 10000))`,
			`INSERT INTO "Odd Schema"."Ta""ble" VALUES (-1, NULL)`,
		},
		"mixed": {
			wide, "ALTER TABLE outbox REPLICA IDENTITY FULL", "CREATE PUBLICATION mixed FOR TABLE outbox", "SELECT pg_create_logical_replication_slot('mixed', 'pgoutput')",
			"BEGIN; INSERT INTO outbox (id, event_type) VALUES (gen_random_uuid(), 'a'); UPDATE outbox SET event_type = 'b'; SAVEPOINT s; INSERT INTO outbox (id) VALUES (gen_random_uuid()); ROLLBACK TO s; DELETE FROM outbox; COMMIT",
			"ALTER TABLE outbox ADD COLUMN extra text", "INSERT INTO outbox (id, extra) VALUES (gen_random_uuid(), 'added')",
			"BEGIN; ALTER TABLE outbox DROP COLUMN extra; INSERT INTO outbox (id) VALUES (gen_random_uuid()); COMMIT",
			"TRUNCATE outbox",
			"SELECT pg_replication_origin_create('elsewhere')", "SELECT pg_replication_origin_session_setup('elsewhere')",
			"INSERT INTO outbox (id) VALUES (gen_random_uuid())",
		},
		"copy": {
			outboxTable, "CREATE PUBLICATION copy FOR TABLE outbox", "SELECT pg_create_logical_replication_slot('copy', 'pgoutput')",
			"COPY outbox FROM PROGRAM 'seq 500 | sed \"s/.*/&\tpayload &/\"'", "INSERT INTO outbox SELECT i, 'x' FROM generate_series(1, 5) i",
		},
		"messages": {
			outboxTable, "CREATE PUBLICATION messages FOR TABLE outbox", "SELECT pg_create_logical_replication_slot('messages', 'pgoutput')",
			"BEGIN; INSERT INTO outbox VALUES (1, 'a'); SELECT pg_logical_emit_message(false, 'walrelay', 'at once'); COMMIT",
			"BEGIN; INSERT INTO outbox VALUES (2, 'b'); SELECT pg_logical_emit_message(true, 'walrelay', '{\"id\": 1}'); INSERT INTO outbox VALUES (3, 'c'); COMMIT",
			"SELECT pg_logical_emit_message(true, '', ''), pg_logical_emit_message(true, 'other', '\\x00ff'::bytea)",
			"BEGIN; SELECT pg_logical_emit_message(false, 'walrelay', 'stays'); ROLLBACK",
		},
	} {
		db := newDatabase(t, pg, name, statements...)
		recording := db.record(t)
		if err := os.WriteFile("testdata/"+name+".bin", recording, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile("testdata/"+name+".txt", []byte(describeAll(t, recording)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// record returns what the walsender sends up to the end of the log as it is now.
func (db *database) record(t *testing.T) []byte {
	t.Helper()
	end := pglogrepl.LSN(db.end(t))
	cfg := db.config(t)
	cfg.Messages = true
	conn, err := pgconn.ConnectConfig(t.Context(), cfg.session())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	err = pglogrepl.StartReplication(t.Context(), conn, cfg.Slot, 0, pglogrepl.StartReplicationOptions{PluginArgs: cfg.pluginArgs()})
	if err != nil {
		t.Fatal(err)
	}
	var msgs [][]byte
	for {
		msg, err := conn.ReceiveMessage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		data := msg.(*pgproto3.CopyData).Data
		msgs = append(msgs, slices.Clone(data))
		if data[0] == 'k' {
			k, err := pglogrepl.ParsePrimaryKeepaliveMessage(data[1:])
			if err != nil {
				t.Fatal(err)
			}
			if k.ServerWALEnd >= end {
				return join(msgs)
			}
		}
	}
}
