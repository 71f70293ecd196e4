package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

// The model: a fixed log, a Postgres that serves it and a broker with one
// stream, all as dumb as can be. Relays come and go on it. Every invariant is
// checked where it would break, so that a failure shows the step at fault.

// fate is what will become of a change.
type fate uint8

const (
	fine       fate = iota
	alien           // not the outbox's
	unmappable      // poison, found by Map
	unfit           // poison, found by Append
	refused         // poison, found by the server when the event arrives there
)

func (f fate) poison() bool { return f >= unmappable }

type change struct {
	entry *entry
	kind  event.Kind
	pos   event.Position
	name  string
	fate  fate

	redelivered bool // it stands for a dead letter
}

// entry is a transaction, or a message outside of one. The server sends it
// again when start is at or past the confirmed LSN.
type entry struct {
	start, end event.LSN
	xid        uint32
	time       time.Time
	lone       bool // a non-transactional message
	changes    []*change
}

// odds are the chances of one seed's faults, each for one call.
type odds struct {
	poison, open, next, confirm, forget, shutdown, standby  float64
	refuse, loseAck, loseConn, late, zombie, kv, park, gone float64
	pause, foreignRow, keepalive, resume, watch             float64
}

// dice is one component's own random source, so that the others' order of
// throws does not change its own.
type dice struct {
	*rand.Rand
	w *world
}

func (d dice) hit(p float64) bool { return !d.w.calm.Load() && d.Float64() < p }

func (d dice) upTo(most time.Duration) time.Duration {
	return 1 + time.Duration(d.Int64N(int64(most)))
}

type stored struct {
	pos    event.Position
	marker bool
}

// record is a checkpoint as the publisher writes it.
type record struct {
	sequence uint64
	position event.Position
	xid      uint32
	time     time.Time
	confirm  event.LSN
}

type recorded struct {
	confirm event.LSN
	since   time.Time
}

type world struct {
	t      *testing.T
	seed   uint64
	odds   odds
	halt   bool
	window uint64
	queue  bool // work queue: consumed messages are gone
	delay  time.Duration
	calm   atomic.Bool
	began  time.Time

	log    []*entry
	events []*change // what the stream has to hold: sequence n is events[n-1]
	named  map[string]*change
	origin event.Origin

	mu        sync.Mutex
	throws    uint64
	trace     []string
	wrong     bool
	confirmed event.LSN // of the slot
	earlier   []event.LSN
	owner     *source // the session that holds the slot
	stream    []stored
	consumed  uint64 // messages gone from the stream
	settled   uint64 // sequence up to which a relay saw acks
	revision  int
	kept      *record
	recorded  []recorded                // the LSNs that checkpoints cover, since when
	letters   map[event.Position]int    // dead letters
	open      map[event.Position]bool   // dead letters that are to be published after all, and are still there
	noted     map[event.Position]string // what the relay noted of them
	complete  chan struct{}             // closed when everything is stored and confirmed
	finished  bool

	serving sync.WaitGroup
}

func newWorld(t *testing.T, seed uint64) *world {
	w := &world{
		t: t, seed: seed, began: time.Now(), confirmed: 1,
		named: map[string]*change{}, letters: map[event.Position]int{}, open: map[event.Position]bool{}, noted: map[event.Position]string{}, complete: make(chan struct{}),
	}
	d := w.dice()
	chance := func(most float64) float64 {
		if d.IntN(3) == 0 {
			return 0
		}
		return d.Float64() * most
	}
	w.odds = odds{
		poison: chance(0.15), open: chance(0.3), next: chance(0.02), confirm: chance(0.03), forget: chance(0.6),
		shutdown: chance(0.1), standby: chance(0.2), refuse: chance(0.03), loseAck: chance(0.03), loseConn: chance(0.02),
		late: chance(0.02), zombie: chance(1), kv: chance(0.1), park: chance(0.3), gone: chance(1), pause: chance(0.3),
		foreignRow: chance(0.4), keepalive: chance(0.5), resume: chance(0.1), watch: chance(0.1),
	}
	w.halt = d.IntN(4) == 0
	w.queue = d.IntN(2) == 0
	if d.IntN(3) == 0 {
		w.delay = d.upTo(5 * time.Second)
	}
	w.window = 1 + uint64(d.IntN(12))
	w.writeLog(d)
	return w
}

// writeLog fills the log: transactions of several rows, with LSNs that lie
// between those of others, rows that share one, rows of other tables, logical
// messages inside and outside of transactions.
func (w *world) writeLog(d dice) {
	lsn := event.LSN(1000)
	n := 15 + d.IntN(35)
	promoted := 1 + d.IntN(2*n) // the entry from which on the second timeline is written
	w.origin = event.Origin{SystemID: "7", Database: "shop", Slot: "orders", Timeline: 1, Fingerprint: "f"}
	for i := range n {
		if i == promoted {
			w.origin.Timeline = 2
			w.origin.History = []event.Switch{{Timeline: 1, End: lsn}}
		}
		e := &entry{start: lsn + event.LSN(d.IntN(30))}
		e.end = e.start + 2 + event.LSN(d.IntN(20))
		lsn = e.end
		w.log = append(w.log, e)
		if e.lone = d.IntN(8) == 0; e.lone {
			at := e.end - 1
			w.write(d, e, event.Message, event.Position{Timeline: w.origin.Timeline, Commit: at, Change: at})
			continue
		}
		e.xid = uint32(700 + i)
		e.time = w.began.Add(time.Duration(i) * time.Millisecond).UTC()
		pos := event.Position{Timeline: w.origin.Timeline, Commit: e.start, Change: e.start - 1 - event.LSN(200+d.IntN(700))}
		for range d.IntN(5) {
			pos.Change, pos.N = pos.Change+1+event.LSN(d.IntN(20)), 0
			kind := event.Row
			if d.IntN(6) == 0 {
				kind = event.Message
			}
			w.write(d, e, kind, pos)
			for kind == event.Row && d.IntN(4) == 0 { // COPY
				pos.N++
				w.write(d, e, kind, pos)
			}
		}
	}
	w.origin.WALEnd = lsn
}

