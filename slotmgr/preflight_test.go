package slotmgr

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestPreflight(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t,
		outboxTable,
		`create schema "My Schema"`,
		`create table "My Schema"."Out Box" (id uuid, payload jsonb)`,
		"create table parted (id uuid, at date) partition by range (at)",
		"create table parted_1 partition of parted for values from ('2026-01-01') to ('2027-01-01')",
		"create unlogged table unlogged (id uuid)",
		"create view seen as select 1",
		"create publication good for table outbox with (publish = 'insert')",
		`create publication "Mixed Case" for table "My Schema"."Out Box"`,
		"create publication everything for all tables",
		"create publication leaves for table parted",
		"create publication root for table parted with (publish_via_partition_root = true)",
		"create publication updates for table outbox with (publish = 'update')",
		"create role relay login replication",
		"create role plain login",
		"create role rds_replication",
		"create role managed login in role rds_replication",
		"create database other",
		"select pg_create_physical_replication_slot('physical')",
	)
	admin := connect(t, pg.DSN("postgres"))
	relay := connect(t, pg.DSNFor("postgres", "relay", ""))
	plain := connect(t, pg.DSNFor("postgres", "plain", ""))
	managed := connect(t, pg.DSNFor("postgres", "managed", ""))
	mustCreate(t, relay, CreateOptions{Name: "orders", Publications: []string{"good"}})
	mustCreate(t, connect(t, pg.DSN("other")), CreateOptions{Name: "elsewhere"})
	outbox := []Table{{"public", "outbox"}}

	type expect struct {
		name         string
		level        Level
		text, remedy string
	}
	type preflightCase struct {
		conn *pgx.Conn
		want Want
		expect
	}
	cases := map[string]preflightCase{
		"all good":            {relay, Want{Slot: "orders", Publications: []string{"good"}, Tables: outbox}, expect{}},
		"no slot wanted":      {relay, Want{Publications: []string{"good"}, Tables: outbox}, expect{}},
		"quoted names":        {relay, Want{Publications: []string{"Mixed Case"}, Tables: []Table{{"My Schema", "Out Box"}}}, expect{}},
		"for all tables":      {relay, Want{Publications: []string{"everything"}, Tables: outbox}, expect{}},
		"partition root":      {relay, Want{Publications: []string{"root"}, Tables: []Table{{"public", "parted"}}}, expect{}},
		"second publication":  {relay, Want{Publications: []string{"root", "good"}, Tables: outbox}, expect{}},
		"plain role":          {plain, Want{}, expect{"role", FAIL, `"plain" lacks REPLICATION`, `ALTER ROLE "plain" REPLICATION`}},
		"managed role":        {managed, Want{}, expect{"role", WARN, "rds_replication", `ALTER ROLE "managed"`}},
		"publication missing": {relay, Want{Publications: []string{"nope"}}, expect{"publication", FAIL, `"nope" does not exist`, "walrelay init --apply"}},
		"no inserts":          {relay, Want{Publications: []string{"updates"}}, expect{"publication", FAIL, "does not publish inserts", `ALTER PUBLICATION "updates" SET (publish = 'insert')`}},
		"table missing":       {relay, Want{Publications: []string{"good"}, Tables: []Table{{"public", "nope"}}}, expect{"table", FAIL, `"public"."nope" does not exist`, "--table"}},
		"not a table":         {relay, Want{Publications: []string{"good"}, Tables: []Table{{"public", "seen"}}}, expect{"table", FAIL, "not a table", "--table"}},
		"unlogged":            {relay, Want{Publications: []string{"good"}, Tables: []Table{{"public", "unlogged"}}}, expect{"table", FAIL, "unlogged", "SET LOGGED"}},
		"not published":       {relay, Want{Publications: []string{"Mixed Case"}, Tables: outbox}, expect{"table", FAIL, "is not in publication", `ALTER PUBLICATION "Mixed Case" ADD TABLE "public"."outbox"`}},
		"by leaves":           {relay, Want{Publications: []string{"leaves"}, Tables: []Table{{"public", "parted"}}}, expect{"table", FAIL, "under their own names", "publish_via_partition_root = true"}},
		"by root":             {relay, Want{Publications: []string{"root"}, Tables: []Table{{"public", "parted_1"}}}, expect{"table", FAIL, "under the name of public.parted", "--table"}},
		"slot missing":        {relay, Want{Slot: "nope", Publications: []string{"good"}}, expect{"slot", FAIL, `"nope" does not exist`, "walrelay slot create nope --publication good"}},
		"slot physical":       {relay, Want{Slot: "physical"}, expect{"slot", FAIL, "physical", "another name"}},
		"slot elsewhere":      {relay, Want{Slot: "elsewhere"}, expect{"slot", FAIL, `database "other"`, "connect to database"}},
	}
	if major(admin) >= 15 {
		pg.MustExec(t,
			"create publication filtered for table outbox where (seq > 7)",
			"create publication narrow for table outbox (id)",
			"create publication by_schema for tables in schema public",
			"create table divided (id uuid, aggregate_id text)",
			shardPublication("two_0", "divided", 2, 0), shardPublication("two_1", "divided", 2, 1),
			shardPublication("four_0", "divided", 4, 0), shardPublication("four_2", "divided", 4, 2), shardPublication("four_3", "divided", 4, 3),
		)
		cases["row filter"] = preflightCase{relay, Want{Publications: []string{"filtered"}, Tables: outbox}, expect{"filter", WARN, `"filtered"`, "SET TABLE"}}
		cases["all shards"] = preflightCase{relay, Want{Publications: []string{"two_1"}, Tables: []Table{{"public", "divided"}}}, expect{"shard", OK, `"two_1" has shard 1 of 0 to 1`, ""}}
		cases["shard missing"] = preflightCase{relay, Want{Publications: []string{"four_2"}, Tables: []Table{{"public", "divided"}}}, expect{"shard", FAIL, "no publication has shard 1:", "walrelay init --apply --publication four --shards 4"}}
		cases["column list"] = preflightCase{relay, Want{Publications: []string{"narrow"}, Tables: outbox}, expect{"columns", WARN, `"narrow"`, "SET TABLE"}}
		cases["by schema"] = preflightCase{relay, Want{Publications: []string{"by_schema"}, Tables: outbox}, expect{}}
	}
	if major(admin) >= 17 {
		mustCreate(t, relay, CreateOptions{Name: "safe", Failover: true})
		cases["failover slot"] = preflightCase{relay, Want{Slot: "safe"}, expect{"failover", WARN, "may publish commits", "synchronized_standby_slots"}}
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			found, err := Preflight(within(t, 10*time.Second), c.conn, c.want)
			if err != nil {
				t.Fatal(err)
			}
			seen := false
			for _, f := range found {
				switch {
				case f.Name == c.name && f.Level == c.level && strings.Contains(f.Detail, c.text) && strings.Contains(f.Remedy, c.remedy):
					seen = true
				case f.Level != OK:
					t.Errorf("unexpected %+v", f)
				}
			}
			if c.name != "" && !seen {
				t.Errorf("got %+v, want %+v", found, c.expect)
			}
			if c.level == FAIL {
				wantFailure(t, found.Err(), event.Precondition, c.text, c.remedy)
			} else if err := found.Err(); err != nil {
				t.Error(err)
			}
		})
	}

	t.Run("slot in use", func(t *testing.T) {
		hold(t, pg, "orders", "good")
		found, err := Preflight(within(t, 10*time.Second), relay, Want{Slot: "orders"})
		if err != nil {
			t.Fatal(err)
		}
		if f := found[len(found)-1]; f.Name != "active" || f.Level != WARN || !strings.Contains(f.Detail, `application "holder"`) || found.Err() != nil {
			t.Errorf("got %+v", found)
		}
	})
}

