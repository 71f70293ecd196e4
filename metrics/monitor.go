package metrics

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/relay"
)

// Options of a Monitor. Slot, Database and InFlight are required.
type Options struct {
	Slot     string
	Database string
	Stream   string
	Version  string
	Commit   string

	// InFlight is the number of events that wait for their acks, and when the
	// first of them was committed. It may be called from any goroutine.
	InFlight func() (events uint64, oldest time.Time)

	Publishing func() Publishing // from any goroutine, too; nil when that is not known

	Skipped func() map[string]uint64 // messages of the log that make no event, by kind; from any goroutine, nil for none

	Failures []string // what Failed is told

	StatusInterval time.Duration // between ticks of the relay; 1 s
	AckTimeout     time.Duration // longest wait for an ack; 2 s
}

// Publishing says how events are published now.
type Publishing struct {
	Mode   string // "" before the first session
	Reason string // why that one
	Window uint64 // events that may be in flight now; 0 without a session
}

// How long the parts may take before something is wrong with them. Those that
// depend on the configuration are methods of Monitor.
const (
	// sampleLimit is the age at which a sample says nothing about now. A
	// sampler tells one a second, or that it could not get one.
	sampleLimit = 5 * time.Second
	// openLimit is the longest try to open a session. Each step of it has a
	// limit of its own, far below.
	openLimit = 5 * time.Minute
)

// Monitor holds what it was told last. Its methods may be called from any
// goroutine, but for Acked and Rest.
type Monitor struct {
	meter
	o     Options
	began time.Time

	mu    sync.Mutex
	state state
	ticks ticks
	slot  slot

	parked     map[string]uint64
	refused    map[string]uint64
	reconnects map[string]uint64

	pruned, pruneFailures atomic.Uint64
}

// state is what the relay is about.
type state struct {
	relay.Status
	since    time.Time // of the state
	newsAt   time.Time // of the last Entered
	sessions uint64    // that streamed
	nats     tristate  // whether the broker is there
}

type tristate uint8

const (
	unknown tristate = iota
	down
	up
)

// ticks is what the session's ticker has told.
type ticks struct {
	last     relay.Tick
	at       time.Time
	progress time.Time // when the session last got on, or had a reason not to
	recorded event.LSN // by this session or an earlier one
}

// slot is what the sampler has told.
type slot struct {
	sample  *Sample // nil when the last read failed
	err     error   // of the last read
	at      time.Time
	history history
	trend   Trend
}

// New makes a Monitor. It starts nothing.
func New(o Options) *Monitor {
	if o.StatusInterval == 0 {
		o.StatusInterval = time.Second
	}
	if o.AckTimeout == 0 {
		o.AckTimeout = 2 * time.Second
	}
	now := time.Now()
	return &Monitor{
		o: o, began: now,
		meter:      meter{failures: zeroes(o.Failures)},
		state:      state{Status: relay.Status{State: relay.Connecting}, since: now, newsAt: now},
		parked:     zeroes(reasons()),
		refused:    zeroes(append(reasons(), string(event.ReasonReplayed))),
		reconnects: zeroes(relay.Sides),
	}
}

func reasons() []string {
	names := make([]string, len(event.Reasons))
	for i, r := range event.Reasons {
		names[i] = string(r)
	}
	return names
}

// Entered implements relay.Observer.
func (m *Monitor) Entered(s relay.Status) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	if s.State != m.state.State {
		m.state.since = now
	}
	m.state.Status, m.state.newsAt = s, now
	switch s.State {
	case relay.Streaming:
		m.state.sessions++
		m.state.nats = up
		m.ticks = ticks{at: now, progress: now, recorded: m.ticks.recorded}
	case relay.Waiting, relay.Standby:
		// What the other side is like is not known between two sessions.
		m.state.nats = unknown
		if s.Side == sideNATS {
			m.state.nats = down
		}
	}
	if s.State == relay.Waiting && s.Pause > 0 {
		m.reconnects[known(m.reconnects, s.Side)]++
	}
}

