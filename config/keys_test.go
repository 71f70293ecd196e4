package config

import (
	"errors"
	"slices"
	"strings"
	"testing"
)

func TestServerSettingsAreInOrder(t *testing.T) {
	if !slices.IsSorted(serverSettings) {
		t.Error("serverSettings is not sorted, which its search relies on")
	}
}

func TestKeywordsOfTheConnectionString(t *testing.T) {
	const refuse = "postgres://u:hunter2@h/d?"
	for _, c := range []struct{ dsn, err, remedy, warning string }{
		{dsn: refuse + "application_name=a&search_path=b&statement_timeout=5s&TimeZone=UTC&my.setting=1&options=-c%20work_mem=1MB"},
		{dsn: refuse + "gssencmode=disable&load_balance_hosts=disable&sslcompression=0&keepalives=1&requirepeer="},
		{dsn: refuse + "channel_binding=require&require_auth=scram-sha-256&target_session_attrs=read-write"},
		{dsn: refuse + "ssl_min_protocol_version=TLSv1.3&ssl_max_protocol_version=tlsv1.3&hostaddr=127.0.0.1&fallback_application_name=x"},
		{dsn: refuse + "keepalives=1&keepalives_idle=30&keepalives_interval=5&keepalives_count=3&tcp_user_timeout=9", warning: "keepalives_count, keepalives_idle, keepalives_interval, tcp_user_timeout"},
		{dsn: "host=h password=hunter2 load_balance_hosts=random gssencmode=prefer replication=database", warning: "load_balance_hosts, replication"},
		{dsn: refuse + "gssencmode=require", err: "gssencmode", remedy: "sslmode=verify-full"},
		{dsn: refuse + "sslcrl=/x", err: "sslcrl", remedy: "sslrootcert"},
		{dsn: refuse + "sslcrldir=/x", err: "sslcrldir", remedy: "sslrootcert"},
		{dsn: refuse + "requirepeer=postgres", err: "requirepeer", remedy: "leave it out"},
		{dsn: refuse + "ssl_min_protocol_version=TLSv9", err: "ssl_min_protocol_version", remedy: "TLSv1.2"},
		{dsn: refuse + "ssl_min_protocol_version=TLSv1.3&ssl_max_protocol_version=TLSv1.2", err: "above", remedy: "TLSv1.3"},
		{dsn: refuse + "scram_client_key=hunter2", err: "scram_client_key", remedy: "PGPASSWORD"},
		{dsn: refuse + "oauth_client_secret=hunter2", err: "oauth_client_secret", remedy: "OAuth"},
		{dsn: refuse + "channel_binding=maybe", err: "channel_binding"},
		{dsn: refuse + "require_auth=telepathy", err: "require_auth"},
		{dsn: refuse + "schema=public", err: `"schema"`, remedy: "search_path"},
		{dsn: refuse + "currentSchema=public", err: `"currentSchema"`, remedy: "search_path"},
		{dsn: refuse + "pgbouncer=true", err: `"pgbouncer"`, remedy: "leave it out"},
		{dsn: refuse + "connection_limit=1", err: `"connection_limit"`, remedy: "leave it out"},
		{dsn: refuse + "pool_max_conns=10", err: `"pool_max_conns"`, remedy: "leave it out"},
		{dsn: refuse + "sslaccept=strict", err: `"sslaccept"`, remedy: "sslmode"},
		{dsn: refuse + "sslmod=require", err: `"sslmod"`, remedy: "did you mean sslmode?"},
		{dsn: refuse + "serch_path=a", err: `"serch_path"`, remedy: "did you mean search_path?"},
		{dsn: refuse + "SSLMODE=require", err: `"SSLMODE"`, remedy: "did you mean sslmode?"},
		{dsn: refuse + "shared_buffers=1GB", err: `"shared_buffers"`},
		{dsn: "host=h nonsense=hunter2 password=x", err: `"nonsense"`, remedy: "options="},
		// What follows a password without quotes may be a part of it.
		{dsn: "host=h password=two hunter2=x dbname=d", err: "after its password", remedy: "single quotes"},
		{dsn: "postgres://h/d?user=u&password=a&hunter2=x", err: "after its password", remedy: "%26"},
	} {
		got, err := load(t, "", nil, "--dsn", c.dsn)
		if c.err == "" {
			switch {
			case err != nil:
				t.Errorf("%s: %v", c.dsn, err)
			case c.warning == "" && len(got.Warnings) > 0 || c.warning != "" && (len(got.Warnings) != 1 || !strings.HasSuffix(got.Warnings[0], ": "+c.warning)):
				t.Errorf("%s: warned %q, want %q", c.dsn, got.Warnings, c.warning)
			}
			continue
		}
		var e *Error
		if !errors.As(err, &e) || len(e.Problems) != 1 {
			t.Errorf("%s: got %v", c.dsn, err)
			continue
		}
		p := e.Problems[0]
		if !strings.Contains(p.Message, c.err) || !strings.Contains(p.Remedy, c.remedy) || p.Source != "--dsn" {
			t.Errorf("%s: got %s, remedy %s", c.dsn, p, p.Remedy)
		}
		if strings.Contains(p.Message+p.Remedy, pw) {
			t.Errorf("%s: %s shows a secret", c.dsn, p)
		}
	}
}

func TestKeywordsOfVariablesAndFile(t *testing.T) {
	for _, env := range []string{"PGGSSENCMODE=require", "PGSSLCRL=/x", "PGREQUIREPEER=postgres", "PGSSLMINPROTOCOLVERSION=x"} {
		if c, err := load(t, "", []string{"PGHOST=h", env}); err == nil {
			t.Errorf("%s: accepted as %s", env, c)
		}
	}
	c := mustLoad(t, "", []string{"PGHOST=h", "PGLOADBALANCEHOSTS=random", "PGSSLMINPROTOCOLVERSION=TLSv1.3"})
	if len(c.Warnings) != 1 || !strings.Contains(c.DSN.Reveal(), "ssl_min_protocol_version=TLSv1.3") || c.Unnamed {
		t.Errorf("got %v, DSN %s, unnamed %t", c.Warnings, c.DSN.Reveal(), c.Unnamed)
	}
	if c := mustLoad(t, "dsn: host=f gssencmode=require\n", []string{"PGGSSENCMODE=disable"}); len(c.Warnings) > 0 {
		t.Errorf("PGGSSENCMODE over file: got %v", c.Warnings)
	}
	if _, err := load(t, "dsn: host=f schema=public\n", nil); err == nil || !strings.Contains(err.Error(), `"schema"`) {
		t.Errorf("file: got %v", err)
	}
}

func TestWhatNamesAServer(t *testing.T) {
	for _, c := range []struct {
		dsn, env string
		unnamed  bool
	}{
		{"", "", true},
		{"postgres://", "", true},
		{"sslmode=disable", "", true},
		{"", "PGPASSWORD=x", true},
		{"", "PGHOST=", true},
		{"", "PGHOST=h", false},
		{"", "PGDATABASE=d", false},
		{"", "PGUSER=u", false},
		{"", "PGPORT=5433", false},
		{"", "PGHOSTADDR=127.0.0.1", false},
		{"postgres:///d", "", false},
		{"user=u", "", false},
		{"hostaddr=127.0.0.1", "", false},
	} {
		cfg := mustLoad(t, "", []string{c.env}, "--dsn", c.dsn)
		if cfg.Unnamed != c.unnamed {
			t.Errorf("%q and %q: unnamed is %t", c.dsn, c.env, cfg.Unnamed)
		}
	}
}
