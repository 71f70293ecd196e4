package test

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

// secret is the password of every DSN and URL here, whether the server asks for it or not.
const secret = "hunter2@:/#%secret"

// impatient relays try again at once and say more than usual.
var impatient = []string{"--backoff-min", "10ms", "--backoff-max", "50ms", "--log-level", "debug"}

// quick is how soon a command has to say what is wrong.
const quick = 8 * time.Second

// refusal is what a command that cannot do its work has to end with.
type refusal struct {
	code  int
	err   string
	hint  string
	hints []string // further ones
}

// with are the arguments with flags in the place of those of the same name.
func with(args []string, flags ...string) []string {
	var all []string
	for i := 0; i < len(args); i++ {
		if slices.Contains(flags, args[i]) && strings.HasPrefix(args[i], "--") {
			i++ // and its value
			continue
		}
		all = append(all, args[i])
	}
	return append(all, flags...)
}

// refused runs walrelay and wants it to end soon, as want says, and without a word of the secret.
func refused(t testing.TB, want refusal, args ...string) harness.Ran {
	t.Helper()
	began := time.Now()
	ran := harness.MustRun(t, nil, args...)
	want.check(t, ran, time.Since(began))
	return ran
}

func (want refusal) check(t testing.TB, ran harness.Ran, took time.Duration) {
	t.Helper()
	bad := func(format string, args ...any) {
		t.Helper()
		t.Errorf(format+"\n%s%s", append(args, ran.Stdout, ran.Stderr)...)
	}
	if ran.Code != want.code {
		bad("exit code %d, want %d", ran.Code, want.code)
	}
	if took > quick {
		bad("it took %s, want %s at most", took, quick)
	}
	if ran.Stdout != "" {
		bad("something on stdout")
	}
	_, told, _ := strings.Cut("\n"+ran.Stderr, "\nerror: ")
	told, hints, _ := strings.Cut(told, "\nhint: ")
	if !strings.Contains(told, want.err) || told == "" {
		bad("the error is %q, want %q", told, want.err)
	}
	for _, hint := range append(want.hints, want.hint) {
		if !strings.Contains(hints, hint) || hints == "" {
			bad("the hint is %q, want %q", hints, hint)
		}
	}
	quiet(t, ran.Stdout+ran.Stderr, secret)
}

// quiet wants no secret in the text, however it is escaped.
func quiet(t testing.TB, text string, secrets ...string) {
	t.Helper()
	for _, s := range secrets {
		for _, form := range forms(s) {
			if strings.Contains(text, form) {
				t.Errorf("the output shows the secret %q:\n%s", form, text)
			}
		}
	}
}

