package replication

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/pgsession"
	"github.com/walrelay/walrelay/sock"
)

// Config says what to read, and from where.
type Config struct {
	// Conn is a parsed DSN. It is copied, not changed.
	Conn *pgconn.Config

	Slot         string
	Publications []string

	// Messages asks for logical messages, too.
	Messages bool

	// WALSenderTimeout is how long the server waits for a status before it
	// ends the session; 0 leaves the server's own setting.
	WALSenderTimeout time.Duration

	// Warn, when set, is told why the server holds events back. The goroutine
	// that calls Next calls it.
	Warn func(text, hint string)

	// Unconverted, when set, is the same for all sessions of a slot.
	Unconverted *Unconverted

	// Skipped, when set, counts the messages that make no event.
	Skipped *Skipped

	// Fingerprint is passed on in Origin.
	Fingerprint string
}

// readBuffer lets one read of the socket bring many messages.
const readBuffer = 128 << 10

// oldest is the first server version whose pgoutput sends logical messages.
const oldest = 14

// Open connects, starts to stream from the slot, and returns when the server
// has agreed to. ctx bounds that only: it does not end the stream.
func Open(ctx context.Context, cfg Config) (*Stream, error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	s := &Stream{
		publications: cfg.Publications,
		warn:         cfg.Warn,
		began:        time.Now(),
		prompt:       prompt(cfg.WALSenderTimeout),
		writing:      make(chan struct{}, 1),
	}
	conf := cfg.session()
	conf.BuildFrontend = func(r io.Reader, w io.Writer) *pgproto3.Frontend {
		s.gather = &gather{r: r, interrupted: &s.interrupted}
		s.buf = bufio.NewReaderSize(s.gather, readBuffer)
		return pgproto3.NewFrontend(s.buf, w)
	}
	dial := conf.DialFunc
	conf.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		if err != nil {
			return nil, err
		}
		return sock.Lean(c), nil
	}
	pg, err := pgconn.ConnectConfig(ctx, conf)
	if err != nil {
		return nil, connectFailure(conf, err)
	}
	s.pg, s.front, s.conn = pg, pg.Frontend(), pg.Conn()
	if err := s.start(ctx, cfg, conf); err != nil {
		ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
		defer cancel()
		_ = pg.Close(ctx) // the failure is told already
		return nil, err
	}
	watchPeer(s.conn)
	s.gather.conn, s.gather.committed = s.conn, &s.decoder.time
	return s, nil
}

func (cfg Config) check() error {
	var errs []error
	if cfg.Conn == nil {
		errs = append(errs, errors.New("no connection"))
	}
	if cfg.Slot == "" {
		errs = append(errs, errors.New("no slot"))
	}
	if len(cfg.Publications) == 0 {
		errs = append(errs, errors.New("no publication"))
	}
	if cfg.WALSenderTimeout < 0 {
		errs = append(errs, errors.New("negative wal_sender_timeout"))
	}
	if len(errs) > 0 {
		return event.Fail(event.Usage, "", "configure replication: %w", errors.Join(errs...))
	}
	return nil
}

// session returns the configuration of a replication connection.
func (cfg Config) session() *pgconn.Config {
	conf := cfg.Conn.Copy()
	if conf.RuntimeParams == nil {
		conf.RuntimeParams = make(map[string]string)
	}
	p := conf.RuntimeParams
	set := func(name, value string) {
		// Names of settings know no case, and the server would take both.
		maps.DeleteFunc(p, func(k, _ string) bool { return strings.EqualFold(k, name) })
		p[name] = value
	}
	set("replication", "database")
	if cfg.WALSenderTimeout > 0 {
		set("wal_sender_timeout", fmt.Sprintf("%dms", max(cfg.WALSenderTimeout.Milliseconds(), 1)))
	}
	p["application_name"] = cmp.Or(p["application_name"], "walrelay")
	pgsession.Replication(conf)
	return conf
}

