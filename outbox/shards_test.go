package outbox

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

func TestShardsNeedNamesThatFit(t *testing.T) {
	for _, n := range []int{-1, 1, 65} {
		s := plain
		s.Shards = n
		invalid(t, s, fmt.Sprintf("--shards %d: want 2 to 64", n))
	}
	s := plain
	s.Shards = 11
	s.Publication = "a_name_of_sixty_one_bytes_that_has_room_for_one_digit_and_not_2"[:61]
	invalid(t, s, "longer than 63 bytes")
	s = plain
	s.Shards, s.Table.Columns = 2, map[string]string{"aggregate_id": ""}
	invalid(t, s, "role aggregate_id")
}

func invalid(t *testing.T, s Schema, text string) {
	t.Helper()
	if err := s.Validate(); event.ClassOf(err) != event.Usage || !strings.Contains(err.Error(), text) {
		t.Errorf("got %v, want %q", err, text)
	}
}

func testShards(t *testing.T, d *databases) {
	conn := d.fresh(t)
	s := plain
	s.Shards = 4
	if !since15(t, conn) {
		_, err := Apply(t.Context(), conn, s)
		wantFailure(t, err, event.Precondition, "row filters", "Postgres 15")
		return
	}
	wantLines(t, mustApply(t, conn, s), `table "public"."outbox" created`, `publication "walrelay_0" created`, "walrelay_1", "walrelay_2", "walrelay_3")
	wantLines(t, mustApply(t, conn, s))
	must(t, conn, s.SQL()+s.SQL())
	wantLines(t, mustApply(t, conn, s))

	// Every row is in exactly one publication, and where it was on 15 to 18.
	must(t, conn, `INSERT INTO outbox (aggregate_type, aggregate_id, event_type) SELECT 'order', 'order-' || i, 'x' FROM generate_series(1, 1000) i`)
	const in = `SELECT count(*) FROM outbox WHERE `
	total := 0
	for i, want := range shardSizes {
		filter := ask[string](t, conn, "SELECT rowfilter FROM pg_publication_tables WHERE pubname = $1", Shard("walrelay", i))
		n := ask[int](t, conn, in+filter)
		total += n
		if n != want {
			t.Errorf("shard %d has %d of 1000 rows, want %d", i, n, want)
		}
	}
	if total != 1000 {
		t.Errorf("the shards have %d of 1000 rows", total)
	}

	// A table with other types, and one with partitions.
	for i, typ := range []string{"uuid", "bigint", "integer", "smallint", "varchar(20)"} {
		table := Table{Name: fmt.Sprint("t", i)}
		must(t, conn, fmt.Sprintf(`CREATE TABLE t%d (seq bigint PRIMARY KEY, id uuid NOT NULL, aggregate_type text NOT NULL, aggregate_id %s NOT NULL, event_type text NOT NULL, payload jsonb)`, i, typ))
		mustApply(t, conn, Schema{Table: table, Publication: fmt.Sprint("p", i), Shards: 2})
	}
	partitioned := Schema{Table: Table{Name: "parted"}, Publication: "parted", Shards: 2, Partitioned: Day}
	mustApply(t, conn, partitioned)
	wantLines(t, mustApply(t, conn, partitioned))
	if !ask[bool](t, conn, "SELECT bool_and(pubviaroot) FROM pg_publication WHERE pubname LIKE 'parted%'") {
		t.Error("rows of partitions would have their names")
	}

	// Two tables share the publications, and what is there already is not taken for a shard.
	also := Schema{Table: Table{Name: "also"}, Publication: "walrelay", Shards: 4}
	wantLines(t, mustApply(t, conn, also), `table "public"."also" created`, "walrelay_0", "walrelay_1", "walrelay_2", "walrelay_3")
	s.Shards = 2
	_, err := Apply(t.Context(), conn, s)
	wantFailure(t, err, event.Precondition, `publication "walrelay_0"`, "shard 0 of 2", "--publication")
	must(t, conn, "CREATE PUBLICATION whole_1 FOR TABLE outbox WITH (publish = 'insert')")
	_, err = Apply(t.Context(), conn, Schema{Table: plain.Table, Publication: "whole", Shards: 2})
	wantFailure(t, err, event.Precondition, `publication "whole_1"`, "shard 1 of 2")
	if ask[bool](t, conn, "SELECT EXISTS (SELECT FROM pg_publication WHERE pubname = 'whole_0')") {
		t.Error("a refused apply has left a publication")
	}
}

// shardSizes are how the aggregates order-1 to order-1000 divide into four, on
// every major version: an aggregate keeps its shard across an upgrade.
var shardSizes = [4]int{265, 258, 235, 242}
