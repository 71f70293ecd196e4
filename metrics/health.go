package metrics

import (
	"fmt"
	"time"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/relay"
)

// Report is what the health paths tell as JSON.
type Report struct {
	Live     bool   `json:"live"`
	Stuck    string `json:"stuck,omitempty"` // why it is not live
	Ready    bool   `json:"ready"`
	NotReady string `json:"not_ready,omitempty"` // why

	State   string    `json:"state"` // of relay.State
	Since   time.Time `json:"since"`
	Started time.Time `json:"started"`
	Side    string    `json:"side,omitempty"`  // that the error is about
	Error   string    `json:"error,omitempty"` // why it waits or stands by
	Hint    string    `json:"hint,omitempty"`

	Slot     string `json:"slot"`
	Database string `json:"database"`
	Stream   string `json:"stream"`
	Version  string `json:"version"`

	Published   uint64            `json:"events_published"`
	InFlight    uint64            `json:"inflight_events"`
	Window      uint64            `json:"window_events"` // that may be in flight now; 0 without a session
	PublishMode string            `json:"publish_mode,omitempty"`
	PublishWhy  string            `json:"publish_mode_reason,omitempty"`
	DeadLetters map[string]uint64 `json:"dead_letters"`
	Reconnects  map[string]uint64 `json:"reconnects"`

	LagSeconds *float64  `json:"lag_seconds"`         // null when it is not known
	LagBasis   string    `json:"lag_basis,omitempty"` // event or wal, as the metric's label
	Received   event.LSN `json:"received_lsn"`        // 0/0 while it does not hold the slot

	Estimate

	Postgres PostgresReport `json:"postgres"`
	NATS     NATSReport     `json:"nats"`
}

// PostgresReport is what the sampler saw last, unless that is old.
type PostgresReport struct {
	Up            bool      `json:"up"`
	Error         string    `json:"error,omitempty"`
	Hint          string    `json:"hint,omitempty"`
	WALEnd        event.LSN `json:"wal_end_lsn"`
	Confirmed     event.LSN `json:"confirmed_flush_lsn"`
	LagBytes      int64     `json:"lag_bytes"`
	RetainedBytes int64     `json:"retained_bytes"`
	SafeBytes     *int64    `json:"safe_bytes"`
	SlotActive    bool      `json:"slot_active"`
	WALStatus     string    `json:"wal_status,omitempty"`
}

// NATSReport tells whether the broker answers; Up is null while no session can tell.
type NATSReport struct {
	Up *bool `json:"up"`
}

// Report tells all there is to tell.
func (m *Monitor) Report() Report {
	v := m.view()
	parked, reconnects := m.counts()
	r := Report{
		Stuck: m.stuck(&v), NotReady: m.notReady(&v),
		State: v.state.State.String(), Since: v.state.since, Started: m.began, Side: v.state.Side,
		Slot: m.o.Slot, Database: m.o.Database, Stream: m.o.Stream, Version: m.o.Version,
		Published: m.published(), InFlight: v.inFlight, Window: v.how.Window,
		PublishMode: v.how.Mode, PublishWhy: v.how.Reason, DeadLetters: parked, Reconnects: reconnects,
		LagBasis: v.basis, Postgres: PostgresReport{Up: v.postgresUp()},
		Estimate: v.estimate,
	}
	r.Live, r.Ready = r.Stuck == "", r.NotReady == ""
	if err := v.state.Err; err != nil {
		r.Error, r.Hint = err.Error(), event.HintOf(err)
	}
	if v.basis != "" {
		seconds := v.lag.Seconds()
		r.LagSeconds = &seconds
	}
	if v.holding() {
		r.Received = v.ticks.last.Received
	}
	if s := v.sample; s != nil {
		r.Postgres = PostgresReport{
			Up: true, WALEnd: s.WALEnd, Confirmed: s.Confirmed, LagBytes: s.LagBytes, RetainedBytes: s.RetainedBytes,
			SafeBytes: s.SafeBytes, SlotActive: s.Active, WALStatus: s.WALStatus,
		}
	} else if v.err != nil {
		r.Postgres.Error, r.Postgres.Hint = v.err.Error(), event.HintOf(v.err)
	}
	if v.state.nats != unknown {
		is := v.state.nats == up
		r.NATS.Up = &is
	}
	return r
}

// stuck says why the process does neither get on nor wait for anything that it
// could name, or "". Whatever waits for a server has a limit of its own, far
// below those here: only a fault of this program lets one pass.
func (m *Monitor) stuck(v *view) string {
	limit := m.stallLimit()
	late := func(since time.Time, limit time.Duration) (time.Duration, bool) {
		d := v.now.Sub(since)
		return d.Round(time.Second), d > limit
	}
	switch s := v.state; {
	case s.State == relay.Stopped:
	case v.holding():
		if d, is := late(v.ticks.at, limit); is {
			return fmt.Sprintf("the session's ticker has stood still for %s", d)
		}
		if d, is := late(v.ticks.progress, limit); is {
			return fmt.Sprintf("the session has got nowhere for %s, %d events in flight, %s", d, v.inFlight, activity(v.ticks.last.Activity))
		}
	case s.Trying:
		if d, is := late(s.newsAt, openLimit); is {
			return fmt.Sprintf("a session could not be opened for %s, nor was that given up", d)
		}
	default: // a pause between two sessions, or the end of one
		if d, is := late(s.newsAt, s.Pause+limit); is {
			return fmt.Sprintf("nothing was tried for %s", d)
		}
	}
	return ""
}

func activity(a relay.Activity) string {
	switch a {
	case relay.Reading:
		return "reading"
	case relay.Settling:
		return "waiting for acks"
	}
	return "working"
}

// notReady says why the relay neither streams nor stands by, or "".
func (m *Monitor) notReady(v *view) string {
	s := v.state
	switch {
	case s.State != relay.Streaming && s.State != relay.Standby:
		text := s.State.String()
		if s.Err != nil {
			text += ": " + s.Err.Error()
		}
		return text
	case !v.postgresUp() && v.err != nil:
		return v.err.Error()
	case !v.postgresUp():
		return "Postgres does not answer"
	}
	return ""
}
