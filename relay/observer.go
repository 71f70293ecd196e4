package relay

import (
	"time"

	"github.com/walrelay/walrelay/event"
)

// Observer is told how the relay fares: at a change of state, once a tick and
// once a parked event, never once an event. Its methods return at once; Ticked
// is called from another goroutine than the others.
type Observer interface {
	// Entered tells of a state, or of news about it.
	Entered(Status)
	// Ticked tells about once a StatusInterval how a session goes.
	Ticked(Tick)
	// Parked tells why an event was set aside.
	Parked(event.Reason)
	// Refused tells why an event that was to be published again was not.
	Refused(event.Reason)
}

// State is what the relay is about.
type State uint8

// The states. Between two sessions the relay is in Waiting or Standby, also
// while it tries to open the next one.
const (
	Connecting State = iota + 1 // opens the first session
	Streaming                   // holds the slot, reads and publishes
	Waiting                     // has lost a session, or could not open one
	Standby                     // another relay holds the slot
	Draining                    // was told to stop, settles what is in flight
	Stopped
)

// States are all of them.
var States = []State{Connecting, Streaming, Waiting, Standby, Draining, Stopped}

// Sides are the values of Status.Side.
var Sides = []string{string(sourceSide), string(sinkSide)}

func (s State) String() string {
	switch s {
	case Connecting:
		return "connecting"
	case Streaming:
		return "streaming"
	case Waiting:
		return "waiting"
	case Standby:
		return "standby"
	case Draining:
		return "draining"
	case Stopped:
		return "stopped"
	}
	return "unknown"
}

// Status is a state and what is to say about it.
type Status struct {
	State  State
	Trying bool // a session is being opened

	// Err is why the relay waits, stands by or has stopped; Side is the
	// connection it is about, "postgres" or "nats", as far as that is known.
	Err  error
	Side string

	// Pause is how long the relay waits before it tries again. It is set once
	// for every session that was lost or could not be opened.
	Pause time.Duration
}

// Tick is what a session's ticker sees.
type Tick struct {
	Activity Activity
	Received event.LSN // of the log, up to the loop's last rest
	Recorded event.LSN // every event before it is stored, and a checkpoint says so
	Settled  uint64    // events of the session
}

// Activity is what the loop of a session is at.
type Activity uint32

// The activities.
const (
	Working  Activity = iota
	Reading           // it waits for Postgres to send
	Settling          // it waits for acks
)

// Unobserved is the Observer when there is none.
type Unobserved struct{}

// Entered implements Observer.
func (Unobserved) Entered(Status) {}

// Ticked implements Observer.
func (Unobserved) Ticked(Tick) {}

// Parked implements Observer.
func (Unobserved) Parked(event.Reason) {}

// Refused implements Observer.
func (Unobserved) Refused(event.Reason) {}