func TestRunRefusesWhatAnOperatorMustMend(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		dsn:     func(pg *harness.Postgres) string { return pg.DSNFor("postgres", "postgres", secret) },
		natsURL: func(n *harness.NATS) string { return strings.Replace(n.URL(), "://", "://user:"+secret+"@", 1) },
		args:    []string{"--log-level", "debug"},
	})
	r.exec(
		into+"values ('order', '1', 'made', '{}')", // published at the end, by a relay that is right
		"create role plain login",
		"create table bare (id uuid, payload jsonb)",
		"create view seen as select * from outbox",
		"create unlogged table fast (like outbox)",
		"create publication hollow for table bare",
		"create publication deletes for table outbox with (publish = 'delete')",
		"select pg_create_logical_replication_slot('testing', 'test_decoding')",
		"select pg_create_physical_replication_slot('physical')",
		"create database other",
	)
	elsewhere, err := pgxConnect(t.Context(), r.pg.DSN("other"))
	must(t, err)
	_, err = elsewhere.Exec(t.Context(), "select pg_create_logical_replication_slot('elsewhere', 'pgoutput')")
	must(t, err)
	must(t, elsewhere.Close(t.Context()))
	streams := func(name string, edit func(*jetstream.StreamConfig)) {
		t.Helper()
		c := jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>", "walrelay.parked." + name}}
		edit(&c)
		_, err := r.js.CreateStream(t.Context(), c)
		must(t, err)
		if c.Sealed = name == "SEALED"; c.Sealed {
			_, err := r.js.UpdateStream(t.Context(), c)
			must(t, err)
		}
	}
	streams("PLAIN", func(*jetstream.StreamConfig) {})
	streams("NOACK", func(c *jetstream.StreamConfig) { c.NoAck = true })
	streams("MIRROR", func(c *jetstream.StreamConfig) { c.Mirror, c.Subjects = &jetstream.StreamSource{Name: "PLAIN"}, nil })
	streams("SOURCED", func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "PLAIN"}} })
	streams("SEALED", func(*jetstream.StreamConfig) {})
	streams("MEMORY", func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage })
	streams("UNBOUND", func(c *jetstream.StreamConfig) { c.Subjects = []string{"UNBOUND.>"} })

	before := query[string](r, "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = $1", slot)
	for _, c := range []struct {
		name string
		args string
		want refusal
	}{
		{"role without REPLICATION", "--dsn " + r.pg.DSNFor("postgres", "plain", secret), refusal{3, `role "plain" lacks REPLICATION`, `ALTER ROLE "plain" REPLICATION`, nil}},
		{"role missing", "--dsn " + r.pg.DSNFor("postgres", "nobody", secret), refusal{3, `role "nobody" does not exist`, `"nobody"`, nil}},
		{"database missing", "--dsn " + r.pg.DSNFor("nowhere", "postgres", secret), refusal{3, `database "nowhere" does not exist`, "PGDATABASE", nil}},
		{"TLS that the server lacks", "--dsn " + strings.Replace(r.dsn, "sslmode=disable", "sslmode=require", 1), refusal{3, "TLS", "sslmode", nil}},
		{"table missing", "--table public.nothing", refusal{3, `"nothing" does not exist`, "walrelay init --apply", nil}},
		{"table is a view", "--table public.seen", refusal{3, "is not a table", "--table", nil}},
		{"table unlogged", "--table public.fast", refusal{3, "never reach the log", "SET LOGGED", nil}},
		{"publication missing", "--publication nothing", refusal{3, `publication "nothing" does not exist`, "walrelay init --apply", nil}},
		{"publication of another case", "--publication WalRelay", refusal{3, `publication "WalRelay" does not exist`, `CREATE PUBLICATION "WalRelay"`, nil}},
		{"publication without the table", "--publication hollow", refusal{3, `is not in publication "hollow"`, `ALTER PUBLICATION "hollow" ADD TABLE "public"."outbox"`, nil}},
		{"publication without inserts", "--publication deletes", refusal{3, "does not publish inserts", `ALTER PUBLICATION "deletes" SET (publish = 'insert')`, nil}},
		{"slot missing", "--slot nothing", refusal{3, `slot "nothing" does not exist`, "walrelay slot create nothing --publication walrelay", nil}},
		{"slot of another plugin", "--slot testing", refusal{3, "uses the plugin test_decoding", "walrelay slot create", nil}},
		{"slot of another kind", "--slot physical", refusal{3, "is a physical slot", "walrelay slot create", nil}},
		{"slot of another database", "--slot elsewhere", refusal{3, `belongs to database "other"`, `connect to database "other"`, nil}},
		{"everything missing", "--slot nothing --publication nothing", refusal{3, `publication "nothing" does not exist`, "walrelay init --apply", []string{"walrelay slot create nothing"}}},
		{"column missing", "--table public.outbox,id=event_id,payload=body", refusal{3, `column "event_id" (id) is missing; column "body" (payload) is missing`, "map the role", nil}},
		{"column of another type", "--table public.outbox,payload=created_at", refusal{3, `column "created_at" (payload)`, "map the role", nil}},
		{"stream missing", "--create-stream=false", refusal{3, `stream "OUTBOX" does not exist`, "--create-stream", []string{"nats stream add OUTBOX --subjects 'outbox.>,walrelay.parked.OUTBOX' --storage file"}}},
		{"dead-letter stream missing", "--create-stream=false --stream PLAIN", refusal{3, `dead-letter stream "PLAIN_DLQ" does not exist`, "nats stream add PLAIN_DLQ", nil}},
		{"stream does not ack", "--stream NOACK", refusal{3, "has no_ack set", "nats stream edit NOACK --ack", nil}},
		{"stream is a mirror", "--stream MIRROR", refusal{3, "is a mirror", "the stream that it mirrors", nil}},
		{"stream has sources", "--stream SOURCED", refusal{3, "has sources", "another stream", nil}},
		{"stream is sealed", "--stream SEALED", refusal{3, "is sealed", "another stream", nil}},
		{"stream is in memory", "--stream MEMORY", refusal{3, "in memory", "file storage", nil}},
		{"stream without a place for markers", "--stream UNBOUND", refusal{3, "does not bind walrelay.parked.UNBOUND", "nats stream edit UNBOUND --subjects 'UNBOUND.>,walrelay.parked.UNBOUND'", nil}},
		{"subject of another stream", "--subject PLAIN.{event_type} --stream NEW", refusal{3, `stream "NEW"`, "nats stream ls --subject 'PLAIN.>'", nil}},
		{"TLS that the broker lacks", "--nats-url " + strings.Replace(r.natsURL, "nats:", "tls:", 1), refusal{3, "secure connection", "--nats-tls-ca", nil}},
		{"credentials file missing", "--nats-creds /nonexistent/file.creds", refusal{3, "/nonexistent/file.creds", "readable", nil}},
		{"unknown key of a table", "--table public.outbox,payloat=body", refusal{2, "unknown key payloat", "did you mean payload?", nil}},
		{"unknown preset", "--table public.outbox,preset=camel", refusal{2, "unknown preset camel", "default, debezium or snake", nil}},
		{"unknown flag", "--sloot x", refusal{2, "unknown flag --sloot", "did you mean --slot?", nil}},
		{"bad duration", "--ack-timeout 5parrots", refusal{2, `--ack-timeout: "5parrots" is no duration`, "5s", nil}},
		{"unknown placeholder", "--subject outbox.{aggregat_type}", refusal{2, "aggregat_type", "", nil}},
	} {
		t.Run(c.name, func(t *testing.T) {
			refused(t, c.want, with(r.relay.Args, strings.Fields(c.args)...)...)
		})
	}
	if after := query[string](r, "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = $1", slot); after != before {
		t.Errorf("the slot was at %s and is at %s", before, after)
	}
	r.relay.MustStart(t)
	r.messages(1)
	if code := r.relay.MustStop(t, quick); code != 0 {
		t.Errorf("exit code %d", code)
	}
	quiet(t, r.relay.Output(), secret)
}

