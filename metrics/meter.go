package metrics

import (
	"maps"
	"sync"
	"time"
)

// meter counts what the publisher tells.
type meter struct {
	delivery histogram // commit → ack
	ack      histogram // send → ack

	mu         sync.Mutex
	duplicates uint64
	failures   map[string]uint64
}

// Acked implements publisher.Meter. It takes no lock.
func (m *meter) Acked(n uint64, sinceCommit, sinceSend time.Duration) {
	if sinceCommit >= 0 {
		m.delivery.add(sinceCommit, n)
	}
	m.ack.add(sinceSend, n)
}

// Rest implements publisher.Meter.
func (m *meter) Rest() {
	m.delivery.publish()
	m.ack.publish()
}

// Failed implements publisher.Meter.
func (m *meter) Failed(reason string, duplicate bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failures[known(m.failures, reason)]++
	if duplicate {
		m.duplicates++
	}
}

// published is the number of events that were acked.
func (m *meter) published() uint64 {
	counts := m.ack.snapshot()
	return counts.count()
}

func (m *meter) failed() (duplicates uint64, failures map[string]uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.duplicates, maps.Clone(m.failures)
}

// other is the label value for what is not in the list of values.
const other = "other"

// zeroes are counters for a label with known values: all of them exist from
// the start, so that the first increase is seen as one.
func zeroes(values []string) map[string]uint64 {
	m := map[string]uint64{other: 0}
	for _, v := range values {
		m[v] = 0
	}
	return m
}

// known keeps labels bounded.
func known(m map[string]uint64, value string) string {
	if _, ok := m[value]; ok {
		return value
	}
	return other
}
