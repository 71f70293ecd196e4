package publisher

import (
	"context"

	"github.com/walrelay/walrelay/event"
)

// Evidence is what the checkpoint says of the events that are stored. It
// holds for the source that wrote it, as long as that is the one that is asked about.
type Evidence struct {
	Found bool // there is a checkpoint

	SystemID, Database, Slot string
	Timeline                 uint32
	Confirm                  event.LSN           // every event up to there is stored or parked,
	Since                    *event.Mark         // if it was inserted after this; nil when that is not known
	Proven                   *event.LSN          // when set, no more than this until a later event is stored
	Tables                   map[string][]string // as in event.Origin
	Unfinished               bool                // a backfill or a recovery is not done
	Forgotten                bool                // the stream is another one, or ends before the checkpoint
}

// Evidence reads the checkpoint. It connects and blocks for a few round trips.
func (p *Publisher) Evidence(ctx context.Context) (Evidence, error) {
	s, err := p.look(ctx)
	if err != nil {
		return Evidence{}, p.classifyConnect(err)
	}
	defer s.nc.Close()
	c, err := s.readCheckpoint(ctx)
	if err != nil {
		return Evidence{}, p.classifyConnect(err)
	}
	if c == nil || c.Version != recordVersion {
		return Evidence{}, nil
	}
	// After the checkpoint, which would otherwise be ahead of the end under a relay that runs.
	var f findings
	if err := s.readEnd(ctx, &f); err != nil {
		return Evidence{}, p.classifyConnect(err)
	}
	return Evidence{
		Found:    true,
		SystemID: c.Owner.SystemID, Database: c.Owner.Database, Slot: c.Owner.Slot,
		Timeline: c.Timeline, Confirm: c.Confirm, Proven: c.Proven, Since: c.Since, Tables: c.Tables, Unfinished: c.Backfill != "",
		Forgotten: f.lastSeq < c.Sequence || !f.created.Equal(c.Created),
	}, nil
}
