package outbox

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/klauspost/compress/zstd"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

func prunerOf(t *testing.T, conn *pgx.Conn, o PruneOptions) *Pruner {
	t.Helper()
	if o.Batch == 0 {
		o.Batch = 1000
	}
	p, err := OpenPruner(t.Context(), conn, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func allOf(t *testing.T, p *Pruner) []Candidate {
	t.Helper()
	var all []Candidate
	for {
		some, err := p.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if len(some) == 0 {
			return all
		}
		all = append(all, some...)
	}
}

func sketch(cs []Candidate) string {
	var words []string
	for _, c := range cs {
		w := string(c.ID) + ":"
		for _, f := range []struct {
			is   bool
			mark string
		}{{c.Old, "o"}, {c.Passed, "p"}, {c.Sent, "s"}, {c.Event, "e"}} {
			if f.is {
				w += f.mark
			}
		}
		words = append(words, w)
	}
	return strings.Join(words, " ")
}

func nextXID(t *testing.T, conn *pgx.Conn) uint64 {
	t.Helper()
	return uint64(ask[int64](t, conn, "select pg_snapshot_xmax(pg_current_snapshot())::text::int8"))
}

func TestPruner(t *testing.T) {
	d := &databases{pg: harness.RunPostgres(t, harness.PostgresOptions{})}
	const table = `create table "Out Box" (seq bigint generated always as identity primary key, id text, aggregate_type text, payload jsonb,
		raw bytea, n numeric, f float8, b boolean, created_at timestamp default (now() at time zone 'utc'))`
	row := func(t *testing.T, conn *pgx.Conn, id string) {
		must(t, conn, `insert into "Out Box" (id, aggregate_type, payload) values ('`+id+`', 'a', '{}')`)
	}
	o := PruneOptions{Table: Table{Name: "Out Box"}}

	t.Run("tells rows apart by the transaction that wrote them", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, table)
		row(t, conn, "old")
		row(t, conn, "updated")
		xid := nextXID(t, conn)
		now := ask[time.Time](t, conn, "select clock_timestamp()")
		row(t, conn, "sent")
		must(t, conn, `update "Out Box" set n = 1 where id = 'updated'`)
		must(t, conn, `vacuum freeze "Out Box"`)
		horizon := nextXID(t, conn)
		row(t, conn, "new")
		must(t, conn, `update "Out Box" set created_at = 'infinity' where id = 'new'`)
		o := o
		o.XID, o.Since = horizon, &event.Mark{XID: xid, Time: now}
		if got, want := sketch(allOf(t, prunerOf(t, conn, o))), "old:ope updated:ope sent:opse new:se"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
		o.Since = &event.Mark{}
		if got, want := sketch(allOf(t, prunerOf(t, conn, o))), "old:opse updated:opse sent:opse new:se"; got != want {
			t.Errorf("with everything sent: got %s, want %s", got, want)
		}
		o.Since, o.OlderThan = nil, time.Hour
		if got, want := sketch(allOf(t, prunerOf(t, conn, o))), "old:pe updated:pe sent:pe new:e"; got != want {
			t.Errorf("without a moment: got %s, want %s", got, want)
		}
	})

	t.Run("reads an xid of 32 bits as the last one before the snapshot's end", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, table)
		p := prunerOf(t, conn, o)
		for _, c := range []struct{ xmax, xmin, want int64 }{
			{1000, 999, 999},
			{1000, 3, 3},
			{1<<32 + 1000, 999, 1<<32 + 999},
			{1<<32 + 1000, 1<<32 - 1, 1<<32 - 1},
			{5<<32 + 1000, 1001, 4<<32 + 1001},
		} {
			sql := strings.ReplaceAll(replaceXmax("select "+p.xid, fmt.Sprint(c.xmax)), "walrelay_row.xmin", fmt.Sprint(c.xmin))
			if got := ask[int64](t, conn, sql); got != c.want {
				t.Errorf("xmin %d below %d: got %d, want %d", c.xmin, c.xmax, got, c.want)
			}
		}
	})

	t.Run("walks over tables with and without an index on seq", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, table)
		must(t, conn, `insert into "Out Box" (id, aggregate_type, payload) select n::text, 'a', to_jsonb(repeat('x', 300)) from generate_series(1, 1000) n`)
		o := o
		o.XID, o.Batch = nextXID(t, conn), 70
		for _, change := range []string{"select", `alter table "Out Box" drop constraint "Out Box_pkey"`, `alter table "Out Box" drop column seq`} {
			must(t, conn, change)
			ids := map[string]int{}
			for _, c := range allOf(t, prunerOf(t, conn, o)) {
				ids[string(c.ID)]++
			}
			if len(ids) != 1000 || ids["1"] != 1 || ids["1000"] != 1 {
				t.Errorf("%s: %d rows", change, len(ids))
			}
		}
	})

	t.Run("ends where all are too young", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, table)
		must(t, conn, `insert into "Out Box" (id, created_at) select n::text, now() - interval '1 day' * (100 - n) from generate_series(1, 100) n`)
		o := o
		o.XID, o.Batch, o.OlderThan = nextXID(t, conn), 10, 80*24*time.Hour
		if n := len(allOf(t, prunerOf(t, conn, o))); n != 30 {
			t.Errorf("%d rows read, want 30", n)
		}
	})

	t.Run("does not delete what was changed or locked since", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, table)
		for _, id := range []string{"a", "b", "c", "d", "e"} {
			row(t, conn, id)
		}
		other := d.connect(t, "postgres", conn.Config().Database)
		o := o
		o.XID = nextXID(t, conn)
		p := prunerOf(t, conn, o)
		all := allOf(t, p)
		must(t, other, `update "Out Box" set n = 1 where id = 'b'`)
		must(t, other, `delete from "Out Box" where id = 'c'`)
		must(t, other, `begin; update "Out Box" set n = 1 where id = 'd'`)
		var saved [][]byte
		n, err := p.Delete(t.Context(), all, func(rows [][]byte) error { saved = append(saved, rows...); return nil })
		if err != nil || n != 2 || len(saved) != 2 {
			t.Errorf("%d deleted, %d saved, %v", n, len(saved), err)
		}
		must(t, other, "commit")
		if got := ask[string](t, conn, `select string_agg(id, '' order by id) from "Out Box"`); got != "bd" {
			t.Errorf("%s are left", got)
		}
	})

	t.Run("hands on the rows before they are gone", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, table)
		must(t, conn, `insert into "Out Box" (id, payload, raw, n, f, b, created_at) values (E'a"\n<', '{"k": [1, "x\ny"]}', '\x00ff', 12345678901234567890.10, 'NaN', true, '2026-01-02 03:04:05.6')`)
		o := o
		o.XID = nextXID(t, conn)
		p := prunerOf(t, conn, o)
		all := allOf(t, p)
		if _, err := p.Delete(t.Context(), all, func([][]byte) error { return errors.New("full") }); err == nil || ask[int64](t, conn, `select count(*) from "Out Box"`) != 1 {
			t.Errorf("deleted without being saved, %v", err)
		}
		var saved []byte
		n, err := p.Delete(t.Context(), all, func(rows [][]byte) error { saved = rows[0]; return nil })
		want := `{"seq":1,"id":"a\"\n<","aggregate_type":null,"payload":{"k":[1,"x\ny"]},"raw":"AP8=","n":12345678901234567890.10,"f":"NaN","b":true,"created_at":"2026-01-02 03:04:05.6"}`
		if err != nil || n != 1 || string(saved) != want {
			t.Errorf("%d, %v, got\n%s, want\n%s", n, err, saved, want)
		}
	})

	t.Run("leaves out what the publication does", func(t *testing.T) {
		conn := d.fresh(t)
		if ask[int](t, conn, "select current_setting('server_version_num')::int") < 150000 {
			return // there are no row filters
		}
		must(t, conn, table)
		must(t, conn, `create publication p for table "Out Box" where (aggregate_type = 'a') with (publish = 'insert')`)
		row(t, conn, "a")
		must(t, conn, `insert into "Out Box" (id, aggregate_type) values ('b', 'b'), ('c', null)`)
		o := o
		o.XID, o.Publications = nextXID(t, conn), []string{"p"}
		if got, want := sketch(allOf(t, prunerOf(t, conn, o))), "a:ope b:op c:op"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})

	t.Run("says what a table lacks", func(t *testing.T) {
		conn := d.fresh(t)
		open := func() error { _, err := OpenPruner(t.Context(), conn, o); return err }
		wantFailure(t, open(), event.Precondition, "does not exist")
		must(t, conn, table)
		must(t, conn, `alter table "Out Box" drop column created_at`)
		wantFailure(t, open(), event.Precondition, "created_at")
	})

	t.Run("drops partitions", func(t *testing.T) {
		conn := d.fresh(t)
		must(t, conn, `create table parts (id text, payload jsonb, created_at timestamptz) partition by range (created_at)`)
		must(t, conn, `create table p1 partition of parts for values from (minvalue) to ('2001-01-01')`)
		must(t, conn, `create table p2 (payload jsonb, created_at timestamptz, id text)`)
		must(t, conn, `alter table parts attach partition p2 for values from ('2001-01-01') to ('2002-01-01')`)
		must(t, conn, `create table p3 partition of parts for values from ('2002-01-01') to (maxvalue)`)
		must(t, conn, `create table p4 partition of parts default`)
		must(t, conn, `insert into parts select n::text, '{}', '2001-05-05' from generate_series(1, 10) n`)
		p := prunerOf(t, conn, PruneOptions{Table: Table{Name: "parts"}, XID: nextXID(t, conn), Batch: 4, Since: &event.Mark{}})
		parts, err := p.Partitions(t.Context())
		if err != nil || len(parts) != 4 || !parts[0].Old || !parts[1].Old || parts[2].Old || parts[3].Old || !parts[3].Default {
			t.Fatalf("%+v, %v", parts, err)
		}
		if got := sketch(allOf(t, p)); !strings.HasPrefix(got, "1:opse 2:opse ") || len(strings.Fields(got)) != 10 {
			t.Errorf("rows: %s", got)
		}
		kept := errors.New("kept")
		if _, err := p.Drop(t.Context(), parts[1], func(Candidate) error { return kept }, nil); !errors.Is(err, kept) {
			t.Errorf("got %v", err)
		}
		other := d.connect(t, "postgres", conn.Config().Database)
		must(t, other, "begin; select from parts")
		fine := func(Candidate) error { return nil }
		if _, err := p.Drop(t.Context(), parts[1], fine, nil); !errors.Is(err, ErrLocked) {
			t.Errorf("got %v, want ErrLocked", err)
		}
		must(t, other, "commit")
		var saved []string
		n, err := p.Drop(t.Context(), parts[1], fine, func(rows [][]byte) error {
			for _, r := range rows {
				saved = append(saved, string(r))
			}
			return nil
		})
		if err != nil || n != 10 || len(saved) != 10 || !strings.HasPrefix(saved[0], `{"id":"1","payload":{},"created_at":"2001-05-05 00:00:00+00"}`) {
			t.Errorf("%d, %v, %s", n, err, saved)
		}
		if ask[int64](t, conn, "select count(*) from pg_class where relname = 'p2'") != 0 {
			t.Error("the partition is still there")
		}
	})
}

