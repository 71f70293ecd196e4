package publisher

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Options of a Publisher. Zero values of Bucket, DeadLetters, Window,
// WindowBytes, Mode, Sync, AckTimeout, Replicas and Log take their defaults.
type Options struct {
	URL     string        // of one server or several, with commas
	Connect []nats.Option // credentials and TLS

	Stream      string
	Subjects    []string // filters that cover what the mapper makes
	Create      bool     // create the streams when they are missing
	Replicas    int      // of what is created; 1 by default
	DeadLetters string   // stream of parked events; <Stream>_DLQ by default
	Park        bool     // poison events are parked, so the dead-letter stream is needed
	Hold        bool     // what follows in the aggregate of a parked event is parked, too
	Bucket      string   // KV bucket of the checkpoint; "walrelay" by default

	// Shared says that the stream has other writers. One event is in flight
	// then, whatever Window says.
	Shared bool

	Mode Mode // ModeAuto by default
	Sync Sync // SyncUnknown by default

	Window      int           // events in flight at most; 4096 by default
	WindowBytes int           // bytes in flight at most; 16 MiB by default
	AckTimeout  time.Duration // 2 s by default

	Adopt     bool // take over a stream that another source wrote
	AcceptGap bool // go on where events are known or feared to be missing

	Meter Meter // nil for none
	Log   *slog.Logger
}

// Publisher opens sessions, one at a time, and carries over what one session
// leaves to the next. It is not safe for concurrent use, but for Dial, Ask, InFlight and Publishing.
type Publisher struct {
	o Options

	session atomic.Pointer[Session] // for InFlight; nil without a Meter
	chosen  atomic.Pointer[Choice]  // the mode of the last session

	opened    bool           // a session was opened before
	acked     uint64         // the stream's last sequence, when the last session ended; 0 when none resumed
	reached   *reached       // where the last session ended; nil when none resumed
	again     uint64         // events still to be published again, because the stream lost them
	suspect   bool           // the last session ended on an error that may be one event's fault
	condemned *condemned     // the event that was alone in flight when it was refused
	twin      *twin          // the event that was taken for a duplicate
	doubt     event.Position // events up to there are published one by one; zero when there is no need
	batchMost int            // messages of an atomic batch
	warned    map[string]bool

	secret  atomic.Pointer[[]byte] // the key of replays
	keyless bool                   // it cannot be made
}

type condemned struct {
	position event.Position
	why      *event.Poison
}

type twin struct {
	position event.Position
	sequence uint64 // of what it was taken for
	expected uint64 // the event's own, when only the turn of the reply tells that it was for this event; else 0
}

var (
	streamName = regexp.MustCompile(`^[^\s.*>/\\]+$`)
	bucketName = regexp.MustCompile(`^[a-zA-Z0-9_-]+$`)
	keyName    = regexp.MustCompile(`^[-/_=a-zA-Z0-9]+$`)
)

