package metrics

import (
	"maps"
	"runtime"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/walrelay/walrelay/relay"
)

// descs are the metrics, by name without their prefix.
type descs struct {
	lagBytes, lagSeconds                                                          *prometheus.Desc
	retained, safe, active, walStatus                                             *prometheus.Desc
	received, confirmed                                                           *prometheus.Desc
	inFlight, window, published, duplicates, errors, letters, refused, reconnects *prometheus.Desc
	delivery, ack                                                                 *prometheus.Desc
	leader, state, up, build                                                      *prometheus.Desc
	pruned, pruneFailures, skipped                                                *prometheus.Desc
}

func (m *Monitor) describe() descs {
	constant := prometheus.Labels{"slot_name": m.o.Slot, "database": m.o.Database}
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("walrelay_"+name, help, labels, constant)
	}
	return descs{
		lagBytes: desc("replication_lag_bytes",
			"Log from the slot's confirmed flush LSN to the end of the server's log, in bytes. Missing while Postgres does not answer."),
		lagSeconds: desc("replication_lag_seconds",
			"How far the relay is behind. basis=event: age since commit of the oldest event that was received and is not stored, 0 when there is none. "+
				"basis=wal: age of the oldest log that is not stored, or not received, whether or not it holds an event: an upper bound.", "basis"),
		retained: desc("slot_retained_wal_bytes",
			"Log that Postgres keeps for the slot, in bytes."),
		safe: desc("slot_safe_wal_bytes",
			"Log that can still be written before the slot may be lost, in bytes. Missing without max_slot_wal_keep_size."),
		active: desc("slot_active",
			"Whether some relay reads the slot."),
		walStatus: desc("slot_wal_status",
			"1 for the slot's wal_status, 0 for the others.", "status"),
		received: desc("received_lsn",
			"Place in the log up to which it was received, as a byte position. Missing while this relay does not hold the slot."),
		confirmed: desc("confirmed_flush_lsn",
			"Confirmed flush LSN of the slot, as a byte position."),
		inFlight: desc("inflight_events",
			"Events that were sent and wait for their acks."),
		window: desc("window_events",
			"Events that may be in flight now: as many as a round trip to the broker needs, --window at most. Missing without a session."),
		published: desc("events_published_total",
			"Events that the stream has acked. One whose ack was lost is not counted."),
		duplicates: desc("publish_duplicates_total",
			"Events that the broker took for one that it has. Two rows may share an id."),
		errors: desc("publish_errors_total",
			"Publishing sessions that failed, by reason.", "reason"),
		letters: desc("dead_letters_total",
			"Events that were parked in the dead-letter stream, by reason.", "reason"),
		refused: desc("replays_refused_total",
			"Events that were to be published again and could not be, by reason.", "reason"),
		reconnects: desc("reconnects_total",
			"Sessions that ended or could not be opened and are tried again, by the side at fault. A standby's tries are not counted.", "side"),
		delivery: desc("delivery_lag_seconds",
			"Time from the commit of an event to its ack, by the clocks of Postgres and of the relay."),
		ack: desc("publish_ack_seconds",
			"Time from sending an event to its ack."),
		leader: desc("leader",
			"Whether this relay holds the slot."),
		state: desc("state",
			"1 for what the relay is about, 0 for the others.", "state"),
		up: desc("up",
			"Whether the server of a side answers. NATS is missing while there is no session to tell.", "side"),
		pruned: desc("pruned_rows_total",
			"Rows of the outbox that were deleted because they are published and old enough."),
		pruneFailures: desc("prune_failures_total",
			"Passes over the outbox to delete rows that ended with an error."),
		skipped: desc("skipped_messages_total",
			"Messages of the replication stream that make no event and were skipped, by kind. "+
				"stream_abort: sent by Postgres 18 for a transaction that was rolled back.", "kind"),
		build: desc("build_info",
			"1, with what this program was built from.", "version", "commit", "goversion"),
	}
}

