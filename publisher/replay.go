package publisher

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Keys of the bucket beside that of the checkpoint. No stream's name has a dot.
func (o *Options) secretKey() string         { return o.Stream + ".replay-key" }
func (o *Options) runKey(run string) string  { return o.Stream + ".replay." + run }
func (o *Options) fateKey(pos string) string { return o.Stream + ".letter." + keyed(pos) }

// keyed is a position as part of a key, which takes no colons.
func keyed(pos string) string { return strings.ReplaceAll(pos, ":", "_") }

// secretSize is that of the key with which commands sign.
const secretSize = 32

type secretRecord struct {
	Version int    `json:"version"`
	Secret  []byte `json:"secret"`
}

// ReplayKey is the secret by which a relay knows the commands of its operators;
// nil until a session has resumed, or a Survey was made. It never changes.
func (p *Publisher) ReplayKey() []byte {
	if k := p.secret.Load(); k != nil {
		return *k
	}
	return nil
}

// readSecret reads the key, nil when there is none.
func (s *Session) readSecret(ctx context.Context) ([]byte, error) {
	if s.looking && s.kv == nil {
		return nil, nil
	}
	var r secretRecord
	found, err := s.readKey(ctx, s.o.secretKey(), &r)
	if err != nil || !found {
		return nil, err
	}
	if r.Version != 1 || len(r.Secret) != secretSize {
		return nil, event.Fail(event.Precondition, fmt.Sprintf("remove it with nats kv purge %s %s: the relay makes another when it starts, and replays that wait in the log are ignored then", s.o.Bucket, s.o.secretKey()),
			"the key %s of bucket %q is none of this version of walrelay", s.o.secretKey(), s.o.Bucket)
	}
	s.p.secret.Store(&r.Secret)
	return r.Secret, nil
}

// ensureSecret reads the key, and makes it when there is none. A relay that may
// not write it goes on: nobody can have signed anything yet.
func (s *Session) ensureSecret(ctx context.Context) error {
	if k, err := s.readSecret(ctx); k != nil || err != nil {
		return err
	}
	s.p.secret.Store(nil)
	if s.p.keyless {
		return nil
	}
	r := secretRecord{Version: 1, Secret: make([]byte, secretSize)}
	_, _ = rand.Read(r.Secret) // never fails
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	short, cancel := context.WithTimeout(ctx, s.checkpointLimit())
	defer cancel()
	_, wrote := s.kv.Create(short, s.o.secretKey(), b)
	if wrote == nil {
		s.p.secret.Store(&r.Secret)
		return nil
	}
	k, err := s.readSecret(ctx)
	if err != nil || k != nil {
		return err
	}
	s.p.keyless = true
	s.o.Log.Warn("replays are not possible: their key cannot be written", "bucket", s.o.Bucket, "key", s.o.secretKey(), "err", wrote)
	return nil
}

// readKey reads a key's value from the leader and reports whether it has one.
func (s *Session) readKey(ctx context.Context, key string, v any) (bool, error) {
	m, err := s.entry(ctx, key)
	if err != nil {
		return false, fmt.Errorf("read key %s of bucket %q: %w", key, s.o.Bucket, err)
	}
	if m == nil || len(m.Data) == 0 {
		return false, nil
	}
	if err := json.Unmarshal(m.Data, v); err != nil {
		return false, event.Fail(event.Precondition, fmt.Sprintf("nats kv get %s %s shows it, nats kv purge removes it", s.o.Bucket, key),
			"key %s of bucket %q cannot be read", key, s.o.Bucket)
	}
	return true, nil
}

// Fate is what became of a dead letter that a command had published.
type Fate struct {
	Run    string       `json:"run"`
	State  string       `json:"state"`
	Reason event.Reason `json:"reason,omitempty"`
	Detail string       `json:"detail,omitempty"`
}

// The states of a Fate.
const (
	FateTrying  = "trying"  // it was refused once, and is tried again
	FateStored  = "stored"  // the dead letter is removed next
	FateRefused = "refused" // the dead letter is left
)

// letterPosition is the last token of a dead letter's subject.
func letterPosition(subject string) string { return subject[strings.LastIndexByte(subject, '.')+1:] }

func (s *Session) readFate(ctx context.Context, letter string) (Fate, bool, error) {
	var f Fate
	found, err := s.readKey(ctx, s.o.fateKey(letterPosition(letter)), &f)
	return f, found, err
}

func (s *Session) writeFate(ctx context.Context, letter string, f Fate) error {
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	if _, err := s.kv.Put(ctx, s.o.fateKey(letterPosition(letter)), b); err != nil {
		return fmt.Errorf("note what became of dead letter %s: %w", letter, err)
	}
	return nil
}

