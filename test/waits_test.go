package test

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// withKeys is a DSN with further parameters of the URL.
func withKeys(dsn, keys string) string {
	if strings.Contains(dsn, "?") {
		return dsn + "&" + keys
	}
	return dsn + "?" + keys
}

// What only an operator can correct in the connection string ends every command
// at once, instead of making it try for ever.
func TestKeywordsOfTheDSNAreJudged(t *testing.T) {
	t.Parallel()
	r := newRig(t, rigOptions{
		dsn:  func(pg *harness.Postgres) string { return pg.DSNFor("postgres", "postgres", secret) },
		args: impatient,
	})
	host, port, err := net.SplitHostPort(r.pg.Addr())
	must(t, err)
	keywords := fmt.Sprintf("host=%s port=%s user=postgres dbname=postgres sslmode=disable ", host, port)
	service := filepath.Join(t.TempDir(), "services")
	must(t, os.WriteFile(service, []byte("[right]\nhost="+host+"\nport="+port+"\nuser=postgres\ndbname=postgres\nsslmode=disable\nkeepalives_idle=9\n"+
		"[wrong]\nhost="+host+"\nport="+port+"\nuser=postgres\nsslcrl=/nowhere\n"), 0o600))
	file := filepath.Join(t.TempDir(), "walrelay.yaml")
	must(t, os.WriteFile(file, []byte("dsn: "+withKeys(r.dsn, "pool_max_conns=5")+"\n"), 0o600))

	for _, c := range []struct {
		name string
		dsn  string
		env  []string
		want refusal
	}{
		{"schema of an ORM", withKeys(r.dsn, "schema=public"), nil, refusal{2, `"schema"`, "search_path", nil}},
		{"setting of a pool", keywords + "pool_max_conns=3", nil, refusal{2, `"pool_max_conns"`, "leave it out", nil}},
		{"slip", withKeys(r.dsn, "aplication_name=x"), nil, refusal{2, `"aplication_name"`, "did you mean application_name?", nil}},
		{"revocation list", withKeys(r.dsn, "sslcrl=/x"), nil, refusal{2, "sslcrl", "sslrootcert", nil}},
		{"GSS encryption", withKeys(r.dsn, "gssencmode=require"), nil, refusal{2, "gssencmode", "sslmode=verify-full", nil}},
		{"owner of the socket", keywords + "requirepeer=postgres", nil, refusal{2, "requirepeer", "leave it out", nil}},
		{"variable", "", []string{"PGHOST=" + host, "PGPORT=" + port, "PGGSSENCMODE=require"}, refusal{2, "gssencmode", "sslmode=verify-full", nil}},
		{"service file", "service=wrong", []string{"PGSERVICEFILE=" + service}, refusal{2, "sslcrl", "sslrootcert", nil}},
		{"authentication that the server does not ask for", withKeys(r.dsn, "require_auth=scram-sha-256"), nil, refusal{3, "scram-sha-256", "", nil}},
		{"unknown setting in options", withKeys(r.dsn, "options="+url.QueryEscape("-c no_such_setting=1")), nil, refusal{3, "no_such_setting", "PGOPTIONS", nil}},
		{"setting with a bad value", withKeys(r.dsn, "work_mem=much"), nil, refusal{3, "work_mem", "PGOPTIONS", nil}},
		{"nothing at all", "", nil, refusal{2, "nothing says which Postgres", "--dsn", []string{"PGHOST"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, args := range [][]string{with(r.relay.Args, "--dsn", c.dsn), {"slot", "show", slot, "--dsn", c.dsn}} {
				began := time.Now()
				ran := harness.MustRun(t, c.env, args...)
				c.want.check(t, ran, time.Since(began))
			}
		})
	}
	ran := harness.MustRun(t, nil, "slot", "list", "--config", file)
	refusal{2, `"pool_max_conns"`, "leave it out", nil}.check(t, ran, 0)

	// Commands of every kind take what is right, with one warning about what is not used.
	for _, c := range []struct {
		dsn  string
		env  []string
		warn string
	}{
		{withKeys(r.dsn, "application_name=judge&search_path=public&statement_timeout=5s"), nil, ""},
		{withKeys(r.dsn, "gssencmode=disable&ssl_min_protocol_version=TLSv1.2&fallback_application_name=x"), nil, ""},
		{withKeys(r.dsn, "keepalives_idle=30&load_balance_hosts=random&tcp_user_timeout=10"), nil, "keepalives_idle, load_balance_hosts, tcp_user_timeout"},
		{strings.Replace(keywords, "host="+host, "host=nowhere.invalid hostaddr="+host, 1), nil, ""},
		{strings.Replace(keywords, "host="+host, "hostaddr="+host, 1), nil, ""},
		{"service=right", []string{"PGSERVICEFILE=" + service}, "keepalives_idle"},
		{"", []string{"PGSERVICE=right", "PGSERVICEFILE=" + service}, "keepalives_idle"},
	} {
		ran := harness.MustRun(t, c.env, "slot", "show", slot, "--dsn", c.dsn)
		if ran.Code != 0 || strings.Count(ran.Stderr, "warning:") != min(len(c.warn), 1) || !strings.Contains(ran.Stderr, c.warn) {
			t.Errorf("%s: exit code %d, want the warning %q\n%s", c.dsn, ran.Code, c.warn, ran.Stderr)
		}
		quiet(t, ran.Stdout+ran.Stderr, secret)
	}
	r.relay.Args = with(r.relay.Args, "--dsn", withKeys(r.dsn, "keepalives=0&application_name=judge&work_mem=5MB"))
	r.relay.MustStart(t)
	r.exec(into + "values ('order', '1', 'made', '{}')")
	r.messages(1)
	if n := strings.Count(r.relay.Output(), "without effect"); n != 1 {
		t.Errorf("%d warnings in the log, want 1", n)
	}
	r.ends(0, secret)
}

// SQL that is only printed needs no server.
func TestInitPrintsWithoutAServer(t *testing.T) {
	t.Parallel()
	if ran := harness.MustRun(t, nil, "init"); ran.Code != 0 || !strings.Contains(ran.Stdout, "CREATE TABLE") {
		t.Errorf("exit code %d\n%s%s", ran.Code, ran.Stdout, ran.Stderr)
	}
	refusal{2, "nothing says which Postgres", "WALRELAY_DSN", nil}.check(t, harness.MustRun(t, nil, "init", "--apply"), 0)
}

func TestNATSURLsAreJudged(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ url, err, hint string }{
		{"nats://::1:4222", "brackets", "nats://[::1]:4222"},
		{"ws://user:" + url.QueryEscape(secret) + "@127.0.0.1:8080", "WebSocket", "nats://host:4222"},
		{"wss://127.0.0.1", "WebSocket", "tls://host:4222"},
		{"http://127.0.0.1:4222", "scheme", "nats://host:4222"},
		{"127.0.0.1:4222,ws://127.0.0.1", "WebSocket", "nats://host:4222"},
		{"nats://127.0.0.1:42222222", "port", "nats://host:4222"},
	} {
		for _, args := range [][]string{{"run", "--dsn", "host=127.0.0.1"}, {"dlq", "list"}, {"check", "--dsn", "host=127.0.0.1"}} {
			began := time.Now()
			ran := harness.MustRun(t, []string{"NATS_URL=" + c.url}, args...)
			refusal{2, c.err, c.hint, nil}.check(t, ran, time.Since(began))
		}
	}
}

