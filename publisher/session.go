package publisher

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// tailReaders is how many messages readTail asks for at a time.
const tailReaders = 32

// How often, and how far apart, a new leader is asked for what seems to be lost.
const (
	leaderTries = 10
	leaderPause = 200 * time.Millisecond
)

// storedChunk is how many messages storedSince reads at a time, and storedLimit
// about how many it reads at most.
const (
	storedChunk = 1024
	storedLimit = 1 << 20
)

// outBuffer is the size at which Append writes without being asked to flush.
const outBuffer = 32 << 10

var crlf = []byte("\r\n")

// Session is one chain of messages. Append, Flush, the waits, Park and Close
// belong to one goroutine; Settled, Checkpoint and Tick may be called from another one.
type Session struct {
	p  *Publisher
	o  *Options
	nc *nats.Conn
	js jetstream.JetStream
	kv jetstream.KeyValue
	w  *wire

	config  jetstream.StreamConfig
	created time.Time
	msgIDs  bool
	first   uint64 // sequence that was in the stream when the end was read
	deleted int    // messages that were gone from between then

	// life ends with the session's failure or its end.
	life context.Context
	end  context.CancelFunc

	// Of a shared stream.
	stored atomic.Uint64 // sequence of the last acked event
	places places
	behind uint64 // events that are still to come were not stored up to here

	// Of a session that only looks: the stream and the bucket may be missing.
	looking bool
	info    *jetstream.StreamInfo
	written time.Time // when the checkpoint that was read was

	// Of the goroutine that appends.
	frames   *framer
	out      []byte
	lastSeq  uint64         // of the stream when the session began
	after    event.Position // of the event there
	appended uint64         // events appended since
	hold     hold
	bytes    uint64 // appended bytes
	window   []inFlight
	unfitAt  event.Position // of the last event that did not fit the stream's settings
	known    knownSubjects
	judged   time.Time // when the settings of the dead-letter stream were
	letters  letterbox

	mode      Mode
	batch     batch  // of ModeAtomic
	silent    int    // of ModeSparse: where in out the last frame's reply subject would be; 0 when it has one
	silentSeq uint64 // and the sequence that it would end in
	pace      pace   // of the goroutine that reads acks, too

	// Of the goroutine that reads acks, and shared with it.
	replyPrefix int
	sent        atomic.Uint64 // events handed to the connection
	acked       atomic.Uint64 // of these, how many are acked
	wakeAt      atomic.Uint64 // the appending goroutine waits for that many acks; 0 when it does not
	wake        chan struct{}
	reading     sync.WaitGroup
	flight      *flight // nil without a Meter

	// Of the goroutine that calls Tick.
	progress     uint64
	progressTime time.Time
	idle         bool // nothing was in flight at the last tick

	recall recalled // where Resume.Gone is set, until Resumed

	// Of whoever writes checkpoints.
	base     uint64
	again    uint64 // the first so many events were stored before and forgotten
	current  record
	revision uint64

	failOnce sync.Once
	fail     func(error)
	err      error // set before failed is closed
	failed   chan struct{}
	closing  atomic.Bool
}

// inFlight is what the window keeps of an event: little, since nothing is sent again.
type inFlight struct {
	position event.Position
	end      uint64 // Session.bytes after it
	commit   int64  // when its transaction was committed, in ns since 1970; 0 without one
}

// Resume implements relay.Sink: it reads what the stream holds, decides where
// to go on, claims the stream with a checkpoint and starts to read acks.
func (s *Session) Resume(ctx context.Context, origin event.Origin) (event.Resume, error) {
	f, d, err := s.survey(ctx, origin)
	if err != nil {
		return event.Resume{}, err
	}
	for _, n := range d.notes {
		s.o.Log.Warn(n.text, append([]any{"stream", s.o.Stream}, n.args...)...)
	}
	if err := s.resolveTwin(ctx, f.lastSeq); err != nil {
		return event.Resume{}, err
	}
	if err := s.loadHeld(ctx); err != nil {
		return event.Resume{}, err
	}
	r := claim(f, d, s.o.Window)
	if r.Letters = s.letters.record(0); d.resume.Gone > 0 {
		s.current, s.recall = r, recalled{f, d, f.lastSeq - d.resume.Gone}
	} else if err := s.writeCheckpoint(ctx, r); err != nil {
		return event.Resume{}, err
	}
	if err := s.ensureSecret(ctx); err != nil {
		return event.Resume{}, err
	}
	d.resume.AcceptGap = s.o.AcceptGap
	// Once is enough: the next session must not pass over another gap unasked.
	s.o.Adopt, s.o.AcceptGap = false, false

	s.p.acked = f.lastSeq
	if s.o.Shared {
		s.p.acked = 0
		s.stored.Store(d.base)
		if !d.resume.After.IsZero() {
			s.p.acked = d.base
		}
		if !d.resume.AcceptGap { // with a gap, events may be published again from anywhere
			s.behind = d.base
		}
	}
	s.p.again += d.again
	s.again = s.p.again
	s.lastSeq, s.base, s.after = f.lastSeq, d.base, d.resume.After
	s.window = make([]inFlight, s.o.Window+1)
	s.pace.init(uint64(s.o.Window), s.mode)
	if s.o.Meter != nil {
		s.flight = newFlight(s.o.Meter, len(s.window))
		s.p.session.Store(s)
	}
	s.progressTime = time.Now()
	d.resume.Suspect = s.p.suspect
	s.reading.Go(s.read)
	return d.resume, nil
}