// Ticked implements relay.Observer.
func (m *Monitor) Ticked(t relay.Tick) {
	now := time.Now()
	inFlight, _ := m.o.InFlight()
	m.mu.Lock()
	defer m.mu.Unlock()
	idle := t.Activity == relay.Reading && inFlight == 0
	if idle || t.Settled != m.ticks.last.Settled || t.Received != m.ticks.last.Received {
		m.ticks.progress = now
	}
	m.ticks.last, m.ticks.at = t, now
	m.ticks.recorded = max(m.ticks.recorded, t.Recorded)
}

// Parked implements relay.Observer.
func (m *Monitor) Parked(r event.Reason) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.parked[known(m.parked, string(r))]++
}

// Pruned takes the end of a pass over the outbox: how many rows are deleted, and
// the error that ended it.
func (m *Monitor) Pruned(rows int64, err error) {
	m.pruned.Add(uint64(max(rows, 0)))
	if err != nil {
		m.pruneFailures.Add(1)
	}
}

// Refused implements relay.Observer.
func (m *Monitor) Refused(r event.Reason) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refused[known(m.refused, string(r))]++
}

// Sampled takes a sample of the slot, or the error for which there is none.
func (m *Monitor) Sampled(s Sample, err error) {
	published := m.published()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.slot.at, m.slot.err, m.slot.sample = time.Now(), err, nil
	if err != nil {
		return
	}
	m.slot.sample = &s
	m.slot.history.add(s.At, s.WALEnd, s.Confirmed)
	m.slot.trend.Add(s, published)
}

// stallLimit is how long a session may get nowhere without a reason. An overdue
// ack ends the session long before.
func (m *Monitor) stallLimit() time.Duration {
	return 30*time.Second + m.o.AckTimeout + 3*m.o.StatusInterval
}

// grace is how long a streaming session may not have received what is there.
func (m *Monitor) grace() time.Duration { return max(5*time.Second, 3*m.o.StatusInterval) }

// ReadyLimit is how long a server that does not answer goes unnoticed by Ready.
func (m *Monitor) ReadyLimit() time.Duration {
	return max(m.o.AckTimeout+3*m.o.StatusInterval, sampleLimit)
}

const (
	sidePostgres = "postgres"
	sideNATS     = "nats"
)

// view is a moment's copy of all that is known.
type view struct {
	now      time.Time
	state    state
	ticks    ticks
	sample   *Sample // nil when there is none that is fresh
	err      error   // of the last read
	estimate Estimate
	inFlight uint64
	how      Publishing
	lag      time.Duration
	basis    string // of lag; "" when it is not known
}

// holding reports whether the relay holds the slot.
func (v *view) holding() bool {
	return v.state.State == relay.Streaming || v.state.State == relay.Draining
}

// postgresUp reports whether Postgres answers.
func (v *view) postgresUp() bool { return v.sample != nil }

func (m *Monitor) view() view {
	v := view{now: time.Now()}
	var oldest time.Time
	v.inFlight, oldest = m.o.InFlight()
	if m.o.Publishing != nil {
		v.how = m.o.Publishing()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	v.state, v.ticks, v.err = m.state, m.ticks, m.slot.err
	if v.now.Sub(m.slot.at) <= sampleLimit {
		v.sample = m.slot.sample
	}
	if v.sample != nil {
		v.estimate = m.slot.trend.Estimate()
	}
	l := lagState{
		streaming: v.holding(), inFlight: v.inFlight, oldest: oldest,
		received: v.ticks.last.Received, recorded: v.ticks.recorded,
		sample: v.sample, history: &m.slot.history, grace: m.grace(),
	}
	if lag, basis, ok := l.seconds(v.now); ok {
		v.lag, v.basis = lag, basis
	}
	return v
}