const into = "insert into public.outbox (aggregate_type, aggregate_id, event_type, payload) "

func TestServersThatCannotBeUsed(t *testing.T) {
	t.Parallel()
	t.Run("wal_level replica", func(t *testing.T) {
		t.Parallel()
		pg := harness.RunPostgres(t, harness.PostgresOptions{WALLevel: "replica"})
		dsn := pg.DSNFor("postgres", "postgres", secret)
		(&rig{t: t}).must("init", "--apply", "--dsn", dsn)
		want := refusal{3, "wal_level is replica", "ALTER SYSTEM SET wal_level = logical", nil}
		refused(t, want, "slot", "create", "--dsn", dsn)
		want.hints = []string{"walrelay slot create"}
		refused(t, want, "run", "--dsn", dsn)
	})
	t.Run("no slots left", func(t *testing.T) {
		t.Parallel()
		pg := harness.RunPostgres(t, harness.PostgresOptions{Settings: map[string]string{"max_replication_slots": "1"}})
		dsn := pg.DSNFor("postgres", "postgres", secret)
		r := &rig{t: t}
		r.must("init", "--apply", "--dsn", dsn)
		r.must("slot", "create", "first", "--dsn", dsn)
		refused(t, refusal{3, "replication slots are in use", "raise max_replication_slots", nil}, "slot", "create", "second", "--dsn", dsn)
	})
	t.Run("wrong passwords", func(t *testing.T) {
		t.Parallel()
		const right, wrong = "right@:/#%one", secret
		r := newRig(t, rigOptions{
			pg:      harness.PostgresOptions{Password: right},
			nats:    harness.NATSOptions{User: "relay", Password: right},
			natsURL: func(n *harness.NATS) string { return strings.Replace(n.URL(), "://", "://relay:"+right+"@", 1) },
		})
		dsn := r.pg.DSNFor("postgres", "postgres", wrong)
		pgWrong := refusal{3, `password authentication failed for user "postgres"`, "password", nil}
		for _, args := range [][]string{{"init", "--apply"}, {"slot", "create"}, {"slot", "list"}, {"slot", "drop", "--yes"}, r.relay.Args} {
			refused(t, pgWrong, with(args, "--dsn", dsn)...)
		}
		natsWrong := refusal{3, "Authorization Violation", "--nats-creds", nil}
		for _, args := range [][]string{
			{"--nats-url", r.nats.URL()}, // none
			{"--nats-url", strings.Replace(r.nats.URL(), "://", "://relay:"+wrong+"@", 1)},
			{"--nats-url", r.nats.URL(), "--nats-user", "relay", "--nats-password", wrong},
			{"--nats-url", r.nats.URL(), "--nats-token", wrong},
		} {
			ran := refused(t, natsWrong, with(r.relay.Args, args...)...)
			quiet(t, ran.Stderr, right)
		}
	})
	t.Run("no JetStream", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, rigOptions{args: impatient})
		n, err := harness.CreateNATS(t.Context(), harness.NATSOptions{Config: "jetstream: disabled"})
		must(t, err)
		t.Cleanup(func() { must(t, n.Remove()) })
		must(t, n.Launch())
		r.relay.Args = with(r.relay.Args, "--nats-url", n.URL())
		r.relay.MustStart(t)
		r.waits("no responders", "is JetStream enabled")
		r.ends(0)
	})
	t.Run("a role that may create nothing", func(t *testing.T) {
		t.Parallel()
		pg := harness.RunPostgres(t, harness.PostgresOptions{})
		pg.MustExec(t, "create role plain login", "revoke all on schema public from public", "create publication walrelay")
		dsn := pg.DSNFor("postgres", "plain", secret)
		refused(t, refusal{3, "permission denied", "walrelay init", nil}, "init", "--apply", "--dsn", dsn)
		refused(t, refusal{3, `create slot "walrelay"`, `ALTER ROLE "plain" REPLICATION`, nil}, "slot", "create", "--dsn", dsn)
		refused(t, refusal{3, `slot "walrelay" does not exist`, "walrelay slot create", nil}, "slot", "drop", "--yes", "--dsn", dsn)
	})
}