// surveyStream reads what the stream holds and decides where to go on. It changes nothing.
func (s *Session) surveyStream(ctx context.Context, origin event.Origin) (findings, decision, error) {
	f := findings{stream: s.o.Stream, origin: origin, acked: s.p.acked, adopt: s.o.Adopt, acceptGap: s.o.AcceptGap}
	var err error
	// The checkpoint first: under a relay that runs it would otherwise be ahead
	// of the end, as if the stream had lost messages.
	if f.checkpoint, err = s.readCheckpoint(ctx); err != nil {
		return f, decision{}, err
	}
	if p := s.p.reached; p != nil && (f.checkpoint == nil || p.revision == s.revision) {
		f.reached = p
	}
	if err := s.readEnd(ctx, &f); err != nil {
		return f, decision{}, err
	}
	if s.o.Shared {
		if origin.Backfill {
			return f, decision{}, errSharedBackfill
		}
		if err := s.readShared(ctx, &f); err != nil {
			return f, decision{}, err
		}
		d, err := decideShared(f)
		return f, d, err
	}
	if c := f.checkpoint; c != nil {
		if err := s.awaitLeader(ctx, &f); err != nil {
			return f, decision{}, err
		}
		switch {
		case f.lastSeq < max(c.Sequence, f.acked):
			f.earlier, err = s.earlierCheckpoints(ctx)
		case origin.Backfill:
			// The ids of all that is stored say where to go on.
		case f.lastSeq > c.Sequence && c.Owner == ownerOf(origin):
			// What lies further back was acked in turn, or nothing would have
			// been sent after it.
			inFlight := uint64(max(c.Window, s.o.Window))
			f.tail, err = s.readTail(ctx, max(c.Sequence, f.lastSeq-min(f.lastSeq, inFlight))+1, f.lastSeq)
		}
		if err != nil {
			return f, decision{}, err
		}
	}
	d, err := decide(f)
	if err == nil && d.resume.After.IsZero() && d.resume.Gone == 0 && f.lastSeq > 0 && !origin.Backfill {
		d.resume.Stored, err = s.storedSince(ctx, origin.ConfirmedFlush, f.lastSeq)
	}
	return f, d, err
}

// readEnd reads the end of the stream.
func (s *Session) readEnd(ctx context.Context, f *findings) error {
	st, err := s.js.Stream(ctx, s.o.Stream)
	if s.looking && errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil // as if it had just been created
	}
	if err != nil {
		return streamError(s.o.Stream, err)
	}
	info := st.CachedInfo()
	s.info = info
	f.created, f.lastSeq, f.last = info.Created, info.State.LastSeq, nil
	s.first, s.deleted = info.State.FirstSeq, info.State.NumDeleted
	if f.lastSeq > 0 {
		f.last, err = s.readLast(ctx, f.lastSeq)
	}
	return err
}

