package replication

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
)

// peer is a server by script: it answers what Open asks, and after that does
// only what the test tells it to. Its connection is a net.Pipe, so whatever it
// sends waits for a reader.
type peer struct {
	version  string                             // of the server
	standby  bool                               // tells that it is one
	level    string                             // wal_level
	timeline string                             // of IDENTIFY_SYSTEM
	history  string                             // content of the timeline history file
	refuse   map[string]*pgproto3.ErrorResponse // by the first word of a command; "" refuses the session

	startup  map[string]string // parameters of the session
	commands []string

	conn     net.Conn
	back     *pgproto3.Backend
	sending  sync.Mutex
	statuses chan status // what Confirm sent
	over     chan bool   // closed when the client is gone; true before it when it said Terminate
}

type status struct{ written, flushed, applied event.LSN }

func newPeer() *peer {
	return &peer{
		version: "15.18 (Debian 15.18-1)", level: "logical", timeline: "1",
		statuses: make(chan status, 100), over: make(chan bool, 1),
	}
}

func refusal(code, message string) *pgproto3.ErrorResponse {
	return &pgproto3.ErrorResponse{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message}
}

const secret = "s3cr3t@:/#%"

func (p *peer) config(t *testing.T) Config {
	conf, err := pgconn.ParseConfig("host=peer user=relay dbname=orders sslmode=disable password='" + secret + "'")
	if err != nil {
		t.Fatal(err)
	}
	conf.LookupFunc = func(context.Context, string) ([]string, error) { return []string{"192.0.2.1"}, nil }
	conf.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		p.conn, p.back = server, pgproto3.NewBackend(server, server)
		go p.serve()
		return client, nil
	}
	return Config{Conn: conf, Slot: "orders", Publications: []string{"orders"}, Fingerprint: "f"}
}

// open opens a stream on p.
func (p *peer) open(t *testing.T) *Stream {
	t.Helper()
	s, err := Open(t.Context(), p.config(t))
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() {
		p.conn.Close()
		s.Close()
	})
	return s
}

// serve answers until the stream begins and then listens.
func (p *peer) serve() {
	defer close(p.over)
	msg, err := p.back.ReceiveStartupMessage()
	if err != nil {
		return
	}
	p.startup = msg.(*pgproto3.StartupMessage).Parameters
	if r := p.refuse[""]; r != nil {
		p.send(r)
		p.conn.Close()
		return
	}
	hotStandby := "off"
	if p.standby {
		hotStandby = "on"
	}
	p.send(&pgproto3.AuthenticationOk{},
		&pgproto3.ParameterStatus{Name: "server_version", Value: p.version},
		&pgproto3.ParameterStatus{Name: "in_hot_standby", Value: hotStandby},
		&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: []byte{0, 0, 0, 1}},
		&pgproto3.ReadyForQuery{TxStatus: 'I'})
	for {
		msg, err := p.back.Receive()
		if err != nil {
			return
		}
		switch msg := msg.(type) {
		case *pgproto3.Query:
			p.answer(msg.String)
		case *pgproto3.CopyData:
			b := msg.Data
			if len(b) == 34 && b[0] == 'r' {
				lsn := func(i int) event.LSN { return event.LSN(binary.BigEndian.Uint64(b[i:])) }
				p.statuses <- status{lsn(1), lsn(9), lsn(17)}
			}
		case *pgproto3.Terminate:
			p.over <- true
			p.conn.Close()
			return
		}
	}
}

func (p *peer) answer(command string) {
	p.commands = append(p.commands, command)
	word, _, _ := strings.Cut(command, " ")
	if r := p.refuse[word]; r != nil {
		p.send(r, &pgproto3.ReadyForQuery{TxStatus: 'I'})
		return
	}
	switch word {
	case "SHOW":
		p.row("wal_level", p.level)
	case "SET":
		p.send(&pgproto3.CommandComplete{CommandTag: []byte("SET")}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
	case "IDENTIFY_SYSTEM":
		p.row("systemid,timeline,xlogpos,dbname", "7123456789012345678", p.timeline, "0/9000", "orders")
	case "TIMELINE_HISTORY":
		p.row("filename,content", "00000003.history", p.history)
	case "START_REPLICATION":
		p.send(&pgproto3.CopyBothResponse{})
	}
}

func (p *peer) row(names string, values ...string) {
	var fields []pgproto3.FieldDescription
	for name := range strings.SplitSeq(names, ",") {
		fields = append(fields, pgproto3.FieldDescription{Name: []byte(name), DataTypeOID: event.TypeText})
	}
	var row [][]byte
	for _, v := range values {
		row = append(row, []byte(v))
	}
	p.send(&pgproto3.RowDescription{Fields: fields}, &pgproto3.DataRow{Values: row},
		&pgproto3.CommandComplete{CommandTag: []byte("SELECT 1")}, &pgproto3.ReadyForQuery{TxStatus: 'I'})
}

// send writes messages in one go. An error means that the client is gone.
func (p *peer) send(msgs ...pgproto3.BackendMessage) {
	p.sending.Lock()
	defer p.sending.Unlock()
	for _, m := range msgs {
		p.back.Send(m)
	}
	_ = p.back.Flush()
}

// stream sends CopyData from another goroutine.
func (p *peer) stream(bodies ...[]byte) {
	msgs := make([]pgproto3.BackendMessage, len(bodies))
	for i, b := range bodies {
		msgs[i] = &pgproto3.CopyData{Data: b}
	}
	go p.send(msgs...)
}

// next reads a record that must come.
func next(t *testing.T, s *Stream) event.Record {
	t.Helper()
	rec, err := s.Next()
	if err != nil {
		t.Fatalf("next: %v", err)
	}
	return *rec
}

// nextError reads an error that must come.
func nextError(t *testing.T, s *Stream) error {
	t.Helper()
	rec, err := s.Next()
	if err == nil {
		t.Fatalf("next: record %+v, want an error", *rec)
	}
	if _, again := s.Next(); !errors.Is(again, err) {
		t.Errorf("next again: %v, want the same error", again)
	}
	return err
}
