package outbox

import (
	"bytes"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/walrelay/walrelay/event"
)

// Mapping says what becomes an event, and how.
type Mapping struct {
	Tables []Table

	// Subject is the template for tables without one of their own and for
	// messages; "" is "outbox.{aggregate_type}.{event_type}", for the debezium
	// preset "outbox.event.{aggregate_type}".
	Subject string

	// Overrides are templates for some types of events, of any table and of
	// messages. The most specific one wins.
	Overrides []Override

	// Route makes groups of a regular expression known to Subject and to the
	// subjects of tables. The zero Route is none.
	Route Route

	// HeaderColumns are columns of every table that become headers.
	HeaderColumns []HeaderColumn

	CloudEvents CloudEvents

	Messages bool   // honour logical messages
	Prefix   string // of the messages that are honoured; "" is "walrelay"

	Replay ReplayOptions
}

// Override is the subject of the events of a type.
type Override struct {
	AggregateType string // "" is any
	EventType     string // "" is any, but not both
	Subject       string // template
}

// HeaderColumn is a column that becomes a header; NULL makes none.
type HeaderColumn struct {
	Column string // earlier names of it follow after "|"
	Name   string // of the header; "" is the column's
}

func (c HeaderColumn) name() string { return firstOf(c.Name, present(c.Column)) }

func (c HeaderColumn) check() error {
	name := []byte(c.name())
	switch {
	case c.Column == "":
		return errors.New("a header column has no name")
	case badName(name):
		return fmt.Errorf("column %q: %q cannot be a header's name", c.Column, c.name())
	case fold(name, event.HeaderContentType):
		return fmt.Errorf("column %q: the header %s is that of the role %s", c.Column, c.name(), roleContentType)
	case controls(name):
		return fmt.Errorf("column %q: the header %s would control the server or is the relay's own", c.Column, c.name())
	}
	for _, name := range alternatives(c.Column) {
		if err := checkName(name); err != nil {
			return err
		}
	}
	return nil
}

// DefaultPrefix is the prefix of logical messages that are events.
const DefaultPrefix = "walrelay"

const (
	// maxBuffer is what the Mapper keeps for the next event; a larger event has
	// a buffer of its own, so that one giant row is not held for ever.
	maxBuffer = 1 << 20
	// maxNames bounds the header names that are kept as strings.
	maxNames = 1024
)

// Mapper makes events of rows and messages. One goroutine at a time may use
// it; Stripped may be called from any.
type Mapper struct {
	tables   map[string]*source // by schema and name
	renamed  map[uint32]*source // by OID, for rows of a table whose name was another one when they were written
	messages *source            // nil when messages are not honoured
	replays  *replays           // nil when replays are not
	override *template          // of the replay that is mapped; nil for none
	filters  []string

	last  compiled
	plans map[uint32]compiled // by OID of the table

	buf   []byte // holds the bytes of the event that are not the record's
	names map[string]string
	bad   *event.Poison // the first fault of the event

	commitTime time.Time // of the last event without a time of its own
	commitText []byte

	createdText []byte // the last created_at; the rows of a transaction mostly share one
	createdTime []byte // the header's value for it

	stripped atomic.Uint64
}

// source is a configured table, or the messages.
type source struct {
	table    Table
	name     string // of the event's Table
	qualify  []byte // before ids that are not uuids
	subject  *template
	debezium bool
	ceSource []byte // encoded; nil when no CloudEvents are asked for

	overrides []override // the most specific first
	roles     []string   // of the columns that any of the templates needs, or CloudEvents
	columns   []HeaderColumn
}

// override is a compiled Override.
type override struct {
	aggregateType, eventType string // "" is any
	subject                  *template
}

// template is the one for the event's type.
func (s *source) template(ev *event.Event) *template {
	for i := range s.overrides {
		o := &s.overrides[i]
		if (o.aggregateType == "" || o.aggregateType == string(ev.AggregateType)) &&
			(o.eventType == "" || o.eventType == string(ev.EventType)) {
			return o.subject
		}
	}
	return s.subject
}

