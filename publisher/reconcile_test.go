package publisher

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

// The world of the table: timeline 2 began at 0/1000, the WAL ends at 0/9000,
// and the checkpoint says that sequence 100 is the event committed at 0/3000.
var (
	madeAt   = time.Date(2026, 3, 1, 12, 0, 0, 123456789, time.UTC)
	commitAt = time.Date(2026, 3, 2, 12, 0, 0, 456000, time.UTC)
)

func at(timeline uint32, commit event.LSN) event.Position {
	return event.Position{Timeline: timeline, Commit: commit, Change: commit - 0x10}
}

func usual() findings {
	return findings{
		stream: "orders",
		origin: event.Origin{
			SystemID: "sys", Database: "shop", Slot: "walrelay",
			Timeline: 2, History: []event.Switch{{Timeline: 1, End: 0x1000}}, WALEnd: 0x9000,
			ConfirmedFlush: 0x2000, Fingerprint: "tables",
		},
		created: madeAt, lastSeq: 105,
		last: &lastMessage{ours: true, position: at(2, 0x4000)},
		tail: tailOf(101, at(2, 0x3100), at(2, 0x3200), at(2, 0x3300), at(2, 0x3400), at(2, 0x4000)),
		checkpoint: &record{
			Version: recordVersion, Owner: owner{"sys", "shop", "walrelay"}, Created: madeAt,
			Sequence: 100, Position: at(2, 0x3000), Timeline: 2, XID: 7, CommitTime: commitAt,
			Confirm: 0x3010, Fingerprint: "tables", Window: 2048,
		},
	}
}

// tailOf numbers messages from first; a zero position is another client's.
func tailOf(first uint64, positions ...event.Position) []tailMessage {
	var tail []tailMessage
	for i, p := range positions {
		tail = append(tail, tailMessage{lastMessage{ours: !p.IsZero(), position: p}, first + uint64(i)})
	}
	return tail
}

var foreigner = event.Position{}

