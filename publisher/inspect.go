package publisher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Inspection is what a broker holds of a stream at one moment.
type Inspection struct {
	Stream      StreamState  `json:"stream"`
	DeadLetters *StreamState `json:"dead_letters"` // nil when there is no such stream
	Checkpoint  *Place       `json:"checkpoint"`   // nil when there is none
}

// StreamState is how much a stream holds.
type StreamState struct {
	Name         string     `json:"name"`
	Messages     uint64     `json:"messages"`
	Bytes        uint64     `json:"bytes"`
	LastSequence uint64     `json:"last_sequence"`
	LastTime     *time.Time `json:"last_time"` // nil when nothing was ever stored
}

// Place is a checkpoint for whoever looks on.
type Place struct {
	Slot       string    `json:"slot"` // that wrote it
	Database   string    `json:"database"`
	Sequence   uint64    `json:"sequence"`
	Position   string    `json:"position"`
	Confirm    event.LSN `json:"confirm_lsn"`
	CommitTime time.Time `json:"commit_time"` // of the last transaction before it
}

// Inspector looks at a stream, its dead letters and its checkpoint, and changes
// nothing. One goroutine uses it.
type Inspector struct {
	p  *Publisher
	nc *nats.Conn
}

// NewInspector checks the options as New does, but needs no Subjects. It
// connects to nothing.
func NewInspector(o Options) (*Inspector, error) {
	o.Subjects = []string{">"} // no publish will ask
	p, err := New(o)
	if err != nil {
		return nil, err
	}
	return &Inspector{p: p}, nil
}

// Inspect connects unless it is connected, and blocks for some round trips.
func (i *Inspector) Inspect(ctx context.Context) (Inspection, error) {
	fresh := i.nc == nil || i.nc.IsClosed()
	if fresh {
		opts := append([]nats.Option{nats.Name("walrelay"), nats.Timeout(2 * time.Second)}, i.p.o.Connect...)
		nc, err := connect(ctx, i.p.o.URL, append(opts, nats.NoReconnect(), nats.ReconnectBufSize(-1)))
		if err != nil {
			return Inspection{}, i.p.classifyConnect(fmt.Errorf("connect to NATS at %s: %w", hosts(i.p.o.URL), portless(err)))
		}
		i.nc = nc
	}
	r, err := i.inspect(ctx)
	if err != nil {
		lost := i.nc.IsClosed()
		i.Close() // it may be the connection that is at fault
		if lost && !fresh {
			return i.Inspect(ctx) // the server may have been started again
		}
		return Inspection{}, i.p.classifyConnect(err)
	}
	return r, nil
}

func (i *Inspector) inspect(ctx context.Context) (r Inspection, err error) {
	js, err := jetstream.New(i.nc, jetstream.WithDefaultTimeout(apiTimeout))
	if err != nil {
		return r, err
	}
	o := &i.p.o
	state, err := stateOf(ctx, js, o.Stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return r, event.Fail(event.Precondition, "walrelay run --create-stream makes it", "stream %q does not exist", o.Stream)
	}
	if err != nil {
		return r, err
	}
	r.Stream = *state
	if r.DeadLetters, err = stateOf(ctx, js, o.DeadLetters); err != nil && !errors.Is(err, jetstream.ErrStreamNotFound) {
		return r, err
	}
	s := &Session{p: i.p, o: o, nc: i.nc, js: js}
	c, err := s.readCheckpoint(ctx)
	var api *apiError
	if errors.As(err, &api) && api.ErrCode == codeStreamNotFound {
		return r, nil // there is no bucket yet
	}
	if err != nil || c == nil {
		return r, err
	}
	r.Checkpoint = &Place{
		Slot: c.Owner.Slot, Database: c.Owner.Database, Sequence: c.Sequence,
		Position: c.Position.String(), Confirm: c.Confirm, CommitTime: c.CommitTime,
	}
	return r, nil
}

func stateOf(ctx context.Context, js jetstream.JetStream, name string) (*StreamState, error) {
	st, err := js.Stream(ctx, name)
	if err != nil {
		return nil, streamError(name, err)
	}
	s := st.CachedInfo().State
	state := &StreamState{Name: name, Messages: s.Msgs, Bytes: s.Bytes, LastSequence: s.LastSeq}
	if s.LastSeq > 0 && !s.LastTime.IsZero() {
		state.LastTime = &s.LastTime
	}
	return state, nil
}

// Close ends the connection. Inspect opens another.
func (i *Inspector) Close() {
	if i.nc != nil {
		i.nc.Close()
		i.nc = nil
	}
}
