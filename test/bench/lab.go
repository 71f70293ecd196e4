package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/test/harness"
)

const (
	publication = "walrelay"
	base        = "base" // the slot that every other one is a copy of
	stream      = "OUTBOX"
	bucket      = "KV_walrelay"
	pollTable   = "poll_outbox"
)

// lab is the servers and what is prepared on them.
type lab struct {
	relay, self, recvlogical string // programs

	pg   *harness.Postgres
	conn *pgx.Conn
	poll *harness.Postgres // for the polling relay, whose updates would be WAL to decode for the others
	pc   *pgx.Conn
	nats *harness.NATS
	nc   *nats.Conn
	js   jetstream.JetStream

	slots   int
	against []string // other builds of the relay

	patience time.Duration // for a quiet machine before a run
	repeats  int           // of a run that other processes have disturbed
}

func openLab(ctx context.Context, p plan) (*lab, error) {
	l := &lab{patience: p.patience, repeats: p.repeats, against: p.against}
	var err error
	if l.relay, err = harness.BuildRelay(ctx); err != nil {
		return nil, err
	}
	if l.self, err = os.Executable(); err != nil {
		return nil, err
	}
	if l.pg, l.conn, err = openPostgres(ctx); err != nil {
		return nil, err
	}
	if l.recvlogical, err = program(l.pg.Bin, "pg_recvlogical"); err != nil {
		return nil, err
	}
	ran, err := harness.Run(ctx, l.relay, nil, "init", "--apply", "--dsn", l.pg.DSN("postgres"), "--publication", publication)
	if err != nil || ran.Code != 0 {
		return nil, fmt.Errorf("walrelay init: %w\n%s", err, ran.Stderr)
	}
	// Payloads in the log as they are, however large: compression would make a
	// backlog of large ones a small one.
	if err := l.pg.Exec(ctx, "ALTER TABLE outbox ALTER COLUMN payload SET STORAGE EXTERNAL"); err != nil {
		return nil, err
	}
	if l.nats, err = harness.CreateNATS(ctx, harness.NATSOptions{MaxStore: 32 << 30, MaxPayload: 8 << 20}); err != nil {
		return nil, err
	}
	if err := l.nats.Start(ctx); err != nil {
		return nil, err
	}
	if l.nc, err = l.nats.Conn(); err != nil {
		return nil, err
	}
	l.js, err = jetstream.New(l.nc)
	return l, err
}

func openPostgres(ctx context.Context) (*harness.Postgres, *pgx.Conn, error) {
	pg, err := harness.CreatePostgres(ctx, harness.PostgresOptions{Settings: map[string]string{
		"autovacuum":         "off", // nothing but the workload
		"checkpoint_timeout": "1h",
		"max_wal_size":       "32GB",
		"shared_buffers":     "256MB",
	}})
	if err != nil {
		return nil, nil, err
	}
	if err := pg.Start(ctx); err != nil {
		return nil, nil, err
	}
	conn, err := pg.Conn(ctx)
	return pg, conn, err
}

// openPoll prepares the table of the polling relay, on a cluster of its own.
func (l *lab) openPoll(ctx context.Context) error {
	if l.poll != nil {
		return nil
	}
	var err error
	if l.poll, l.pc, err = openPostgres(ctx); err != nil {
		return err
	}
	return l.poll.Exec(ctx,
		`CREATE TABLE `+pollTable+` (seq bigint PRIMARY KEY, id uuid NOT NULL, aggregate_type text, aggregate_id text,
			event_type text, payload jsonb, created_at timestamptz DEFAULT now(), published_at timestamptz)`,
		`CREATE INDEX ON `+pollTable+` (seq) WHERE published_at IS NULL`)
}

// program finds one of Postgres's client programs.
func program(dir, name string) (string, error) {
	if exe := filepath.Join(dir, name); exec.Command(exe, "--version").Run() == nil {
		return exe, nil
	}
	exe, err := exec.LookPath(name)
	if err != nil {
		return "", fmt.Errorf("%s is neither beside the server nor in PATH: install postgresql-client", name)
	}
	return exe, nil
}

// backlog is what lies in the log behind the base slot.
type backlog struct {
	Events int `json:"events"`
	Rows   int `json:"rows"`    // a transaction
	Size   int `json:"payload"` // bytes

	end string // LSN of the end of the last commit
}

func (b backlog) String() string {
	return fmt.Sprintf("%s events, %s a transaction, payloads of %s B", count(b.Events), count(b.Rows), count(b.Size))
}

// payload is SQL that makes the JSON of an event: as text, exactly size bytes.
const payload = `('{"n": ' || n || ', "pad": "' || rpad('', greatest(%d - 18 - length(n::text), 1), 'x') || '"}')::jsonb`

func columns(size int) string {
	return fmt.Sprintf(`gen_random_uuid(), 'order', 'order-' || n %% 1000, 'created', `+payload, size)
}

