package config

import (
	"fmt"
	"io"
	"log/slog"
)

const redacted = "xxxxx"

// Secret is text that holds a credential. Every way of printing it gives the
// redacted form; only Reveal gives the text.
type Secret struct {
	value string
	shown string
}

// NewSecret makes a Secret that prints as shown, or as xxxxx when shown is empty.
func NewSecret(value, shown string) Secret {
	if shown == "" && value != "" {
		shown = redacted
	}
	return Secret{value: value, shown: shown}
}

// Reveal returns the text itself.
func (s Secret) Reveal() string { return s.value }

// IsZero reports whether there is no text.
func (s Secret) IsZero() bool { return s.value == "" }

func (s Secret) String() string { return s.shown }

// Format implements fmt.Formatter, because %#v and %d would bypass String.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.shown) }

// MarshalText implements encoding.TextMarshaler.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.shown), nil }

// LogValue implements slog.LogValuer.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.shown) }
