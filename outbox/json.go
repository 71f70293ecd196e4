package outbox

import (
	"bytes"
	"encoding/json"
)

// object walks the members of a JSON object without changing a byte of them.
// It relies on json.Valid having accepted the text.
type object struct {
	rest       []byte
	key, value []byte // raw: the key with its quotes
}

// members starts a walk; false when raw is no JSON object.
func members(raw []byte) (object, bool) {
	if !json.Valid(raw) {
		return object{}, false
	}
	raw = skipSpace(raw)
	if raw[0] != '{' {
		return object{}, false
	}
	return object{rest: raw[1:]}, true
}

func (o *object) next() bool {
	b := skipSpace(o.rest)
	if b[0] == ',' {
		b = skipSpace(b[1:])
	}
	if b[0] == '}' {
		o.rest = b
		return false
	}
	n := valueEnd(b)
	o.key = b[:n]
	b = skipSpace(b[n:])
	b = skipSpace(b[1:]) // the colon
	n = valueEnd(b)
	o.value, o.rest = b[:n], b[n:]
	return true
}

func space(c byte) bool { return c == ' ' || c == '\t' || c == '\n' || c == '\r' }

func skipSpace(b []byte) []byte {
	for len(b) > 0 && space(b[0]) {
		b = b[1:]
	}
	return b
}

// valueEnd is the length of the value that b begins with.
func valueEnd(b []byte) int {
	depth := 0
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '"':
			for i++; b[i] != '"'; i++ {
				if b[i] == '\\' {
					i++
				}
			}
			if depth == 0 {
				return i + 1
			}
		case '{', '[':
			depth++
		case '}', ']':
			if depth == 0 {
				return i // ends a number or word before it
			}
			if depth--; depth == 0 {
				return i + 1
			}
		case ',', ' ', '\t', '\n', '\r':
			if depth == 0 {
				return i
			}
		}
	}
	return len(b)
}

// unquote is the text of a raw JSON string; it aliases raw when nothing in it is escaped.
func unquote(raw []byte) []byte {
	in := raw[1 : len(raw)-1]
	if bytes.IndexByte(in, '\\') < 0 {
		return in
	}
	var s string
	// Cannot fail on a valid string.
	_ = json.Unmarshal(raw, &s)
	return []byte(s)
}

func null(raw []byte) bool { return raw[0] == 'n' }

// appendFlat appends a member's value as a header has it: strings as their
// text, everything else as compact JSON.
func appendFlat(b, raw []byte) []byte {
	if raw[0] == '"' {
		return append(b, unquote(raw)...)
	}
	for i := 0; i < len(raw); i++ {
		if space(raw[i]) {
			continue
		}
		if raw[i] != '"' {
			b = append(b, raw[i])
			continue
		}
		n := valueEnd(raw[i:])
		b = append(b, raw[i:i+n]...)
		i += n - 1
	}
	return b
}