// waits blocks until the relay says that it waits because of err, and with the hint.
func (r *rig) waits(err, hint string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), quick)
	defer cancel()
	line, lost := r.relay.Await(ctx, func(line string) bool {
		return strings.Contains(line, "trying again") && strings.Contains(line, err)
	})
	if lost != nil {
		r.t.Fatalf("the relay does not wait for %q: %v\n%s", err, lost, r.relay.Output())
	}
	if _, told, ok := strings.Cut(line, ` hint="`); !ok || !strings.Contains(told, hint) {
		r.t.Errorf("the relay waits with %s\nwant hint %q", line, hint)
	}
}

// told counts the lines of the relay that contain all texts.
func (r *rig) told(texts ...string) (n int) {
	for _, line := range r.relay.Lines() {
		if !slices.ContainsFunc(texts, func(s string) bool { return !strings.Contains(line, s) }) {
			n++
		}
	}
	return n
}

// ends sends SIGTERM and wants the exit code soon, and no secret in all of the output.
func (r *rig) ends(code int, secrets ...string) {
	r.t.Helper()
	if got := r.relay.MustStop(r.t, quick); got != code {
		r.t.Errorf("exit code %d after SIGTERM, want %d\n%s", got, code, r.relay.Output())
	}
	<-r.relay.Done()
	quiet(r.t, r.relay.Output(), append(secrets, secret)...)
}

// hangUps is a server that ends every connection when it would have to speak; n counts them.
func hangUps(t testing.TB, speaksFirst bool) (addr string, n *atomic.Int64) {
	t.Helper()
	n = &atomic.Int64{}
	return serve(t, func(c net.Conn) {
		if !speaksFirst {
			_, _ = c.Read(make([]byte, 4096)) // what is not read turns the end into a reset
		}
		n.Add(1)
	}), n
}

