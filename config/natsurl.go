package config

import (
	"net/netip"
	"net/url"
	"strconv"
	"strings"
)

// readNATSURLs reads one or more server URLs. The last @ ends a server's
// credentials, whatever they contain.
func readNATSURLs(texts []string) (Secret, error) {
	var values, shown []string
	for _, text := range texts {
		bare := false // the server before had a scheme and no credentials
		for one := range strings.SplitSeq(text, ",") {
			one = strings.TrimSpace(one)
			if one == "" {
				continue
			}
			scheme, creds := strings.Contains(one, "://"), strings.Contains(one, "@")
			if bare && creds && !scheme {
				return Secret{}, &mistake{"a comma in a server's password cannot be told from the next server", "write it as %2C"}
			}
			bare = scheme && !creds
			v, s, err := readNATSURL(one)
			if err != nil {
				return Secret{}, err
			}
			values, shown = append(values, v), append(shown, s)
		}
	}
	if len(values) == 0 {
		return Secret{}, &mistake{"names no server", "write nats://host:4222"}
	}
	return NewSecret(strings.Join(values, ","), strings.Join(shown, ",")), nil
}

func readNATSURL(one string) (value, shown string, err error) {
	scheme, rest, ok := strings.Cut(one, "://")
	if !ok {
		scheme, rest = "nats", one
	}
	scheme = strings.ToLower(scheme)
	switch scheme {
	case "nats", "tls":
	case "ws":
		return "", "", &mistake{"a server URL begins with ws://, but walrelay does not speak WebSocket", "write nats://host:4222, with the server's port for clients"}
	case "wss":
		return "", "", &mistake{"a server URL begins with wss://, but walrelay does not speak WebSocket", "write tls://host:4222, with the server's port for clients"}
	default:
		return "", "", &mistake{"the scheme of a server URL must be nats or tls", "write nats://host:4222, or tls://host:4222"}
	}
	creds, host := "", rest
	if i := strings.LastIndexByte(rest, '@'); i >= 0 {
		user, password, both := strings.Cut(rest[:i], ":")
		if user, err = decodeLiteral(user, "user"); err != nil {
			return "", "", err
		}
		if password, err = decodeLiteral(password, "password"); err != nil {
			return "", "", err
		}
		creds = url.User(user).String() + "@"
		if both {
			creds = url.UserPassword(user, password).String() + "@"
		}
		host = rest[i+1:]
	}
	if host, err = readNATSHost(scheme, host); err != nil {
		return "", "", err
	}
	u, perr := url.Parse(scheme + "://" + creds + host)
	if perr != nil || u.Hostname() == "" {
		return "", "", errNATSURL
	}
	shown = scheme + "://" + host
	if creds != "" {
		shown = scheme + "://" + redacted + "@" + host
	}
	return u.String(), shown, nil
}

var errNATSURL = &mistake{"a server URL cannot be read", "write nats://host:4222, with @ : / # % , of a password percent-encoded, or use --nats-user and WALRELAY_NATS_PASSWORD"}

// readNATSHost checks host and port. It quotes nothing but addresses, since the
// text may be a password with no @ behind it.
func readNATSHost(scheme, host string) (string, error) {
	host = strings.TrimSuffix(host, "/")
	if address, ok := bareIPv6(host); ok {
		return "", &mistake{"an IPv6 address of a server URL is not in brackets", "write " + scheme + "://" + address}
	}
	if strings.ContainsAny(host, "/?#") {
		return "", errNATSURL
	}
	name, port := host, ""
	if i := strings.LastIndexByte(host, ':'); i > strings.LastIndexByte(host, ']') {
		name, port = host[:i], host[i+1:]
	}
	if strings.HasPrefix(name, "[") {
		address, _, _ := strings.Cut(strings.Trim(name, "[]"), "%")
		if a, err := netip.ParseAddr(address); err != nil || !a.Is6() || !strings.HasSuffix(name, "]") {
			return "", &mistake{"the brackets of a server URL do not hold an IPv6 address", "write " + scheme + "://[::1]:4222"}
		}
		if port == "" {
			// nats.go appends its default port behind the brackets, and
			// the relay's own connection goes where nats.go went.
			return name + ":" + defaultNATSPort, nil
		}
	} else if strings.Contains(name, ":") {
		return "", errNATSURL
	}
	if port != "" {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", &mistake{"the port of a server URL is no number from 1 to 65535", "write " + scheme + "://host:" + defaultNATSPort +
				", with @ : / # % , of a password percent-encoded"}
		}
	}
	return name + strings.TrimSuffix(host[len(name):], ":"), nil
}

const defaultNATSPort = "4222"

// bareIPv6 reports whether host is an IPv6 address without brackets, with or
// without a port behind it, and returns how it is written.
func bareIPv6(host string) (string, bool) {
	if strings.Count(host, ":") < 2 {
		return "", false
	}
	i := strings.LastIndexByte(host, ':')
	if n, err := strconv.ParseUint(host[i+1:], 10, 16); err == nil && (n >= 1000 || !validIPv6(host)) && validIPv6(host[:i]) {
		return "[" + host[:i] + "]" + host[i:], true
	}
	if validIPv6(host) {
		return "[" + host + "]:" + defaultNATSPort, true
	}
	return "", false
}

func validIPv6(s string) bool {
	a, err := netip.ParseAddr(s)
	return err == nil && a.Is6() && a.Zone() == ""
}
