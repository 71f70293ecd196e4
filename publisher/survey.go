package publisher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Survey is what lies in the stream and beside it, and where a relay would go on.
type Survey struct {
	Exists   bool   // the stream does
	Sequence uint64 // last one of the stream
	Messages uint64
	Bytes    uint64

	// Last is the position of the last message, and LastTime when it was
	// stored; zero when it is gone or not walrelay's.
	Last     event.Position
	LastTime time.Time

	Checkpoint *StoredCheckpoint // nil when there is none

	// Resume is what a session of the origin would get, and Err why it would get none.
	Resume event.Resume
	Err    error
	Notes  []string // what that session would log
}

// StoredCheckpoint is the record in the bucket.
type StoredCheckpoint struct {
	SystemID   string         `json:"system_id"`
	Database   string         `json:"database"`
	Slot       string         `json:"slot"`
	Sequence   uint64         `json:"sequence"` // of the stream, at Position
	Position   event.Position `json:"position"`
	XID        uint32         `json:"xid"`
	CommitTime time.Time      `json:"commit_time"`
	Confirm    event.LSN      `json:"confirm"`
	Written    time.Time      `json:"written"`
}

// Survey reads the stream and the checkpoint and changes neither. It works
// while a relay runs, when ConfirmedFlush of the origin was read before. It
// blocks for some round trips.
func (p *Publisher) Survey(ctx context.Context, origin event.Origin) (Survey, error) {
	s, err := p.look(ctx)
	if err != nil {
		return Survey{}, p.classifyConnect(err)
	}
	defer s.nc.Close()
	if _, err := s.readSecret(ctx); err != nil {
		return Survey{}, err
	}
	f, d, err := s.survey(ctx, origin)
	v := Survey{Exists: s.exists(), Sequence: f.lastSeq, Resume: d.resume, Err: err}
	if s.info != nil {
		v.Messages, v.Bytes = s.info.State.Msgs, s.info.State.Bytes
	}
	if f.last != nil && f.last.ours {
		v.Last, v.LastTime = f.last.position, s.info.State.LastTime
	}
	if c := f.checkpoint; c != nil {
		v.Checkpoint = &StoredCheckpoint{
			SystemID: c.Owner.SystemID, Database: c.Owner.Database, Slot: c.Owner.Slot,
			Sequence: c.Sequence, Position: c.Position, XID: c.XID, CommitTime: c.CommitTime, Confirm: c.Confirm,
			Written: s.written,
		}
	}
	var failure *event.Failure
	if err != nil && !errors.As(err, &failure) {
		return v, p.classifyConnect(err) // a question failed
	}
	for _, n := range d.notes {
		v.Notes = append(v.Notes, n.text)
	}
	return v, nil
}

// Pass moves the checkpoint on, so that the slot may then be advanced to an LSN
// and the next session takes that for intended. Nobody may publish meanwhile:
// a relay that writes a checkpoint in between makes it fail.
//
// It reports whether there was a checkpoint to move; without one, none is needed.
func (p *Publisher) Pass(ctx context.Context, origin event.Origin, to event.LSN) (bool, error) {
	s, err := p.look(ctx)
	if err != nil {
		return false, p.classifyConnect(err)
	}
	defer s.nc.Close()
	f, d, err := s.survey(ctx, origin)
	if err != nil {
		return false, err
	}
	if f.checkpoint == nil {
		return false, nil
	}
	r, err := pass(f, d, to)
	if err != nil {
		return false, err
	}
	if err := s.writeCheckpoint(ctx, r); err != nil {
		return false, event.Fail(event.Precondition, "stop the relay that publishes to the stream, then try again", "move the checkpoint of stream %q: %w", s.o.Stream, err)
	}
	return true, nil
}

// pass is the checkpoint at the end of the stream that lets the slot be
// confirmed up to an LSN. Messages that are gone have to be accounted for first: by
// the WAL that would be skipped.
func pass(f findings, d decision, to event.LSN) (record, error) {
	r := claim(f, d, f.checkpoint.Window)
	r.Letters = f.checkpoint.Letters
	r.Tables = f.checkpoint.Tables // nobody looked at the publications
	r.Since = nil                  // what is skipped is not stored
	r.Drained = f.checkpoint.Drained
	if d.resume.Gone > 0 {
		return r, event.Fail(event.Lost, "start walrelay run once, which finds out which events they were, or advance with --leave-checkpoint",
			"%d messages of stream %q after the last event that is known to be stored are gone: which of the next events they were is not known",
			d.resume.Gone, f.stream)
	}
	r.Sequence = f.lastSeq
	r.Confirm = max(r.Confirm, to)
	return r, nil
}

// Forget removes the checkpoint of a slot, and reports whether there was one.
// Another slot's is a Precondition failure.
func (p *Publisher) Forget(ctx context.Context, slot, database string) (bool, error) {
	s, err := p.look(ctx)
	if err != nil {
		return false, p.classifyConnect(err)
	}
	defer s.nc.Close()
	c, err := s.readCheckpoint(ctx)
	if err != nil || c == nil {
		return false, err
	}
	if c.Owner.Slot != slot || c.Owner.Database != database {
		return false, event.Fail(event.Precondition, "name the stream of the slot with --stream", "the checkpoint of stream %q belongs to %s, not to slot %q of database %q", s.o.Stream, c.Owner, slot, database)
	}
	if err := s.kv.Purge(ctx, s.o.Stream, jetstream.LastRevision(s.revision)); err != nil {
		return false, fmt.Errorf("remove checkpoint of stream %q: %w", s.o.Stream, err)
	}
	return true, nil
}

