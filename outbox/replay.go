package outbox

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// ReplayPrefix is that of the logical messages by which commands have events
// published again. They take the way of all others, so that the relay stays the
// only writer of its stream.
const ReplayPrefix = "walrelay.replay"

// Replay is the content of such a message: exactly one of Row, Message and Event.
type Replay struct {
	Version int    `json:"v"` // set by Sign
	Run     string `json:"run"`
	KeepID  bool   `json:"keep_id,omitempty"`
	Subject string `json:"subject,omitempty"` // template; "" is that of the mapping
	Letter  string `json:"letter,omitempty"`  // subject of the dead letter that it stands for

	// Time is when the event's transaction was committed, for rows without a time of
	// their own; zero when that is not known.
	Time time.Time `json:"time,omitzero"`

	Row     *ReplayRow     `json:"row,omitempty"`
	Message *ReplayMessage `json:"message,omitempty"`
	Event   *ReplayEvent   `json:"event,omitempty"`
}

// ReplayRow is a row as the replication stream sends it. The relay maps it as it
// maps every row then, so that a mapping that was mended helps.
type ReplayRow struct {
	Schema  string         `json:"schema"`
	Table   string         `json:"table"`
	Columns []ReplayColumn `json:"columns"`
	Values  [][]byte       `json:"values"`            // text form, nil for NULL
	Foreign []bool         `json:"foreign,omitempty"` // as in event.Record
}

// ReplayColumn is a column of a ReplayRow.
type ReplayColumn struct {
	Name string `json:"name"`
	Type uint32 `json:"type"` // OID
}

// ReplayMessage is the content of a logical message that is an event.
type ReplayMessage struct {
	Content []byte `json:"content"`
}

// ReplayEvent is an event as it was mapped once, of which nothing else is left.
type ReplayEvent struct {
	ID            string         `json:"id"`
	Table         string         `json:"table"`
	Subject       string         `json:"subject"`
	AggregateType string         `json:"aggregate_type,omitempty"`
	AggregateID   string         `json:"aggregate_id,omitempty"`
	EventType     string         `json:"event_type,omitempty"`
	Headers       []ReplayHeader `json:"headers"`
	Body          []byte         `json:"body"`
}

// ReplayHeader is a header line.
type ReplayHeader struct {
	Name  string `json:"name"`
	Value []byte `json:"value"`
}

const replayVersion = 1

// ReplayKey is what a relay knows its commands by. Any role of a database can
// emit messages, so those without a signature are nothing.
type ReplayKey struct {
	Secret []byte
	Slot   string
	Stream string
}

func (k ReplayKey) sum(content []byte) []byte {
	h := hmac.New(sha256.New, k.Secret)
	// Neither name can hold a NUL.
	fmt.Fprintf(h, "walrelay replay\x00%s\x00%s\x00", k.Slot, k.Stream)
	h.Write(content)
	return h.Sum(nil)
}

// address is what follows the signature: relays of other streams, to whose slots
// the message comes, too, know by it that it is not theirs.
func (k ReplayKey) address() string { return " " + k.Slot + " " + k.Stream + "\n" }

// Sign makes the content of the message: the signature in hex, slot and stream, a
// line break, JSON.
func (r *Replay) Sign(k ReplayKey) ([]byte, error) {
	r.Version = replayVersion
	if err := r.check(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	b := hex.AppendEncode(make([]byte, 0, signatureSize+len(k.address())+len(text)), k.sum(text))
	b = append(b, k.address()...)
	return append(b, text...), nil
}

// signatureSize is that of the signature in hex.
const signatureSize = 2 * sha256.Size

// open returns the JSON of a message that is signed with the key. mine is false
// when the message is addressed to another relay.
func (k ReplayKey) open(content []byte) (text []byte, mine, signed bool) {
	if len(content) < signatureSize {
		return nil, true, false
	}
	text, mine = bytes.CutPrefix(content[signatureSize:], []byte(k.address()))
	if !mine {
		return nil, !addressed.Match(content[signatureSize:]), false
	}
	var sum [sha256.Size]byte
	if _, err := hex.Decode(sum[:], content[:signatureSize]); err != nil {
		return nil, true, false
	}
	return text, true, hmac.Equal(sum[:], k.sum(text))
}

// addressed is the begin of what any relay's message has behind its signature.
var addressed = regexp.MustCompile(`^ [^\s]+ [^\s]+\n`)

// runName is the form of a run's name, which becomes a header and part of an id.
var runName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// ValidRun reports whether a run may have that name.
func ValidRun(name string) bool { return runName.MatchString(name) }

func (r *Replay) check() error {
	given := 0
	for _, is := range []bool{r.Row != nil, r.Message != nil, r.Event != nil} {
		if is {
			given++
		}
	}
	switch {
	case r.Version != replayVersion:
		return fmt.Errorf("the replay has format version %d, this walrelay reads %d", r.Version, replayVersion)
	case !ValidRun(r.Run):
		return fmt.Errorf("the replay's run %q is no name of a run", shorten([]byte(r.Run)))
	case given != 1:
		return fmt.Errorf("the replay has %d of row, message and event", given)
	case strings.ContainsAny(r.Letter, " *>\r\n\t\x00"):
		return fmt.Errorf("the replay's dead letter %q is no subject", shorten([]byte(r.Letter)))
	case r.Row != nil && len(r.Row.Values) != len(r.Row.Columns):
		return fmt.Errorf("the replay's row has %d values for %d columns", len(r.Row.Values), len(r.Row.Columns))
	}
	return nil
}

func parseReplay(text []byte) (Replay, error) {
	var r Replay
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	err := dec.Decode(&r)
	if err == nil {
		if _, more := dec.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("something follows it")
		}
	}
	if err != nil {
		// What is left of one of another version says at least whose it is.
		var part struct {
			Version     int `json:"v"`
			Run, Letter string
		}
		_ = json.NewDecoder(bytes.NewReader(text)).Decode(&part)
		r = Replay{Version: part.Version, Run: part.Run, Letter: part.Letter}
		if r.Version == replayVersion || r.Version == 0 {
			return r, fmt.Errorf("the replay cannot be read: %w", err)
		}
	}
	return r, r.check()
}

