package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/metrics"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/slotmgr"
)

func statusCommand(p *process) *cobra.Command {
	var watch bool
	var interval, maxLag time.Duration
	cmd := &cobra.Command{
		Use: "status [flags]", Short: "Show whether events flow, and how far behind they are",
		Long: `Asks the relay at --http-addr, and the broker for stream, dead letters and checkpoint.
Without an address, or when the relay does not answer, Postgres is asked for the slot
instead, and what the stream holds tells the rest.

The exit code is 0 when all is well and 3 when it is not: the relay does not answer or
is not ready, nobody reads the slot, the slot is lost or about to be, or the lag is
above --max-lag. With --watch it is that of the last look.`,
		Example: `  walrelay status --http-addr 9187
  walrelay status --http-addr 9187 --watch
  walrelay status -o json`,
		Args: atMost(0),
	}
	cmd.Flags().BoolVarP(&watch, "watch", "w", false, "look again and again, until interrupted")
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "time between two looks with --watch")
	cmd.Flags().DurationVar(&maxLag, "max-lag", time.Minute, "age of the oldest waiting event that is still well; 0 does not judge it")
	output := outputFlag(cmd)
	return command(p, cmd, []config.Group{config.Serving, config.Postgres, config.Slot, config.Broker, config.Streams},
		func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
			if interval < 100*time.Millisecond || maxLag < 0 {
				return event.Fail(event.Usage, "write --interval 100ms or more, and --max-lag 0 or more", "--interval or --max-lag is too short")
			}
			l, err := newLookout(cfg, maxLag)
			if err != nil {
				return err
			}
			defer l.close()
			v := screen{out: cmd.OutOrStdout(), look: lookOf(p), json: *output == formJSON}
			if watch {
				return l.watch(cmd.Context(), interval, &v)
			}
			s, err := l.once(cmd.Context())
			if err != nil {
				return err
			}
			if err := v.print(&s); err != nil {
				return err
			}
			return s.err()
		})
}

// status is one look at everything.
type status struct {
	At       time.Time `json:"at"`
	Healthy  bool      `json:"healthy"`
	Problems []string  `json:"problems"` // why it is not
	Source   string    `json:"source"`   // relay or servers: of everything but stream and dead letters
	Role     string    `json:"role"`     // leader, standby or none; unknown when the relay was not asked
	Slot     string    `json:"slot"`
	Database string    `json:"database"`
	Stream   string    `json:"stream"`

	Relay    relayStatus            `json:"relay"`
	Postgres metrics.PostgresReport `json:"postgres"`
	NATS     natsStatus             `json:"nats"`

	missing bool // Postgres answers, and has no such slot

	LagSeconds *float64 `json:"lag_seconds"` // null when it is not known
	LagBasis   string   `json:"lag_basis,omitempty"`
	metrics.Estimate
}

// relayStatus is what the relay says of itself.
type relayStatus struct {
	Address string          `json:"address,omitempty"`
	Error   string          `json:"error,omitempty"` // why it was not heard
	Report  *metrics.Report `json:"report"`          // null when it was not heard
}

// natsStatus is what the broker holds.
type natsStatus struct {
	Error string                `json:"error,omitempty"`
	Hint  string                `json:"hint,omitempty"`
	Holds *publisher.Inspection `json:"holds"` // null when it could not be read
}

const (
	fromRelay   = "relay"
	fromServers = "servers"

	roleLeader  = "leader"
	roleStandby = "standby"
	roleNone    = "none"
	roleUnknown = "unknown"

	// basisCheckpoint: no event that waits was committed before the last one
	// that the checkpoint knows of.
	basisCheckpoint = "checkpoint"
)

// patience is how long one look waits for each of the three that it asks.
const patience = 4 * time.Second

// lookout looks at relay, Postgres and broker. One goroutine uses it.
type lookout struct {
	cfg    *config.Config
	pg     *pgx.ConnConfig
	maxLag time.Duration

	client    *http.Client
	conn      *pgx.Conn
	inspect   publisher.Options
	inspector *publisher.Inspector
	stream    string // of inspector

	trend  metrics.Trend // of Postgres and broker, while the relay is not heard
	stored uint64        // last sequence that was seen
}

func newLookout(cfg *config.Config, maxLag time.Duration) (*lookout, error) {
	pg, err := pgConfig(cfg)
	if err != nil {
		return nil, err
	}
	connect, err := natsOptions(cfg)
	if err != nil {
		return nil, err
	}
	l := &lookout{
		cfg: cfg, pg: pg, maxLag: maxLag,
		client: &http.Client{Timeout: patience},
		inspect: publisher.Options{
			URL: cfg.NATS.URL.Reveal(), Connect: connect, DeadLetters: cfg.Stream.DeadLetters, Bucket: cfg.Stream.CheckpointBucket,
		},
	}
	return l, l.follow(cfg.Stream.Name)
}