// serve runs handle for each connection, closes it afterwards, and all with the test.
func serve(t testing.TB, handle func(net.Conn)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			stop := context.AfterFunc(t.Context(), func() { c.Close() })
			go func() {
				defer stop()
				defer c.Close()
				handle(c)
			}()
		}
	}()
	return l.Addr().String()
}

// at is a DSN for the server at addr.
func at(addr, params string) string {
	return "postgres://postgres:" + secret + "@" + addr + "/postgres?sslmode=disable" + params
}

func TestUnreachablePostgres(t *testing.T) {
	t.Parallel()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	refusing := closed.Addr().String()
	must(t, closed.Close())
	mute := serve(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) })
	hanging, tries := hangUps(t, false)
	for _, c := range []struct{ name, dsn, err, hint string }{
		{"refuses", at(refusing, ""), "connection refused", "is Postgres running"},
		{"hangs up", at(hanging, ""), "connection closed", "port of Postgres"},
		{"says nothing", at(mute, "&connect_timeout=1"), "timeout", "is Postgres running"},
		{"has no address", at("postgres..invalid:5432", ""), "lookup postgres..invalid", "host name"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, args := range [][]string{{"init", "--apply"}, {"slot", "create"}, {"slot", "list"}, {"slot", "drop", "--yes"}} {
				refused(t, refusal{3, c.err, c.hint, nil}, with(args, "--dsn", c.dsn)...)
			}
			r := &rig{t: t}
			r.relay = harness.NewRelay(t, "run", "--dsn", c.dsn, "--log-format", "text")
			r.relay.Args = append(r.relay.Args, impatient...)
			r.relay.MustStart(t)
			r.waits(c.err, c.hint)
			if c.name == "hangs up" {
				seen := tries.Load()
				r.await(quick, "five more tries", func() bool { return tries.Load() >= seen+5 })
				if n := r.told("trying again"); n != 1 {
					t.Errorf("the wait was told %d times, want once\n%s", n, r.relay.Output())
				}
			}
			r.ends(0)
		})
	}
}

func TestRelayStartsBeforeItsServers(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	r.exec(into + "values ('order', '1', 'made', '{}')")
	_, err := r.pg.Stop(harness.Fast, quick)
	must(t, err)
	must(t, r.nats.Kill())
	r.relay.MustStart(t)
	r.waits("connection refused", "is Postgres running")
	r.pg.MustStart(t)
	r.relay.MustAwait(t, quick, "side=nats")
	r.nats.MustStart(t)
	r.messages(1)
	if n := r.told("side=nats", "no servers available"); n != 1 {
		t.Errorf("the wait for NATS was told %d times, want once", n)
	}
	if r.told("side=nats", "hint=") == 0 {
		t.Error("no hint about NATS")
	}
	r.ends(0)
}

func TestUnreachableNATS(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: impatient})
	hanging, tries := hangUps(t, true)
	for _, c := range []struct{ name, url, err, hint string }{
		{"hangs up", "nats://user:" + secret + "@" + hanging, "", "nats-server"},
		{"says nothing", "nats://user:" + secret + "@" + r.pg.Addr(), r.pg.Addr() + ": i/o timeout", "nats-server"},
		{"has no address", "nats://user:" + secret + "@nats..invalid:4222", "nats..invalid", "--nats-url"},
	} {
		r.t = t
		r.relay.Args = with(r.relay.Args, "--nats-url", c.url)
		r.relay.MustStart(t)
		r.waits(c.err, c.hint)
		if c.name == "hangs up" {
			seen := tries.Load()
			r.await(quick, "five more tries", func() bool { return tries.Load() >= seen+5 })
			if n := r.told("trying again"); n != 1 {
				t.Errorf("the wait was told %d times, want once\n%s", n, r.relay.Output())
			}
		}
		r.ends(0)
	}
}

