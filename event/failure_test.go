package event

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestOutermostFailureClasses(t *testing.T) {
	inner := Fail(Lost, "inner hint", "slot %q is lost: %w", "orders", io.EOF)
	for _, c := range []struct {
		name  string
		err   error
		class Class
		hint  string
	}{
		{"no error", nil, Transient, ""},
		{"any error", io.EOF, Transient, ""},
		{"a failure", inner, Lost, "inner hint"},
		{"wrapped", fmt.Errorf("open: %w", inner), Lost, "inner hint"},
		{"a failure of a failure", Fail(Precondition, "outer hint", "check: %w", inner), Precondition, "outer hint"},
		{"without a hint of its own", Fail(Halted, "", "stop: %w", fmt.Errorf("open: %w", inner)), Halted, "inner hint"},
		{"without any hint", Fail(Unexpected, "", "stop"), Unexpected, ""},
		{"joined", errors.Join(io.EOF, Fail(Usage, "one", "a"), Fail(Lost, "two", "b")), Usage, "one"},
		{"joined, the first without a hint", fmt.Errorf("options: %w", errors.Join(Fail(Usage, "", "a"), Fail(Usage, "two", "b"))), Usage, "two"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if got := ClassOf(c.err); got != c.class {
				t.Errorf("class %d, want %d", got, c.class)
			}
			if got := HintOf(c.err); got != c.hint {
				t.Errorf("hint %q, want %q", got, c.hint)
			}
		})
	}
}

func TestFailureKeepsItsCause(t *testing.T) {
	err := Fail(Transient, "wait", "read %d: %w", 7, context.DeadlineExceeded)
	if got := err.Error(); got != "read 7: context deadline exceeded" {
		t.Errorf("got %q", got)
	}
	var f *Failure
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &f) || f.Hint != "wait" {
		t.Errorf("got %#v", err)
	}
}

func TestPoisonTellsReasonAndDetail(t *testing.T) {
	var err error = &Poison{Reason: ReasonTooLarge, Detail: "9 bytes, the limit is 8"}
	if got := err.Error(); got != "too_large: 9 bytes, the limit is 8" {
		t.Errorf("got %q", got)
	}
	var p *Poison
	if wrapped := fmt.Errorf("halted: %w", err); !errors.As(wrapped, &p) || p.Reason != ReasonTooLarge {
		t.Errorf("got %v", p)
	}
}
