package replication

import (
	"encoding/hex"
	"slices"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// What SQL returns has the positions of what a session streams.
func TestDecoderPlacesChangesAsAStreamDoes(t *testing.T) {
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	db := outbox(t, pg, "peeked")
	db.exec(t,
		"INSERT INTO outbox VALUES (1, 'one')",
		"INSERT INTO outbox SELECT n, 'many' FROM generate_series(1, 300) n", // several rows in one WAL record and more
		"BEGIN; INSERT INTO outbox VALUES (2, 'kept'); SAVEPOINT s; INSERT INTO outbox VALUES (3, 'gone'); ROLLBACK TO s; "+
			"SELECT pg_logical_emit_message(true, 'walrelay', 'in'); INSERT INTO outbox VALUES (4, NULL); COMMIT",
		"SELECT pg_logical_emit_message(false, 'walrelay', 'outside')",
		"INSERT INTO outbox VALUES (5, 'last')",
	)
	origin, err := Identify(t.Context(), db.config(t))
	if err != nil {
		t.Fatal(err)
	}
	options := PluginOptions([]string{"peeked"}, true)
	for i, o := range options {
		options[i] = quoteLiteral(o)
	}
	res, err := db.sql.Exec(t.Context(), "SELECT lsn, encode(data, 'hex') FROM pg_logical_slot_peek_binary_changes('peeked', NULL, NULL, "+strings.Join(options, ", ")+")").ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	dec := NewDecoder(origin)
	var peeked []event.Position
	for _, row := range res[0].Rows {
		lsn, err := event.ParseLSN(string(row[0]))
		if err != nil {
			t.Fatal(err)
		}
		data, err := hex.DecodeString(string(row[1]))
		if err != nil {
			t.Fatal(err)
		}
		rec, err := dec.Decode(lsn, data)
		if err != nil {
			t.Fatal(err)
		}
		if rec != nil && (rec.Kind == event.Row || rec.Kind == event.Message) {
			peeked = append(peeked, rec.Position)
		}
	}

	s := db.open(t, messages)
	if got := s.Origin(); got.SystemID != origin.SystemID || got.Timeline != origin.Timeline || got.Database != origin.Database {
		t.Errorf("identified %+v, the stream says %+v", origin, got)
	}
	var streamed []event.Position
	for len(streamed) < len(peeked) {
		rec, err := s.Next()
		if err != nil {
			t.Fatal(err)
		}
		if rec.Kind == event.Row || rec.Kind == event.Message {
			streamed = append(streamed, rec.Position)
		}
	}
	if len(peeked) != 306 || !slices.Equal(peeked, streamed) {
		t.Errorf("peeked %d, streamed %d: %v, %v", len(peeked), len(streamed), peeked[:min(3, len(peeked))], streamed[:min(3, len(streamed))])
	}
	if _, err := dec.Decode(1, nil); err == nil {
		t.Error("an empty change was decoded")
	}
}
