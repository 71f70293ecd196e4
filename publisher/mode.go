package publisher

import (
	"errors"
	"fmt"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// Mode is how the messages of a session ask for their acks.
type Mode string

// The modes. Whatever the mode, a lone event goes out at once, as a message
// that names its predecessor and asks for its ack.
const (
	ModeAuto   Mode = "auto"   // ModeAtomic where it pays and the stream takes it, else ModeChain
	ModeChain  Mode = "chain"  // every message asks for an ack of its own
	ModeSparse Mode = "sparse" // only some messages ask: another writer's message can cost an event unseen
	ModeAtomic Mode = "atomic" // batches that the server stores as a whole or not at all

	// ModeSingle is that of a shared stream: one message at a time. It cannot be asked for.
	ModeSingle Mode = "single"
)

// Sync is when a server syncs its files, as far as its operator says so: a
// client cannot see it.
type Sync string

// What is known of sync_interval.
const (
	SyncUnknown  Sync = "unknown"
	SyncAlways   Sync = "always"   // before every ack
	SyncInterval Sync = "interval" // now and then
)

// Choice is the mode of the sessions, and why it is that one.
type Choice struct {
	Mode   Mode
	Reason string
}

// choose picks the mode for a stream as it is.
func (o *Options) choose(c *jetstream.StreamConfig) Choice {
	switch {
	case o.Shared:
		return Choice{ModeSingle, "the stream has other writers"}
	case o.Mode != ModeAuto:
		return Choice{o.Mode, "asked for"}
	case o.Sync != SyncAlways:
		return Choice{ModeChain, "the server is not said to sync always"}
	case !c.AllowAtomicPublish:
		return Choice{ModeChain, "the stream takes no atomic batches"}
	}
	return Choice{ModeAtomic, "the server syncs always, and once for a whole batch"}
}

// wantsAtomic reports whether a stream that is created should take atomic batches.
func (o *Options) wantsAtomic() bool {
	return !o.Shared && (o.Mode == ModeAtomic || o.Mode == ModeAuto && o.Sync == SyncAlways)
}

// judgeMode finds what stands between the stream and the mode.
func (o *Options) judgeMode(c *jetstream.StreamConfig) event.Findings {
	if !o.wantsAtomic() || c.AllowAtomicPublish {
		return nil
	}
	f := event.Finding{
		Name: "atomic", Level: event.WARN,
		Detail: fmt.Sprintf("stream %q takes no atomic batches, so the server syncs each message by itself", c.Name),
		Remedy: fmt.Sprintf("nats stream edit %s --allow-batch (nats-server 2.12 or later), or --publish-mode chain to leave it so", c.Name),
	}
	if o.Mode == ModeAtomic {
		f.Level = event.FAIL
		f.Detail = fmt.Sprintf("stream %q takes no atomic batches", c.Name)
		f.Remedy = fmt.Sprintf("nats stream edit %s --allow-batch (nats-server 2.12 or later), or --publish-mode auto", c.Name)
	}
	return event.Findings{f}
}

// checkMode finds options that go together with no mode.
func (o *Options) checkMode(bad func(hint, format string, args ...any)) {
	switch o.Mode {
	case ModeAuto, ModeChain:
	case ModeSparse, ModeAtomic:
		if o.Shared {
			bad("leave out --publish-mode, or give walrelay a stream of its own", "publish mode %q does not go with a shared stream", o.Mode)
		}
	default:
		bad("use auto, chain, sparse or atomic", "unknown publish mode %q", o.Mode)
	}
	switch o.Sync {
	case SyncUnknown, SyncAlways, SyncInterval:
	default:
		bad("use always, interval or unknown", "unknown sync mode %q", o.Sync)
	}
}

// Publishing is the mode of the sessions, none before the first one, and how
// many events may be in flight now, 0 without a session. It counts only with a
// Meter, and may be called from any goroutine.
func (p *Publisher) Publishing() (c Choice, window uint64) {
	if chosen := p.chosen.Load(); chosen != nil {
		c = *chosen
	}
	if s := p.session.Load(); s != nil {
		window = s.pace.limit.Load()
	}
	return c, window
}

// choose makes c the mode of the session, and says so when it is news.
func (s *Session) choose(c Choice) {
	s.mode = c.Mode
	if was := s.p.chosen.Swap(&c); was == nil || *was != c {
		s.o.Log.Info("publishing", "mode", string(c.Mode), "reason", c.Reason, "stream", s.o.Stream)
	}
	if c.Mode == ModeSparse {
		s.warn(true, "only some messages ask for an ack: another client that writes to the stream can make an event vanish unseen", "mode", string(c.Mode))
	}
}

// precise reports whether the event at pos has to be published as in a chain,
// because it may be the one for which a message of many was refused.
func (s *Session) precise(pos event.Position) bool {
	if s.p.doubt.IsZero() {
		return false
	}
	if pos.Compare(s.p.doubt) <= 0 {
		return true
	}
	s.p.doubt = event.Position{}
	return false
}

// suspectAll makes the next session publish what was in flight as in a chain,
// because a refusal need not be about the message that it answers.
func (s *Session) suspectAll(sup *surprise) {
	if s.mode != ModeSparse && s.mode != ModeAtomic {
		return
	}
	s.p.doubt = s.window[s.appended%uint64(len(s.window))].position
	var api *apiError
	if s.mode == ModeAtomic && errors.As(sup.err, &api) && api.ErrCode == codeBatchTooLarge {
		s.p.batchMost = max(s.p.batchMost/2, 1) // the server has a limit of its own
	}
}
