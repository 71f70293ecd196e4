package config

import (
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// settings are the keywords of a connection string, under libpq's names.
type settings map[string]string

// shownKeys are printed. Others may hold a piece of a password that was
// pasted without quotes.
var shownKeys = []string{"host", "port", "user", "dbname", "sslmode", "sslrootcert", "service", "application_name", "target_session_attrs"}

var secretKeys = []string{"password", "sslpassword"}

// libpqEnv maps libpq's variables to the keywords that they stand for.
var libpqEnv = map[string]string{
	"PGHOST": "host", "PGPORT": "port", "PGDATABASE": "dbname", "PGUSER": "user", "PGPASSWORD": "password",
	"PGPASSFILE": "passfile", "PGAPPNAME": "application_name", "PGCONNECT_TIMEOUT": "connect_timeout",
	"PGSSLMODE": "sslmode", "PGSSLKEY": "sslkey", "PGSSLCERT": "sslcert", "PGSSLCERTMODE": "sslcertmode",
	"PGSSLSNI": "sslsni", "PGSSLROOTCERT": "sslrootcert", "PGSSLPASSWORD": "sslpassword",
	"PGSSLNEGOTIATION": "sslnegotiation", "PGTARGETSESSIONATTRS": "target_session_attrs",
	"PGSERVICE": "service", "PGSERVICEFILE": "servicefile", "PGTZ": "timezone", "PGOPTIONS": "options",
	"PGMINPROTOCOLVERSION": "min_protocol_version", "PGMAXPROTOCOLVERSION": "max_protocol_version",
	"PGCHANNELBINDING": "channel_binding", "PGREQUIREAUTH": "require_auth",
}

const encodeRemedy = `percent-encode it in the URL (@ is %40, : is %3A, / is %2F, # is %23, % is %25), or use the form "host=… user=… password='…' dbname=…", or set PGPASSWORD`

// readDSN reads a URL or a keyword/value string. Its mistakes never quote the
// input, since where a password begins in it is then unknown.
func readDSN(raw string) (settings, error) { return readNoting(raw, func(string) {}) }

// readNoting is readDSN that calls note with each keyword, in the order of the string.
func readNoting(raw string, note func(key string)) (settings, error) {
	raw = strings.TrimSpace(raw)
	if strings.IndexByte(raw, 0) >= 0 {
		return nil, &mistake{"the connection string contains a NUL byte", ""}
	}
	scheme, rest, isURL := strings.Cut(raw, "://")
	if isURL && !strings.Contains(scheme, "=") {
		switch strings.ToLower(scheme) {
		case "postgres", "postgresql":
			return readURL(rest, note)
		}
		return nil, &mistake{"the connection string is a URL of another kind", "begin it with postgres://"}
	}
	return readKeywords(raw, note)
}

// secret renders the settings as a keyword/value string.
func (s settings) secret() Secret {
	if len(s) == 0 {
		return Secret{}
	}
	keys := make([]string, 0, len(s))
	for k := range s {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(a, b string) int {
		if d := rank(a) - rank(b); d != 0 {
			return d
		}
		return strings.Compare(a, b)
	})
	var value, shown []string
	for _, k := range keys {
		value = append(value, k+"="+quoteKeyword(s[k]))
		switch {
		case slices.Contains(secretKeys, k):
			shown = append(shown, k+"="+redacted)
		case slices.Contains(shownKeys, k):
			shown = append(shown, k+"="+quoteKeyword(s[k]))
		}
	}
	return NewSecret(strings.Join(value, " "), strings.Join(shown, " "))
}

func rank(key string) int {
	if i := slices.Index(shownKeys, key); i >= 0 {
		return i
	}
	return len(shownKeys)
}

func quoteKeyword(v string) string {
	if v != "" && !strings.ContainsAny(v, " \t\n\r\v\f'\\") {
		return v
	}
	return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(v) + "'"
}

// readKeywords reads keyword = value pairs by libpq's rules (conninfo_parse).
func readKeywords(p string, note func(string)) (settings, error) {
	const space = " \t\n\r\v\f"
	set := settings{}
	for p = strings.TrimLeft(p, space); p != ""; p = strings.TrimLeft(p, space) {
		key, rest, ok := strings.Cut(p, "=")
		key = strings.Trim(key, space)
		if !ok || key == "" || strings.ContainsAny(key, space) {
			if len(set) == 0 && !ok {
				return nil, &mistake{"the connection string is neither a URL nor keyword=value pairs", "write postgres://user@host:5432/dbname or host=… user=… dbname=…"}
			}
			return nil, &mistake{`a keyword of the connection string has no "=" after it`, "put values with spaces in single quotes, such as password='two words'"}
		}
		p = strings.TrimLeft(rest, space)
		quoted := strings.HasPrefix(p, "'")
		if quoted {
			p = p[1:]
		}
		var val strings.Builder
		closed := false
		i := 0
		for ; i < len(p); i++ {
			c := p[i]
			if quoted && c == '\'' {
				closed = true
				i++
				break
			}
			if !quoted && strings.IndexByte(space, c) >= 0 {
				break
			}
			if c == '\\' {
				if i++; i == len(p) {
					break
				}
				c = p[i]
			}
			val.WriteByte(c)
		}
		if quoted && !closed {
			return nil, &mistake{"a quoted value of the connection string does not end", `write \' for a quote and \\ for a backslash inside quotes`}
		}
		p = p[min(i, len(p)):]
		key = keyword(key)
		note(key)
		set[key] = val.String()
	}
	return set, nil
}

func keyword(k string) string {
	if k == "database" {
		return "dbname"
	}
	return k
}

var (
	// Its classes of Unicode make it large, so it is made where there is a URL.
	authority = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^` + hostPort + `(?:,` + hostPort + `)*$`) })
	parameter = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.%]{2,}=`)
)

