package test

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"

	"github.com/walrelay/walrelay/test/harness"
)

// forms are the ways in which a secret may be written.
func forms(s string) []string {
	all := []string{s, url.QueryEscape(s), url.PathEscape(s), url.UserPassword("", s).String()[1:], base64.StdEncoding.EncodeToString([]byte(s))}
	slices.Sort(all)
	return slices.Compact(all)
}

// awkward is a password with everything that has a meaning in a URL.
const awkward = "p@:/#%w rd?&="

func TestPostgresAuthentication(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{TLS: true, Password: awkward})
	tls := pg.TLSFiles()
	other, err := harness.NewTLSFiles(t.TempDir())
	must(t, err)
	// The role that certificates name has no other way in, and nobody comes without TLS.
	hba := "local all all trust\n" +
		"hostssl all " + harness.ClientName + " 127.0.0.1/32 cert\n" +
		"hostssl all all 127.0.0.1/32 scram-sha-256\n"
	must(t, os.WriteFile(filepath.Join(pg.Data(), "pg_hba.conf"), []byte(hba), 0o600))
	pg.MustExec(t, "create role "+harness.ClientName+" login superuser", "select pg_reload_conf()")

	passfile := filepath.Join(t.TempDir(), "pgpass")
	must(t, os.WriteFile(passfile, []byte("*:*:*:*:"+strings.ReplaceAll(awkward, ":", `\:`)+"\n"), 0o600))
	host, port, _ := strings.Cut(pg.Addr(), ":")
	keywords := fmt.Sprintf("host=%s port=%s user=postgres dbname=postgres sslmode=verify-full sslrootcert=%s", host, port, tls.CA)
	params := "?sslmode=verify-full&sslrootcert=" + tls.CA
	const pasted = "p@:/#%secret" // as it is, without what would end a URL
	pg.MustExec(t, "create role pasted login superuser password '"+pasted+"'")
	certificate := fmt.Sprintf("host=%s port=%s user=%s dbname=postgres sslmode=verify-full sslrootcert=%s", host, port, harness.ClientName, tls.CA)

	for _, c := range []struct {
		name string
		dsn  string
		env  []string

		wrong    string // another DSN
		wrongEnv []string
		err      string
		hint     string
	}{
		{
			name:  "password in the URL",
			dsn:   "postgres://" + url.UserPassword("postgres", awkward).String() + "@" + pg.Addr() + "/postgres" + params,
			wrong: "postgres://" + url.UserPassword("postgres", secret).String() + "@" + pg.Addr() + "/postgres" + params,
			err:   "password authentication failed", hint: "password",
		},
		{
			name:  "password in the URL as it is",
			dsn:   "postgres://pasted:" + pasted + "@" + pg.Addr() + "/postgres" + params,
			wrong: "postgres://pasted:" + secret + "@" + pg.Addr() + "/postgres" + params,
			err:   "password authentication failed", hint: "password",
		},
		{
			name: "password among keywords", dsn: keywords + " password='" + awkward + "'",
			wrong: keywords + " password=" + awkward[:8], err: "password authentication failed", hint: "password",
		},
		{
			name: "PGPASSWORD", dsn: keywords, env: []string{"PGPASSWORD=" + awkward},
			wrong: keywords, wrongEnv: []string{"PGPASSWORD=" + secret}, err: "password authentication failed", hint: "PGPASSWORD",
		},
		{
			name: "PGPASSFILE", dsn: keywords, env: []string{"PGPASSFILE=" + passfile},
			wrong: keywords, wrongEnv: []string{"PGPASSFILE=/nonexistent"}, err: "password authentication failed", hint: "password file",
		},
		{
			name: "client certificate", dsn: certificate + " sslcert=" + tls.ClientCert + " sslkey=" + tls.ClientKey,
			wrong: certificate, err: "certificate", hint: "pg_hba.conf",
		},
		{
			name: "everything from PG*",
			env: []string{
				"PGHOST=" + host, "PGPORT=" + port, "PGUSER=" + harness.ClientName, "PGDATABASE=postgres", "PGSSLMODE=verify-full",
				"PGSSLROOTCERT=" + tls.CA, "PGSSLCERT=" + tls.ClientCert, "PGSSLKEY=" + tls.ClientKey,
			},
			wrong: keywords + " password='" + awkward + "' sslrootcert=" + other.CA, err: "certificate", hint: "sslrootcert",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			name := strings.ToLower(strings.NewReplacer(" ", "_", "*", "").Replace(c.name))
			r := &rig{t: t, pg: pg, nats: harness.RunNATS(t, harness.NATSOptions{})}
			r.js = r.nats.JetStream(t)
			env := append(slices.Clone(c.env), "PGAPPNAME="+name)
			where := []string{"--table", "public." + name, "--publication", name}
			dsn := []string{"--dsn", c.dsn}
			if c.dsn == "" {
				dsn = nil
			}
			for _, args := range [][]string{
				slices.Concat([]string{"init", "--apply"}, dsn, where),
				slices.Concat([]string{"slot", "create", name}, dsn, where[2:]),
			} {
				ran := harness.MustRun(t, env, args...)
				if ran.Code != 0 {
					t.Fatalf("walrelay %s: exit code %d\n%s", args[0], ran.Code, ran.Stderr)
				}
				quiet(t, ran.Stdout+ran.Stderr, awkward, pasted)
			}
			r.relay = harness.NewRelay(t, slices.Concat([]string{"run", "--slot", name, "--nats-url", r.nats.URL(), "--stream", stream, "--create-stream", "--log-format", "text"},
				dsn, where, impatient)...)
			r.relay.Env = env

			r.relay.MustStart(t)
			insert := "insert into " + name + " (aggregate_type, aggregate_id, event_type, payload) values ('order', '1', 'made', '{}')"
			r.socket(insert)
			r.stored(1, 20*time.Second)
			r.socket("select pg_terminate_backend(pid) from pg_stat_activity where application_name = '" + name + "'")
			r.relay.MustAwait(t, quick, "trying again")
			r.socket(insert)
			r.messages(2)
			if n := query[int](r, "select count(*)::int from pg_stat_ssl s join pg_stat_activity a using (pid) where a.application_name = $1 and not s.ssl", name); n != 0 {
				t.Errorf("%d sessions without TLS", n)
			}
			r.ends(0, awkward, pasted)

			ran := harness.MustRun(t, append(slices.Clone(c.wrongEnv), "PGAPPNAME="+name), slices.Concat([]string{"run", "--log-level", "debug", "--dsn", c.wrong, "--slot", name}, where)...)
			refusal{3, c.err, c.hint, nil}.check(t, ran, 0)
			quiet(t, ran.Stderr, awkward, pasted, awkward[:8])
		})
	}
}

