package config

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
)

// pgx knows a part of libpq's keywords and sends every other one to the server
// as a setting, which the server refuses with 42704. These are the others, of
// the libpq of Postgres 14 to 18
// (https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS).
type clientKey struct {
	env    string // libpq's variable
	use    use
	plain  []string // values that ask for nothing that walrelay does not do anyway
	remedy string   // of a value that is refused
}

type use uint8

const (
	honoured use = iota // by the commands, from TakeClientKeys
	ignored             // with a warning
	refused             // what it asks for is not done, and security depends on it
)

var clientKeys = map[string]clientKey{
	KeyHostAddr:        {env: "PGHOSTADDR"},
	KeyTLSMin:          {env: "PGSSLMINPROTOCOLVERSION"},
	KeyTLSMax:          {env: "PGSSLMAXPROTOCOLVERSION"},
	KeyApplicationName: {},

	"keepalives":          {use: ignored, plain: []string{"1"}},
	"keepalives_idle":     {use: ignored, plain: []string{"0"}},
	"keepalives_interval": {use: ignored, plain: []string{"0"}},
	"keepalives_count":    {use: ignored, plain: []string{"0"}},
	"load_balance_hosts":  {env: "PGLOADBALANCEHOSTS", use: ignored, plain: []string{"disable"}},
	"sslcompression":      {env: "PGSSLCOMPRESSION", use: ignored, plain: []string{"0"}},
	"sslkeylogfile":       {use: ignored},
	"gsslib":              {env: "PGGSSLIB", use: ignored},
	"gssdelegation":       {env: "PGGSSDELEGATION", use: ignored, plain: []string{"0"}},
	"replication":         {use: ignored}, // walrelay chooses itself
	"authtype":            {use: ignored},
	"tty":                 {use: ignored},

	"gssencmode":  {env: "PGGSSENCMODE", use: refused, plain: []string{"disable", "prefer"}, remedy: "walrelay encrypts with TLS only: leave it out, and set sslmode=verify-full"},
	"sslcrl":      {env: "PGSSLCRL", use: refused, remedy: "walrelay reads no revocation lists: leave it out, and keep only the authorities that you trust in sslrootcert"},
	"sslcrldir":   {env: "PGSSLCRLDIR", use: refused, remedy: "walrelay reads no revocation lists: leave it out, and keep only the authorities that you trust in sslrootcert"},
	"requirepeer": {env: "PGREQUIREPEER", use: refused, remedy: "walrelay does not look who owns a socket: leave it out, and keep the folder of the socket to its owner, or connect by TCP with sslmode=verify-full"},
	"requiressl":  {env: "PGREQUIRESSL", use: refused, plain: []string{"0"}, remedy: "write sslmode=require"},

	"scram_client_key":    {use: refused, remedy: "give the password: in the connection string, in PGPASSWORD or in the password file"},
	"scram_server_key":    {use: refused, remedy: "give the password: in the connection string, in PGPASSWORD or in the password file"},
	"oauth_issuer":        {use: refused, remedy: oauthRemedy},
	"oauth_client_id":     {use: refused, remedy: oauthRemedy},
	"oauth_client_secret": {use: refused, remedy: oauthRemedy},
	"oauth_scope":         {use: refused, remedy: oauthRemedy},
}

const oauthRemedy = "walrelay does not log in with OAuth: use a password or a client certificate"

// Keywords of libpq that pgx does not know and the commands honour.
const (
	KeyHostAddr        = "hostaddr"                  // addresses of the hosts, with commas between
	KeyTLSMin          = "ssl_min_protocol_version"  // such as TLSv1.2
	KeyTLSMax          = "ssl_max_protocol_version"  // the same
	KeyApplicationName = "fallback_application_name" // of a session without another
)

// Both libpq's keyword and a setting of the server have this name. What a URL
// means is libpq's, and the server's would be the same for its end of the connection.
const bothEndsKey = "tcp_user_timeout"

// tlsVersions are the values of KeyTLSMin and KeyTLSMax, in rising order.
var tlsVersions = []string{"tlsv1", "tlsv1.1", "tlsv1.2", "tlsv1.3"}

// pgxKeys are the keywords that pgx takes out of the settings.
var pgxKeys = []string{
	"host", "port", "dbname", "user", "password", "passfile", "connect_timeout", "sslmode", "sslkey", "sslcert", "sslcertmode",
	"sslrootcert", "sslnegotiation", "sslpassword", "sslsni", "krbspn", "krbsrvname", "target_session_attrs", "service", "servicefile",
	"min_protocol_version", "max_protocol_version", "channel_binding", "require_auth",
}

