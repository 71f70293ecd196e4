package replication

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
)

var update = flag.Bool("update", false, "record testdata anew from a real server")

// The goldens are what a real walsender sent: bodies of CopyData messages, each
// after its length in four bytes.

func goldens(t testing.TB) map[string][]byte {
	t.Helper()
	files, err := filepath.Glob("testdata/*.bin")
	if err != nil || len(files) == 0 {
		t.Fatalf("no goldens in testdata (%v): go test -run TestRecord -update", err)
	}
	all := make(map[string][]byte)
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimSuffix(filepath.Base(f), ".bin")] = b
	}
	return all
}

// split cuts a recording into messages. A length that is too long is cut.
func split(b []byte) [][]byte {
	var msgs [][]byte
	for len(b) >= 4 {
		n := min(int64(binary.BigEndian.Uint32(b)), int64(len(b)-4))
		msgs = append(msgs, b[4:4+n:4+n])
		b = b[4+n:]
	}
	return msgs
}

func join(msgs [][]byte) []byte {
	var b []byte
	for _, m := range msgs {
		b = append(be32(b, uint32(len(m))), m...)
	}
	return b
}

// describe writes records as text, one a line.
func describe(w io.Writer, r *event.Record) {
	switch r.Kind {
	case event.Row:
		fmt.Fprintf(w, "row %v xid=%d %s.%s", r.Position, r.XID, r.Relation.Schema, r.Relation.Name)
		for i, c := range r.Relation.Columns {
			if r.Values[i] == nil {
				fmt.Fprintf(w, " %s:%d=NULL", c.Name, c.Type)
			} else {
				fmt.Fprintf(w, " %s:%d=%q", c.Name, c.Type, r.Values[i])
			}
		}
	case event.Message:
		fmt.Fprintf(w, "message %v confirm=%v xid=%d transactional=%t %q %q", r.Position, r.Confirm, r.XID, r.Transactional, r.Prefix, r.Content)
	case event.Commit:
		fmt.Fprintf(w, "commit %v confirm=%v xid=%d at %s", r.Position, r.Confirm, r.XID, r.CommitTime.Format("2006-01-02T15:04:05.000000Z"))
	case event.Keepalive:
		fmt.Fprintf(w, "keepalive confirm=%v", r.Confirm)
	}
	fmt.Fprintln(w)
}

func describeAll(t testing.TB, recording []byte) string {
	t.Helper()
	var b strings.Builder
	s := decoding(1, nil)
	for _, m := range split(recording) {
		if rec := feed(t, s, m); rec != nil {
			describe(&b, rec)
		}
	}
	return b.String()
}

