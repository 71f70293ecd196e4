package replication

import (
	"slices"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

func TestTransactionBecomesRowsAndCommit(t *testing.T) {
	s := decoding(1, nil)
	for _, quiet := range [][]byte{
		beginMsg(0x500, 7),
		relationMsg(16384, "public", "outbox", idColumn, bodyColumn),
	} {
		if rec := feed(t, s, quiet); rec != nil {
			t.Fatalf("record %+v of a message that only describes", rec)
		}
	}
	at := time.Date(2000, 1, 1, 0, 0, 0, 1000*1000, time.UTC)

	row := feed(t, s, insertMsg(0x300, 16384, "a", nil))
	if row.Kind != event.Row || row.XID != 7 || !row.CommitTime.Equal(at) || row.Confirm != 0 {
		t.Errorf("got %+v, want a row of transaction 7 at %v", row, at)
	}
	if want := (event.Position{Timeline: 1, Commit: 0x500, Change: 0x300}); row.Position != want {
		t.Errorf("position %v, want %v", row.Position, want)
	}
	if string(row.Values[0]) != "a" || row.Values[1] != nil {
		t.Errorf("values %q, want a and NULL", row.Values)
	}
	if r := row.Relation; r.ID != 16384 || r.Schema != "public" || r.Name != "outbox" || !slices.Equal(r.Columns, []event.Column{idColumn, bodyColumn}) {
		t.Errorf("relation %+v", r)
	}

	row = feed(t, s, insertMsg(0x310, 16384, "b", ""))
	if row.Values[1] == nil || len(row.Values[1]) != 0 {
		t.Errorf("empty text became %v, want an empty slice that is not nil", row.Values[1])
	}

	commit := feed(t, s, commitMsg(0x500, 0x530))
	want := event.Record{Kind: event.Commit, Position: event.Position{Timeline: 1, Commit: 0x500}, Confirm: 0x530, XID: 7, CommitTime: commit.CommitTime}
	if commit.Kind != want.Kind || commit.Position != want.Position || commit.Confirm != want.Confirm || commit.XID != want.XID {
		t.Errorf("got %+v, want %+v", commit, want)
	}
	if commit.Relation != nil || commit.Values != nil || !commit.CommitTime.Equal(at) {
		t.Errorf("commit carries %+v of the row, time %v", commit, commit.CommitTime)
	}
}

func TestRowsOfOneWALRecordAreNumbered(t *testing.T) {
	s := decoding(1, nil)
	feed(t, s, beginMsg(0x500, 7))
	feed(t, s, relationMsg(1, "public", "outbox", idColumn))
	var got []string
	for _, start := range []event.LSN{0x300, 0x300, 0x300, 0x380, 0x380, 0x400} {
		got = append(got, feed(t, s, insertMsg(start, 1, "x")).Position.String())
	}
	want := []string{"1:0/500:0/300:0", "1:0/500:0/300:1", "1:0/500:0/300:2", "1:0/500:0/380:0", "1:0/500:0/380:1", "1:0/500:0/400:0"}
	if !slices.Equal(got, want) {
		t.Errorf("positions %v, want %v", got, want)
	}
}

func TestKeepaliveIsDroppedInsideTransaction(t *testing.T) {
	s := decoding(1, nil)
	rec := feed(t, s, keepaliveMsg(0x100, false))
	if rec == nil || rec.Kind != event.Keepalive || rec.Confirm != 0x100 {
		t.Fatalf("outside: got %+v, want a keepalive that confirms 0/100", rec)
	}
	feed(t, s, beginMsg(0x500, 7))
	if rec := feed(t, s, keepaliveMsg(0x520, true)); rec != nil {
		t.Fatalf("inside: got %+v, want none", rec)
	}
	feed(t, s, commitMsg(0x500, 0x530))
	if rec := feed(t, s, keepaliveMsg(0x530, false)); rec == nil || rec.Confirm != 0x530 {
		t.Fatalf("after: got %+v, want a keepalive that confirms 0/530", rec)
	}
}

func TestRelationAgainIsANewValue(t *testing.T) {
	s := decoding(1, nil)
	feed(t, s, beginMsg(0x500, 7))
	feed(t, s, relationMsg(1, "public", "outbox", idColumn))
	first := feed(t, s, insertMsg(0x300, 1, "x")).Relation
	if again := feed(t, s, insertMsg(0x310, 1, "x")).Relation; again != first {
		t.Error("description changed without a Relation message")
	}
	feed(t, s, relationMsg(1, "public", "outbox", idColumn, bodyColumn))
	second := feed(t, s, insertMsg(0x320, 1, "x", "{}")).Relation
	if second == first || len(first.Columns) != 1 || len(second.Columns) != 2 {
		t.Errorf("got %p %+v after %p %+v, want a new value and the old one unchanged", second, second, first, first)
	}
}

func TestMessagePositions(t *testing.T) {
	t.Run("transactional, before the row that starts at its end", func(t *testing.T) {
		s := decoding(1, nil)
		feed(t, s, beginMsg(0x500, 7))
		feed(t, s, relationMsg(1, "public", "outbox", idColumn))
		m := *feed(t, s, messageMsg(0x300, true, "walrelay", "{}"))
		if m.Kind != event.Message || !m.Transactional || m.XID != 7 || m.Confirm != 0 || m.Prefix != "walrelay" || string(m.Content) != "{}" {
			t.Errorf("got %+v", m)
		}
		row := feed(t, s, insertMsg(0x300, 1, "x"))
		if row.Position.String() != "1:0/500:0/300:0" {
			t.Errorf("row at %v, want the position it has when messages are not asked for", row.Position)
		}
		if m.Position.Compare(row.Position) >= 0 {
			t.Errorf("message at %v is not before the row at %v", m.Position, row.Position)
		}
	})
	t.Run("transactional, after the row that starts at its end", func(t *testing.T) {
		s := decoding(1, nil)
		feed(t, s, beginMsg(0x500, 7))
		feed(t, s, relationMsg(1, "public", "outbox", idColumn))
		row := *feed(t, s, insertMsg(0x300, 1, "x"))
		m := feed(t, s, messageMsg(0x300, true, "walrelay", "{}"))
		if row.Position.Compare(m.Position) >= 0 {
			t.Errorf("message at %v is not behind the row at %v", m.Position, row.Position)
		}
	})
	t.Run("not transactional, right before a commit", func(t *testing.T) {
		s := decoding(1, nil)
		m := *feed(t, s, messageMsg(0x500, false, "walrelay", "now"))
		if m.Transactional || m.Confirm != 0x500 || m.XID != 0 || !m.CommitTime.IsZero() {
			t.Errorf("got %+v, want no transaction and 0/500 to confirm", m)
		}
		if m.Position.Commit != m.Position.Change {
			t.Errorf("position %v, want one LSN twice", m.Position)
		}
		feed(t, s, beginMsg(0x500, 7))
		feed(t, s, relationMsg(1, "public", "outbox", idColumn))
		row := feed(t, s, insertMsg(0x300, 1, "x"))
		if m.Position.Compare(row.Position) >= 0 {
			t.Errorf("message at %v is not before the row at %v, which came later", m.Position, row.Position)
		}
	})
}

func TestOtherChangesAreTolerated(t *testing.T) {
	s := decoding(1, nil)
	feed(t, s, beginMsg(0x500, 7))
	for _, kind := range []byte("OYUDT") {
		if rec := feed(t, s, xlog(0x300, []byte{kind, 1, 2, 3})); rec != nil {
			t.Errorf("%c became %+v", kind, rec)
		}
	}
	if rec := feed(t, s, commitMsg(0x500, 0x530)); rec == nil || rec.Kind != event.Commit {
		t.Errorf("got %+v, want the commit", rec)
	}
}

func TestBadMessagesStopTheStream(t *testing.T) {
	begin, relation := beginMsg(0x500, 7), relationMsg(1, "public", "outbox", idColumn)
	binaryValue := insertMsg(0x300, 1, "x")
	binaryValue[xlogHeader+8] = 'b'
	unchanged := insertMsg(0x300, 1, nil)
	unchanged[xlogHeader+8] = 'u'
	for name, msgs := range map[string][][]byte{
		"nothing":                      {{}},
		"unknown envelope":             {{'z', 1}},
		"empty XLogData":               {xlog(0x300, nil)},
		"row outside a transaction":    {relation, insertMsg(0x300, 1, "x")},
		"row of an undescribed table":  {begin, insertMsg(0x300, 1, "x")},
		"row with too few values":      {begin, relation, insertMsg(0x300, 1)},
		"row with too many values":     {begin, relation, insertMsg(0x300, 1, "x", "y")},
		"row without an LSN":           {begin, relation, insertMsg(0, 1, "x")},
		"row before the last one":      {begin, relation, insertMsg(0x300, 1, "x"), insertMsg(0x2ff, 1, "x")},
		"binary value":                 {begin, relation, binaryValue},
		"unchanged value":              {begin, relation, unchanged},
		"begin in a transaction":       {begin, beginMsg(0x600, 8)},
		"begin before the last one":    {begin, commitMsg(0x500, 0x530), beginMsg(0x4ff, 8)},
		"begin again":                  {begin, commitMsg(0x500, 0x530), begin},
		"commit without begin":         {commitMsg(0x500, 0x530)},
		"commit of another":            {begin, commitMsg(0x501, 0x530)},
		"commit that ends before it":   {begin, commitMsg(0x500, 0x500)},
		"transactional message alone":  {messageMsg(0x300, true, "p", "")},
		"other message in transaction": {begin, messageMsg(0x300, false, "p", "")},
	} {
		t.Run(name, func(t *testing.T) {
			s := decoding(1, nil)
			last := len(msgs) - 1
			for _, m := range msgs[:last] {
				feed(t, s, m)
			}
			rec, err := s.decode(msgs[last])
			if err == nil || rec != nil || event.ClassOf(err) != event.Unexpected {
				t.Errorf("got record %+v, error %v; want an Unexpected failure", rec, err)
			}
		})
	}
}

func TestTimelineIsThatOfTheCommit(t *testing.T) {
	h, err := parseHistory("1\t0/400\tno recovery target specified\n\n# a comment\n2\t0/600\tbefore 2000-01-01\n")
	if err != nil {
		t.Fatal(err)
	}
	if h[0].Restored || !h[1].Restored {
		t.Errorf("got %+v, want the second switch alone to be by a recovery target", h)
	}
	s := decoding(3, h)
	for commit, want := range map[event.LSN]uint32{0x3ff: 1, 0x400: 2, 0x5ff: 2, 0x600: 3, 0x9000: 3} {
		if got := owner(h, commit, 3); got != want {
			t.Errorf("timeline of %v is %d, want %d", commit, got, want)
		}
	}
	feed(t, s, beginMsg(0x5f0, 7))
	feed(t, s, relationMsg(1, "public", "outbox", idColumn))
	if got := feed(t, s, insertMsg(0x3f0, 1, "x")).Position.Timeline; got != 2 {
		t.Errorf("row on timeline %d, want that of its commit, 2", got)
	}

	for _, bad := range []string{"1\n", "x\t0/1\tr\n", "1\tzero\tr\n"} {
		if _, err := parseHistory(bad); err == nil {
			t.Errorf("history %q was taken", bad)
		}
	}
}
