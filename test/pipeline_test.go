package test

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/relay"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/test/harness"
)

// allocations an event may cost: what is allocated once a second or once a
// session is spread over the events, and nothing else is there.
const allocations = 0.1

// BenchmarkPipeline is an event's way from the bytes of the replication
// connection to a sink that takes everything, without servers. One operation is one event.
func BenchmarkPipeline(b *testing.B) {
	for _, rows := range []int{1, 10, 1000} {
		b.Run(fmt.Sprintf("rows=%d", rows), func(b *testing.B) {
			p := newPipeline(b, rows)
			p.send(rows)
			b.ReportAllocs()
			b.ResetTimer()
			p.send(b.N)
		})
	}
}

func TestPipelineAllocatesNothingAnEvent(t *testing.T) {
	const events = 50_000
	p := newPipeline(t, 10)
	p.send(1000)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	p.send(events)
	runtime.ReadMemStats(&after)
	if per := float64(after.Mallocs-before.Mallocs) / events; per > allocations {
		t.Errorf("%.3f allocations an event, want %v at most", per, allocations)
	}
}

func TestRelayAllocatesNothingAnEvent(t *testing.T) {
	t.Parallel()
	const warm, events = 5_000, 100_000
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	r := newRig(t, rigOptions{args: []string{"--http-addr", addr}})
	r.relay.MustStart(t)
	commit := func(n int) {
		r.exec(fmt.Sprintf(`DO $$ BEGIN FOR i IN 1..%d LOOP
			INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
				SELECT gen_random_uuid(), 'order', 'o' || n, 'created', '{}' FROM generate_series(1, 10) n;
			COMMIT; END LOOP; END $$`, n/10))
	}
	commit(warm)
	r.stored(warm, time.Minute)
	before := mallocs(t, addr)
	commit(events)
	r.stored(warm+events, 2*time.Minute)
	per := float64(mallocs(t, addr)-before) / events
	t.Logf("%.4f allocations an event", per)
	if per > allocations {
		t.Errorf("%.3f allocations an event, want %v at most", per, allocations)
	}
}

// mallocs is what a relay has allocated so far, by its own metrics.
func mallocs(t *testing.T, addr string) uint64 {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+addr+"/metrics", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		if v, ok := strings.CutPrefix(lines.Text(), "go_memstats_mallocs_total "); ok {
			n, err := strconv.ParseFloat(v, 64)
			if err != nil {
				t.Fatal(err)
			}
			return uint64(n)
		}
	}
	t.Fatal("no go_memstats_mallocs_total in /metrics")
	return 0
}

// pipeline is a relay between a server by script and a sink that takes everything.
type pipeline struct {
	t    testing.TB
	conn net.Conn // of the server
	sink *takesAll
	tx   *transaction
	out  []byte // what a server sends at a time
	sent uint64
	stop context.CancelFunc
	over chan error
}

