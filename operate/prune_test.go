package operate

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
)

// plot is everything that a pass needs, in memory.
type plot struct {
	horizon  Horizon
	places   []Place
	evidence Evidence
	entries  map[string][]string
	rows     []PruneRow
	parked   map[string]bool
	parts    []PrunePartition
	in       map[string][]PruneRow // rows of partitions
	locked   string                // partition that cannot be dropped
	busy     string                // row that cannot be deleted

	asked   []string
	deleted []string
	looks   int
	arrives int // look at which the last slot is confirmed
}

func newPlot() *plot {
	return &plot{
		horizon:  Horizon{XID: 700, LSN: 100, SystemID: "sys", Database: "shop", Timeline: 2},
		places:   []Place{{Slot: "walrelay", Confirmed: 100, Active: true}},
		evidence: Evidence{Found: true, SystemID: "sys", Database: "shop", Slot: "walrelay", Timeline: 2, Confirm: 100, Since: &event.Mark{XID: 5}, Tables: map[string][]string{"public.outbox": {"1", "2"}}},
		entries:  map[string][]string{"public.outbox": {"2"}},
		parked:   map[string]bool{},
	}
}

func good(id string) PruneRow {
	return PruneRow{ID: []byte(id), Old: true, Passed: true, Sent: true, Event: true, Ref: id}
}

func (p *plot) Has(_ string, id []byte) bool { return p.parked[string(id)] }

func (p *plot) Next(context.Context) ([]PruneRow, error) {
	n := min(2, len(p.rows))
	some := p.rows[:n]
	p.rows = p.rows[n:]
	return some, nil
}

func (p *plot) Delete(_ context.Context, rows []PruneRow) (int, error) {
	n := 0
	for _, r := range rows {
		if r.Ref != p.busy {
			p.deleted = append(p.deleted, r.Ref.(string))
			n++
		}
	}
	return n, nil
}

func (p *plot) Partitions(context.Context) ([]PrunePartition, error) { return p.parts, nil }

func (p *plot) Drop(_ context.Context, part PrunePartition, judge func(PruneRow) error) (int, bool, error) {
	for _, r := range p.in[part.Name] {
		if err := judge(r); err != nil {
			return 0, false, fmt.Errorf("drop: %w", err)
		}
	}
	return len(p.in[part.Name]), part.Name == p.locked, nil
}

func (p *plot) job() Prune {
	ask := func(what string) { p.asked = append(p.asked, what) }
	return Prune{
		Horizon: func(context.Context) (Horizon, error) { ask("horizon"); return p.horizon, nil },
		Places: func(context.Context) ([]Place, error) {
			ask("places")
			if p.looks++; p.looks == p.arrives {
				p.places[len(p.places)-1].Confirmed = p.horizon.LSN
			}
			return p.places, nil
		},
		Evidence: func(context.Context) (Evidence, error) { ask("evidence"); return p.evidence, nil },
		Parked:   func(context.Context) (Parked, error) { ask("parked"); return p, nil },
		Entries:  func(context.Context) (map[string][]string, error) { ask("entries"); return p.entries, nil },
		Open: func(_ context.Context, _ string, h Horizon, _ *event.Mark) (PruneTable, error) {
			ask("open")
			return p, nil
		},
		Tables: []string{"public.outbox"}, Wait: time.Minute, Every: time.Second,
	}
}

// What says that rows are published is read after the slots were seen to be
// confirmed, and before any row is.
func TestPruneAsksInOrder(t *testing.T) {
	p := newPlot()
	if _, err := p.job().Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if want := []string{"horizon", "places", "evidence", "entries", "parked", "open"}; !slices.Equal(p.asked, want) {
		t.Errorf("got %v, want %v", p.asked, want)
	}
}

