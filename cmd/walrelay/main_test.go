package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

type outcome struct {
	code     int
	out, err string
}

// walrelay runs a command line in this process.
func walrelay(t *testing.T, environ []string, args ...string) outcome {
	t.Helper()
	return runWith(t.Context(), environ, args...)
}

func runWith(ctx context.Context, environ []string, args ...string) outcome {
	var out, errs bytes.Buffer
	code := execute(ctx, &process{args: args, environ: environ, in: strings.NewReader(""), out: &out, err: &errs})
	return outcome{code, out.String(), errs.String()}
}

func (o outcome) want(t *testing.T, code int, texts ...string) {
	t.Helper()
	if o.code != code {
		t.Errorf("exit code %d, want %d\nstdout: %s\nstderr: %s", o.code, code, o.out, o.err)
	}
	for _, text := range texts {
		if !strings.Contains(o.out+o.err, text) {
			t.Errorf("missing %q in\nstdout: %s\nstderr: %s", text, o.out, o.err)
		}
	}
	if code != exitOK && !strings.HasPrefix(o.err, "error: ") && !strings.Contains(o.err, "\nerror: ") {
		t.Errorf("no error on stderr: %s", o.err)
	}
	if code == exitUsage && !strings.Contains(o.err, "\nhint: ") {
		t.Errorf("no hint on stderr: %s", o.err)
	}
}

// closedPort is a port of the loopback interface where nobody listens.
func closedPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

