package publisher

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// oddPassword needs escaping in a URL, in JSON and in the server's configuration.
const oddPassword = `p@ss:/#%? ä"w`

// publishesThree proves that both connections got in.
func publishesThree(t *testing.T, o Options) {
	t.Helper()
	events := numberedLog(o.Stream, 3)
	p := newPublisher(t, o)
	r := begin(t, p)
	if err := r.publish(t.Context(), events); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	if r = begin(t, p); r.resume.After != events[2].Position {
		t.Fatalf("resumes after %s", r.resume.After)
	}
}

// refusedOpen opens with o, which must fail, and returns why.
func refusedOpen(t *testing.T, o Options, secrets ...string) error {
	t.Helper()
	p := newPublisher(t, o)
	s, err := p.Open(t.Context(), func(error) {})
	if err == nil {
		s.Close()
		t.Fatal("let in")
	}
	for _, secret := range secrets {
		if text := err.Error() + event.HintOf(err); strings.Contains(text, secret) {
			t.Fatalf("%q shows %q", text, secret)
		}
	}
	return err
}

func wantFailure(t *testing.T, err error, class event.Class, hint string) {
	t.Helper()
	if event.ClassOf(err) != class || !strings.Contains(event.HintOf(err), hint) {
		t.Fatalf("got class %d, %v, hint %q; want class %d and %q in the hint", event.ClassOf(err), err, event.HintOf(err), class, hint)
	}
}

func TestUserAndPassword(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{User: "rel@y", Password: oddPassword})
	o := optionsFor(n, "user")
	t.Run("by options", func(t *testing.T) { publishesThree(t, o) })
	t.Run("in the URL", func(t *testing.T) {
		u := url.URL{Scheme: "nats", Host: n.Addr(), User: url.UserPassword("rel@y", oddPassword)}
		o := o
		o.Connect, o.URL = nil, u.String()
		o.Stream, o.Subjects = "user-url", []string{"user-url.>"}
		publishesThree(t, o)
	})
	t.Run("the second of two URLs", func(t *testing.T) {
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		o := o
		o.URL = fmt.Sprintf("nats://127.0.0.1:%d,%s", port, n.Addr())
		o.Stream, o.Subjects = "user-two", []string{"user-two.>"}
		publishesThree(t, o)
	})
	t.Run("wrong password", func(t *testing.T) {
		o := o
		o.Connect = []nats.Option{nats.UserInfo("rel@y", "wr0ngpw")}
		wantFailure(t, refusedOpen(t, o, "wr0ngpw"), event.Precondition, "--nats-creds")
	})
	t.Run("wrong password in the URL", func(t *testing.T) {
		o := o
		o.Connect, o.URL = nil, "nats://rel%40y:wr0ngpw@"+n.Addr()
		wantFailure(t, refusedOpen(t, o, "wr0ngpw"), event.Precondition, "--nats-creds")
	})
	t.Run("no password", func(t *testing.T) {
		o := o
		o.Connect = nil
		wantFailure(t, refusedOpen(t, o), event.Precondition, "--nats-creds")
	})
	t.Run("bad escape", func(t *testing.T) {
		o := o
		o.Connect, o.URL = nil, "nats://rel%zzy:wr0ngpw@"+n.Addr()
		wantFailure(t, refusedOpen(t, o, "wr0ngpw"), event.Usage, "percent-encode")
	})
	t.Run("a password that was right once", func(t *testing.T) {
		p := newPublisher(t, o)
		begin(t, p).Close()
		p.o.Connect = []nats.Option{nats.UserInfo("rel@y", "wr0ngpw")}
		_, err := p.Open(t.Context(), func(error) {})
		if err == nil {
			t.Fatal("let in")
		}
		wantFailure(t, err, event.Transient, "--nats-creds")
	})
}

func TestToken(t *testing.T) {
	const token = `t0k@n/#%`
	n := harness.RunNATS(t, harness.NATSOptions{Token: token})
	o := optionsFor(n, "token")
	t.Run("by options", func(t *testing.T) { publishesThree(t, o) })
	t.Run("by callback", func(t *testing.T) {
		o := o
		o.Connect = []nats.Option{nats.TokenHandler(func() string { return token })}
		o.Stream, o.Subjects = "token-cb", []string{"token-cb.>"}
		publishesThree(t, o)
	})
	t.Run("in the URL", func(t *testing.T) {
		u := url.URL{Scheme: "nats", Host: n.Addr(), User: url.User(token)}
		o := o
		o.Connect, o.URL = nil, u.String()
		o.Stream, o.Subjects = "token-url", []string{"token-url.>"}
		publishesThree(t, o)
	})
	t.Run("wrong", func(t *testing.T) {
		o := o
		o.Connect = []nats.Option{nats.Token("wr0ng")}
		wantFailure(t, refusedOpen(t, o, "wr0ng"), event.Precondition, "--nats-token")
	})
}