const hostPort = `(?:\[[0-9A-Za-z:.%]+\]|[\pL\pN._~%-]*)(?::[0-9]*)?`

// reading is how well a text can be what follows the user and password in a URL.
type reading uint8

const (
	impossible reading = iota
	doubtful           // only with an @ in the name of the database
	certain
)

// readURL reads what follows postgres://. Where libpq ends the password at the
// first @ and gives up at a /, this looks for the one @ behind which hosts,
// database and parameters make sense, so that a password pasted as it is works.
func readURL(p string, note func(string)) (settings, error) {
	std := -1 // libpq's choice
	if i := strings.IndexAny(p, "@/"); i >= 0 && p[i] == '@' {
		std = i
	}
	at := std
	if how := readingAt(p, std); how != certain {
		at = -2
		for i := range len(p) {
			if p[i] == '@' && i != std && readingAt(p, i) == certain {
				at = i
				break
			}
		}
		switch {
		case how == impossible && at == -2:
			return nil, &mistake{"the connection URL cannot be read: its password or its port is malformed", encodeRemedy}
		case how == doubtful && at == -2:
			at = std
		case how == doubtful:
			return nil, &mistake{"the connection URL can be read in two ways, with an @ in the password or in the name of the database", encodeRemedy}
		}
	}
	set := settings{}
	if at >= 0 {
		user, password, _ := strings.Cut(p[:at], ":")
		for _, part := range []struct{ key, text string }{{"user", user}, {"password", password}} {
			if part.text == "" {
				continue
			}
			v, err := decodeLiteral(part.text, part.key)
			if err != nil {
				return nil, err
			}
			set[part.key] = v
		}
	}
	return set, readTail(p[at+1:], set, note)
}

// readingAt judges p with the user and password ending at i, or with none when i is -1.
func readingAt(p string, i int) reading {
	if i >= 0 {
		user, _, _ := strings.Cut(p[:i], ":")
		if strings.ContainsAny(user, "/?#[") {
			return impossible
		}
	}
	hosts, db, query := splitTail(p[i+1:])
	if !authority().MatchString(hosts) {
		return impossible
	}
	if query != "" {
		for pair := range strings.SplitSeq(query, "&") {
			if !parameter.MatchString(pair) {
				return impossible
			}
		}
	}
	switch {
	case !strings.ContainsAny(db, "/@"):
		return certain
	case !strings.ContainsAny(db, "/:#"):
		return doubtful
	}
	return impossible
}

func splitTail(t string) (hosts, db, query string) {
	if i := strings.IndexAny(t, "/?"); i >= 0 && t[i] == '?' {
		return t[:i], "", t[i+1:]
	}
	hosts, db, _ = strings.Cut(t, "/")
	db, query, _ = strings.Cut(db, "?")
	return hosts, db, query
}

func readTail(t string, set settings, note func(string)) error {
	hostList, db, query := splitTail(t)
	var hosts, ports []string
	// A colon inside brackets belongs to an IPv6 address.
	for one := range strings.SplitSeq(hostList, ",") {
		host, port := one, ""
		if i := strings.LastIndexByte(one, ':'); i > strings.LastIndexByte(one, ']') {
			host, port = one[:i], one[i+1:]
		}
		hosts = append(hosts, strings.Trim(host, "[]"))
		ports = append(ports, port)
	}
	put := func(key, text string) error {
		v, err := url.PathUnescape(text)
		if err != nil || strings.IndexByte(v, 0) >= 0 {
			return &mistake{"the connection URL has a malformed percent escape outside of the password", "a % of its own is %25"}
		}
		set[key] = v
		return nil
	}
	for _, part := range []struct{ key, text string }{
		{"host", strings.Join(hosts, ",")}, {"port", strings.Join(ports, ",")}, {"dbname", db},
	} {
		if part.text == "" {
			continue
		}
		if err := put(part.key, part.text); err != nil {
			return err
		}
	}
	if query == "" {
		return nil
	}
	for pair := range strings.SplitSeq(query, "&") {
		key, value, _ := strings.Cut(pair, "=")
		key, err := url.PathUnescape(key)
		if err != nil {
			return &mistake{"the connection URL has a malformed parameter name", "a % of its own is %25"}
		}
		if key == "ssl" && value == "true" { // JDBC's spelling, which libpq takes, too
			key, value = "sslmode", "require"
		}
		key = keyword(key)
		note(key)
		if slices.Contains(secretKeys, key) {
			v, err := decodeLiteral(value, key)
			if err != nil {
				return err
			}
			set[key] = v
			continue
		}
		if err := put(key, value); err != nil {
			return err
		}
	}
	return nil
}

// decodeLiteral decodes a user or password that is either percent-encoded or
// pasted as it is. Raw @, /, blanks, and a % that escapes nothing, show the latter.
func decodeLiteral(text, name string) (string, error) {
	decoded, err := url.PathUnescape(text)
	raw := err != nil || strings.ContainsAny(text, "@/ \t")
	if !raw {
		if strings.IndexByte(decoded, 0) >= 0 {
			return "", &mistake{"the " + name + " of the connection URL contains %00", ""}
		}
		return decoded, nil
	}
	for i := 0; i+2 < len(text); i++ {
		if text[i] == '%' && isHex(text[i+1]) && isHex(text[i+2]) {
			return "", &mistake{"the " + name + " of the connection URL is percent-encoded only in part", encodeRemedy}
		}
	}
	return text, nil
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
