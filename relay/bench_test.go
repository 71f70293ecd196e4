package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
)

// bench is a relay between two sides that the test moves by hand.
type bench struct {
	*testing.T
	Options
	relay  *Relay
	stop   context.CancelFunc
	result chan error
	over   chan struct{} // closed when Run has returned

	source *handSource // of the present session
	sink   *handSink
	opened []string // "source" and "sink", in order

	resume    event.Resume
	recallErr map[string]error
	window    int
	confirmed event.LSN
	shutdown  chan struct{} // closed by the test
	diagnose  func(context.Context, error) error
	mapErr    map[string]error

	mu sync.Mutex // of what both sides hold

	lines lines // of the log
	start time.Time
}

// story runs f on a bench in virtual time. f calls run when it has set it up.
func story(t *testing.T, f func(*bench)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		b := &bench{
			T: t, result: make(chan error, 1), over: make(chan struct{}), window: 1000, confirmed: 100,
			shutdown: make(chan struct{}), diagnose: func(_ context.Context, err error) error { return err },
			mapErr: map[string]error{}, start: time.Now(),
		}
		b.OpenSource = func(context.Context) (Source, error) { return b.newSource(), nil }
		b.OpenSink = func(_ context.Context, fail func(error)) (Sink, error) { return b.newSink(fail), nil }
		b.Mapper, b.Watcher = handMapper{b}, handWatcher{b}
		b.Log = slog.New(slog.NewTextHandler(&b.lines, nil))
		defer b.clean()
		f(b)
	})
}

// clean ends the relay and looks whether anything is left open.
func (b *bench) clean() {
	if b.stop == nil {
		return
	}
	b.stop()
	<-b.over
	if b.source != nil && !isClosed(b.source.closed) {
		b.Error("the source is left open")
	}
	if b.sink != nil && !isClosed(b.sink.closed) {
		b.Error("the sink is left open")
	}
}

// run starts the relay, and returns when it waits for something.
func (b *bench) run() {
	b.Helper()
	var err error
	if b.relay, err = New(b.Options); err != nil {
		b.Fatal(err)
	}
	b.relay.jitter = func(d time.Duration) time.Duration { return d - 1 } // the longest wait
	ctx, stop := context.WithCancel(context.Background())
	b.stop = stop
	go func() {
		defer close(b.over)
		b.result <- b.relay.Run(ctx)
	}()
	synctest.Wait()
}