// need notes the roles of a template; a header that is a column's needs no
// headers column.
func (s *source) need(t *template) {
	for _, role := range t.roles {
		if role == roleHeaders && !slices.ContainsFunc(t.parts, func(p part) bool {
			return p.kind == header && !slices.ContainsFunc(s.columns, func(c HeaderColumn) bool { return c.name() == p.text })
		}) {
			continue
		}
		if !slices.Contains(s.roles, role) {
			s.roles = append(s.roles, role)
		}
	}
}

// compiled is what a Relation came to; the plan is nil when the table is not configured.
type compiled struct {
	relation *event.Relation
	plan     *plan
}

// plan holds the place of each role's column in a row, -1 for none.
type plan struct {
	*source
	id, aggregateType, aggregateID, eventType            int
	payload, headers, schemaVersion, createdAt, contType int

	columns []int // of source.columns

	uuid, bytea bool
	payloadType []byte

	misfit error // why no row of the relation can be mapped
}

// NewMapper compiles a mapping. All its mistakes are joined in one Usage failure.
func NewMapper(m Mapping) (*Mapper, error) {
	var errs []error
	mp := &Mapper{
		tables: map[string]*source{}, renamed: map[uint32]*source{},
		plans: map[uint32]compiled{},
		names: map[string]string{},
	}
	var filters []string
	route, err := compileRoute(m.Route)
	if err != nil {
		errs = append(errs, err)
	}
	overrides, bad := compileOverrides(m.Overrides)
	errs = append(errs, bad...)
	for _, o := range overrides {
		filters = append(filters, o.subject.filter())
	}
	for _, c := range m.HeaderColumns {
		if err := c.check(); err != nil {
			errs = append(errs, err)
		}
	}
	if m.CloudEvents.On && m.CloudEvents.Source != "" {
		if _, err := url.Parse(m.CloudEvents.Source); err != nil {
			errs = append(errs, fmt.Errorf("source of CloudEvents %q is no URI reference", m.CloudEvents.Source))
		}
	}
	add := func(s *source, subject string) {
		t, err := compileRouted(subject, route)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.name, err))
			return
		}
		s.subject = t
		s.overrides = overrides
		filters = append(filters, t.filter())
		s.need(t)
		for _, o := range overrides {
			s.need(o.subject)
			if o.aggregateType != "" {
				s.roles = append(s.roles, roleAggregateType)
			}
			if o.eventType != "" {
				s.roles = append(s.roles, roleEventType)
			}
		}
		if m.CloudEvents.On {
			s.ceSource = ceSource(m.CloudEvents, s.name)
			s.roles = append(s.roles, roleEventType)
		}
	}
	for _, t := range m.Tables {
		if bad := t.check(); len(bad) > 0 {
			errs = append(errs, bad...)
			continue
		}
		key := tableKey(t.schema(), t.Name)
		if mp.tables[key] != nil {
			errs = append(errs, fmt.Errorf("table %s is given twice", t))
			continue
		}
		s := &source{
			table:    t,
			name:     t.String(),
			qualify:  []byte(t.String() + ":"),
			debezium: t.Preset == PresetDebezium,
			columns:  slices.Concat(m.HeaderColumns, t.HeaderColumns),
		}
		for i, c := range s.columns {
			if slices.ContainsFunc(s.columns[:i], func(o HeaderColumn) bool { return fold([]byte(o.name()), c.name()) }) ||
				s.debezium && c.name() == debeziumID {
				errs = append(errs, fmt.Errorf("table %s: two columns become the header %s", t, c.name()))
			}
		}
		mp.tables[key] = s
		add(s, firstOf(t.Subject, m.Subject, t.preset().subject))
	}
	if m.Messages {
		prefix := firstOf(m.Prefix, DefaultPrefix)
		if badValue([]byte(prefix)) {
			errs = append(errs, fmt.Errorf("message prefix %q has a line break or NUL", prefix))
		}
		if prefix == ReplayPrefix {
			errs = append(errs, fmt.Errorf("message prefix %q is that of replays", prefix))
		}
		mp.messages = &source{name: prefix, qualify: []byte(prefix + ":")}
		add(mp.messages, firstOf(m.Subject, presets[PresetDefault].subject))
	}
	if m.Replay.Key != nil {
		mp.replays = &replays{ReplayOptions: m.Replay}
	}
	if len(m.Tables) == 0 && !m.Messages {
		errs = append(errs, errors.New("nothing to publish: no table, and messages are not honoured"))
	}
	if len(errs) > 0 {
		return nil, event.Fail(event.Usage, "", "outbox mapping: %w", errors.Join(errs...))
	}
	mp.filters = disjoint(filters)
	return mp, nil
}

