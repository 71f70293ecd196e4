package pgsession

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
)

func TestStatementsLeaveOutWhatAServerLacks(t *testing.T) {
	for major, want := range map[int]string{
		14: "SET statement_timeout = '0'; SET lock_timeout = '0'; SET idle_in_transaction_session_timeout = '0'; SET idle_session_timeout = '0'; ",
		17: "SET statement_timeout = '0'; SET transaction_timeout = '0'; SET lock_timeout = '0'; SET idle_in_transaction_session_timeout = '0'; SET idle_session_timeout = '0'; ",
	} {
		if got := statements(major, limits); got != want {
			t.Errorf("Postgres %d: got %s", major, got)
		}
	}
}

func TestMajor(t *testing.T) {
	for version, want := range map[string]int{"15.18 (Debian 15.18-0)": 15, "18beta1": 18, "17": 17, "": 0, "devel": 0} {
		if got := major(version); got != want {
			t.Errorf("%q: got %d, want %d", version, got, want)
		}
	}
}

func TestLimitsOfTheConfigurationStay(t *testing.T) {
	for dsn, want := range map[string]bool{
		"host=h":                                    false,
		"host=h statement_timeout=5s":               true,
		"host=h Statement_Timeout=5s":               true,
		"host=h options='-c statement_timeout=5s'":  true,
		"host=h options='--statement-timeout=5s'":   true,
		"host=h options='-c lock_timeout=5s'":       false,
		"host=h datestyle=german":                   false,
		"host=h options='-cSTATEMENT_TIMEOUT=5000'": true,
	} {
		conf, err := pgconn.ParseConfig(dsn)
		if err != nil {
			t.Fatal(err)
		}
		if got := names(conf, "statement_timeout"); got != want {
			t.Errorf("%s: got %t, want %t", dsn, got, want)
		}
	}
}

// A pooler refuses parameters of the startup packet that it does not know.
func TestTheStartupPacketHoldsOnlyWhatTheConfigurationAsksFor(t *testing.T) {
	conf, err := pgconn.ParseConfig("host=h application_name=a TimeZone=Asia/Tokyo DateStyle=german client_encoding=latin1 work_mem=1MB")
	if err != nil {
		t.Fatal(err)
	}
	Prepare(conf)
	var names []string
	for k := range conf.RuntimeParams {
		names = append(names, strings.ToLower(k))
	}
	if len(names) != 3 || conf.RuntimeParams["TimeZone"] != "Asia/Tokyo" {
		t.Errorf("got %v", conf.RuntimeParams)
	}
	Replication(conf)
	if len(conf.RuntimeParams) != 2 {
		t.Errorf("got %v for a replication connection", conf.RuntimeParams)
	}
}