func newPipeline(t testing.TB, rows int) *pipeline {
	t.Helper()
	p := &pipeline{t: t, sink: &takesAll{more: make(chan struct{}, 1)}, tx: newTransaction(rows), over: make(chan error, 1)}
	conf, err := pgconn.ParseConfig("host=192.0.2.1 user=relay dbname=orders sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	streaming := make(chan error, 1)
	conf.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		p.conn = server
		go func() { streaming <- begin(server) }()
		return client, nil
	}
	mapper, err := outbox.NewMapper(outbox.Mapping{Tables: []outbox.Table{{Schema: "public", Name: "outbox"}}})
	if err != nil {
		t.Fatal(err)
	}
	r, err := relay.New(relay.Options{
		OpenSource: func(ctx context.Context) (relay.Source, error) {
			return replication.Open(ctx, replication.Config{Conn: conf, Slot: "orders", Publications: []string{"orders"}})
		},
		OpenSink: func(context.Context, func(error)) (relay.Sink, error) { return p.sink, nil },
		Mapper:   mapper,
		Watcher:  calm{},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	go func() { p.over <- r.Run(ctx) }()
	t.Cleanup(func() {
		p.conn.Close()
		stop()
		if err := <-p.over; err != nil {
			t.Errorf("relay: %v", err)
		}
	})
	if err := <-streaming; err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, p.conn) // statuses
	p.write(relation())
	return p
}

// send sends at least n events, in whole transactions, and waits until the sink has them.
func (p *pipeline) send(n int) {
	p.t.Helper()
	for ; n > 0; n -= p.tx.rows {
		p.out = append(p.out, p.tx.next()...)
		if p.sent += uint64(p.tx.rows); len(p.out) >= 64<<10 {
			p.write(p.out)
			p.out = p.out[:0]
		}
	}
	p.write(p.out)
	p.out = p.out[:0]
	for p.sink.events.Load() < p.sent {
		select {
		case <-p.sink.more:
		case err := <-p.over:
			p.t.Fatalf("the relay ended: %v", err)
		}
	}
}

func (p *pipeline) write(b []byte) {
	if _, err := p.conn.Write(b); err != nil {
		p.t.Fatal(err)
	}
}

// begin answers what replication.Open asks.
func begin(conn net.Conn) error {
	b := pgproto3.NewBackend(conn, conn)
	if _, err := b.ReceiveStartupMessage(); err != nil {
		return err
	}
	ready := &pgproto3.ReadyForQuery{TxStatus: 'I'}
	send := func(msgs ...pgproto3.BackendMessage) error {
		for _, m := range msgs {
			b.Send(m)
		}
		return b.Flush()
	}
	if err := send(&pgproto3.AuthenticationOk{}, &pgproto3.ParameterStatus{Name: "server_version", Value: "15.18"},
		&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}}, ready); err != nil {
		return err
	}
	row := func(values ...string) error {
		var fields []pgproto3.FieldDescription
		var row [][]byte
		for _, v := range values {
			fields = append(fields, pgproto3.FieldDescription{Name: []byte("c"), DataTypeOID: event.TypeText})
			row = append(row, []byte(v))
		}
		return send(&pgproto3.RowDescription{Fields: fields}, &pgproto3.DataRow{Values: row},
			&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")}, ready)
	}
	for {
		msg, err := b.Receive()
		if err != nil {
			return err
		}
		q, ok := msg.(*pgproto3.Query)
		if !ok {
			return fmt.Errorf("unexpected %T", msg)
		}
		switch word, _, _ := strings.Cut(q.String, " "); word {
		case "SHOW":
			err = row("logical")
		case "SET":
			err = send(&pgproto3.CommandComplete{CommandTag: []byte("SET")}, ready)
		case "IDENTIFY_SYSTEM":
			err = row("7123456789012345678", "1", "0/9000", "orders")
		default:
			return send(&pgproto3.CopyBothResponse{})
		}
		if err != nil {
			return err
		}
	}
}

// transaction is the bytes of one, in which the positions are replaced from one
// to the next.
type transaction struct {
	rows  int
	bytes []byte
	lsns  []int // offsets of what moves on with each message; the first is Begin's
	final []int // offsets of the commit LSN
	end   int   // offset of the end LSN
	lsn   uint64
}

func newTransaction(rows int) *transaction {
	tx := &transaction{rows: rows, lsn: 0x100_0000}
	begin := tx.message()
	tx.final = append(tx.final, begin+1)
	tx.body('B', make([]byte, 8+8+4))
	values := []string{
		"1", "0d2f7f0e-6a3e-4f55-9b43-0123456789ab", "order", "order-42", "created",
		`{"n": 1, "pad": "` + strings.Repeat("x", 237) + `"}`, "2024-05-06 07:08:09.123456+00",
	}
	insert := binary.BigEndian.AppendUint32(nil, relationID)
	insert = binary.BigEndian.AppendUint16(append(insert, 'N'), uint16(len(values)))
	for _, v := range values {
		insert = binary.BigEndian.AppendUint32(append(insert, 't'), uint32(len(v)))
		insert = append(insert, v...)
	}
	for range rows {
		tx.lsns = append(tx.lsns, tx.message()-24)
		tx.body('I', insert)
	}
	commit := tx.message()
	tx.final = append(tx.final, commit+2)
	tx.end = commit + 2 + 8
	tx.body('C', make([]byte, 1+8+8+8))
	return tx
}