func TestPoolerInBetween(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{})
	// What PgBouncer does that knows no replication: ordinary sessions pass.
	pooler := serve(t, func(c net.Conn) {
		hello, err := pgproto3.NewBackend(c, c).ReceiveStartupMessage()
		start, ok := hello.(*pgproto3.StartupMessage)
		if err != nil || !ok {
			return
		}
		if _, ok := start.Parameters["replication"]; ok {
			b, _ := (&pgproto3.ErrorResponse{Severity: "FATAL", Code: "08P01", Message: "unsupported startup parameter: replication"}).Encode(nil)
			_, _ = c.Write(b)
			return
		}
		server, err := net.Dial("tcp", r.pg.Addr())
		if err != nil {
			return
		}
		defer server.Close()
		b, _ := start.Encode(nil)
		_, _ = server.Write(b)
		go func() {
			_, _ = io.Copy(server, c)
			server.Close()
		}()
		_, _ = io.Copy(c, server)
	})
	refused(t, refusal{3, "unsupported startup parameter: replication", "connect to the server itself", nil}, with(r.relay.Args, "--dsn", at(pooler, ""))...)
}

func TestStandbyTakesOverAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{args: []string{"--window", "64"}})
	first := r.relay
	second := harness.NewRelay(t, first.Args...)
	first.MustStart(t)
	first.MustAwait(t, 20*time.Second, "streaming")
	second.MustStart(t)
	line := second.MustAwait(t, 20*time.Second, "standing by")
	if !strings.Contains(line, `slot \"walrelay\" is in use by`) || !strings.Contains(line, "hint=") {
		t.Errorf("the standby says %s", line)
	}
	ws := harness.NewWriters(harness.Workload{DSN: r.pg.DSN("postgres"), Writers: 2, Rate: 300, Seed: 5})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	writing := in(func() error { return ws.Run(ctx, -1) })
	r.stored(1_000, 30*time.Second)
	must(t, first.Kill())
	killed := time.Now()
	second.MustAwait(t, 20*time.Second, "streaming")
	if took := time.Since(killed); took > 2*time.Second {
		t.Errorf("the standby took over in %s, want 2s at most", took)
	} else {
		t.Logf("taken over in %s", took.Round(time.Millisecond))
	}
	must(t, ws.Diary.Await(ctx, ws.Diary.Committed()+200))
	stop()
	must(t, writing())
	t.Log(r.drained(ws, 30*time.Second))
	r.relay = second
	if n := r.told("standing by"); n != 1 {
		t.Errorf("it stood by %d times, want once\n%s", n, second.Output())
	}
	r.ends(0)
}

func TestInitTellsWhereATableDiffers(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t, "create table outbox (id point, aggregate_type text, aggregate_id text not null, event_type text not null, headers int)")
	ran := refused(t, refusal{3, "table public.outbox is not what the outbox needs", "never altered", nil}, "init", "--apply", "--dsn", pg.DSNFor("postgres", "postgres", secret))
	for _, want := range []string{
		`column "id" (id) is point`, `column "aggregate_type" (aggregate_type) is text, nullable: want text, NOT NULL`,
		`column "payload" (payload) is missing`, `column "headers" (headers) is integer`,
	} {
		if !strings.Contains(ran.Stderr, want) {
			t.Errorf("missing %q in\n%s", want, ran.Stderr)
		}
	}
	r := &rig{t: t, pg: pg}
	if n := query[int](r, "select count(*)::int from pg_publication"); n != 0 {
		t.Errorf("%d publications were made all the same", n)
	}
}

func TestPasswordIsChangedUnderARunningRelay(t *testing.T) {
	t.Parallel()
	const old = "old@:/#%one"
	r := newRig(t, rigOptions{
		pg: harness.PostgresOptions{Password: "of the superuser"},
		prepare: func(r *rig) {
			r.exec("create role relay login superuser password '" + old + "'")
		},
		dsn:  func(pg *harness.Postgres) string { return pg.DSNFor("postgres", "relay", old) },
		args: impatient,
	})
	r.relay.MustStart(t)
	r.exec(into + "values ('order', '1', 'made', '{}')")
	r.messages(1)
	conn := r.pg.MustConn(t)
	exec := func(sql string) {
		t.Helper()
		_, err := conn.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
		must(t, err)
	}
	events := 1
	for _, c := range []struct{ lock, unlock, err string }{
		{"alter role relay password 'new'", "alter role relay password '" + old + "'", "password authentication failed"},
		{"alter role relay nologin", "alter role relay login", "is not permitted to log in"},
	} {
		before := strings.Count(r.pg.Log(), c.err)
		exec(c.lock)
		exec("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'relay'")
		line := r.relay.MustAwait(t, quick, c.err)
		if !strings.Contains(line, "trying again") || !strings.Contains(line, "takes a restart") {
			t.Errorf("the relay waits with %s", line)
		}
		exec(into + "values ('order', '1', 'made', '{}')")
		events++
		r.await(quick, "five tries to log in", func() bool { return strings.Count(r.pg.Log(), c.err) >= before+5 })
		if !r.relay.Running() {
			t.Fatalf("the relay ended\n%s", r.relay.Output())
		}
		exec(c.unlock)
		r.messages(events)
		if n := r.told("trying again", c.err); n > 2 {
			t.Errorf("the wait was told %d times\n%s", n, r.relay.Output())
		}
	}
	r.ends(0, old)

	// At the start it is a mistake.
	exec("alter role relay password 'new'")
	refused(t, refusal{3, "password authentication failed", "password", nil}, r.relay.Args...)
}