// write makes the log behind a new base slot hold b.
func (l *lab) write(ctx context.Context, b backlog) (backlog, error) {
	if err := l.dropSlots(ctx); err != nil {
		return b, err
	}
	for _, sql := range []string{
		"TRUNCATE outbox",
		"CHECKPOINT", // recycles the log of the backlog before
		fmt.Sprintf("SELECT pg_create_logical_replication_slot('%s', 'pgoutput')", base),
	} {
		if _, err := l.conn.Exec(ctx, sql); err != nil {
			return b, fmt.Errorf("prepare a backlog: %w", err)
		}
	}
	_, err := l.conn.Exec(ctx, fmt.Sprintf(`DO $$ BEGIN
		FOR lo IN 1..%d BY %d LOOP
			INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
				SELECT %s FROM generate_series(lo, least(lo + %d - 1, %d)) n;
			COMMIT;
		END LOOP;
	END $$`, b.Events, b.Rows, columns(b.Size), b.Rows, b.Events))
	if err != nil {
		return b, fmt.Errorf("write a backlog: %w", err)
	}
	err = l.conn.QueryRow(ctx, "SELECT pg_current_wal_insert_lsn()::text").Scan(&b.end)
	return b, err
}

// fillPoll makes the polling relay's table hold b, as new as if nothing was ever published.
func (l *lab) fillPoll(ctx context.Context, b backlog) error {
	for _, sql := range []string{
		"TRUNCATE " + pollTable,
		fmt.Sprintf(`INSERT INTO %s (seq, id, aggregate_type, aggregate_id, event_type, payload)
			SELECT n, %s FROM generate_series(1, %d) n`, pollTable, columns(b.Size), b.Events),
		"VACUUM ANALYZE " + pollTable,
		"CHECKPOINT",
	} {
		if _, err := l.pc.Exec(ctx, sql); err != nil {
			return fmt.Errorf("fill the polling relay's table: %w", err)
		}
	}
	return nil
}

// slot makes another slot at the start of the backlog.
func (l *lab) slot(ctx context.Context) (string, error) {
	l.slots++
	name := fmt.Sprintf("run_%d", l.slots)
	_, err := l.conn.Exec(ctx, "SELECT pg_copy_logical_replication_slot($1, $2)", base, name)
	if err != nil {
		return "", fmt.Errorf("copy the slot: %w", err)
	}
	return name, nil
}

// dropSlot waits for the walsender of a client that has just ended.
func (l *lab) dropSlot(ctx context.Context, name string) error {
	return until(ctx, 10*time.Millisecond, func() (bool, error) {
		var active bool
		err := l.conn.QueryRow(ctx, "SELECT active FROM pg_replication_slots WHERE slot_name = $1", name).Scan(&active)
		if err != nil || active {
			return false, err
		}
		_, err = l.conn.Exec(ctx, "SELECT pg_drop_replication_slot($1)", name)
		return err == nil, err
	})
}

func (l *lab) dropSlots(ctx context.Context) error {
	rows, err := l.conn.Query(ctx, "SELECT slot_name::text FROM pg_replication_slots")
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := l.dropSlot(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// newStream replaces the stream by an empty one, and forgets the checkpoint. The
// streams of checkpoints and dead letters stay, as they do from one start to the next.
func (l *lab) newStream(ctx context.Context) error {
	if err := l.js.DeleteStream(ctx, stream); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("delete stream: %w", err)
	}
	kv, err := l.js.Stream(ctx, bucket)
	if err == nil {
		err = kv.Purge(ctx)
	}
	if err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return fmt.Errorf("purge checkpoints: %w", err)
	}
	_, err = l.js.CreateStream(ctx, jetstream.StreamConfig{
		Name: stream, Subjects: []string{"outbox.>", "walrelay.parked." + stream},
		Storage: jetstream.FileStorage, AllowDirect: true,
	})
	if err != nil {
		return fmt.Errorf("create stream: %w", err)
	}
	return nil
}

// state polls the stream until it holds n messages. The times in the answer
// are the server's, so how often it is asked does not matter to a rate.
func (l *lab) state(ctx context.Context, n int) (jetstream.StreamState, error) {
	var s jetstream.StreamState
	err := until(ctx, 25*time.Millisecond, func() (bool, error) {
		ask, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		st, err := l.js.Stream(ask, stream)
		if err != nil {
			return false, ctx.Err() // the broker may be away
		}
		s = st.CachedInfo().State
		return s.Msgs >= uint64(n), nil
	})
	if err != nil {
		return s, fmt.Errorf("wait for %d messages, have %d: %w", n, s.Msgs, err)
	}
	return s, nil
}

// relayArgs are those of a relay that reads slot.
func (l *lab) relayArgs(slot string, more ...string) []string {
	return slices.Concat([]string{
		"run", "--dsn", l.pg.DSN("postgres"), "--nats-url", l.nats.URL(), "--slot", slot,
		"--publication", publication, "--stream", stream, "--create-stream", "--log-format", "text",
	}, more)
}

// versions of the servers.
func (l *lab) versions(ctx context.Context) string {
	var pg string
	_ = l.conn.QueryRow(ctx, "SHOW server_version").Scan(&pg)
	return "Postgres " + strings.Fields(pg + " ?")[0] + ", nats-server " + l.nc.ConnectedServerVersion()
}

// until polls, since neither server signals what is waited for.
func until(ctx context.Context, every time.Duration, ok func() (bool, error)) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if done, err := ok(); done || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pause returns after d, or with an error when ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