// message is the offset of the message that is appended next.
func (tx *transaction) message() int { return len(tx.bytes) + 1 + 4 + 1 + 24 }

func (tx *transaction) body(kind byte, b []byte) {
	tx.bytes = appendXLog(tx.bytes, kind, b)
}

// appendXLog appends a message of pgoutput as CopyData.
func appendXLog(out []byte, kind byte, b []byte) []byte {
	out = binary.BigEndian.AppendUint32(append(out, 'd'), uint32(4+1+24+1+len(b)))
	out = append(append(out, 'w'), make([]byte, 24)...)
	return append(append(out, kind), b...)
}

// next is the bytes of the next transaction, valid until the following call.
func (tx *transaction) next() []byte {
	put := func(at int) { binary.BigEndian.PutUint64(tx.bytes[at:], tx.lsn) }
	for _, at := range tx.lsns {
		tx.lsn += 400
		put(at)
	}
	tx.lsn += 100
	for _, at := range tx.final {
		put(at)
	}
	tx.lsn += 48
	put(tx.end)
	return tx.bytes
}

const relationID = 16384

func relation() []byte {
	b := binary.BigEndian.AppendUint32(nil, relationID)
	b = append(b, "public\x00outbox\x00d\x00\x07"...)
	for _, c := range []event.Column{
		{Name: "seq", Type: event.TypeInt8},
		{Name: "id", Type: event.TypeUUID},
		{Name: "aggregate_type", Type: event.TypeText},
		{Name: "aggregate_id", Type: event.TypeText},
		{Name: "event_type", Type: event.TypeText},
		{Name: "payload", Type: event.TypeJSONB},
		{Name: "created_at", Type: event.TypeTimestamptz},
	} {
		b = append(append(append(b, 0), c.Name...), 0)
		b = binary.BigEndian.AppendUint32(b, c.Type)
		b = binary.BigEndian.AppendUint32(b, ^uint32(0))
	}
	return appendXLog(nil, 'R', b)
}

// takesAll is a sink that has stored every event as soon as it is flushed.
type takesAll struct {
	appended uint64
	size     uint64
	events   atomic.Uint64
	more     chan struct{}
}

func (s *takesAll) Append(ev *event.Event) error {
	s.appended++
	s.size += uint64(len(ev.Payload))
	return nil
}

func (s *takesAll) Flush() error {
	if s.events.Load() != s.appended {
		s.events.Store(s.appended)
		select {
		case s.more <- struct{}{}:
		default:
		}
	}
	return nil
}

func (s *takesAll) Resume(context.Context, event.Origin) (event.Resume, error) {
	return event.Resume{}, nil
}
func (s *takesAll) Recall(context.Context, *event.Event) (uint64, error)      { return 0, nil }
func (s *takesAll) Resumed(context.Context, event.Checkpoint) error           { return nil }
func (s *takesAll) Full() bool                                                { return false }
func (s *takesAll) Settled() uint64                                           { return s.events.Load() }
func (s *takesAll) WaitSettled(context.Context, uint64) error                 { return s.Flush() }
func (s *takesAll) WaitRoom(context.Context) error                            { return nil }
func (s *takesAll) Park(context.Context, *event.Event, *event.Poison) error   { return nil }
func (s *takesAll) Repark(context.Context, *event.Event, *event.Poison) error { return nil }
func (s *takesAll) Redeliver(_ context.Context, _ *event.Event, why *event.Poison) (*event.Poison, error) {
	return why, nil
}
func (s *takesAll) Release(context.Context, *event.Event) error               { return nil }
func (s *takesAll) Refuse(context.Context, *event.Event, *event.Poison) error { return nil }
func (s *takesAll) Checkpoint(context.Context, event.Checkpoint) error        { return nil }
func (s *takesAll) Tick()                                                     {}
func (s *takesAll) Close() error                                              { return nil }

// calm is a watcher of a server that never shuts down.
type calm struct{}

func (calm) Confirmed(context.Context) (event.LSN, error) { return 1, nil }
func (calm) AwaitShutdown(ctx context.Context) error {
	<-ctx.Done()
	return ctx.Err()
}
func (calm) Diagnose(_ context.Context, err error) error { return err }