// ReplayOptions say whose replays are honoured.
type ReplayOptions struct {
	// Key returns the relay's key; false as long as it has none. nil honours no replay.
	Key func() (ReplayKey, bool)
	// Forged is told where a message has the prefix of replays and not their
	// signature; nil for nobody.
	Forged func(at event.Position)
}

// replays is the part of a Mapper that reads them.
type replays struct {
	ReplayOptions
	current  event.Replay
	relation *event.Relation // of the last row: most have the same
	template *template       // of the text below
	text     string
}

// replay maps the event of a signed message; false when it is none. Whatever is
// wrong with a signed one is poison, so that what counts as an event is the same
// at every read of the log.
func (m *Mapper) replay(rec *event.Record, ev *event.Event) (bool, error) {
	p := m.replays
	if p == nil || !rec.Transactional {
		return false, nil
	}
	key, ok := p.Key()
	if !ok {
		return false, nil
	}
	text, mine, ok := key.open(rec.Content)
	if !ok {
		if mine && p.Forged != nil {
			p.Forged(rec.Position)
		}
		return false, nil
	}
	r, err := parseReplay(text)
	if err == nil {
		err = m.again(rec, ev, &r)
	}
	poison, bad := errors.AsType[*event.Poison](err)
	if err != nil && !bad {
		poison = &event.Poison{Reason: event.ReasonContent, Detail: err.Error()}
		headers := ev.Headers[:0]
		*ev = event.Event{Headers: headers, Position: rec.Position, Table: r.table(), XID: rec.XID, CommitTime: rec.CommitTime}
	}
	p.current = event.Replay{Run: r.Run, KeepID: r.KeepID, Letter: r.Letter}
	ev.Replay, ev.CommitTime = &p.current, rec.CommitTime
	if poison == nil {
		m.mark(ev)
		return true, nil
	}
	return true, poison
}

// table is what the event says to be of.
func (r *Replay) table() string {
	switch {
	case r.Row != nil:
		return Table{Schema: r.Row.Schema, Name: r.Row.Table}.String()
	case r.Event != nil:
		return r.Event.Table
	}
	return ReplayPrefix
}

// mark makes ev known as one of a replay.
func (m *Mapper) mark(ev *event.Event) {
	run := ev.Replay.Run
	n := len(m.buf)
	m.buf = append(m.buf, run...)
	ev.Headers = append(ev.Headers, event.Header{Name: event.HeaderReplay, Value: m.since(n)})
	if ev.Replay.KeepID {
		return
	}
	n = len(m.buf)
	m.buf = append(m.buf, ev.MsgID...)
	m.buf = append(m.buf, ":r:"...)
	m.buf = append(m.buf, run...)
	ev.MsgID = m.since(n)
}

