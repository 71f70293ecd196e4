package outbox

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"time"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

// controls reports whether a header of that name would control the server, or
// is one that the relay sets.
func controls(name []byte) bool {
	return hasFoldPrefix(name, "Nats-") || hasFoldPrefix(name, "Outbox-") ||
		fold(name, "Status") || fold(name, "Description") || fold(name, "KV-Operation")
}

func fold(b []byte, s string) bool { return len(b) == len(s) && hasFoldPrefix(b, s) }

func hasFoldPrefix(b []byte, prefix string) bool {
	if len(b) < len(prefix) {
		return false
	}
	for i := range len(prefix) {
		if lower(b[i]) != lower(prefix[i]) {
			return false
		}
	}
	return true
}

func lower(c byte) byte {
	if c >= 'A' && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// badName reports whether no header can have that name: ADR-4 of NATS asks
// for printable ASCII without the colon.
func badName(name []byte) bool {
	for _, c := range name {
		if c <= ' ' || c >= 0x7f || c == ':' {
			return true
		}
	}
	return len(name) == 0
}

// badValue reports whether no header can have that value.
func badValue(v []byte) bool {
	const ones, tops = 0x0101010101010101, 0x8080808080808080
	for len(v) >= 8 {
		// Whether one of eight bytes is below '\r'+1, which is rare.
		if w := binary.LittleEndian.Uint64(v); (w-ones*('\r'+1))&^w&tops != 0 {
			break
		}
		v = v[8:]
	}
	for _, c := range v {
		if c == '\r' || c == '\n' || c == 0 {
			return true
		}
	}
	return false
}

// uuidText reports whether s has the form of a uuid.
func uuidText(s []byte) bool {
	if len(s) != 36 {
		return false
	}
	for i, c := range s {
		switch i {
		case 8, 13, 18, 23:
			if c != '-' {
				return false
			}
		default:
			if !(c >= '0' && c <= '9' || lower(c) >= 'a' && lower(c) <= 'f') {
				return false
			}
		}
	}
	return true
}

// appendBytea appends the bytes of bytea's text form, hex or escape; false
// when it is neither.
func appendBytea(b, s []byte) ([]byte, bool) {
	if bytes.HasPrefix(s, []byte(`\x`)) {
		b, err := hex.AppendDecode(b, s[2:])
		return b, err == nil
	}
	for i := 0; i < len(s); i++ {
		if s[i] != '\\' {
			b = append(b, s[i])
			continue
		}
		switch rest := s[i+1:]; {
		case len(rest) > 0 && rest[0] == '\\':
			b = append(b, '\\')
			i++
		case len(rest) >= 3 && rest[0] >= '0' && rest[0] <= '3' && octal(rest[1]) && octal(rest[2]):
			b = append(b, (rest[0]-'0')<<6|(rest[1]-'0')<<3|(rest[2]-'0'))
			i += 3
		default:
			return b, false
		}
	}
	return b, true
}

func octal(c byte) bool { return c >= '0' && c <= '7' }

// appendTime appends a timestamp as RFC 3339 in UTC. It reads what Postgres
// writes with datestyle ISO, and RFC 3339; without a zone it is UTC. False for
// anything else: infinity, years that RFC 3339 cannot write.
func appendTime(b, s []byte) ([]byte, bool) {
	if len(s) < 19 || s[4] != '-' || s[7] != '-' || s[10] != ' ' && s[10] != 'T' || s[13] != ':' || s[16] != ':' {
		return b, false
	}
	century, year, month, day := two(s, 0), two(s, 2), two(s, 5), two(s, 8)
	hour, minute, second := two(s, 11), two(s, 14), two(s, 17)
	if century < 0 || year < 0 || hour < 0 || hour > 23 || minute < 0 || minute > 59 || second < 0 || second > 59 {
		return b, false
	}
	if year += 100 * century; year < 1 || month < 1 || month > 12 || day < 1 || day > daysIn(year, month) {
		return b, false
	}
	rest := s[19:]
	nanos := 0
	if len(rest) > 0 && rest[0] == '.' {
		n, unit := 1, 100_000_000
		for ; n < len(rest) && rest[n] >= '0' && rest[n] <= '9'; n++ {
			nanos += int(rest[n]-'0') * unit
			unit /= 10
		}
		if n == 1 || n > 10 {
			return b, false
		}
		rest = rest[n:]
	}
	offset, ok := zone(rest)
	if !ok {
		return b, false
	}
	if offset == 0 {
		// What Postgres writes nearly always: no calculation is needed to copy it.
		text := s[:len(s)-len(rest)]
		if len(text) > 19 {
			text = bytes.TrimSuffix(bytes.TrimRight(text, "0"), []byte("."))
		}
		b = append(b, text...)
		b[len(b)-len(text)+10] = 'T'
		return append(b, 'Z'), true
	}
	t := time.Date(year, time.Month(month), day, hour, minute, second, nanos, time.UTC).Add(-offset)
	if t.Year() < 1 || t.Year() > 9999 {
		return b, false
	}
	return t.AppendFormat(b, time.RFC3339Nano), true
}

func daysIn(year, month int) int {
	switch month {
	case 2:
		if year%4 == 0 && (year%100 != 0 || year%400 == 0) {
			return 29
		}
		return 28
	case 4, 6, 9, 11:
		return 30
	}
	return 31
}

// zone reads +HH, +HH:MM or +HH:MM:SS, Z, or nothing.
func zone(s []byte) (time.Duration, bool) {
	if len(s) == 0 || len(s) == 1 && s[0] == 'Z' {
		return 0, true
	}
	if s[0] != '+' && s[0] != '-' {
		return 0, false
	}
	west := s[0] == '-'
	var d time.Duration
	unit := time.Hour
	for s = s[1:]; ; s = s[1:] {
		if len(s) < 2 || unit < time.Second {
			return 0, false
		}
		n := two(s, 0)
		if n < 0 || n > 59 {
			return 0, false
		}
		d += time.Duration(n) * unit
		unit /= 60
		if s = s[2:]; len(s) == 0 {
			if west {
				d = -d
			}
			return d, true
		}
		if s[0] != ':' {
			return 0, false
		}
	}
}

// two is the number of two digits at i, negative when they are none.
func two(s []byte, i int) int {
	a, b := s[i]-'0', s[i+1]-'0'
	if a > 9 || b > 9 {
		return -1
	}
	return int(a)*10 + int(b)
}

// The content types of payloads.
var (
	contentJSON  = []byte("application/json")
	contentBytes = []byte("application/octet-stream")
	contentText  = []byte("text/plain; charset=utf-8")
)

// payloadType is the content type of a payload column; nil when its text form
// is not known to be the payload.
func payloadType(oid uint32) []byte {
	switch oid {
	case event.TypeJSON, event.TypeJSONB:
		return contentJSON
	case event.TypeBytea:
		return contentBytes
	case event.TypeText, event.TypeVarchar, event.TypeBPChar:
		return contentText
	}
	return nil
}

// shorten shortens what a Detail quotes.
func shorten(s []byte) string {
	const limit = 64
	if len(s) <= limit {
		return string(s)
	}
	n := limit
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return string(s[:n]) + "…"
}