func TestHelp(t *testing.T) {
	walrelay(t, nil).want(t, exitOK, "Usage:", "Commands:", "run")
	walrelay(t, nil, "help", "slot", "create").want(t, exitOK, "--failover")
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		path := strings.Fields(c.CommandPath())[1:]
		o := walrelay(t, nil, append(path, "--help")...)
		o.want(t, exitOK, "Usage:", c.CommandPath())
		if o.err != "" {
			t.Errorf("%s --help: stderr has %s", c.CommandPath(), o.err)
		}
		if len(path) == 0 || path[0] != "completion" { // cobra's own
			if c.Short == "" || c.Long == "" || c.Example == "" {
				t.Errorf("%s: no description or no example", c.CommandPath())
			}
			for line := range strings.SplitSeq(c.Example, "\n") {
				if !strings.HasPrefix(line, "  walrelay "+strings.Join(path, " ")) {
					t.Errorf("%s: example %q is of another command", c.CommandPath(), line)
				}
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(newRoot(&process{}))
}

// Examples must at least be understood.
func TestExamplesParse(t *testing.T) {
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		for line := range strings.SplitSeq(c.Example, "\n") {
			line, _, _ = strings.Cut(line, "|")
			line, _, _ = strings.Cut(line, ">")
			words := strings.Fields(line)
			if len(words) == 0 || words[0] != "walrelay" {
				continue
			}
			root := newRoot(&process{})
			found, rest, err := root.Find(words[1:])
			if err == nil {
				err = found.ParseFlags(rest)
			}
			if err == nil && found.Args != nil {
				err = found.Args(found, found.Flags().Args())
			}
			if err != nil {
				t.Errorf("%s: %v", line, err)
			}
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(newRoot(&process{}))
}

// What the runbook tells to run can be run.
func TestRunbookCommandsParse(t *testing.T) {
	b, err := os.ReadFile("../../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, m := range regexp.MustCompile("(?m)`(walrelay [^`\n]+)`|^(walrelay .+)$").FindAllStringSubmatch(string(b), -1) {
		words := strings.Fields(m[1] + m[2])
		root := newRoot(&process{})
		found, rest, err := root.Find(words[1:])
		if err == nil {
			err = found.ParseFlags(rest)
		}
		if err == nil && found.Args != nil {
			err = found.Args(found, found.Flags().Args())
		}
		if err != nil || !found.Runnable() {
			t.Errorf("%s: %v", strings.Join(words, " "), err)
		}
		n++
	}
	if n < 10 {
		t.Errorf("only %d commands found", n)
	}
}

func TestMistakesOnTheCommandLine(t *testing.T) {
	for _, c := range []struct {
		args string
		want string
	}{
		{"rnu", "did you mean walrelay run?"},
		{"frobnicate --slot x", "the commands are"},
		{"slot lst", "did you mean walrelay slot list?"},
		{"slot frobnicate --all", "walrelay slot has no command"},
		{"help frobnicate", "has no command"},
		{"help slot frobnicate", "has no command"},
		{"completion frobnicate", ""},
		{"run --sloot x", "did you mean --slot?"},
		{"run --if-not-exists", "is a flag of walrelay slot create"},
		{"--version", "it is a command: walrelay version"},
		{"run --frobnicate", "unknown flag --frobnicate"},
		{"run -x", "unknown flag -x"},
		{"run --slot", "--slot has no value"},
		{"run extra", `does not take the argument "extra"`},
		{"slot create a b", `"b"`},
		{"slot create My-Slot", "slot name"},
		{"slot create b --slot a", "different slots"},
		{"slot list -o yaml", "error: --output: \"yaml\" is no such choice\nhint: write table or json\n"},
		{"init --partitioned year", "error: --partitioned: \"year\" is no such choice\nhint: write day, week or month\n"},
		{"init --shards many", "error: --shards: \"many\" is not valid\nhint: write a whole number\n"},
		{"slot create --timeout 5parsec", "such as 200ms"},
		{"slot create --timeout=-5s", "below zero"},
		{"slot drop", "this is no terminal"},
		{"run --ack-timeout 5parrots --window none", `error: --ack-timeout: "5parrots" is no duration`},
		{"run --ack-timeout 5parrots --window none", `error: --window: "none" is no number`},
		{"run --table a.b.c", "is no table name"},
		{`run --table "a-b`, "double quote"},
		{"run --table a-b --dsn host=h", "invalid table"},
		{"run --dsn host=h --subject {nothing}", "nothing"},
		{"init --table none --messages --role relay", `CREATE ROLE "relay" LOGIN REPLICATION`},
		{"init --publication a,b", "one publication at a time"},
		{"init --shards 1", "--shards 1: want 2 to 64"},
		{"init --table none --messages --shards 2", "leave --shards out"},
		{"slot split", "--into"},
		{"slot split a --into b,a", "name other slots"},
		{"slot split a --into B", "slot name"},
		{"init --inbox --role relay --messages", "--role, --messages is given, too"},
		{"init --inbox-table a.b.c", "more than a schema and a table"},
		{"run --config /nonexistent/walrelay.yaml", "/nonexistent/walrelay.yaml"},
	} {
		o := walrelay(t, nil, strings.Fields(c.args)...)
		t.Run(c.args, func(t *testing.T) { o.want(t, exitUsage, c.want) })
		if o.out != "" {
			t.Errorf("%s: stdout has %s", c.args, o.out)
		}
	}
}

func TestSecretsAreNeverPrinted(t *testing.T) {
	port := closedPort(t)
	for _, args := range [][]string{
		{"run", "--dsn", "postgres://u:hunter2"},
		{"run", "--dsn", "postgres://u:hunter2@h:x/d"},
		{"run", "--dsn", "host=h password='hunter2"},
		{"run", "--nats-url", "nats://u:hunter2@h:x"},
		{"run", "--nats-token", "hunter2", "--nats-creds", "x"},
		{"run", "-phunter2"},
		{"run", "--nats-pasword=hunter2"},
		{"run", "postgres://u:hunter2@h/d"},
		{"postgres://u:hunter2@h/d"},
		{"slot", "password=hunter2"},
		{"slot", "list", "--dsn", fmt.Sprintf("postgres://u:hunter2@127.0.0.1:%d/d?sslmode=disable", port)},
		{"slot", "list", "--dsn", fmt.Sprintf("host=127.0.0.1 port=%d password=hunter2 sslcert=/nonexistent sslmode=require", port)},
		{"init", "--apply", "--dsn", fmt.Sprintf("postgres://u:h@u/n#t%%er:hunter2@127.0.0.1:%d/d", port)},
	} {
		o := walrelay(t, nil, args...)
		if o.code == exitOK || strings.Contains(o.out+o.err, "hunter2") {
			t.Errorf("%q: code %d, stderr %s", args, o.code, o.err)
		}
	}
}

func TestUnreachableServers(t *testing.T) {
	dsn := fmt.Sprintf("postgres://u:p@127.0.0.1:%d/d", closedPort(t))
	for _, args := range [][]string{{"init", "--apply"}, {"slot", "create"}, {"slot", "list"}, {"slot", "drop", "--yes"}} {
		walrelay(t, []string{"WALRELAY_DSN=" + dsn}, args...).want(t, exitPrecondition, "127.0.0.1", "\nhint: ")
	}
}

func TestVersion(t *testing.T) {
	walrelay(t, nil, "version").want(t, exitOK, "walrelay ", "commit ", "go1.")
	walrelay(t, nil, "version", "-o", "json").want(t, exitOK, `"version": `, `"go": "go1.`)
}

func TestCompletion(t *testing.T) {
	walrelay(t, nil, "completion", "bash").want(t, exitOK, "walrelay")
	walrelay(t, nil, "__complete", "slot", "").want(t, exitOK, "create", "list", "drop")
	walrelay(t, nil, "__complete", "slot", "list", "-o", "").want(t, exitOK, "table", "json")
}

func TestInitPrints(t *testing.T) {
	o := walrelay(t, nil, "init", "--role", "relay", "--table", "public.outbox", "--table", `sales."Out Box"`, "--messages")
	o.want(t, exitOK, "CREATE TABLE IF NOT EXISTS", `"Out Box"`, "CREATE PUBLICATION", "CREATE ROLE", "REVOKE EXECUTE")
	o = walrelay(t, nil, "init", "--inbox", "--inbox-grant", "mailer", "--inbox-table", "mail.seen")
	o.want(t, exitOK, `CREATE TABLE IF NOT EXISTS "mail"."seen"`, `ON "mail"."seen" TO "mailer"`)
	if strings.Contains(o.out, "PUBLICATION") {
		t.Errorf("more than was asked for:\n%s", o.out)
	}
	o = walrelay(t, nil, "init")
	o.want(t, exitOK, "CREATE PUBLICATION")
	if strings.Contains(o.out, "ROLE") || strings.Contains(o.out, "REVOKE") {
		t.Errorf("more than was asked for:\n%s", o.out)
	}
}

// The strongest source is the one whose mistake is told.
func TestPrecedence(t *testing.T) {
	file := filepath.Join(t.TempDir(), "walrelay.yaml")
	if err := os.WriteFile(file, []byte("slot: FILE\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	walrelay(t, nil, "slot", "create", "--config", file).want(t, exitUsage, `:1: slot: "FILE"`)
	walrelay(t, []string{"WALRELAY_CONFIG=" + file, "WALRELAY_SLOT=ENV"}, "slot", "create").want(t, exitUsage, `WALRELAY_SLOT: "ENV"`)
	walrelay(t, []string{"WALRELAY_CONFIG=" + file, "WALRELAY_SLOT=ENV"}, "slot", "create", "--slot", "FLAG").want(t, exitUsage, `--slot: "FLAG"`)
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		code int
	}{
		{nil, exitOK},
		{&config.Error{Problems: []config.Problem{{Message: "x", Remedy: "y"}}}, exitUsage},
		{errors.New("cobra's"), exitUsage},
		{begun{errors.New("bug")}, exitUnexpected},
		{begun{&net.OpError{Op: "read", Err: io.EOF}}, exitPrecondition},
		{begun{context.DeadlineExceeded}, exitPrecondition},
		{begun{event.Fail(event.Transient, "h", "x")}, exitPrecondition},
		{begun{event.Fail(event.Unexpected, "h", "x")}, exitUnexpected},
		{begun{event.Fail(event.Usage, "h", "x")}, exitUsage},
		{begun{event.Fail(event.Precondition, "h", "x")}, exitPrecondition},
		{begun{event.Fail(event.Halted, "h", "x")}, exitHalted},
		{begun{event.Fail(event.Lost, "h", "x")}, exitLost},
		{begun{event.Fail(event.Undrained, "h", "x")}, exitUndrained},
	} {
		var w bytes.Buffer
		if got := report(&w, classify(t.Context(), c.err)); got != c.code {
			t.Errorf("%v: got %d, want %d", c.err, got, c.code)
		}
	}
}

func TestReport(t *testing.T) {
	var w bytes.Buffer
	report(&w, event.Fail(event.Precondition, "do this\nthen that", "outer: %w", errors.New("first\nsecond")))
	if want := "error: outer: first\n       second\nhint: do this\nhint: then that\n"; w.String() != want {
		t.Errorf("got %q, want %q", w.String(), want)
	}
}

func TestSignals(t *testing.T) {
	sigs := make(chan os.Signal)
	forced := make(chan struct{})
	ctx, stop := onSignal(t.Context(), sigs, func() { close(forced) })
	defer stop()
	if ctx.Err() != nil {
		t.Fatal("ended before any signal")
	}
	sigs <- os.Interrupt
	<-ctx.Done()
	select {
	case <-forced:
		t.Fatal("forced by the first signal")
	default:
	}
	if err := classify(ctx, begun{fmt.Errorf("create: %w", ctx.Err())}); !errors.Is(err, errForced) {
		t.Errorf("got %v", err)
	}
}

// What sends a signal to the process and at once to its group, as timeout(1)
// does, has asked once.
func TestSecondSignalForcesUnlessItIsAnEcho(t *testing.T) {
	for after, want := range map[time.Duration]bool{0: false, time.Millisecond: false, echo - 1: false, echo: true, time.Minute: true} {
		synctest.Test(t, func(t *testing.T) {
			sigs := make(chan os.Signal)
			forced := false
			ctx, stop := onSignal(t.Context(), sigs, func() { forced = true })
			sigs <- syscall.SIGTERM
			<-ctx.Done()
			<-time.After(after)
			sigs <- syscall.SIGTERM
			synctest.Wait()
			if forced != want {
				t.Errorf("another signal after %s: forced %t, want %t", after, forced, want)
			}
			if !forced { // it still can be
				<-time.After(echo)
				sigs <- syscall.SIGTERM
				synctest.Wait()
				if !forced {
					t.Errorf("a third signal after %s does not force", after+echo)
				}
			}
			stop()
		})
	}
}

func TestSizes(t *testing.T) {
	for n, want := range map[int64]string{0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", -2048: "-2.0 KiB", 5 << 20: "5.0 MiB", 1 << 62: "4.0 EiB"} {
		if got := size(n); got != want {
			t.Errorf("%d: got %s, want %s", n, got, want)
		}
	}
}

func TestTerminal(t *testing.T) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, v := range []any{nil, &bytes.Buffer{}, null} {
		if isTerminal(v) {
			t.Errorf("%v is taken for a terminal", v)
		}
	}
}

func TestNATSOptions(t *testing.T) {
	dir := t.TempDir()
	bad := filepath.Join(dir, "bad.pem")
	if err := os.WriteFile(bad, []byte("hunter2"), 0o600); err != nil {
		t.Fatal(err)
	}
	files, err := harness.NewTLSFiles(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	gone := filepath.Join(dir, "gone")
	for _, n := range []config.NATS{
		{Creds: gone},
		{Creds: bad},
		{NKey: gone},
		{NKey: bad},
		{TLS: config.TLS{CA: gone}},
		{TLS: config.TLS{CA: bad}},
		{TLS: config.TLS{Cert: bad, Key: bad}},
		{TLS: config.TLS{Cert: files.ClientCert, Key: gone}},
	} {
		_, err := natsOptions(&config.Config{NATS: n})
		if event.ClassOf(err) != event.Precondition || event.HintOf(err) == "" || !strings.Contains(err.Error(), dir) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%+v: got %v", n, err)
		}
	}
	for _, n := range []config.NATS{
		{},
		{User: "u", Password: config.NewSecret("p", "")},
		{Token: config.NewSecret("t", "")},
		{TLS: config.TLS{CA: files.CA, Cert: files.ClientCert, Key: files.ClientKey, First: true}},
	} {
		if _, err := natsOptions(&config.Config{NATS: n}); err != nil {
			t.Errorf("%+v: %v", n, err)
		}
	}
}

// Only at the start is a refused login a mistake to stop for.
func TestRefusedLoginsPassOnceOneHasWorked(t *testing.T) {
	for _, c := range []struct {
		code   string
		opened bool
		want   event.Class
	}{
		{"28P01", false, event.Precondition},
		{"28P01", true, event.Transient},
		{"28000", true, event.Transient},
		{"3D000", true, event.Precondition},
		{"42501", true, event.Precondition},
	} {
		o := &sourceOpener{opened: c.opened}
		err := o.patient(event.Fail(event.Precondition, "check the password", "connect: %w", &pgconn.PgError{Code: c.code}))
		if event.ClassOf(err) != c.want || !strings.HasPrefix(event.HintOf(err), "check the password") || !strings.HasPrefix(err.Error(), "connect: ") {
			t.Errorf("%+v: class %d, error %q, hint %q", c, event.ClassOf(err), err, event.HintOf(err))
		}
	}
	if err := (&sourceOpener{opened: true}).patient(nil); err != nil {
		t.Errorf("no failure became %v", err)
	}
}

func TestConnectTimeout(t *testing.T) {
	for dsn, want := range map[string]time.Duration{"host=h": connectTimeout, "host=h connect_timeout=3": 3 * time.Second} {
		pg, err := pgConfig(&config.Config{DSN: config.NewSecret(dsn, "")})
		if err != nil || pg.ConnectTimeout != want {
			t.Errorf("%s: got %v, %v; want %s", dsn, pg, err, want)
		}
	}
}

func TestFingerprint(t *testing.T) {
	base := func() *config.Config {
		return &config.Config{Publications: []string{"a", "b"}, Tables: []config.Table{{Name: "public.outbox"}, {Name: "s.t"}}, MessagePrefix: "walrelay"}
	}
	want := fingerprint(base())
	same := map[string]func(*config.Config){
		"order":    func(c *config.Config) { c.Publications[0], c.Publications[1] = "b", "a" },
		"spelling": func(c *config.Config) { c.Tables[0].Name = `"public".OUTBOX` },
		"subject":  func(c *config.Config) { c.Subject = "x" },
		"id":       func(c *config.Config) { c.Tables[1].Columns = map[string]string{"id": "id", "payload": "body"} },
		"unused":   func(c *config.Config) { c.MessagePrefix = "other" },
	}
	for name, change := range same {
		c := base()
		change(c)
		if fingerprint(c) != want {
			t.Errorf("%s changes the fingerprint", name)
		}
	}
	for name, change := range map[string]func(*config.Config){
		"publication": func(c *config.Config) { c.Publications = c.Publications[:1] },
		"table":       func(c *config.Config) { c.Tables[1].Name = "s.u" },
		"id column":   func(c *config.Config) { c.Tables[1].Columns = map[string]string{"id": "event_id"} },
		"messages":    func(c *config.Config) { c.Messages = true },
		"joined":      func(c *config.Config) { c.Publications = []string{"a\nb"} },
	} {
		c := base()
		change(c)
		if fingerprint(c) == want {
			t.Errorf("%s does not change the fingerprint", name)
		}
	}
}
