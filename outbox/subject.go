package outbox

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

// maxSubject is far below the server's max_control_line (4096 by default),
// which the reply subject and the sizes share with the subject.
const maxSubject = 1024

// maxPartitions is more than any stream has consumers.
const maxPartitions = 1 << 16

const placeholders = "{aggregate_type} {aggregate_id} {event_type} {schema_version} {header:NAME} {partition:N}"

type partKind uint8

const (
	literal partKind = iota
	aggregateType
	aggregateID
	eventType
	schemaVersion
	header
	partition
	group
)

type part struct {
	kind partKind
	text string // literal's text or header's name
	n    uint64 // partitions, or the number of the route's group
}

// role is the column that the placeholder reads.
func (p part) role() string {
	switch p.kind {
	case aggregateType:
		return roleAggregateType
	case aggregateID, partition:
		return roleAggregateID
	case eventType:
		return roleEventType
	case schemaVersion:
		return roleSchemaVersion
	case header:
		return roleHeaders
	}
	return ""
}

// template is a compiled subject template.
type template struct {
	parts []part
	roles []string // of the columns it needs
	route *route   // whose groups it has; nil without
}

// subjectValues is what placeholders are filled with.
type subjectValues struct {
	aggregateType, aggregateID, eventType, schemaVersion []byte
	headers                                              []event.Header

	routed []byte // what the route's expression has matched
	groups []int  // its groups, as regexp has them
}

func compileTemplate(s string) (*template, error) { return compileRouted(s, nil) }

