package event

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Position is the place of one event in the log: strictly increasing in the
// order of delivery, and the same whenever the log is read again.
//
// Change is the LSN of the change's WAL record and N counts the rows that share
// it (COPY puts many rows into one record), so a position does not shift when
// publications or columns change. Timeline is the one that owns Commit, which
// makes positions of two histories different even where their LSNs overlap.
// A logical message is placed at the last byte of its WAL record, because the LSN
// that the server gives it is where the next record may start; one that is not
// transactional uses that as Commit, too.
type Position struct {
	Timeline uint32
	Commit   LSN
	Change   LSN
	N        uint32
}

// Compare orders positions: by timeline, commit, change, then row.
func (p Position) Compare(q Position) int {
	if c := cmp.Compare(p.Timeline, q.Timeline); c != 0 {
		return c
	}
	if c := cmp.Compare(p.Commit, q.Commit); c != 0 {
		return c
	}
	if c := cmp.Compare(p.Change, q.Change); c != 0 {
		return c
	}
	return cmp.Compare(p.N, q.N)
}

// IsZero reports whether p is the position before every event.
func (p Position) IsZero() bool { return p == Position{} }

// String writes the form of the Outbox-Pos header:
// timeline:commit:change:row, such as 1:0/16B3748:0/16B3700:0.
func (p Position) String() string { return string(p.Append(nil)) }

// Append appends the text form to b.
func (p Position) Append(b []byte) []byte {
	b = strconv.AppendUint(b, uint64(p.Timeline), 10)
	b = append(b, ':')
	b = p.Commit.Append(b)
	b = append(b, ':')
	b = p.Change.Append(b)
	b = append(b, ':')
	return strconv.AppendUint(b, uint64(p.N), 10)
}

// ParsePosition reads the form that String writes.
func ParsePosition(s string) (Position, error) {
	bad := func() (Position, error) {
		return Position{}, fmt.Errorf("invalid position %q: want timeline:commit:change:row such as 1:0/16B3748:0/16B3700:0", s)
	}
	parts := strings.Split(s, ":")
	if len(parts) != 4 {
		return bad()
	}
	tl, err1 := strconv.ParseUint(parts[0], 10, 32)
	commit, err2 := ParseLSN(parts[1])
	change, err3 := ParseLSN(parts[2])
	n, err4 := strconv.ParseUint(parts[3], 10, 32)
	if err1 != nil || err2 != nil || err3 != nil || err4 != nil {
		return bad()
	}
	return Position{Timeline: uint32(tl), Commit: commit, Change: change, N: uint32(n)}, nil
}

// MarshalText implements encoding.TextMarshaler.
func (p Position) MarshalText() ([]byte, error) { return p.Append(nil), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Position) UnmarshalText(b []byte) error {
	v, err := ParsePosition(string(b))
	if err == nil {
		*p = v
	}
	return err
}
