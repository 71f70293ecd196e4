package config

import "strings"

// Error is all the mistakes of one configuration.
type Error struct{ Problems []Problem }

// Problem is one mistake. It never quotes a secret.
type Problem struct {
	Source  string // the flag, the variable, or file:line and key
	Message string // what is wrong
	Remedy  string // what to do; may be empty
}

func (p Problem) String() string {
	if p.Source == "" {
		return p.Message
	}
	return p.Source + ": " + p.Message
}

// Error gives the mistakes one a line.
func (e *Error) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// mistake is a Problem that does not know its source yet.
type mistake struct{ msg, remedy string }

func (m *mistake) Error() string { return m.msg }
