package operate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

// tape is a Log in memory: each transaction has one row, and its commit record
// begins at 10, 20, 30 … and ends three later.
type tape struct {
	rows  int
	reads int
}

func (l *tape) Read(_ context.Context, upTo event.LSN, changes int, each func(*event.Record) error, unread func(Unread) error) (int, error) {
	l.reads++
	n := 0
	for i := 1; i <= l.rows; i++ {
		commit := event.LSN(10 * i)
		if upTo > 0 && commit >= upTo || changes > 0 && n >= changes {
			break
		}
		n += 3 // Begin, Insert, Commit
		at := event.Position{Timeline: 1, Commit: commit, Change: commit - 2}
		for _, rec := range []event.Record{
			{Kind: event.Row, Position: at, XID: uint32(700 + i)},
			{Kind: event.Commit, Position: event.Position{Timeline: 1, Commit: commit}, XID: uint32(700 + i), Confirm: commit + 3},
		} {
			if err := each(&rec); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

// byNumber makes an event of every row; the one at 40 is poison, and the one at 50 is none.
type byNumber struct{}

func (byNumber) Map(rec *event.Record, ev *event.Event) (bool, error) {
	n := uint64(rec.Position.Commit / 10)
	*ev = event.Event{ID: fmt.Append(nil, n), Subject: []byte("s"), Payload: []byte{0xff}, Position: rec.Position, XID: rec.XID}
	switch n {
	case 4:
		return true, &event.Poison{Reason: event.ReasonSubject, Detail: "bad"}
	case 5:
		return false, nil
	}
	return true, nil
}

func at(n int) event.Position {
	return event.Position{Timeline: 1, Commit: event.LSN(10 * n), Change: event.LSN(10*n - 2)}
}

func ids(events []*Event) string {
	all := make([]string, len(events))
	for i, e := range events {
		all[i] = e.ID
	}
	return strings.Join(all, " ")
}

func TestPeekLeavesOutWhatIsStored(t *testing.T) {
	for _, c := range []struct {
		name   string
		resume event.Resume
		limit  int
		want   string
		more   bool
	}{
		{"from the beginning", event.Resume{}, 9, "1 2 3 4 6 7 8", false},
		{"exactly as many", event.Resume{}, 7, "1 2 3 4 6 7 8", false},
		{"fewer", event.Resume{}, 2, "1 2", true},
		{"after a position", event.Resume{After: at(3)}, 9, "4 6 7 8", false},
		{"stored by place and id", event.Resume{Stored: map[event.Position]string{at(2): "2", at(3): "another"}}, 9, "1 3 4 6 7 8", false},
	} {
		got, more, err := Peek(t.Context(), &tape{rows: 8}, byNumber{}, c.resume, c.limit)
		if err != nil || ids(got) != c.want || more != c.more {
			t.Errorf("%s: got %s, %v, %v, want %s, %v", c.name, ids(got), more, err, c.want, c.more)
		}
	}
}

func TestPeekReadsOnUntilThereAreEnough(t *testing.T) {
	log := &tape{rows: 1000}
	got, more, err := Peek(t.Context(), log, byNumber{}, event.Resume{After: at(900)}, 5)
	if err != nil || ids(got) != "901 902 903 904 905" || !more || log.reads < 3 {
		t.Errorf("got %s, %v, %v in %d reads", ids(got), more, err, log.reads)
	}
}

func TestPoisonIsPeekedWithItsReason(t *testing.T) {
	got, _, err := Peek(t.Context(), &tape{rows: 4}, byNumber{}, event.Resume{After: at(3)}, 9)
	if err != nil || len(got) != 1 || got[0].Poison != "subject: bad" || got[0].Payload != nil || string(got[0].Body()) != "\xff" {
		t.Errorf("got %+v, %v", got, err)
	}
}

func TestFindEndOfATransaction(t *testing.T) {
	for name, tx := range map[string]Transaction{
		"by its number": {XID: 703}, "by its commit": {LSN: 30}, "by a change": {LSN: 28}, "by its end": {LSN: 33},
	} {
		if end, err := FindEnd(t.Context(), &tape{rows: 5}, tx); err != nil || end != 33 {
			t.Errorf("%s: got %s, %v", name, end, err)
		}
	}
	_, err := FindEnd(t.Context(), &tape{rows: 5}, Transaction{XID: 799})
	if event.ClassOf(err) != event.Precondition || event.HintOf(err) == "" {
		t.Errorf("got %v", err)
	}
}

// ends records what an Advance does, in order.
type endsOf struct {
	log  []string
	fail error
}

func (e *endsOf) Pass(_ context.Context, to event.LSN) (bool, error) {
	e.log = append(e.log, "checkpoint "+to.String())
	return true, e.fail
}

func (e *endsOf) Advance(_ context.Context, to event.LSN) (event.LSN, error) {
	e.log = append(e.log, "slot "+to.String())
	return to, nil
}

func (e *endsOf) job(resume event.Resume, to event.LSN) Advance {
	return Advance{
		Log: &tape{rows: 8}, Mapper: byNumber{}, Checkpoint: e, Slot: e, Resume: resume, To: to,
		Skip: func(ev *Event) error { e.log = append(e.log, ev.ID); return nil },
		Sure: func(a Advanced) error { e.log = append(e.log, fmt.Sprint("sure of ", a.Skipped)); return nil },
	}
}

func TestAdvanceTellsFirstThenMovesCheckpointAndSlot(t *testing.T) {
	for _, c := range []struct {
		name   string
		resume event.Resume
		to     event.LSN
		want   string
	}{
		{"past two", event.Resume{After: at(1)}, 33, "2,3,sure of 2,checkpoint 0/21,slot 0/21"},
		{"a commit that begins there is still sent", event.Resume{}, 20, "1,sure of 1,checkpoint 0/14,slot 0/14"},
		{"a commit that begins before is not", event.Resume{}, 21, "1,2,sure of 2,checkpoint 0/15,slot 0/15"},
	} {
		var e endsOf
		done, err := e.job(c.resume, c.to).Run(t.Context())
		if got := strings.Join(e.log, ","); err != nil || got != c.want {
			t.Errorf("%s: got %s, %v, want %s", c.name, got, err, c.want)
		}
		if done.Slot != c.to || !done.Checkpoint {
			t.Errorf("%s: done %+v", c.name, done)
		}
	}
}

func TestAdvanceChangesNothingAfterAFailure(t *testing.T) {
	no := errors.New("no")
	for name, c := range map[string]struct {
		change func(*Advance, *endsOf)
		want   string
	}{
		"audit":      {func(a *Advance, _ *endsOf) { a.Skip = func(*Event) error { return no } }, ""},
		"not sure":   {func(a *Advance, _ *endsOf) { a.Sure = func(Advanced) error { return no } }, "1"},
		"checkpoint": {func(_ *Advance, e *endsOf) { e.fail = no }, "1,sure of 1,checkpoint 0/D"},
	} {
		var e endsOf
		job := e.job(event.Resume{}, 13)
		c.change(&job, &e)
		if _, err := job.Run(t.Context()); !errors.Is(err, no) || strings.Join(e.log, ",") != c.want {
			t.Errorf("%s: got %v after %s, want %s", name, err, e.log, c.want)
		}
	}
}

func TestFit(t *testing.T) {
	rows := []Row{
		{Table: "t", Subject: "a.b", Bytes: 900, Bound: true},
		{Table: "t", Subject: "x.y", Bytes: 10},
		{Table: "t", Subject: "x.y", Bytes: 10},
		{Table: "t", Poison: "null_id: the id is NULL"},
	}
	for _, c := range []struct {
		limits Limits
		level  event.Level
		text   string
	}{
		{Limits{MaxPayload: 1 << 20}, event.OK, "900 bytes, the server's max_payload is 1048576"},
		{Limits{MaxPayload: 1000, MaxBytes: 5000}, event.WARN, "max_payload is 1000"},
		{Limits{MaxPayload: 1 << 20, MaxMsgSize: 800}, event.WARN, "max_msg_size is 800"},
	} {
		found := Fit("t", rows, c.limits)
		if f := found[0]; f.Level != c.level || !strings.Contains(f.Detail, c.text) {
			t.Errorf("got %+v, want %s", f, c.text)
		}
		if f := found[1]; f.Level != event.WARN || !strings.Contains(f.Detail, "1 subjects") || !strings.Contains(f.Remedy, "x.y") {
			t.Errorf("got %+v", f)
		}
		if f := found[2]; f.Level != event.WARN || !strings.Contains(f.Detail, "null_id") {
			t.Errorf("got %+v", f)
		}
	}
	for _, f := range Fit("t", nil, Limits{}) {
		if f.Level != event.OK {
			t.Errorf("got %+v", f)
		}
	}
}

func TestClocks(t *testing.T) {
	for _, c := range []struct {
		postgres, nats time.Duration
		level          event.Level
	}{
		{0, 0, event.OK},
		{time.Second, -900 * time.Millisecond, event.OK},
		{1500 * time.Millisecond, -time.Second, event.WARN},
		{-3 * time.Second, -3 * time.Second, event.WARN},
	} {
		if f := Clocks(c.postgres, c.nats); f.Level != c.level {
			t.Errorf("%s, %s: got %+v", c.postgres, c.nats, f)
		}
	}
}

func TestDistance(t *testing.T) {
	s := Standing{WALEnd: 1000, Confirmed: 400, Known: true, Confirm: 700, Sequence: 5, StreamSequence: 9}
	if got, want := s.Distance(), (Distance{Relay: 300, Confirm: 300, Stream: 4}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	s.Known = false
	if got, want := s.Distance(), (Distance{Relay: 600}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
}
