package publisher

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
func (s *Session) openStream(ctx context.Context, l *Line) error {
	st, err := l.stream(ctx, s.o.Stream)
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

			AllowAtomicPublish: s.o.wantsAtomic(),
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			st, err = s.js.Stream(ctx, s.o.Stream)
		}
		if err == nil {
			s.o.Log.Info("created stream", "stream", s.o.Stream, "subjects", s.subjects())
		}
		if overlaps(err) {
			return event.Fail(event.Precondition,
				fmt.Sprintf("choose other subjects with --subject, or name the stream that has them with --stream: nats stream ls --subject '%s'",
					strings.Join(s.o.Subjects, "' or '")),
				"create stream %q: %w", s.o.Stream, err)
		}
		var api *jetstream.APIError
		if errors.As(err, &api) && api.ErrorCode == codeInvalidStream {
			return event.Fail(event.Precondition, ownToken, "create stream %q: %w", s.o.Stream, err)
		}
	}
	if err != nil {
		return streamError(s.o.Stream, err)
	}
	info := st.CachedInfo()
	s.config = info.Config
	s.created = info.Created
	if err := s.examine(ofEvents, &s.config); err != nil {
		return err
	}
	s.prepare(&s.config)
	if !s.o.Park {
		return nil
	}
	return s.openDeadLetters(ctx, l)
}

func (s *Session) openDeadLetters(ctx context.Context, l *Line) error {
	st, err := l.stream(ctx, s.o.DeadLetters)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		if !s.o.Create {
			return event.Fail(event.Precondition,
				fmt.Sprintf("start with --create-stream or --on-poison halt, or run: nats stream add %s --subjects '%s>' --storage file --defaults",
					s.o.DeadLetters, s.o.deadLetterPrefix()),
				"dead-letter stream %q does not exist", s.o.DeadLetters)
		}
		st, err = s.js.CreateStream(ctx, jetstream.StreamConfig{
			Name:        s.o.DeadLetters,
			Description: "events that walrelay could not store in " + s.o.Stream,
			Subjects:    []string{s.o.deadLetterPrefix() + ">"},
			Storage:     jetstream.FileStorage,
			Retention:   jetstream.LimitsPolicy,
			Replicas:    s.o.Replicas,
			AllowDirect: true,
		})
		if errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) {
			st, err = s.js.Stream(ctx, s.o.DeadLetters)
		}
		if overlaps(err) {
			return event.Fail(event.Precondition,
				fmt.Sprintf("%s: nats stream ls --subject '%s>'", s.o.freeLetters(), s.o.deadLetterPrefix()),
				"create dead-letter stream %q: %w", s.o.DeadLetters, err)
		}
	}
	if err != nil {
		return streamError(s.o.DeadLetters, err)
	}
	return s.examine(ofLetters, &st.CachedInfo().Config)
}

// overlaps reports whether a stream was refused for subjects that another one has.
func overlaps(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) && api.ErrorCode == codeSubjectOverlap
}

// ownToken is the remedy for subjects that no stream can have.
const ownToken = "begin --subject with a word of its own, such as outbox.{aggregate_type}.{event_type}, or make the stream by hand with the subjects that occur"

// impossible says why no stream can have these subjects beside the relay's
// others, "" when one can. The rules are those of checkStreamCfg in the server.
func impossible(subjects []string, others ...string) string {
	for i, f := range subjects {
		if first, _, _ := strings.Cut(f, "."); first == ">" || first == "*" {
			return fmt.Sprintf("subject %s takes in those of the server's API", f)
		}
		for _, g := range slices.Concat(subjects[i+1:], others) {
			if collide(f, g) {
				return fmt.Sprintf("subjects %s and %s overlap", f, g)
			}
		}
	}
	return ""
}

// collide reports whether two filters have a subject in common.
func collide(a, b string) bool {
	as, bs := strings.Split(a, "."), strings.Split(b, ".")
	for i := range min(len(as), len(bs)) {
		switch {
		case as[i] == ">" || bs[i] == ">":
			return true
		case as[i] != bs[i] && as[i] != "*" && bs[i] != "*":
			return false
		}
	}
	return len(as) == len(bs)
}

// freeLetters says how the dead-letter stream gets its subjects.
func (o *Options) freeLetters() string {
	return fmt.Sprintf("take %s> out of the stream that has it, name another stream with --dead-letter-stream, or run with --on-poison halt", o.deadLetterPrefix())
}

// holders are the streams that have subjects in common with the filters.
func (s *Session) holders(ctx context.Context, filters []string) ([]string, error) {
	var names []string
	for _, f := range filters {
		list := s.js.StreamNames(ctx, jetstream.WithStreamListSubject(f))
		for name := range list.Name() {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
		if err := list.Err(); err != nil {
			return nil, err
		}
	}
	return names, nil
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

// prepare chooses how messages are published, now that the stream is known to be fit.
func (s *Session) prepare(c *jetstream.StreamConfig) {
	// On a clustered server before 2.12 a refused message can leave its id
	// behind, and the retry is then taken for a duplicate. Without a chain
	// nothing but the id keeps a message from being stored twice.
	s.choose(s.o.choose(c))
	s.msgIDs = s.o.Shared || c.Replicas < 2 || s.atLeast(2, 12)
	s.warn(!s.msgIDs, "no Nats-Msg-Id on a replicated stream before nats-server 2.12", "server", s.nc.ConnectedServerVersion())
}

// widened adds a filter to those of a stream, in place of those that it covers,
// since no two may overlap.
func widened(filters []string, f string) []string {
	kept := slices.DeleteFunc(slices.Clone(filters), func(old string) bool { return covered([]string{f}, old) })
	return append(kept, f)
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
