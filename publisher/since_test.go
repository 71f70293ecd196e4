package publisher

import (
	"testing"

	"github.com/walrelay/walrelay/event"
)

// A place from which on nothing was passed over lasts until something may have been.
func TestSinceIsTheBeginningOfAnUnbrokenRead(t *testing.T) {
	was, now := &event.Mark{XID: 7}, &event.Mark{XID: 900}
	for name, c := range map[string]struct {
		change func(*findings, *decision)
		want   *event.Mark
	}{
		"the next session":  {func(*findings, *decision) {}, was},
		"after a promotion": {func(f *findings, _ *decision) { f.checkpoint.Timeline = 1 }, was},
		"messages that are gone": {func(f *findings, d *decision) {
			d.resume.Gone, d.from = 3, &record{Owner: f.checkpoint.Owner, Since: &event.Mark{}}
		}, was},
		"everything was sent":   {func(f *findings, _ *decision) { f.checkpoint.Since = &event.Mark{} }, &event.Mark{}},
		"the first session":     {func(f *findings, _ *decision) { f.checkpoint = nil }, now},
		"an earlier version":    {func(f *findings, _ *decision) { f.checkpoint.Since = nil }, now},
		"a gap is accepted":     {func(f *findings, _ *decision) { f.acceptGap = true }, now},
		"a stream is adopted":   {func(f *findings, _ *decision) { f.adopt = true }, now},
		"another server":        {func(f *findings, _ *decision) { f.origin.SystemID = "new" }, now},
		"another slot":          {func(f *findings, _ *decision) { f.origin.Slot = "new" }, now},
		"other tables":          {func(f *findings, _ *decision) { f.origin.Fingerprint = "more" }, now},
		"a diverged server":     {func(f *findings, _ *decision) { f.origin.Diverged = true }, now},
		"the checkpoint's lost": {func(_ *findings, d *decision) { d.lost = true }, now},
		"a table made anew": {func(f *findings, _ *decision) {
			f.checkpoint.Tables, f.origin.Tables = map[string][]string{"t": {"1"}}, map[string][]string{"t": {"2"}}
		}, now},
		"nobody looked": {func(f *findings, _ *decision) { f.acceptGap, f.origin.Now = true, nil }, nil},
		"a backfill":    {func(f *findings, _ *decision) { f.origin.Backfill = true }, nil},
	} {
		f := usual()
		f.origin.Now, f.checkpoint.Since = now, was
		d := decision{base: f.lastSeq}
		c.change(&f, &d)
		got := claim(f, d, 1).Since
		if (got == nil) != (c.want == nil) || got != nil && *got != *c.want {
			t.Errorf("%s: got %v, want %v", name, got, c.want)
		}
	}
}

// Skipping on purpose is a gap, too.
func TestPassForgetsSince(t *testing.T) {
	f := usual()
	f.checkpoint.Since = &event.Mark{}
	r, err := pass(f, decision{base: f.lastSeq}, 0x8000)
	if err != nil || r.Since != nil {
		t.Errorf("got %v, %v", r.Since, err)
	}
}