func lines(n int) [][]byte {
	var rows [][]byte
	for i := range n {
		rows = append(rows, fmt.Appendf(nil, `{"id":%d,"payload":"%s"}`, i, strings.Repeat("x", i%50)))
	}
	return rows
}

func contents(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(name, ".zst") {
		return b
	}
	dec, err := zstd.NewReader(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	if b, err = dec.DecodeAll(b, nil); err != nil {
		t.Fatal(err)
	}
	return b
}

// Wherever a write was cut off, what was whole before it is left and the file goes on.
func TestArchiveGoesOnAfterATornWrite(t *testing.T) {
	for _, suffix := range []string{"", ".zst"} {
		name := filepath.Join(t.TempDir(), "rows.jsonl"+suffix)
		a, note, err := OpenArchive(name)
		if err != nil || note != "" {
			t.Fatal(note, err)
		}
		if err := errors.Join(a.Append(lines(100)), a.Append(lines(1))); err != nil {
			t.Fatal(err)
		}
		whole := contents(t, name)
		size := a.end
		if err := errors.Join(a.Append(lines(20)), a.Close()); err != nil {
			t.Fatal(err)
		}
		full, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for cut := size; cut <= int64(len(full)); cut++ {
			torn := slices.Clone(full[:cut])
			if cut%3 == 0 && cut > size+8 && suffix != "" { // its length is there, its bytes are not
				torn = append(slices.Clone(full[:size+6]), make([]byte, int64(len(full))-size-6)...)
			}
			if err := os.WriteFile(name, torn, 0o600); err != nil {
				t.Fatal(err)
			}
			a, _, err := OpenArchive(name)
			if err != nil {
				t.Fatalf("cut at %d: %v", cut, err)
			}
			if err := errors.Join(a.Append(lines(2)), a.Close()); err != nil {
				t.Fatal(err)
			}
			got := contents(t, name)
			want := slices.Concat(whole, bytes.Join(lines(2), []byte("\n")), []byte("\n"))
			if !bytes.HasPrefix(got, whole) || !bytes.HasSuffix(got, want[len(whole):]) || suffix != "" && cut < int64(len(full)) && !bytes.Equal(got, want) {
				t.Fatalf("cut at %d: %d bytes, want %d", cut, len(got), len(want))
			}
			for line := range bytes.Lines(got) {
				if line[0] != '{' || !bytes.HasSuffix(line, []byte("}\n")) {
					t.Fatalf("cut at %d: line %q", cut, line)
				}
			}
		}
	}
}

func TestArchiveWalksOverFramesOfAnySize(t *testing.T) {
	name := filepath.Join(t.TempDir(), "rows.zst")
	a, _, err := OpenArchive(name)
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 100, 300, 70_000, 1_000_000} {
		noise := make([]byte, n)
		for i := range noise {
			noise[i] = byte('a' + random.IntN(26))
		}
		if err := a.Append([][]byte{bytes.Repeat([]byte("x"), n), noise}); err != nil {
			t.Fatal(err)
		}
	}
	end := a.end
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	a, note, err := OpenArchive(name)
	if err != nil || note != "" || a.end != end {
		t.Fatalf("end %d, want %d, %q, %v", a.end, end, note, err)
	}
	if _, _, err := OpenArchive(name); event.ClassOf(err) != event.Precondition {
		t.Errorf("a second one: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestArchiveRefusesFilesOfOtherKinds(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.zst": "plain", "b.jsonl": "PK\x03\x04"} {
		name = filepath.Join(dir, name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, _, err := OpenArchive(name); event.ClassOf(err) != event.Precondition {
			t.Errorf("%s: %v", name, err)
		}
		if b, _ := os.ReadFile(name); string(b) != text {
			t.Errorf("%s was changed to %q", name, b)
		}
	}
	if _, _, err := OpenArchive(filepath.Join(dir, "absent", "c")); event.ClassOf(err) != event.Precondition {
		t.Errorf("got %v", err)
	}
}