func (w *world) write(d dice, e *entry, kind event.Kind, pos event.Position) {
	c := &change{entry: e, kind: kind, pos: pos, name: fmt.Sprintf("event-%d", len(w.named)+1)}
	switch {
	case d.Float64() < w.odds.foreignRow:
		c.fate = alien
	case d.Float64() < w.odds.poison:
		c.fate = unmappable + fate(d.IntN(3))
	}
	if kind == event.Message && !e.lone && c.fate != alien && d.IntN(3) > 0 {
		c.redelivered, w.open[pos] = true, true
	}
	e.changes = append(e.changes, c)
	w.named[c.name] = c
	if c.fate != alien {
		w.events = append(w.events, c)
	}
}

func (w *world) dice() dice {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.throws++
	return dice{rand.New(rand.NewPCG(w.seed, w.throws)), w}
}

func (w *world) note(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.noteLocked(format, args...)
}

func (w *world) noteLocked(format string, args ...any) {
	w.trace = append(w.trace, fmt.Sprintf("%12s  ", time.Since(w.began))+fmt.Sprintf(format, args...))
}

// broken reports an invariant that does not hold.
func (w *world) broken(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.brokenLocked(format, args...)
}

func (w *world) brokenLocked(format string, args ...any) {
	if w.wrong {
		return
	}
	w.wrong = true
	tail := w.trace[max(0, len(w.trace)-60):]
	w.t.Errorf("seed %d (repeat with -seed %d): %s\n%s", w.seed, w.seed, fmt.Sprintf(format, args...), strings.Join(tail, "\n"))
}

func (w *world) failed() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.wrong
}

var (
	errDead    = errors.New("the relay is dead")
	errFault   = errors.New("fault")
	errStandby = errors.New("slot is active")
	errClosed  = errors.New("closed")
)

// life is one relay process on the world.
type life struct {
	w       *world
	dead    chan struct{}
	once    sync.Once
	steps   atomic.Int64
	crashAt int64 // the step before which it dies; 0 for never
	dice    dice  // of what is opened, one after the other
	guards  dice  // of the watcher's background work

	// What the publisher carries over from session to session.
	suspect   bool
	condemned map[event.Position]bool

	sink    *sink
	stopped atomic.Bool // it was told to stop
}

func (w *world) newLife(crashAt int64) *life {
	return &life{
		w: w, dead: make(chan struct{}), crashAt: crashAt, dice: w.dice(), guards: w.dice(),
		condemned: map[event.Position]bool{},
	}
}

func (l *life) kill() { l.once.Do(func() { close(l.dead) }) }

// step is taken at the begin of everything that changes the world.
func (l *life) step() error {
	if l.steps.Add(1) == l.crashAt {
		l.w.note("crash")
		l.kill()
	}
	select {
	case <-l.dead:
		return errDead
	default:
		return nil
	}
}

// pause waits in virtual time. It is false when one of the channels ended it.
func pause(d time.Duration, ends ...<-chan struct{}) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	ends = append(ends, nil, nil)
	select {
	case <-t.C:
		return true
	case <-ends[0]:
	case <-ends[1]:
	}
	return false
}

// source is a replication session.
type source struct {
	w     *world
	l     *life
	dice  dice // of Next
	acks  dice // of Confirm
	entry int
	step  int // next change of the entry
	beat  bool
	delay time.Duration
	rec   event.Record
	bytes []byte
	busy  atomic.Bool

	interrupted, closed chan struct{}
	interrupt, shut     sync.Once

	confirming sync.Mutex // stands for the caller's care: never contended
	highest    event.LSN
	before     event.LSN // confirmed when the session began
	quit       time.Time // when the server was seen to shut down
}

func (l *life) openSource(ctx context.Context) (Source, error) {
	w := l.w
	if err := l.step(); err != nil {
		return nil, err
	}
	if l.dice.hit(0.3) && !pause(l.dice.upTo(2*time.Second), ctx.Done(), l.dead) {
		return nil, context.Cause(ctx)
	}
	if l.dice.hit(w.odds.standby) {
		return nil, errStandby
	}
	if l.dice.hit(w.odds.open) {
		return nil, errFault
	}
	s := &source{w: w, l: l, dice: w.dice(), acks: w.dice(), interrupted: make(chan struct{}), closed: make(chan struct{})}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.owner != nil {
		w.brokenLocked("a session is opened before the last one is closed")
	}
	if n := len(w.earlier); n > 0 && l.dice.hit(w.odds.forget) {
		// Postgres crashed: the slot's position was not durable yet.
		w.confirmed = w.earlier[n-1-l.dice.IntN(min(n, 5))]
	}
	for s.entry < len(w.log) && w.log[s.entry].start < w.confirmed {
		s.entry++
	}
	w.owner, s.before, s.highest = s, w.confirmed, w.confirmed
	w.noteLocked("replication from %s", w.confirmed)
	return s, nil
}

