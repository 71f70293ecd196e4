package config

import (
	"testing"
	"time"
)

func TestParseAge(t *testing.T) {
	for text, want := range map[string]time.Duration{
		"7d": 7 * 24 * time.Hour, "1d12h": 36 * time.Hour, "36h": 36 * time.Hour, "0d": 0, "90m": 90 * time.Minute,
	} {
		if got, err := ParseAge(text); err != nil || got != want {
			t.Errorf("%s: got %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"", "7", "d", "-7d", "7d-1h", "7d+1h", "1h7d", "7D", "999999d", "7d 1h"} {
		if got, err := ParseAge(text); err == nil {
			t.Errorf("%q: got %s", text, got)
		}
	}
}