func TestGoldens(t *testing.T) {
	for name, recording := range goldens(t) {
		t.Run(name, func(t *testing.T) {
			want, err := os.ReadFile("testdata/" + name + ".txt")
			if err != nil {
				t.Fatal(err)
			}
			if got := describeAll(t, recording); got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// TestTruncatedGoldensAreRefused cuts every message that makes a record at every length.
func TestTruncatedGoldensAreRefused(t *testing.T) {
	for name, recording := range goldens(t) {
		msgs := split(recording)
		s := decoding(1, nil)
		for i, m := range msgs {
			rec := feed(t, s, m)
			if i > 200 || len(m) > 2000 || rec == nil {
				continue
			}
			for n := range len(m) {
				s := decoding(1, nil)
				for _, before := range msgs[:i] {
					feed(t, s, before)
				}
				if rec, err := s.decode(m[:n]); err == nil || rec != nil {
					t.Fatalf("%s: message %d cut to %d of %d bytes became %+v", name, i, n, len(m), rec)
				}
			}
			if i > 30 {
				break
			}
		}
	}
}

func TestDecoderAgreesWithPglogrepl(t *testing.T) {
	seen := make(map[string]int)
	for name, recording := range goldens(t) {
		s := decoding(1, nil)
		var begin *pglogrepl.BeginMessage
		for i, m := range split(recording) {
			rec := feed(t, s, m)
			wrong := func(theirs any) {
				t.Errorf("%s: message %d: got %+v, pglogrepl reads %+v", name, i, rec, theirs)
			}
			if m[0] == 'k' {
				k, err := pglogrepl.ParsePrimaryKeepaliveMessage(m[1:])
				if err != nil {
					t.Fatal(err)
				}
				if rec != nil && (rec.Kind != event.Keepalive || rec.Confirm != event.LSN(k.ServerWALEnd)) {
					wrong(k)
				}
				seen["keepalive"]++
				continue
			}
			x, err := pglogrepl.ParseXLogData(m[1:])
			if err != nil {
				t.Fatal(err)
			}
			msg, err := pglogrepl.Parse(x.WALData)
			if err != nil {
				t.Fatal(err)
			}
			seen[msg.Type().String()]++
			switch msg := msg.(type) {
			case *pglogrepl.BeginMessage:
				begin = msg
			case *pglogrepl.RelationMessage:
				ours := s.decoder.relations[msg.RelationID]
				if ours == nil || ours.Schema != msg.Namespace || ours.Name != msg.RelationName || len(ours.Columns) != len(msg.Columns) {
					t.Fatalf("%s: message %d: got %+v, pglogrepl reads %+v", name, i, ours, msg)
				}
				for j, c := range msg.Columns {
					if ours.Columns[j] != (event.Column{Name: c.Name, Type: c.DataType}) {
						t.Errorf("%s: message %d: column %+v, pglogrepl reads %+v", name, i, ours.Columns[j], c)
					}
				}
			case *pglogrepl.InsertMessage:
				if rec == nil || rec.Kind != event.Row || rec.Relation.ID != msg.RelationID ||
					rec.Position.Change != event.LSN(x.WALStart) || rec.Position.Commit != event.LSN(begin.FinalLSN) ||
					rec.XID != begin.Xid || !rec.CommitTime.Equal(begin.CommitTime) || len(rec.Values) != len(msg.Tuple.Columns) {
					wrong(msg)
					continue
				}
				for j, c := range msg.Tuple.Columns {
					if (c.DataType == 'n') != (rec.Values[j] == nil) || !bytes.Equal(c.Data, rec.Values[j]) {
						t.Errorf("%s: message %d: value %q, pglogrepl reads %q", name, i, rec.Values[j], c.Data)
					}
				}
			case *pglogrepl.LogicalDecodingMessage:
				if rec == nil || rec.Kind != event.Message || rec.Prefix != msg.Prefix || !bytes.Equal(rec.Content, msg.Content) || rec.Transactional != msg.Transactional {
					wrong(msg)
				}
			case *pglogrepl.CommitMessage:
				if rec == nil || rec.Kind != event.Commit || rec.Position.Commit != event.LSN(msg.CommitLSN) ||
					rec.Confirm != event.LSN(msg.TransactionEndLSN) || !rec.CommitTime.Equal(msg.CommitTime) {
					wrong(msg)
				}
			default:
				if rec != nil {
					wrong(msg)
				}
			}
		}
	}
	for _, kind := range []string{"Begin", "Commit", "Insert", "Relation", "Message", "Origin", "Type", "Update", "Delete", "Truncate", "keepalive"} {
		if seen[kind] == 0 {
			t.Errorf("no golden has a %s message", kind)
		}
	}
}

// FuzzDecode feeds sequences of messages. Whatever they are, nothing panics,
// and what is delivered keeps the promises of event.Record.
func FuzzDecode(f *testing.F) {
	for _, recording := range goldens(f) {
		msgs := split(recording)
		f.Add(join(msgs[:min(len(msgs), 60)]))
		for _, m := range msgs[:min(len(msgs), 12)] {
			f.Add(join([][]byte{m}))
		}
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := decoding(1, nil)
		var last event.Position
		for _, m := range split(b) {
			rec, err := s.decode(m)
			if err != nil {
				if rec != nil {
					t.Fatalf("record %+v beside error %v", rec, err)
				}
				return
			}
			if rec == nil {
				continue
			}
			switch rec.Kind {
			case event.Row, event.Message:
				if rec.Position.Compare(last) <= 0 {
					t.Fatalf("position %v after %v", rec.Position, last)
				}
				last = rec.Position
				if rec.Kind == event.Row && (rec.Relation == nil || len(rec.Values) != len(rec.Relation.Columns)) {
					t.Fatalf("row with %d values of %+v", len(rec.Values), rec.Relation)
				}
			case event.Commit:
				if rec.Confirm <= rec.Position.Commit {
					t.Fatalf("commit at %v confirms %v", rec.Position, rec.Confirm)
				}
			case event.Keepalive:
			default:
				t.Fatalf("record of kind %d", rec.Kind)
			}
			describe(io.Discard, rec)
		}
	})
}

// loop reads the same bytes again and again.
type loop struct {
	b  []byte
	at int
}

func (l *loop) Read(p []byte) (int, error) {
	n := copy(p, l.b[l.at:])
	l.at = (l.at + n) % len(l.b)
	return n, nil
}

// endless is a Stream that receives one transaction of rows for ever, after its table's description.
func endless(t testing.TB, rows int) *Stream {
	var wire []byte
	add := func(body []byte) {
		var err error
		if wire, err = (&pgproto3.CopyData{Data: body}).Encode(wire); err != nil {
			t.Fatal(err)
		}
	}
	add(beginMsg(0x50000, 7))
	for i := range rows {
		add(insertMsg(event.LSN(0x1000+i), 1, "0190d3a8-7a9c-7c3e-8b1f-2d4e5f6a7b8c", strings.Repeat("x", 256)))
	}
	add(commitMsg(0x50000, 0x50030))
	s := decoding(1, nil)
	feed(t, s, relationMsg(1, "public", "outbox", idColumn, bodyColumn))
	s.buf = bufio.NewReaderSize(&loop{b: wire}, readBuffer)
	s.front = pgproto3.NewFrontend(s.buf, io.Discard)
	return s
}

// again lets the same transaction come once more.
func (s *Stream) again() { s.decoder.last = 0 }

func TestRowsAllocateNothing(t *testing.T) {
	const rows = 500
	s := endless(t, rows)
	allocs := testing.AllocsPerRun(100, func() {
		s.again()
		for range rows + 1 {
			if _, err := s.Next(); err != nil {
				t.Fatal(err)
			}
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations in a transaction of %d rows, want none", allocs, rows)
	}
}

func BenchmarkNext(b *testing.B) {
	const rows = 9
	s := endless(b, rows)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if i%(rows+1) == 0 {
			s.again()
		}
		if _, err := s.Next(); err != nil {
			b.Fatal(err)
		}
	}
}