func (s *source) Origin() event.Origin { return s.w.origin }

func (s *source) Buffered() bool { return s.delay == 0 }

func (s *source) Next() (*event.Record, error) {
	if !s.busy.CompareAndSwap(false, true) {
		s.w.broken("two goroutines in Next")
	}
	defer s.busy.Store(false)
	for i := range s.bytes {
		s.bytes[i] = '#' // the last record is not valid any more
	}
	s.rec = event.Record{}
	if s.delay > 0 {
		if k := s.l.sink; k != nil && len(k.out) > 0 {
			s.w.broken("waiting for Postgres with %d events that are not flushed", len(k.out))
		}
		if !pause(s.delay, s.interrupted, s.closed) {
			return nil, errClosed
		}
	}
	select {
	case <-s.interrupted:
		return nil, errClosed
	case <-s.closed:
		return nil, errClosed
	default:
	}
	if err := s.l.step(); err != nil {
		return nil, err
	}
	if s.dice.hit(s.w.odds.next) {
		s.w.note("replication connection lost")
		return nil, errFault
	}
	s.read()
	s.delay = 0
	if s.entry == len(s.w.log) {
		s.delay = s.dice.upTo(2 * time.Second)
	} else if s.dice.hit(s.w.odds.pause) {
		s.delay = s.dice.upTo(700 * time.Millisecond)
	}
	return &s.rec, nil
}

// read sets rec to what comes next.
func (s *source) read() {
	w := s.w
	if s.step == 0 && !s.beat {
		s.beat = true
		// Everything up to some place before the next entry was decoded.
		from, to := s.before, w.origin.WALEnd
		if s.entry > 0 {
			from = max(from, w.log[s.entry-1].end)
		}
		if s.entry < len(w.log) {
			to = w.log[s.entry].start
		}
		if s.entry == len(w.log) || s.dice.Float64() < w.odds.keepalive {
			at := from + event.LSN(s.dice.Int64N(int64(to-from)+1))
			if s.entry == len(w.log) {
				at, s.beat = to, false
			}
			s.rec = event.Record{Kind: event.Keepalive, Confirm: at}
			return
		}
	}
	e := w.log[s.entry]
	if s.step == len(e.changes) {
		s.entry, s.step, s.beat = s.entry+1, 0, false
		s.rec = event.Record{
			Kind: event.Commit, Position: event.Position{Timeline: w.timeline(e), Commit: e.start},
			Confirm: e.end, XID: e.xid, CommitTime: e.time,
		}
		return
	}
	c := e.changes[s.step]
	s.step++
	s.bytes = append(s.bytes[:0], c.name...)
	s.rec = event.Record{Kind: c.kind, Position: c.pos, XID: e.xid, CommitTime: e.time}
	if c.kind == event.Row {
		s.rec.Values = [][]byte{s.bytes}
	} else {
		s.rec.Content, s.rec.Transactional = s.bytes, !e.lone
	}
	if e.lone {
		s.rec.Confirm = e.end
		s.entry, s.step, s.beat = s.entry+1, 0, false
	}
}

func (w *world) timeline(e *entry) uint32 {
	for _, h := range w.origin.History {
		if e.start < h.End {
			return h.Timeline
		}
	}
	return w.origin.Timeline
}

func (s *source) Confirm(lsn event.LSN) error {
	if !s.confirming.TryLock() {
		s.w.broken("two goroutines in Confirm")
		return errFault
	}
	defer s.confirming.Unlock()
	select {
	case <-s.closed:
		return errClosed
	default:
	}
	if err := s.l.step(); err != nil {
		return err
	}
	w := s.w
	lost := s.acks.hit(w.odds.confirm)
	w.mu.Lock()
	defer w.mu.Unlock()
	if lsn < s.highest {
		w.brokenLocked("confirmed %s after %s", lsn, s.highest)
	}
	s.highest = lsn
	if lsn > s.before && (w.kept == nil || w.kept.confirm < lsn) {
		w.brokenLocked("confirmed %s, which no checkpoint has", lsn)
	}
	if at := slices.IndexFunc(w.recorded, func(r recorded) bool { return r.confirm >= lsn }); lsn > s.before && at >= 0 {
		if held := time.Since(w.recorded[at].since); held < w.delay {
			w.brokenLocked("confirmed %s after %s, the delay is %s", lsn, held, w.delay)
		}
	}
	for i, c := range w.events {
		if c.entry.start < lsn && uint64(i) >= w.settled {
			w.brokenLocked("confirmed %s past %s at %s, which is not settled", lsn, c.name, c.pos)
			break
		}
		if c.entry.start < lsn && c.redelivered && w.open[c.pos] != c.fate.poison() {
			w.brokenLocked("confirmed %s past %s, whose dead letter is there: %v, with fate %d", lsn, c.name, w.open[c.pos], c.fate)
			break
		}
	}
	if lost && s.acks.IntN(2) == 0 {
		w.noteLocked("status %s lost", lsn)
		return errFault
	}
	if lsn > w.confirmed {
		w.earlier = append(w.earlier, w.confirmed)
		w.confirmed = lsn
		w.noteLocked("confirmed %s", lsn)
	}
	if w.calm.Load() && lsn >= w.origin.WALEnd && len(w.stream) == len(w.events) && !w.finished {
		w.finished = true
		close(w.complete)
	}
	if lost {
		return errFault
	}
	return nil
}