// Redeliver implements relay.Sink.
func (s *Session) Redeliver(ctx context.Context, ev *event.Event, why *event.Poison) (*event.Poison, error) {
	if s.acked.Load() != s.appended {
		return nil, errors.New("redeliver: events before the dead letter are in flight")
	}
	if why == nil {
		var err error
		if why, err = s.admit(ctx, ev); err != nil {
			return nil, err
		}
	}
	if why == nil {
		err := s.Append(ev)
		if poison, bad := errors.AsType[*event.Poison](err); bad {
			var fits bool
			if fits, err = s.lastLook(ctx, ev); !fits {
				why = poison
			}
		}
		if err != nil && why == nil {
			return nil, err
		}
	}
	if why != nil {
		err := s.writeFate(ctx, ev.Replay.Letter, Fate{Run: ev.Replay.Run, State: FateRefused, Reason: why.Reason, Detail: textOf([]byte(why.Detail))})
		if err != nil {
			return nil, err
		}
		return why, s.Refuse(ctx, ev, why)
	}
	if err := s.Flush(); err != nil {
		return nil, err
	}
	if err := s.wait(ctx, s.appended); err != nil {
		return nil, err
	}
	return nil, s.release(ctx, ev)
}

// Refuse implements relay.Sink.
func (s *Session) Refuse(_ context.Context, ev *event.Event, why *event.Poison) error {
	if s.acked.Load() != s.appended {
		return errors.New("refuse: events before the refused one are in flight")
	}
	s.sentenced(ev)
	return s.appendMarker(ev, why, 0)
}

// Release implements relay.Sink. What was refused at the event's place has left
// a note before the marker that is stored there.
func (s *Session) Release(ctx context.Context, ev *event.Event) error {
	f, found, err := s.readFate(ctx, ev.Replay.Letter)
	if err != nil || found && f.Run == ev.Replay.Run && f.State == FateRefused {
		return err
	}
	return s.release(ctx, ev)
}

// release removes the dead letter of an event that is stored.
func (s *Session) release(ctx context.Context, ev *event.Event) error {
	letter := ev.Replay.Letter
	m, err := s.letter(ctx, letter)
	if err != nil || m == nil {
		return err
	}
	if err := s.writeFate(ctx, letter, Fate{Run: ev.Replay.Run, State: FateStored}); err != nil {
		return err
	}
	err = s.deleteLetter(ctx, m.Seq)
	if api, is := errors.AsType[*apiError](err); is && api.ErrCode == codeDeleteFailed {
		s.warn(true, "the dead letter of a stored event cannot be removed", "dead_letters", s.o.DeadLetters, "sequence", m.Seq, "err", err)
		return s.writeFate(ctx, letter, Fate{Run: ev.Replay.Run, State: FateStored, Detail: "the dead letter cannot be removed: " + api.Description})
	}
	if err != nil {
		return fmt.Errorf("remove dead letter %s: %w", letter, err)
	}
	return nil
}

// letter fetches a dead letter, nil when it is gone.
func (s *Session) letter(ctx context.Context, subject string) (*storedMessage, error) {
	m, err := s.fetch(ctx, s.o.DeadLetters, bySubject{subject})
	if noStream(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read dead letter %s: %w", subject, err)
	}
	return m, nil
}

// admit says why the event must not be stored in the place of its dead letter.
func (s *Session) admit(ctx context.Context, ev *event.Event) (*event.Poison, error) {
	letter := ev.Replay.Letter
	if !strings.HasPrefix(letter, s.o.deadLetterPrefix()) {
		return &event.Poison{Reason: event.ReasonContent, Detail: fmt.Sprintf("%.100q is no dead letter of stream %q", letter, s.o.Stream)}, nil
	}
	f, found, err := s.readFate(ctx, letter)
	if err != nil {
		return nil, err
	}
	m, err := s.letter(ctx, letter)
	if err != nil {
		return nil, err
	}
	// If this very replay has stored it, the stream has forgotten it since.
	if found && f.State == FateStored && f.Run != ev.Replay.Run {
		return &event.Poison{Reason: event.ReasonReplayed, Detail: fmt.Sprintf("run %s has stored it", f.Run)}, nil
	}
	if m == nil {
		return nil, nil
	}
	if s.hold.on {
		if key := letterAggregate(letter); key != noAggregate {
			oldest, err := s.fetch(ctx, s.o.DeadLetters, nextBySubject{1, s.o.deadLetterPrefix() + key + ".*"})
			if err != nil {
				return nil, fmt.Errorf("look for dead letters in stream %q: %w", s.o.DeadLetters, err)
			}
			if oldest != nil && oldest.Subject != letter {
				return &event.Poison{Reason: event.ReasonAggregate, Detail: "an older event of its aggregate is parked"}, nil
			}
		}
	}
	if found && f.State == FateRefused && f.Run == ev.Replay.Run {
		return nil, s.writeFate(ctx, letter, Fate{Run: f.Run, State: FateTrying})
	}
	return nil, nil
}

// letterAggregate is the second last token of a dead letter's subject.
func letterAggregate(subject string) string {
	rest := subject[:max(strings.LastIndexByte(subject, '.'), 0)]
	return rest[strings.LastIndexByte(rest, '.')+1:]
}

// Replays is what commands that have events published again keep beside the
// stream, over a connection of its own. One goroutine uses it, and closes it.
type Replays struct {
	s *Session
}