// compileOverrides sorts the most specific ones to the front.
func compileOverrides(all []Override) (compiled []override, errs []error) {
	bad := func(o Override, err error) {
		errs = append(errs, fmt.Errorf("subject of %s: %w", o.name(), err))
	}
	for i, o := range all {
		t, err := compileTemplate(o.Subject)
		switch {
		case o.AggregateType == "" && o.EventType == "":
			bad(o, errors.New("it names no type"))
		case err != nil:
			bad(o, err)
		case slices.ContainsFunc(all[:i], func(p Override) bool { return p.name() == o.name() }):
			bad(o, errors.New("it is given twice"))
		default:
			compiled = append(compiled, override{o.AggregateType, o.EventType, t})
		}
	}
	rank := func(o override) int {
		switch {
		case o.aggregateType == "":
			return 1 // one type of event
		case o.eventType == "":
			return 2 // all of an aggregate's
		}
		return 0
	}
	slices.SortStableFunc(compiled, func(a, b override) int { return rank(a) - rank(b) })
	return compiled, errs
}

func (o Override) name() string {
	return firstOf(o.AggregateType, "*") + "/" + firstOf(o.EventType, "*")
}

func firstOf(s ...string) string {
	i := slices.IndexFunc(s, func(s string) bool { return s != "" })
	if i < 0 {
		return ""
	}
	return s[i]
}

// tableKey cannot mistake one pair of names for another: names have no NUL.
func tableKey(schema, name string) string { return schema + "\x00" + name }

// Subjects returns the filters that cover every subject of the mapping, none
// overlapping another: what a stream needs as its subjects. A template that
// begins with a value yields ">", which no stream takes; such a stream has to
// be made by hand with the values in question.
func (m *Mapper) Subjects() []string { return slices.Clone(m.filters) }

// Stripped counts the headers that were dropped because the server or the
// relay would read them as its own.
func (m *Mapper) Stripped() uint64 { return m.stripped.Load() }

// Map fills ev from a Row or Message; false when the record is none of the
// outbox's. The slices in ev are valid until the next call, and no longer than rec's.
//
// An *event.Poison is the event's own fault, which includes that its columns do not
// fit the mapping; ev then holds everything that could be read.
func (m *Mapper) Map(rec *event.Record, ev *event.Event) (bool, error) {
	switch rec.Kind {
	case event.Row:
		p := m.plan(rec.Relation)
		if p == nil {
			return false, nil
		}
		if len(rec.Values) != len(rec.Relation.Columns) {
			return false, event.Fail(event.Unexpected, "", "row of table %s at %s has %d values for %d columns",
				p.name, rec.Position, len(rec.Values), len(rec.Relation.Columns))
		}
		m.begin(rec, ev, p.source)
		if p.misfit != nil {
			m.misfit(p, rec, ev)
			break
		}
		if rec.Foreign != nil {
			m.foreign(p, rec)
		}
		m.row(p, rec, ev)
	case event.Message:
		if rec.Prefix == ReplayPrefix {
			return m.replay(rec, ev)
		}
		if m.messages == nil || rec.Prefix != m.messages.name {
			return false, nil
		}
		m.begin(rec, ev, m.messages)
		m.message(rec, ev)
	default:
		return false, nil
	}
	if m.bad != nil {
		return true, m.bad
	}
	return true, nil
}

// Check reports whether a table with these columns can be mapped; the failure
// is the one that its first row would give. A table that is not configured is
// no fault.
func (m *Mapper) Check(t Table, cols []Column) error {
	s := m.tables[tableKey(t.schema(), t.Name)]
	if s == nil {
		return nil
	}
	rel := &event.Relation{Schema: t.schema(), Name: t.Name}
	for _, c := range cols {
		rel.Columns = append(rel.Columns, event.Column{Name: c.Name, Type: c.OID})
	}
	return compile(s, rel).misfit
}

