package outbox

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestScript(t *testing.T) {
	s := Schema{Table: Table{Schema: "app", Name: "Outbox"}, Publication: "My-Pub", Role: "relay"}
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	sql := s.SQL()
	for _, w := range []string{
		`CREATE SCHEMA "app"`,
		`CREATE TABLE IF NOT EXISTS "app"."Outbox" (`,
		`"seq"            bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,`,
		`"id"             uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE,`,
		`"payload"        jsonb,`,
		`"schema_version" integer,`,
		`"created_at"     timestamptz NOT NULL DEFAULT now() --`,
		`CREATE PUBLICATION "My-Pub" FOR TABLE "app"."Outbox" WITH (publish = 'insert');`,
		`CREATE PUBLICATION "My-Pub" FOR TABLE "app"."Outbox" WITH (publish = 'insert', publish_via_partition_root = true);`,
		`ALTER PUBLICATION "My-Pub" ADD TABLE "app"."Outbox";`,
		`CREATE ROLE "relay" LOGIN REPLICATION;`,
		`GRANT CONNECT ON DATABASE`,
		`GRANT USAGE ON SCHEMA "app" TO "relay";`,
		`GRANT SELECT ON TABLE "app"."Outbox" TO "relay";`,
	} {
		if !strings.Contains(sql, w) {
			t.Errorf("%q is not in the script:\n%s", w, sql)
		}
	}
	if sql := plain.SQL(); strings.Contains(sql, "ROLE") || strings.Contains(sql, "GRANT") || strings.Contains(sql, "SCHEMA") {
		t.Errorf("script without a role:\n%s", sql)
	}
}

func TestSchemaTellsAllMistakes(t *testing.T) {
	err := Schema{Table: Table{Preset: "x"}, Role: "a\x00"}.Validate()
	if event.ClassOf(err) != event.Usage {
		t.Fatalf("got %v", err)
	}
	for _, w := range []string{"a name is empty", `unknown preset "x"`, `publication ""`, `role "a\x00"`} {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("got %v, want %q in it", err, w)
		}
	}
}
