package harness_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/test/harness"
)

// message is what a test puts into a stream: an event's id, such as a1 for number
// 1 of aggregate a, and its position.
type message struct {
	id      string
	pos     event.LSN
	payload string // "" is the committed one
	subject string // "" is an ordinary one
}

// faults are the names of the numbers that must be 0.
var faults = []string{"missing", "duplicates", "out_of_order", "differing", "unexpected"}

func TestOracleSeesEveryFault(t *testing.T) {
	n := harness.RunNATS(t, harness.NATSOptions{})
	js := n.JetStream(t)
	good := []message{{id: "a1", pos: 10}, {id: "b1", pos: 20}, {id: "a2", pos: 30}, {id: "c1", pos: 40}, {id: "c2", pos: 41}}
	with := func(edit func([]message) []message) []message { return edit(slices.Clone(good)) }

	for _, test := range []struct {
		name   string
		stream []message
		want   string // the numbers that are not zero
	}{
		{"good", good, "stored=5"},
		{"empty", nil, "missing=5"},
		{"missing", with(func(m []message) []message { return slices.Delete(m, 1, 2) }), "stored=4 missing=1"},
		{"twice", with(func(m []message) []message { return append(m, m[1]) }), "stored=6 duplicates=1"},
		{"aggregate out of order", with(func(m []message) []message {
			m[0].id, m[2].id = "a2", "a1"
			return m
		}), "stored=5 out_of_order=1"},
		{"positions out of order", with(func(m []message) []message {
			m[0], m[1] = m[1], m[0]
			return m
		}), "stored=5 out_of_order=1"},
		{"no position", with(func(m []message) []message {
			m[4].pos = 0
			return m
		}), "stored=5 out_of_order=1"},
		{"other bytes", with(func(m []message) []message {
			m[1].payload = `{"n":1}`
			return m
		}), "stored=5 differing=1"},
		{"rolled back", append(slices.Clone(good), message{id: "r1", pos: 50}), "stored=6 unexpected=1"},
		{"foreign", append(slices.Clone(good), message{id: "x1", pos: 50}), "stored=6 unexpected=1"},
		{"unknown stored", append(slices.Clone(good), message{id: "u1", pos: 50}, message{id: "u2", pos: 51}), "stored=7"},
		{"unknown torn", append(slices.Clone(good), message{id: "u2", pos: 51}), "stored=6 missing=1"},
		{"parked", with(func(m []message) []message {
			m[2].subject, m[2].payload = harness.ParkedSubject+"S", "too_large"
			return m
		}), "stored=4 parked=1"},
		{
			"parked and stored", append(slices.Clone(good), message{id: "b1", pos: 20, subject: harness.ParkedSubject + "S"}),
			"stored=5 parked=1 duplicates=1",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			diary := harness.NewDiary()
			for tx, ids := range [][]string{{"a1"}, {"b1"}, {"a2"}, {"c1", "c2"}} {
				remember(diary, int64(tx), harness.Committed, ids...)
			}
			remember(diary, 10, harness.RolledBack, "r1")
			remember(diary, 11, harness.Unknown, "u1", "u2")
			publish(ctx, t, js, test.stream)
			stream, err := harness.ReadStream(ctx, js, "S")
			if err != nil {
				t.Fatal(err)
			}
			r := harness.Compare(diary, stream)
			line, _, _ := strings.Cut(r.String(), "\n")
			var got []string
			for _, f := range strings.Fields(line)[1:] {
				if !strings.HasSuffix(f, "=0") && f != "unknown=2" {
					got = append(got, f)
				}
			}
			if s := strings.Join(got, " "); s != test.want || r.Committed != 5 {
				t.Errorf("got %q, want %q\n%s", s, test.want, r)
			}
			clean := !slices.ContainsFunc(faults, func(f string) bool { return strings.Contains(test.want, f) })
			if r.OK() != clean {
				t.Errorf("OK is %t", r.OK())
			}
		})
	}
}

func committedPayload(id string) string { return `{"id": "` + id + `"}` }

func remember(d *harness.Diary, tx int64, o harness.Outcome, ids ...string) {
	for _, id := range ids {
		d.Add(harness.Entry{
			ID: id, Aggregate: id[:1], N: int(id[1] - '0'), Payload: []byte(committedPayload(id)), Tx: tx, Outcome: o, At: time.Now(),
		})
	}
}