func TestNKeySeed(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{NKey: true})
	seed, err := nats.NkeyOptionFromSeed(n.NKeySeed())
	if err != nil {
		t.Fatal(err)
	}
	o := optionsFor(n, "nkey")
	o.Connect = []nats.Option{seed}
	publishesThree(t, o)

	other, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	text, err := other.Seed()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "other.nk")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if seed, err = nats.NkeyOptionFromSeed(file); err != nil {
		t.Fatal(err)
	}
	o.Connect = []nats.Option{seed}
	wantFailure(t, refusedOpen(t, o, string(text)), event.Precondition, "--nats-nkey")
}

func TestCredentialsFile(t *testing.T) {
	operator, account, user := newKey(t, nkeys.CreateOperator), newKey(t, nkeys.CreateAccount), newKey(t, nkeys.CreateUser)
	unlimited := map[string]any{
		"subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
		"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
	}
	operatorJWT := signJWT(t, operator, operator, "operator", nil)
	accountJWT := signJWT(t, operator, account, "account", map[string]any{
		"limits": unlimited, "default_permissions": map[string]any{"pub": map[string]any{}, "sub": map[string]any{}},
	})
	userJWT := signJWT(t, account, user, "user", map[string]any{
		"pub": map[string]any{}, "sub": map[string]any{}, "subs": -1, "data": -1, "payload": -1,
	})
	seed, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "user.creds")
	text := "-----BEGIN NATS USER JWT-----\n" + userJWT + "\n------END NATS USER JWT------\n\n" +
		"-----BEGIN USER NKEY SEED-----\n" + string(seed) + "\n------END USER NKEY SEED------\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	system := newKey(t, nkeys.CreateAccount)
	config := fmt.Sprintf("operator: %s\nsystem_account: %s\nresolver: MEMORY\nresolver_preload: { %s: %s, %s: %s }", operatorJWT, public(t, system),
		public(t, account), accountJWT, public(t, system), signJWT(t, operator, system, "account", nil))
	n := launch(t, harness.NATSOptions{Config: config}, nats.UserCredentials(file))
	o := optionsFor(n, "creds")
	o.Connect = []nats.Option{nats.UserCredentials(file)}
	publishesThree(t, o)

	o.Connect = nil
	wantFailure(t, refusedOpen(t, o), event.Precondition, "--nats-creds")
	stranger := newKey(t, nkeys.CreateUser)
	o.Connect = []nats.Option{nats.UserJWT(
		func() (string, error) { return userJWT, nil },
		func(nonce []byte) ([]byte, error) { return stranger.Sign(nonce) },
	)}
	wantFailure(t, refusedOpen(t, o, userJWT), event.Precondition, "--nats-creds")
}

