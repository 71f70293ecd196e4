package event

import (
	"errors"
	"fmt"
)

// Class says what a failure asks for.
type Class uint8

const (
	// Transient failures pass: try again.
	Transient Class = iota
	// Unexpected failures have no better class; exit code 1.
	Unexpected
	// Usage is a mistake in flags or configuration; exit code 2.
	Usage
	// Precondition is something an operator must mend first; exit code 3.
	Precondition
	// Halted means that a poison event stopped the relay, as configured; exit code 4.
	Halted
	// Lost means a slot lost or a gap between the log and the stream; exit code 5.
	Lost
	// Undrained means that events were in flight when the drain timeout passed; exit code 6.
	Undrained
)

// Failure is an error with its class and a hint that says what to do.
type Failure struct {
	Class Class
	Err   error
	Hint  string // one sentence or command for a human; may be empty
}

// Fail makes a Failure. The message is formatted as fmt.Errorf does.
func Fail(class Class, hint, format string, args ...any) error {
	return &Failure{Class: class, Err: fmt.Errorf(format, args...), Hint: hint}
}

func (f *Failure) Error() string { return f.Err.Error() }

// Unwrap returns the cause.
func (f *Failure) Unwrap() error { return f.Err }

// ClassOf returns the class of the outermost Failure in err's chain;
// Transient when there is none, since most failures of a network are.
func ClassOf(err error) Class {
	var f *Failure
	if errors.As(err, &f) {
		return f.Class
	}
	return Transient
}

// HintOf returns the outermost hint in err's chain, the first of joined errors
// that has one, or "".
func HintOf(err error) string {
	switch e := err.(type) { //nolint:errorlint // it unwraps by itself, to see all of the joined errors
	case *Failure:
		if e.Hint != "" {
			return e.Hint
		}
		return HintOf(e.Err)
	case interface{ Unwrap() error }:
		return HintOf(e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			if hint := HintOf(err); hint != "" {
				return hint
			}
		}
	}
	return ""
}

// Poison says why an event can never be stored as it is.
type Poison struct {
	Reason Reason
	Detail string // names the value that is wrong, never the payload
}

// Reason is the bounded vocabulary of poison, used as a metric label.
type Reason string

// The reasons for which an event is parked.
const (
	ReasonTooLarge      Reason = "too_large"      // larger than the server or the stream takes
	ReasonHeaders       Reason = "headers"        // header block over the limit, or not valid
	ReasonSubject       Reason = "subject"        // subject invalid or not bound to the stream
	ReasonContent       Reason = "content"        // row or message cannot be mapped
	ReasonNullID        Reason = "null_id"        // the id is NULL
	ReasonDuplicateID   Reason = "duplicate_id"   // another row used the id
	ReasonNotAuthorized Reason = "not_authorized" // publishing to the subject is not permitted
	ReasonRefused       Reason = "refused"        // the server refused it for another reason that will not pass
	ReasonAggregate     Reason = "aggregate"      // an earlier event of its aggregate is parked
)

// ReasonReplayed is for an event that is refused because it is stored already:
// another replay was first. Nothing is parked for it.
const ReasonReplayed Reason = "replayed"

// Reasons are those for which events are parked.
var Reasons = []Reason{
	ReasonTooLarge, ReasonHeaders, ReasonSubject, ReasonContent, ReasonNullID, ReasonDuplicateID, ReasonNotAuthorized, ReasonRefused, ReasonAggregate,
}

func (p *Poison) Error() string { return string(p.Reason) + ": " + p.Detail }