// New checks the options. It connects to nothing.
func New(o Options) (*Publisher, error) {
	if o.DeadLetters == "" {
		o.DeadLetters = o.Stream + "_DLQ"
	}
	if o.Bucket == "" {
		o.Bucket = "walrelay"
	}
	if o.Window == 0 {
		o.Window = 4096
	}
	if o.Shared {
		o.Window = 1
	}
	if o.WindowBytes == 0 {
		o.WindowBytes = 16 << 20
	}
	if o.AckTimeout == 0 {
		o.AckTimeout = 2 * time.Second
	}
	if o.Replicas == 0 {
		o.Replicas = 1
	}
	if o.Mode == "" {
		o.Mode = ModeAuto
	}
	if o.Sync == "" {
		o.Sync = SyncUnknown
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	var errs []error
	bad := func(hint, format string, args ...any) {
		errs = append(errs, event.Fail(event.Usage, hint, format, args...))
	}
	switch {
	case o.Stream == "":
		bad("name the stream with --stream", "no stream given")
	case !streamName.MatchString(o.Stream):
		bad("stream names have no space, dot, *, >, / or \\", "invalid stream name %q", o.Stream)
	case !keyName.MatchString(o.Stream):
		bad("use letters, digits, _ and -", "stream name %q cannot be the key of a checkpoint", o.Stream)
	}
	if !streamName.MatchString(o.DeadLetters) && o.Stream != "" {
		bad("stream names have no space, dot, *, >, / or \\", "invalid dead-letter stream name %q", o.DeadLetters)
	}
	if o.DeadLetters == o.Stream {
		bad("name another stream", "dead letters cannot go to the stream itself, %q", o.Stream)
	}
	if !bucketName.MatchString(o.Bucket) {
		bad("use letters, digits, _ and -", "invalid bucket name %q", o.Bucket)
	}
	if o.Window < 1 || o.WindowBytes < 1 {
		bad("", "the window must hold at least one event and one byte, not %d and %d", o.Window, o.WindowBytes)
	}
	if o.AckTimeout < 0 {
		bad("", "the ack timeout must be positive, not %s", o.AckTimeout)
	}
	o.checkMode(bad)
	if len(o.Subjects) == 0 {
		bad("", "no subjects given")
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Publisher{o: o, batchMost: batchMost, warned: map[string]bool{}}, nil
}

// markerSubject is where the marker of a parked event goes. It is bound to the stream.
func (o *Options) markerSubject() string { return "walrelay.parked." + o.Stream }

// deadLetterPrefix is followed by the key of the aggregate and the position of the parked event.
func (o *Options) deadLetterPrefix() string { return "walrelay.dlq." + o.Stream + "." }

// letterSubjects are the subjects of all dead letters of the stream.
func (o *Options) letterSubjects() string { return o.deadLetterPrefix() + "*.*" }

// Line is what a session needs of connections, both to one server.
type Line struct {
	nc *nats.Conn
	w  *wire
	js jetstream.JetStream

	// Of Ask; each answer is used once.
	streams map[string]heard[jetstream.Stream]
	bucket  *heard[jetstream.KeyValue]
}

type heard[T any] struct {
	value T
	err   error
}

// Close ends the connections of a line over which no session was opened.
func (l *Line) Close() {
	_ = l.w.close()
	l.nc.Close()
}

// Dial connects, and asks for nothing. It blocks for a few round trips, and for
// as long as a server takes to refuse or time out. It may be called while
// nothing is opened by another goroutine.
func (p *Publisher) Dial(ctx context.Context) (*Line, error) {
	l, err := p.dial(ctx)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	return l, nil
}

func (p *Publisher) dial(ctx context.Context) (*Line, error) {
	opts := append([]nats.Option{nats.Name("walrelay"), nats.Timeout(2 * time.Second)}, p.o.Connect...)
	opts = append(opts, nats.NoReconnect(), nats.ReconnectBufSize(-1), nats.PingInterval(5*time.Second), nats.MaxPingsOutstanding(2))
	nc, err := connect(ctx, p.o.URL, opts)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", hosts(p.o.URL), portless(err))
	}
	u, err := url.Parse(nc.ConnectedUrl())
	if err != nil {
		nc.Close()
		return nil, errors.New("connection lost")
	}
	w, err := dial(ctx, u, tlsName(nc, u), nc.Opts)
	if err != nil {
		nc.Close()
		return nil, fmt.Errorf("connect to NATS at %s: %w", u.Host, portless(err))
	}
	js, err := jetstream.New(nc, jetstream.WithDefaultTimeout(apiTimeout))
	if err != nil {
		_ = w.close()
		nc.Close()
		return nil, err
	}
	return &Line{nc: nc, w: w, js: js}, nil
}

// Ask asks over a new line how the streams and the bucket are set up, so that
// OpenOver need not. It changes nothing and judges nothing: a failure is
// an answer, too, and OpenOver fails with it. It blocks for three round trips.
func (p *Publisher) Ask(ctx context.Context, l *Line) {
	l.streams = map[string]heard[jetstream.Stream]{}
	names := []string{p.o.Stream}
	if p.o.Park {
		names = append(names, p.o.DeadLetters)
	}
	for _, name := range names {
		st, err := l.js.Stream(ctx, name)
		l.streams[name] = heard[jetstream.Stream]{st, err}
		if err != nil {
			return
		}
	}
	kv, err := l.js.KeyValue(ctx, p.o.Bucket)
	l.bucket = &heard[jetstream.KeyValue]{kv, err}
}

// stream looks a stream up, unless Ask has.
func (l *Line) stream(ctx context.Context, name string) (jetstream.Stream, error) {
	if a, asked := l.streams[name]; asked {
		delete(l.streams, name)
		return a.value, a.err
	}
	return l.js.Stream(ctx, name)
}

// keyValue looks the bucket up, unless Ask has.
func (l *Line) keyValue(ctx context.Context, name string) (jetstream.KeyValue, error) {
	if a := l.bucket; a != nil {
		l.bucket = nil
		return a.value, a.err
	}
	return l.js.KeyValue(ctx, name)
}

// Open is Dial and OpenOver.
func (p *Publisher) Open(ctx context.Context, fail func(error)) (*Session, error) {
	l, err := p.Dial(ctx)
	if err != nil {
		return nil, err
	}
	return p.OpenOver(ctx, l, fail)
}

// OpenOver opens a session over l, which is the session's from then on, also
// when it fails. It examines the stream and creates it if it may. fail is called
// once, from any goroutine, when the session cannot go on. OpenOver blocks for a
// few round trips.
func (p *Publisher) OpenOver(ctx context.Context, l *Line, fail func(error)) (*Session, error) {
	s, err := p.open(ctx, l, fail)
	if err != nil {
		return nil, p.classifyConnect(err)
	}
	p.opened = true
	return s, nil
}

func (p *Publisher) open(ctx context.Context, l *Line, fail func(error)) (_ *Session, err error) {
	nc := l.nc
	s := &Session{p: p, o: &p.o, nc: nc, js: l.js, w: l.w, fail: fail, failed: make(chan struct{}), wake: make(chan struct{}, 1)}
	s.life, s.end = context.WithCancel(context.WithoutCancel(ctx))
	defer func() {
		if err != nil {
			_ = s.Close()
		}
	}()
	if err := s.openStream(ctx, l); err != nil {
		return nil, err
	}
	if err := s.openBucket(ctx, l); err != nil {
		return nil, err
	}
	inbox := nc.NewInbox()
	s.frames = newFramer(p.o.Stream, inbox, s.msgIDs)
	s.frames.unchained = p.o.Shared
	s.batch.session = []byte(inbox[strings.LastIndexByte(inbox, '.')+1:] + "-")
	// A stream of one replica answers in turn. A cluster refuses some messages
	// before it has stored those before them.
	s.frames.inTurn = s.mode == ModeChain && s.config.Replicas < 2
	s.replyPrefix = len(inbox) + 1
	if err := s.w.subscribe(inbox+".*", nc.Opts.Timeout); err != nil {
		return nil, fmt.Errorf("subscribe to acks: %w", err)
	}
	return s, nil
}

// connect is nats.Connect that gives up when ctx ends.
func connect(ctx context.Context, servers string, opts []nats.Option) (*nats.Conn, error) {
	type result struct {
		nc  *nats.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		nc, err := nats.Connect(servers, opts...)
		done <- result{nc, err}
	}()
	select {
	case r := <-done:
		return r.nc, r.err
	case <-ctx.Done():
		go func() {
			if r := <-done; r.err == nil {
				r.nc.Close()
			}
		}()
		return nil, context.Cause(ctx)
	}
}

// hosts are the servers' addresses without what else their URLs hold.
func hosts(servers string) string {
	var all []string
	for one := range strings.SplitSeq(servers, ",") {
		if u, err := url.Parse(strings.TrimSpace(one)); err == nil {
			all = append(all, u.Host)
		}
	}
	return strings.Join(all, ", ")
}

// portless leaves out our own port, which is another one at every try and
// would make each look like a new failure.
func portless(err error) error {
	var op *net.OpError
	if !errors.As(err, &op) || op.Source == nil {
		return err
	}
	plain := *op
	plain.Source = nil
	return &plain
}

// tlsName is the host that the certificate has to name: the one the user gave,
// where a cluster made its other members known by address.
func tlsName(nc *nats.Conn, u *url.URL) string {
	for _, s := range nc.Opts.Servers {
		if g, err := url.Parse(s); err == nil && g.Host == u.Host {
			return g.Hostname()
		}
	}
	if g, err := url.Parse(nc.Opts.Url); err == nil && g.Hostname() != "" && len(nc.Opts.Servers) == 0 {
		return g.Hostname()
	}
	return u.Hostname()
}

// classifyConnect gives an error of Open its class and hint. What was right
// once is expected to be right again: only a first attempt stops the relay.
func (p *Publisher) classifyConnect(err error) error {
	var f *event.Failure
	if errors.As(err, &f) {
		return err
	}
	class := event.Precondition
	if p.opened {
		class = event.Transient
	}
	var proto protocolError
	var badURL *url.Error
	var cert *tls.CertificateVerificationError
	var op *net.OpError
	switch {
	case errors.As(err, &badURL):
		// Its text quotes the URL, which may hold a password.
		return event.Fail(event.Usage, "percent-encode user and password", "connect to NATS: invalid URL: %w", badURL.Err)
	case errors.As(err, &cert):
		return event.Fail(class, "name the CA of the server's certificate with --nats-tls-ca, and connect to a name that the certificate has", "%w", err)
	case errors.As(err, &op) && op.Op == "remote error":
		return event.Fail(class, "the server refused the TLS handshake: does it want a client certificate? Set --nats-tls-cert and --nats-tls-key", "%w", err)
	case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNRESET):
		// A client of TLS 1.3 is done before the server has looked at its
		// certificate, and may write before it reads the alert.
		return event.Fail(event.Transient, "the server ended the connection at once: does it want a client certificate? Set --nats-tls-cert and --nats-tls-key", "%w", err)
	case errors.Is(err, nats.ErrAuthorization), errors.Is(err, nats.ErrAuthExpired), errors.Is(err, nats.ErrAuthRevoked),
		errors.As(err, &proto) && proto.authorization():
		return event.Fail(class, "check the credentials: --nats-creds, --nats-nkey, --nats-user with --nats-password, or --nats-token", "%w", err)
	case errors.Is(err, nats.ErrPermissionViolation), errors.As(err, &proto) && proto.permissions():
		return event.Fail(class, "let the user publish to the stream's subjects and $JS.API.>, and subscribe to its inbox", "%w", err)
	case errors.Is(err, nats.ErrSecureConnRequired), errors.Is(err, nats.ErrSecureConnWanted):
		return event.Fail(class, "make the TLS settings of both sides agree: tls:// and --nats-tls-ca", "%w", err)
	case errors.Is(err, jetstream.ErrJetStreamNotEnabled), errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount),
		errors.Is(err, nats.ErrNoResponders), errors.Is(err, context.DeadlineExceeded):
		return event.Fail(event.Transient, "is JetStream enabled on the server and for this account? A cluster needs a quorum, too", "%w", err)
	case errors.Is(err, nats.ErrNoServers), errors.Is(err, nats.ErrTimeout), errors.Is(err, io.EOF), op != nil:
		return event.Fail(event.Transient, "is nats-server running and listening there? Set --nats-url or WALRELAY_NATS_URL", "%w", err)
	}
	return err
}
