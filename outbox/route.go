package outbox

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Route makes the subject from one column by a regular expression, as
// Debezium's outbox router makes topics: the expression has to match the whole
// value, and the first match is replaced by the subject template, in which $1
// and ${name} are its groups.
type Route struct {
	By    string // the role of the column: aggregate_type (also ""), aggregate_id or event_type
	Regex string // Go's syntax, RE2; groups are named (?<name>…) or (?P<name>…)
}

// maxRouted bounds the values whose match is kept.
const maxRouted = 1024

// route is a compiled Route.
type route struct {
	by    string
	first *regexp.Regexp
	whole *regexp.Regexp
	known map[string][]int // value → groups of the first match; nil when the whole does not match
}

// compileRoute returns nil for the zero Route.
func compileRoute(r Route) (*route, error) {
	if r == (Route{}) {
		return nil, nil
	}
	by := firstOf(r.By, roleAggregateType)
	var errs []error
	switch by {
	case roleAggregateType, roleAggregateID, roleEventType:
	default:
		errs = append(errs, fmt.Errorf("it cannot go by %q: want %s, %s or %s", by, roleAggregateType, roleAggregateID, roleEventType))
	}
	if r.Regex == "" {
		errs = append(errs, errors.New("it has no regular expression"))
	}
	first, err := regexp.Compile(r.Regex)
	if err != nil {
		errs = append(errs, fmt.Errorf("%w; look-around, back-references and possessive quantifiers of Java are not known", err))
	}
	if len(errs) > 0 {
		return nil, fmt.Errorf("route: %w", errors.Join(errs...))
	}
	whole, err := regexp.Compile(`\A(?:` + r.Regex + `)\z`)
	if err != nil {
		return nil, fmt.Errorf("route: %w", err)
	}
	return &route{by: by, first: first, whole: whole, known: map[string][]int{}}, nil
}

// match returns the groups of the first match; false when the value as a whole
// does not match.
func (r *route) match(v []byte) ([]int, bool) {
	if groups, ok := r.known[string(v)]; ok {
		return groups, groups != nil
	}
	var groups []int
	if r.whole.Match(v) {
		groups = r.first.FindSubmatchIndex(v)
	}
	if len(r.known) < maxRouted && len(v) <= maxSubject {
		r.known[string(v)] = groups
	}
	return groups, groups != nil
}

// reference reads what follows a $ in a template: the number of a group, of
// which as many digits count as name one, or a name or number in braces.
func (r *route) reference(s string) (n int, rest string, err error) {
	last := r.first.NumSubexp()
	if inner, ok := strings.CutPrefix(s, "{"); ok {
		name, rest, closed := strings.Cut(inner, "}")
		if !closed {
			return 0, "", errors.New("a ${ has no }")
		}
		n, err := strconv.Atoi(name)
		if err != nil {
			n = r.first.SubexpIndex(name)
		}
		if n < 0 || n > last || name == "" {
			return 0, rest, fmt.Errorf("the route's expression has no group ${%s}", name)
		}
		return n, rest, nil
	}
	digits := 0
	for digits < len(s) && s[digits] >= '0' && s[digits] <= '9' {
		v := n*10 + int(s[digits]-'0')
		if digits > 0 && v > last {
			break
		}
		n = v
		digits++
	}
	switch {
	case digits == 0:
		return 0, s, errors.New(`a $ names no group of the route: write $1, ${name}, or \$ for the sign itself`)
	case n > last:
		return 0, s[digits:], fmt.Errorf("the route's expression has no group $%d", n)
	}
	return n, s[digits:], nil
}
