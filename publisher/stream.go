package publisher

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// apiTimeout bounds one request to the JetStream API.
const apiTimeout = 3 * time.Second

// sharedDedup is the dedup window that a shared stream should have, the
// server's default.
const sharedDedup = 2 * time.Minute

// openStream finds or creates the stream and the dead-letter stream, and
// refuses settings that would break a promise.
func (s *Session) openStream(ctx context.Context) error {
	st, err := s.js.Stream(ctx, s.o.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if !s.o.Create {
			return event.Fail(event.Precondition,
				fmt.Sprintf("start with --create-stream, or run: nats stream add %s --subjects '%s' --storage file --defaults",
					s.o.Stream, strings.Join(s.subjects(), ",")),
				"stream %q does not exist", s.o.Stream)
		}
		st, err = s.js.CreateStream(ctx, jetstream.StreamConfig{
			Name:        s.o.Stream,
			Description: description(s.o.Shared),
			Subjects:    s.subjects(),
			Storage:     jetstream.FileStorage,
			Retention:   jetstream.LimitsPolicy,
			Replicas:    s.o.Replicas,
			AllowDirect: true,
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			st, err = s.js.Stream(ctx, s.o.Stream)
		}
		if err == nil {
			s.o.Log.Info("created stream", "stream", s.o.Stream, "subjects", s.subjects())
		}
		var api *jetstream.APIError
		if errors.As(err, &api) && api.ErrorCode == codeSubjectOverlap {
			return event.Fail(event.Precondition,
				fmt.Sprintf("choose other subjects with --subject, or name the stream that has them with --stream: nats stream ls --subject '%s'",
					strings.Join(s.o.Subjects, "' or '")),
				"create stream %q: %w", s.o.Stream, err)
		}
	}
	if err != nil {
		return streamError(s.o.Stream, err)
	}
	info := st.CachedInfo()
	s.config = info.Config
	s.created = info.Created
	if err := s.examine(info); err != nil {
		return err
	}
	if !s.o.Park {
		return nil
	}
	return s.openDeadLetters(ctx)
}

func (s *Session) openDeadLetters(ctx context.Context) error {
	_, err := s.js.Stream(ctx, s.o.DeadLetters)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if !s.o.Create {
			return event.Fail(event.Precondition,
				fmt.Sprintf("start with --create-stream or --on-poison halt, or run: nats stream add %s --subjects '%s>' --storage file --defaults",
					s.o.DeadLetters, s.o.deadLetterPrefix()),
				"dead-letter stream %q does not exist", s.o.DeadLetters)
		}
		_, err = s.js.CreateStream(ctx, jetstream.StreamConfig{
			Name:        s.o.DeadLetters,
			Description: "events that walrelay could not store in " + s.o.Stream,
			Subjects:    []string{s.o.deadLetterPrefix() + ">"},
			Storage:     jetstream.FileStorage,
			Retention:   jetstream.LimitsPolicy,
			Replicas:    s.o.Replicas,
			AllowDirect: true,
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			err = nil
		}
	}
	if err != nil {
		return streamError(s.o.DeadLetters, err)
	}
	return nil
}

func description(shared bool) string {
	if shared {
		return "outbox events, written by walrelay, and others"
	}
	return "outbox events, written by walrelay alone"
}

// subjects are those that the stream has to bind.
func (s *Session) subjects() []string {
	return append(append([]string{}, s.o.Subjects...), s.o.markerSubject())
}

// examine refuses what breaks a promise of the relay and warns about what weakens one.
func (s *Session) examine(info *jetstream.StreamInfo) error {
	c := &info.Config
	var errs []error
	refuse := func(bad bool, what, hint string) {
		if bad {
			errs = append(errs, event.Fail(event.Precondition, hint, "stream %q %s", c.Name, what))
		}
	}
	refuse(c.NoAck, "has no_ack set: nothing could be confirmed", "nats stream edit "+c.Name+" --ack")
	refuse(c.Sealed, "is sealed: it takes no messages", "use another stream")
	refuse(c.Mirror != nil, "is a mirror: it takes no messages", "publish to the stream that it mirrors")
	refuse(len(c.Sources) > 0 && !s.o.Shared, "has sources: walrelay must be its only writer", "let another stream source both, or share it with --shared-stream")
	refuse(c.Storage == jetstream.MemoryStorage, "keeps its messages in memory: a restart would lose them", "use a stream with file storage")
	refuse(c.PersistMode == jetstream.AsyncPersistMode, "has persist_mode async: acked messages could be lost", "use the default persist mode")
	refuse(c.AllowMsgSchedules && !s.o.Shared, "allows message schedules: the server would write to it, too", "use a stream without schedules")
	refuse(c.SubjectDeleteMarkerTTL > 0 && !s.o.Shared, "has subject_delete_marker_ttl: the server would write to it, too", "use a stream without delete markers")
	if s.o.Park {
		refuse(!bound(c.Subjects, s.o.markerSubject()),
			fmt.Sprintf("does not bind %s, the place of parked events", s.o.markerSubject()),
			fmt.Sprintf("nats stream edit %s --subjects '%s,%s', or run with --on-poison halt", c.Name, strings.Join(c.Subjects, ","), s.o.markerSubject()))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}

	s.warn(c.AllowRollup, "stream allows rollup headers: another client could purge it")
	s.warn(c.Retention == jetstream.InterestPolicy, "stream has interest retention: a message without a consumer is acked and not kept")
	s.warn(c.Discard == jetstream.DiscardOld && c.MaxBytes > 0, "stream discards old messages at max_bytes, whether or not they were consumed")
	for _, f := range s.o.Subjects {
		s.warn(!covered(c.Subjects, f), "stream does not bind all subjects of the mapping, such events are poison", "subject", f)
	}
	s.warn(s.o.Shared && c.Duplicates < sharedDedup,
		"stream is shared and has a short dedup window: an event that is published again later than that is stored twice", "duplicate_window", c.Duplicates)
	// On a clustered server before 2.12 a refused message can leave its id
	// behind, and the retry is then taken for a duplicate.
	// Without a chain nothing but the id keeps a message from being stored twice.
	s.msgIDs = s.o.Shared || c.Replicas < 2 || s.atLeast(2, 12)
	s.warn(!s.msgIDs, "no Nats-Msg-Id on a replicated stream before nats-server 2.12", "server", s.nc.ConnectedServerVersion())
	return nil
}

// warn logs once in the life of the publisher.
func (s *Session) warn(bad bool, text string, args ...any) {
	key := fmt.Sprint(append([]any{text}, args...)...)
	if bad && !s.p.warned[key] {
		s.p.warned[key] = true
		s.o.Log.Warn(text, append([]any{"stream", s.o.Stream}, args...)...)
	}
}

// atLeast reports whether the connected server has at least that version.
func (s *Session) atLeast(major, minor int) bool {
	var a, b int
	if _, err := fmt.Sscanf(s.nc.ConnectedServerVersion(), "%d.%d", &a, &b); err != nil {
		return false
	}
	return a > major || a == major && b >= minor
}

func streamError(name string, err error) error {
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return fmt.Errorf("stream %q: %w", name, err)
	}
	if api.ErrorCode == codeNoPeers {
		return event.Fail(event.Transient, "as many servers of the cluster as the stream has replicas must be up, with JetStream and room for it", "stream %q: %w", name, err)
	}
	if api.Code == 400 {
		return event.Fail(event.Precondition, "nats stream info "+name+" shows the stream as it is", "stream %q: %w", name, err)
	}
	return fmt.Errorf("stream %q: %w", name, err)
}

// bound reports whether one of the filters binds subject.
func bound(filters []string, subject string) bool {
	for _, f := range filters {
		if matches(f, []byte(subject)) {
			return true
		}
	}
	return false
}

// covered reports whether one of the filters binds every subject that wanted does.
func covered(filters []string, wanted string) bool {
	for _, f := range filters {
		if contains(strings.Split(f, "."), strings.Split(wanted, ".")) {
			return true
		}
	}
	return false
}

func contains(f, w []string) bool {
	for i := range f {
		switch {
		case f[i] == ">" && i == len(f)-1:
			return i < len(w)
		case i >= len(w) || w[i] == ">" && i == len(w)-1:
			return false
		case f[i] != "*" && f[i] != w[i]:
			return false
		}
	}
	return len(f) == len(w)
}
