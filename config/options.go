package config

import (
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Group is a set of options that a command takes together.
type Group string

// The groups, by their headings in help. General is the file alone.
const (
	General      Group = "Configuration"
	Postgres     Group = "Postgres"
	Slot         Group = "Slot"
	Publications Group = "Publications"
	Tables       Group = "Outbox"
	Broker       Group = "NATS"
	Streams      Group = "Streams"
	Relay        Group = "Relay"
	Serving      Group = "Metrics and health"
	Logging      Group = "Log"
)

// Groups are all groups in the order of help.
var Groups = []Group{Postgres, Slot, Publications, Tables, Broker, Streams, Relay, Serving, Logging, General}

// option is one line of the table from which flags, variables, keys of the
// file, and their documentation are derived.
type option struct {
	name    string // of the flag; the variable is WALRELAY_ and this in capitals
	path    string // of the key in the file; empty when only the flag exists
	group   Group
	arg     string // placeholder in help; empty for a switch
	def     string
	help    string
	foreign string // another tool's variable that is honoured, too
	list    bool
	secret  bool // never quote the value
	set     func(c *Config, v given) error
}

// given is the text of one option, or the tables of the file.
type given struct {
	texts  []string
	tables []Table
}

func (o *option) env() string {
	if o.path == "" {
		return ""
	}
	return envName(o.name)
}

func envName(flag string) string {
	return "WALRELAY_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// fileOption is not in the table's loop: it says where the file is.
const fileOption = "config"

var options = []*option{
	{
		name: "dsn", path: "dsn", group: Postgres, arg: "string", secret: true,
		help: "Postgres to read from, as URL or keyword=value; PG* variables add to it",
		set:  func(*Config, given) error { return nil },
	}, // read by loadDSN
	{
		name: "slot", path: "slot", group: Slot, arg: "name", def: "walrelay",
		help: "replication slot",
		set:  match(func(c *Config) *string { return &c.Slot }, slotName, 63, "is no slot name", "use up to 63 lower-case letters, digits and underscores"),
	},
	{
		name: "publication", path: "publications", group: Publications, arg: "name", def: "walrelay", list: true,
		help: "publication to read, exactly as it is spelt; repeatable",
		set:  setPublications,
	},
	{
		name: "table", path: "tables", group: Tables, arg: "table", def: "public.outbox", list: true,
		help: "outbox table, as schema.table[,preset=debezium][,ROLE=COLUMN…][,subject=TEMPLATE][,header=COLUMN[:HEADER]…]; repeatable; none for messages only",
		set:  setTables,
	},
	{
		name: "subject", path: "subject", group: Tables, arg: "template",
		help: "subject of a message (default the preset's, such as outbox.{aggregate_type}.{event_type})",
		set:  match(func(c *Config) *string { return &c.Subject }, subjectText, 0, "is no subject template", "write tokens with dots between and without blanks, such as outbox.{aggregate_type}.{event_type}"),
	},
	{
		name: "type-subject", path: "type_subjects", group: Tables, arg: "type=template", list: true,
		help: "subject of the events of one type, as EVENT_TYPE=TEMPLATE, AGGREGATE_TYPE/EVENT_TYPE=TEMPLATE or AGGREGATE_TYPE/*=TEMPLATE; repeatable",
		set:  setTypeSubjects,
	},
	{
		name: "route-regex", path: "route.regex", group: Tables, arg: "regex",
		help: "regular expression for the whole value of --route-by; --subject then may have its groups, as $1 or ${name}",
		set:  text(func(c *Config) *string { return &c.Route.Regex }),
	},
	{
		name: "route-by", path: "route.by", group: Tables, arg: "role", def: "aggregate_type",
		help: "what --route-regex looks at: aggregate_type, aggregate_id or event_type",
		set:  oneOf(func(c *Config) *string { return &c.Route.By }, "aggregate_type", "aggregate_id", "event_type"),
	},
	{
		name: "header-column", path: "header_columns", group: Tables, arg: "column[:header]", list: true,
		help: "further column of every table that becomes a header, as COLUMN[:HEADER]; repeatable; for one table, header=COLUMN[:HEADER] in --table",
		set:  setHeaderColumns,
	},
	{
		name: "cloudevents", path: "cloudevents.headers", group: Tables, def: "false",
		help: "add the headers of CloudEvents, binary mode",
		set:  boolean(func(c *Config) *bool { return &c.CloudEvents }),
	},
	{
		name: "cloudevents-source", path: "cloudevents.source", group: Tables, arg: "uri",
		help: "source of the CloudEvents (default the table, such as /public.outbox)",
		set:  match(func(c *Config) *string { return &c.CloudSource }, subjectText, 0, "is no URI", "write a URI or a path, such as https://example.com/orders or /orders"),
	},
	{
		name: "messages", path: "messages", group: Tables, def: "false",
		help: "take logical messages of pg_logical_emit_message as events, too",
		set:  boolean(func(c *Config) *bool { return &c.Messages }),
	},
	{
		name: "message-prefix", path: "message_prefix", group: Tables, arg: "prefix", def: "walrelay",
		help: "prefix of the logical messages that are events",
		set:  text(func(c *Config) *string { return &c.MessagePrefix }),
	},

	{
		name: "nats-url", path: "nats.url", group: Broker, arg: "url", def: "nats://127.0.0.1:4222", foreign: "NATS_URL", list: true, secret: true,
		help: "NATS server; repeatable, or with commas between",
		set: func(c *Config, v given) (err error) {
			c.NATS.URL, err = readNATSURLs(v.texts)
			return err
		},
	},
	{
		name: "nats-creds", path: "nats.creds", group: Broker, arg: "file", help: "credentials file for NATS",
		set: text(func(c *Config) *string { return &c.NATS.Creds }),
	},
	{
		name: "nats-nkey", path: "nats.nkey", group: Broker, arg: "file", help: "file with an nkey seed for NATS",
		set: text(func(c *Config) *string { return &c.NATS.NKey }),
	},
	{
		name: "nats-user", path: "nats.user", group: Broker, arg: "name", help: "user at NATS",
		set: text(func(c *Config) *string { return &c.NATS.User }),
	},
	{
		name: "nats-password", path: "nats.password", group: Broker, arg: "string", secret: true, help: "password at NATS; better set by its variable",
		set: secret(func(c *Config) *Secret { return &c.NATS.Password }),
	},
	{
		name: "nats-token", path: "nats.token", group: Broker, arg: "string", secret: true, help: "token at NATS; better set by its variable",
		set: secret(func(c *Config) *Secret { return &c.NATS.Token }),
	},
	{
		name: "nats-tls-ca", path: "nats.tls.ca", group: Broker, arg: "file", help: "PEM file of the authorities that sign NATS servers",
		set: text(func(c *Config) *string { return &c.NATS.TLS.CA }),
	},
	{
		name: "nats-tls-cert", path: "nats.tls.cert", group: Broker, arg: "file", help: "PEM file of the client certificate for NATS",
		set: text(func(c *Config) *string { return &c.NATS.TLS.Cert }),
	},
	{
		name: "nats-tls-key", path: "nats.tls.key", group: Broker, arg: "file", help: "PEM file of the client certificate's key",
		set: text(func(c *Config) *string { return &c.NATS.TLS.Key }),
	},
	{
		name: "nats-tls-first", path: "nats.tls.first", group: Broker, def: "false", help: "begin TLS before the server's first word",
		set: boolean(func(c *Config) *bool { return &c.NATS.TLS.First }),
	},
	{
		name: "nats-sync", path: "nats.sync", group: Broker, arg: "when", def: string(SyncUnknown), help: "the server's sync_interval, which no client can see: always, interval (any time) or unknown",
		set: oneOf(func(c *Config) *Sync { return &c.NATS.Sync }, SyncUnknown, SyncAlways, SyncInterval),
	},

	{
		name: "stream", path: "stream.name", group: Streams, arg: "name", def: "OUTBOX", help: "JetStream stream to publish to",
		set: match(func(c *Config) *string { return &c.Stream.Name }, streamName, 255, "is no stream name", streamRemedy),
	},
	{
		name: "create-stream", path: "stream.create", group: Streams, def: "false", help: "create the streams that are missing",
		set: boolean(func(c *Config) *bool { return &c.Stream.Create }),
	},
	{
		name: "shared-stream", path: "stream.shared", group: Streams, def: "false", help: "the stream has other writers: slower, and nothing twice only within its dedup window",
		set: boolean(func(c *Config) *bool { return &c.Stream.Shared }),
	},
	{
		name: "publish-mode", path: "stream.publish_mode", group: Streams, arg: "mode", def: string(PublishAuto), help: "an ack for each message (chain), for some (sparse) or for each atomic batch (atomic); auto takes chain, and atomic with --nats-sync always",
		set: oneOf(func(c *Config) *PublishMode { return &c.Stream.PublishMode }, PublishAuto, PublishChain, PublishSparse, PublishAtomic),
	},
	{
		name: "stream-replicas", path: "stream.replicas", group: Streams, arg: "n", def: "1", help: "replicas of a stream that is created",
		set: number(func(c *Config) *int { return &c.Stream.Replicas }, 1, 5),
	},
	{
		name: "dead-letter-stream", path: "stream.dead_letters", group: Streams, arg: "name", help: "stream of parked events (default the stream's name and _DLQ)",
		set: match(func(c *Config) *string { return &c.Stream.DeadLetters }, streamName, 255, "is no stream name", streamRemedy),
	},
	{
		name: "checkpoint-bucket", path: "stream.checkpoint_bucket", group: Streams, arg: "name", def: "walrelay", help: "KV bucket of the checkpoint",
		set: match(func(c *Config) *string { return &c.Stream.CheckpointBucket }, bucketName, 0, "is no bucket name", "use letters, digits, underscores and dashes"),
	},
	{
		name: "adopt-stream", group: Streams, def: "false", help: "take over a stream that another relay has checkpointed, this once",
		set: boolean(func(c *Config) *bool { return &c.Stream.Adopt }),
	},
	{
		name: "accept-gap", group: Streams, def: "false", help: "go on although events between stream and slot are lost, this once",
		set: boolean(func(c *Config) *bool { return &c.Stream.AcceptGap }),
	},

	{
		name: "backfill", path: "backfill", group: Relay, def: "false",
		help: "publish the rows that are in the table already before anything else, when there is no slot yet",
		set:  boolean(func(c *Config) *bool { return &c.Backfill }),
	},
	{
		name: "backfill-order", path: "backfill_order", group: Relay, arg: "column",
		help: "column that gives the order of the table's rows (default the one with the role seq)",
		set:  text(func(c *Config) *string { return &c.BackfillOrder }),
	},
	{
		name: "on-poison", path: "on_poison", group: Relay, arg: "policy", def: string(Park), help: "what to do with an event that can never be stored: park it, park it and what follows in its aggregate (park-aggregate), or halt",
		set: oneOf(func(c *Config) *OnPoison { return &c.OnPoison }, Park, ParkAggregate, Halt),
	},
	{
		name: "max-parked-in-row", path: "max_parked_in_row", group: Relay, arg: "n", def: "100", help: "halt after so many parked events in a row; 0 never does",
		set: number(func(c *Config) *int { return &c.MaxParkedInRow }, 0, 1<<31-1),
	},
	{
		name: "window", path: "window", group: Relay, arg: "n", def: "4096", help: "events in flight at most; a slow broker has fewer",
		set: number(func(c *Config) *int { return &c.Window }, 1, 1<<20),
	},
	{
		name: "window-bytes", path: "window_bytes", group: Relay, arg: "size", def: "16MiB", help: "bytes in flight at most",
		set: size(func(c *Config) *int64 { return &c.WindowBytes }, 64<<10),
	},
	{
		name: "ack-timeout", path: "ack_timeout", group: Relay, arg: "duration", def: "2s", help: "longest wait for an ack before reconciling",
		set: duration(func(c *Config) *time.Duration { return &c.AckTimeout }, 10*time.Millisecond),
	},
	{
		name: "drain-timeout", path: "drain_timeout", group: Relay, arg: "duration", def: "10s", help: "longest wait for events in flight when stopping",
		set: duration(func(c *Config) *time.Duration { return &c.DrainTimeout }, 0),
	},
	{
		name: "status-interval", path: "status_interval", group: Relay, arg: "duration", def: "1s", help: "time between checkpoints and statuses to Postgres",
		set: duration(func(c *Config) *time.Duration { return &c.StatusInterval }, 10*time.Millisecond),
	},
	{
		name: "confirm-delay", path: "confirm_delay", group: Relay, arg: "duration", def: "0s", help: "how long Postgres keeps the WAL of stored events, in case the broker forgets them; longer than its sync_interval",
		set: duration(func(c *Config) *time.Duration { return &c.ConfirmDelay }, 0),
	},
	{
		name: "wal-sender-timeout", path: "wal_sender_timeout", group: Relay, arg: "duration", def: "0s", help: "wal_sender_timeout of the session; 0s keeps the server's",
		set: duration(func(c *Config) *time.Duration { return &c.WALSenderTimeout }, 0),
	},
	{
		name: "backoff-min", path: "backoff.min", group: Relay, arg: "duration", def: "100ms", help: "first pause before connecting again",
		set: duration(func(c *Config) *time.Duration { return &c.Backoff.Min }, time.Millisecond),
	},
	{
		name: "backoff-max", path: "backoff.max", group: Relay, arg: "duration", def: "10s", help: "longest pause before connecting again",
		set: duration(func(c *Config) *time.Duration { return &c.Backoff.Max }, time.Millisecond),
	},
	{
		name: "prune-after", path: "prune.after", group: Relay, arg: "age", def: "0s",
		help: "delete published rows that are older, such as 7d, 36h or 1d12h; 0s never does",
		set:  age(func(c *Config) *time.Duration { return &c.Prune.After }, 0),
	},
	{
		name: "prune-every", path: "prune.every", group: Relay, arg: "duration", def: "10m",
		help: "time between two looks for rows to delete",
		set:  duration(func(c *Config) *time.Duration { return &c.Prune.Every }, 100*time.Millisecond),
	},
	{
		name: "http-addr", path: "http_addr", group: Serving, arg: "host:port", help: "address for metrics and health, on the loopback interface when only a port is given; empty serves nothing",
		set: setHTTPAddr,
	},
	{
		name: "pprof", path: "pprof", group: Relay, def: "false", help: "serve profiles of the program at /debug/pprof/, too",
		set: boolean(func(c *Config) *bool { return &c.PProf }),
	},

	{
		name: "log-level", path: "log.level", group: Logging, arg: "level", def: "info", help: "least level that is logged: debug, info, warn or error",
		set: setLogLevel,
	},
	{
		name: "log-format", path: "log.format", group: Logging, arg: "form", def: string(LogAuto), help: "form of log lines: auto, text or json",
		set: oneOf(func(c *Config) *LogFormat { return &c.Log.Format }, LogAuto, LogText, LogJSON),
	},
}

var (
	slotName    = regexp.MustCompile(`^[a-z0-9_]+$`) // ReplicationSlotValidateName
	streamName  = regexp.MustCompile(`^[^\s.*>/\\\x00-\x1f\x7f]+$`)
	bucketName  = regexp.MustCompile(`^[A-Za-z0-9_-]+$`) // nats.go's validBucketRe
	subjectText = regexp.MustCompile(`^[^\s\x00-\x1f\x7f]+$`)
)

const streamRemedy = "leave out blanks, dots, slashes, * and >"

func text(p func(*Config) *string) func(*Config, given) error {
	return func(c *Config, v given) error {
		*p(c) = v.texts[0]
		return nil
	}
}

func secret(p func(*Config) *Secret) func(*Config, given) error {
	return func(c *Config, v given) error {
		*p(c) = NewSecret(v.texts[0], "")
		return nil
	}
}

// match takes a text that re matches, of most bytes at most; 0 is any number. A
// limit in the expression would make it large.
func match(p func(*Config) *string, re *regexp.Regexp, most int, msg, remedy string) func(*Config, given) error {
	return func(c *Config, v given) error {
		if !re.MatchString(v.texts[0]) || most > 0 && len(v.texts[0]) > most {
			return &mistake{msg, remedy}
		}
		*p(c) = v.texts[0]
		return nil
	}
}

func boolean(p func(*Config) *bool) func(*Config, given) error {
	return func(c *Config, v given) error {
		switch strings.ToLower(v.texts[0]) {
		case "true", "yes", "on", "1":
			*p(c) = true
		case "false", "no", "off", "0":
			*p(c) = false
		default:
			return &mistake{"is neither true nor false", "write true or false"}
		}
		return nil
	}
}

func number(p func(*Config) *int, low, high int) func(*Config, given) error {
	return func(c *Config, v given) error {
		n, err := strconv.Atoi(v.texts[0])
		if err != nil || n < low || n > high {
			return &mistake{"is no number in range", fmt.Sprintf("write a number from %d to %d", low, high)}
		}
		*p(c) = n
		return nil
	}
}

func duration(p func(*Config) *time.Duration, low time.Duration) func(*Config, given) error {
	return func(c *Config, v given) error {
		d, err := time.ParseDuration(v.texts[0])
		if err != nil {
			return &mistake{"is no duration", "write a number with its unit, such as 200ms, 5s or 1m30s"}
		}
		if d < low {
			return &mistake{"is too short", fmt.Sprintf("write %s or more", low)}
		}
		*p(c) = d
		return nil
	}
}

const ageRemedy = "write a number with its unit, such as 7d, 36h or 1d12h"

func age(p func(*Config) *time.Duration, low time.Duration) func(*Config, given) error {
	return func(c *Config, v given) error {
		d, err := ParseAge(v.texts[0])
		if err != nil {
			return &mistake{"is no age", ageRemedy}
		}
		if d < low {
			return &mistake{"is too short", fmt.Sprintf("write %s or more", low)}
		}
		*p(c) = d
		return nil
	}
}

var daysText = regexp.MustCompile(`^([0-9]{1,5})d(.*)$`)

// ParseAge reads a duration that may begin with days of 24 hours, such as 7d or 1d12h.
func ParseAge(s string) (time.Duration, error) {
	m := daysText.FindStringSubmatch(s)
	if m == nil {
		return time.ParseDuration(s)
	}
	days, err := strconv.Atoi(m[1])
	if err != nil {
		return 0, err
	}
	d := time.Duration(days) * 24 * time.Hour
	if m[2] == "" {
		return d, nil
	}
	rest, err := time.ParseDuration(m[2])
	if err == nil && (rest < 0 || strings.HasPrefix(m[2], "+")) {
		err = errors.New("a sign behind the days")
	}
	return d + rest, err
}

var sizeText = regexp.MustCompile(`^([0-9]+)\s*([A-Za-z]*)$`)

var sizeUnits = map[string]int64{
	"": 1, "b": 1,
	"kb": 1e3, "mb": 1e6, "gb": 1e9,
	"k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
	"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30,
}

func size(p func(*Config) *int64, low int64) func(*Config, given) error {
	return func(c *Config, v given) error {
		m := sizeText.FindStringSubmatch(v.texts[0])
		if m == nil {
			return &mistake{"is no size", "write bytes, or a number with its unit, such as 16MiB"}
		}
		n, err := strconv.ParseInt(m[1], 10, 64)
		unit, ok := sizeUnits[strings.ToLower(m[2])]
		if err != nil || !ok || n > (1<<40)/unit {
			return &mistake{"is no size in range", "write bytes, or a number with its unit, such as 16MiB"}
		}
		if n*unit < low {
			return &mistake{"is too small", fmt.Sprintf("write %dKiB or more", low>>10)}
		}
		*p(c) = n * unit
		return nil
	}
}

func oneOf[T ~string](p func(*Config) *T, all ...T) func(*Config, given) error {
	return func(c *Config, v given) error {
		if !slices.Contains(all, T(v.texts[0])) {
			names := make([]string, len(all))
			for i, a := range all {
				names[i] = string(a)
			}
			return &mistake{"is no such choice", "write " + alternatives(names)}
		}
		*p(c) = T(v.texts[0])
		return nil
	}
}

// alternatives writes names with "or" before the last.
func alternatives(names []string) string {
	last := len(names) - 1
	return strings.Join(names[:last], ", ") + " or " + names[last]
}

func setLogLevel(c *Config, v given) error {
	switch t := strings.ToLower(v.texts[0]); t {
	case "debug", "info", "warn", "error":
		return c.Log.Level.UnmarshalText([]byte(t))
	}
	return &mistake{"is no log level", "write debug, info, warn or error"}
}

func setHTTPAddr(c *Config, v given) error {
	if v.texts[0] == "" {
		c.HTTPAddr = ""
		return nil
	}
	text := v.texts[0]
	if !strings.Contains(text, ":") {
		text = ":" + text
	}
	host, port, err := net.SplitHostPort(text)
	if _, perr := strconv.ParseUint(port, 10, 16); err != nil || perr != nil || strings.ContainsAny(host, " /@") {
		return &mistake{"is no address", "write a port, such as 9187, or host:port, such as 0.0.0.0:9187 for every interface"}
	}
	if host == "" {
		host = "127.0.0.1"
	}
	c.HTTPAddr = net.JoinHostPort(host, port)
	return nil
}

func setPublications(c *Config, v given) error {
	var names []string
	for _, t := range v.texts {
		parts, err := split(t, ",")
		if err != nil {
			return err
		}
		for _, name := range parts {
			if len(name) > 1 && name[0] == '"' && name[len(name)-1] == '"' {
				name = strings.ReplaceAll(name[1:len(name)-1], `""`, `"`)
			}
			switch {
			case name == "":
				return &mistake{"holds an empty publication name", "write the name of the publication"}
			case len(name) > 63:
				return &mistake{"is too long for a name", "names of Postgres have 63 bytes at most"}
			case slices.Contains(names, name):
				return &mistake{"names a publication twice", "name it once"}
			}
			names = append(names, name)
		}
	}
	c.Publications = names
	return nil
}

// split cuts s at any of seps, but not inside double quotes, and trims blanks.
func split(s, seps string) ([]string, error) {
	var parts []string
	quoted := false
	from := 0
	for i := range len(s) {
		switch {
		case s[i] == '"':
			quoted = !quoted
		case !quoted && strings.IndexByte(seps, s[i]) >= 0:
			parts = append(parts, strings.TrimSpace(s[from:i]))
			from = i + 1
		}
	}
	if quoted {
		return nil, &mistake{"has a double quote without its partner", `write "" for a quote inside of a name`}
	}
	return append(parts, strings.TrimSpace(s[from:])), nil
}