// Registry has the metrics of the relay, of the Go runtime and of the process.
func (m *Monitor) Registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(
		&collector{m, m.describe()},
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewBuildInfoCollector(),
	)
	return r
}

type collector struct {
	m *Monitor
	d descs
}

func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	d := c.d
	for _, desc := range []*prometheus.Desc{
		d.lagBytes, d.lagSeconds, d.retained, d.safe, d.active, d.walStatus, d.received, d.confirmed,
		d.inFlight, d.window, d.published, d.duplicates, d.errors, d.letters, d.refused, d.reconnects,
		d.delivery, d.ack, d.leader, d.state, d.up, d.build,
		d.pruned, d.pruneFailures, d.skipped,
	} {
		ch <- desc
	}
}

func (c *collector) Collect(ch chan<- prometheus.Metric) {
	m, d := c.m, c.d
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	counter := func(desc *prometheus.Desc, n uint64, labels ...string) {
		ch <- prometheus.MustNewConstMetricWithCreatedTimestamp(desc, prometheus.CounterValue, float64(n), m.began, labels...)
	}
	counters := func(desc *prometheus.Desc, ns map[string]uint64) {
		for _, label := range slices.Sorted(maps.Keys(ns)) {
			if label != other || ns[label] > 0 {
				counter(desc, ns[label], label)
			}
		}
	}
	times := func(desc *prometheus.Desc, h *histogram) uint64 {
		counts := h.snapshot()
		metric, err := counts.metric(desc, m.began)
		if err != nil {
			metric = prometheus.NewInvalidMetric(desc, err)
		}
		ch <- metric
		return counts.count()
	}

	times(d.delivery, &m.delivery)
	counter(d.published, times(d.ack, &m.ack))
	duplicates, failures := m.failed()
	counter(d.duplicates, duplicates)
	counters(d.errors, failures)
	parked, reconnects := m.counts()
	counters(d.letters, parked)
	counters(d.refused, m.refusals())
	counters(d.reconnects, reconnects)

	counter(d.pruned, m.pruned.Load())
	counter(d.pruneFailures, m.pruneFailures.Load())
	if m.o.Skipped != nil {
		counters(d.skipped, m.o.Skipped())
	}

	v := m.view()
	if v.basis != "" {
		gauge(d.lagSeconds, v.lag.Seconds(), v.basis)
	}
	if s := v.sample; s != nil {
		gauge(d.lagBytes, float64(s.LagBytes))
		gauge(d.retained, float64(s.RetainedBytes))
		if s.SafeBytes != nil {
			gauge(d.safe, float64(*s.SafeBytes))
		}
		gauge(d.active, truth(s.Active))
		for _, status := range Statuses {
			gauge(d.walStatus, truth(s.WALStatus == status), status)
		}
		gauge(d.confirmed, float64(s.Confirmed))
	}
	if received := v.ticks.last.Received; v.holding() && received != 0 {
		gauge(d.received, float64(received))
	}
	gauge(d.inFlight, float64(v.inFlight))
	if v.how.Window > 0 {
		gauge(d.window, float64(v.how.Window))
	}
	gauge(d.leader, truth(v.holding()))
	for _, s := range relay.States {
		gauge(d.state, truth(v.state.State == s), s.String())
	}
	gauge(d.up, truth(v.postgresUp()), sidePostgres)
	if v.state.nats != unknown {
		gauge(d.up, truth(v.state.nats == up), sideNATS)
	}
	gauge(d.build, 1, m.o.Version, m.o.Commit, runtime.Version())
}

// counts are copies of what Entered and Parked count.
func (m *Monitor) counts() (parked, reconnects map[string]uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.parked), maps.Clone(m.reconnects)
}

// refusals are copies of what Refused counts.
func (m *Monitor) refusals() map[string]uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return maps.Clone(m.refused)
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
