package metrics

import (
	"math"
	"math/bits"
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
// seconds. What is shorter than 2^firstOctave s, about 8 µs, is in the zero
// bucket, and what is longer than 2^lastOctave s, about 50 days, in the last one.
const (
	schema      = 3
	steps       = 1 << schema
	firstOctave = -17
	lastOctave  = 22
	natives     = (lastOctave-firstOctave)*steps + 1 // 0 is the zero bucket
)

// Counting is in cells: no bound of either kind lies within one, so that one
// count serves both.
const cells = natives + len(bounds) - 3 // 250 ms, 500 ms and 1 s are bounds of both

var (
	edges     [cells]time.Duration // upper bounds of the cells
	nativeOf  [cells]uint16
	classicOf [cells]uint8

	// start is the first cell of the durations that begin with the same bits.
	start [64 << startBits]uint16
)

// startBits are the bits behind the first one. There are at most two edges
// among the durations that share them, one of each kind.
const startBits = 4

func init() {
	n, c := 0, 0
	for i := range edges {
		// The whole nanoseconds up to a bound are those up to its floor.
		nativeEnd := time.Duration(math.Exp2(firstOctave+float64(n)/steps) * 1e9)
		nativeOf[i], classicOf[i] = uint16(n), uint8(c)
		switch {
		case n == natives-1 && c == len(bounds):
			edges[i] = math.MaxInt64
		case c == len(bounds) || nativeEnd < bounds[c]:
			edges[i] = nativeEnd
			n++
		case nativeEnd == bounds[c]:
			edges[i] = nativeEnd
			n++
			c++
		default:
			edges[i] = bounds[c]
			c++
		}
		n = min(n, natives-1)
	}
	for i := range start {
		length, rest := i>>startBits, uint64(i&(1<<startBits-1))
		low := rest // fewer bits than startBits are all there is
		if length > startBits {
			low = (1<<startBits | rest) << (length - 1 - startBits)
		}
		for int(start[i]) < cells-1 && low > uint64(edges[start[i]]) {
			start[i]++
		}
	}
}

// cell is the number of the cell for a duration.
func cell(d time.Duration) int {
	v := uint64(max(d, 0))
	length := bits.Len64(v)
	i := length << startBits
	if length > startBits {
		i |= int(v>>(length-1-startBits)) & (1<<startBits - 1)
	} else {
		i |= int(v) & (1<<startBits - 1)
	}
	c := int(start[i])
	if d > edges[c] {
		c++
	}
	if d > edges[c] {
		c++
	}
	return c
}

// histogram counts durations. One goroutine at a time adds and publishes, any
// may take a snapshot.
type histogram struct {
	// Of the goroutine that adds.
	fresh   counts
	touched []uint16 // cells of fresh that are not 0

	mu    sync.Mutex
	total counts
}

type counts struct {
	cells [cells]uint64
	sum   float64 // ns; a backlog of days would overflow a Duration
}

// add counts n durations, for publish.
func (h *histogram) add(d time.Duration, n uint64) {
	i := cell(d)
	if h.fresh.cells[i] == 0 {
		h.touched = append(h.touched, uint16(i))
	}
	h.fresh.cells[i] += n
	h.fresh.sum += float64(d) * float64(n)
}

// publish makes visible what was added.
func (h *histogram) publish() {
	if len(h.touched) == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, i := range h.touched {
		h.total.cells[i] += h.fresh.cells[i]
		h.fresh.cells[i] = 0
	}
	h.touched = h.touched[:0]
	h.total.sum += h.fresh.sum
	h.fresh.sum = 0
}

func (h *histogram) snapshot() counts {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.total
}

// count is the number of durations.
func (c *counts) count() uint64 {
	var sum uint64
	for _, n := range c.cells {
		sum += n
	}
	return sum
}

// histogramMetric is a snapshot with classic and native buckets; the library's
// constant histograms have either.
type histogramMetric struct {
	prometheus.Metric // the native one
	classic           []*dto.Bucket
}

func (c *counts) metric(desc *prometheus.Desc, since time.Time) (prometheus.Metric, error) {
	var zero, count uint64
	positive := map[int]int64{}
	var byClass [len(bounds) + 1]uint64
	for i, n := range c.cells {
		if n == 0 {
			continue
		}
		count += n
		byClass[classicOf[i]] += n
		if nativeOf[i] == 0 {
			zero += n
		} else {
			positive[firstOctave*steps+int(nativeOf[i])] += int64(n)
		}
	}
	m, err := prometheus.NewConstNativeHistogram(desc, count, c.sum/1e9, positive, nil, zero, schema, math.Exp2(firstOctave), since)
	if err != nil {
		return nil, err
	}
	buckets := make([]*dto.Bucket, len(bounds))
	var sum uint64
	for i, b := range bounds {
		sum += byClass[i]
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
