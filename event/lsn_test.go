package event

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestLSNIsWrittenAsPostgresWritesIt(t *testing.T) {
	for lsn, want := range map[LSN]string{
		0: "0/0", 1: "0/1", 0xffffffff: "0/FFFFFFFF", 1 << 32: "1/0",
		0x16B374D848: "16/B374D848", 1<<64 - 1: "FFFFFFFF/FFFFFFFF",
	} {
		if got := lsn.String(); got != want {
			t.Errorf("%#x: got %s, want %s", uint64(lsn), got, want)
		}
		if got, err := ParseLSN(want); err != nil || got != lsn {
			t.Errorf("%s: got %#x, %v", want, uint64(got), err)
		}
	}
	if got := string(LSN(255).Append([]byte("at "))); got != "at 0/FF" {
		t.Errorf("got %q", got)
	}
}

func TestParseLSNRefuses(t *testing.T) {
	for _, s := range []string{
		"", "/", "0", "0/", "/0", "0/0/0", "G/0", "0/G", "-1/0", "+1/0", "0x1/0", "0/ 0", " 0/0", "0_1/0",
		"100000000/0", "0/100000000", "1:0",
	} {
		if got, err := ParseLSN(s); err == nil || !strings.Contains(err.Error(), "16/B374D848") {
			t.Errorf("%q: got %s, %v", s, got, err)
		}
	}
	if got, err := ParseLSN("a/0b"); err != nil || got != 0xA0000000B {
		t.Errorf("lower case: got %s, %v", got, err)
	}
}

func TestLSNAndPositionAreTextInJSON(t *testing.T) {
	type both struct {
		At  LSN      `json:"at"`
		Pos Position `json:"pos"`
	}
	in := both{At: 0x16B374D848, Pos: Position{Timeline: 3, Commit: 0x16B374D848, Change: 1 << 32, N: 7}}
	const text = `{"at":"16/B374D848","pos":"3:16/B374D848:1/0:7"}`
	b, err := json.Marshal(in)
	if err != nil || string(b) != text {
		t.Fatalf("got %s, %v, want %s", b, err, text)
	}
	var out both
	if err := json.Unmarshal(b, &out); err != nil || out != in {
		t.Errorf("got %+v, %v", out, err)
	}
	for _, bad := range []string{`{"at":"x"}`, `{"at":1}`, `{"pos":"1:0/0:0/0"}`} {
		kept := in
		if err := json.Unmarshal([]byte(bad), &kept); err == nil || kept != in {
			t.Errorf("%s: got %+v, %v", bad, kept, err)
		}
	}
}