func TestPruneDeletesOnlyWhatIsProven(t *testing.T) {
	rows := func() []PruneRow {
		young, late, none, unproven := good("young"), good("late"), good("none"), good("unproven")
		young.Old, late.Passed, none.Event, unproven.Sent = false, false, false, false
		return []PruneRow{good("a"), young, late, none, unproven, good("parked"), good("busy"), good("b"), good("c")}
	}
	kept := map[Keep]int64{KeepYoung: 1, KeepUnpassed: 1, KeepNoEvent: 1, KeepUnproven: 1, KeepParked: 1, KeepInTheWay: 1}
	for name, c := range map[string]struct {
		change  func(*Prune)
		deleted string
		count   int64
		kept    func(map[Keep]int64)
	}{
		"as usual":         {func(*Prune) {}, "a b c", 3, func(map[Keep]int64) {}},
		"unproven ones":    {func(j *Prune) { j.Unproven = true }, "a unproven b c", 4, func(k map[Keep]int64) { delete(k, KeepUnproven) }},
		"without deleting": {func(j *Prune) { j.DryRun = true }, "", 4, func(k map[Keep]int64) { delete(k, KeepInTheWay) }},
	} {
		t.Run(name, func(t *testing.T) {
			p := newPlot()
			p.rows, p.parked["parked"], p.busy = rows(), true, "busy"
			job := p.job()
			c.change(&job)
			r, err := job.Run(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			want := map[Keep]int64{}
			for k, n := range kept {
				want[k] = n
			}
			c.kept(want)
			if got := strings.Join(p.deleted, " "); got != c.deleted || r.Deleted() != c.count || fmt.Sprint(r.Tables[0].Kept) != fmt.Sprint(want) {
				t.Errorf("deleted %q, %d, kept %v, want %q, %d, %v", got, r.Deleted(), r.Tables[0].Kept, c.deleted, c.count, want)
			}
		})
	}
}

func TestPruneNeedsEvidence(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*plot)
		class  event.Class
		text   string
	}{
		"no checkpoint":       {func(p *plot) { p.evidence.Found = false }, event.Precondition, "no checkpoint"},
		"another slot":        {func(p *plot) { p.evidence.Slot = "other" }, event.Precondition, `belongs to slot "other"`},
		"another server":      {func(p *plot) { p.evidence.SystemID = "other" }, event.Precondition, "belongs to slot"},
		"another database":    {func(p *plot) { p.evidence.Database = "other" }, event.Precondition, "belongs to slot"},
		"backfill not done":   {func(p *plot) { p.evidence.Unfinished = true }, event.Precondition, "is not done"},
		"not proven yet":      {func(p *plot) { at := event.LSN(50); p.evidence.Proven = &at }, event.Precondition, "only the dedup window"},
		"messages lost":       {func(p *plot) { p.evidence.Forgotten = true }, event.Precondition, "has lost messages"},
		"promoted":            {func(p *plot) { p.evidence.Timeline = 1 }, event.Precondition, "was promoted"},
		"slot made anew":      {func(p *plot) { p.evidence.Confirm = 99 }, event.Precondition, "advanced or made anew"},
		"no moment":           {func(p *plot) { p.evidence.Since = nil }, event.Precondition, "without a gap"},
		"table of another":    {func(p *plot) { p.evidence.Tables = nil }, event.Precondition, "does not publish table public.outbox"},
		"table made anew":     {func(p *plot) { p.entries["public.outbox"] = []string{"3"} }, event.Precondition, "is not the one"},
		"table not sent now":  {func(p *plot) { p.entries = nil }, event.Precondition, "is not the one"},
		"second slot is lost": {func(p *plot) { p.places = append(p.places, Place{Slot: "late", Confirmed: 99}) }, event.Precondition, `slot "late" is confirmed up to`},
		"relay behind":        {func(p *plot) { p.places[0].Confirmed = 99 }, event.Precondition, "within 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPlot()
				p.rows = []PruneRow{good("a")}
				c.change(p)
				_, err := p.job().Run(t.Context())
				if event.ClassOf(err) != c.class || !strings.Contains(fmt.Sprint(err), c.text) || event.HintOf(err) == "" || len(p.deleted) > 0 {
					t.Errorf("got %v (%s), deleted %v", err, event.HintOf(err), p.deleted)
				}
			})
		})
	}
}

func TestPruneWaitsForEverySlot(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPlot()
		p.places = append(p.places, Place{Slot: "late", Confirmed: 99})
		p.rows = []PruneRow{good("a")}
		job := p.job()
		told := ""
		job.Waiting = func(slot string, lsn event.LSN) { told += slot + " " + lsn.String() }
		p.arrives = 12
		r, err := job.Run(t.Context())
		if err != nil || r.Deleted() != 1 || told != "late 0/64" || p.looks != 12 {
			t.Errorf("%d deleted after %d looks, told %q, %v", r.Deleted(), p.looks, told, err)
		}

		p.places[1].Confirmed = 0
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		if _, err := job.Run(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("stopped: %v", err)
		}
	})
}

func TestPruneDropsPartitionsWhole(t *testing.T) {
	p := newPlot()
	part := func(name string) PrunePartition { return PrunePartition{Name: name, Old: true} }
	p.parts = []PrunePartition{part("gone"), part("mixed"), part("busy"), {Name: "rest", Default: true, Old: true}, {Name: "now"}, part("empty")}
	p.parked["parked"], p.locked = true, "busy"
	p.in = map[string][]PruneRow{"gone": {good("a"), good("b")}, "mixed": {good("c"), good("parked")}, "busy": {good("d")}, "rest": {good("e")}}
	job := p.job()
	r, err := job.Run(t.Context())
	if err != nil || len(r.Tables[0].Dropped) > 0 {
		t.Errorf("dropped %v unasked, %v", r.Tables[0].Dropped, err)
	}
	job.Partitions = true
	r, err = job.Run(t.Context())
	got := r.Tables[0]
	want := map[string]Keep{"mixed": KeepParked, "busy": KeepInTheWay, "rest": KeepDefault, "now": KeepYoung}
	if err != nil || !slices.Equal(got.Dropped, []string{"gone", "empty"}) || got.Deleted != 2 || fmt.Sprint(got.Spared) != fmt.Sprint(want) {
		t.Errorf("got %+v, %v", got, err)
	}
	text := r.String()
	for _, line := range []string{"table public.outbox: 2 rows deleted\n", "  partition gone dropped\n", "  partition mixed kept: an open dead letter needs the row\n"} {
		if !strings.Contains(text, line) {
			t.Errorf("no %q in\n%s", line, text)
		}
	}
}