// again maps what the replay has, as if it came now.
func (m *Mapper) again(rec *event.Record, ev *event.Event, r *Replay) error {
	var err error
	if m.override, err = m.replays.subject(r.Subject); err != nil {
		return err
	}
	defer func() { m.override = nil }()
	inner := event.Record{Position: rec.Position, XID: rec.XID, CommitTime: rec.CommitTime, Transactional: true}
	if !r.Time.IsZero() {
		inner.CommitTime = r.Time
	}
	switch {
	case r.Event != nil:
		return m.stored(&inner, ev, r.Event)
	case r.Row != nil:
		inner.Kind, inner.Relation, inner.Values = event.Row, m.replays.of(r.Row), r.Row.Values
		if len(r.Row.Foreign) == len(r.Row.Values) {
			inner.Foreign = r.Row.Foreign
		}
	default:
		if m.messages == nil {
			return errors.New("logical messages are not honoured: --messages is not set")
		}
		inner.Kind, inner.Prefix, inner.Content = event.Message, m.messages.name, r.Message.Content
	}
	ok, err := m.Map(&inner, ev)
	if err == nil && !ok {
		return fmt.Errorf("table %s is not one of the relay's", r.table())
	}
	return err
}

// subject compiles a template; nil for none.
func (p *replays) subject(text string) (*template, error) {
	if text == "" {
		return nil, nil
	}
	if p.template == nil || p.text != text {
		t, err := compileTemplate(text)
		if err != nil {
			return nil, err
		}
		p.template, p.text = t, text
	}
	return p.template, nil
}

// CheckSubject reports what is wrong with a template for a replay, as a Usage failure.
func CheckSubject(text string) error {
	if _, err := compileTemplate(text); err != nil {
		return event.Fail(event.Usage, "write tokens with dots between, such as again.{aggregate_type}.{event_type}", "subject %q: %w", text, err)
	}
	return nil
}

// of is the relation of a row. It is the same value for rows of one table, so
// that the Mapper's plan holds.
func (p *replays) of(row *ReplayRow) *event.Relation {
	rel := p.relation
	same := rel != nil && rel.Schema == row.Schema && rel.Name == row.Table && len(rel.Columns) == len(row.Columns)
	for i := 0; same && i < len(row.Columns); i++ {
		same = rel.Columns[i] == event.Column{Name: row.Columns[i].Name, Type: row.Columns[i].Type}
	}
	if same {
		return rel
	}
	rel = &event.Relation{Schema: row.Schema, Name: row.Table} // its OID may be another one by now
	for _, c := range row.Columns {
		rel.Columns = append(rel.Columns, event.Column{Name: c.Name, Type: c.Type})
	}
	p.relation = rel
	return rel
}

// keptHeaders are those of the relay's own that a stored event keeps; the others
// are made anew.
var keptHeaders = []string{event.HeaderTime, event.HeaderSchemaVersion, event.HeaderContentType}

// stored takes an event over as it was mapped.
func (m *Mapper) stored(rec *event.Record, ev *event.Event, e *ReplayEvent) error {
	m.begin(rec, ev, &source{name: e.Table})
	m.identify(ev, &source{qualify: []byte(e.Table + ":")}, orNil(e.ID), uuidText([]byte(e.ID)))
	m.describe(ev, orNil(e.AggregateType), orNil(e.AggregateID), orNil(e.EventType))
	var version []byte
	own := len(ev.Headers)
	for _, h := range e.Headers {
		name := []byte(h.Name)
		kept := false
		for _, k := range keptHeaders {
			kept = kept || fold(name, k)
		}
		switch {
		case fold(name, event.HeaderSchemaVersion):
			version = h.Value
		case badName(name):
			m.poison(event.ReasonHeaders, "%q cannot be a header's name", shorten(name))
			continue
		case controls(name) && !kept:
			continue
		}
		m.header(ev, m.intern(name), h.Value)
	}
	ev.Payload = e.Body
	if m.override == nil {
		ev.Subject = []byte(e.Subject)
	} else {
		m.route(ev, m.override, &subjectValues{
			aggregateType: ev.AggregateType, aggregateID: ev.AggregateID, eventType: ev.EventType, schemaVersion: version, headers: ev.Headers[own:],
		})
	}
	if m.bad != nil {
		return m.bad
	}
	return nil
}

func orNil(s string) []byte {
	if s == "" {
		return nil
	}
	return []byte(s)
}

// EmitReplays writes signed replays as logical messages of a transaction. They
// become events when it commits.
func EmitReplays(ctx context.Context, tx pgx.Tx, contents [][]byte) error {
	_, err := tx.Exec(ctx, "SELECT pg_catalog.pg_logical_emit_message(true, $1, c) FROM pg_catalog.unnest($2::bytea[]) AS c", ReplayPrefix, contents)
	return emitError(err)
}

func emitError(err error) error {
	if err == nil {
		return nil
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.Code == "42501" {
		return event.Fail(event.Precondition, "let the role emit logical messages: walrelay init --apply --emit-grant ROLE, as a superuser", "emit a replay: %w", err)
	}
	return classify(err, "emit a replay")
}