// socket runs SQL over the socket, where nobody is asked for a password.
func (r *rig) socket(sql string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), quick)
	defer cancel()
	conn, err := pgxConnect(ctx, fmt.Sprintf("host=%s port=%d user=postgres dbname=postgres sslmode=disable", r.pg.Dir, r.pg.Port))
	must(r.t, err)
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
	must(r.t, err)
}

func TestNATSAuthentication(t *testing.T) {
	t.Parallel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	dir := t.TempDir()
	tls, err := harness.NewTLSFiles(dir)
	must(t, err)
	file := func(name string, text []byte) string {
		name = filepath.Join(dir, name)
		must(t, os.WriteFile(name, text, 0o600))
		return name
	}
	seed := func(k nkeys.KeyPair) []byte {
		s, err := k.Seed()
		must(t, err)
		return s
	}
	user, stranger := newKey(t, nkeys.CreateUser), newKey(t, nkeys.CreateUser)
	userSeed, strangerSeed := file("user.nk", seed(user)), file("stranger.nk", seed(stranger))
	key, err := nats.NkeyOptionFromSeed(userSeed)
	must(t, err)
	op := newOperator(t)
	creds := file("user.creds", op.credentials(op.account, user))
	wrongCreds := file("wrong.creds", op.credentials(newKey(t, nkeys.CreateAccount), user))
	userJWT, err := nkeys.ParseDecoratedJWT(op.credentials(op.account, user))
	must(t, err)

	secure := fmt.Sprintf("cert_file: %q, key_file: %q, ca_file: %q", tls.Cert, tls.Key, tls.CA)
	users := fmt.Sprintf("authorization { users: [{user: relay, password: %q}] }", awkward)
	for _, c := range []struct {
		name   string
		config string // of the server
		scheme string
		as     []nats.Option // who the test is
		creds  string        // in front of the host of the relay's URL
		args   []string      // of the relay
		env    []string

		wrong    []string // other arguments
		wrongEnv []string
		err      string
		hint     string
	}{
		{
			name: "user and password", config: users, as: []nats.Option{nats.UserInfo("relay", awkward)},
			args: []string{"--nats-user", "relay"}, env: []string{"WALRELAY_NATS_PASSWORD=" + awkward},
			wrong: []string{"--nats-user", "relay"}, wrongEnv: []string{"WALRELAY_NATS_PASSWORD=" + secret},
			err: "Authorization Violation", hint: "--nats-password",
		},
		{
			name: "user and password in the URL", config: users, as: []nats.Option{nats.UserInfo("relay", awkward)},
			creds: url.UserPassword("relay", awkward).String() + "@",
			err:   "Authorization Violation", hint: "--nats-user",
		},
		{
			name: "token", config: fmt.Sprintf("authorization { token: %q }", awkward), as: []nats.Option{nats.Token(awkward)},
			env:   []string{"WALRELAY_NATS_TOKEN=" + awkward},
			wrong: []string{"--nats-token", secret}, err: "Authorization Violation", hint: "--nats-token",
		},
		{
			name: "token in the URL", config: fmt.Sprintf("authorization { token: %q }", awkward), as: []nats.Option{nats.Token(awkward)},
			creds: url.User(awkward).String() + "@",
			err:   "Authorization Violation", hint: "--nats-token",
		},
		{
			name: "nkey", config: "authorization { users: [{nkey: " + public(t, user) + "}] }", as: []nats.Option{key},
			args:  []string{"--nats-nkey", userSeed},
			wrong: []string{"--nats-nkey", strangerSeed}, err: "Authorization Violation", hint: "--nats-nkey",
		},
		{
			name: "credentials file", config: op.config(), as: []nats.Option{nats.UserCredentials(creds)},
			args:  []string{"--nats-creds", creds},
			wrong: []string{"--nats-creds", wrongCreds}, err: "Authorization Violation", hint: "--nats-creds",
		},
		{
			name: "TLS", config: "tls { " + secure + " }", scheme: "tls", as: []nats.Option{nats.RootCAs(tls.CA)},
			args: []string{"--nats-tls-ca", tls.CA},
			err:  "certificate", hint: "--nats-tls-ca",
		},
		{
			name: "TLS that the server asks for", config: "tls { " + secure + " }", as: []nats.Option{nats.RootCAs(tls.CA)},
			args: []string{"--nats-tls-ca", tls.CA},
			err:  "certificate", hint: "--nats-tls-ca",
		},
		{
			name: "client certificate", config: "tls { " + secure + ", verify: true }", scheme: "tls",
			as:    []nats.Option{nats.RootCAs(tls.CA), nats.ClientCert(tls.ClientCert, tls.ClientKey)},
			args:  []string{"--nats-tls-ca", tls.CA, "--nats-tls-cert", tls.ClientCert, "--nats-tls-key", tls.ClientKey},
			wrong: []string{"--nats-tls-ca", tls.CA}, err: "tls", hint: "--nats-tls-cert",
		},
		{
			name: "certificate as the user", scheme: "tls",
			config: "tls { " + secure + ", verify_and_map: true }\nauthorization { users: [{user: \"CN=" + harness.ClientName + "\"}] }",
			as:     []nats.Option{nats.RootCAs(tls.CA), nats.ClientCert(tls.ClientCert, tls.ClientKey)},
			args:   []string{"--nats-tls-ca", tls.CA, "--nats-tls-cert", tls.ClientCert, "--nats-tls-key", tls.ClientKey},
			wrong:  []string{"--nats-tls-ca", tls.CA, "--nats-tls-cert", tls.Cert, "--nats-tls-key", tls.Key}, err: "Authorization Violation", hint: "credentials",
		},
		{
			name: "TLS first, with a password", config: "tls { " + secure + ", handshake_first: true }\n" + users, scheme: "tls",
			as:    []nats.Option{nats.RootCAs(tls.CA), nats.TLSHandshakeFirst(), nats.UserInfo("relay", awkward)},
			creds: url.UserPassword("relay", awkward).String() + "@",
			args:  []string{"--nats-tls-ca", tls.CA, "--nats-tls-first"},
			wrong: []string{"--nats-tls-first"}, err: "certificate", hint: "--nats-tls-ca",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := &rig{t: t, pg: pg}
			r.serveNATS(c.config, c.as)
			name := strings.ToLower(strings.NewReplacer(" ", "_", ",", "").Replace(c.name))
			where := []string{"--table", "public." + name, "--publication", name}
			dsn := []string{"--dsn", pg.DSN("postgres")}
			r.must(slices.Concat([]string{"init", "--apply"}, dsn, where)...)
			r.must(slices.Concat([]string{"slot", "create", name}, dsn, where[2:])...)
			scheme := c.scheme
			if scheme == "" {
				scheme = "nats"
			}
			base := slices.Concat([]string{"run", "--slot", name, "--stream", stream, "--create-stream", "--log-format", "text"}, dsn, where, impatient)
			r.relay = harness.NewRelay(t, slices.Concat(base, []string{"--nats-url", scheme + "://" + c.creds + r.nats.Addr()}, c.args)...)
			r.relay.Env = c.env
			secrets := []string{awkward, secret, string(seed(user)), string(seed(stranger)), userJWT}

			began := time.Now()
			ran := harness.MustRun(t, c.wrongEnv, slices.Concat(base, []string{"--nats-url", scheme + "://" + r.nats.Addr()}, c.wrong)...)
			refusal{3, c.err, c.hint, nil}.check(t, ran, time.Since(began))
			quiet(t, ran.Stderr, secrets...)

			insert := "insert into " + name + " (aggregate_type, aggregate_id, event_type, payload) values ('order', '1', 'made', '{}')"
			r.relay.MustStart(t)
			r.exec(insert)
			r.stored(1, 20*time.Second)
			must(t, r.nats.Kill())
			r.exec(insert)
			r.relay.MustAwait(t, quick, "trying again")
			must(t, r.nats.Launch())
			r.messages(2)
			r.ends(0, secrets...)
		})
	}
}