func newKey(t *testing.T, create func() (nkeys.KeyPair, error)) nkeys.KeyPair {
	t.Helper()
	pair, err := create()
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

func public(t *testing.T, pair nkeys.KeyPair) string {
	t.Helper()
	key, err := pair.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// signJWT makes a claim of version 2, as nats-io/jwt does.
func signJWT(t *testing.T, issuer, subject nkeys.KeyPair, kind string, claim map[string]any) string {
	t.Helper()
	body := map[string]any{"type": kind, "version": 2}
	for k, v := range claim {
		body[k] = v
	}
	encode := func(v any) string { return base64.RawURLEncoding.EncodeToString(mustJSON(t, v)) }
	text := encode(map[string]string{"typ": "JWT", "alg": "ed25519-nkey"}) + "." + encode(map[string]any{
		"jti": public(t, subject), "iat": time.Now().Unix(), "iss": public(t, issuer), "sub": public(t, subject), "name": kind, "nats": body,
	})
	sig, err := issuer.Sign([]byte(text))
	if err != nil || len(sig) != ed25519.SignatureSize {
		t.Fatal(err)
	}
	return text + "." + base64.RawURLEncoding.EncodeToString(sig)
}

func TestTLS(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{TLS: true})
	ca := nats.RootCAs(n.TLSFiles().CA)
	for name, c := range map[string]struct {
		url     string
		connect []nats.Option
	}{
		"tls URL":          {"tls://" + n.Addr(), []nats.Option{ca}},
		"nats URL":         {"nats://" + n.Addr(), []nats.Option{ca}},
		"no scheme":        {n.Addr(), []nats.Option{ca}},
		"by name":          {"tls://" + strings.Replace(n.Addr(), "127.0.0.1", "localhost", 1), []nats.Option{ca}},
		"name by option":   {"tls://" + n.Addr(), []nats.Option{ca, func(o *nats.Options) error { o.TLSConfig.ServerName = "localhost"; return nil }}},
		"needless client":  {"tls://" + n.Addr(), []nats.Option{ca, nats.ClientCert(n.TLSFiles().ClientCert, n.TLSFiles().ClientKey)}},
		"unverified by us": {"tls://" + n.Addr(), []nats.Option{nats.Secure(&tls.Config{InsecureSkipVerify: true})}},
	} {
		t.Run(name, func(t *testing.T) {
			stream := "tls-" + strings.ReplaceAll(name, " ", "-")
			o := optionsFor(n, stream)
			o.URL, o.Connect = c.url, c.connect
			publishesThree(t, o)
		})
	}
	t.Run("unknown CA", func(t *testing.T) {
		o := optionsFor(n, "tls")
		o.Connect = nil
		wantFailure(t, refusedOpen(t, o), event.Precondition, "--nats-tls-ca")
		o.URL = "nats://" + n.Addr() // the server asks for TLS all the same
		wantFailure(t, refusedOpen(t, o), event.Precondition, "--nats-tls-ca")
	})
	t.Run("wrong name", func(t *testing.T) {
		o := optionsFor(n, "tls")
		o.Connect = []nats.Option{ca, func(o *nats.Options) error { o.TLSConfig.ServerName = "elsewhere.example"; return nil }}
		wantFailure(t, refusedOpen(t, o), event.Precondition, "a name that the certificate has")
	})
	t.Run("server without TLS", func(t *testing.T) {
		plain := harness.RunNATS(t, harness.NATSOptions{})
		o := optionsFor(plain, "tls")
		o.Connect, o.URL = []nats.Option{ca}, "tls://"+plain.Addr()
		wantFailure(t, refusedOpen(t, o), event.Precondition, "TLS settings of both sides")
	})
}

func TestClientCertificate(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{TLS: true, VerifyClient: true})
	publishesThree(t, optionsFor(n, "mtls"))
	o := optionsFor(n, "mtls")
	o.Connect = []nats.Option{nats.RootCAs(n.TLSFiles().CA)}
	err := refusedOpen(t, o)
	wantFailure(t, err, event.ClassOf(err), "--nats-tls-cert") // the class depends on whether the alert or the end is seen first
}