// look connects like Open, and creates and examines nothing.
func (p *Publisher) look(ctx context.Context) (_ *Session, err error) {
	opts := append([]nats.Option{nats.Name("walrelay"), nats.Timeout(2 * time.Second)}, p.o.Connect...)
	nc, err := connect(ctx, p.o.URL, append(opts, nats.NoReconnect()))
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", hosts(p.o.URL), portless(err))
	}
	s := &Session{p: p, o: &p.o, nc: nc, fail: func(error) {}, failed: make(chan struct{}), looking: true}
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	if s.js, err = jetstream.New(nc, jetstream.WithDefaultTimeout(apiTimeout)); err != nil {
		return nil, err
	}
	st, err := s.js.Stream(ctx, p.o.Stream)
	switch {
	case err == nil:
		s.info = st.CachedInfo()
		s.config, s.created = s.info.Config, s.info.Created
	case !errors.Is(err, jetstream.ErrStreamNotFound):
		return nil, streamError(p.o.Stream, err)
	}
	if s.kv, err = s.js.KeyValue(ctx, p.o.Bucket); err != nil && !errors.Is(err, jetstream.ErrBucketNotFound) {
		return nil, s.bucketError(err)
	}
	return s, nil
}

func (s *Session) exists() bool { return s.info != nil }

// Limits are what bounds a message, in bytes with its headers; 0 is no limit.
type Limits struct {
	MaxPayload int64 // of the server
	MaxMsgSize int64 // of the stream
	MaxBytes   int64 // of the stream
	Subjects   []string
}

// Report is what Check found.
type Report struct {
	Findings event.Findings
	Limits   Limits
	Skew     time.Duration // the server's clock ahead of ours
}

// Check looks whether server, stream and checkpoint are as the relay needs
// them. It changes nothing. The error tells that the server could not be asked.
// confirmDelay is that of the relay.
func (p *Publisher) Check(ctx context.Context, confirmDelay time.Duration) (Report, error) {
	asked := time.Now()
	s, err := p.look(ctx)
	if err != nil {
		return Report{}, p.classifyConnect(err)
	}
	defer s.nc.Close()
	answered := time.Now()
	r := Report{Limits: Limits{MaxPayload: s.nc.MaxPayload()}}
	add := func(level event.Level, name, remedy, format string, args ...any) {
		r.Findings = append(r.Findings, event.Finding{Name: name, Level: level, Detail: fmt.Sprintf(format, args...), Remedy: remedy})
	}
	version := s.nc.ConnectedServerVersion()
	switch {
	case !s.atLeast(2, 10):
		add(event.WARN, "nats", "use nats-server 2.10 or newer", "nats-server is %s, older than any that walrelay is tested with", version)
	default:
		add(event.OK, "nats", "", "nats-server %s, max_payload %d bytes", version, s.nc.MaxPayload())
	}
	switch {
	case !s.exists() && p.o.Create:
		var letters []string
		if p.o.Park {
			letters = append(letters, p.o.deadLetterPrefix()+">")
		}
		if why := impossible(s.subjects(), letters...); why != "" {
			add(event.FAIL, "stream", ownToken, "stream %q does not exist, and cannot be created: %s", p.o.Stream, why)
		} else {
			r.Findings = append(r.Findings, s.creatable(ctx, "stream", p.o.Stream, s.subjects(),
				"choose other subjects with --subject, or name the stream that has them with --stream"))
		}
		r.Limits.Subjects = s.subjects()
	case !s.exists():
		add(event.FAIL, "stream", fmt.Sprintf("start with --create-stream, or run: nats stream add %s --subjects '%s' --storage file --defaults",
			p.o.Stream, strings.Join(s.subjects(), ",")), "stream %q does not exist", p.o.Stream)
		r.Limits.Subjects = s.subjects()
	default:
		c := &s.config
		add(event.OK, "stream", "", "stream %q, %d messages, last sequence %d", c.Name, s.info.State.Msgs, s.info.State.LastSeq)
		r.Findings = append(r.Findings, p.o.judge(ofEvents, c, c)...)
		r.Findings = append(r.Findings, durability(c, confirmDelay), window(c))
		if c.Replicas > 1 && !s.atLeast(2, 12) {
			add(event.WARN, "message_id", "use nats-server 2.12 or newer", "replicated streams get no Nats-Msg-Id on nats-server %s", version)
		}
		r.Limits.MaxMsgSize, r.Limits.MaxBytes, r.Limits.Subjects = max(int64(c.MaxMsgSize), 0), max(c.MaxBytes, 0), c.Subjects
		if !s.info.TimeStamp.IsZero() {
			r.Skew = s.info.TimeStamp.Sub(asked.Add(answered.Sub(asked) / 2))
			if slack := answered.Sub(asked) / 2; r.Skew.Abs() <= slack {
				r.Skew = 0 // no more than the way takes
			}
		}
	}
	if s.kv != nil {
		c, err := bucketConfig(ctx, s.kv)
		if err != nil {
			return r, p.classifyConnect(s.bucketError(err))
		}
		add(event.OK, "bucket", "", "checkpoint bucket %q", p.o.Bucket)
		r.Findings = append(r.Findings, p.o.judge(ofCheckpoints, c, &s.config)...)
	}
	if p.o.Park {
		st, err := s.js.Stream(ctx, p.o.DeadLetters)
		switch {
		case err == nil:
			info := st.CachedInfo()
			add(event.OK, "dead_letters", "", "dead-letter stream %q, %d messages", p.o.DeadLetters, info.State.Msgs)
			r.Findings = append(r.Findings, p.o.judge(ofLetters, &info.Config, &s.config)...)
			if limit := fullAt(info); limit != "" {
				add(event.WARN, "dead_letters_full", p.o.roomForLetters(), "dead-letter stream %q is full: it has reached its %s, and the relay waits at the next event that cannot be stored", p.o.DeadLetters, limit)
			}
		case errors.Is(err, jetstream.ErrStreamNotFound) && p.o.Create:
			r.Findings = append(r.Findings, s.creatable(ctx, "dead_letters", p.o.DeadLetters, []string{p.o.deadLetterPrefix() + ">"}, p.o.freeLetters()))
		case errors.Is(err, jetstream.ErrStreamNotFound):
			add(event.FAIL, "dead_letters", fmt.Sprintf("start with --create-stream or --on-poison halt, or run: nats stream add %s --subjects '%s>' --storage file --defaults",
				p.o.DeadLetters, p.o.deadLetterPrefix()), "dead-letter stream %q does not exist", p.o.DeadLetters)
		default:
			return r, p.classifyConnect(streamError(p.o.DeadLetters, err))
		}
	}
	return r, nil
}

