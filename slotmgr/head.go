package slotmgr

import "strings"

const headLength = 60

// queryHead is the beginning of a query with comments left out and every
// literal replaced, since those may be anybody's secrets.
func queryHead(q string) string {
	var out []byte
	for i := 0; i < len(q) && len(out) < 4*headLength; {
		rest := q[i:]
		c := q[i]
		switch {
		case c == '\'':
			i += literal(rest, escapes(out))
			out = append(out, '?')
		case c == '"':
			n := quoted(rest, '"', false)
			out = append(out, rest[:n]...)
			i += n
		case c == '$' && dollarTag(rest) != "":
			tag := dollarTag(rest)
			end := strings.Index(rest[len(tag):], tag)
			if end < 0 {
				i = len(q)
			} else {
				i += end + 2*len(tag)
			}
			out = append(out, '?')
		case strings.HasPrefix(rest, "--"):
			end := strings.IndexByte(rest, '\n')
			if end < 0 {
				end = len(rest)
			}
			i += end
		case strings.HasPrefix(rest, "/*"):
			i += comment(rest)
			out = append(out, ' ')
		case digit(c) && (len(out) == 0 || !word(out[len(out)-1]) && out[len(out)-1] != '$'): // a number, and not a parameter
			n := 1
			for n < len(rest) && (word(rest[n]) || rest[n] == '.') {
				n++
			}
			i += n
			out = append(out, '?')
		default:
			out = append(out, c)
			i++
		}
	}
	return shorten(string(out))
}

// literal is the length of the string constant at the start of s.
func literal(s string, escapes bool) int { return quoted(s, '\'', escapes) }

// quoted is the length of what s begins with, up to the closing mark; a doubled
// mark stands for itself.
func quoted(s string, mark byte, escapes bool) int {
	for i := 1; i < len(s); i++ {
		switch {
		case escapes && s[i] == '\\':
			i++
		case s[i] == mark && i+1 < len(s) && s[i+1] == mark:
			i++
		case s[i] == mark:
			return i + 1
		}
	}
	return len(s)
}

// escapes reports whether a string constant after out takes backslashes: E'…'.
func escapes(out []byte) bool {
	n := len(out)
	return n > 0 && (out[n-1] == 'E' || out[n-1] == 'e') && (n == 1 || !word(out[n-2]))
}

// dollarTag is the opening of a dollar-quoted constant, such as $$ or $body$.
func dollarTag(s string) string {
	for i := 1; i < len(s); i++ {
		if s[i] == '$' {
			return s[:i+1]
		}
		if !word(s[i]) || i == 1 && digit(s[i]) {
			return ""
		}
	}
	return ""
}

// comment is the length of the block comment at the start of s; they nest.
func comment(s string) int {
	depth := 0
	for i := 0; i+1 < len(s); i++ {
		switch s[i : i+2] {
		case "/*":
			depth++
			i++
		case "*/":
			depth--
			i++
		}
		if depth == 0 {
			return i + 1
		}
	}
	return len(s)
}

func digit(c byte) bool { return c >= '0' && c <= '9' }

func word(c byte) bool {
	return digit(c) || c == '_' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= 0x80
}

// shorten puts s on one line of at most headLength characters.
func shorten(s string) string {
	s = strings.Join(strings.Fields(strings.ToValidUTF8(s, "?")), " ")
	if r := []rune(s); len(r) > headLength {
		return string(r[:headLength-1]) + "…"
	}
	return s
}
