package replication

import (
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

// streamAbort is what Postgres 18.4 sends for a transaction that is evicted from
// memory after it aborted, without streaming and with protocol 1.
var streamAbort = []byte{'A', 0, 0, 2, 0xf3, 0, 0, 2, 0xf4}

func TestKindsThatMakeNoEventAreSkippedAndCounted(t *testing.T) {
	s := decoding(1, nil)
	skip := func(kind string, msg []byte, want uint64) {
		t.Helper()
		rec, err := s.decode(xlog(0x300, msg))
		if rec != nil || err != nil {
			t.Errorf("%s: got record %+v, error %v", kind, rec, err)
		}
		if got := s.decoder.skipped.Counts()[kind]; got != want {
			t.Errorf("%d of kind %s are counted, want %d", got, kind, want)
		}
	}
	skip("stream_abort", streamAbort, 1)
	skip("origin", []byte{'O', 0, 0, 0, 0, 0, 0, 0, 1, 'x', 0}, 0)
	feed(t, s, beginMsg(0x500, 7))
	feed(t, s, relationMsg(1, "public", "outbox", idColumn))
	skip("type", []byte{'Y', 0, 0, 0, 1, 'p', 0, 'x', 0}, 0)
	skip("update", []byte{'U', 0, 0, 0, 1}, 1)
	skip("delete", []byte{'D', 0, 0, 0, 1}, 1)
	skip("truncate", []byte{'T', 0, 0, 0, 1}, 1)
	// With protocol 4 it also has an LSN and a time.
	skip("stream_abort", append(streamAbort[:9:9], make([]byte, 16)...), 2)
	if rec := feed(t, s, insertMsg(0x310, 1, "a")); rec == nil || rec.Kind != event.Row {
		t.Errorf("got %+v behind what is skipped, want a row", rec)
	}
	if rec := feed(t, s, commitMsg(0x500, 0x530)); rec == nil || rec.Confirm != 0x530 {
		t.Errorf("got %+v, want the commit", rec)
	}
}

func TestKindsThatCannotBeSkippedNameTheWayPast(t *testing.T) {
	for _, c := range []struct {
		kind      byte
		err, hint string
	}{
		{'b', `slot "orders" has two_phase`, "walrelay check"},
		{'P', `slot "orders" has two_phase`, "walrelay check"},
		{'K', `slot "orders" has two_phase`, "walrelay check"},
		{'r', `slot "orders" has two_phase`, "walrelay check"},
		{'S', `message 'S' of a transaction in progress`, "report it"},
		{'E', `message 'E' of a transaction in progress`, "report it"},
		{'c', `message 'c' of a transaction in progress`, "report it"},
		{'p', `message 'p' of a transaction in progress`, "report it"},
		{'?', `unknown logical replication message '?'`, "report it"},
		{0, `unknown logical replication message '\x00'`, "report it"},
	} {
		for _, open := range []bool{false, true} {
			s := decoding(1, nil)
			s.decoder.slot = "orders"
			past := "walrelay slot advance orders --blind --to 0/301"
			if open {
				feed(t, s, beginMsg(0x500, 7))
				past = "walrelay slot advance orders --blind --to 0/501"
			}
			rec, err := s.decode(xlog(0x300, []byte{c.kind, 0, 0, 0, 1}))
			if rec != nil || err == nil || event.ClassOf(err) != event.Precondition || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%q: got record %+v, error %v", c.kind, rec, err)
			}
			if hint := event.HintOf(err); !strings.Contains(hint, c.hint) || !strings.Contains(hint, past) {
				t.Errorf("%q: the hint is %q", c.kind, hint)
			}
		}
	}
	// What is malformed is a fault of the program, and there is the same way past.
	s := decoding(1, nil)
	s.decoder.slot = "orders"
	_, err := s.decode(xlog(0x300, []byte{'A', 0}))
	if event.ClassOf(err) != event.Unexpected || !strings.Contains(event.HintOf(err), "walrelay slot advance orders --blind --to 0/301") {
		t.Errorf("error %v, hint %q", err, event.HintOf(err))
	}
}