// set changes what the sides and the closures of a test see.
func (b *bench) set(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

// is reads one of them.
func (b *bench) is(v *bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return *v
}

// after lets virtual time pass.
func (b *bench) after(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

// ended returns when Run returned, and what.
func (b *bench) ended() (time.Duration, error) {
	b.Helper()
	select {
	case err := <-b.result:
		return time.Since(b.start), err
	case <-time.After(time.Hour):
		b.Fatal("the relay does not end")
		return 0, nil
	}
}

func (b *bench) running() bool { return len(b.result) == 0 }

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// lines is a log.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

// with returns the lines that have text.
func (l *lines) with(text string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.DeleteFunc(strings.Split(l.b.String(), "\n"), func(s string) bool { return !strings.Contains(s, text) })
}

// handSource gives the records that the test sends.
type handSource struct {
	b           *bench
	records     chan *event.Record
	errs        chan error
	interrupted chan struct{}
	closed      chan struct{}
	once, shut  sync.Once
	lsn         event.LSN // of what was sent last
	xid         uint32

	// Under the bench's lock.
	confirms   []event.LSN
	confirmErr error
}

func (b *bench) newSource() *handSource {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.source = &handSource{
		b: b, records: make(chan *event.Record, 1000), errs: make(chan error, 1), lsn: b.confirmed,
		interrupted: make(chan struct{}), closed: make(chan struct{}),
	}
	b.opened = append(b.opened, "source")
	return b.source
}

func (s *handSource) Origin() event.Origin {
	return event.Origin{Slot: "orders", Timeline: 1, WALEnd: 1 << 40}
}
func (s *handSource) Buffered() bool { return len(s.records) > 0 }

func (s *handSource) Next() (*event.Record, error) {
	select {
	case <-s.interrupted:
		return nil, errors.New("interrupted")
	default:
	}
	select {
	case r := <-s.records:
		return r, nil
	case err := <-s.errs:
		return nil, err
	case <-s.interrupted:
		return nil, errors.New("interrupted")
	case <-s.closed:
		return nil, errClosed
	}
}

func (s *handSource) Confirm(lsn event.LSN) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if isClosed(s.closed) {
		return errClosed
	}
	if s.confirmErr == nil {
		s.confirms = append(s.confirms, lsn)
		s.b.confirmed = max(s.b.confirmed, lsn)
	}
	return s.confirmErr
}

func (s *handSource) last() event.LSN {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if len(s.confirms) == 0 {
		return 0
	}
	return s.confirms[len(s.confirms)-1]
}

func (s *handSource) Interrupt()   { s.once.Do(func() { close(s.interrupted) }) }
func (s *handSource) Close() error { s.shut.Do(func() { close(s.closed) }); return nil }

// commit sends a transaction of rows, and returns its end.
func (s *handSource) commit(names ...string) event.LSN {
	s.lsn += 100
	s.xid++
	p := event.Position{Timeline: 1, Commit: s.lsn, Change: s.lsn - 50}
	for _, n := range names {
		p.Change++
		s.records <- &event.Record{Kind: event.Row, Position: p, XID: s.xid, Values: [][]byte{[]byte(n)}}
	}
	s.records <- &event.Record{Kind: event.Commit, Position: event.Position{Timeline: 1, Commit: s.lsn}, XID: s.xid, Confirm: s.lsn + 8}
	synctest.Wait()
	return s.lsn + 8
}

// beat sends a keepalive.
func (s *handSource) beat() event.LSN {
	s.lsn += 100
	s.records <- &event.Record{Kind: event.Keepalive, Confirm: s.lsn}
	synctest.Wait()
	return s.lsn
}

// handSink acks when the test says so.
type handSink struct {
	b      *bench
	fail   func(error)
	closed chan struct{}

	// Under the bench's lock.
	changed     chan struct{}
	names       []string // appended; a marker is "!name"
	flushed     int
	acked       int
	err         error
	ticks       int
	checkpoints []event.Checkpoint
	suspect     bool
	recalled    []string
	resumed     []event.Checkpoint

	// Set by the test.
	resuming     chan struct{} // Resume blocks until it is closed
	appending    chan struct{} // Append blocks until it is closed
	parking      chan struct{}
	saving       chan struct{} // Checkpoint
	checkpointed error
	poison       map[string]bool
	refusal      *event.Poison // of Redeliver
	reparked     []string
	released     []string // under the bench's lock
	onTick       func()
}

func (b *bench) newSink(fail func(error)) *handSink {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sink = &handSink{b: b, fail: fail, closed: make(chan struct{}), changed: make(chan struct{}), poison: map[string]bool{}}
	b.opened = append(b.opened, "sink")
	return b.sink
}

// blocks waits for the gate, which nil leaves open.
func (s *handSink) blocks(ctx context.Context, gate *chan struct{}) error {
	s.b.mu.Lock()
	wait := *gate
	s.b.mu.Unlock()
	if wait == nil {
		return s.failure()
	}
	select {
	case <-wait:
	case <-ctx.Done():
		return ctx.Err()
	}
	return s.failure()
}

func (s *handSink) failure() error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return s.err
}

func (s *handSink) Resume(ctx context.Context, o event.Origin) (event.Resume, error) {
	if o.ConfirmedFlush != s.b.confirmed {
		s.b.Errorf("resumes with %s, want %s", o.ConfirmedFlush, s.b.confirmed)
	}
	s.suspect = s.b.resume.Suspect
	return s.b.resume, s.blocks(ctx, &s.resuming)
}

func (s *handSink) Append(ev *event.Event) error {
	if err := s.blocks(context.Background(), &s.appending); err != nil {
		return err
	}
	if s.poison[string(ev.ID)] {
		return &event.Poison{Reason: event.ReasonTooLarge, Detail: string(ev.ID)}
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.names = append(s.names, string(ev.ID))
	return s.err
}

// Recall answers that an event is stored, unless the test knows better.
func (s *handSink) Recall(_ context.Context, ev *event.Event) (uint64, error) {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if err := s.b.recallErr[string(ev.ID)]; err != nil {
		return 0, err
	}
	s.recalled = append(s.recalled, string(ev.ID))
	return s.b.resume.Gone - uint64(len(s.recalled)), nil
}

func (s *handSink) Resumed(_ context.Context, c event.Checkpoint) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.resumed = append(s.resumed, c)
	return nil
}

func (s *handSink) Flush() error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.flushed = len(s.names)
	return s.err
}

