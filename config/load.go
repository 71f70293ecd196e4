package config

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// AddFlags gives a command the flags of groups.
func AddFlags(fs *pflag.FlagSet, groups ...Group) {
	for _, g := range groups {
		if g == General {
			addFlag(fs, &option{name: fileOption, group: g, arg: "file", help: "YAML file with the configuration"})
		}
		for _, o := range options {
			if o.group == g {
				addFlag(fs, o)
			}
		}
	}
}

func addFlag(fs *pflag.FlagSet, o *option) {
	f := fs.VarPF(&flagText{arg: o.arg}, o.name, "", o.help)
	f.DefValue = o.def
	f.Annotations = map[string][]string{groupKey: {string(o.group)}}
	if o.arg == "" {
		f.NoOptDefVal = "true"
	}
	if o.def == "0s" {
		f.DefValue = "0" // pflag leaves out zeros
	}
}

const groupKey = "group"

// GroupOf returns the group of a flag that AddFlags made, or "".
func GroupOf(f *pflag.Flag) Group {
	if g := f.Annotations[groupKey]; len(g) == 1 {
		return Group(g[0])
	}
	return ""
}

// flagText collects what a flag was given; it is read together with
// everything else, so that all mistakes are told at once.
type flagText struct {
	texts []string
	arg   string
}

func (t *flagText) String() string { return strings.Join(t.texts, ",") }

func (t *flagText) Set(s string) error {
	t.texts = append(t.texts, s)
	return nil
}

func (t *flagText) Type() string {
	if t.arg == "" {
		return "bool"
	}
	return t.arg
}

// origin is where the text of an option was found.
type origin uint8

const (
	byDefault origin = iota
	byFile
	byForeign
	byEnv
	byFlag
)

type found struct {
	given
	from   origin
	source string // for messages
}

// Load reads the options for which fs, already parsed, has flags. The error is
// an *Error. The environment is as os.Environ gives it; a variable that is set
// to nothing counts as not set.
func Load(fs *pflag.FlagSet, environ []string) (*Config, error) {
	l := loader{flags: fs, env: map[string]string{}, sources: map[string]string{}, bad: map[string]bool{}}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		l.env[name] = value
	}
	file := l.readFile()
	c := &Config{}
	for _, o := range options {
		f := l.find(o, file)
		if f.from != byDefault {
			l.sources[o.name] = f.source
		}
		if o.name == "dsn" {
			l.loadDSN(c, o, f)
			continue
		}
		if f.texts == nil && f.tables == nil && f.from == byDefault {
			continue
		}
		if err := o.set(c, f.given); err != nil {
			l.reject(o, f, err)
		}
	}
	l.unknownEnv()
	if l.sources["backoff-min"] == "" && !l.bad["backoff-max"] {
		c.Backoff.Min = min(c.Backoff.Min, c.Backoff.Max) // who sets the longest pause alone means every pause
	}
	l.check(c)
	if c.Stream.DeadLetters == "" {
		c.Stream.DeadLetters = c.Stream.Name + "_DLQ"
	}
	if len(l.problems) > 0 {
		return nil, &Error{Problems: l.problems}
	}
	return c, nil
}

type loader struct {
	flags    *pflag.FlagSet
	env      map[string]string
	problems []Problem
	sources  map[string]string // option → where its value is from, unless it is the default
	bad      map[string]bool   // options whose value is already told to be wrong
}

// find looks the option up in falling precedence.
func (l *loader) find(o *option, file map[string]found) found {
	def := found{}
	if o.def != "" {
		def.texts = []string{o.def}
	}
	flag := l.flags.Lookup(o.name)
	if flag == nil {
		return def
	}
	if flag.Changed {
		texts := flag.Value.(*flagText).texts
		if !o.list {
			texts = texts[len(texts)-1:]
		}
		return found{given{texts: texts}, byFlag, "--" + o.name}
	}
	if v := l.env[o.env()]; v != "" {
		return found{given{texts: []string{v}}, byEnv, o.env()}
	}
	if v := l.env[o.foreign]; v != "" {
		return found{given{texts: []string{v}}, byForeign, o.foreign}
	}
	if f, ok := file[o.path]; ok && o.path != "" {
		return f
	}
	return def
}