func (s *source) Interrupt() { s.interrupt.Do(func() { close(s.interrupted) }) }

func (s *source) Close() error {
	s.shut.Do(func() {
		close(s.closed)
		s.w.mu.Lock()
		defer s.w.mu.Unlock()
		if s.w.owner == s {
			s.w.owner = nil
		}
		if !s.quit.IsZero() && time.Since(s.quit) > 0 {
			s.w.brokenLocked("a Postgres that shuts down waited %s for the relay", time.Since(s.quit))
		}
	})
	return nil
}

// mapper turns a change's name into its event.
type mapper struct {
	w  *world
	id []byte
}

func (m *mapper) Map(rec *event.Record, ev *event.Event) (bool, error) {
	name := rec.Content
	if rec.Kind == event.Row {
		name = rec.Values[0]
	}
	c := m.w.named[string(name)]
	if c == nil || c.pos != rec.Position {
		m.w.broken("record %q is not valid any more", name)
		return false, errFault
	}
	if c.fate == alien {
		return false, nil
	}
	m.id = append(m.id[:0], name...)
	*ev = event.Event{Position: rec.Position, Table: "outbox", XID: rec.XID, CommitTime: rec.CommitTime, ID: m.id, Payload: name}
	if c.redelivered {
		ev.Replay = &event.Replay{Run: "r", Letter: c.name}
	}
	if c.fate == unmappable {
		return false, &event.Poison{Reason: event.ReasonContent, Detail: c.name}
	}
	return true, nil
}

// watcher is the ordinary connection.
type watcher struct {
	w *world
	l *life
}

func (a watcher) Confirmed(context.Context) (event.LSN, error) {
	if err := a.l.step(); err != nil {
		return 0, err
	}
	if a.l.dice.hit(a.w.odds.watch) {
		return 0, errFault
	}
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	return a.w.confirmed, nil
}

func (a watcher) AwaitShutdown(ctx context.Context) error {
	a.w.mu.Lock()
	s := a.w.owner
	d := time.Hour
	if a.l.guards.hit(a.w.odds.shutdown) {
		d = a.l.guards.upTo(3 * time.Second)
	}
	a.w.mu.Unlock()
	if !pause(d, ctx.Done(), a.l.dead) {
		return errFault
	}
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	if ctx.Err() == nil && s != nil && a.w.owner == s {
		s.quit = time.Now()
		a.w.noteLocked("postgres shuts down")
	}
	return nil
}

func (a watcher) Diagnose(_ context.Context, err error) error { return err }

// frame is a message on its way.
type frame struct {
	seq    uint64 // predicted
	c      *change
	marker bool
}

// reply is the broker's answer to it.
type reply struct {
	seq    uint64
	err    error
	poison bool // the error is the event's own fault
}

// sink is a publishing session. Of its goroutines serve is the broker's end of
// the connection, and read is the client's.
type sink struct {
	w    *world
	l    *life
	dice dice // of the loop
	tape dice // of Checkpoint
	far  dice // of the broker's end
	near dice // of the client's
	fail func(error)

	zombie bool // after its end, the broker still handles what is on the wire

	// Of the loop.
	busy         atomic.Bool
	resumed      bool
	suspect      bool
	redelivering bool // Redeliver has not returned well
	lastSeq      uint64
	base         uint64
	recalled     uint64 // messages up to there are known, while s.left is not 0
	left         bool
	appended     uint64
	sent         atomic.Uint64
	order        []*change // appended
	out          []frame   // not flushed

	acked   atomic.Uint64
	current record
	writing atomic.Bool
	revised int // checkpoint revision

	progress uint64
	since    time.Time

	mu      sync.Mutex
	wire    []frame
	replies []reply
	changed chan struct{} // closed and replaced when anything above changes
	err     error
	verdict *reply // that ended the session
	gone    chan struct{}
	once    sync.Once
	closing atomic.Bool
	reading sync.WaitGroup
	early   bool // it failed before the relay was told to stop
	drained bool // it was closed because the relay was told to stop
}

func (l *life) openSink(ctx context.Context, fail func(error)) (Sink, error) {
	if err := l.step(); err != nil {
		return nil, err
	}
	if l.dice.hit(0.3) && !pause(l.dice.upTo(2*time.Second), ctx.Done(), l.dead) {
		return nil, context.Cause(ctx)
	}
	if l.dice.hit(l.w.odds.open) {
		return nil, errFault
	}
	s := &sink{w: l.w, l: l, dice: l.w.dice(), tape: l.w.dice(), far: l.w.dice(), near: l.w.dice(), zombie: l.dice.hit(l.w.odds.zombie), fail: fail, changed: make(chan struct{}), gone: make(chan struct{})}
	l.sink = s
	return s, nil
}

