package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// load runs flags, environment and file through Load. A file is written when
// its text is not empty, and named by --config.
func load(t *testing.T, file string, env []string, args ...string) (*Config, error) {
	t.Helper()
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(fs, Groups...)
	if file != "" {
		name := filepath.Join(t.TempDir(), "walrelay.yaml")
		if err := os.WriteFile(name, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", name)
	}
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return Load(fs, env)
}

func mustLoad(t *testing.T, file string, env []string, args ...string) *Config {
	t.Helper()
	c, err := load(t, file, env, args...)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDefaults(t *testing.T) {
	got := mustLoad(t, "", nil)
	want := &Config{
		Unnamed:      true,
		NATS:         NATS{URL: NewSecret("nats://127.0.0.1:4222", "nats://127.0.0.1:4222"), Sync: SyncUnknown},
		Slot:         "walrelay",
		Publications: []string{"walrelay"}, Tables: []Table{{Name: "public.outbox"}}, MessagePrefix: "walrelay",
		Route:    Route{By: "aggregate_type"},
		Stream:   Stream{Name: "OUTBOX", PublishMode: PublishAuto, Replicas: 1, DeadLetters: "OUTBOX_DLQ", CheckpointBucket: "walrelay"},
		OnPoison: Park, MaxParkedInRow: 100,
		Window: 4096, WindowBytes: 16 << 20, AckTimeout: 2 * time.Second, DrainTimeout: 10 * time.Second, StatusInterval: time.Second,
		Backoff: Backoff{100 * time.Millisecond, 10 * time.Second}, Prune: Prune{Every: 10 * time.Minute}, Log: Log{Level: slog.LevelInfo, Format: LogAuto},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %v\nwant %v", got, want)
	}
}

// Every option is set in the file, in the environment and by a flag, and the
// stronger wins.
func TestPrecedence(t *testing.T) {
	values := func(o *option) [3]string {
		switch {
		case o.name == "dsn":
			return [3]string{"host=f", "host=e", "host=c"}
		case o.name == "nats-url":
			return [3]string{"nats://f", "nats://e", "nats://c"}
		case o.name == "log-level":
			return [3]string{"debug", "warn", "error"}
		case o.name == "log-format":
			return [3]string{"auto", "json", "text"}
		case o.name == "on-poison":
			return [3]string{"park", "park-aggregate", "halt"}
		case o.name == "publish-mode":
			return [3]string{"chain", "sparse", "atomic"}
		case o.name == "nats-sync":
			return [3]string{"unknown", "interval", "always"}
		case o.name == "route-by":
			return [3]string{"aggregate_id", "event_type", "aggregate_type"}
		case o.name == "type-subject":
			return [3]string{"f=a", "order/e=b", "c/*=c.{event_type}"}
		case o.name == "http-addr":
			return [3]string{"f:1", "e:2", "c:3"}
		case o.name == "wal-sender-timeout", o.name == "backoff-max":
			return [3]string{"1m", "2m", "3m"}
		case o.arg == "age":
			return [3]string{"1d", "2d", "3d12h"}
		case o.arg == "duration":
			return [3]string{"1s", "2s", "3s"}
		case o.arg == "size":
			return [3]string{"1MiB", "2MiB", "3MiB"}
		case o.arg == "n":
			return [3]string{"1", "2", "3"}
		case o.arg == "":
			return [3]string{"true", "false", "true"}
		}
		return [3]string{"f_", "e_", "c_"}
	}
	for _, o := range options {
		if o.path == "" {
			continue
		}
		t.Run(o.name, func(t *testing.T) {
			v := values(o)
			parts := strings.Split(o.path, ".")
			file := ""
			for i, p := range parts {
				file += strings.Repeat("  ", i) + p + ":"
				if i < len(parts)-1 {
					file += "\n"
				}
			}
			file += " " + v[0] + "\n"
			// What stands alone is a mistake for some options; it is given beside.
			var rest []string
			switch o.name {
			case "nats-password":
				rest = []string{"--nats-user=u"}
			case "nats-tls-cert":
				rest = []string{"--nats-tls-key=k"}
			case "nats-tls-key":
				rest = []string{"--nats-tls-cert=k"}
			case "cloudevents-source":
				rest = []string{"--cloudevents"}
			case "pprof":
				rest = []string{"--http-addr=9187"}
			}
			want := func(text string) *Config {
				c := mustLoad(t, "", nil, append(rest, "--"+o.name+"="+text)...)
				return c
			}
			env := []string{o.env() + "=" + v[1]}
			if got := mustLoad(t, file, nil, rest...); !reflect.DeepEqual(got, want(v[0])) {
				t.Errorf("file: got %v, want %v", got, want(v[0]))
			}
			if got := mustLoad(t, file, env, rest...); !reflect.DeepEqual(got, want(v[1])) {
				t.Errorf("variable over file: got %v, want %v", got, want(v[1]))
			}
			if got := mustLoad(t, file, env, append(rest, "--"+o.name+"="+v[2])...); !reflect.DeepEqual(got, want(v[2])) {
				t.Errorf("flag over variable: got %v, want %v", got, want(v[2]))
			}
			if got := mustLoad(t, file, []string{o.env() + "="}, rest...); !reflect.DeepEqual(got, want(v[0])) {
				t.Errorf("empty variable: got %v, want %v", got, want(v[0]))
			}
		})
	}
}

func TestOtherToolsVariables(t *testing.T) {
	file := "dsn: host=f dbname=f password=f\nnats:\n  url: nats://f\n"
	c := mustLoad(t, file, []string{"NATS_URL=nats://n"})
	if got := c.NATS.URL.Reveal(); got != "nats://n" {
		t.Errorf("NATS_URL over file: got %s", got)
	}
	c = mustLoad(t, file, []string{"NATS_URL=nats://n", "WALRELAY_NATS_URL=nats://e"})
	if got := c.NATS.URL.Reveal(); got != "nats://e" {
		t.Errorf("WALRELAY_NATS_URL over NATS_URL: got %s", got)
	}
	c = mustLoad(t, file, []string{"PGHOST=p", "PGPASSWORD=p"})
	if got := c.DSN.Reveal(); got != "dbname=f" {
		t.Errorf("PG* over file: got %s", got)
	}
	c = mustLoad(t, file, []string{"PGHOST=p", "WALRELAY_DSN=postgres://e/e"})
	if got := c.DSN.Reveal(); got != "host=e dbname=e" {
		t.Errorf("WALRELAY_DSN over PG*: got %s", got)
	}
}

func TestConfigByVariable(t *testing.T) {
	name := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(name, []byte("slot: a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if c := mustLoad(t, "", []string{"WALRELAY_CONFIG=" + name}); c.Slot != "a" {
		t.Errorf("got slot %q", c.Slot)
	}
	if c := mustLoad(t, "slot: b\n", []string{"WALRELAY_CONFIG=" + name}); c.Slot != "b" {
		t.Errorf("--config over WALRELAY_CONFIG: got slot %q", c.Slot)
	}
}

func TestTables(t *testing.T) {
	want := []Table{
		{Name: "public.outbox"},
		{Name: `sales."Out,Box"`, Preset: "debezium", Columns: map[string]string{"id": "event_id", "headers": ""}, Subject: "s.{event_type}", HeaderColumns: []HeaderColumn{{"tenant", "X-Tenant"}, {"A:b", ""}}},
	}
	for name, c := range map[string]*Config{
		"flags":    mustLoad(t, "", nil, "--table", "public.outbox", "--table", `sales."Out,Box",preset=debezium,id=event_id,headers=,subject=s.{event_type},header=tenant:X-Tenant,header="A:b"`),
		"variable": mustLoad(t, "", []string{`WALRELAY_TABLE=public.outbox; sales."Out,Box",preset=debezium,id=event_id,headers=,subject=s.{event_type},header=tenant:X-Tenant,header="A:b"`}),
		"file": mustLoad(t, `
tables:
  - public.outbox
  - name: sales."Out,Box"
    preset: debezium
    subject: s.{event_type}
    columns:
      id: event_id
      headers: ""
    header_columns: [tenant:X-Tenant, '"A:b"']
`, nil),
	} {
		if !reflect.DeepEqual(c.Tables, want) {
			t.Errorf("%s: got %+v", name, c.Tables)
		}
	}
	for name, c := range map[string]*Config{
		"flag": mustLoad(t, "", nil, "--table", "none", "--messages"),
		"file": mustLoad(t, "tables: []\nmessages: true\n", nil),
	} {
		if len(c.Tables) != 0 || !c.Messages {
			t.Errorf("%s: got %+v", name, c)
		}
	}
}

func TestTypesAndHeaderColumns(t *testing.T) {
	subjects := []TypeSubject{{"", "paid", "money.{aggregate_id}"}, {"order", "", "o=1.{event_type}"}, {"order", "made", "x"}}
	columns := []HeaderColumn{{"tenant", "X-Tenant"}, {"region", ""}}
	for name, c := range map[string]*Config{
		"flags": mustLoad(t, "", nil, "--type-subject", "paid=money.{aggregate_id}", "--type-subject", "order/*=o=1.{event_type}",
			"--type-subject", "order/made=x", "--header-column", "tenant:X-Tenant", "--header-column", "region"),
		"variables": mustLoad(t, "", []string{
			"WALRELAY_TYPE_SUBJECT=paid=money.{aggregate_id}; order/*=o=1.{event_type}; order/made=x", "WALRELAY_HEADER_COLUMN=tenant:X-Tenant, region",
		}),
		"file": mustLoad(t, "type_subjects: ['paid=money.{aggregate_id}', 'order/*=o=1.{event_type}', order/made=x]\nheader_columns: [tenant:X-Tenant, region]\n", nil),
	} {
		if !reflect.DeepEqual(c.TypeSubjects, subjects) || !reflect.DeepEqual(c.HeaderColumns, columns) {
			t.Errorf("%s: got %+v and %+v", name, c.TypeSubjects, c.HeaderColumns)
		}
	}
	for _, bad := range [][]string{
		{"--type-subject", "paid"},
		{"--type-subject", "*/*=a"},
		{"--type-subject", "/x=a"},
		{"--type-subject", "x="},
		{"--type-subject", "x=a b"},
		{"--header-column", ":x"},
		{"--header-column", "a:"},
		{"--header-column", "a:b:c"},
		{"--cloudevents-source", "/x"},
	} {
		if _, err := load(t, "", nil, bad...); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestPublications(t *testing.T) {
	for name, c := range map[string]*Config{
		"flags":     mustLoad(t, "", nil, "--publication", "a", "--publication", `"My, ""Pub"""`),
		"one flag":  mustLoad(t, "", nil, "--publication", `a,"My, ""Pub"""`),
		"variable":  mustLoad(t, "", []string{`WALRELAY_PUBLICATION=a, "My, ""Pub"""`}),
		"file list": mustLoad(t, "publications:\n  - a\n  - 'My, \"Pub\"'\n", nil),
	} {
		if want := []string{"a", `My, "Pub"`}; !reflect.DeepEqual(c.Publications, want) {
			t.Errorf("%s: got %q", name, c.Publications)
		}
	}
}

func TestFirstPauseFollowsTheLongest(t *testing.T) {
	for name, c := range map[string]*Config{
		"flag":     mustLoad(t, "", nil, "--backoff-max", "50ms"),
		"variable": mustLoad(t, "", []string{"WALRELAY_BACKOFF_MAX=50ms"}),
		"file":     mustLoad(t, "backoff:\n  max: 50ms\n", nil),
	} {
		if want := (Backoff{50 * time.Millisecond, 50 * time.Millisecond}); c.Backoff != want {
			t.Errorf("%s: got %v, want %v", name, c.Backoff, want)
		}
	}
	if _, err := load(t, "backoff:\n  min: 100ms\n", nil, "--backoff-max", "50ms"); err == nil {
		t.Error("a minimum above the maximum is accepted")
	}
}

func problems(t *testing.T, err error) []Problem {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("got %v, want mistakes", err)
	}
	return e.Problems
}

func TestAllMistakesAtOnce(t *testing.T) {
	_, err := load(t, "ack_timeout: 5 parrots\nwindo: 3\nstream:\n  nam: X\nlog: debug\n",
		[]string{"WALRELAY_WINDOW=many", "WALRELAY_STREM=X", "WALRELAY_PORT=tcp://1.2.3.4:80", "WALRELAY_SERVICE_HOST=1"},
		"--slot", "My-Slot", "--on-poison", "ignore", "--backoff-min", "1m", "--nats-token=a", "--nats-user=b")
	var all []string
	for _, p := range problems(t, err) {
		if p.Remedy == "" {
			t.Errorf("%s: no remedy", p)
		}
		all = append(all, p.String()+" | "+p.Remedy)
	}
	text := strings.Join(all, "\n")
	for _, want := range []string{
		`walrelay.yaml:1: ack_timeout: "5 parrots" is no duration | write a number with its unit, such as 200ms, 5s or 1m30s`,
		`walrelay.yaml:2: windo: is no key of the configuration | did you mean window?`,
		`walrelay.yaml:4: stream.nam: is no key of the configuration | did you mean stream.name?`,
		`walrelay.yaml:5: log: is no mapping | write its keys below it, such as log.level, log.format`,
		`WALRELAY_WINDOW: "many" is no number in range`,
		`WALRELAY_STREM: is no variable of walrelay | did you mean WALRELAY_STREAM?`,
		`--slot: "My-Slot" is no slot name`,
		`--on-poison: "ignore" is no such choice | write park, park-aggregate or halt`,
		`--backoff-min: the first pause`,
		`--nats-token, --nats-user: more than one way`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("missing %q in\n%s", want, text)
		}
	}
	if len(all) != 10 {
		t.Errorf("got %d mistakes, want 10:\n%s", len(all), text)
	}
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct {
		file string
		args []string
		want string
	}{
		{args: []string{"--table", "none"}, want: "nothing to relay"},
		{args: []string{"--table", "none;a.b"}, want: "tables and none"},
		{args: []string{"--table", "a.b;a.b"}, want: "a.b twice"},
		{args: []string{"--table", "a.b.c"}, want: "is no table name"},
		{args: []string{"--table", "a.b,idd=x"}, want: "unknown key idd"},
		{args: []string{"--table", "a.b,c.d"}, want: "no key=value"},
		{args: []string{"--table", "a.b,id="}, want: "no value for id"},
		{args: []string{"--table", "a.b,preset=debezum"}, want: "unknown preset"},
		{args: []string{"--table", `a."b`}, want: "double quote"},
		{args: []string{"--publication", "a,a"}, want: "twice"},
		{args: []string{"--publication", ""}, want: "empty publication"},
		{args: []string{"--stream", "a.b"}, want: "is no stream name"},
		{args: []string{"--stream", "A", "--dead-letter-stream", "A"}, want: "dead letters"},
		{args: []string{"--stream-replicas", "7"}, want: "from 1 to 5"},
		{args: []string{"--window", "0"}, want: "from 1 to"},
		{args: []string{"--window-bytes", "1KiB"}, want: "too small"},
		{args: []string{"--window-bytes", "99999999999999999999"}, want: "size"},
		{args: []string{"--window-bytes", "5parsec"}, want: "size"},
		{args: []string{"--ack-timeout", "5"}, want: "is no duration"},
		{args: []string{"--ack-timeout", "-1s"}, want: "too short"},
		{args: []string{"--wal-sender-timeout", "1s"}, want: "wal_sender_timeout"},
		{args: []string{"--subject", "a b"}, want: "subject template"},
		{args: []string{"--messages=maybe"}, want: "neither true nor false"},
		{args: []string{"--messages", "--message-prefix="}, want: "prefix"},
		{args: []string{"--http-addr", "http"}, want: "is no address"},
		{args: []string{"--pprof"}, want: "without an address"},
		{args: []string{"--log-level", "loud"}, want: "log level"},
		{args: []string{"--nats-tls-cert", "x"}, want: "both certificate and key"},
		{args: []string{"--nats-password", "x"}, want: "without a user"},
		{args: []string{"--config", "/nonexistent/x.yaml"}, want: "/nonexistent/x.yaml"},
		{file: "slot: [a", want: "is not YAML at line"},
		{file: "slot: a\nslot: b\n", want: "is there twice"},
		{file: "slot: a\n---\nslot: b\n", want: "more than one document"},
		{file: "slot: [a, b]\n", want: "not a single value"},
		{file: "- a\n", want: "is no mapping"},
		{file: "publications: [{a: b}]\n", want: "something else than text"},
		{file: "publications: []\n", want: "empty list"},
		{file: "tables: [{nam: a.b}]\n", want: "unknown key nam"},
		{file: "tables: [{preset: debezium}]\n", want: "no table name"},
		{file: "tables: [{name: a.b, columns: {idd: x}}]\n", want: "unknown key idd"},
		{file: "tables: [[a]]\n", want: "neither text nor mapping"},
		{file: "accept_gap: true\n", want: "it is a flag only, --accept-gap"},
		{file: "nats-url: x\n", want: "did you mean nats.url?"},
	} {
		_, err := load(t, c.file, nil, c.args...)
		if err == nil {
			t.Errorf("%q %q: accepted", c.file, c.args)
			continue
		}
		ps := problems(t, err)
		if text := ps[0].String() + " | " + ps[0].Remedy; !strings.Contains(text, c.want) {
			t.Errorf("%q %q: got %q, want %q in it", c.file, c.args, text, c.want)
		}
	}
}

// A file may be shared by commands: keys that a command has no flag for are known, and not judged.
func TestOptionsOfOtherCommandsAreLetBe(t *testing.T) {
	name := filepath.Join(t.TempDir(), "c.yaml")
	if err := os.WriteFile(name, []byte("window: nonsense\nslot: a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
	AddFlags(fs, General, Slot)
	if err := fs.Parse([]string{"--config", name}); err != nil {
		t.Fatal(err)
	}
	c, err := Load(fs, []string{"WALRELAY_WINDOW=x", "WALRELAY_DSN=mysql://"})
	if err != nil || c.Slot != "a" {
		t.Errorf("got %v, %v", c, err)
	}
}

const pw = "hunter2"

// Every way to print a configuration, for every option that holds a secret.
func TestSecretsNeverPrint(t *testing.T) {
	for _, args := range [][]string{
		{"--dsn", "postgres://u:hunter2@h/d"},
		{"--dsn", "host=h password=hunter2 sslpassword=hunter2"},
		{"--nats-url", "nats://u:hunter2@h,nats://hunter2@h2"},
		{"--nats-user", "u", "--nats-password", pw},
		{"--nats-token", pw},
	} {
		c := mustLoad(t, "", nil, args...)
		var log bytes.Buffer
		for _, h := range []slog.Handler{slog.NewTextHandler(&log, nil), slog.NewJSONHandler(&log, nil)} {
			slog.New(h).Info("x", "config", c, "value", *c, "dsn", c.DSN, "url", c.NATS.URL, "nats", c.NATS)
		}
		js, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		all := c.String() + log.String() + string(js)
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
			all += fmt.Sprintf(verb+verb+verb, c, *c, c.NATS) + fmt.Sprintf(verb+verb, c.DSN, &c.NATS.Token)
		}
		if strings.Contains(all, pw) || strings.Contains(all, fmt.Sprintf("%x", pw)) {
			t.Errorf("%v: a secret is printed in\n%s", args, all)
		}
	}
}

// A mistake about a secret option, or beside one, quotes no secret, wherever it is set.
func TestSecretsNeverInMistakes(t *testing.T) {
	for _, bad := range []struct{ name, value string }{
		{"dsn", "postgres://u:hunter2"},
		{"dsn", "postgres://u:hunter2@h:x/d"},
		{"dsn", "mysql://u:hunter2@h/d"},
		{"dsn", "password=hunter2 sslmode=x"},
		{"dsn", "password='hunter2"},
		{"nats-url", "http://u:hunter2@h"},
		{"nats-url", "nats://u:hunter2@h:x"},
		{"nats-url", "nats://u:hunter2"},
		{"nats-password", pw},
		{"nats-token", pw},
	} {
		var o *option
		for _, each := range options {
			if each.name == bad.name {
				o = each
			}
		}
		key := o.path
		file := ""
		if section, rest, ok := strings.Cut(key, "."); ok {
			file, key = section+":\n  ", rest
		}
		file += key + ": " + fmt.Sprintf("%q", bad.value) + "\n"
		beside := []string{"--nats-creds=x", "--window=x"} // so that each has a mistake
		for from, try := range map[string]func() error{
			"flag":     func() error { _, err := load(t, "", nil, append(beside, "--"+bad.name, bad.value)...); return err },
			"variable": func() error { _, err := load(t, "", []string{o.env() + "=" + bad.value}, beside...); return err },
			"file":     func() error { _, err := load(t, file, nil, beside...); return err },
			"bad file": func() error { _, err := load(t, file+"slot: ]["+bad.value, nil, beside...); return err },
			"bad value": func() error {
				_, err := load(t, strings.Replace(file, ": \"", ": [\"", 1)+"]", nil, beside...)
				return err
			},
		} {
			err := try()
			for _, p := range problems(t, err) {
				if strings.Contains(p.Source+p.Message+p.Remedy, pw) {
					t.Errorf("%s by %s: %+v shows the secret", bad.name, from, p)
				}
			}
			if strings.Contains(fmt.Sprintf("%v %+v", err, err), pw) {
				t.Errorf("%s by %s: %v shows the secret", bad.name, from, err)
			}
		}
	}
}

func TestTableOfOptionsIsComplete(t *testing.T) {
	md := Markdown()
	seen := map[string]bool{}
	for _, o := range options {
		for _, key := range []string{o.name, o.path} {
			if seen[key] && key != "" && key != o.path {
				t.Errorf("%s is there twice", key)
			}
			seen[key] = true
		}
		if o.help == "" || o.group == "" || o.set == nil {
			t.Errorf("%s: half an option", o.name)
		}
		if strings.ContainsAny(o.help, "|\n") {
			t.Errorf("%s: its help does not fit into a table", o.name)
		}
		if !strings.Contains(md, "`--"+o.name+"`") {
			t.Errorf("%s is not in the table", o.name)
		}
		if o.arg == "" && o.def != "false" {
			t.Errorf("%s: a switch is off by default", o.name)
		}
	}
}

func TestNearest(t *testing.T) {
	names := []string{"slot", "stream", "subject", "nats-url"}
	for word, want := range map[string]string{"strem": "stream", "sloot": "slot", "slto": "slot", "nats-ulr": "nats-url", "banana": "", "x": "", "": ""} {
		if got := Nearest(word, names); got != want {
			t.Errorf("%s: got %q, want %q", word, got, want)
		}
	}
}