// follow makes the inspector look at another stream.
func (l *lookout) follow(stream string) error {
	if l.inspector != nil {
		if l.stream == stream {
			return nil
		}
		l.inspector.Close()
	}
	o := l.inspect
	o.Stream = stream
	i, err := publisher.NewInspector(o)
	l.inspector, l.stream = i, stream
	return err
}

func (l *lookout) close() {
	l.inspector.Close()
	l.hangUp()
	l.client.CloseIdleConnections()
}

func (l *lookout) hangUp() {
	if l.conn != nil {
		hangUp(l.conn)
		l.conn = nil
	}
}

// once looks, and where only the servers tell, looks twice, since how fast
// things go shows in the difference.
func (l *lookout) once(ctx context.Context) (status, error) {
	s, err := l.now(ctx)
	if err != nil || s.Source == fromRelay || !s.Postgres.Up {
		return s, err
	}
	select {
	case <-time.After(time.Second):
		return l.now(ctx)
	case <-ctx.Done():
		return s, ctx.Err()
	}
}

// watch shows a look every interval until ctx ends.
func (l *lookout) watch(ctx context.Context, interval time.Duration, v *screen) error {
	defer v.end()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	var last status
	for seen := false; ; seen = true {
		s, err := l.now(ctx)
		switch {
		case ctx.Err() == nil && err != nil:
			return err
		case ctx.Err() == nil:
			last = s
			if err := v.show(&s); err != nil {
				return err
			}
		case !seen:
			return ctx.Err()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			v.end()
			return last.err()
		}
	}
}

// now looks once. It is an error only when ctx ends or the relay's own words
// make no sense; what cannot be had is part of the status.
func (l *lookout) now(ctx context.Context) (status, error) {
	s := status{
		At: time.Now(), Source: fromServers, Role: roleUnknown,
		Slot: l.cfg.Slot, Database: databaseOf(l.pg), Stream: l.cfg.Stream.Name,
	}
	if l.cfg.HTTPAddr != "" {
		s.Relay.Address = reachable(l.cfg.HTTPAddr)
		r, err := l.ask(ctx, s.Relay.Address)
		if err != nil {
			s.Relay.Error = err.Error()
		} else {
			s.heard(r)
		}
	}
	if err := l.follow(s.Stream); err != nil {
		return s, err
	}
	l.askBroker(ctx, &s)
	if s.Source == fromServers {
		l.askPostgres(ctx, &s)
	}
	if err := ctx.Err(); err != nil {
		return s, err
	}
	s.judge(l.maxLag)
	return s, nil
}

// reachable is where to find who listens on every interface.
func reachable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if ip := net.ParseIP(host); err == nil && ip != nil && ip.IsUnspecified() {
		if ip.To4() != nil {
			return net.JoinHostPort("127.0.0.1", port)
		}
		return net.JoinHostPort("::1", port)
	}
	return addr
}

// ask reads the report of a relay.
func (l *lookout) ask(ctx context.Context, addr string) (*metrics.Report, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/readyz?verbose", http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := l.client.Do(req)
	if err != nil {
		var op *net.OpError
		var call *os.SyscallError // whose text begins with what was tried
		switch {
		case errors.As(err, &call):
			return nil, call
		case errors.As(err, &op):
			return nil, fmt.Errorf("connect: %w", op.Err)
		}
		return nil, err
	}
	defer resp.Body.Close()
	var r metrics.Report
	if resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusServiceUnavailable {
		return nil, fmt.Errorf("status %d: is this a relay?", resp.StatusCode)
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&r); err != nil || r.State == "" {
		return nil, errors.New("no report in the answer: is this a relay?")
	}
	return &r, nil
}

// heard takes what the relay says.
func (s *status) heard(r *metrics.Report) {
	s.Source, s.Relay.Report = fromRelay, r
	s.Slot, s.Database, s.Stream = r.Slot, r.Database, r.Stream
	s.Postgres, s.Estimate = r.Postgres, r.Estimate
	s.LagSeconds, s.LagBasis = r.LagSeconds, r.LagBasis
	switch r.State {
	case "streaming", "draining":
		s.Role = roleLeader
	case "standby":
		s.Role = roleStandby
	default:
		s.Role = roleNone
	}
}