// Know says which table has the OID now, so that its rows are known by that when
// they come under a name that it had before or has got since.
func (m *Mapper) Know(t Table, oid uint32) {
	if s := m.tables[tableKey(t.schema(), t.Name)]; s != nil && oid != 0 {
		m.renamed[oid] = s
	}
}

func (m *Mapper) plan(rel *event.Relation) *plan {
	if rel == m.last.relation {
		return m.last.plan
	}
	c, ok := m.plans[rel.ID]
	if !ok || c.relation != rel {
		c = compiled{relation: rel}
		s := m.tables[tableKey(rel.Schema, rel.Name)]
		if s == nil {
			s = m.renamed[rel.ID]
		}
		if s != nil {
			c.plan = compile(s, rel)
		}
		m.plans[rel.ID] = c
	}
	m.last = c
	return c.plan
}

// compile finds the columns of a relation. A plan that misfits has those that are there.
func compile(s *source, rel *event.Relation) *plan {
	var faults []string
	place := func(role string) int {
		column := s.table.names(role)
		_, explicit := s.table.Columns[role]
		needed := explicit || role == roleID || role == rolePayload || slices.Contains(s.roles, role)
		if column == "" {
			if slices.Contains(s.roles, role) {
				faults = append(faults, fmt.Sprintf("no column has the role %s, which the %s", role, s.needs(role)))
			}
			return -1
		}
		i := find(rel, column)
		if i < 0 && needed {
			faults = append(faults, fmt.Sprintf("column %q (%s) is missing", column, role))
		}
		if i >= 0 && !readable(role, rel.Columns[i].Type) {
			faults = append(faults, fmt.Sprintf("column %q (%s) is of type %s, which cannot be read: want %s",
				column, role, typeName(rel.Columns[i].Type), wanted[role].types))
		}
		return i
	}
	p := &plan{
		source:        s,
		id:            place(roleID),
		aggregateType: place(roleAggregateType),
		aggregateID:   place(roleAggregateID),
		eventType:     place(roleEventType),
		payload:       place(rolePayload),
		headers:       place(roleHeaders),
		schemaVersion: place(roleSchemaVersion),
		createdAt:     place(roleCreatedAt),
		contType:      place(roleContentType),
	}
	for _, c := range s.columns {
		i := find(rel, c.Column)
		if i < 0 {
			faults = append(faults, fmt.Sprintf("column %q (header %s) is missing", c.Column, c.name()))
		}
		p.columns = append(p.columns, i)
	}
	if len(faults) > 0 {
		var have []string
		for _, c := range rel.Columns {
			have = append(have, c.Name+" "+typeName(c.Type))
		}
		p.misfit = event.Fail(event.Precondition,
			"add or correct the column, publish it when the publication has a column list, or map the role to another column of the table, "+
				"with its earlier names where it was renamed, as in --table outbox,payload=body|payload; "+
				"`walrelay init` prints what the table should be",
			"table %s does not fit the mapping: %s; its published columns are %s",
			s.name, strings.Join(faults, "; "), strings.Join(have, ", "))
		p.uuid = p.id >= 0 && rel.Columns[p.id].Type == event.TypeUUID
		return p
	}
	p.uuid = rel.Columns[p.id].Type == event.TypeUUID
	p.bytea = rel.Columns[p.payload].Type == event.TypeBytea
	p.payloadType = payloadType(rel.Columns[p.payload].Type)
	return p
}

// needs says what a role is needed for.
func (s *source) needs(role string) string {
	if role == roleEventType && s.ceSource != nil {
		return "type of a CloudEvent needs"
	}
	return "subject needs"
}

// begin makes ev the empty event of rec.
func (m *Mapper) begin(rec *event.Record, ev *event.Event, s *source) {
	if cap(m.buf) > maxBuffer {
		m.buf = nil
	}
	m.buf = m.buf[:0]
	m.bad = nil
	*ev = event.Event{
		Headers:    ev.Headers[:0],
		Position:   rec.Position,
		Table:      s.name,
		XID:        rec.XID,
		CommitTime: rec.CommitTime,
	}
}