// creatable finds whether a stream that does not exist can be created: no two
// streams of an account may have subjects in common.
func (s *Session) creatable(ctx context.Context, check, name string, subjects []string, remedy string) event.Finding {
	f := event.Finding{Name: check}
	held, err := s.holders(ctx, subjects)
	switch {
	case err != nil: // the list may be out of bounds for this user
		f.Level = event.WARN
		f.Detail = fmt.Sprintf("stream %q does not exist, and whether it can be created is not known: list the streams with its subjects: %s", name, err)
		f.Remedy = fmt.Sprintf("let this user publish to $JS.API.STREAM.NAMES, or make sure that no stream has any of the subjects %s", strings.Join(subjects, ", "))
	case len(held) > 0:
		f.Level = event.FAIL
		f.Detail = fmt.Sprintf("stream %q does not exist, and cannot be created: stream %s has some of its subjects %s",
			name, strings.Join(held, " and "), strings.Join(subjects, ", "))
		f.Remedy = remedy
	default:
		f.Detail = fmt.Sprintf("stream %q does not exist, and will be created", name)
	}
	return f
}

// defaultSync is how long a server leaves acked messages in the page cache
// unless its sync_interval says otherwise, which no client can see.
const defaultSync = 2 * time.Minute

func durability(c *jetstream.StreamConfig, confirmDelay time.Duration) event.Finding {
	f := event.Finding{Name: "durability"}
	switch {
	case c.Replicas > 1:
		f.Detail = fmt.Sprintf("stream %q has %d replicas", c.Name, c.Replicas)
	case confirmDelay > defaultSync:
		f.Detail = fmt.Sprintf("stream %q has one replica, and Postgres keeps the log for %s", c.Name, confirmDelay)
	default:
		f.Level = event.WARN
		f.Detail = fmt.Sprintf("stream %q has one replica: unless sync_interval is always, a power cut can lose acked messages of the last two minutes", c.Name)
		f.Remedy = "set jetstream { sync_interval: always } on the server, or give the stream 3 replicas, or run with --confirm-delay 150s, so that they are published again"
	}
	return f
}

func window(c *jetstream.StreamConfig) event.Finding {
	f := event.Finding{Name: "duplicates", Detail: fmt.Sprintf("dedup window %s, which the relay itself does not need", c.Duplicates)}
	if c.Duplicates > time.Hour {
		f.Level = event.WARN
		f.Detail = fmt.Sprintf("dedup window %s: the server keeps every id of that time in memory", c.Duplicates)
		f.Remedy = fmt.Sprintf("nats stream edit %s --dupe-window 2m: the relay does not need it", c.Name)
	}
	return f
}

// Size is what an event would take of a message's limits.
func (p *Publisher) Size(ev *event.Event) int {
	return len(newFramer(p.o.Stream, "_INBOX.check", true).encode(ev, 1, false)) + len(ev.Payload)
}

// Binds reports whether one of the limits' subjects binds a subject.
func (l Limits) Binds(subject []byte) bool {
	for _, f := range l.Subjects {
		if matches(f, subject) {
			return true
		}
	}
	return false
}