// enter guards the calls of the loop.
func (s *sink) enter(call string) (leave func(), err error) {
	if !s.busy.CompareAndSwap(false, true) {
		s.w.broken("%s while another goroutine uses the session", call)
	}
	leave = func() { s.busy.Store(false) }
	if s.closing.Load() {
		s.w.broken("%s after Close", call)
	}
	if call != "Resume" && !s.resumed {
		s.w.broken("%s before Resume", call)
	}
	if err = s.l.step(); err != nil {
		s.failWith(err)
	}
	return leave, s.failure()
}

func (s *sink) failure() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// failWith ends the session, as the client sees it.
func (s *sink) failWith(err error) {
	s.mu.Lock()
	first := s.err == nil
	if first {
		s.err, s.early = err, !s.l.stopped.Load()
	}
	s.signal()
	s.mu.Unlock()
	if !first {
		return
	}
	s.hangUp()
	if !s.closing.Load() {
		if !errors.Is(err, errDead) {
			s.w.note("session fails: %v", err)
		}
		s.fail(err)
	}
}

func (s *sink) hangUp() {
	s.once.Do(func() { close(s.gone) })
}

// signal wakes who waits for a change. The caller holds mu.
func (s *sink) signal() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *sink) Resume(ctx context.Context, o event.Origin) (event.Resume, error) {
	leave, err := s.enter("Resume")
	defer leave()
	if err != nil {
		return event.Resume{}, err
	}
	w := s.w
	if s.dice.hit(0.3) && !pause(s.dice.upTo(time.Second), ctx.Done(), s.gone) {
		return event.Resume{}, errFault
	}
	if s.dice.hit(w.odds.resume) {
		return event.Resume{}, errFault
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.resumed || w.owner == nil || o.ConfirmedFlush != w.confirmed {
		w.brokenLocked("resumed without owning the slot, or twice, or with %s for %s", o.ConfirmedFlush, w.confirmed)
	}
	n := uint64(len(w.stream))
	if w.queue && s.dice.hit(w.odds.gone) {
		w.consumed = n
	}
	// As publisher.decide.
	var r event.Resume
	s.lastSeq, s.base, s.revised = n, n, w.revision
	c := w.kept
	switch {
	case c != nil && o.ConfirmedFlush > c.confirm:
		w.brokenLocked("the slot is confirmed up to %s, past the checkpoint at %s", o.ConfirmedFlush, c.confirm)
	case c == nil && n > 0:
		w.brokenLocked("%d messages and no checkpoint", n)
	case c != nil && n < c.sequence:
		w.brokenLocked("checkpoint of sequence %d in a stream of %d", c.sequence, n)
	case n > w.consumed:
		r.After = w.stream[n-1].pos
		if s.dice.IntN(2) == 0 && r.After.Commit >= o.ConfirmedFlush {
			r.AfterID = w.events[n-1].name
		}
	case c != nil:
		r.After, r.Gone = c.position, n-c.sequence
		s.recalled = c.sequence
	}
	if c != nil && !r.After.IsZero() && c.xid != 0 && c.position.Commit >= o.ConfirmedFlush {
		r.Proof = &event.Checkpoint{Position: c.position, XID: c.xid, CommitTime: c.time, Confirm: c.confirm}
	}
	s.suspect = s.l.suspect
	r.Suspect = s.suspect
	// As publisher.claim.
	s.current = record{sequence: s.base, position: r.After, confirm: o.ConfirmedFlush}
	if c != nil {
		if c.position == r.After {
			s.current.xid, s.current.time = c.xid, c.time
		}
		s.current.confirm = max(s.current.confirm, c.confirm)
	}
	w.settled = max(w.settled, n)
	if r.Gone > 0 {
		s.current = *c
	} else {
		w.keep(s)
	}
	s.left, s.since, s.resumed = r.Gone > 0, time.Now(), true
	w.noteLocked("resume after sequence %d, %s, gone %d, suspect %v", n, r.After, r.Gone, r.Suspect)
	w.serving.Go(func() { s.serve(s.far) })
	s.reading.Go(func() { s.read(s.near) })
	return r, nil
}

// keep writes the session's checkpoint. The caller holds w.mu.
func (w *world) keep(s *sink) {
	w.revision++
	s.revised = w.revision
	c := s.current
	w.kept = &c
	if n := len(w.recorded); n == 0 || w.recorded[n-1].confirm < c.confirm {
		w.recorded = append(w.recorded, recorded{c.confirm, time.Now()})
	}
	if c.sequence > w.settled {
		w.brokenLocked("checkpoint of sequence %d, settled are %d", c.sequence, w.settled)
		return
	}
	if c.position.IsZero() != (c.sequence == 0) {
		w.brokenLocked("checkpoint of sequence %d at %s", c.sequence, c.position)
		return
	}
	if c.sequence == 0 {
		return
	}
	e := w.events[c.sequence-1]
	if c.position != e.pos || c.xid != 0 && (c.xid != e.entry.xid || !c.time.Equal(e.entry.time)) {
		w.brokenLocked("checkpoint of sequence %d at %s, transaction %d, want %s, %d", c.sequence, c.position, c.xid, e.pos, e.entry.xid)
	}
}

// Recall knows the place of every message, as the dedup window does.
func (s *sink) Recall(_ context.Context, ev *event.Event) (uint64, error) {
	leave, err := s.enter("Recall")
	defer leave()
	if err != nil {
		return 0, err
	}
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if !s.left || s.recalled >= s.lastSeq || w.stream[s.recalled].pos != ev.Position {
		w.brokenLocked("asks for %s, which is not the one after sequence %d", ev.Position, s.recalled)
		return 0, errFault
	}
	s.recalled++
	return s.lastSeq - s.recalled, nil
}

func (s *sink) Resumed(_ context.Context, c event.Checkpoint) error {
	leave, err := s.enter("Resumed")
	defer leave()
	if err != nil {
		return err
	}
	w := s.w
	w.mu.Lock()
	defer w.mu.Unlock()
	if !s.left || s.recalled != s.lastSeq {
		w.brokenLocked("resumes after sequence %d of %d", s.recalled, s.lastSeq)
	}
	if w.revision != s.revised {
		return errors.New("wrong revision")
	}
	s.left = false
	s.current.sequence, s.current.position, s.current.xid, s.current.time = s.lastSeq, c.Position, c.XID, c.CommitTime
	w.keep(s)
	return nil
}

func (s *sink) Checkpoint(ctx context.Context, c event.Checkpoint) error {
	if !s.writing.CompareAndSwap(false, true) {
		s.w.broken("two goroutines in Checkpoint")
	}
	defer s.writing.Store(false)
	if err := s.l.step(); err != nil {
		return err
	}
	w := s.w
	if s.left {
		w.broken("checkpoint before all gone messages are known")
	}
	if c.Events > s.Settled() {
		w.broken("checkpoint of %d events, %d are settled", c.Events, s.Settled())
	}
	r := s.current
	r.sequence, r.confirm = s.base+c.Events, max(r.confirm, c.Confirm)
	if c.Position != r.position {
		r.position, r.xid, r.time = c.Position, c.XID, c.CommitTime
	}
	if r == s.current {
		return nil
	}
	if s.tape.hit(0.3) && !pause(s.tape.upTo(1500*time.Millisecond), ctx.Done(), s.gone) {
		return errFault
	}
	lost := s.tape.hit(w.odds.kv)
	if lost && s.tape.IntN(2) == 0 {
		return errFault
	}
	w.mu.Lock()
	if w.revision != s.revised {
		w.mu.Unlock()
		return errors.New("wrong revision")
	}
	if r.position != s.current.position && r.xid == 0 && r.position.Commit != r.position.Change {
		w.brokenLocked("checkpoint at %s without its transaction", r.position)
	}
	s.current = r
	w.keep(s)
	w.noteLocked("checkpoint: sequence %d at %s, confirm %s", r.sequence, r.position, r.confirm)
	w.mu.Unlock()
	if !pause(s.tape.upTo(20*time.Millisecond), ctx.Done(), s.gone) || lost {
		s.revised = -1 // the answer is lost, so the session knows no revision any more
		return errFault
	}
	return s.l.step()
}

func (s *sink) Append(ev *event.Event) error {
	leave, err := s.enter("Append")
	defer leave()
	if err != nil {
		return err
	}
	c := s.w.named[string(ev.ID)]
	if c == nil || c.pos != ev.Position || string(ev.Payload) != c.name {
		s.w.broken("event %q %q is not valid any more", ev.ID, ev.Payload)
		return errFault
	}
	if c.redelivered {
		s.w.broken("%s is appended like any other event", c.name)
	}
	if s.l.condemned[c.pos] {
		return &event.Poison{Reason: event.ReasonRefused, Detail: c.name}
	}
	if c.fate == unfit {
		return &event.Poison{Reason: event.ReasonTooLarge, Detail: c.name}
	}
	s.append(c, false)
	return s.failure()
}

func (s *sink) append(c *change, marker bool) {
	if s.Full() {
		s.w.broken("appended to a full window")
	}
	if s.suspect && s.appended == 1 && s.acked.Load() == 0 {
		s.w.broken("a suspect session appends a second event")
	}
	s.appended++
	s.order = append(s.order, c)
	s.out = append(s.out, frame{s.lastSeq + s.appended, c, marker})
	if s.dice.IntN(10) == 0 {
		s.flush()
	}
}

func (s *sink) flush() {
	if len(s.out) == 0 {
		return
	}
	s.sent.Store(s.appended)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wire = append(s.wire, s.out...)
	s.out = s.out[:0]
	s.signal()
}

func (s *sink) Flush() error {
	leave, err := s.enter("Flush")
	defer leave()
	if err == nil {
		s.flush()
	}
	return err
}

func (s *sink) Full() bool { return s.appended-s.acked.Load() >= s.w.window }

func (s *sink) Settled() uint64 { return s.acked.Load() }

func (s *sink) WaitSettled(ctx context.Context, n uint64) error {
	leave, err := s.enter("WaitSettled")
	defer leave()
	if err != nil {
		return err
	}
	if n > s.appended {
		s.w.broken("waits for %d events of %d", n, s.appended)
	}
	s.flush()
	return s.wait(ctx, func() bool { return s.Settled() >= n })
}

func (s *sink) WaitRoom(ctx context.Context) error {
	leave, err := s.enter("WaitRoom")
	defer leave()
	if err != nil {
		return err
	}
	s.flush()
	return s.wait(ctx, func() bool { return !s.Full() })
}

func (s *sink) wait(ctx context.Context, enough func() bool) error {
	for {
		s.mu.Lock()
		changed, err := s.changed, s.err
		s.mu.Unlock()
		switch {
		case err != nil:
			return err
		case enough():
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.l.dead:
			s.failWith(errDead)
		}
	}
}

func (s *sink) Park(ctx context.Context, ev *event.Event, why *event.Poison) error {
	leave, err := s.enter("Park")
	defer leave()
	if err != nil {
		return err
	}
	w := s.w
	if s.acked.Load() != s.appended {
		w.broken("parks with %d of %d events settled", s.acked.Load(), s.appended)
	}
	c := w.named[string(ev.ID)]
	if c == nil || c.pos != ev.Position || ev.Table == "" || why.Detail != c.name {
		w.broken("parks %q for %v", ev.ID, why)
		return errFault
	}
	if !pause(s.dice.upTo(200*time.Millisecond), ctx.Done(), s.gone) {
		return errFault
	}
	lost := s.dice.hit(w.odds.park)
	if lost && s.dice.IntN(2) == 0 {
		return errFault
	}
	w.mu.Lock()
	w.letters[c.pos]++
	w.noteLocked("dead letter %s", c.name)
	w.mu.Unlock()
	if err := s.l.step(); err != nil || lost {
		return errFault
	}
	delete(s.l.condemned, c.pos)
	s.l.suspect = false
	s.append(c, true)
	return s.failure()
}

// Redeliver does as that of publisher.Session.
func (s *sink) Redeliver(ctx context.Context, ev *event.Event, why *event.Poison) (*event.Poison, error) {
	leave, err := s.enter("Redeliver")
	defer leave()
	if err != nil {
		return nil, err
	}
	w := s.w
	c := w.named[string(ev.ID)]
	if s.acked.Load() != s.appended || c == nil || c.pos != ev.Position || !c.redelivered {
		w.broken("redelivers %q with %d of %d events settled", ev.ID, s.acked.Load(), s.appended)
		return nil, errFault
	}
	s.redelivering = true
	switch {
	case s.l.condemned[c.pos]:
		why = &event.Poison{Reason: event.ReasonRefused, Detail: c.name}
	case why == nil && c.fate == unfit:
		why = &event.Poison{Reason: event.ReasonTooLarge, Detail: c.name}
	}
	if why != nil {
		if err := s.note(ctx, c, "refused"); err != nil {
			return nil, err
		}
		delete(s.l.condemned, c.pos)
		s.l.suspect = false
		s.append(c, true)
		s.redelivering = false
		return why, s.failure()
	}
	if w.noteOf(c) == "refused" {
		if err := s.note(ctx, c, "trying"); err != nil {
			return nil, err
		}
	}
	s.append(c, false)
	s.flush()
	n := s.appended
	if err := s.wait(ctx, func() bool { return s.acked.Load() >= n }); err != nil {
		return nil, err
	}
	err = s.remove(ctx, c)
	s.redelivering = err != nil
	return nil, err
}

func (w *world) noteOf(c *change) string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.noted[c.pos]
}

