package publisher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// openBucket finds or creates the bucket of the checkpoints.
func (s *Session) openBucket(ctx context.Context, l *Line) error {
	kv, err := l.keyValue(ctx, s.o.Bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		kv, err = s.js.CreateKeyValue(ctx, jetstream.KeyValueConfig{
			Bucket:      s.o.Bucket,
			Description: "checkpoints of walrelay, one key a stream",
			History:     leastHistory,
			Storage:     jetstream.FileStorage,
			Replicas:    max(s.config.Replicas, 1),
		})
		if errors.Is(err, jetstream.ErrBucketExists) {
			kv, err = s.js.KeyValue(ctx, s.o.Bucket)
		}
	}
	if err != nil {
		return s.bucketError(err)
	}
	s.kv = kv
	c, err := bucketConfig(ctx, kv)
	if err != nil {
		return s.bucketError(err)
	}
	return s.examine(ofCheckpoints, c)
}

// bucketConfig reads the settings of a bucket's stream.
func bucketConfig(ctx context.Context, kv jetstream.KeyValue) (*jetstream.StreamConfig, error) {
	status, err := kv.Status(ctx)
	if err != nil {
		return nil, err
	}
	b, ok := status.(*jetstream.KeyValueBucketStatus)
	if !ok {
		return nil, fmt.Errorf("status of type %T", status)
	}
	return &b.StreamInfo().Config, nil
}

func (s *Session) bucketError(err error) error {
	if errors.Is(err, jetstream.ErrBadBucket) {
		return event.Fail(event.Precondition, fmt.Sprintf("nats stream edit %s --max-msgs-per-subject %d", s.o.bucketStream(), leastHistory),
			"checkpoint bucket %q: its stream %s has no max_msgs_per_subject, which a bucket needs: %w", s.o.Bucket, s.o.bucketStream(), err)
	}
	return fmt.Errorf("checkpoint bucket %q: %w", s.o.Bucket, err)
}

// storedMessage is a message as the leader's STREAM.MSG.GET returns it.
type storedMessage struct {
	Subject string `json:"subject"`
	Seq     uint64 `json:"seq"`
	Header  []byte `json:"hdrs"`
	Data    []byte `json:"data"`

	Time time.Time `json:"time"` // when it was stored
}

// fetch asks the leader for a message, nil when it is gone. A direct get could
// be answered by a follower that lags.
func (s *Session) fetch(ctx context.Context, stream string, request any) (*storedMessage, error) {
	req, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	msg, err := s.nc.RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+stream, req)
	if err != nil {
		return nil, err
	}
	var reply struct {
		Error   *apiError      `json:"error"`
		Message *storedMessage `json:"message"`
	}
	if err := json.Unmarshal(msg.Data, &reply); err != nil {
		return nil, err
	}
	switch {
	case reply.Error != nil && reply.Error.ErrCode == codeMessageNotFound:
		return nil, nil
	case reply.Error != nil:
		return nil, reply.Error
	case reply.Message == nil:
		return nil, errors.New("reply without a message")
	}
	return reply.Message, nil
}

type bySequence struct {
	Seq uint64 `json:"seq"`
}

type bySubject struct {
	Last string `json:"last_by_subj"`
}

// readCheckpoint returns nil when there is none.
func (s *Session) readCheckpoint(ctx context.Context) (*record, error) {
	if s.looking && s.kv == nil {
		return nil, nil // there is no bucket yet
	}
	m, err := s.entry(ctx, s.o.Stream)
	if err != nil {
		return nil, fmt.Errorf("read checkpoint: %w", err)
	}
	s.revision = 0
	if m == nil {
		return nil, nil
	}
	s.revision, s.written = m.Seq, m.Time
	if len(m.Data) == 0 {
		return nil, nil // deleted with kv del
	}
	var r record
	if err := json.Unmarshal(m.Data, &r); err != nil {
		return nil, event.Fail(event.Precondition,
			fmt.Sprintf("nats kv history %s %s shows it; remove it with nats kv del to start from the stream's last message", s.o.Bucket, s.o.Stream),
			"the checkpoint of stream %q cannot be read: %w", s.o.Stream, err)
	}
	return &r, nil
}

