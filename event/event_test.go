package event

import "testing"

func TestOriginContainsItsOwnHistoryOnly(t *testing.T) {
	promoted := Origin{
		Timeline: 5, WALEnd: 900,
		History: []Switch{{Timeline: 1, End: 100}, {Timeline: 3, End: 500}},
	}
	fresh := Origin{Timeline: 1, WALEnd: 200}
	for _, c := range []struct {
		name   string
		origin Origin
		p      Position
		want   bool
	}{
		{"of the present timeline", promoted, Position{Timeline: 5, Commit: 899}, true},
		{"where the WAL ends", promoted, Position{Timeline: 5, Commit: 900}, false},
		{"past the end of the WAL", promoted, Position{Timeline: 5, Commit: 1000}, false},
		{"before the first switch", promoted, Position{Timeline: 1, Commit: 99, Change: 98}, true},
		{"at the switch", promoted, Position{Timeline: 1, Commit: 100}, false},
		{"behind the switch, so it was left", promoted, Position{Timeline: 1, Commit: 300}, false},
		{"before the second switch", promoted, Position{Timeline: 3, Commit: 499}, true},
		{"behind the second switch", promoted, Position{Timeline: 3, Commit: 501}, false},
		{"a timeline that was never in its history", promoted, Position{Timeline: 2, Commit: 50}, false},
		{"a timeline that is still to come", promoted, Position{Timeline: 6, Commit: 50}, false},
		{"the only timeline", fresh, Position{Timeline: 1, Commit: 199}, true},
		{"past the only timeline", fresh, Position{Timeline: 1, Commit: 200}, false},
		{"later timeline of a restored server", fresh, Position{Timeline: 2, Commit: 10}, false},
		{"no position", fresh, Position{}, false},
	} {
		if got := c.origin.Contains(c.p); got != c.want {
			t.Errorf("%s: %s: got %v, want %v", c.name, c.p, got, c.want)
		}
	}
}

func TestOriginTellsWhereATimelineWasLeft(t *testing.T) {
	o := Origin{Timeline: 5, History: []Switch{{Timeline: 1, End: 100}, {Timeline: 3, End: 500, Restored: true}}}
	for timeline, want := range map[uint32]Switch{
		1: {Timeline: 1, End: 100},
		2: {Timeline: 1, End: 100}, // a sister of 3: both left 1, and this history left it at 100
		3: {Timeline: 3, End: 500, Restored: true},
		4: {Timeline: 3, End: 500, Restored: true},
	} {
		if got, ok := o.Left(timeline); !ok || got != want {
			t.Errorf("timeline %d: got %+v, %v, want %+v", timeline, got, ok, want)
		}
	}
	if got := o.Begin(); got != 500 {
		t.Errorf("begins at %s, want 0/1F4", got)
	}
	first := Origin{Timeline: 1}
	if got, ok := first.Left(1); ok || first.Begin() != 0 {
		t.Errorf("the first timeline left another at %+v and begins at %s", got, first.Begin())
	}
}