// note writes what becomes of a dead letter. The answer may be lost, or it.
func (s *sink) note(ctx context.Context, c *change, what string) error {
	if !pause(s.dice.upTo(200*time.Millisecond), ctx.Done(), s.gone) {
		return errFault
	}
	lost := s.dice.hit(s.w.odds.park)
	if lost && s.dice.IntN(2) == 0 {
		return errFault
	}
	s.w.mu.Lock()
	s.w.noted[c.pos] = what
	s.w.noteLocked("dead letter of %s is noted as %s", c.name, what)
	s.w.mu.Unlock()
	if err := s.l.step(); err != nil || lost {
		return errFault
	}
	return nil
}

// remove removes the dead letter of an event that is stored.
func (s *sink) remove(ctx context.Context, c *change) error {
	if err := s.note(ctx, c, "stored"); err != nil {
		return err
	}
	w := s.w
	w.mu.Lock()
	if !slices.Contains(w.stream, stored{pos: c.pos}) {
		w.brokenLocked("the dead letter of %s is removed, and its event is not stored", c.name)
	}
	w.open[c.pos] = false
	w.noteLocked("dead letter of %s removed", c.name)
	w.mu.Unlock()
	if s.dice.hit(w.odds.park) {
		return errFault
	}
	return s.l.step()
}