// awaitLeader reads the end again for a while when messages seem to be lost: a
// server that has just become the leader of a replicated stream may still be
// about to apply what it has.
func (s *Session) awaitLeader(ctx context.Context, f *findings) error {
	if s.config.Replicas < 2 {
		return nil
	}
	for range leaderTries {
		if f.lastSeq >= max(f.checkpoint.Sequence, f.acked) || !f.created.Equal(f.checkpoint.Created) {
			return nil
		}
		select {
		case <-time.After(leaderPause):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := s.readEnd(ctx, f); err != nil {
			return err
		}
	}
	return nil
}

func (s *Session) readLast(ctx context.Context, seq uint64) (*lastMessage, error) {
	m, err := s.fetch(ctx, s.o.Stream, bySequence{seq})
	if err != nil {
		return nil, fmt.Errorf("read last message of stream %q: %w", s.o.Stream, err)
	}
	if m == nil {
		return nil, nil
	}
	last := s.messageOf(m)
	return &last, nil
}

// readTail reads the messages from first to last that are still in the stream.
func (s *Session) readTail(ctx context.Context, first, last uint64) ([]tailMessage, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	found := make([]*lastMessage, last-first+1)
	var next atomic.Uint64
	var readers sync.WaitGroup
	for range min(tailReaders, len(found)) {
		readers.Go(func() {
			for i := next.Add(1) - 1; i < uint64(len(found)); i = next.Add(1) - 1 {
				m, err := s.fetch(ctx, s.o.Stream, bySequence{first + i})
				if err != nil {
					cancel(fmt.Errorf("read message %d of stream %q: %w", first+i, s.o.Stream, err))
					return
				}
				if m != nil {
					last := s.messageOf(m)
					found[i] = &last
				}
			}
		})
	}
	readers.Wait()
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	tail := make([]tailMessage, 0, len(found))
	for i, m := range found {
		if m != nil {
			tail = append(tail, tailMessage{*m, first + uint64(i)})
		}
	}
	return tail, nil
}

// storedSince reads back, as far as the messages are the relay's, the events
// that were committed since an LSN: those that the server may send again.
func (s *Session) storedSince(ctx context.Context, lsn event.LSN, last uint64) (map[event.Position]string, error) {
	found := map[event.Position]string{}
	for last > 0 && len(found) < storedLimit {
		first := last - min(last, storedChunk) + 1
		tail, err := s.readTail(ctx, first, last)
		if err != nil {
			return nil, err
		}
		for _, m := range slices.Backward(tail) {
			if !m.ours || m.position.Commit < lsn {
				return found, nil
			}
			found[m.position] = m.id
		}
		if uint64(len(tail)) <= last-first {
			break // some are gone, and what is older with them
		}
		last = first - 1
	}
	return found, nil
}

func (s *Session) messageOf(m *storedMessage) lastMessage {
	h, err := nats.DecodeHeadersMsg(m.Header)
	if err != nil || s.copied(m.Seq, h) {
		return lastMessage{}
	}
	pos, err := event.ParsePosition(h.Get(event.HeaderPos))
	if err != nil {
		return lastMessage{}
	}
	last := lastMessage{ours: true, position: pos, replay: h.Get(event.HeaderReplay) != ""}
	if id := h.Get(event.HeaderID); len(id) < excerptBytes && !strings.Contains(id, "?") {
		// Not cut off and without a replaced character, as a parked event's may be.
		// A copy, since the headers of a message may be one string.
		last.id = strings.Clone(id)
	}
	return last
}

// resolveTwin looks at the message that the server took for the original of
// an event. If it is another event, two rows share an id. lastSeq is that of the
// stream: when it is not the event's predecessor, the reply was for another event.
func (s *Session) resolveTwin(ctx context.Context, lastSeq uint64) error {
	t := s.p.twin
	if t == nil {
		return nil
	}
	if t.expected != 0 && (t.expected != lastSeq+1 || s.config.Replicas > 1) {
		s.p.twin = nil
		return nil
	}
	m, err := s.fetch(ctx, s.o.Stream, bySequence{t.sequence})
	if err != nil {
		return fmt.Errorf("read message %d of stream %q: %w", t.sequence, s.o.Stream, err)
	}
	s.p.twin = nil
	if m != nil {
		if twin := s.messageOf(m); twin.ours && twin.position == t.position {
			return nil
		}
	}
	s.p.condemned = &condemned{t.position, &event.Poison{
		Reason: event.ReasonDuplicateID,
		Detail: fmt.Sprintf("its id was used before, by the message with sequence %d", t.sequence),
	}}
	return nil
}

// Append implements relay.Sink. It writes to the connection when the
// out-buffer is full, which blocks while the server does not read.
func (s *Session) Append(ev *event.Event) error {
	if c := s.p.condemned; c != nil && c.position == ev.Position {
		return c.why
	}
	if len(s.letters.missing) > 0 {
		if err := s.stillMissing(ev); err != nil {
			return err
		}
	}
	if len(s.letters.waiting) > 0 {
		switch p, err := s.parkedBefore(ev); {
		case err != nil:
			return s.check(err)
		case p != nil:
			return p
		}
	}
	seq := s.lastSeq + s.appended + 1
	known := s.known.has(ev.Subject)
	header := s.frames.encode(ev, seq, known && s.brief())
	if p := s.unfit(ev, len(header), known); p != nil {
		s.unfitAt = ev.Position
		return p
	}
	switch p, err := s.heldBack(ev); {
	case err != nil:
		return s.check(err)
	case p != nil:
		return p
	}
	if s.mode == ModeAtomic {
		if !s.precise(ev.Position) && s.unfit(ev, len(header)+batchOverhead, known) == nil {
			return s.appendBatched(ev, header, seq)
		}
		s.emit(true)
	}
	s.append(ev, header, seq)
	if len(ev.Payload) >= directPayload {
		s.finish()
		s.sending()
		err := s.w.write(s.out, ev.Payload, crlf)
		s.out = s.out[:0]
		return s.check(err)
	}
	s.out = append(s.out, ev.Payload...)
	s.out = append(s.out, "\r\n"...)
	if len(s.out) >= outBuffer {
		return s.Flush()
	}
	return nil
}

func (s *Session) append(ev *event.Event, header []byte, seq uint64) {
	if s.mode == ModeSparse && seq%sparseEvery != 0 && !s.precise(ev.Position) {
		s.appendSilent(ev.Subject, header, seq, len(ev.Payload))
	} else {
		s.silent = 0
		s.out = s.frames.appendFrame(s.out, ev.Subject, header, seq, len(ev.Payload))
	}
	s.account(ev, len(header))
}

// brief reports whether messages on known subjects leave out the stream's name.
// What is looked at twice does not: the messages of a shared stream, whose
// own ones it tells from copies, those of a batch, which the server refuses as a whole,
// and those after a refusal.
func (s *Session) brief() bool {
	return (s.mode == ModeChain || s.mode == ModeSparse) && !s.o.Shared && s.p.doubt.IsZero()
}

// account counts ev as the last event appended.
func (s *Session) account(ev *event.Event, header int) {
	s.known.add(ev.Subject)
	s.appended++
	s.bytes += uint64(header + len(ev.Payload))
	commit := int64(0)
	if !ev.CommitTime.IsZero() {
		commit = ev.CommitTime.UnixNano()
	}
	s.window[s.appended%uint64(len(s.window))] = inFlight{ev.Position, s.bytes, commit}
}

// unfit says why neither server nor stream would ever take ev. That must not
// depend on whether its message names the stream.
func (s *Session) unfit(ev *event.Event, header int, known bool) *event.Poison {
	if known && s.brief() {
		header += len(s.frames.expectStream)
	}
	size := header + len(ev.Payload)
	switch {
	case known:
	case !validSubject(ev.Subject):
		return &event.Poison{Reason: event.ReasonSubject, Detail: fmt.Sprintf("invalid subject %.200q", ev.Subject)}
	case !s.binds(ev.Subject):
		return &event.Poison{Reason: event.ReasonSubject, Detail: fmt.Sprintf("stream %q does not bind subject %.200q", s.o.Stream, ev.Subject)}
	}
	switch {
	case header > maxHeaderBytes:
		return &event.Poison{Reason: event.ReasonHeaders, Detail: fmt.Sprintf("headers of %d bytes, the limit is %d", header, maxHeaderBytes)}
	case size > s.w.maxPayload:
		return &event.Poison{Reason: event.ReasonTooLarge, Detail: fmt.Sprintf("%d bytes with headers, the server's max_payload is %d", size, s.w.maxPayload)}
	case s.config.MaxMsgSize > 0 && size > int(s.config.MaxMsgSize):
		return &event.Poison{Reason: event.ReasonTooLarge, Detail: fmt.Sprintf("%d bytes with headers, the stream's max_msg_size is %d", size, s.config.MaxMsgSize)}
	case s.config.MaxBytes > 0 && int64(size) >= s.config.MaxBytes:
		return &event.Poison{Reason: event.ReasonTooLarge, Detail: fmt.Sprintf("%d bytes with headers, the stream's max_bytes is %d", size, s.config.MaxBytes)}
	}
	return nil
}

func (s *Session) binds(subject []byte) bool {
	for _, f := range s.config.Subjects {
		if matches(f, subject) {
			return true
		}
	}
	return false
}

// Flush implements relay.Sink.
func (s *Session) Flush() error {
	s.finish()
	if len(s.out) == 0 {
		return s.check(nil)
	}
	return s.write()
}

// finish makes what is in the out-buffer ask for its ack.
func (s *Session) finish() {
	switch s.mode {
	case ModeSparse:
		s.ask()
	case ModeAtomic:
		s.emit(true)
	}
}

// write writes the out-buffer as it is.
func (s *Session) write() error {
	s.sending()
	err := s.w.write(s.out)
	if cap(s.out) > 4*outBuffer {
		s.out = nil
	}
	s.out = s.out[:0]
	return s.check(err)
}

// check makes the session fail with err, and returns why it has failed if it has.
func (s *Session) check(err error) error {
	if err != nil {
		s.failWith(fmt.Errorf("publish: %w", err))
	}
	select {
	case <-s.failed:
		return s.err
	default:
		return nil
	}
}

// Full implements relay.Sink.
func (s *Session) Full() bool {
	return s.appended-s.acked.Load() >= s.room() || s.bytesInFlight() >= uint64(s.o.WindowBytes)
}

func (s *Session) bytesInFlight() uint64 {
	acked := s.acked.Load()
	if acked == s.appended {
		return 0
	}
	return s.bytes - s.bytesUpTo(acked)
}

// bytesUpTo is the number of bytes of the first n events. n was acked lately
// enough to be in the window, or is 0.
func (s *Session) bytesUpTo(n uint64) uint64 {
	if n == 0 {
		return 0
	}
	return s.window[n%uint64(len(s.window))].end
}

// Settled implements relay.Sink.
func (s *Session) Settled() uint64 { return s.acked.Load() }

// WaitRoom implements relay.Sink. It waits for a quarter of the window, so
// that the two goroutines do not take turns event by event.
func (s *Session) WaitRoom(ctx context.Context) error {
	if err := s.Flush(); err != nil {
		return err
	}
	room := s.room()
	keep := room - room/4
	if s.pace.emptying() {
		defer s.pace.emptied()
		keep = 0
	}
	n := s.acked.Load() + 1
	if s.appended > keep {
		n = max(n, s.appended-keep)
	}
	limit := uint64(s.o.WindowBytes)
	for n < s.appended && s.bytes-s.bytesUpTo(n) > limit-limit/4 {
		n++
	}
	return s.wait(ctx, min(n, s.appended))
}

// WaitSettled implements relay.Sink.
func (s *Session) WaitSettled(ctx context.Context, n uint64) error {
	if err := s.Flush(); err != nil {
		return err
	}
	return s.wait(ctx, min(n, s.appended))
}

func (s *Session) wait(ctx context.Context, n uint64) error {
	for s.acked.Load() < n {
		s.wakeAt.Store(n)
		if s.acked.Load() >= n {
			s.wakeAt.Store(0)
			break
		}
		select {
		case <-s.wake:
		case <-s.failed:
			return s.err
		case <-ctx.Done():
			s.wakeAt.Store(0)
			return context.Cause(ctx)
		}
	}
	return s.check(nil)
}

// read handles replies until the connection ends.
func (s *Session) read() {
	var acked uint64 // published to s.acked when the read buffer is used up
	var usual usualAck
	first := s.lastSeq + 1
	// In a chain every message is acked. Elsewhere an ack is for all before it, too.
	chained := s.mode == ModeChain
	reply := func(subject, header, payload []byte) error {
		if len(subject) <= s.replyPrefix {
			return fmt.Errorf("reply to unknown subject %.60q", subject)
		}
		seq, ok := sequenceOf(subject[s.replyPrefix-1:])
		if !ok {
			return fmt.Errorf("reply to unknown subject %.60q", subject)
		}
		if seq == 0 {
			seq = first + acked // see replyInTurn
		}
		var sup *surprise
		switch {
		case !s.o.Shared:
			sup = parseReply(s.o.Stream, seq, header, payload)
		case seq == first+acked:
			sup = s.sharedReply(seq, header, payload)
		}
		if sup == nil && (seq < first+acked || seq > first+acked && chained) {
			sup = &surprise{seq: seq, err: fmt.Errorf("acked out of turn, expected sequence %d", first+acked)}
		}
		if sup != nil {
			sup.alone = seq == first+acked && s.sent.Load() == acked+1
			return sup
		}
		acked = seq + 1 - first
		if chained { // elsewhere sequences do not go up by one
			usual.learn(seq, subject, header, payload)
		}
		return nil
	}
	s.w.gather.pending = func() uint64 {
		if !chained {
			return 0
		}
		return s.sent.Load() - acked
	}
	s.w.usual = func(r *bufio.Reader) bool {
		if !usual.take(r) {
			return false
		}
		acked++
		return true
	}
	idle := func() {
		if acked == s.acked.Load() {
			return
		}
		s.pace.end(acked)
		s.settle(acked)
		if at := s.wakeAt.Load(); at != 0 && acked >= at && s.wakeAt.CompareAndSwap(at, 0) {
			select {
			case s.wake <- struct{}{}:
			default:
			}
		}
	}
	err := s.w.read(reply, idle)
	s.settle(acked)
	var sup *surprise
	var proto protocolError
	switch marker := strconv.Quote(s.o.markerSubject()); {
	case !errors.As(err, &proto) || !proto.publishDenied():
	case strings.Contains(proto.Error(), marker):
		// Parking its event again would not help.
		err = event.Fail(event.Precondition, "let the user publish to "+marker+", the place of parked events", "%w", err)
	default:
		// It names the subject, not the message: only when one was in flight is it known which.
		err = &surprise{seq: first + acked, err: err, alone: s.sent.Load() == acked+1}
	}
	if !errors.As(err, &sup) {
		err = fmt.Errorf("connection to NATS: %w", err)
	}
	s.failWith(err)
}

// failWith ends the session: nothing more is sent, the inbox goes with the connection.
func (s *Session) failWith(err error) {
	s.failOnce.Do(func() {
		s.err = classify(s.o.Stream, err)
		tell := !s.closing.Load() // before whoever waits for the failure can close
		close(s.failed)
		if s.end != nil {
			s.end()
		}
		_ = s.w.close()
		if tell {
			if s.flight != nil {
				s.flight.failed(err)
			}
			s.fail(s.err)
		}
	})
}

const hintSlow = "is the broker overloaded, its disk full, or the network cut?"

// Tick implements relay.Sink.
func (s *Session) Tick() {
	now := time.Now()
	acked, sent := s.acked.Load(), s.sent.Load()
	if acked != s.progress || acked == sent || s.idle {
		s.progress, s.progressTime = acked, now
	}
	// What was sent since an idle tick is younger than that tick.
	s.idle = acked == sent
	if late := now.Sub(s.progressTime); late >= s.o.AckTimeout {
		s.failWith(event.Fail(event.Transient,
			hintSlow,
			"%w for %s, %d events in flight", errOverdue, late.Round(time.Millisecond), sent-acked))
		return
	}
	if err := s.w.ping(); err != nil {
		s.failWith(event.Fail(event.Transient, "is the broker overloaded, or the network cut?", "connection to NATS: %w", err))
	}
}

// Close implements relay.Sink. It leaves to the publisher what the next
// session has to know about the failure.
func (s *Session) Close() error {
	s.closing.Store(true)
	if s.end != nil {
		s.end()
	}
	if s.w != nil {
		_ = s.w.close()
	}
	s.reading.Wait()
	s.p.session.CompareAndSwap(s, nil)
	s.nc.Close()
	if s.window != nil {
		acked := s.acked.Load()
		switch {
		case !s.o.Shared:
			s.p.acked = s.lastSeq + acked
		case acked > 0:
			s.p.acked = s.stored.Load()
		}
		s.p.again = s.again - min(s.again, acked)
		s.leave(acked)
	}
	select {
	case <-s.failed:
		s.bequeath()
	default:
	}
	return nil
}

func (s *Session) bequeath() {
	s.p.suspect = false
	var sup *surprise
	if !errors.As(s.err, &sup) || sup.seq <= s.lastSeq || sup.seq > s.lastSeq+s.appended {
		return
	}
	s.suspectAll(sup)
	pos := s.window[(sup.seq-s.lastSeq)%uint64(len(s.window))].position
	why := poisonOf(sup.err)
	switch {
	case sup.duplicate == 0:
	case sup.stream != "" && sup.stream != s.o.Stream:
		why = otherStream
	default:
		s.p.twin = &twin{position: pos, sequence: sup.duplicate}
		if s.frames.inTurn {
			s.p.twin.expected = sup.seq
		}
		return
	}
	if why == nil {
		return
	}
	if sup.alone {
		s.p.condemned = &condemned{pos, why}
		return
	}
	s.p.suspect = true
}

// textOf returns b as text for a log or a header, without line breaks.
func textOf(b []byte) string { return string(bytes.Map(printable, b)) }

func printable(r rune) rune {
	if r < ' ' || r == 0x7f {
		return '?'
	}
	return r
}