// compileRouted compiles a template in which $1 and ${name} are groups of r,
// and a backslash takes the next character as it is, as in a replacement of
// Debezium's router. A nil r leaves these signs as they are.
func compileRouted(s string, r *route) (*template, error) {
	var errs []error
	t := &template{route: r}
	marks := "{"
	if r != nil {
		marks = `{$\`
		t.roles = append(t.roles, r.by)
	}
	// shape is the template with every placeholder as one harmless byte, to
	// look at its tokens.
	var shape strings.Builder
	add := func(text string) {
		if text == "" {
			return
		}
		if err := checkLiteral(text); err != nil {
			errs = append(errs, err)
		}
		shape.WriteString(text)
		if n := len(t.parts); n > 0 && t.parts[n-1].kind == literal {
			t.parts[n-1].text += text
			return
		}
		t.parts = append(t.parts, part{kind: literal, text: text})
	}
	for rest := s; rest != ""; {
		open := strings.IndexAny(rest, marks)
		if open < 0 {
			add(rest)
			break
		}
		add(rest[:open])
		if rest[open] == '\\' {
			_, n := utf8.DecodeRuneInString(rest[open+1:])
			if n == 0 {
				errs = append(errs, errors.New(`it ends in a \`))
			}
			add(rest[open+1 : open+1+n])
			rest = rest[open+1+n:]
			continue
		}
		if rest[open] == '$' {
			n, tail, err := r.reference(rest[open+1:])
			if err != nil {
				errs = append(errs, err)
			}
			t.parts = append(t.parts, part{kind: group, n: uint64(n)})
			shape.WriteByte('x')
			rest = tail
			continue
		}
		name, tail, closed := strings.Cut(rest[open+1:], "}")
		if !closed {
			errs = append(errs, errors.New("a { has no }"))
			break
		}
		p, err := parsePlaceholder(name)
		if err != nil {
			errs = append(errs, err)
		}
		t.parts = append(t.parts, p)
		if r := p.role(); r != "" && !slices.Contains(t.roles, r) {
			t.roles = append(t.roles, r)
		}
		shape.WriteByte('x')
		rest = tail
	}
	if s == "" {
		errs = append(errs, errors.New("it is empty"))
	} else if slices.Contains(strings.Split(shape.String(), "."), "") {
		errs = append(errs, errors.New("a token between its dots is empty"))
	}
	if strings.HasPrefix(shape.String(), "$") {
		errs = append(errs, errors.New("subjects that begin with $ are the server's"))
	}
	if len(s) > maxSubject {
		errs = append(errs, fmt.Errorf("it is longer than %d bytes", maxSubject))
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("subject template %q: %w", s, errors.Join(errs...))
	}
	return t, nil
}

func checkLiteral(s string) error {
	if strings.ContainsRune(s, '}') {
		return errors.New("a } has no {")
	}
	if !utf8.ValidString(s) {
		return errors.New("it is not UTF-8")
	}
	for _, r := range s {
		switch {
		case r == '%':
			return errors.New("% is kept for encoded values")
		case r == '*' || r == '>' || unicode.IsSpace(r) || unicode.IsControl(r):
			return fmt.Errorf("%q cannot be part of a subject", r)
		}
	}
	return nil
}

func parsePlaceholder(s string) (part, error) {
	name, arg, hasArg := strings.Cut(s, ":")
	kind, plain := map[string]partKind{
		roleAggregateType: aggregateType, roleAggregateID: aggregateID,
		roleEventType: eventType, roleSchemaVersion: schemaVersion,
	}[name]
	switch {
	case plain && !hasArg:
		return part{kind: kind}, nil
	case name == "partition" && hasArg:
		n, err := strconv.ParseUint(arg, 10, 64)
		if err != nil || n < 1 || n > maxPartitions {
			return part{}, fmt.Errorf("{%s}: want a number of partitions from 1 to %d", s, maxPartitions)
		}
		return part{kind: partition, n: n}, nil
	case name == "header" && hasArg:
		if badName([]byte(arg)) {
			return part{}, fmt.Errorf("{%s}: %q cannot be a header's name", s, arg)
		}
		if controls([]byte(arg)) || strings.EqualFold(arg, event.HeaderContentType) {
			return part{}, fmt.Errorf("{%s}: %s is never a header of the event's own", s, arg)
		}
		return part{kind: header, text: arg}, nil
	}
	return part{}, fmt.Errorf("unknown placeholder {%s}: known are %s", s, placeholders)
}

// append appends the subject to b; false when it is too long.
func (t *template) append(b []byte, v *subjectValues) ([]byte, bool) {
	w := subjectWriter{b: b, start: len(b), token: len(b)}
	for i := range t.parts {
		p := &t.parts[i]
		switch p.kind {
		case literal:
			w.literal(p.text)
		case partition:
			w.b = strconv.AppendUint(w.b, fnv1a(v.aggregateID)%p.n, 10)
		case aggregateType:
			w.value(v.aggregateType)
		case aggregateID:
			w.value(v.aggregateID)
		case eventType:
			w.value(v.eventType)
		case schemaVersion:
			w.value(v.schemaVersion)
		case header:
			w.value(lastHeader(v.headers, p.text))
		case group:
			if from, to := v.groups[2*p.n], v.groups[2*p.n+1]; from >= 0 {
				w.value(v.routed[from:to])
			}
		}
		if len(w.b)-w.start > maxSubject {
			return w.b, false
		}
	}
	if t.route != nil {
		w.value(v.routed[v.groups[1]:]) // only the first match is replaced
	}
	w.endToken()
	return w.b, len(w.b)-w.start <= maxSubject
}

func lastHeader(hs []event.Header, name string) []byte {
	for i := len(hs) - 1; i >= 0; i-- {
		if hs[i].Name == name {
			return hs[i].Value
		}
	}
	return nil
}

// fnv1a is the 64-bit FNV-1a hash: the same on every platform, and in the
// standard library of most languages.
func fnv1a(b []byte) uint64 {
	h := uint64(14695981039346656037)
	for _, c := range b {
		h ^= uint64(c)
		h *= 1099511628211
	}
	return h
}

// subjectWriter appends text so that no token is empty and no byte is one that
// a subject cannot hold.
type subjectWriter struct {
	b     []byte
	start int // of the subject
	token int // of the current token
}

func (w *subjectWriter) endToken() {
	if len(w.b) == w.token {
		w.b = append(w.b, '%')
	}
}

func (w *subjectWriter) dot() {
	w.endToken()
	w.b = append(w.b, '.')
	w.token = len(w.b)
}

func (w *subjectWriter) escape(c byte) {
	const digits = "0123456789ABCDEF"
	w.b = append(w.b, '%', digits[c>>4], digits[c&15])
}

// literal appends a template's text, in which nothing needs escaping and no
// token between two dots is empty (compileTemplate).
func (w *subjectWriter) literal(s string) {
	switch {
	case s[0] == '.': // ends the token before it, which may have come out empty
		w.dot()
		s = s[1:]
	case s[0] == '$' && len(w.b) == w.start: // after a value that was empty
		w.escape('$')
		s = s[1:]
	}
	if i := strings.LastIndexByte(s, '.'); i >= 0 {
		w.token = len(w.b) + i + 1
	}
	w.b = append(w.b, s...)
}

// asIs are the bytes that a subject takes as they are.
var asIs = func() (p [256]bool) {
	for c := '!'; c < 0x7f; c++ {
		p[c] = !strings.ContainsRune(".*>%", c)
	}
	return p
}()

func (w *subjectWriter) value(v []byte) {
	if len(v) > maxSubject {
		v = v[:maxSubject+1] // enough to be too long
	}
	if len(w.b) == w.start && len(v) > 0 && v[0] == '$' {
		w.escape('$')
		v = v[1:]
	}
	for len(v) > 0 {
		n := 0
		for n < len(v) && asIs[v[n]] {
			n++
		}
		w.b = append(w.b, v[:n]...)
		if v = v[n:]; len(v) > 0 {
			v = v[w.special(v):]
		}
	}
}

// special appends the rune that v begins with, which is not taken as it is, and returns its size in v.
func (w *subjectWriter) special(v []byte) int {
	if v[0] == '.' {
		w.dot()
		return 1
	}
	r, n := utf8.DecodeRune(v)
	if v[0] < utf8.RuneSelf || r == utf8.RuneError && n == 1 || unicode.IsSpace(r) || unicode.IsControl(r) {
		for _, c := range v[:n] {
			w.escape(c)
		}
	} else {
		w.b = append(w.b, v[:n]...)
	}
	return n
}

// filter is the subject filter that covers everything the template yields. A
// value may have dots, so the first token with one ends in a full wildcard.
func (t *template) filter() string {
	var tokens []string
	var token strings.Builder
	one := false // the token has a partition
	for _, p := range t.parts {
		switch p.kind {
		case literal:
			for i, s := range strings.Split(p.text, ".") {
				if i > 0 {
					tokens = append(tokens, filterToken(token.String(), one))
					token.Reset()
					one = false
				}
				token.WriteString(s)
			}
		case partition:
			one = true
		default:
			return strings.Join(append(tokens, ">"), ".")
		}
	}
	if t.route != nil {
		return strings.Join(append(tokens, ">"), ".") // what is behind the match may follow
	}
	return strings.Join(append(tokens, filterToken(token.String(), one)), ".")
}

func filterToken(text string, wildcard bool) string {
	if wildcard {
		return "*"
	}
	return text
}

// disjoint widens filters until none overlaps another, as the subjects of one
// stream must not.
func disjoint(filters []string) []string {
	filters = slices.Clone(filters)
	for i := 0; i < len(filters); i++ {
		for j := i + 1; j < len(filters); j++ {
			if overlap(filters[i], filters[j]) {
				filters[i] = widen(filters[i], filters[j])
				filters = slices.Delete(filters, j, j+1)
				i, j = -1, len(filters) // the wider one may meet others now
			}
		}
	}
	slices.Sort(filters)
	return filters
}

func overlap(a, b string) bool {
	s, t := strings.Split(a, "."), strings.Split(b, ".")
	for i := 0; i < len(s) && i < len(t); i++ {
		if s[i] == ">" || t[i] == ">" {
			return true
		}
		if s[i] != t[i] && s[i] != "*" && t[i] != "*" {
			return false
		}
	}
	return len(s) == len(t)
}

// widen is the filter that covers two that overlap.
func widen(a, b string) string {
	s, t := strings.Split(a, "."), strings.Split(b, ".")
	var out []string
	for i := 0; i < len(s) && i < len(t); i++ {
		switch {
		case s[i] == ">" || t[i] == ">":
			return strings.Join(append(out, ">"), ".")
		case s[i] == t[i]:
			out = append(out, s[i])
		default:
			out = append(out, "*")
		}
	}
	return strings.Join(out, ".")
}