// OpenReplays connects.
func (p *Publisher) OpenReplays(ctx context.Context) (*Replays, error) {
	s, err := p.look(ctx)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	return &Replays{s}, nil
}

// Close ends the connection.
func (r *Replays) Close() { r.s.nc.Close() }

// Key reads the key with which the relay of a slot knows its commands. Without
// a relay that has made it, and for another slot's stream, it is a Precondition failure.
func (r *Replays) Key(ctx context.Context, slot, database string) ([]byte, error) {
	c, err := r.s.readCheckpoint(ctx)
	if err != nil {
		return nil, r.s.p.classifyConnect(err)
	}
	if c != nil && (c.Owner.Slot != slot || c.Owner.Database != database) {
		return nil, event.Fail(event.Precondition, "name the stream of the slot with --stream, or the slot of the stream with --slot",
			"stream %q belongs to %s, not to slot %q of database %q", r.s.o.Stream, c.Owner, slot, database)
	}
	k, err := r.s.readSecret(ctx)
	if err != nil {
		return nil, r.s.p.classifyConnect(err)
	}
	if k == nil || c == nil {
		return nil, event.Fail(event.Precondition, "start walrelay run of this version once: it makes the key by which it knows its operators",
			"no relay that can replay has published to stream %q yet", r.s.o.Stream)
	}
	return k, nil
}

// Binds reports whether the stream takes messages of a subject.
func (r *Replays) Binds(subject []byte) bool { return validSubject(subject) && r.s.binds(subject) }

// Settled is the LSN up to which everything is settled, as the relay's last checkpoint says.
func (r *Replays) Settled(ctx context.Context) (event.LSN, error) {
	c, err := r.s.readCheckpoint(ctx)
	if err != nil || c == nil {
		return 0, err
	}
	return c.Confirm, nil
}

// Fate is what became of a dead letter, as far as a relay has noted it. there says whether the
// dead letter is still in its stream.
func (r *Replays) Fate(ctx context.Context, l *DeadLetter) (f Fate, noted, there bool, err error) {
	m, err := r.s.letter(ctx, l.Subject)
	if err != nil {
		return f, false, false, err
	}
	// The note after the letter: it is written before the letter is removed.
	f, noted, err = r.s.readFate(ctx, l.Subject)
	return f, noted, m != nil, err
}

// noteAge is how long what became of dead letters and runs is kept. It is longer than any
// replay waits in the log, which needs the notes of others on the same letter.
const noteAge = 30 * 24 * time.Hour

// Tidy removes notes and records of runs that are old. It changes nothing else.
func (r *Replays) Tidy(ctx context.Context) error {
	if r.s.kv == nil {
		return nil
	}
	name := r.s.o.bucketStream()
	bucket, err := r.s.js.Stream(ctx, name)
	if err != nil {
		return err
	}
	for _, keys := range []string{r.s.o.Stream + ".letter.>", r.s.o.runKey(">")} {
		for seq := uint64(1); ; {
			m, err := r.s.fetch(ctx, name, nextBySubject{seq, r.s.o.subjectOf(keys)})
			if err != nil {
				return err
			}
			if m == nil || time.Since(m.Time) < noteAge {
				break // those behind it are younger
			}
			seq = m.Seq + 1
			// A purge of the bucket would leave a message for every key.
			if err := bucket.Purge(ctx, jetstream.WithPurgeSubject(m.Subject), jetstream.WithPurgeSequence(seq)); err != nil {
				return err
			}
		}
	}
	return nil
}

// Run reads the record of a run, nil when there is none, and its revision.
func (r *Replays) Run(ctx context.Context, run string) (record []byte, revision uint64, err error) {
	if r.s.kv == nil {
		return nil, 0, nil
	}
	m, err := r.s.entry(ctx, r.s.o.runKey(run))
	if err != nil {
		return nil, 0, r.s.p.classifyConnect(fmt.Errorf("read the record of run %s: %w", run, err))
	}
	if m == nil || len(m.Data) == 0 {
		return nil, 0, nil
	}
	return m.Data, m.Seq, nil
}

// SaveRun writes the record of a run over the one with that revision, 0 for the
// first, and returns the new one's. Another writer in between is a Precondition failure.
func (r *Replays) SaveRun(ctx context.Context, run string, record []byte, revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	var rev uint64
	var err error
	if revision == 0 {
		rev, err = r.s.kv.Create(ctx, r.s.o.runKey(run), record)
	} else {
		rev, err = r.s.kv.Update(ctx, r.s.o.runKey(run), record, revision)
	}
	switch {
	case refused(err, codeWrongLastSeq), errors.Is(err, jetstream.ErrKeyExists):
		return 0, event.Fail(event.Precondition, "wait until it ends, or choose another name", "run %s is at work in another process", run)
	case errors.Is(err, nats.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		return 0, event.Fail(event.Transient, "may the user publish to "+r.s.o.subjectOf(r.s.o.runKey("*"))+"? Is the broker overloaded?", "write the record of run %s: %w", run, err)
	case err != nil:
		return 0, fmt.Errorf("write the record of run %s: %w", run, err)
	}
	return rev, nil
}
