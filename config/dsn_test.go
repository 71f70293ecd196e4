package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestDSNKeepsPasswordsAsTheyAre(t *testing.T) {
	for _, c := range []struct{ dsn, user, password, host, db string }{
		{"postgres://u:plain@h/d", "u", "plain", "h", "d"},
		{"postgresql://u:plain@h/d", "u", "plain", "h", "d"},
		{"Postgres://u:plain@h/d", "u", "plain", "h", "d"},
		{" postgres://u:plain@h/d\n", "u", "plain", "h", "d"},
		{"postgres://u:p@ss@h/d", "u", "p@ss", "h", "d"},
		{"postgres://u:@@@h/d", "u", "@@", "h", "d"},
		{"postgres://u:p:a:s@h/d", "u", "p:a:s", "h", "d"},
		{"postgres://u:pa/ss@h/d", "u", "pa/ss", "h", "d"},
		{"postgres://u:12/34@h/d", "u", "12/34", "h", "d"},
		{"postgres://u:pa//ss/@h:5433/d", "u", "pa//ss/", "h", "d"},
		{"postgres://u:pa#ss@h/d", "u", "pa#ss", "h", "d"},
		{"postgres://u:pa?ss@h/d", "u", "pa?ss", "h", "d"},
		{"postgres://u:pa?a=b&c@h/d", "u", "pa?a=b&c", "h", "d"},
		{"postgres://u:100%@h/d", "u", "100%", "h", "d"},
		{"postgres://u:%zz@h/d", "u", "%zz", "h", "d"},
		{"postgres://u:a@b:c/d#e%f@127.0.0.1:5432/d", "u", "a@b:c/d#e%f", "127.0.0.1", "d"},
		{"postgres://u:a@b:5/c@h/d", "u", "a@b:5/c", "h", "d"},
		{"postgres://u:@:/#%@h/d?sslmode=disable", "u", "@:/#%", "h", "d"},
		{"postgres://u:p@h/x@h2:5432/d", "u", "p@h/x", "h2", "d"},
		{"postgres://u:p@ss/w@h:5432", "u", "p@ss/w", "h", ""},
		{"postgres://u:two words@h/d", "u", "two words", "h", "d"},
		{"postgres://u:it's\\@h/d", "u", "it's\\", "h", "d"},
		{"postgres://u:p%40ss@h/d", "u", "p@ss", "h", "d"},
		{"postgres://u:%2F%3A%25%23@h/d", "u", "/:%#", "h", "d"},
		{"postgres://u:a+b@h/d", "u", "a+b", "h", "d"},
		{"postgres://u@tenant:pw@h/d", "u@tenant", "pw", "h", "d"},
		{"postgres://u:pw@h/d?application_name=me@x", "u", "pw", "h", "d"},
		{"postgres://u:p@s/s@h/d?application_name=me@x", "u", "p@s/s", "h", "d"},
		{"postgres://u:päss€@h/d", "u", "päss€", "h", "d"},
		{"postgres://u:pw@[::1]:5433/d", "u", "pw", "::1", "d"},
		{"postgres://u:p@[x]w@[::1]/d", "u", "p@[x]w", "::1", "d"},
		{"postgres://u:pw@%2Fvar%2Frun/d", "u", "pw", "/var/run", "d"},
		{"postgres://h/d?user=u&password=a@b", "u", "a@b", "h", "d"},
		{"postgres://h/d?user=u&password=50%", "u", "50%", "h", "d"},
		{"postgres://u:pw@h/d?options=-c%20search_path=a", "u", "pw", "h", "d"},
		{"host=h user=u password=p@:/#%ss dbname=d", "u", "p@:/#%ss", "h", "d"},
		{"host=h user = u password='two \\'words\\\\' database=d", "u", `two 'words\`, "h", "d"},
		{"user=u password='a://b' host=h dbname=d", "u", "a://b", "h", "d"},
		{"user=u password=a\\ b host=h dbname=d", "u", "a b", "h", "d"},
	} {
		set, err := readDSN(c.dsn)
		if err == nil {
			_, err = parseDSN(set)
		}
		if err != nil {
			t.Errorf("%s: %v", c.dsn, err)
			continue
		}
		got, err := pgconn.ParseConfig(set.secret().Reveal())
		if err != nil {
			t.Errorf("%s: %v", c.dsn, err)
			continue
		}
		if got.User != c.user || got.Password != c.password || got.Host != c.host || got.Database != c.db {
			t.Errorf("%s: got user %q password %q host %q database %q", c.dsn, got.User, got.Password, got.Host, got.Database)
		}
		if s := set.secret().String(); c.password != "" && strings.Contains(s, c.password) {
			t.Errorf("%s: %s shows the password", c.dsn, s)
		}
	}
}

// Where nothing about the URL is unusual, the reading is that of pgx.
func TestDSNReadsAsPgxDoes(t *testing.T) {
	for _, dsn := range []string{
		"postgres://", "postgres://h", "postgres:///d", "postgres://u@h", "postgres://u@/d?host=/tmp",
		"postgres://u:p@h1,h2:5433/d?target_session_attrs=primary", "postgres://u:p@h1:1,h2:2,h3:3/d",
		"postgres://u:p@h/d?ssl=true", "postgres://u:p@h:5432/d?sslmode=verify-full&connect_timeout=3&search_path=a",
		"postgres://u:@h/d", "postgres://[::1]/d", "postgres://u:p@[fe80::1%25eth0]:1/d",
	} {
		want, err := pgconn.ParseConfig(dsn)
		if err != nil {
			t.Fatalf("%s: %v", dsn, err)
		}
		set, err := readDSN(dsn)
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
			continue
		}
		got, err := pgconn.ParseConfig(set.secret().Reveal())
		if err != nil {
			t.Errorf("%s: %v", dsn, err)
			continue
		}
		if got.Host != want.Host || got.Port != want.Port || got.User != want.User || got.Password != want.Password ||
			got.Database != want.Database || len(got.Fallbacks) != len(want.Fallbacks) || (got.TLSConfig == nil) != (want.TLSConfig == nil) ||
			len(got.RuntimeParams) != len(want.RuntimeParams) || got.ConnectTimeout != want.ConnectTimeout {
			t.Errorf("%s: got %+v, want %+v", dsn, got, want)
		}
		for i := range got.Fallbacks {
			if g, w := got.Fallbacks[i], want.Fallbacks[i]; g.Host != w.Host || g.Port != w.Port {
				t.Errorf("%s: fallback %d: got %s:%d, want %s:%d", dsn, i, g.Host, g.Port, w.Host, w.Port)
			}
		}
	}
}

func TestDSNMistakesNeverQuoteThePassword(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:hunter2/x@h":                        "two ways", // nothing tells password and database apart
		"postgres://u:1/hunter2@h":                        "two ways",
		"postgres://u:hunter2@x%41@h/d":                   "only in part",
		"postgres://u:hunter2%00@h/d":                     "%00",
		"postgres://u:hunter2":                            "cannot be read",
		"postgres://u:hunter2@h:port/d":                   "cannot be read",
		"postgres://u:hunter2@h:99999/d":                  "invalid port",
		"postgres://u:hunter2@h/d?sslmode=no":             "sslmode",
		"postgres://u:hunter2@h/d?x":                      "cannot be read",
		"postgres://u:hunter2@h/%zz":                      "percent escape",
		"postgres://h/d?password=hunter2&port=abc":        "invalid port",
		"mysql://u:hunter2@h/d":                           "another kind",
		"u:hunter2@h/d":                                   "neither a URL nor",
		"hunter2":                                         "neither a URL nor",
		"host=h password=hunter two":                      `no "="`,
		"host=h password='hunter2":                        "does not end",
		"host=h password=hunter2 sslmode=no":              "sslmode",
		"host=h password=two hunter2 dbname=d":            `no "="`,
		"host=h password=hunter2 target_session_attrs=no": "target_session_attrs",
		"host=h password=hunter2 sslrootcert=/nonexistent sslmode=verify-full": "/nonexistent",
		"host=h password=hunter2\x00":                                          "NUL",
		"host=h port=1,2 password=hunter2":                                     "port",
		"host=h sslpassword=hunter2 sslcert=/no":                               "TLS",
	} {
		set, err := readDSN(dsn)
		if err == nil {
			_, err = parseDSN(set)
		}
		if strings.HasSuffix(dsn, "hunter2/x@h") && err == nil {
			if set["password"] != "hunter2/x" { // the port is no number, so this is one way only
				t.Errorf("%s: got %q", dsn, set["password"])
			}
			continue
		}
		if err == nil {
			t.Errorf("%s: accepted as %s", dsn, set.secret())
			continue
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %q, want %q in it", dsn, err, want)
		}
		if m := (*mistake)(nil); !errors.As(err, &m) || strings.Contains(m.msg+m.remedy, pw) {
			t.Errorf("%s: %q shows the password", dsn, err)
		}
	}
}

func TestNATSURLs(t *testing.T) {
	for _, c := range []struct{ in, value, shown string }{
		{"h", "nats://h", "nats://h"},
		{"h:4222", "nats://h:4222", "nats://h:4222"},
		{"nats://u:p@h", "nats://u:p@h", "nats://xxxxx@h"},
		{"nats://token@h", "nats://token@h", "nats://xxxxx@h"},
		{"tls://u:a@b:c/d#e%f@h:1", "tls://u:a%40b%3Ac%2Fd%23e%25f@h:1", "tls://xxxxx@h:1"},
		{"nats://u:a%40b@h", "nats://u:a%40b@h", "nats://xxxxx@h"},
		{"a:1, u:p@b:2", "nats://a:1,nats://u:p@b:2", "nats://a:1,nats://xxxxx@b:2"},
		{"nats://[::1]:4222", "nats://[::1]:4222", "nats://[::1]:4222"},
		{"[::1]", "nats://[::1]:4222", "nats://[::1]:4222"},
		{"tls://u:p@[::1]", "tls://u:p@[::1]:4222", "tls://xxxxx@[::1]:4222"},
		{"nats://h:4222/", "nats://h:4222", "nats://h:4222"},
		{"nats://h:,[fe80::1]:1", "nats://h,nats://[fe80::1]:1", "nats://h,nats://[fe80::1]:1"},
	} {
		got, err := readNATSURLs([]string{c.in})
		if err != nil {
			t.Errorf("%s: %v", c.in, err)
			continue
		}
		if got.Reveal() != c.value || got.String() != c.shown {
			t.Errorf("%s: got %s shown as %s", c.in, got.Reveal(), got)
		}
	}
	for _, in := range []string{"", "http://u:hunter2@h", "nats://u:hunter2", "nats://u:1,hunter2@h", "nats://u:hunter2@", "nats://u:hunter2@x%41@h", "nats://u:hunter2@h:x"} {
		got, err := readNATSURLs([]string{in})
		if err == nil {
			t.Errorf("%s: accepted as %s", in, got)
			continue
		}
		if m := (*mistake)(nil); !errors.As(err, &m) || strings.Contains(m.msg+m.remedy, pw) {
			t.Errorf("%s: %q shows the password", in, err)
		}
	}
}

func TestNATSURLMistakesNameTheRightSpelling(t *testing.T) {
	for in, want := range map[string]string{
		"nats://::1:4222":            "write nats://[::1]:4222",
		"::1":                        "write nats://[::1]:4222",
		"tls://u:hunter2@fe80::1:99": "write tls://[fe80::1:99]:4222",
		"2001:db8::7:4223":           "write nats://[2001:db8::7]:4223",
		"1:2:3:4:5:6:7:8:80":         "write nats://[1:2:3:4:5:6:7:8]:80",
		"ws://u:hunter2@h:8080":      "write nats://host:4222",
		"wss://h":                    "write tls://host:4222",
		"http://h:4222":              "write nats://host:4222",
		"natz://h":                   "write nats://host:4222",
		"h:1, ws://h":                "write nats://host:4222",
		"h:70000":                    "write nats://host:4222",
		"h:0":                        "write nats://host:4222",
		"nats:h:4222":                "write nats://host:4222",
		"nats://h/4222":              "write nats://host:4222",
		"nats://[::1:4222":           "write nats://[::1]:4222",
		"nats://[h]:4222":            "write nats://[::1]:4222",
		"nats://:4222":               "write nats://host:4222",
		"nats://":                    "write nats://host:4222",
	} {
		got, err := readNATSURLs([]string{in})
		var m *mistake
		if !errors.As(err, &m) {
			t.Errorf("%s: got %v, %v", in, got, err)
			continue
		}
		if !strings.HasPrefix(m.remedy, want) || strings.Contains(m.msg+m.remedy, pw) {
			t.Errorf("%s: the remedy is %q, want %q", in, m.remedy, want)
		}
	}
}

func FuzzDSN(f *testing.F) {
	for _, s := range []string{"postgres://u:a@b:c/d#e%f@h:1/d?x=y", "host=h password='x'", "postgres://[::1", "password=a\\"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		set, err := readDSN(s)
		if err != nil {
			return
		}
		again, err := readDSN(set.secret().Reveal())
		if err != nil {
			t.Fatalf("%q: wrote %q, which cannot be read: %v", s, set.secret().Reveal(), err)
		}
		for k, v := range set {
			if again[k] != v {
				t.Fatalf("%q: %s was %q and is %q", s, k, v, again[k])
			}
		}
	})
}
