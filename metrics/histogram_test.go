package metrics

import (
	"math"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// The library's own histogram counts the same, bucket by bucket.
func TestHistogramCountsAsTheLibraryDoes(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	classic := make([]float64, len(bounds))
	for i, b := range bounds {
		classic[i] = b.Seconds()
	}
	want := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "h", Buckets: classic,
		NativeHistogramBucketFactor: 1.1, NativeHistogramZeroThreshold: math.Exp2(firstOctave),
	})
	var h histogram
	observe := func(d time.Duration) {
		want.Observe(float64(d) / 1e9)
		h.add(d, 1)
	}
	for i := range 64 { // powers of two of a second are bounds of native buckets
		observe(time.Duration(1) << min(i, 50))
		if i < 20 {
			observe(time.Second << i)
		}
	}
	for _, b := range bounds {
		observe(b - 1)
		observe(b)
		observe(b + 1)
	}
	observe(0)
	for i := range 100_000 {
		observe(time.Duration(math.Exp2(rng.Float64()*50) - 1))
		if i%1000 == 0 {
			h.publish()
		}
	}
	h.publish()
	got := h.snapshot()
	compare(t, seed, &got, want)
}

func compare(t *testing.T, seed uint64, counts *counts, want prometheus.Metric) {
	t.Helper()
	m, err := counts.metric(prometheus.NewDesc("h", "", nil, nil), time.Now())
	if err != nil {
		t.Fatal(err)
	}
	var a, b dto.Metric
	if err := m.Write(&a); err != nil {
		t.Fatal(err)
	}
	if err := want.Write(&b); err != nil {
		t.Fatal(err)
	}
	ga, wa := a.Histogram, b.Histogram
	if ga.GetSampleCount() != wa.GetSampleCount() || math.Abs(ga.GetSampleSum()/wa.GetSampleSum()-1) > 1e-9 {
		t.Errorf("seed %d: got %d, %g s, want %d, %g s", seed, ga.GetSampleCount(), ga.GetSampleSum(), wa.GetSampleCount(), wa.GetSampleSum())
	}
	if ga.GetSchema() != wa.GetSchema() || ga.GetZeroThreshold() != wa.GetZeroThreshold() || ga.GetZeroCount() != wa.GetZeroCount() {
		t.Errorf("got schema %d, zero %d, want schema %d, zero %d", ga.GetSchema(), ga.GetZeroCount(), wa.GetSchema(), wa.GetZeroCount())
	}
	for i, b := range wa.Bucket {
		if got := ga.Bucket[i]; got.GetUpperBound() != b.GetUpperBound() || got.GetCumulativeCount() != b.GetCumulativeCount() {
			t.Errorf("seed %d: up to %g s: got %d, want %d", seed, b.GetUpperBound(), got.GetCumulativeCount(), b.GetCumulativeCount())
		}
	}
	gn, wn := nativeBuckets(ga), nativeBuckets(wa)
	for i, n := range wn {
		if gn[i] != n {
			t.Errorf("seed %d: native bucket %d: got %d, want %d", seed, i, gn[i], n)
		}
	}
	if len(gn) != len(wn) {
		t.Errorf("got %d native buckets, want %d", len(gn), len(wn))
	}
}

func nativeBuckets(h *dto.Histogram) map[int]int64 {
	all := map[int]int64{}
	at, n, d := 0, int64(0), 0
	for _, s := range h.PositiveSpan {
		at += int(s.GetOffset())
		for range s.GetLength() {
			n += h.PositiveDelta[d]
			d++
			if n != 0 {
				all[at] = n
			}
			at++
		}
	}
	return all
}

func TestHistogramTakesWhatIsBeyond(t *testing.T) {
	var h histogram
	h.add(math.MaxInt64, 3)
	h.add(-time.Second, 1)
	h.publish()
	c := h.snapshot()
	if c.cells[cells-1] != 3 || c.cells[0] != 1 || c.count() != 4 {
		t.Errorf("got %v", c)
	}
}

func TestHistogramAllocatesNothing(t *testing.T) {
	var h histogram
	var d time.Duration
	fill := func() {
		for range 1000 {
			d += 37 * time.Microsecond
			h.add(d, 1)
		}
		h.publish()
	}
	fill()
	if n := testing.AllocsPerRun(100, fill); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

// One event of its own transaction, which is the dear case: both histograms,
// and its share of publishing them.
func BenchmarkMeter(b *testing.B) {
	for _, batch := range []int{1, 16, 256} {
		b.Run("acks="+strconv.Itoa(batch), func(b *testing.B) {
			m := &meter{failures: zeroes(nil)}
			rng := rand.New(rand.NewPCG(1, 2))
			ages := make([]time.Duration, 4096)
			for i := range ages {
				ages[i] = time.Duration(100e3 * math.Exp2(rng.NormFloat64()))
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				m.Acked(1, ages[i&4095], ages[(i+7)&4095])
				if i%batch == 0 {
					m.Rest()
				}
			}
		})
	}
	b.Run("library", func(b *testing.B) {
		h := prometheus.NewHistogram(prometheus.HistogramOpts{Name: "h", Buckets: prometheus.ExponentialBuckets(1e-4, 2, 22), NativeHistogramBucketFactor: 1.1})
		for b.Loop() {
			h.Observe(1.2e-4)
			h.Observe(1.1e-4)
		}
	})
}
