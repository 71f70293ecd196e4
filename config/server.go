package config

import (
	"errors"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// loadDSN reads the connection string. libpq's variables rank with our own, so
// they win over a string of the file; over one of a flag or of our own
// variable they only fill what it leaves out, as libpq has it.
func (l *loader) loadDSN(c *Config, o *option, f found) {
	if l.flags.Lookup(o.name) == nil {
		return
	}
	set := settings{}
	behind := map[string]bool{} // keywords behind a password
	if f.texts != nil {
		secret := false
		var err error
		set, err = readNoting(f.texts[0], func(key string) {
			if secret {
				behind[key] = true
			}
			secret = secret || slices.Contains(secretKeys, key)
		})
		if err != nil {
			l.reject(o, f, err)
			return
		}
	}
	if f.from == byFile {
		for name, key := range libpqEnv {
			if l.env[name] != "" {
				delete(set, key)
			}
		}
		for key, k := range clientKeys {
			if l.env[k.env] != "" {
				delete(set, key)
			}
		}
	}
	if f.source == "" {
		f.source = "PG* variables"
	}
	params, err := parseDSN(set)
	if err != nil {
		l.reject(o, f, err)
		return
	}
	// pgx does not read these variables.
	for key, k := range clientKeys {
		if v := l.env[k.env]; v != "" && params[key] == "" {
			set[key], params[key] = v, v
		}
	}
	if at := params[KeyHostAddr]; at != "" && set["host"] == "" && l.env["PGHOST"] == "" && set["service"] == "" && l.env["PGSERVICE"] == "" {
		set["host"] = at // pgx would go to the socket of this machine
	}
	warning, mistakes := judgeKeys(params, func(key string) bool { return behind[key] })
	for _, m := range mistakes {
		l.reject(o, f, m)
	}
	if warning != "" {
		c.Warnings = append(c.Warnings, warning)
	}
	c.Unnamed = !l.named(set)
	c.DSN = set.secret()
}

// naming are the keywords that say which server, database or role is meant.
var naming = []string{"host", KeyHostAddr, "port", "dbname", "user", "service"}

// named reports whether anything says where to connect to, so that it is not
// libpq's guess: this machine, as the user that runs the program.
func (l *loader) named(set settings) bool {
	for key := range set {
		if set[key] != "" && slices.Contains(naming, key) {
			return true
		}
	}
	for name, key := range libpqEnv {
		if l.env[name] != "" && slices.Contains(naming, key) {
			return true
		}
	}
	return false
}

// parseDSN has pgx judge the settings, together with the PG* variables and the
// service file, and returns what it would send to the server as settings.
func parseDSN(s settings) (map[string]string, error) {
	conf, err := pgconn.ParseConfig(s.secret().value)
	if err == nil {
		return conf.RuntimeParams, nil
	}
	// The reason is taken from a second try without secrets, because pgx
	// redacts on a best-effort basis only.
	bare := settings{}
	for k, v := range s {
		if !slices.Contains(secretKeys, k) {
			bare[k] = v
		}
	}
	_, err = pgconn.ParseConfig(bare.secret().value)
	var perr *pgconn.ParseConfigError
	if !errors.As(err, &perr) {
		return nil, &mistake{"the client key or its password cannot be used", "check sslkey and sslpassword"}
	}
	msg := perr.Error()
	if i := strings.LastIndex(msg, "`: "); i >= 0 {
		msg = msg[i+len("`: "):]
	}
	return nil, &mistake{"the connection string is not usable: " + msg, "check it, and the PG* variables that add to it"}
}