// poison notes the first fault. Reading goes on, so that a dead letter says as
// much as it can.
func (m *Mapper) poison(reason event.Reason, format string, args ...any) {
	if m.bad == nil {
		m.bad = &event.Poison{Reason: reason, Detail: fmt.Sprintf(format, args...)}
	}
}

// since is what was appended to the buffer after n, never nil. It stays valid
// when the buffer grows.
func (m *Mapper) since(n int) []byte { return m.buf[n:len(m.buf):len(m.buf)] }

func value(rec *event.Record, i int) []byte {
	if i < 0 {
		return nil
	}
	return rec.Values[i]
}

func (m *Mapper) row(p *plan, rec *event.Record, ev *event.Event) {
	m.identify(ev, p.source, value(rec, p.id), p.uuid)
	m.describe(ev, value(rec, p.aggregateType), value(rec, p.aggregateID), value(rec, p.eventType))
	if !m.created(ev, value(rec, p.createdAt)) {
		m.committed(ev)
	}
	version := value(rec, p.schemaVersion)
	m.header(ev, event.HeaderSchemaVersion, version)
	if p.debezium {
		m.header(ev, debeziumID, ev.ID)
	}
	own := len(ev.Headers)
	for i, column := range p.columns {
		m.header(ev, p.source.columns[i].name(), value(rec, column))
	}
	m.content(ev, p.source, own, value(rec, p.headers), value(rec, p.contType), p.payloadType, version)

	payload := value(rec, p.payload)
	if !p.bytea {
		ev.Payload = payload
		return
	}
	n := len(m.buf)
	var ok bool
	if m.buf, ok = appendBytea(m.buf, payload); !ok {
		m.poison(event.ReasonContent, "the payload is not bytea's text form, hex or escape")
	}
	ev.Payload = m.since(n)
}

// debeziumID is the header in which Debezium's router passes the id.
const debeziumID = "id"

func (m *Mapper) identify(ev *event.Event, s *source, id []byte, unique bool) {
	switch {
	case id == nil:
		m.poison(event.ReasonNullID, "the id is NULL")
		return
	case len(id) == 0:
		m.poison(event.ReasonNullID, "the id is empty")
		return
	}
	ev.ID = id
	ev.MsgID = ev.ID
	if !unique {
		n := len(m.buf)
		m.buf = append(m.buf, s.qualify...)
		m.buf = append(m.buf, id...)
		ev.MsgID = m.since(n)
	}
	m.header(ev, event.HeaderID, ev.ID)
}

func (m *Mapper) describe(ev *event.Event, aggregateType, aggregateID, eventType []byte) {
	ev.AggregateType, ev.AggregateID, ev.EventType = aggregateType, aggregateID, eventType
	m.header(ev, event.HeaderAggregateType, ev.AggregateType)
	m.header(ev, event.HeaderAggregateID, ev.AggregateID)
	m.header(ev, event.HeaderEventType, ev.EventType)
}

// header adds a header unless the value is nil.
func (m *Mapper) header(ev *event.Event, name string, v []byte) {
	if v == nil {
		return
	}
	if badValue(v) {
		m.poison(event.ReasonHeaders, "the value of %s has a line break or NUL", name)
		return
	}
	ev.Headers = append(ev.Headers, event.Header{Name: name, Value: v})
}

// created sets the time from the text of created_at; false when that is no
// time, as for NULL and infinity.
func (m *Mapper) created(ev *event.Event, text []byte) bool {
	if len(text) == 0 {
		return false
	}
	if !bytes.Equal(text, m.createdText) {
		var ok bool
		m.createdText = m.createdText[:0]
		if m.createdTime, ok = appendTime(m.createdTime[:0], text); !ok {
			return false
		}
		m.createdText = append(m.createdText, text...)
	}
	ev.Headers = append(ev.Headers, event.Header{Name: event.HeaderTime, Value: m.createdTime})
	return true
}