// serveNATS starts a server to which only a client with the options as can connect.
func (r *rig) serveNATS(config string, as []nats.Option) {
	r.t.Helper()
	n, err := harness.CreateNATS(r.t.Context(), harness.NATSOptions{Config: config})
	must(r.t, err)
	r.nats = n
	r.t.Cleanup(func() {
		if r.t.Failed() {
			r.t.Logf("log of the server:\n%s", n.Log())
		}
		must(r.t, n.Remove())
	})
	must(r.t, n.Launch())
	as = append([]nats.Option{nats.MaxReconnects(-1), nats.ReconnectWait(20 * time.Millisecond)}, as...)
	r.await(quick, "nats-server takes the test's connection", func() bool {
		nc, err := nats.Connect(n.URL(), as...)
		if err != nil {
			return false
		}
		r.t.Cleanup(nc.Close)
		r.js, err = jetstream.New(nc)
		return err == nil
	})
}

// operator signs accounts and users as nsc does: JWTs with the keys of nkeys.
type operator struct {
	t               testing.TB
	key             nkeys.KeyPair
	system, account nkeys.KeyPair
}

func newOperator(t testing.TB) *operator {
	return &operator{t, newKey(t, nkeys.CreateOperator), newKey(t, nkeys.CreateAccount), newKey(t, nkeys.CreateAccount)}
}