func TestDecide(t *testing.T) {
	proof := &event.Checkpoint{Position: at(2, 0x3000), XID: 7, CommitTime: commitAt, Confirm: 0x3010}
	earlier := func(seq uint64, commit event.LSN, change func(*record)) record {
		r := *usual().checkpoint
		r.Sequence, r.Position, r.Confirm, r.XID = seq, at(2, commit), commit+0x10, uint32(seq)
		if change != nil {
			change(&r)
		}
		return r
	}
	proofOf := func(r record) *event.Checkpoint {
		return &event.Checkpoint{Position: r.Position, XID: r.XID, CommitTime: r.CommitTime, Confirm: r.Confirm}
	}
	forgetful := func(f *findings) {
		f.lastSeq, f.tail = 90, nil
		f.last = &lastMessage{ours: true, position: at(2, 0x2900)}
		f.earlier = []record{earlier(100, 0x3000, nil), earlier(95, 0x2A00, nil), earlier(80, 0x2800, nil), earlier(70, 0x2100, nil)}
	}
	gone := func(f *findings) { f.last, f.tail = nil, nil }

	type want struct {
		class event.Class // of the failure
		text  string      // part of it; "" when there is none
		after event.Position
		gone  uint64
		base  uint64
		proof *event.Checkpoint
	}
	for _, c := range []struct {
		name   string
		change func(*findings)
		want   want
	}{
		{
			"the last message is ours", func(*findings) {},
			want{after: at(2, 0x4000), base: 105, proof: proof},
		},
		{
			"the checkpoint's transaction is confirmed, so it does not reappear", func(f *findings) { f.origin.ConfirmedFlush = 0x3010 },
			want{after: at(2, 0x4000), base: 105},
		},
		{
			"the checkpoint has no transaction", func(f *findings) { f.checkpoint.XID = 0 },
			want{after: at(2, 0x4000), base: 105},
		},
		{
			"tables changed, but the last message is there", func(f *findings) { f.origin.Fingerprint = "more tables" },
			want{after: at(2, 0x4000), base: 105},
		},
		{"nothing was stored since the checkpoint", func(f *findings) {
			f.lastSeq, f.tail, f.last.position = 100, nil, at(2, 0x3000)
		}, want{after: at(2, 0x3000), base: 100, proof: proof}},
		{
			"nothing was stored since, and that message is gone", func(f *findings) { f.lastSeq, f.tail, f.last = 100, nil, nil },
			want{after: at(2, 0x3000), base: 100, proof: proof},
		},
		{
			"the checkpoint's message has another position", func(f *findings) { f.lastSeq, f.tail = 100, nil },
			want{class: event.Lost, text: "the checkpoint says"},
		},
		{
			"the same, accepted", func(f *findings) { f.lastSeq, f.tail, f.acceptGap = 100, nil, true },
			want{after: at(2, 0x4000), base: 100, proof: proof},
		},
		{
			"the last message lies before the checkpoint", func(f *findings) { f.last.position = at(2, 0x2F00) },
			want{class: event.Lost, text: "before the checkpoint's"},
		},
		{
			"the same, accepted", func(f *findings) { f.last.position, f.acceptGap = at(2, 0x2F00), true },
			want{after: at(2, 0x2F00), base: 105, proof: proof},
		},

		{
			"fresh stream, no checkpoint", func(f *findings) { f.checkpoint, f.lastSeq, f.last, f.tail = nil, 0, nil, nil },
			want{},
		},
		{"claimed, nothing published", func(f *findings) {
			f.checkpoint.Sequence, f.checkpoint.Position, f.checkpoint.XID = 0, event.Position{}, 0
			f.lastSeq, f.last, f.tail = 0, nil, nil
		}, want{}},
		{"claimed, nothing published, stream made anew", func(f *findings) {
			f.checkpoint.Sequence, f.checkpoint.Position, f.checkpoint.XID = 0, event.Position{}, 0
			f.lastSeq, f.last, f.tail, f.created = 0, nil, nil, madeAt.Add(time.Hour)
		}, want{}},
		{
			"lost bucket, last message ours", func(f *findings) { f.checkpoint, f.tail = nil, nil },
			want{after: at(2, 0x4000), base: 105},
		},
		{
			"lost bucket, last message gone", func(f *findings) { f.checkpoint, f.last, f.tail = nil, nil, nil },
			want{class: event.Precondition, text: "no checkpoint"},
		},
		{
			"lost bucket, last message foreign", func(f *findings) { f.checkpoint, f.last, f.tail = nil, &lastMessage{}, nil },
			want{class: event.Precondition, text: "no checkpoint"},
		},
		{"lost bucket, last message foreign, adopted", func(f *findings) {
			f.checkpoint, f.last, f.tail, f.adopt = nil, &lastMessage{}, nil, true
		}, want{base: 105}},
		{
			"no checkpoint, last message of another history", func(f *findings) { f.checkpoint, f.tail, f.last.position = nil, nil, at(2, 0xA000) },
			want{class: event.Precondition, text: "no checkpoint"},
		},
		{"no checkpoint, last message of another history, adopted: its position says nothing here", func(f *findings) {
			f.checkpoint, f.tail, f.last.position, f.adopt = nil, nil, at(2, 0xA000), true
		}, want{base: 105}},

		{
			"checkpoint of another format", func(f *findings) { f.checkpoint.Version = 2 },
			want{class: event.Precondition, text: "format version 2"},
		},
		{
			"other owner", func(f *findings) { f.origin.Slot = "other" },
			want{class: event.Precondition, text: "belongs to slot \"walrelay\""},
		},
		{
			"other owner, adopted: drops nothing", func(f *findings) { f.origin.Slot, f.adopt = "other", true },
			want{base: 105},
		},
		{"adopted before, nothing published since: the last message is the other owner's", func(f *findings) {
			f.checkpoint.Sequence, f.checkpoint.Position, f.checkpoint.XID = 105, event.Position{}, 0
		}, want{base: 105}},
		{"adopted before, last message gone", func(f *findings) {
			f.checkpoint.Sequence, f.checkpoint.Position, f.checkpoint.XID, f.last = 103, event.Position{}, 0, nil
			f.tail = nil
		}, want{base: 105, gone: 2}},
		{
			"new system id, stream drained to the checkpoint", func(f *findings) { f.origin.SystemID, f.lastSeq = "new", 100 },
			want{base: 100},
		},
		{
			"new system id, messages after the checkpoint", func(f *findings) { f.origin.SystemID = "new" },
			want{class: event.Lost, text: "5 messages after the last checkpoint"},
		},
		{
			"the same, accepted", func(f *findings) { f.origin.SystemID, f.acceptGap = "new", true },
			want{base: 105},
		},
		{
			"new system id and another slot", func(f *findings) { f.origin.SystemID, f.origin.Slot = "new", "other" },
			want{class: event.Precondition, text: "belongs to"},
		},

		{
			"confirmed past the checkpoint", func(f *findings) { f.origin.ConfirmedFlush = 0x3011 },
			want{class: event.Lost, text: "past the checkpoint"},
		},
		{
			"the same, accepted", func(f *findings) { f.origin.ConfirmedFlush, f.acceptGap = 0x3011, true },
			want{after: at(2, 0x4000), base: 105},
		},

		{"last message foreign, ours before it", func(f *findings) {
			f.last = &lastMessage{}
			f.tail = tailOf(101, at(2, 0x3100), at(2, 0x3200), at(2, 0x3300), at(2, 0x3400), foreigner)
		}, want{class: event.Precondition, text: "message 105 of stream \"orders\" was not written by walrelay"}},
		{"the same, adopted", func(f *findings) {
			f.last, f.adopt = &lastMessage{}, true
			f.tail = tailOf(101, at(2, 0x3100), at(2, 0x3200), at(2, 0x3300), foreigner, foreigner)
		}, want{after: at(2, 0x3300), base: 105, proof: proof}},
		{"all after the checkpoint foreign, adopted", func(f *findings) {
			f.last, f.adopt, f.lastSeq = &lastMessage{}, true, 102
			f.tail = tailOf(101, foreigner, foreigner)
		}, want{after: at(2, 0x3000), base: 102, proof: proof}},
		{"foreign, and what was before it is gone: adopting would guess", func(f *findings) {
			f.last, f.adopt = &lastMessage{}, true
			f.tail = tailOf(105, foreigner)
		}, want{class: event.Precondition, text: "and those before it"}},
		{"a hole before the foreign message: adopting would guess", func(f *findings) {
			f.last, f.adopt = &lastMessage{}, true
			f.tail = append(tailOf(101, at(2, 0x3100)), tailOf(105, foreigner)...)
		}, want{class: event.Precondition, text: "and those before it"}},
		{"the same, gap accepted: publishes again what may be missing", func(f *findings) {
			f.last, f.acceptGap = &lastMessage{}, true
			f.tail = append(tailOf(101, at(2, 0x3100)), tailOf(105, foreigner)...)
		}, want{after: at(2, 0x3100), base: 105, proof: proof}},
		{
			"foreign at the checkpoint: adopted then", func(f *findings) { f.lastSeq, f.last, f.tail = 100, &lastMessage{}, nil },
			want{after: at(2, 0x3000), base: 100, proof: proof},
		},
		{"foreign on a stream that was adopted without a position", func(f *findings) {
			f.checkpoint.Position, f.checkpoint.XID, f.last, f.adopt = event.Position{}, 0, &lastMessage{}, true
			f.tail = tailOf(101, foreigner, foreigner, foreigner, foreigner, foreigner)
		}, want{base: 105}},
		{"foreign between ours: an event is missing", func(f *findings) {
			f.tail = tailOf(101, at(2, 0x3100), foreigner, at(2, 0x3300), at(2, 0x3400), at(2, 0x4000))
		}, want{class: event.Lost, text: "message 102 of stream \"orders\" was not written by walrelay and took the place of an event"}},
		{"the same, to be adopted: still a gap", func(f *findings) {
			f.adopt = true
			f.tail = tailOf(101, at(2, 0x3100), foreigner, at(2, 0x3300), at(2, 0x3400), at(2, 0x4000))
		}, want{class: event.Lost, text: "which is missing"}},
		{"the same, accepted", func(f *findings) {
			f.acceptGap = true
			f.tail = tailOf(101, at(2, 0x3100), foreigner, at(2, 0x3300), at(2, 0x3400), at(2, 0x4000))
		}, want{after: at(2, 0x4000), base: 105, proof: proof}},

		{
			"backfill interrupted, and the slot made since", func(f *findings) { f.checkpoint.Backfill = backfillRunning },
			want{class: event.Lost, text: "backfill of stream \"orders\" was interrupted"},
		},
		{
			"backfill done", func(f *findings) { f.checkpoint.Backfill = backfillDone },
			want{after: at(2, 0x4000), base: 105, proof: proof},
		},
		{"backfill: goes on from any state of its own stream", func(f *findings) {
			f.origin.Backfill, f.origin.ConfirmedFlush, f.origin.SystemID = true, 0x8000, "new"
		}, want{base: 105}},
		{
			"backfill into the stream of another slot", func(f *findings) { f.origin.Backfill, f.origin.Slot = true, "other" },
			want{class: event.Precondition, text: "belongs to"},
		},
		{
			"backfill into a stream with foreign messages", func(f *findings) { f.origin.Backfill, f.last = true, &lastMessage{} },
			want{class: event.Precondition, text: "was not written by walrelay"},
		},
		{"backfill into a stream of another origin", func(f *findings) {
			f.origin.Backfill, f.checkpoint, f.last, f.tail = true, nil, &lastMessage{}, nil
		}, want{class: event.Precondition, text: "messages of another origin"}},
		{"the broker forgot rows of a backfill: the log has them not", func(f *findings) {
			forgetful(f)
			f.last, f.origin.ConfirmedFlush = nil, 0x2700
			for i := range f.earlier {
				f.earlier[i].Backfill = backfillRunning
			}
		}, want{class: event.Lost, text: "lost acked messages"}},
		{"a table was out of the publication since", func(f *findings) {
			f.checkpoint.Tables = map[string][]string{"public.outbox": {"1/r7@9"}}
			f.origin.Tables = map[string][]string{"public.outbox": {"1/r8@9"}}
		}, want{class: event.Lost, text: "table public.outbox was made anew"}},
		{"the same, accepted", func(f *findings) {
			f.checkpoint.Tables = map[string][]string{"public.outbox": {"1/r7@9"}}
			f.origin.Tables, f.acceptGap = map[string][]string{"public.outbox": {"1/r8@9"}}, true
		}, want{after: at(2, 0x4000), base: 105, proof: proof}},
		{"another publication has the table, too, and there is another table", func(f *findings) {
			f.checkpoint.Tables = map[string][]string{"public.outbox": {"1/r7@9"}}
			f.origin.Tables = map[string][]string{"public.outbox": {"1/r7@9", "1/r9@11"}, "public.more": {"2/r8@9"}}
		}, want{after: at(2, 0x4000), base: 105, proof: proof}},

		{
			"gone: asks for the next events", gone,
			want{after: at(2, 0x3000), gone: 5, base: 105, proof: proof},
		},
		{
			"gone, no transaction in the checkpoint", func(f *findings) { gone(f); f.checkpoint.XID = 0 },
			want{after: at(2, 0x3000), gone: 5, base: 105},
		},
		{"gone, drained before", func(f *findings) {
			gone(f)
			f.checkpoint.Drained = true
		}, want{after: at(2, 0x3000), base: 105, proof: proof}},
		{"gone, drained before, then tables changed", func(f *findings) {
			gone(f)
			f.checkpoint.Drained, f.origin.Fingerprint = true, "more tables"
		}, want{after: at(2, 0x3000), base: 105}},
		{"gone, but events after the checkpoint are left", func(f *findings) {
			f.last, f.tail = nil, f.tail[:3]
		}, want{after: at(2, 0x3300), gone: 2, base: 105, proof: proof}},
		{"gone, and this process had nothing in flight", func(f *findings) {
			gone(f)
			f.reached = &reached{sequence: 102, position: at(2, 0x3200), settled: true}
		}, want{after: at(2, 0x3200), base: 105, proof: proof}},
		{"gone, and this process had more in flight", func(f *findings) {
			gone(f)
			f.reached = &reached{sequence: 102, position: at(2, 0x3200)}
		}, want{after: at(2, 0x3200), gone: 3, base: 105, proof: proof}},
		{"an event was refused, and a later one is stored", func(f *findings) {
			f.reached = &reached{sequence: 102, position: at(2, 0x3200), settled: true, refused: true}
		}, want{class: event.Lost, text: "the event after sequence 102 of stream \"orders\" was refused, and the one at sequence 103 was stored all the same"}},
		{"the same, accepted", func(f *findings) {
			f.reached = &reached{sequence: 102, position: at(2, 0x3200), settled: true, refused: true}
			f.acceptGap = true
		}, want{after: at(2, 0x4000), base: 105, proof: proof}},
		{
			"gone, tables changed", func(f *findings) { gone(f); f.origin.Fingerprint = "more tables" },
			want{class: event.Lost, text: "publications or tables were changed"},
		},
		{"gone, tables changed, accepted: publishes again", func(f *findings) {
			gone(f)
			f.origin.Fingerprint, f.acceptGap = "more tables", true
		}, want{after: at(2, 0x3000), base: 105}},
		{"gone, promoted since", func(f *findings) {
			gone(f)
			f.origin.Timeline, f.origin.History = 3, append(f.origin.History, event.Switch{Timeline: 2, End: 0x5000})
		}, want{class: event.Lost, text: "promoted since"}},
		{"gone, promoted since the claim of an empty stream", func(f *findings) {
			gone(f)
			f.checkpoint.Sequence, f.checkpoint.Position, f.checkpoint.XID = 0, event.Position{}, 0
			f.origin.Timeline, f.origin.History = 3, append(f.origin.History, event.Switch{Timeline: 2, End: 0x5000})
		}, want{class: event.Lost, text: "promoted since"}},
		{"gone, promoted before the checkpoint was written", func(f *findings) {
			gone(f)
			f.checkpoint.Position = at(1, 0x0F00)
		}, want{after: at(1, 0x0F00), gone: 5, base: 105}},
		{
			"gone, and the server's WAL ends before the checkpoint", func(f *findings) { gone(f); f.origin.WALEnd = 0x3000 },
			want{class: event.Lost, text: "ends at 0/3000"},
		},

		{"orphan: the promoted server never had the last event", func(f *findings) {
			f.last.position = at(1, 0x1800)
			f.checkpoint.Position = at(1, 0x0900)
			f.tail = tailOf(101, at(1, 0x0A00), at(1, 0x0B00), at(1, 0x1100), at(1, 0x1200), at(1, 0x1800))
		}, want{after: at(1, 0x1800), base: 105}},
		{"the last event of the old timeline is in the new history", func(f *findings) {
			f.last.position = at(1, 0x0E00)
			f.checkpoint.Position = at(1, 0x0900)
			f.origin.ConfirmedFlush = 0x0800
		}, want{after: at(1, 0x0E00), base: 105, proof: &event.Checkpoint{Position: at(1, 0x0900), XID: 7, CommitTime: commitAt, Confirm: 0x3010}}},
		{
			"the server went back in time", func(f *findings) { f.origin.WALEnd = 0x3800 },
			want{class: event.Lost, text: "WAL of the server ends at 0/3800"},
		},
		{
			"the server went back in time, accepted: drops nothing", func(f *findings) { f.origin.WALEnd, f.acceptGap = 0x3800, true },
			want{base: 105},
		},
		{
			"an old primary on a timeline that was left", func(f *findings) { f.last.position = at(3, 0x4000) },
			want{class: event.Lost, text: "on timeline 2"},
		},

		{
			"forgotten: heals from the newest usable checkpoint", forgetful,
			want{after: at(2, 0x2900), base: 90, proof: proofOf(earlier(80, 0x2800, nil))},
		},
		{
			"forgotten, last message gone: asks from the earlier checkpoint on", func(f *findings) { forgetful(f); f.last = nil },
			want{after: at(2, 0x2800), gone: 10, base: 90, proof: proofOf(earlier(80, 0x2800, nil))},
		},
		{"forgotten, but the WAL after the earlier checkpoints is confirmed", func(f *findings) {
			forgetful(f)
			f.origin.ConfirmedFlush = 0x2A00
		}, want{class: event.Lost, text: "lost acked messages"}},
		{"forgotten, earlier checkpoints of another owner", func(f *findings) {
			forgetful(f)
			f.last = nil
			for i := range f.earlier {
				f.earlier[i].Owner.Slot = "other"
			}
		}, want{class: event.Lost, text: "lost acked messages"}},
		{"forgotten, earlier checkpoints of a stream of the same name", func(f *findings) {
			forgetful(f)
			f.last = nil
			for i := range f.earlier {
				f.earlier[i].Created = madeAt.Add(-time.Hour)
			}
		}, want{class: event.Lost, text: "lost acked messages"}},
		{
			"forgotten, no history: the last message is enough", func(f *findings) { forgetful(f); f.earlier = nil; f.origin.ConfirmedFlush = 0x2900 },
			want{after: at(2, 0x2900), base: 90},
		},
		{"forgotten, no history, and the WAL after the last message is confirmed", func(f *findings) {
			forgetful(f)
			f.earlier, f.origin.ConfirmedFlush = nil, 0x2901
		}, want{class: event.Lost, text: "its last sequence is 90, the checkpoint's is 100, and Postgres has dropped the WAL up to 0/2901: events from 2:0/2900:0/28F0:0 up to there are missing"}},
		{
			"forgotten, no history, and the last message is gone", func(f *findings) { forgetful(f); f.earlier, f.last = nil, nil },
			want{class: event.Lost, text: "events from the first one up to there are missing"},
		},
		{"forgotten, no history, and the last message is of the source that it was adopted from", func(f *findings) {
			forgetful(f)
			f.earlier, f.checkpoint.Foreign = nil, 90
		}, want{class: event.Lost, text: "lost acked messages"}},
		{"forgotten, no history, and the last message is of another history", func(f *findings) {
			forgetful(f)
			f.earlier, f.last.position = nil, at(1, 0x2900)
		}, want{class: event.Lost, text: "lost acked messages"}},
		{"forgotten, the earlier checkpoint covers only by its position", func(f *findings) {
			forgetful(f)
			f.last, f.origin.ConfirmedFlush, f.earlier[2].Confirm = nil, 0x2800, 0x2700
		}, want{after: at(2, 0x2800), gone: 10, base: 90, proof: &event.Checkpoint{Position: at(2, 0x2800), XID: 80, CommitTime: commitAt, Confirm: 0x2700}}},
		{"forgotten, the earlier checkpoint is of a timeline that ended before the confirmed LSN", func(f *findings) {
			forgetful(f)
			f.last = nil
			for i := range f.earlier {
				f.earlier[i].Timeline, f.earlier[i].Position.Timeline = 1, 1
			}
		}, want{class: event.Lost, text: "lost acked messages"}},
		{
			"forgotten, the end is another client's", func(f *findings) { forgetful(f); f.last = &lastMessage{} },
			want{class: event.Lost, text: "lost acked messages"},
		},
		{
			"forgotten together with the checkpoint, as this process knows: goes on after the last message", func(f *findings) { f.acked = 110; f.earlier = []record{*f.checkpoint} },
			want{after: at(2, 0x4000), base: 105, proof: proof},
		},
		{
			"the same, last message gone: asks from the checkpoint on", func(f *findings) { f.acked, f.last, f.tail, f.earlier = 110, nil, nil, []record{*f.checkpoint} },
			want{after: at(2, 0x3000), gone: 5, base: 105, proof: proof},
		},
		{"the same, and the WAL is confirmed past it", func(f *findings) {
			f.acked, f.origin.ConfirmedFlush, f.earlier = 110, 0x4800, []record{*f.checkpoint}
		}, want{class: event.Lost, text: "its last sequence is 105, the last one acked is 110, and Postgres has dropped the WAL up to 0/4800"}},
		{
			"stream and bucket lost, as this process knows", func(f *findings) { f.acked, f.checkpoint, f.lastSeq, f.last, f.tail = 110, nil, 0, nil, nil },
			want{class: event.Lost, text: "lost acked messages and its checkpoint: its last sequence is 0, 110 was acked"},
		},
		{"the same, accepted", func(f *findings) {
			f.acked, f.checkpoint, f.lastSeq, f.last, f.tail, f.acceptGap = 110, nil, 0, nil, nil, true
		}, want{}},
		{"confirmed within a timeline that the checkpoint does not know", func(f *findings) {
			f.checkpoint.Timeline = 1
		}, want{class: event.Lost, text: "past the checkpoint"}},
		{"the same, accepted", func(f *findings) {
			forgetful(f)
			f.earlier, f.acceptGap, f.origin.ConfirmedFlush = nil, true, 0x2901
		}, want{after: at(2, 0x2900), base: 90}},
		{"the same, accepted, but nothing up to the checkpoint is of this source", func(f *findings) {
			forgetful(f)
			f.earlier, f.acceptGap = nil, true
			f.checkpoint.Position, f.checkpoint.XID = event.Position{}, 0
		}, want{base: 90}},

		{
			"stream made anew", func(f *findings) { forgetful(f); f.created, f.lastSeq, f.last = madeAt.Add(time.Hour), 0, nil },
			want{class: event.Lost, text: "created anew"},
		},
		{"stream made anew and filled by others to the checkpoint", func(f *findings) {
			f.created, f.lastSeq, f.last, f.tail = madeAt.Add(time.Hour), 100, &lastMessage{}, nil
		}, want{class: event.Lost, text: "created anew"}},
		{
			"stream made anew and filled past the checkpoint", func(f *findings) { f.created = madeAt.Add(time.Hour) },
			want{class: event.Lost, text: "created anew"},
		},
		{"stream made anew, accepted", func(f *findings) {
			f.created, f.lastSeq, f.last, f.tail, f.acceptGap = madeAt.Add(time.Hour), 0, nil, nil, true
		}, want{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := usual()
			c.change(&f)
			d, err := decide(f)
			if c.want.text != "" {
				if err == nil {
					t.Fatalf("got %+v, want an error with %q", d.resume, c.want.text)
				}
				if got := event.ClassOf(err); got != c.want.class || !strings.Contains(err.Error(), c.want.text) {
					t.Fatalf("got class %d, %q; want class %d with %q", got, err, c.want.class, c.want.text)
				}
				if event.HintOf(err) == "" {
					t.Fatalf("no hint for %q", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			want := event.Resume{After: c.want.after, Gone: c.want.gone, Proof: c.want.proof}
			if !reflect.DeepEqual(d.resume, want) || d.base != c.want.base {
				t.Fatalf("got %+v proof %+v base %d\nwant %+v proof %+v base %d", d.resume, d.resume.Proof, d.base, want, want.Proof, c.want.base)
			}
		})
	}
}

// What a session claims must lead the next one, when nothing was published in
// between, to the same place, without the operator's word.
func TestClaimIsRepeatable(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*findings)
	}{
		{"ours", func(*findings) {}},
		{"adopted", func(f *findings) { f.origin.Slot, f.adopt = "other", true }},
		{"adopted without a checkpoint", func(f *findings) {
			f.checkpoint, f.last.position, f.adopt = nil, at(2, 0xA000), true
		}},
		{"adopted after a foreign message", func(f *findings) {
			f.last, f.adopt = &lastMessage{}, true
			f.tail = tailOf(101, at(2, 0x3100), at(2, 0x3200), at(2, 0x3300), at(2, 0x3400), foreigner)
		}},
		{"new system id", func(f *findings) { f.origin.SystemID, f.acceptGap = "new", true }},
		{"new system id and smaller LSNs", func(f *findings) {
			f.origin.SystemID, f.acceptGap, f.origin.WALEnd, f.origin.ConfirmedFlush = "new", true, 0x2000, 0x1900
		}},
		{"orphan", func(f *findings) { f.checkpoint.Position, f.last.position = at(1, 0x900), at(1, 0x1800) }},
		{"back in time", func(f *findings) { f.origin.WALEnd, f.acceptGap = 0x3800, true }},
		{"confirmed past the checkpoint", func(f *findings) { f.origin.ConfirmedFlush, f.acceptGap = 0x3800, true }},
		{"gone, tables changed", func(f *findings) { f.last, f.origin.Fingerprint, f.acceptGap = nil, "more", true }},
		{"forgotten", func(f *findings) { f.lastSeq, f.acceptGap = 90, true }},
		{"forgotten, healed by the last message", func(f *findings) { f.lastSeq, f.tail = 90, nil }},
		{"forgotten together with the checkpoint", func(f *findings) { f.acked, f.earlier = 110, []record{*f.checkpoint} }},
		{"made anew", func(f *findings) { f.lastSeq, f.created, f.acceptGap = 90, madeAt.Add(time.Hour), true }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := usual()
			c.change(&f)
			first, err := decide(f)
			if err != nil {
				t.Fatal(err)
			}
			r := claim(f, first, 2048)
			f.checkpoint, f.tail, f.adopt, f.acceptGap = &r, nil, false, false
			second, err := decide(f)
			if err != nil {
				t.Fatalf("second: %v", err)
			}
			if second.resume.After != first.resume.After || second.resume.Gone != 0 || second.base != first.base {
				t.Fatalf("first %+v base %d, second %+v base %d", first.resume, first.base, second.resume, second.base)
			}
		})
	}
}
