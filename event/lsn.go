package event

import (
	"fmt"
	"strconv"
	"strings"
)

// LSN is a byte position in the write-ahead log, written as Postgres writes
// pg_lsn: two hexadecimal numbers with a slash, such as 16/B374D848.
type LSN uint64

// ParseLSN reads the text form of pg_lsn.
func ParseLSN(s string) (LSN, error) {
	hi, lo, ok := strings.Cut(s, "/")
	if ok {
		h, errHi := strconv.ParseUint(hi, 16, 32)
		l, errLo := strconv.ParseUint(lo, 16, 32)
		if errHi == nil && errLo == nil {
			return LSN(h<<32 | l), nil
		}
	}
	return 0, fmt.Errorf("invalid LSN %q: want two hexadecimal numbers such as 16/B374D848", s)
}

// String writes the text form of pg_lsn.
func (l LSN) String() string { return string(l.Append(nil)) }

// Append appends the text form to b.
func (l LSN) Append(b []byte) []byte {
	b = appendHex(b, uint64(l>>32))
	b = append(b, '/')
	return appendHex(b, uint64(uint32(l)))
}

func appendHex(b []byte, v uint64) []byte {
	const digits = "0123456789ABCDEF"
	if v == 0 {
		return append(b, '0')
	}
	var buf [16]byte
	i := len(buf)
	for ; v > 0; v >>= 4 {
		i--
		buf[i] = digits[v&15]
	}
	return append(b, buf[i:]...)
}

// MarshalText implements encoding.TextMarshaler.
func (l LSN) MarshalText() ([]byte, error) { return l.Append(nil), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *LSN) UnmarshalText(b []byte) error {
	v, err := ParseLSN(string(b))
	if err == nil {
		*l = v
	}
	return err
}
