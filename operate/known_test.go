package operate

import "testing"

func TestKnownTellsTablesApart(t *testing.T) {
	k := newKnown()
	k.add("public.outbox:1", "1", "")
	k.add("", "2", "public.outbox") // parked
	k.add("", "3", "")              // of a stream without Nats-Msg-Id
	k.add(" padded", "padded", "")
	for _, c := range []struct {
		msgID, id, table string
		want             bool
	}{
		{"public.outbox:1", "1", "public.outbox", true},
		{"public.more:1", "1", "public.more", false},
		{"public.outbox:2", "2", "public.outbox", true},
		{"public.more:2", "2", "public.more", false},
		{"3", "3", "public.outbox", true},
		{"padded ", "padded ", "public.outbox", true},
		{"4", "4", "public.outbox", false},
		{"", "", "public.outbox", false},
	} {
		if got := k.has([]byte(c.msgID), []byte(c.id), c.table); got != c.want {
			t.Errorf("has %q, id %q of %s: %v, want %v", c.msgID, c.id, c.table, got, c.want)
		}
	}
}

func TestNewNeedsBothEnds(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("a job of nothing")
	}
}

func TestPercent(t *testing.T) {
	for _, c := range []struct {
		p    Progress
		want int
	}{{Progress{}, 100}, {Progress{Total: 200, Seen: 99}, 49}, {Progress{Total: 10, Seen: 12}, 100}} {
		if got := c.p.Percent(); got != c.want {
			t.Errorf("%+v: %d, want %d", c.p, got, c.want)
		}
	}
}