// identify examines the server and finds out which log it has.
func (s *Stream) identify(ctx context.Context, cfg Config, conf *pgconn.Config) error {
	version, err := serverMajor(s.pg.ParameterStatus("server_version"))
	if err != nil {
		return event.Fail(event.Precondition, hintPooler, "read the server's version: %w", err)
	}
	if version < oldest {
		return event.Fail(event.Precondition, fmt.Sprintf("walrelay needs Postgres %d or later", oldest), "server is Postgres %d", version)
	}
	if s.pg.ParameterStatus("in_hot_standby") == "on" {
		// A standby that is promoted goes on streaming on the new timeline
		// without a word, so its positions would not be the same when read again.
		return event.Fail(event.Transient, "connect to the primary: name every host in the DSN and add target_session_attrs=read-write",
			"server is a standby")
	}

	level, err := s.show(ctx, "wal_level")
	if err != nil {
		return startFailure(conf, cfg.Slot, "show wal_level", err)
	}
	if level != "logical" {
		return event.Fail(event.Precondition, "ALTER SYSTEM SET wal_level = logical, then restart Postgres",
			"wal_level of the server is %q, not \"logical\"", level)
	}
	if s.origin, err = identify(ctx, s.pg); err != nil {
		return startFailure(conf, cfg.Slot, "identify the server", err)
	}
	s.origin.Slot, s.origin.Fingerprint = cfg.Slot, cfg.Fingerprint
	s.decoder = newDecoder(s.origin.Timeline, s.origin.History)
	s.decoder.slot = cfg.Slot
	if cfg.Skipped != nil {
		s.decoder.skipped = cfg.Skipped
	}
	s.remember = cfg.Unconverted
	return s.encode(ctx, cfg, conf)
}

func (s *Stream) start(ctx context.Context, cfg Config, conf *pgconn.Config) error {
	if err := s.identify(ctx, cfg, conf); err != nil {
		return err
	}
	// From 0/0 the server starts at the slot's own confirmed LSN; a newer LSN
	// would skip rows without a word (CreateDecodingContext).
	err := pglogrepl.StartReplication(ctx, s.pg, quoteIdentifier(cfg.Slot), 0, pglogrepl.StartReplicationOptions{
		Mode:       pglogrepl.LogicalReplication,
		PluginArgs: cfg.pluginArgs(),
	})
	if err != nil {
		return startFailure(conf, cfg.Slot, fmt.Sprintf("start replication on slot %q", cfg.Slot), err)
	}
	return nil
}

// pluginArgs are the options of pgoutput. A publication name that is not
// quoted twice, as literal and as identifier, is folded to lower case. The option
// origin stays at its default, any: a row that came by replication is an event, too.
func (cfg Config) pluginArgs() []string {
	args := []string{
		"proto_version '1'",
		"publication_names " + quoteLiteral(quoteList(cfg.Publications)),
	}
	if cfg.Messages {
		args = append(args, "messages 'true'")
	}
	return args
}

// show returns a setting of the server; the name is sent as it is.
func (s *Stream) show(ctx context.Context, setting string) (string, error) {
	results, err := s.pg.Exec(ctx, "SHOW "+setting).ReadAll()
	if err != nil {
		return "", err
	}
	if len(results) != 1 || len(results[0].Rows) != 1 || len(results[0].Rows[0]) != 1 {
		return "", fmt.Errorf("server did not answer with one value")
	}
	return string(results[0].Rows[0][0]), nil
}

// serverMajor reads the major version from texts such as "15.18 (Debian …)" and "18beta1".
func serverMajor(version string) (int, error) {
	digits := version
	if i := strings.IndexFunc(version, func(r rune) bool { return r < '0' || r > '9' }); i >= 0 {
		digits = version[:i]
	}
	major, err := strconv.Atoi(digits)
	if err != nil {
		return 0, fmt.Errorf("server version %q has no number", version)
	}
	return major, nil
}