func (s *sink) Release(ctx context.Context, ev *event.Event) error {
	leave, err := s.enter("Release")
	defer leave()
	if err != nil {
		return err
	}
	c := s.w.named[string(ev.ID)]
	if c == nil || c.pos != ev.Position || !c.redelivered {
		s.w.broken("releases %q", ev.ID)
		return errFault
	}
	if s.w.noteOf(c) == "refused" {
		return nil
	}
	return s.remove(ctx, c)
}

func (s *sink) Repark(_ context.Context, ev *event.Event, _ *event.Poison) error {
	s.w.broken("parks %q again", ev.ID)
	return errFault
}

func (s *sink) Refuse(_ context.Context, ev *event.Event, _ *event.Poison) error {
	s.w.broken("refuses %q", ev.ID)
	return errFault
}

func (s *sink) Tick() {
	now := time.Now()
	acked, sent := s.acked.Load(), s.sent.Load()
	if acked != s.progress || acked == sent {
		s.progress, s.since = acked, now
	}
	if now.Sub(s.since) >= 2*time.Second {
		s.failWith(errors.New("no ack"))
	}
}

func (s *sink) Close() error {
	if !s.busy.CompareAndSwap(false, true) {
		s.w.broken("closed while another goroutine uses the session")
	}
	s.closing.Store(true)
	s.hangUp()
	s.reading.Wait()
	s.mu.Lock()
	err, v := s.err, s.verdict
	s.drained = s.l.stopped.Load() && !s.early
	s.mu.Unlock()
	if err == nil {
		return nil
	}
	// As publisher.Session.bequeath.
	s.l.suspect = false
	if v != nil && v.poison {
		if alone := v.seq == s.lastSeq+s.acked.Load()+1 && s.sent.Load() == s.acked.Load()+1; alone {
			s.l.condemned[s.order[v.seq-s.lastSeq-1].pos] = true
		} else {
			s.l.suspect = true
		}
	}
	return nil
}