func (s *handSink) Full() bool {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return len(s.names)-s.acked >= s.b.window
}

func (s *handSink) Settled() uint64 {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return uint64(s.acked)
}

func (s *handSink) WaitSettled(ctx context.Context, n uint64) error {
	return s.wait(ctx, func() bool { return s.Settled() >= n })
}

func (s *handSink) WaitRoom(ctx context.Context) error {
	return s.wait(ctx, func() bool { return !s.Full() })
}

func (s *handSink) wait(ctx context.Context, enough func() bool) error {
	for {
		s.b.mu.Lock()
		changed, err := s.changed, s.err
		s.flushed = len(s.names)
		s.b.mu.Unlock()
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
		}
	}
}

func (s *handSink) Park(ctx context.Context, ev *event.Event, _ *event.Poison) error {
	if err := s.blocks(ctx, &s.parking); err != nil {
		return err
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.acked != len(s.names) {
		s.b.Errorf("parks %q with %d of %d events settled", ev.ID, s.acked, len(s.names))
	}
	s.names = append(s.names, "!"+string(ev.ID))
	return s.err
}

func (s *handSink) Repark(_ context.Context, ev *event.Event, _ *event.Poison) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.reparked = append(s.reparked, string(ev.ID))
	return s.err
}

func (s *handSink) Redeliver(ctx context.Context, ev *event.Event, why *event.Poison) (*event.Poison, error) {
	if why == nil && s.refusal != nil {
		why = s.refusal
	}
	if why != nil {
		return why, s.Refuse(ctx, ev, why)
	}
	if err := s.Append(ev); err != nil {
		return nil, err
	}
	s.b.mu.Lock()
	s.acked = len(s.names)
	s.b.mu.Unlock()
	return nil, s.Release(ctx, ev)
}

func (s *handSink) Release(_ context.Context, ev *event.Event) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	s.released = append(s.released, ev.Replay.Letter)
	return s.err
}

func (s *handSink) Refuse(_ context.Context, ev *event.Event, _ *event.Poison) error {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.acked != len(s.names) {
		s.b.Errorf("refuses %q with %d of %d events settled", ev.ID, s.acked, len(s.names))
	}
	s.names = append(s.names, "?"+string(ev.ID))
	return s.err
}

func (s *handSink) Checkpoint(ctx context.Context, c event.Checkpoint) error {
	if err := s.blocks(ctx, &s.saving); err != nil {
		return err
	}
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	if s.checkpointed == nil {
		s.checkpoints = append(s.checkpoints, c)
	}
	return s.checkpointed
}

func (s *handSink) Tick() {
	s.b.mu.Lock()
	s.ticks++
	f := s.onTick
	s.b.mu.Unlock()
	if f != nil {
		f()
	}
}

func (s *handSink) Close() error {
	close(s.closed)
	return nil
}

// ack settles n more events.
func (s *handSink) ack(n int) {
	s.b.mu.Lock()
	s.acked += n
	if s.acked > s.flushed {
		s.b.Errorf("%d events to ack, %d flushed of %d", s.acked, s.flushed, len(s.names))
	}
	close(s.changed)
	s.changed = make(chan struct{})
	s.b.mu.Unlock()
	synctest.Wait()
}

// breakWith makes the session fail.
func (s *handSink) breakWith(err error) {
	s.b.mu.Lock()
	s.err = err
	close(s.changed)
	s.changed = make(chan struct{})
	s.b.mu.Unlock()
	s.fail(err)
}

func (s *handSink) stored() string {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return fmt.Sprint(s.names)
}

func (s *handSink) kept() []event.Checkpoint {
	s.b.mu.Lock()
	defer s.b.mu.Unlock()
	return slices.Clone(s.checkpoints)
}

type handMapper struct{ b *bench }

func (m handMapper) Map(rec *event.Record, ev *event.Event) (bool, error) {
	name := string(rec.Values[0])
	*ev = event.Event{ID: rec.Values[0], Position: rec.Position, Table: "outbox", XID: rec.XID, CommitTime: rec.CommitTime}
	return name != "alien", m.b.mapErr[name]
}

type handWatcher struct{ b *bench }

func (w handWatcher) Confirmed(context.Context) (event.LSN, error) { return w.b.confirmed, nil }

func (w handWatcher) AwaitShutdown(ctx context.Context) error {
	select {
	case <-w.b.shutdown:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w handWatcher) Diagnose(ctx context.Context, err error) error { return w.b.diagnose(ctx, err) }
