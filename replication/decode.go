package replication

import (
	"bytes"
	"encoding/binary"
	"time"

	"github.com/walrelay/walrelay/charset"
	"github.com/walrelay/walrelay/event"
)

// decoder makes records of the CopyData messages of one session. The record it
// returns, and the bytes in it, are overwritten by the next call.
//
// Message formats: "Streaming Replication Protocol" and "Logical Replication
// Message Formats" of the Postgres manual, protocol version 1.
type decoder struct {
	timeline uint32
	history  []event.Switch
	slot     string           // for hints
	charset  *charset.Charset // when values come as the database stores them
	skipped  *Skipped

	relations map[uint32]*event.Relation
	recent    *event.Relation // of the last row: most rows follow one of their own table

	open     bool // between Begin and Commit
	xid      uint32
	time     time.Time
	position event.Position // of the last change of the transaction
	last     event.LSN      // Position.Commit of the last transaction or message

	prefix string // of the last message, so that equal ones share a string
	values [][]byte
	record event.Record
}

func newDecoder(timeline uint32, history []event.Switch) *decoder {
	return &decoder{timeline: timeline, history: history, skipped: new(Skipped), relations: make(map[uint32]*event.Relation)}
}

// keepalive is the server's primary keepalive message.
type keepalive struct {
	end   event.LSN
	reply bool // a status is asked for at once
}

// keepalive parses the body of a CopyData message that starts with 'k'.
func (d *decoder) keepalive(body []byte) (keepalive, error) {
	if len(body) != 18 {
		return keepalive{}, malformed("keepalive")
	}
	return keepalive{end: event.LSN(binary.BigEndian.Uint64(body[1:])), reply: body[17] != 0}, nil
}

// beat makes the record of a keepalive, nil inside a transaction: what its WAL
// end would confirm includes the commit that is still to come.
func (d *decoder) beat(k keepalive) *event.Record {
	if d.open {
		return nil
	}
	d.record = event.Record{Kind: event.Keepalive, Confirm: k.end}
	return &d.record
}

// xlogHeader is the size of the XLogData envelope: type, WAL start, WAL end, time.
const xlogHeader = 25

// data decodes the body of a CopyData message that starts with 'w'. The record
// is nil when the message only tells the decoder something.
func (d *decoder) data(body []byte) (*event.Record, error) {
	if len(body) <= xlogHeader {
		return nil, malformed("XLogData")
	}
	start := event.LSN(binary.BigEndian.Uint64(body[1:]))
	rec, err := d.change(start, body[xlogHeader], reader{b: body[xlogHeader+1:]})
	if err != nil {
		return nil, d.past(start, err)
	}
	return rec, nil
}

// change decodes the message of a kind whose XLogData starts at start.
func (d *decoder) change(start event.LSN, kind byte, r reader) (*event.Record, error) {
	switch kind {
	case 'I':
		return d.insert(start, r)
	case 'B':
		return nil, d.begin(r)
	case 'C':
		return d.commit(r)
	case 'R':
		return nil, d.relation(r)
	case 'M':
		return d.message(r)
	}
	return nil, d.other(kind, r)
}

func (d *decoder) begin(r reader) error {
	commit := event.LSN(r.uint64())
	at := r.time()
	xid := r.uint32()
	if !r.done() || d.open {
		return malformed("Begin")
	}
	if commit <= d.last {
		return disorder(commit, d.last)
	}
	d.open, d.xid, d.time, d.last = true, xid, at, commit
	d.position = event.Position{Timeline: owner(d.history, commit, d.timeline), Commit: commit}
	return nil
}

func (d *decoder) commit(r reader) (*event.Record, error) {
	r.uint8() // flags, unused
	commit := event.LSN(r.uint64())
	end := event.LSN(r.uint64())
	r.time()
	if !r.done() || !d.open || commit != d.position.Commit || end <= commit {
		return nil, malformed("Commit")
	}
	d.open = false
	d.record = event.Record{
		Kind:       event.Commit,
		Position:   event.Position{Timeline: d.position.Timeline, Commit: commit},
		Confirm:    end,
		XID:        d.xid,
		CommitTime: d.time,
	}
	return &d.record, nil
}

func (d *decoder) insert(start event.LSN, r reader) (*event.Record, error) {
	id := r.uint32()
	tag := r.uint8()
	n := int(r.uint16())
	if r.bad || tag != 'N' || !d.open {
		return nil, malformed("Insert")
	}
	rel := d.recent
	if rel == nil || rel.ID != id {
		if rel = d.relations[id]; rel == nil {
			return nil, malformed("Insert (of a table never described)")
		}
		d.recent = rel
	}
	if n != len(rel.Columns) {
		return nil, malformed("Insert (columns unlike the table's description)")
	}
	values := d.values[:0]
	for range n {
		switch r.uint8() {
		case 't':
			values = append(values, r.take(r.uint32()))
		case 'n':
			values = append(values, nil)
		default:
			// 'u', an unchanged value that is not sent, would be read as NULL;
			// 'b', binary, was not asked for.
			return nil, malformed("Insert (value neither text nor NULL)")
		}
	}
	d.values = values
	if !r.done() {
		return nil, malformed("Insert")
	}
	if err := d.place(start); err != nil {
		return nil, err
	}
	var foreign []bool
	if d.charset != nil {
		var err error
		if foreign, err = d.charset.Row(values); err != nil {
			return nil, err
		}
	}
	d.record = event.Record{
		Kind:       event.Row,
		Position:   d.position,
		XID:        d.xid,
		CommitTime: d.time,
		Relation:   rel,
		Values:     values,
		Foreign:    foreign,
	}
	return &d.record, nil
}