// otherNames are how drivers and ORMs spell what libpq has another name for.
var otherNames = map[string]string{
	"schema": "search_path", "currentschema": "search_path", "current_schema": "search_path", "schemas": "search_path",
	"ssl": "sslmode", "sslaccept": "sslmode", "tls": "sslmode", "ssl_mode": "sslmode", "usessl": "sslmode", "sslidentity": "sslcert and sslkey",
	"username": "user", "userid": "user", "pass": "password", "passwd": "password", "pwd": "password",
	"server": "host", "hostname": "host", "db": "dbname", "database_name": "dbname", "databasename": "dbname",
	"encoding": "client_encoding", "charset": "client_encoding", "timeout": "connect_timeout", "connection_timeout": "connect_timeout",
	"connecttimeout": "connect_timeout", "logintimeout": "connect_timeout", "applicationname": "application_name",
	"targetservertype": "target_session_attrs", "sslfactory": "sslmode", "channelbinding": "channel_binding",
}

// ofDrivers are settings of connection pools and drivers, which no server and
// no libpq knows.
var ofDrivers = regexp.MustCompile(`(?i)^(pgbouncer|pool|pool_.*|.*_pool|.*poolsize|pool[A-Z].*|(max|min|idle|open).*conn.*|connection_?limit|.*cache.*|` +
	`prepare.*|prepared_.*|binary_parameters|socket_?timeout|simple_protocol|default_query_exec_mode|reconnect.*|retry.*|loglevel|tcpkeepalive|keep_?alive|engine)$`)

// TakeClientKeys removes the keywords of libpq from the settings that are to be
// sent to the server, and returns them by their names in lower case.
func TakeClientKeys(params map[string]string) map[string]string {
	taken := map[string]string{}
	for k, v := range params {
		name := strings.ToLower(k)
		if _, ok := clientKeys[name]; ok || name == bothEndsKey {
			taken[name] = v
			delete(params, k)
		}
	}
	return taken
}

// judgeKeys judges the settings that pgx would send to the server. It does not
// name keywords of which hidden says that they may be a piece of a password.
func judgeKeys(params map[string]string, hidden func(string) bool) (warning string, mistakes []*mistake) {
	var useless []string
	for _, key := range slices.Sorted(maps.Keys(params)) {
		name, value := strings.ToLower(key), params[key]
		k, ours := clientKeys[name]
		switch {
		case name == bothEndsKey:
			if value != "" && value != "0" {
				useless = append(useless, name)
			}
		case ours && (value == "" || slices.Contains(k.plain, value)):
		case ours && k.use == ignored:
			useless = append(useless, name)
		case ours && k.use == refused:
			mistakes = append(mistakes, &mistake{fmt.Sprintf("the connection string sets %s, which walrelay cannot do", name), k.remedy})
		case ours || name == "options" || isServerSetting(name):
		case hidden(key):
			mistakes = append(mistakes, &mistake{
				"the connection string has an unknown keyword after its password, which may be a part of it",
				"put the password in single quotes, in a URL percent-encode it (& is %26), or set PGPASSWORD; if it is a keyword, put it before the password to see its name",
			})
		default:
			mistakes = append(mistakes, &mistake{fmt.Sprintf("the connection string has the unknown keyword %q", key), keywordRemedy(name)})
		}
	}
	if m := judgeTLS(params); m != nil {
		mistakes = append(mistakes, m)
	}
	if len(useless) > 0 {
		warning = "keywords of the connection string without effect in walrelay: " + strings.Join(useless, ", ")
	}
	return warning, mistakes
}

func judgeTLS(params map[string]string) *mistake {
	lowest, highest := 0, len(tlsVersions)-1
	for key, at := range map[string]*int{KeyTLSMin: &lowest, KeyTLSMax: &highest} {
		v := strings.ToLower(params[key])
		if v == "" {
			continue
		}
		if *at = slices.Index(tlsVersions, v); *at < 0 {
			return &mistake{"the connection string sets " + key + " to an unknown version", "write TLSv1.2 or TLSv1.3"}
		}
	}
	if lowest > highest {
		return &mistake{"the connection string sets " + KeyTLSMin + " above " + KeyTLSMax, "allow at least one version, such as TLSv1.3"}
	}
	return nil
}

// keywordRemedy finds what was meant by an unknown keyword, in lower case.
func keywordRemedy(name string) string {
	if to, ok := otherNames[name]; ok {
		return "Postgres calls it " + to
	}
	if ofDrivers.MatchString(name) {
		return "leave it out: it is for a connection pool or another driver"
	}
	known := slices.Concat(pgxKeys, slices.Sorted(maps.Keys(clientKeys)), serverSettings)
	if near := Nearest(name, known); near != "" {
		return "did you mean " + near + "?"
	}
	return "leave it out; a setting of the server goes in options='-c name=value'"
}