func (l *lookout) askBroker(ctx context.Context, s *status) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	holds, err := l.inspector.Inspect(ctx)
	if err != nil {
		s.NATS.Error, s.NATS.Hint = err.Error(), event.HintOf(err)
		return
	}
	s.NATS.Holds = &holds
	l.stored = holds.Stream.LastSequence
}

func (l *lookout) askPostgres(ctx context.Context, s *status) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	lag, err := l.sample(ctx)
	if err != nil {
		if l.conn != nil && event.ClassOf(err) == event.Precondition {
			_, exists, failed := slotmgr.Lookup(ctx, l.conn, l.cfg.Slot)
			s.missing = failed == nil && !exists
		}
		l.hangUp()
		s.Postgres = metrics.PostgresReport{Error: err.Error(), Hint: event.HintOf(err)}
		return
	}
	s.Postgres = metrics.PostgresReport{
		Up: true, WALEnd: lag.Current, Confirmed: lag.Confirmed, LagBytes: lag.Bytes, RetainedBytes: lag.RetainedBytes,
		SafeBytes: lag.SafeWALSize, SlotActive: lag.Active, WALStatus: lag.WALStatus,
	}
	if lag.Lost {
		s.Postgres.WALStatus = "lost"
	}
	l.trend.Add(sampleOf(lag), l.stored)
	s.Estimate = l.trend.Estimate()
	if s.NATS.Holds == nil {
		s.EventsPerSecond = nil
		return
	}
	if c := s.NATS.Holds.Checkpoint; lag.Bytes == 0 {
		s.LagSeconds, s.LagBasis = new(float64), basisCheckpoint
	} else if c != nil && !c.CommitTime.IsZero() {
		age := max(s.At.Sub(c.CommitTime).Seconds(), 0)
		s.LagSeconds, s.LagBasis = &age, basisCheckpoint
	}
}

func (l *lookout) sample(ctx context.Context) (slotmgr.Lag, error) {
	if l.conn != nil {
		lag, err := slotmgr.Sample(ctx, l.conn, l.cfg.Slot)
		if !l.conn.IsClosed() {
			return lag, err
		}
		l.conn = nil // the server may have been started again
	}
	conn, err := slotmgr.Connect(ctx, l.pg)
	if err != nil {
		return slotmgr.Lag{}, err
	}
	l.conn = conn
	return slotmgr.Sample(ctx, conn, l.cfg.Slot)
}

// judge finds what is not well.
func (s *status) judge(maxLag time.Duration) {
	s.Problems = []string{}
	bad := func(format string, args ...any) { s.Problems = append(s.Problems, fmt.Sprintf(format, args...)) }
	r := s.Relay.Report
	if s.Relay.Error != "" {
		bad("the relay at %s does not answer: %s", s.Relay.Address, s.Relay.Error)
	}
	if r != nil {
		if !r.Ready {
			bad("the relay is not ready: %s", r.NotReady)
		}
		if !r.Live {
			bad("the relay is stuck: %s", r.Stuck)
		}
	} else {
		if s.Postgres.Error != "" {
			bad("%s", s.Postgres.Error)
		}
		if s.NATS.Error != "" {
			bad("%s", s.NATS.Error)
		}
	}
	if p := s.Postgres; p.Up {
		switch {
		case p.WALStatus == "lost":
			bad("slot %s is lost", s.Slot)
		case p.WALStatus == "unreserved":
			bad("slot %s may be lost at the next checkpoint of Postgres", s.Slot)
		}
		if r == nil && !p.SlotActive {
			bad("nobody reads slot %s", s.Slot)
		}
	}
	// A standby says how far its leader may be behind, and has no part in it.
	if s.LagSeconds != nil && s.Role == roleLeader && maxLag > 0 && *s.LagSeconds > maxLag.Seconds() {
		bad("events wait for %s, more than %s", span(*s.LagSeconds), maxLag)
	}
	s.Healthy = len(s.Problems) == 0
}

// err is nil when all is well.
func (s *status) err() error {
	if s.Healthy {
		return nil
	}
	hint := "start the relay with walrelay run, or see its log"
	switch r := s.Relay.Report; {
	case s.Postgres.WALStatus == "lost":
		hint = "walrelay slot list shows why"
	case r != nil && r.Hint != "":
		hint = r.Hint
	case s.Postgres.Hint != "":
		hint = s.Postgres.Hint
	case r == nil && s.NATS.Hint != "":
		hint = s.NATS.Hint
	case r != nil:
		hint = "see the log of the relay"
	}
	return event.Fail(event.Precondition, hint, "not healthy: %s", strings.Join(s.Problems, "; "))
}
