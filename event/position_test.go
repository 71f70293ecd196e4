package event

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

func TestPositionsSortInDeliveryOrder(t *testing.T) {
	// A transaction that commits later comes later, though its rows were
	// written first; a later timeline comes later, though its LSNs overlap.
	sorted := []Position{
		{},
		{Timeline: 1, Commit: 100, Change: 50},
		{Timeline: 1, Commit: 100, Change: 60},
		{Timeline: 1, Commit: 100, Change: 60, N: 1},
		{Timeline: 1, Commit: 100, Change: 60, N: 10},
		{Timeline: 1, Commit: 100, Change: 99},
		{Timeline: 1, Commit: 200, Change: 10},
		{Timeline: 1, Commit: 1 << 40, Change: 10},
		{Timeline: 2, Commit: 150, Change: 149},
		{Timeline: 10, Commit: 1},
	}
	for i, p := range sorted {
		if p.IsZero() != (i == 0) {
			t.Errorf("%s: IsZero is %v", p, p.IsZero())
		}
		for j, q := range sorted {
			want := 0
			switch {
			case i < j:
				want = -1
			case i > j:
				want = 1
			}
			if got := p.Compare(q); got != want {
				t.Errorf("%s against %s: got %d, want %d", p, q, got, want)
			}
		}
	}
	shuffled := slices.Clone(sorted)
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	slices.SortFunc(shuffled, Position.Compare)
	if !slices.Equal(shuffled, sorted) {
		t.Errorf("sorted to %v", shuffled)
	}
}

func TestPositionText(t *testing.T) {
	p := Position{Timeline: 1, Commit: 0x16B3748, Change: 0x16B3700}
	if got := p.String(); got != "1:0/16B3748:0/16B3700:0" {
		t.Errorf("got %s", got)
	}
	all := Position{Timeline: 1<<32 - 1, Commit: 1<<64 - 1, Change: 1<<64 - 1, N: 1<<32 - 1}
	if got, err := ParsePosition(all.String()); err != nil || got != all {
		t.Errorf("got %s, %v", got, err)
	}
	if got := len(all.String()); got > 64 {
		t.Errorf("%d bytes", got)
	}
	for _, s := range []string{
		"", ":::", "1:0/1:0/1", "1:0/1:0/1:0:0", "x:0/1:0/1:0", "1:01:0/1:0", "1:0/1:x:0", "1:0/1:0/1:-1",
		"4294967296:0/1:0/1:0", "1:0/1:0/1:4294967296", "0x1:0/1:0/1:0", " 1:0/1:0/1:0",
	} {
		if got, err := ParsePosition(s); err == nil || !got.IsZero() || !strings.Contains(err.Error(), "want timeline:commit:change:row") {
			t.Errorf("%q: got %s, %v", s, got, err)
		}
	}
}

// FuzzPosition checks that what can be read is written and read again as the
// same, and that text never makes it panic.
func FuzzPosition(f *testing.F) {
	f.Add("1:0/16B3748:0/16B3700:0")
	f.Add("4294967295:FFFFFFFF/FFFFFFFF:0/0:4294967295")
	f.Add("01:00/0a:0/0:007")
	f.Add("1:0/0:0/0")
	f.Fuzz(func(t *testing.T, s string) {
		p, err := ParsePosition(s)
		if err != nil {
			if !p.IsZero() {
				t.Errorf("%q: %s beside an error", s, p)
			}
			return
		}
		q, err := ParsePosition(p.String())
		if err != nil || q != p || p.Compare(q) != 0 {
			t.Errorf("%q: got %s, then %s, %v", s, p, q, err)
		}
	})
}

func FuzzLSN(f *testing.F) {
	f.Add("16/B374D848", uint64(1))
	f.Add("0/0", uint64(0))
	f.Fuzz(func(t *testing.T, s string, v uint64) {
		if l, err := ParseLSN(s); err == nil {
			if again, err := ParseLSN(l.String()); err != nil || again != l {
				t.Errorf("%q: got %s, then %s, %v", s, l, again, err)
			}
		}
		if l, err := ParseLSN(LSN(v).String()); err != nil || uint64(l) != v {
			t.Errorf("%#x: got %s, %v", v, l, err)
		}
	})
}