func (l *loader) reject(o *option, f found, err error) {
	l.bad[o.name] = true
	p := Problem{Source: f.source, Message: err.Error()}
	if !o.secret {
		if text := strings.Join(f.texts, ", "); text != "" || f.tables == nil {
			p.Message = fmt.Sprintf("%q %s", text, p.Message)
		}
	}
	var m *mistake
	if errors.As(err, &m) {
		p.Remedy = m.remedy
	}
	l.problems = append(l.problems, p)
}

// unknownEnv tells variables that look like slips of ours. Others are let be:
// Kubernetes makes WALRELAY_PORT and the like for a service of that name.
func (l *loader) unknownEnv() {
	known := envNames()
	for _, name := range slices.Sorted(maps.Keys(l.env)) {
		rest, ours := strings.CutPrefix(name, "WALRELAY_")
		if !ours || rest == "PORT" || strings.HasPrefix(rest, "PORT_") || strings.HasPrefix(rest, "SERVICE_") {
			continue
		}
		if l.env[name] == "" || slices.Contains(known, name) {
			continue
		}
		if n := slip(name, known); n != "" {
			l.problems = append(l.problems, Problem{Source: name, Message: "is no variable of walrelay", Remedy: "did you mean " + n + "?"})
		}
	}
}

func envNames() []string {
	names := []string{envName(fileOption)}
	for _, o := range options {
		if o.path != "" {
			names = append(names, o.env())
		}
	}
	sort.Strings(names)
	return names
}

func slip(name string, known []string) string {
	for _, k := range known {
		if distance(name, k) <= 2 {
			return k
		}
	}
	return ""
}

// check looks at options together. Those already rejected are left out.
func (l *loader) check(c *Config) {
	tell := func(message, remedy string, names ...string) {
		var sources []string
		for _, n := range names {
			if l.bad[n] {
				return
			}
			if s := l.sources[n]; s != "" {
				sources = append(sources, s)
			}
		}
		l.problems = append(l.problems, Problem{Source: strings.Join(sources, ", "), Message: message, Remedy: remedy})
	}
	if len(c.Tables) == 0 && !c.Messages {
		tell("there is no outbox table and logical messages are off, so there is nothing to relay", "name a table with --table, or set --messages", "table", "messages")
	}
	if c.CloudSource != "" && !c.CloudEvents {
		tell("a source of CloudEvents is set without them", "set --cloudevents", "cloudevents-source")
	}
	if c.Messages && c.MessagePrefix == "" {
		tell("the prefix of logical messages is empty", "set --message-prefix", "message-prefix")
	}

	n := c.NATS
	var ways []string
	for name, is := range map[string]bool{
		"nats-creds": n.Creds != "", "nats-nkey": n.NKey != "",
		"nats-user": n.User != "" || !n.Password.IsZero(), "nats-token": !n.Token.IsZero(),
	} {
		if is {
			ways = append(ways, name)
		}
	}
	sort.Strings(ways)
	if len(ways) > 1 {
		if n.User == "" && slices.Contains(ways, "nats-user") {
			ways[slices.Index(ways, "nats-user")] = "nats-password"
		}
		tell("more than one way to authenticate at NATS is set", "keep one of credentials file, nkey, user and password, token", ways...)
	}
	if n.User == "" && !n.Password.IsZero() {
		tell("a NATS password is set without a user", "set --nats-user", "nats-password")
	}
	if (n.TLS.Cert == "") != (n.TLS.Key == "") {
		tell("a client certificate for NATS needs both certificate and key", "set --nats-tls-cert and --nats-tls-key", "nats-tls-cert", "nats-tls-key")
	}
	if c.Stream.DeadLetters != "" && c.Stream.DeadLetters == c.Stream.Name {
		tell("dead letters cannot go to the stream itself", "choose another --dead-letter-stream", "stream", "dead-letter-stream")
	}
	if c.PProf && c.HTTPAddr == "" {
		tell("profiles are asked for without an address to serve them at", "set --http-addr", "pprof")
	}
	if c.Backoff.Min > c.Backoff.Max {
		tell("the first pause before connecting again is longer than the longest", "set --backoff-min below --backoff-max", "backoff-min", "backoff-max")
	}
	if t := c.WALSenderTimeout; t > 0 && t < 3*max(c.StatusInterval, time.Second) {
		tell("a wal_sender_timeout this short ends healthy sessions", "set it to at least three times --status-interval, 3s or more", "wal-sender-timeout", "status-interval")
	}
}