// shardPublication is as `walrelay init --shards` makes it.
func shardPublication(name, table string, of, this int) string {
	return fmt.Sprintf("create publication %s for table %s where ((coalesce(hashtextextended(aggregate_id, 0), 0) & 9223372036854775807) %% %d = %d) with (publish = 'insert')", name, table, of, this)
}

func TestPreflightOfAServerThatCanNotServe(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{WALLevel: "replica", Settings: map[string]string{
		"synchronous_standby_names": "ANY 1 (db2, *)", "synchronous_commit": "local",
	}})
	found, err := Preflight(within(t, 10*time.Second), connect(t, pg.DSN("postgres")), Want{Slot: "s", ApplicationName: "walrelay"})
	if err != nil {
		t.Fatal(err)
	}
	failure := found.Err()
	wantFailure(t, failure, event.Precondition, `wal_level is replica; slot "s" does not exist`, "ALTER SYSTEM SET wal_level = logical; then restart Postgres\nwalrelay slot create s")
	b, err := json.Marshal(found)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`{"name":"synchronous","level":"WARN"`, `{"name":"wal_level","level":"FAIL"`, `{"name":"role","level":"OK"`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("got %s, want %s in it", b, want)
		}
	}
}

func TestSynchronousStandbyNamesThatCatchUs(t *testing.T) {
	for setting, want := range map[string]bool{
		"":                              false,
		"*":                             true,
		`"*"`:                           true,
		"db1, db2":                      false,
		"db1, WalRelay":                 true,
		"FIRST 2 (db1, *)":              true,
		`ANY 1 ("db 1", "walrelay")`:    true,
		"2 (db1,db2)":                   false,
		"ANY 1 (walrelay_standby, db2)": false,
	} {
		if got := catches(setting, "walrelay"); got != want {
			t.Errorf("%q: got %v, want %v", setting, got, want)
		}
	}
}
