package outbox

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func TestSampleTakesOneOfEachTypeAndTheLargest(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t,
		`create table "Out Box" (seq bigint generated always as identity, id text, aggregate_type text, aggregate_id text, event_type text, payload bytea)`,
		`insert into "Out Box" (id, aggregate_type, aggregate_id, event_type, payload)
			select n::text, 'order', n::text, case when n % 2 = 0 then 'placed' else 'paid' end, '\x00'::bytea from generate_series(1, 100) n`,
		`insert into "Out Box" (id, aggregate_type, aggregate_id, event_type, payload) values ('big', 'order', '1', 'paid', decode(repeat('ff', 5000), 'hex')), (null, 'bad', '1', 'x', '\x')`,
		`insert into "Out Box" (id, aggregate_type, aggregate_id, event_type, payload) values ('last', 'order', '1', 'paid', null)`,
	)
	table := Table{Name: "Out Box"}
	m, err := NewMapper(Mapping{Tables: []Table{table}})
	if err != nil {
		t.Fatal(err)
	}
	conn := pg.MustConn(t)
	subjects := map[string]int{}
	largest, bad := 0, ""
	err = Sample(t.Context(), conn, m, table, func(ev *event.Event, poison *event.Poison) {
		subjects[string(ev.Subject)]++
		largest = max(largest, len(ev.Payload))
		if poison != nil {
			bad += string(poison.Reason)
		}
	})
	if err != nil || subjects["outbox.order.paid"] != 2 || subjects["outbox.order.placed"] != 1 || len(subjects) != 3 || largest != 5000 || bad != "null_id" {
		t.Errorf("got %v, largest %d, bad %s, %v", subjects, largest, bad, err)
	}

	advise := func() string {
		t.Helper()
		found, err := Advise(t.Context(), conn, m, table, nil)
		if err != nil {
			t.Fatal(err)
		}
		text := ""
		for _, f := range found {
			text += f.Name + " " + f.Level.String() + " "
		}
		return strings.TrimSpace(text)
	}
	if got := advise(); got != "unique_id WARN payload OK" {
		t.Errorf("got %s", got)
	}
	pg.MustExec(t, `create unique index on "Out Box" (id)`)
	if got := advise(); got != "unique_id OK payload OK" {
		t.Errorf("got %s", got)
	}
	pg.MustExec(t, `alter table "Out Box" drop column payload`)
	if got := advise(); got != "mapping FAIL" {
		t.Errorf("got %s", got)
	}
	if err := Sample(t.Context(), conn, m, table, nil); event.ClassOf(err) != event.Precondition {
		t.Errorf("got %v", err)
	}
	if found, err := Advise(t.Context(), conn, m, Table{Name: "absent"}, nil); err != nil || len(found) != 0 {
		t.Errorf("got %v, %v", found, err)
	}
}
