package main

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
)

// clientName is what Postgres and NATS see unless the DSN names another.
const clientName = "walrelay"

// natsOptions are the credentials and TLS settings. It reads the files, so that
// a bad one is told with its name.
func natsOptions(cfg *config.Config) ([]nats.Option, error) {
	n := cfg.NATS
	opts := []nats.Option{nats.Name(clientName)}
	file := func(what, name string, err error) error {
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, os.ErrPermission) {
			return event.Fail(event.Precondition, "make the file readable for this user, or name another", "read %s: %w", what, err)
		}
		return event.Fail(event.Precondition, "name a file of the right kind", "read %s %s: %w", what, name, err)
	}
	if n.Creds != "" {
		text, err := os.ReadFile(n.Creds)
		if err == nil && !strings.Contains(string(text), "BEGIN NATS USER JWT") {
			err = errors.New("it is no credentials file")
		}
		if err != nil {
			return nil, file("NATS credentials", n.Creds, err)
		}
		opts = append(opts, nats.UserCredentials(n.Creds))
	}
	if n.NKey != "" {
		opt, err := nats.NkeyOptionFromSeed(n.NKey)
		if err != nil {
			return nil, file("NATS nkey seed", n.NKey, err)
		}
		opts = append(opts, opt)
	}
	if n.User != "" {
		opts = append(opts, nats.UserInfo(n.User, n.Password.Reveal()))
	}
	if !n.Token.IsZero() {
		opts = append(opts, nats.Token(n.Token.Reveal()))
	}
	var probe nats.Options
	if n.TLS.CA != "" {
		opt := nats.RootCAs(n.TLS.CA)
		if err := opt(&probe); err != nil {
			return nil, file("NATS CA certificates", n.TLS.CA, err)
		}
		opts = append(opts, opt)
	}
	if n.TLS.Cert != "" {
		opt := nats.ClientCert(n.TLS.Cert, n.TLS.Key)
		if err := opt(&probe); err != nil {
			return nil, file("NATS client certificate", n.TLS.Cert+" with "+n.TLS.Key, err)
		}
		opts = append(opts, opt)
	}
	if n.TLS.First {
		opts = append(opts, nats.TLSHandshakeFirst())
	}
	return opts, nil
}

// tables are the outbox tables; mistakes are joined in one Usage failure.
func tables(cfg *config.Config) ([]outbox.Table, error) {
	var all []outbox.Table
	var mistakes []error
	for _, t := range cfg.Tables {
		table, err := outbox.ParseTable(t.Name)
		if err != nil {
			mistakes = append(mistakes, err)
			continue
		}
		table.Preset, table.Columns, table.Subject = t.Preset, t.Columns, t.Subject
		table.HeaderColumns = headerColumns(t.HeaderColumns)
		if slices.ContainsFunc(all, func(o outbox.Table) bool { return o.String() == table.String() }) {
			mistakes = append(mistakes, fmt.Errorf("table %s is named twice", table))
		}
		all = append(all, table)
	}
	if len(mistakes) > 0 {
		hint := event.HintOf(mistakes[0])
		if hint == "" {
			hint = "name each table once"
		}
		return nil, event.Fail(event.Usage, hint, "%w", errors.Join(mistakes...))
	}
	return all, nil
}

func headerColumns(cs []config.HeaderColumn) []outbox.HeaderColumn {
	var all []outbox.HeaderColumn
	for _, c := range cs {
		all = append(all, outbox.HeaderColumn{Column: c.Column, Name: c.Header})
	}
	return all
}

// newMapper makes the mapper of the configured tables and messages. Without
// replay.Key it takes no replays.
func newMapper(cfg *config.Config, tables []outbox.Table, replay outbox.ReplayOptions) (*outbox.Mapper, error) {
	m := outbox.Mapping{
		Replay: replay,
		Tables: tables, Subject: cfg.Subject, Messages: cfg.Messages, Prefix: cfg.MessagePrefix,
		HeaderColumns: headerColumns(cfg.HeaderColumns),
		CloudEvents:   outbox.CloudEvents{On: cfg.CloudEvents, Source: cfg.CloudSource},
	}
	if cfg.Route.Regex != "" {
		m.Route = outbox.Route{By: cfg.Route.By, Regex: cfg.Route.Regex}
	}
	for _, s := range cfg.TypeSubjects {
		m.Overrides = append(m.Overrides, outbox.Override{AggregateType: s.AggregateType, EventType: s.EventType, Subject: s.Subject})
	}
	return outbox.NewMapper(m)
}

// fingerprint changes when the same log would yield other events, or events of
// other ids: with the publications, the tables, their id columns, or the prefix
// of logical messages.
func fingerprint(cfg *config.Config) string {
	h := sha256.New()
	put := func(kind string, names []string) {
		names = slices.Clone(names)
		slices.Sort(names)
		fmt.Fprintf(h, "%s %d\n", kind, len(names))
		for _, n := range names {
			fmt.Fprintf(h, "%d:%s\n", len(n), n)
		}
	}
	var names, prefixes []string
	for _, t := range cfg.Tables {
		name := t.Name
		if table, err := outbox.ParseTable(t.Name); err == nil {
			name = fmt.Sprintf("%q.%q", table.Schema, table.Name) // however it is spelt
		}
		id, _, _ := strings.Cut(t.Columns["id"], "|") // without its earlier names
		names = append(names, fmt.Sprintf("%s %q", name, cmp.Or(id, "id")))
	}
	if cfg.Messages {
		prefixes = []string{cfg.MessagePrefix}
	}
	put("publications", cfg.Publications)
	put("tables", names)
	put("messages", prefixes)
	return hex.EncodeToString(h.Sum(nil))
}

func quoteIdent(name string) string { return pgx.Identifier{name}.Sanitize() }

func isNote(line string) bool { return strings.HasPrefix(line, "note: ") }