// publish fills a fresh stream S.
func publish(ctx context.Context, t *testing.T, js jetstream.JetStream, stream []message) {
	t.Helper()
	js.DeleteStream(ctx, "S")
	_, err := js.CreateStream(ctx, jetstream.StreamConfig{
		Name: "S", Subjects: []string{"outbox.>", harness.ParkedSubject + ">"}, Storage: jetstream.MemoryStorage,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range stream {
		msg := nats.NewMsg("outbox.order.created")
		if m.subject != "" {
			msg.Subject = m.subject
		}
		msg.Header.Set(event.HeaderID, m.id)
		msg.Header.Set(event.HeaderAggregateID, m.id[:1])
		if m.pos != 0 {
			msg.Header.Set(event.HeaderPos, event.Position{Timeline: 1, Commit: m.pos, Change: m.pos}.String())
		}
		msg.Data = []byte(m.payload)
		if m.payload == "" {
			msg.Data = []byte(committedPayload(m.id))
		}
		if _, err := js.PublishMsg(ctx, msg); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReadStreamReadsAll reads a large stream with holes and deleted ends.
func TestReadStreamReadsAll(t *testing.T) {
	const count = 30_000
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	n := harness.RunNATS(t, harness.NATSOptions{})
	js := n.JetStream(t)
	s, err := js.CreateStream(ctx, jetstream.StreamConfig{Name: "S", Subjects: []string{"s"}})
	if err != nil {
		t.Fatal(err)
	}
	for range count {
		if _, err := js.PublishAsync("s", []byte("payload")); err != nil {
			t.Fatal(err)
		}
	}
	<-js.PublishAsyncComplete()
	for _, seq := range []uint64{1, 2, 777, count} {
		if err := s.DeleteMsg(ctx, seq); err != nil {
			t.Fatal(err)
		}
	}
	stream, err := harness.ReadStream(ctx, js, "S")
	if err != nil {
		t.Fatal(err)
	}
	if len(stream) != count-4 || stream[0].Seq != 3 || stream[len(stream)-1].Seq != count-1 {
		t.Errorf("read %d messages from %d to %d", len(stream), stream[0].Seq, stream[len(stream)-1].Seq)
	}
	if err := harness.AwaitMessages(ctx, js, "S", count-4); err != nil {
		t.Error(err)
	}
}

// TestWritersRememberWhatIsCommitted kills the server under the writers and
// compares with what a trigger saw.
func TestWritersRememberWhatIsCommitted(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	pg.MustExec(t,
		`CREATE TABLE outbox (seq bigint GENERATED ALWAYS AS IDENTITY, id uuid PRIMARY KEY, aggregate_type text NOT NULL,
			aggregate_id text NOT NULL, event_type text NOT NULL, payload jsonb, headers jsonb)`,
		`CREATE TABLE seen (n bigint GENERATED ALWAYS AS IDENTITY, id uuid, payload text)`,
		`CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN INSERT INTO seen (id, payload) VALUES (new.id, new.payload); RETURN NULL; END $$`,
		`CREATE TRIGGER see AFTER INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION see()`)

	ws := harness.NewWriters(harness.Workload{DSN: pg.DSN("postgres"), Seed: 1, Writers: 4})
	done := make(chan error, 1)
	go func() { done <- ws.Run(ctx, 4000) }()
	for i := 1; i <= 2; i++ {
		if err := ws.Diary.Await(ctx, i*1000); err != nil {
			t.Fatal(err)
		}
		if err := pg.Kill(); err != nil {
			t.Fatal(err)
		}
		pg.MustStart(t)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	c := pg.MustConn(t)
	if err := ws.Diary.Resolve(ctx, c, "outbox"); err != nil {
		t.Fatal(err)
	}
	rows, err := c.Query(ctx, "SELECT id::text, payload FROM seen ORDER BY n")
	if err != nil {
		t.Fatal(err)
	}
	var stream []harness.Stored
	var id, payload string
	_, err = pgx.ForEachRow(rows, []any{&id, &payload}, func() error {
		n := event.LSN(len(stream) + 1)
		stream = append(stream, harness.Stored{
			Seq: uint64(n), ID: id, Pos: event.Position{Commit: n}.String(), Payload: []byte(payload),
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r := harness.Compare(ws.Diary, stream)
	if !r.OK() || r.Committed < 4000 || ws.Diary.Count(harness.RolledBack) < 100 {
		t.Errorf("%d rolled back, %s", ws.Diary.Count(harness.RolledBack), r)
	}
	t.Log(r)
}

func TestWritersStopWhenRefused(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	pg := harness.RunPostgres(t, harness.PostgresOptions{})
	ws := harness.NewWriters(harness.Workload{DSN: pg.DSN("postgres")})
	if err := ws.Run(ctx, 10); err == nil || !strings.Contains(fmt.Sprint(err), "42P01") {
		t.Errorf("got %v, want a refusal because there is no table", err)
	}
}
