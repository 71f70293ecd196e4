package event

import "time"

// Kind tells the records of the replication stream apart. The zero Kind is a
// record without content.
type Kind uint8

const (
	// Row is an inserted row of a published table.
	Row Kind = iota + 1
	// Message is a logical message of pg_logical_emit_message.
	Message
	// Commit ends a transaction.
	Commit
	// Keepalive is the server's word that nothing before Confirm is still to come.
	Keepalive
)

// Record is one item of the replication stream, in commit order. Its byte
// slices belong to the reader and are valid until the next record is read.
type Record struct {
	Kind Kind

	// Position of a Row or Message. In a Commit only Timeline and Commit are set.
	Position Position

	// Confirm is the LSN that may be confirmed to the server once every event
	// delivered before this record is settled; zero when this record frees nothing.
	Confirm LSN

	// XID and CommitTime are those of the record's transaction; zero for a
	// keepalive and for a non-transactional message.
	XID        uint32
	CommitTime time.Time

	// Relation and Values describe a Row: a value for each column in the
	// server's text form, nil for NULL.
	Relation *Relation
	Values   [][]byte

	// Foreign, when set, tells for each value whether it has the bytes that the database
	// stores because they are no text in its encoding, or none that UTF-8 has.
	Foreign []bool

	// Prefix, Content and Transactional describe a Message.
	Prefix        string
	Content       []byte
	Transactional bool
}

// Relation is a published table as the server described it. A new description
// is a new value: readers may cache by pointer.
type Relation struct {
	ID      uint32 // OID of the table
	Schema  string
	Name    string
	Columns []Column
}

// Column is a published column.
type Column struct {
	Name string
	Type uint32 // OID of the type
}

// Type OIDs of the columns that an outbox table may have, from pg_type.dat.
const (
	TypeBytea       uint32 = 17
	TypeInt8        uint32 = 20
	TypeInt2        uint32 = 21
	TypeInt4        uint32 = 23
	TypeText        uint32 = 25
	TypeJSON        uint32 = 114
	TypeBPChar      uint32 = 1042
	TypeVarchar     uint32 = 1043
	TypeTimestamp   uint32 = 1114
	TypeTimestamptz uint32 = 1184
	TypeUUID        uint32 = 2950
	TypeJSONB       uint32 = 3802
)

// Undecoded reports whether value i is bytes that are no text.
func (r *Record) Undecoded(i int) bool { return r.Foreign != nil && r.Foreign[i] }