// place moves the position on to a change of the open transaction whose record
// starts at lsn. Changes come in the order of the log, those of subtransactions
// merged in (ReorderBufferIterTXNNext), so an earlier LSN means that positions
// cannot be relied on.
func (d *decoder) place(lsn event.LSN) error {
	switch p := &d.position; {
	case lsn > p.Change:
		p.Change, p.N = lsn, 0
	case lsn == p.Change && lsn != 0:
		p.N++
	default:
		return disorder(lsn, p.Change)
	}
	return nil
}

// message decodes a logical message.
//
// Its LSN is the end of its WAL record (logicalmsg_decode passes buf->endptr),
// which may be where the next record starts: the transaction's next row, or a
// commit. Its position is therefore that of its record's last byte, or a row
// could not be told from the message before it, and a transaction that commits
// right behind a non-transactional message would sort before it.
func (d *decoder) message(r reader) (*event.Record, error) {
	flags := r.uint8()
	lsn := event.LSN(r.uint64())
	prefix := r.cstring()
	content := r.take(r.uint32())
	if !r.done() || lsn == 0 {
		return nil, malformed("Message")
	}
	if string(prefix) != d.prefix {
		d.prefix = string(prefix)
	}
	transactional := flags&1 != 0
	if transactional != d.open {
		return nil, malformed("Message (on the wrong side of a transaction's border)")
	}
	at := lsn - 1
	if !transactional {
		if at <= d.last {
			return nil, disorder(at, d.last)
		}
		d.last = at
		d.record = event.Record{
			Kind:     event.Message,
			Position: event.Position{Timeline: owner(d.history, at, d.timeline), Commit: at, Change: at},
			Confirm:  lsn,
			Prefix:   d.prefix,
			Content:  content,
		}
		return &d.record, nil
	}
	if d.position.Change == lsn {
		// Of two subtransactions whose next changes have the same LSN, either
		// may be first: here the row behind the message was.
		at = lsn
	}
	if err := d.place(at); err != nil {
		return nil, err
	}
	d.record = event.Record{
		Kind:          event.Message,
		Position:      d.position,
		XID:           d.xid,
		CommitTime:    d.time,
		Prefix:        d.prefix,
		Content:       content,
		Transactional: true,
	}
	return &d.record, nil
}

// minColumn is the size of a column without a name in a Relation message.
const minColumn = 1 + 1 + 4 + 4

func (d *decoder) relation(r reader) error {
	rel := &event.Relation{ID: r.uint32(), Schema: string(r.cstring()), Name: string(r.cstring())}
	r.uint8() // replica identity
	n := int(r.uint16())
	if r.bad || n*minColumn > len(r.b) {
		return malformed("Relation")
	}
	if rel.Schema == "" {
		rel.Schema = "pg_catalog" // logicalrep_write_namespace sends it empty
	}
	rel.Columns = make([]event.Column, n)
	for i := range rel.Columns {
		r.uint8() // flags
		rel.Columns[i] = event.Column{Name: string(r.cstring()), Type: r.uint32()}
		r.uint32() // type modifier
	}
	if !r.done() {
		return malformed("Relation")
	}
	if d.charset != nil {
		if err := d.translate(rel); err != nil {
			return err
		}
	}
	d.relations[rel.ID] = rel
	d.recent = nil
	return nil
}

// reader takes fields off the front of b. After a field that is not there, bad
// is set and every further field is zero.
type reader struct {
	b   []byte
	bad bool
}

// done reports whether every field was there and nothing is left.
func (r *reader) done() bool { return !r.bad && len(r.b) == 0 }

func (r *reader) fail() { r.b, r.bad = nil, true }

func (r *reader) uint8() uint8 {
	if len(r.b) < 1 {
		r.fail()
		return 0
	}
	v := r.b[0]
	r.b = r.b[1:]
	return v
}

func (r *reader) uint16() uint16 {
	if len(r.b) < 2 {
		r.fail()
		return 0
	}
	v := binary.BigEndian.Uint16(r.b)
	r.b = r.b[2:]
	return v
}

func (r *reader) uint32() uint32 {
	if len(r.b) < 4 {
		r.fail()
		return 0
	}
	v := binary.BigEndian.Uint32(r.b)
	r.b = r.b[4:]
	return v
}

func (r *reader) uint64() uint64 {
	if len(r.b) < 8 {
		r.fail()
		return 0
	}
	v := binary.BigEndian.Uint64(r.b)
	r.b = r.b[8:]
	return v
}

// take returns the next n bytes, not nil when they are there.
func (r *reader) take(n uint32) []byte {
	if uint64(n) > uint64(len(r.b)) {
		r.fail()
		return nil
	}
	v := r.b[:n:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) cstring() []byte {
	i := bytes.IndexByte(r.b, 0)
	if i < 0 {
		r.fail()
		return nil
	}
	v := r.b[:i:i]
	r.b = r.b[i+1:]
	return v
}

// pgEpoch is 2000-01-01, from which Postgres counts microseconds, in those of Unix.
const pgEpoch = 946684800 * 1000 * 1000

func (r *reader) time() time.Time {
	return time.UnixMicro(pgEpoch + int64(r.uint64())).UTC()
}
