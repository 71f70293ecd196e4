package metrics

import (
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// bounds are the upper bounds of the classic buckets, so that the usual
// objectives lie on one.
var bounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	1 * time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	1 * time.Second, 2500 * time.Millisecond, 5 * time.Second,
	10 * time.Second, 25 * time.Second, 50 * time.Second,
	100 * time.Second, 250 * time.Second, 500 * time.Second,
}

// The buckets of native histograms: with schema 3 bucket i ends at 2^(i/8)
// seconds. What is shorter than 2^octave[0] s, about 8 µs, is in the zero
// bucket, and what is longer than 2^octave[1] s, about 50 days, in the last one.
const (
	schema      = 3
	steps       = 1 << schema
	firstOctave = -17
	lastOctave  = 22
	natives     = (lastOctave-firstOctave)*steps + 1 // 0 is the zero bucket
)

// fractions are the mantissas, as bits, of the bounds within an octave; guess
// is where to start looking for one by its first bits.
var (
	fractions [steps]uint64
	guess     [2 * steps]uint8
	classic   [natives]uint8 // the first classic bucket that a native one reaches into
)

const fractionBits = 52

func init() {
	for i := range fractions {
		fractions[i] = math.Float64bits(math.Exp2(float64(i)/steps)) & (1<<fractionBits - 1)
	}
	for g := range guess {
		low := uint64(g) << (fractionBits - schema - 1)
		for guess[g] < steps && low > fractions[guess[g]] {
			guess[g]++
		}
	}
	for n := 1; n < natives; n++ {
		lower := math.Exp2(firstOctave + float64(n-1)/steps)
		for int(classic[n]) < len(bounds) && lower >= bounds[classic[n]].Seconds() {
			classic[n]++
		}
	}
}

// native is the number of the bucket for a duration.
func native(d time.Duration) int {
	bits := math.Float64bits(float64(d) / 1e9)
	octave := int(bits>>fractionBits) - 1023
	fraction := bits & (1<<fractionBits - 1)
	if d <= 0 || octave < firstOctave {
		return 0
	}
	if octave >= lastOctave {
		return natives - 1
	}
	i := int(guess[fraction>>(fractionBits-schema-1)])
	for i < steps && fraction > fractions[i] {
		i++
	}
	return (octave-firstOctave)*steps + i
}

// histogram counts durations. One goroutine at a time adds and publishes, any
// may take a snapshot.
type histogram struct {
	// Of the goroutine that adds.
	fresh   counts
	touched []uint16 // native buckets of fresh that are not 0

	mu    sync.Mutex
	total counts
}

type counts struct {
	native  [natives]uint64
	classic [len(bounds) + 1]uint64 // not cumulative
	sum     float64                 // seconds; a backlog of days would overflow a Duration
	n       uint64
}

// add counts n durations, for publish.
func (h *histogram) add(d time.Duration, n uint64) {
	i := native(d)
	if h.fresh.native[i] == 0 {
		h.touched = append(h.touched, uint16(i))
	}
	h.fresh.native[i] += n
	c := int(classic[i])
	if c < len(bounds) && d > bounds[c] {
		c++
	}
	h.fresh.classic[c] += n
	h.fresh.sum += d.Seconds() * float64(n)
	h.fresh.n += n
}

// publish makes visible what was added.
func (h *histogram) publish() {
	if h.fresh.n == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range h.touched {
		h.total.native[i] += h.fresh.native[i]
		h.fresh.native[i] = 0
	}
	h.touched = h.touched[:0]
	for i, n := range h.fresh.classic {
		h.total.classic[i] += n
	}
	clear(h.fresh.classic[:])
	h.total.sum += h.fresh.sum
	h.total.n += h.fresh.n
	h.fresh.sum, h.fresh.n = 0, 0
}

func (h *histogram) snapshot() counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.total
}

func (h *histogram) count() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.total.n
}

// histogramMetric is a snapshot with classic and native buckets; the library's
// constant histograms have either.
type histogramMetric struct {
	prometheus.Metric // the native one
	classic           []*dto.Bucket
}

func (c *counts) metric(desc *prometheus.Desc, since time.Time) (prometheus.Metric, error) {
	positive := map[int]int64{}
	for i, n := range c.native[1:] {
		if n > 0 {
			positive[firstOctave*steps+i+1] = int64(n)
		}
	}
	m, err := prometheus.NewConstNativeHistogram(desc, c.n, c.sum, positive, nil, c.native[0], schema, math.Exp2(firstOctave), since)
	if err != nil {
		return nil, err
	}
	buckets := make([]*dto.Bucket, len(bounds))
	var sum uint64
	for i, b := range bounds {
		sum += c.classic[i]
		upper, cumulative := b.Seconds(), sum
		buckets[i] = &dto.Bucket{UpperBound: &upper, CumulativeCount: &cumulative}
	}
	return histogramMetric{m, buckets}, nil
}

func (m histogramMetric) Write(out *dto.Metric) error {
	if err := m.Metric.Write(out); err != nil {
		return err
	}
	out.Histogram.Bucket = m.classic
	return nil
}
