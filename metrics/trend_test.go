package metrics

import (
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

func near(t *testing.T, what string, got *float64, want float64) {
	t.Helper()
	switch {
	case want < 0 && got != nil:
		t.Errorf("%s: got %g, want none", what, *got)
	case want >= 0 && got == nil:
		t.Errorf("%s: got none, want %g", what, want)
	case want >= 0 && (*got < want*0.99 || *got > want*1.01):
		t.Errorf("%s: got %g, want %g", what, *got, want)
	}
}

func TestTrendEstimates(t *testing.T) {
	const none = -1
	for _, c := range []struct {
		name                        string
		wal, confirmed, published   int64 // a second
		lag, safe, fall             int64 // at the end; of safe a second
		events, written, drain, end float64
	}{
		{"idle", 0, 0, 0, 0, none, 0, 0, 0, 0, none},
		{"busy and up to date", 1000, 1000, 50, 0, 1 << 20, 0, 50, 1000, 0, none},
		{"catching up", 1000, 3000, 500, 100_000, 1 << 20, -2000, 500, 1000, 50, none},
		{"falling behind", 3000, 1000, 10, 50_000, 60_000, 2000, 10, 3000, none, 30},
		{"stopped", 100, 0, 0, 7000, 1000, 100, 0, 100, none, 10},
		{"past the limit", 100, 0, 0, 7000, 0, 100, 0, 100, none, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			var trend Trend
			const n = 90 // more than is looked at
			began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
			for i := int64(0); i <= n; i++ {
				s := Sample{At: began.Add(time.Duration(i) * time.Second)}
				s.WALEnd = event.LSN(1<<30 - c.wal*(n-i))
				s.Confirmed = event.LSN(1<<30 - c.lag - c.confirmed*(n-i))
				if c.safe != none {
					safe := c.safe + c.fall*(n-i)
					s.SafeBytes = &safe
				}
				trend.Add(s, uint64(1<<20-c.published*(n-i)))
			}
			e := trend.Estimate()
			near(t, "events", e.EventsPerSecond, c.events)
			near(t, "log", e.WALPerSecond, c.written)
			near(t, "drain", e.DrainSeconds, c.drain)
			near(t, "loss", e.LossSeconds, c.end)
			if len(trend.points) > 62 {
				t.Errorf("%d points kept", len(trend.points))
			}
		})
	}
}

func TestTrendSaysNothingOfOneSample(t *testing.T) {
	var trend Trend
	if e := trend.Estimate(); e != (Estimate{}) {
		t.Errorf("of no sample: %+v", e)
	}
	at := time.Now()
	trend.Add(Sample{At: at, WALEnd: 10, Confirmed: 5}, 7)
	if e := trend.Estimate(); e != (Estimate{}) {
		t.Errorf("of one sample: %+v", e)
	}
	// A restored server, or a relay that was started again.
	trend.Add(Sample{At: at.Add(time.Second), WALEnd: 9, Confirmed: 5}, 7)
	if e := trend.Estimate(); e != (Estimate{}) {
		t.Errorf("across two servers: %+v", e)
	}
	trend.Add(Sample{At: at.Add(2 * time.Second), WALEnd: 12, Confirmed: 5}, 3)
	if e := trend.Estimate(); e != (Estimate{}) {
		t.Errorf("across two processes: %+v", e)
	}
}