// Where a bucket keeps its keys, as ADR-8 of NATS has it.
func (o *Options) bucketStream() string        { return "KV_" + o.Bucket }
func (o *Options) subjectOf(key string) string { return "$KV." + o.Bucket + "." + key }

// entry fetches a key of the bucket from the leader; nil when there is none.
func (s *Session) entry(ctx context.Context, key string) (*storedMessage, error) {
	return s.fetch(ctx, s.o.bucketStream(), bySubject{s.o.subjectOf(key)})
}

// earlierCheckpoints returns what is left of the key's history, newest first.
func (s *Session) earlierCheckpoints(ctx context.Context) ([]record, error) {
	entries, err := s.kv.History(ctx, s.o.Stream)
	if err != nil {
		return nil, fmt.Errorf("read checkpoint history: %w", err)
	}
	var rs []record
	for _, e := range slices.Backward(entries) {
		var r record
		if e.Operation() == jetstream.KeyValuePut && json.Unmarshal(e.Value(), &r) == nil {
			rs = append(rs, r)
		}
	}
	return rs, nil
}

// leastCheckpointLimit is for ack timeouts that are shorter than it takes a
// bucket to change its leader.
const leastCheckpointLimit = time.Second

// checkpointLimit is the longest wait for the ack of a checkpoint. Who waits for
// it calls Tick, too, so it is no longer than the wait for an event's ack.
func (s *Session) checkpointLimit() time.Duration {
	return min(apiTimeout, max(s.o.AckTimeout, leastCheckpointLimit))
}

// writeCheckpoint replaces the checkpoint that this session read or wrote
// before. Another writer in between makes it fail.
func (s *Session) writeCheckpoint(ctx context.Context, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	limit := s.checkpointLimit()
	short, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	rev, err := s.kv.Update(short, s.o.Stream, b, s.revision)
	var api *jetstream.APIError
	switch {
	case err == nil:
	case errors.As(err, &api) && full(int(api.ErrorCode)):
		return event.Fail(event.Transient, hintFull, "write checkpoint: %w", err)
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		return event.Fail(event.Transient, hintSlow, "write checkpoint: no ack for %s: %w", limit, err)
	default:
		return fmt.Errorf("write checkpoint: %w", err)
	}
	s.revision = rev
	s.current = r
	return nil
}

// Checkpoint implements relay.Sink. It blocks until the record is acked.
func (s *Session) Checkpoint(ctx context.Context, c event.Checkpoint) error {
	if s.again > 0 && s.acked.Load() >= s.again {
		s.o.Log.Info("published again what the stream had lost", "stream", s.o.Stream, "events", s.again)
		s.again = 0
	}
	r := s.current
	r.Sequence = s.base + c.Events
	if s.o.Shared {
		r.Sequence = max(s.current.Sequence, s.places.upTo(c.Events))
	}
	r.Confirm = max(r.Confirm, c.Confirm)
	r.Drained = c.Drained
	if c.Events > 0 {
		r.Proven = nil
	}
	r.Letters = s.letters.record(c.Events)
	if c.Position != r.Position {
		r.Position, r.XID, r.CommitTime = c.Position, c.XID, c.CommitTime
	}
	if r.Sequence == s.current.Sequence && r.Confirm == s.current.Confirm && r.Position == s.current.Position && r.Drained == s.current.Drained {
		return nil
	}
	s.o.Log.Debug("checkpoint", "stream", s.o.Stream, "sequence", r.Sequence, "position", r.Position.String(), "confirm", r.Confirm.String())
	return s.writeCheckpoint(ctx, r)
}
