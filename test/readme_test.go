package test

import (
	"os"
	"strings"
	"testing"

	"github.com/walrelay/walrelay/config"
)

// TestHouseReadmeOptions keeps the table of options as the program has it.
// With README=write it writes the table.
func TestHouseReadmeOptions(t *testing.T) {
	const file = "../README.md"
	const begin, end = "<!-- options: written by `make readme` -->\n", "<!-- /options -->"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), begin)
	table, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no lines %q and %q", file, begin, end)
	}
	want := config.Markdown()
	if table == want {
		return
	}
	if os.Getenv("README") != "write" {
		t.Fatal("README.md: the table of options is not the program's: run make readme")
	}
	if err := os.WriteFile(file, []byte(head+begin+want+end+tail), 0o644); err != nil {
		t.Fatal(err)
	}
}