func TestSignals(t *testing.T) {
	t.Parallel()
	// Events are in flight to a broker that does not answer.
	frozen := func(t *testing.T, args ...string) *rig {
		r := newRig(t, rigOptions{args: append([]string{"--ack-timeout", "60s", "--window", "64"}, args...)})
		r.relay.MustStart(t)
		r.exec(into + "values ('order', '1', 'made', '{}')")
		r.messages(1)
		r.nats.Freeze()
		r.exec(into + "select 'order', i::text, 'made', '{}' from generate_series(1, 200) i")
		r.await(quick, "the broker has unread events", func() bool {
			return query[bool](r, "select exists (select from pg_stat_replication where sent_lsn = pg_current_wal_lsn())")
		})
		return r
	}
	goesOn := func(t *testing.T, r *rig) {
		t.Helper()
		r.nats.Thaw()
		r.relay.MustStart(t)
		for i, m := range r.messages(201)[1:] {
			if got, want := m.Header.Get("Outbox-Aggregate-Id"), fmt.Sprint(i+1); got != want {
				t.Fatalf("message %d is of aggregate %s, want %s", i+2, got, want)
			}
		}
		r.ends(0)
	}
	t.Run("the drain times out", func(t *testing.T) {
		t.Parallel()
		r := frozen(t, "--drain-timeout", "2s")
		began := time.Now()
		r.ends(6)
		if took := time.Since(began); took < 2*time.Second || took > 5*time.Second {
			t.Errorf("it took %s, want little more than the drain timeout of 2s", took)
		}
		if r.told("error: ", "events in flight", "drain timed out") != 1 || r.told("hint: ", "--drain-timeout") != 1 {
			t.Errorf("output:\n%s", r.relay.Output())
		}
		goesOn(t, r)
	})
	t.Run("a second one stops at once", func(t *testing.T) {
		t.Parallel()
		r := frozen(t, "--drain-timeout", "60s")
		must(t, r.relay.Term())
		began := time.Now()
		// The first one has arrived when the relay reads no more; nothing shows that outside.
		ctx, cancel := context.WithTimeout(t.Context(), quick)
		defer cancel()
		code := in(func() error {
			code, err := r.relay.Wait(ctx)
			if err == nil && code != 130 {
				err = fmt.Errorf("exit code %d, want 130", code)
			}
			return err
		})
		r.await(quick, "the relay ends", func() bool { return r.relay.Term() != nil || !r.relay.Running() })
		if err := code(); err != nil {
			t.Errorf("%v\n%s", err, r.relay.Output())
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it took %s", took)
		}
		<-r.relay.Done()
		if r.told("error: ", "interrupted") != 1 {
			t.Errorf("output:\n%s", r.relay.Output())
		}
		goesOn(t, r)
	})
	t.Run("the broker is gone", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, rigOptions{args: impatient})
		r.relay.MustStart(t)
		r.relay.MustAwait(t, quick, "streaming")
		must(t, r.nats.Kill())
		r.exec(into + "values ('order', '1', 'made', '{}')")
		r.relay.MustAwait(t, quick, "no servers available")
		began := time.Now()
		r.ends(0)
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("it took %s", took)
		}
		r.nats.MustStart(t)
		r.relay.MustStart(t)
		r.messages(1)
	})
}