// cruel are settings of a role or a database that would end walrelay's
// sessions, make them read-only, or change the text that they read.
var cruel = []string{
	"statement_timeout = '5ms'", "lock_timeout = '1ms'", "idle_in_transaction_session_timeout = '1ms'", "idle_session_timeout = '500ms'",
	"default_transaction_read_only = on", "default_transaction_isolation = 'serializable'", "default_transaction_deferrable = on",
	"datestyle = 'SQL, DMY'", "intervalstyle = 'sql_standard'", "extra_float_digits = -15", "bytea_output = 'escape'",
	"timezone = 'Asia/Tokyo'", "client_encoding = 'LATIN1'", "standard_conforming_strings = off", "quote_all_identifiers = on",
	"xmloption = 'document'", "search_path = ''",
}

func TestSettingsOfTheRoleAndTheDatabaseChangeNothing(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"role relay", "database postgres"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, rigOptions{
				dsn: func(pg *harness.Postgres) string {
					return withKeys(pg.DSNFor("postgres", "relay", ""), "target_session_attrs=read-write")
				},
				prepare: func(r *rig) {
					settings := slices.Clone(cruel)
					if query[int](r, "select current_setting('server_version_num')::int") >= 170000 {
						settings = append(settings, "transaction_timeout = '300ms'")
					}
					r.exec("create role relay superuser login")
					for _, s := range settings { // of the test's own sessions, which go before those of the database
						name, _, _ := strings.Cut(s, " =")
						r.socket("do $$ begin execute 'alter role postgres set " + name + " = ' || quote_literal(current_setting('" + name + "')); end $$")
					}
					for _, s := range settings {
						r.socket("alter " + where + " set " + s)
					}
				},
			})
			r.exec(into + "values ('order', '1', 'made', '{\"a\": 1}')")
			r.relay.MustStart(t)
			r.messages(1)
			r.must("check", "--dsn", r.dsn, "--nats-url", r.natsURL)
			r.must("status", "--dsn", r.dsn, "--nats-url", r.natsURL)
			r.must("slot", "peek", slot, "--dsn", r.dsn)
			r.exec(into + "values ('order', '1', 'paid', '{\"a\": 2}')")
			r.messages(2)
			for _, line := range r.relay.Lines() {
				if strings.Contains(line, "trying again") {
					t.Errorf("a session ended: %s", line)
				}
			}
			r.ends(0)
			r.must("prune", "--dsn", r.dsn, "--nats-url", r.natsURL, "--older-than", "0s", "--yes")
		})
	}
}