// committed sets the time from the transaction; a non-transactional message has none.
func (m *Mapper) committed(ev *event.Event) {
	if ev.CommitTime.IsZero() {
		return
	}
	if !ev.CommitTime.Equal(m.commitTime) {
		m.commitTime = ev.CommitTime
		m.commitText = ev.CommitTime.UTC().AppendFormat(m.commitText[:0], time.RFC3339Nano)
	}
	ev.Headers = append(ev.Headers, event.Header{Name: event.HeaderTime, Value: m.commitText})
}

// content adds the event's own headers, the first of which, at own, are those
// of columns, the content type, and the subject, which may need them.
func (m *Mapper) content(ev *event.Event, s *source, own int, headers, contentType, byPayload, version []byte) {
	if headers != nil {
		if t := m.own(ev, s, own, headers); contentType == nil {
			contentType = t
		}
	}
	t := m.override
	if t == nil {
		t = s.template(ev)
	}
	m.route(ev, t, &subjectValues{
		aggregateType: ev.AggregateType,
		aggregateID:   ev.AggregateID,
		eventType:     ev.EventType,
		schemaVersion: version,
		headers:       ev.Headers[own:],
	})
	if contentType == nil {
		contentType = byPayload
		ev.Headers = append(ev.Headers, event.Header{Name: event.HeaderContentType, Value: byPayload})
	} else {
		m.header(ev, event.HeaderContentType, contentType)
	}
	if s.ceSource != nil {
		m.cloudEvent(ev, s, contentType, own)
	}
}

// route makes the subject.
func (m *Mapper) route(ev *event.Event, t *template, v *subjectValues) {
	if r := t.route; r != nil {
		switch r.by {
		case roleAggregateID:
			v.routed = ev.AggregateID
		case roleEventType:
			v.routed = ev.EventType
		default:
			v.routed = ev.AggregateType
		}
		var ok bool
		if v.groups, ok = r.match(v.routed); !ok {
			m.poison(event.ReasonSubject, "%s %q does not match the route's expression", r.by, shorten(v.routed))
			return
		}
	}
	n := len(m.buf)
	var ok bool
	if m.buf, ok = t.append(m.buf, v); ok {
		ev.Subject = m.since(n)
		return
	}
	m.poison(event.ReasonSubject, "the subject is longer than %d bytes", maxSubject)
	m.buf = m.buf[:n]
}

// own adds the headers of a JSON object and returns its Content-Type, nil when
// it has none. Those of columns, from own on, are kept.
func (m *Mapper) own(ev *event.Event, s *source, own int, raw []byte) (contentType []byte) {
	if string(skipSpace(raw)) == "null" {
		return nil
	}
	o, ok := members(raw)
	if !ok {
		m.poison(event.ReasonHeaders, "the headers are not a JSON object")
		return nil
	}
	columns := ev.Headers[own:len(ev.Headers):len(ev.Headers)]
	for o.next() {
		if null(o.value) {
			continue
		}
		name := unquote(o.key)
		ce := s.ceSource != nil && hasFoldPrefix(name, cePrefix)
		if controls(name) || s.debezium && string(name) == debeziumID || ce && ceOwn(name) {
			m.stripped.Add(1)
			continue
		}
		if badName(name) || ce && !(bytes.HasPrefix(name, []byte(cePrefix)) && ceName(name[len(cePrefix):])) {
			m.poison(event.ReasonHeaders, "%q cannot be a header's name", shorten(name))
			continue
		}
		if slices.ContainsFunc(columns, func(h event.Header) bool { return fold(name, h.Name) }) {
			continue
		}
		n := len(m.buf)
		m.buf = appendFlat(m.buf, o.value)
		if fold(name, event.HeaderContentType) {
			contentType = m.since(n)
			continue
		}
		v := m.since(n)
		if ce {
			n = len(m.buf)
			m.buf = appendCE(m.buf, v)
			v = m.since(n)
		}
		m.header(ev, m.intern(name), v)
	}
	return contentType
}

// intern returns name as a string, without allocating for one seen before.
func (m *Mapper) intern(name []byte) string {
	if s, ok := m.names[string(name)]; ok {
		return s
	}
	s := string(name)
	if len(m.names) < maxNames {
		m.names[s] = s
	}
	return s
}
