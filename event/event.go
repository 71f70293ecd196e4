package event

import "time"

// Names of the headers that the relay sets.
const (
	HeaderID            = "Outbox-Id"
	HeaderPos           = "Outbox-Pos"
	HeaderAggregateType = "Outbox-Aggregate-Type"
	HeaderAggregateID   = "Outbox-Aggregate-Id"
	HeaderEventType     = "Outbox-Event-Type"
	HeaderTime          = "Outbox-Time"
	HeaderSchemaVersion = "Outbox-Schema-Version"
	HeaderTable         = "Outbox-Table"
	HeaderReason        = "Outbox-Reason"
	HeaderSubject       = "Outbox-Subject"
	HeaderContentType   = "Content-Type"
	HeaderReplay        = "Outbox-Replay"
)

// Event is what becomes one message of the stream. The relay reuses one Event
// for all: its byte slices are valid until the next one is mapped, or until the
// record that it was made of is overwritten by the next one.
type Event struct {
	ID       []byte // the event's own id, as text; header Outbox-Id
	MsgID    []byte // Nats-Msg-Id: the id, with the table's name before it where ids are not uuids
	Subject  []byte // valid subject, without wildcards
	Headers  []Header
	Payload  []byte
	Position Position

	Table         string // schema.table, or the prefix of a logical message
	AggregateType []byte
	AggregateID   []byte
	EventType     []byte
	XID           uint32
	CommitTime    time.Time

	// Replay says that the event is published again, or now after all; nil for
	// all that come by themselves.
	Replay *Replay
}

// Replay is what is special about an event that an operator had published again.
type Replay struct {
	Run    string // of which it is part; header Outbox-Replay
	KeepID bool   // its Nats-Msg-Id is the original's
	Letter string // subject of the dead letter that it stands for; "" for a row that is published again
}

// Redelivered reports whether e stands for a dead letter.
func (e *Event) Redelivered() bool { return e.Replay != nil && e.Replay.Letter != "" }

// Header is one header line of a message. The value has no line breaks.
type Header struct {
	Name  string
	Value []byte
}

// Origin says which log the records come from.
type Origin struct {
	SystemID string // system identifier of the cluster
	Database string
	Slot     string

	Timeline uint32   // of the session
	History  []Switch // the timelines before it, oldest first
	WALEnd   LSN      // end of the server's WAL when the session began

	// ConfirmedFlush is the slot's confirmed flush LSN once the session owns
	// the slot: every transaction that ends after it is delivered.
	ConfirmedFlush LSN

	// Fingerprint changes when publications, tables or the message prefix do.
	Fingerprint string

	// Tables says for each table by which entries of the publications its rows
	// are sent. A table none of whose entries is the same as before was
	// taken out of them in between, and rows may be missing in the log.
	Tables map[string][]string

	// Backfill says that the events are rows read from the tables in a snapshot
	// that ends at ConfirmedFlush. They are told from those stored by their ids.
	Backfill bool
	Recovery bool // and that only rows are looked for that the log was to bring

	// Now is a moment at which the slot was there, nil when nobody looked.
	Now *Mark

	// Diverged says that an earlier session found that this log is not the one
	// from which the stream was written, and that an operator accepts it.
	Diverged bool
}

// Mark is a moment in the life of a database. As the beginning of what a slot
// has sent without a gap it means: rows of transactions that began to write
// later were sent. The zero Mark is before everything.
type Mark struct {
	XID  uint64    `json:"xid"`  // of 64 bits; no transaction had it yet
	Time time.Time `json:"time"` // by the server's clock
}

// Switch is the place where a timeline ended and the next one began.
type Switch struct {
	Timeline uint32
	End      LSN
	Restored bool // by an operator who chose the place, not by the promotion of a standby
}

// Begin is the place where the origin's timeline began; zero for the first one.
func (o *Origin) Begin() LSN {
	if len(o.History) == 0 {
		return 0
	}
	return o.History[len(o.History)-1].End
}

// Left is the place where the origin's history left that of an earlier timeline,
// which need not be one of its own. ok is false when they have nothing in common.
func (o *Origin) Left(timeline uint32) (s Switch, ok bool) {
	for _, h := range o.History {
		if h.Timeline <= timeline {
			s, ok = h, true
		}
	}
	return s, ok
}

// Contains reports whether p lies in the origin's history. A position on a
// timeline that was left before p's commit, or past the end of the WAL, does not.
func (o *Origin) Contains(p Position) bool {
	if p.Timeline == o.Timeline {
		return p.Commit < o.WALEnd
	}
	for _, s := range o.History {
		if s.Timeline == p.Timeline {
			return p.Commit < s.End
		}
	}
	return false
}

// Checkpoint is a settled place in the log: every event up to Position is
// stored in the stream, and Confirm may be confirmed.
type Checkpoint struct {
	Events     uint64   // events settled in this session up to here
	Position   Position // of the last of them
	XID        uint32   // of the transaction of Position
	CommitTime time.Time
	Confirm    LSN
	Drained    bool // nothing was sent after Position, and the session ends here
}

// Resume tells where a session continues.
type Resume struct {
	// After is the position of the last stored event: events at or before it
	// are dropped. Zero drops none.
	After Position

	// Gone is the number of sequences after that of After whose messages are gone
	// from the stream. Some of them may have been the next events: the sink is
	// asked for each of these until all are accounted for.
	Gone uint64

	// Proof, when set, is the transaction that must reappear while events are
	// dropped, with the same XID and commit time. Otherwise the server is not
	// the one that was read before.
	Proof *Checkpoint

	// AfterID, when set, is the id of the event at After, which must reappear
	// while events are dropped. Otherwise, again, the server is another one.
	AfterID string

	// Stored are the ids of events in the stream that the server may send
	// again: one that has its place here is dropped. It is set where After cannot tell.
	Stored map[Position]string

	// Missing are parked events at or before After whose dead letters are gone from
	// their stream, and why they were parked. The dead letters are stored again.
	Missing map[Position]*Poison

	// AcceptGap says that an operator accepts another server. The next session
	// says so in its Origin when it is one.
	AcceptGap bool

	// Suspect asks to publish the first event alone, because the last session
	// ended on an error that may be that event's fault.
	Suspect bool
}
