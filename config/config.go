package config

import (
	"fmt"
	"log/slog"
	"time"
)

// Config is what the commands are told. Options of groups that a command has
// no flags for hold their defaults.
type Config struct {
	// DSN is a libpq connection string in keyword/value form; empty leaves
	// everything to the PG* variables and libpq's defaults.
	DSN  Secret
	NATS NATS

	// Unnamed means that neither the DSN nor a PG* variable names a server, a
	// database or a role, so that connecting would be to a guess.
	Unnamed bool

	// Warnings are what of the configuration has no effect. They hold no secret.
	Warnings []string

	Slot          string
	Publications  []string // exact names, never folded
	Tables        []Table
	Subject       string // template for the tables that have none of their own; empty leaves it to their presets
	TypeSubjects  []TypeSubject
	Route         Route
	HeaderColumns []HeaderColumn // of every table
	CloudEvents   bool           // add the headers of CloudEvents
	CloudSource   string         // their source; empty is the table's name
	Messages      bool           // logical messages are events, too
	MessagePrefix string

	Stream Stream

	Backfill      bool   // publish the rows of the table first
	BackfillOrder string // column; empty is that of the role seq

	OnPoison       OnPoison
	MaxParkedInRow int // 0 is no limit

	Window           int   // events in flight at most
	WindowBytes      int64 // bytes in flight at most
	AckTimeout       time.Duration
	DrainTimeout     time.Duration
	StatusInterval   time.Duration
	ConfirmDelay     time.Duration // 0 confirms at once
	WALSenderTimeout time.Duration // 0 keeps the server's
	Backoff          Backoff

	Prune Prune

	HTTPAddr string // host:port; empty serves nothing
	PProf    bool   // serve profiles there, too
	Log      Log
}

// NATS says how to reach the broker, and as whom.
type NATS struct {
	URL      Secret // one URL, or several with commas between
	Creds    string // credentials file
	NKey     string // seed file
	User     string
	Password Secret
	Token    Secret
	TLS      TLS
	Sync     Sync // when the server syncs its files
}

// TLS names PEM files; empty ones leave the system's defaults.
type TLS struct {
	CA    string
	Cert  string
	Key   string
	First bool // handshake before the server's INFO
}

// Table is one outbox table and how its columns are read.
type Table struct {
	Name    string            // schema.table, quoted as in SQL where needed
	Preset  string            // one of the presets; empty is PresetDefault
	Columns map[string]string // role → column, over the preset's; empty when no column has the role
	Subject string            // template; empty is Config.Subject

	HeaderColumns []HeaderColumn
}

// TypeSubject is the template for the events of one type.
type TypeSubject struct {
	AggregateType string // empty is any
	EventType     string // empty is any
	Subject       string
}

// Route is a regular expression whose groups the subjects may name.
type Route struct {
	Regex string // empty is no route
	By    string // role of the column that it looks at
}

// HeaderColumn is a column that becomes a header.
type HeaderColumn struct {
	Column string
	Header string // empty is the column's name
}

// The column presets.
const (
	PresetDefault  = "default"
	PresetDebezium = "debezium"
	PresetSnake    = "snake" // another name of the default
)

// Stream describes the stream that is published to, and what is beside it.
type Stream struct {
	Name             string
	Create           bool // create what is missing
	Shared           bool // it has other writers
	PublishMode      PublishMode
	Replicas         int
	DeadLetters      string // stream of the parked events
	CheckpointBucket string // KV bucket
	Adopt            bool   // take over a checkpoint of another owner, once
	AcceptGap        bool   // go on over a known gap, once
}

// Sync is what is known of the server's sync_interval.
type Sync string

// What may be known.
const (
	SyncUnknown  Sync = "unknown"
	SyncAlways   Sync = "always"
	SyncInterval Sync = "interval"
)

// PublishMode says how messages ask for their acks.
type PublishMode string

// The modes.
const (
	PublishAuto   PublishMode = "auto"
	PublishChain  PublishMode = "chain"
	PublishSparse PublishMode = "sparse"
	PublishAtomic PublishMode = "atomic"
)

// OnPoison says what happens to an event that can never be stored.
type OnPoison string

// The policies.
const (
	Park          OnPoison = "park"
	ParkAggregate OnPoison = "park-aggregate" // and what follows in the same aggregate
	Halt          OnPoison = "halt"
)

// Backoff bounds the pause between two sessions.
type Backoff struct {
	Min time.Duration
	Max time.Duration
}

// Prune says which published rows are deleted by the relay.
type Prune struct {
	After time.Duration // age; 0 deletes none
	Every time.Duration
}

// Log says what is logged and how.
type Log struct {
	Level  slog.Level
	Format LogFormat
}

// LogFormat is the form of log lines.
type LogFormat string

// The forms. LogAuto is text on a terminal and JSON elsewhere.
const (
	LogAuto LogFormat = "auto"
	LogText LogFormat = "text"
	LogJSON LogFormat = "json"
)

// String prints the configuration with its secrets redacted.
func (c *Config) String() string {
	type plain Config
	return fmt.Sprintf("%+v", plain(*c))
}

// LogValue implements slog.LogValuer; secrets are redacted.
func (c *Config) LogValue() slog.Value {
	tables := make([]string, len(c.Tables))
	for i, t := range c.Tables {
		tables[i] = t.Name
	}
	return slog.GroupValue(
		slog.Any("dsn", c.DSN),
		slog.Any("nats_url", c.NATS.URL),
		slog.String("slot", c.Slot),
		slog.Any("publications", c.Publications),
		slog.Any("tables", tables),
		slog.Bool("messages", c.Messages),
		slog.String("stream", c.Stream.Name),
		slog.String("dead_letters", c.Stream.DeadLetters),
		slog.String("on_poison", string(c.OnPoison)),
		slog.Int("window", c.Window),
	)
}