func TestTLSFirst(t *testing.T) {
	files, err := harness.NewTLSFiles(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	connect := []nats.Option{nats.RootCAs(files.CA), nats.TLSHandshakeFirst()}
	n := launch(t, harness.NATSOptions{Config: fmt.Sprintf("tls { cert_file: %q, key_file: %q, handshake_first: true }", files.Cert, files.Key)}, connect...)
	o := optionsFor(n, "first")
	o.Connect = connect
	publishesThree(t, o)
}

func TestOpenFailures(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	t.Run("nobody listens", func(t *testing.T) {
		port, err := harness.FreePort()
		if err != nil {
			t.Fatal(err)
		}
		o := optionsFor(n, "open")
		o.URL = fmt.Sprintf("nats://user:s3cret@127.0.0.1:%d", port)
		wantFailure(t, refusedOpen(t, o, "s3cret"), event.Transient, "--nats-url")
	})
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(errors.New("enough"))
		_, err := newPublisher(t, optionsFor(n, "open")).Open(ctx, func(error) {})
		if err == nil || !strings.Contains(err.Error(), "enough") {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("web socket", func(t *testing.T) {
		u, _ := url.Parse("ws://user:s3cret@127.0.0.1:1")
		_, err := dial(t.Context(), u, "", nats.GetDefaultOptions())
		if event.ClassOf(err) != event.Usage || strings.Contains(err.Error(), "s3cret") {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("no JetStream", func(t *testing.T) {
		n := launchPlain(t)
		o := optionsFor(harness.RunNATS(t, harness.NATSOptions{}), "open")
		o.URL = n
		wantFailure(t, refusedOpen(t, o), event.Transient, "JetStream enabled")
	})
}

// launchPlain is a server with accounts of which the default one has no JetStream.
func launchPlain(t *testing.T) string {
	t.Helper()
	n, err := harness.CreateNATS(t.Context(), harness.NATSOptions{Config: `accounts: { JS: { jetstream: enabled, users: [{user: js, password: js}] }, PLAIN: { users: [{user: plain, password: plain}] } }`})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Remove(); err != nil {
			t.Error(err)
		}
	})
	if err := n.Launch(); err != nil {
		t.Fatal(err)
	}
	every := time.NewTicker(10 * time.Millisecond)
	defer every.Stop()
	for deadline := time.After(30 * time.Second); ; {
		if reachable(n, []nats.Option{nats.UserInfo("js", "js")}) == nil {
			return "nats://plain:plain@" + n.Addr()
		}
		select {
		case <-every.C:
		case <-deadline:
			t.Fatal("nats-server does not answer")
		}
	}
}

func TestSubscriptionIsConfirmed(t *testing.T) {
	n := launch(t, harness.NATSOptions{Config: `authorization { users: [
		{user: relay, password: secret, permissions: { subscribe: { deny: ["denied.>"] } } }
	] }`}, natsUser("relay", "secret"))
	o := nats.GetDefaultOptions()
	o.User, o.Password = "relay", "secret"
	u, err := url.Parse(n.URL())
	if err != nil {
		t.Fatal(err)
	}
	w, err := dial(t.Context(), u, "", o)
	if err != nil {
		t.Fatal(err)
	}
	defer w.close()
	if err := w.subscribe("allowed.*", time.Second); err != nil {
		t.Fatal(err)
	}
	err = w.subscribe("denied.*", time.Second)
	var proto protocolError
	if !errors.As(err, &proto) || !proto.permissions() || proto.publishDenied() {
		t.Fatalf("got %v", err)
	}
}

// scripted is a server that says greeting, reads a CONNECT with PING, and says reply.
func scripted(t *testing.T, greeting, reply string) *url.URL {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		io.WriteString(c, greeting)
		r := bufio.NewReader(c)
		for {
			line, err := r.ReadString('\n')
			if err != nil {
				return
			}
			if line == "PING\r\n" {
				break
			}
		}
		io.WriteString(c, reply)
		io.Copy(io.Discard, r)
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return &url.URL{Scheme: "nats", Host: l.Addr().String()}
}

func TestHandshake(t *testing.T) {
	const info = `INFO {"server_id":"x","version":"2.12.0","max_payload":1048576,"headers":true}` + "\r\n"
	for _, c := range []struct {
		name, greeting, reply, want string
	}{
		{"usual", info, "PONG\r\n", ""},
		{"INFO again before PONG", info, info + "PONG\r\n", ""},
		{"PING before PONG", info, "PING\r\nPONG\r\n", ""},
		{"+OK before PONG", info, "+OK\r\nPONG\r\n", ""},
		{"refused", info, "-ERR 'Authorization Violation'\r\n", "Authorization Violation"},
		{"another protocol", "HTTP/1.1 400 Bad Request\r\n\r\n", "", "does not speak the NATS protocol"},
		{"no headers", `INFO {"max_payload":1048576}` + "\r\n", "", "message headers"},
		{"damaged INFO", "INFO {\r\n", "", "read INFO"},
		{"endless INFO", "INFO " + strings.Repeat("x", 2*readBufferSize), "", "read INFO"},
		{"silence", info, "", "PONG"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := nats.GetDefaultOptions()
			o.Timeout = 2 * time.Second
			if c.want == "PONG" {
				o.Timeout = 50 * time.Millisecond
			}
			w, err := dial(t.Context(), scripted(t, c.greeting, c.reply), "", o)
			if err == nil {
				w.close()
			}
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Fatalf("got %v, want %q", err, c.want)
			}
			if err == nil && w.maxPayload != 1<<20 {
				t.Fatalf("max_payload %d", w.maxPayload)
			}
		})
	}
	t.Run("cancelled", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		o := nats.GetDefaultOptions()
		if _, err := dial(ctx, scripted(t, "", ""), "", o); err == nil {
			t.Fatal("no error")
		}
	})
}