func newKey(t testing.TB, create func() (nkeys.KeyPair, error)) nkeys.KeyPair {
	t.Helper()
	k, err := create()
	must(t, err)
	return k
}

func public(t testing.TB, k nkeys.KeyPair) string {
	t.Helper()
	s, err := k.PublicKey()
	must(t, err)
	return s
}

// config is the server's part: the operator, and accounts with every right.
func (o *operator) config() string {
	unlimited := map[string]any{
		"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
		"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
	}
	system, account := public(o.t, o.system), public(o.t, o.account)
	return "operator: " + o.sign(o.key, o.key, "operator", nil) +
		"\nsystem_account: " + system +
		"\nresolver: MEMORY\nresolver_preload: {\n" +
		system + ": " + o.sign(o.key, o.system, "account", map[string]any{}) + "\n" +
		account + ": " + o.sign(o.key, o.account, "account", map[string]any{"limits": unlimited}) + "\n}"
}

// credentials is the file of a user of the account.
func (o *operator) credentials(account, user nkeys.KeyPair) []byte {
	seed, err := user.Seed()
	must(o.t, err)
	token := o.sign(account, user, "user", map[string]any{"pub": map[string]any{}, "sub": map[string]any{}, "subs": -1, "data": -1, "payload": -1})
	return fmt.Appendf(nil, "-----BEGIN NATS USER JWT-----\n%s\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n%s\n------END USER NKEY SEED------\n", token, seed)
}

// sign makes a JWT of version 2, as https://docs.nats.io/running-a-nats-service/nats_admin/security/jwt describes.
func (o *operator) sign(by, subject nkeys.KeyPair, kind string, claims map[string]any) string {
	o.t.Helper()
	body := map[string]any{"type": kind, "version": 2}
	for k, v := range claims {
		body[k] = v
	}
	part := func(v any) string {
		b, err := json.Marshal(v)
		must(o.t, err)
		return base64.RawURLEncoding.EncodeToString(b)
	}
	text := part(map[string]string{"typ": "JWT", "alg": "ed25519-nkey"}) + "." + part(map[string]any{
		"jti": kind, "iat": 1, "iss": public(o.t, by), "sub": public(o.t, subject), "name": kind, "nats": body,
	})
	sig, err := by.Sign([]byte(text))
	must(o.t, err)
	return text + "." + base64.RawURLEncoding.EncodeToString(sig)
}
