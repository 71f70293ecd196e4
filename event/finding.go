package event

import (
	"slices"
	"strings"
)

// Level says how bad a finding is.
type Level uint8

const (
	// OK needs nothing.
	OK Level = iota
	// WARN works, but breaks or weakens something an operator may count on.
	WARN
	// FAIL keeps the relay from starting.
	FAIL
)

func (l Level) String() string { return [...]string{"OK", "WARN", "FAIL"}[l] }

// MarshalText implements encoding.TextMarshaler.
func (l Level) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// Finding is the result of one check.
type Finding struct {
	Name   string `json:"name"` // of the check: one word, the same for every server
	Level  Level  `json:"level"`
	Detail string `json:"detail"`           // a sentence with the value that was found
	Remedy string `json:"remedy,omitempty"` // a command, SQL or a sentence; empty when OK

	Class Class `json:"-"` // of a FAIL; Transient, the zero, counts as Precondition
}

// Findings are results in the order of the checks.
type Findings []Finding

// Err joins the findings that FAIL into one failure; nil when there is none.
// Its class is Lost when one of them is, else Precondition. The hint has the
// remedies, one a line.
func (fs Findings) Err() error {
	class := Precondition
	var details, remedies []string
	for _, f := range fs {
		if f.Level != FAIL {
			continue
		}
		if f.Class == Lost {
			class = Lost
		}
		details = append(details, f.Detail)
		if f.Remedy != "" && !slices.Contains(remedies, f.Remedy) {
			remedies = append(remedies, f.Remedy)
		}
	}
	if len(details) == 0 {
		return nil
	}
	return Fail(class, strings.Join(remedies, "\n"), "%s", strings.Join(details, "; "))
}
