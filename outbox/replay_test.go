package outbox

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/event"
)

var testKey = ReplayKey{Secret: []byte("0123456789abcdef0123456789abcdef"), Slot: "orders", Stream: "ORDERS"}

// replaying is a mapper that honours replays, and counts those that are forged.
func replaying(t testing.TB, m Mapping, forged *int) *Mapper {
	m.Replay = ReplayOptions{
		Key:    func() (ReplayKey, bool) { return testKey, true },
		Forged: func(event.Position) { *forged++ },
	}
	return mapperOf(t, m)
}

func replayMessage(content []byte) *event.Record {
	return &event.Record{
		Kind: event.Message, Prefix: ReplayPrefix, Content: content, Transactional: true, XID: 99, CommitTime: commitTime.AddDate(1, 0, 0),
		Position: event.Position{Timeline: 1, Commit: 900, Change: 800},
	}
}

func signed(t testing.TB, r Replay) []byte {
	t.Helper()
	b, err := r.Sign(testKey)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var outboxTable = Mapping{Tables: []Table{{Schema: "public", Name: "outbox"}}}

// linesOf are an event's headers but those of the replay, as text.
func linesOf(ev *event.Event) []string {
	var all []string
	for _, h := range ev.Headers {
		if h.Name != event.HeaderReplay {
			all = append(all, h.Name+": "+string(h.Value))
		}
	}
	return all
}

func TestReplayedRowIsMappedAsFromTheLog(t *testing.T) {
	forged := 0
	m := replaying(t, outboxTable, &forged)
	rec := rowOf(defaultRelation(), "7", testID, "order", "42", "paid", `{"a": 1}`, `{"x-own": "1"}`, "3", "2024-05-06 07:08:09+00")
	plain := mapOne(t, mapperOf(t, outboxTable), rec)
	got := mapOne(t, m, replayMessage(signed(t, Replay{Run: "r1", Row: ReplayOf(rec)})))
	if string(got.ID) != testID || string(got.Subject) != string(plain.Subject) || !bytes.Equal(got.Payload, plain.Payload) ||
		string(got.AggregateID) != "42" || got.Table != "public.outbox" || !reflect.DeepEqual(linesOf(got), linesOf(plain)) {
		t.Errorf("got %+v, want %+v", got, plain)
	}
	if got.Position.Commit != 900 || got.XID != 99 || !got.CommitTime.Equal(commitTime.AddDate(1, 0, 0)) {
		t.Errorf("it is at %s of transaction %d", got.Position, got.XID)
	}
	if want := testID + ":r:r1"; string(got.MsgID) != want {
		t.Errorf("Nats-Msg-Id %q, want %q", got.MsgID, want)
	}
	if got.Replay == nil || *got.Replay != (event.Replay{Run: "r1"}) || got.Redelivered() {
		t.Errorf("replay is %+v", got.Replay)
	}
	last := got.Headers[len(got.Headers)-1]
	if last.Name != event.HeaderReplay || string(last.Value) != "r1" {
		t.Errorf("last header is %s: %s", last.Name, last.Value)
	}

	// Others after it are none.
	if ev := mapOne(t, m, rec); ev.Replay != nil || string(ev.MsgID) != testID {
		t.Errorf("the next row is a replay, too: %+v", ev)
	}
	if forged != 0 {
		t.Errorf("%d were forged", forged)
	}
}

func TestReplayOptionsAreHonoured(t *testing.T) {
	forged := 0
	m := replaying(t, Mapping{Tables: []Table{{Schema: "public", Name: "outbox"}}, Messages: true}, &forged)
	rec := rowOf(defaultRelation(), "7", testID, "order", "42", "paid", `{}`, sqlNull, sqlNull, sqlNull)
	letter := "walrelay.dlq.ORDERS.-.1:0/1:0/1:0"
	got := mapOne(t, m, replayMessage(signed(t, Replay{
		Run: "r", KeepID: true, Letter: letter, Subject: "again.{event_type}.{aggregate_id}", Time: commitTime, Row: ReplayOf(rec),
	})))
	if string(got.MsgID) != testID || string(got.Subject) != "again.paid.42" || !got.Redelivered() || got.Replay.Letter != letter || !got.Replay.KeepID {
		t.Errorf("got %s to %s, %+v", got.MsgID, got.Subject, got.Replay)
	}
	if want := event.HeaderTime + ": " + commitTime.UTC().Format("2006-01-02T15:04:05.999999999Z07:00"); !strings.Contains(strings.Join(linesOf(got), "\n"), want) {
		t.Errorf("headers %q, want %q", linesOf(got), want)
	}
	// The subject is that of this one only.
	if ev := mapOne(t, m, replayMessage(signed(t, Replay{Run: "r", Row: ReplayOf(rec)}))); string(ev.Subject) != "outbox.order.paid" {
		t.Errorf("the next one goes to %s", ev.Subject)
	}

	got = mapOne(t, m, replayMessage(signed(t, Replay{Run: "r", Message: &ReplayMessage{Content: []byte(`{"id": "` + testID + `", "aggregate_type": "order", "aggregate_id": "1", "event_type": "paid", "payload": [1]}`)}})))
	if string(got.Payload) != "[1]" || string(got.MsgID) != testID+":r:r" || got.Table != DefaultPrefix {
		t.Errorf("message: %+v", got)
	}

	stored := &ReplayEvent{
		ID: "7", Table: "public.gone", Subject: "outbox.order.paid", AggregateType: "order", AggregateID: "42", EventType: "paid", Body: []byte{0, 1},
		Headers: []ReplayHeader{
			{event.HeaderID, []byte("7")},
			{event.HeaderAggregateType, []byte("order")},
			{event.HeaderTime, []byte("2024-01-01T00:00:00Z")},
			{"Nats-Rollup", []byte("all")},
			{event.HeaderPos, []byte("1:0/1:0/1:0")},
			{"x-own", []byte("1")},
			{event.HeaderContentType, []byte("text/plain")},
		},
	}
	got = mapOne(t, m, replayMessage(signed(t, Replay{Run: "r", Event: stored})))
	want := []string{
		event.HeaderID + ": 7", event.HeaderAggregateType + ": order", event.HeaderAggregateID + ": 42", event.HeaderEventType + ": paid",
		event.HeaderTime + ": 2024-01-01T00:00:00Z", "x-own: 1", event.HeaderContentType + ": text/plain",
	}
	if !reflect.DeepEqual(linesOf(got), want) || string(got.MsgID) != "public.gone:7:r:r" || !bytes.Equal(got.Payload, []byte{0, 1}) || got.Table != "public.gone" {
		t.Errorf("stored event: %s %q %q, headers %q", got.MsgID, got.Payload, got.Table, linesOf(got))
	}
	got = mapOne(t, m, replayMessage(signed(t, Replay{Run: "r", Subject: "to.{header:x-own}", Event: stored})))
	if string(got.Subject) != "to.1" {
		t.Errorf("stored event goes to %s", got.Subject)
	}
	if forged != 0 {
		t.Errorf("%d were forged", forged)
	}
}

// Whatever is signed counts as an event, so that it counts at every read of the log.
func TestBadReplayIsPoison(t *testing.T) {
	forged := 0
	m := replaying(t, outboxTable, &forged)
	row := func(change func(*ReplayRow)) *ReplayRow {
		r := ReplayOf(rowOf(defaultRelation(), "7", testID, "order", "42", "paid", `{}`, sqlNull, sqlNull, sqlNull))
		change(r)
		return r
	}
	seal := func(text string) []byte { return sealed([]byte(text)) }
	for name, c := range map[string]struct {
		content []byte
		want    string
		letter  string
	}{
		"another table":       {signed(t, Replay{Run: "r", Letter: "l", Row: row(func(r *ReplayRow) { r.Table = "other" })}), "table public.other is not one of the relay's", "l"},
		"a column is missing": {signed(t, Replay{Run: "r", Row: row(func(r *ReplayRow) { r.Columns[1].Name = "key" })}), "does not fit the mapping", ""},
		"a NULL id":           {signed(t, Replay{Run: "r", Row: row(func(r *ReplayRow) { r.Values[1] = nil })}), "the id is NULL", ""},
		"messages are off":    {signed(t, Replay{Run: "r", Message: &ReplayMessage{}}), "--messages is not set", ""},
		"a bad subject":       {signed(t, Replay{Run: "r", Subject: "a..{nothing}", Row: row(func(*ReplayRow) {})}), "", ""},
		"no id left":          {signed(t, Replay{Run: "r", Letter: "l", Event: &ReplayEvent{Table: "t", Subject: "a"}}), "the id is NULL", "l"},
		"no JSON":             {seal("nothing"), "cannot be read", ""},
		"another version":     {seal(`{"v": 2, "run": "r2", "letter": "l", "way": "new"}`), "format version 2", "l"},
		"an unknown key":      {seal(`{"v": 1, "run": "r2", "way": "new"}`), "cannot be read", ""},
		"nothing to publish":  {seal(`{"v": 1, "run": "r2"}`), "0 of row, message and event", ""},
		"something behind":    {seal(`{"v": 1, "run": "r", "message": {"content": ""}} 1`), "something follows", ""},
	} {
		var ev event.Event
		ok, err := m.Map(replayMessage(c.content), &ev)
		var poison *event.Poison
		if !ok || !errors.As(err, &poison) || !strings.Contains(poison.Detail, c.want) {
			t.Errorf("%s: %t, %v; want %q", name, ok, err, c.want)
			continue
		}
		if ev.Replay == nil || ev.Replay.Letter != c.letter || ev.Position.Commit != 900 {
			t.Errorf("%s: %+v at %s", name, ev.Replay, ev.Position)
		}
	}
	if forged != 0 {
		t.Errorf("%d were forged", forged)
	}
}

// sealed is a text with a good signature.
func sealed(text []byte) []byte {
	return append(append(hex.AppendEncode(nil, testKey.sum(text)), '\n'), text...)
}

func TestForgedReplayIsIgnored(t *testing.T) {
	forged := 0
	m := replaying(t, outboxTable, &forged)
	rec := rowOf(defaultRelation(), "7", testID, "order", "42", "paid", `{}`, sqlNull, sqlNull, sqlNull)
	r := Replay{Run: "r", Row: ReplayOf(rec)}
	good := signed(t, r)
	other := func(k ReplayKey) []byte {
		b, err := r.Sign(k)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	changed := bytes.Replace(good, []byte(`"run":"r"`), []byte(`"run":"q"`), 1)
	for name, content := range map[string][]byte{
		"nothing":        nil,
		"no signature":   good[65:],
		"changed":        changed,
		"cut off":        good[:len(good)-1],
		"another secret": other(ReplayKey{Secret: []byte("x"), Slot: "orders", Stream: "ORDERS"}),
		"another slot":   other(ReplayKey{Secret: testKey.Secret, Slot: "other", Stream: "ORDERS"}),
		"another stream": other(ReplayKey{Secret: testKey.Secret, Slot: "orders", Stream: "OTHER"}),
	} {
		before := forged
		var ev event.Event
		if ok, err := m.Map(replayMessage(content), &ev); ok || err != nil || forged != before+1 {
			t.Errorf("%s: %t, %v, %d forged", name, ok, err, forged-before)
		}
	}
	outside := replayMessage(good)
	outside.Transactional = false
	var ev event.Event
	if ok, err := m.Map(outside, &ev); ok || err != nil {
		t.Errorf("outside of a transaction: %t, %v", ok, err)
	}
	if ok, err := mapperOf(t, outboxTable).Map(replayMessage(good), &ev); ok || err != nil {
		t.Errorf("where no replay is honoured: %t, %v", ok, err)
	}
}

func TestReplayPrefixIsReserved(t *testing.T) {
	if _, err := NewMapper(Mapping{Messages: true, Prefix: ReplayPrefix}); event.ClassOf(err) != event.Usage {
		t.Errorf("got %v", err)
	}
}

func TestReplayIsCheckedBeforeItIsSigned(t *testing.T) {
	for name, r := range map[string]Replay{
		"no run":        {Event: &ReplayEvent{}},
		"a bad run":     {Run: "a b", Event: &ReplayEvent{}},
		"two":           {Run: "r", Event: &ReplayEvent{}, Message: &ReplayMessage{}},
		"a bad letter":  {Run: "r", Letter: "a b", Event: &ReplayEvent{}},
		"missing value": {Run: "r", Row: &ReplayRow{Schema: "a", Table: "b", Columns: []ReplayColumn{{"c", 1}}}},
	} {
		if _, err := r.Sign(testKey); err == nil {
			t.Errorf("%s is signed", name)
		}
	}
}

// Any content with a good signature is an event or poison, and never both nor a panic.
func FuzzReplay(f *testing.F) {
	rec := rowOf(defaultRelation(), "7", testID, "order", "42", "paid", `{}`, sqlNull, sqlNull, sqlNull)
	for _, r := range []Replay{
		{Run: "r", Row: ReplayOf(rec)},
		{Run: "r", Letter: "walrelay.dlq.A.-.1:0/1:0/1:0", KeepID: true, Subject: "a.{header:x}", Event: &ReplayEvent{ID: "1", Table: "t", Subject: "a", Headers: []ReplayHeader{{"x", []byte("y")}}}},
		{Run: "r", Message: &ReplayMessage{Content: []byte(`{"id": 1}`)}},
	} {
		r.Version = replayVersion
		text, err := json.Marshal(r)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte(`{"v":1,"run":"r","row":{"schema":"public","table":"outbox","columns":[],"values":[]}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		forged := 0
		m := replaying(t, Mapping{Tables: outboxTable.Tables, Messages: true}, &forged)
		var ev event.Event
		ok, err := m.Map(replayMessage(sealed(text)), &ev)
		poison, bad := errors.AsType[*event.Poison](err)
		if !ok || forged != 0 || err != nil && !bad || ev.Replay == nil || ev.Position.Commit != 900 {
			t.Fatalf("%t, %v, %d forged, %+v", ok, err, forged, ev)
		}
		if poison != nil {
			return
		}
		for _, h := range ev.Headers {
			if badName([]byte(h.Name)) || badValue(h.Value) || hasFoldPrefix([]byte(h.Name), "Nats-") {
				t.Fatalf("header %q: %q", h.Name, h.Value)
			}
		}
		if !ValidRun(ev.Replay.Run) || len(ev.ID) == 0 || len(ev.MsgID) == 0 {
			t.Fatalf("%+v of run %+v", ev, ev.Replay)
		}
	})
}