// readAll feeds text to a wire and returns what it delivers.
func readAll(text string) (got []string, err error) {
	var sent bytes.Buffer
	w := &wire{conn: recorder{&sent}, r: bufio.NewReaderSize(strings.NewReader(text), readBufferSize), pings: 2}
	err = w.read(func(subject, header, payload []byte) error {
		got = append(got, fmt.Sprintf("%s|%s|%s", subject, header, payload))
		return nil
	}, func() {})
	if sent.Len() > 0 {
		got = append(got, sent.String())
	}
	return got, err
}

type recorder struct{ *bytes.Buffer }

func (recorder) Close() error                     { return nil }
func (recorder) LocalAddr() net.Addr              { return nil }
func (recorder) RemoteAddr() net.Addr             { return nil }
func (recorder) SetDeadline(time.Time) error      { return nil }
func (recorder) SetReadDeadline(time.Time) error  { return nil }
func (recorder) SetWriteDeadline(time.Time) error { return nil }

func TestRead(t *testing.T) {
	long := strings.Repeat("s", 300)
	for _, c := range []struct {
		name, in, want, err string
	}{
		{"messages", "MSG a.1 1 2\r\nhi\r\nMSG a.2 1 0\r\n\r\nMSG a.3 1 reply.to 2\r\nho\r\n", "a.1||hi;a.2||;a.3||ho", "EOF"},
		{
			"headers", "HMSG a.1 1 30 30\r\nNATS/1.0 503 No Responders\r\n\r\n\r\nHMSG a.2 1 r 12 14\r\nNATS/1.0\r\n\r\nok\r\n",
			"a.1|NATS/1.0 503 No Responders\r\n\r\n|;a.2|NATS/1.0\r\n\r\n|ok", "EOF",
		},
		{"others", "PING\r\nINFO {}\r\n+OK\r\nPONG\r\nMSG a.1 1 1\r\nx\r\n", "a.1||x;PONG\r\n", "EOF"},
		{"long subject", "MSG " + long + " 1 1\r\nx\r\n", long + "||x", "EOF"},
		{"error", "-ERR 'Stale Connection'\r\nMSG a.1 1 1\r\nx\r\n", "", "Stale Connection"},
		{"truncated", "MSG a.1 1 5\r\nhi", "", "EOF"},
		{"negative size", "MSG a.1 1 -5\r\n", "", "malformed"},
		{"no size", "MSG a.1 1\r\n", "", "malformed"},
		{"header over size", "HMSG a.1 1 9 5\r\n", "", "malformed"},
		{"huge", "MSG a.1 1 99999999\r\n", "", "malformed"},
		{"unknown", "HELLO\r\n", "", "unexpected"},
	} {
		got, err := readAll(c.in)
		if strings.Join(got, ";") != c.want || err == nil || !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: got %q, %v; want %q, %q", c.name, got, err, c.want, c.err)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add("MSG a.1 1 2\r\nhi\r\nHMSG a.2 1 r 12 14\r\nNATS/1.0\r\n\r\nok\r\n")
	f.Add("PING\r\nINFO {}\r\n+OK\r\nPONG\r\n-ERR 'x'\r\n")
	f.Add("HMSG a 1 9 5\r\nMSG  1 \r\n")
	f.Fuzz(func(t *testing.T, in string) {
		if _, err := readAll(in); err == nil {
			t.Fatal("ended without an error")
		}
	})
}

func TestConnectLineTakesTheRightCredentials(t *testing.T) {
	o := nats.GetDefaultOptions()
	o.User, o.Password = "options", "options"
	u := &url.URL{Host: "h", User: url.UserPassword("url", "url")}
	line, err := connectLine(u, serverInfo{}, o, true)
	if err != nil {
		t.Fatal(err)
	}
	var c connectOptions
	rest, _ := bytes.CutPrefix(line, []byte("CONNECT "))
	if err := json.Unmarshal(rest, &c); err != nil {
		t.Fatal(err)
	}
	if c.User != "url" || c.Pass != "url" || !c.TLSRequired || !c.Headers || !c.NoResponders || c.Echo || c.Verbose {
		t.Errorf("got %+v", c)
	}
	o = nats.GetDefaultOptions()
	o.Nkey = "UABC"
	if _, err := connectLine(&url.URL{Host: "h"}, serverInfo{}, o, false); !errors.Is(err, nats.ErrNkeyButNoSigCB) {
		t.Errorf("got %v", err)
	}
}