// serve handles the frames on the wire in order.
func (s *sink) serve(d dice) {
	for {
		s.mu.Lock()
		var f frame
		ok := len(s.wire) > 0
		if ok {
			f, s.wire = s.wire[0], s.wire[1:]
		}
		changed := s.changed
		s.mu.Unlock()
		if !ok {
			select {
			case <-changed:
				continue
			case <-s.gone:
				return
			}
		}
		slow := 100 * time.Microsecond
		if d.hit(0.2) {
			slow = 300 * time.Millisecond
		}
		if !pause(d.upTo(slow), s.gone) {
			if !s.zombie {
				return
			}
			pause(d.upTo(3 * time.Second))
		}
		if d.hit(s.w.odds.loseConn) {
			s.failWith(errors.New("connection lost"))
		}
		r := s.w.store(f, d)
		s.mu.Lock()
		s.replies = append(s.replies, r)
		s.signal()
		s.mu.Unlock()
	}
}

// store is the broker's: it takes the message that the chain asks for next.
func (w *world) store(f frame, d dice) reply {
	w.mu.Lock()
	defer w.mu.Unlock()
	r := reply{seq: f.seq}
	switch {
	case f.seq != uint64(len(w.stream))+1:
		r.err = errors.New("wrong last sequence")
		return r
	case !f.marker && f.c.fate == refused:
		r.err, r.poison = errors.New("refused for good"), true
		return r
	case d.hit(w.odds.refuse):
		r.err = errors.New("refused this time")
		return r
	}
	w.stream = append(w.stream, stored{f.c.pos, f.marker})
	if f.seq > uint64(len(w.events)) {
		w.brokenLocked("%s is one event too many", f.c.name)
		return r
	}
	want := w.events[f.seq-1]
	if f.c != want {
		w.brokenLocked("stored %s as sequence %d, want %s", f.c.name, f.seq, want.name)
	}
	if f.marker != want.fate.poison() {
		w.brokenLocked("%s of fate %d: marker is %v", f.c.name, want.fate, f.marker)
	}
	switch {
	case f.marker && f.c.redelivered && w.noted[f.c.pos] != "refused":
		w.brokenLocked("marker of %s, which is noted as %q", f.c.name, w.noted[f.c.pos])
	case f.marker && !f.c.redelivered && w.letters[f.c.pos] == 0:
		w.brokenLocked("marker of %s without a dead letter", f.c.name)
	}
	w.noteLocked("stored %s as sequence %d", f.c.name, f.seq)
	return r
}

// read handles the broker's replies in order.
func (s *sink) read(d dice) {
	for {
		s.mu.Lock()
		var r reply
		ok := len(s.replies) > 0
		if ok {
			r, s.replies = s.replies[0], s.replies[1:]
		}
		changed := s.changed
		s.mu.Unlock()
		if !ok {
			select {
			case <-changed:
				continue
			case <-s.gone:
				return
			}
		}
		slow := 100 * time.Microsecond
		if d.hit(0.1) {
			slow = 500 * time.Millisecond
		}
		if d.hit(s.w.odds.late) {
			slow = 6 * time.Second
		}
		if !pause(d.upTo(slow), s.gone) {
			return
		}
		if d.hit(s.w.odds.loseAck) {
			s.w.note("ack of sequence %d lost", r.seq)
			continue
		}
		acked := s.acked.Load()
		if r.err == nil && r.seq != s.lastSeq+acked+1 {
			r.err = errors.New("acked out of turn")
		}
		if r.err != nil {
			s.mu.Lock()
			if s.verdict == nil && s.err == nil {
				s.verdict = &r
			}
			s.mu.Unlock()
			s.failWith(fmt.Errorf("sequence %d: %w", r.seq, r.err))
			return
		}
		s.w.mu.Lock()
		s.w.settled = max(s.w.settled, r.seq)
		s.w.mu.Unlock()
		s.mu.Lock()
		s.acked.Store(acked + 1)
		s.signal()
		s.mu.Unlock()
	}
}
