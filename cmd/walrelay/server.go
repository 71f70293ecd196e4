package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/pgsession"
)

// connectTimeout is that of each address of a DSN that sets none, for servers
// that take a connection and never answer.
const connectTimeout = 10 * time.Second

// pgConfig is the configuration of an ordinary connection.
func pgConfig(cfg *config.Config) (*pgx.ConnConfig, error) {
	if cfg.Unnamed {
		return nil, event.Fail(event.Usage, "name it with --dsn, WALRELAY_DSN, the key dsn of the file, or libpq's PGHOST, PGDATABASE, PGUSER or PGSERVICE",
			"nothing says which Postgres to connect to")
	}
	pg, err := pgx.ParseConfig(cfg.DSN.Reveal())
	if err != nil {
		// config has parsed it before, so what changed are the files next to it. The
		// text of err is left out, since it may quote the string.
		return nil, event.Fail(event.Usage, "check the DSN, and the PG* variables and files that add to it", "the connection string is not usable")
	}
	own := config.TakeClientKeys(pg.RuntimeParams)
	name := cmp.Or(pg.RuntimeParams["application_name"], own[config.KeyApplicationName], clientName)
	pg.RuntimeParams["application_name"] = name
	if list := own[config.KeyHostAddr]; list != "" {
		if err := dialAddresses(pg, strings.Split(list, ",")); err != nil {
			return nil, err
		}
	}
	limitTLS(pg, own[config.KeyTLSMin], own[config.KeyTLSMax])
	if pg.ConnectTimeout == 0 {
		pg.ConnectTimeout = connectTimeout
	}
	// Nothing prepared: through a pooler it may meet what another session
	// prepared, and the error would hide that it is the pooler that has to go.
	pg.DefaultQueryExecMode = pgx.QueryExecModeExec
	pgsession.Prepare(&pg.Config)
	return pg, nil
}

// dialAddresses connects to addresses instead of looking the hosts up. The
// names of the hosts stay what certificates and the password file are compared with.
func dialAddresses(pg *pgx.ConnConfig, addresses []string) error {
	var hosts []string // each once; a host may be tried with and without TLS
	add := func(host string) {
		if len(hosts) == 0 || hosts[len(hosts)-1] != host {
			hosts = append(hosts, host)
		}
	}
	add(pg.Host)
	for _, f := range pg.Fallbacks {
		add(f.Host)
	}
	if len(hosts) != len(addresses) {
		return event.Fail(event.Usage, "give as many addresses as hosts, each with its own name",
			"the connection string has %d hosts and %d addresses in hostaddr", len(hosts), len(addresses))
	}
	of := map[string][]string{}
	for i, host := range hosts {
		if addresses[i] != "" {
			of[host] = append(of[host], addresses[i])
		}
	}
	lookup := pg.LookupFunc
	pg.LookupFunc = func(ctx context.Context, host string) ([]string, error) {
		if at := of[host]; at != nil {
			return at, nil
		}
		return lookup(ctx, host)
	}
	return nil
}

// limitTLS bounds the versions of TLS; config has checked their names. An empty
// bound leaves Go's, whose lowest is TLS 1.2, as libpq's.
func limitTLS(pg *pgx.ConnConfig, lowest, highest string) {
	versions := map[string]uint16{
		"tlsv1": tls.VersionTLS10, "tlsv1.1": tls.VersionTLS11, "tlsv1.2": tls.VersionTLS12, "tlsv1.3": tls.VersionTLS13,
	}
	limit := func(c *tls.Config) {
		if c != nil {
			c.MinVersion, c.MaxVersion = versions[strings.ToLower(lowest)], versions[strings.ToLower(highest)]
		}
	}
	limit(pg.TLSConfig)
	for _, f := range pg.Fallbacks {
		limit(f.TLSConfig)
	}
}
