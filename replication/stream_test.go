package replication

import (
	"context"
	"errors"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
)

// transaction is one with a single row.
func transaction(commit event.LSN) [][]byte {
	return [][]byte{
		beginMsg(commit, 7),
		relationMsg(1, "public", "outbox", idColumn),
		insertMsg(commit-0x80, 1, "x"),
		commitMsg(commit, commit+0x30),
	}
}

func TestNextDeliversTransactions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		p.stream(append(transaction(0x500), transaction(0x600)...)...)
		for _, commit := range []event.LSN{0x500, 0x600} {
			if r := next(t, s); r.Kind != event.Row || r.Position.Commit != commit {
				t.Errorf("got %+v, want the row of %v", r, commit)
			}
			if r := next(t, s); r.Kind != event.Commit || r.Confirm != commit+0x30 {
				t.Errorf("got %+v, want the commit of %v", r, commit)
			}
		}
	})
}

func TestBufferedTellsWhetherNextWouldWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		if s.Buffered() {
			t.Error("bytes at hand before anything was sent")
		}
		// More than the 8 KB of pgproto3, so that both buffers are used.
		msgs := [][]byte{beginMsg(0x5000, 7), relationMsg(1, "public", "outbox", idColumn)}
		for i := range event.LSN(100) {
			msgs = append(msgs, insertMsg(0x1000+i, 1, strings.Repeat("x", 300)))
		}
		p.stream(append(msgs, commitMsg(0x5000, 0x5030))...)
		for range 100 {
			next(t, s)
			if !s.Buffered() {
				t.Fatal("no bytes at hand before the commit was read")
			}
		}
		next(t, s)
		if s.Buffered() {
			t.Error("bytes at hand after the last one was read")
		}
	})
}

func TestKeepalivesAreRecordsAndNotAnswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		p.stream(keepaliveMsg(0x100, true))
		if r := next(t, s); r.Kind != event.Keepalive || r.Confirm != 0x100 {
			t.Errorf("got %+v, want a keepalive", r)
		}
		synctest.Wait()
		if len(p.statuses) != 0 {
			t.Errorf("answered with %+v before Confirm", <-p.statuses)
		}
		if err := s.Confirm(0x100); err != nil {
			t.Fatal(err)
		}
		if got, want := <-p.statuses, (status{0x100, 0x100, 0x100}); got != want {
			t.Errorf("status %+v, want %+v", got, want)
		}
		// Inside a transaction they are swallowed.
		msgs := transaction(0x500)
		p.stream(msgs[0], msgs[1], msgs[2], keepaliveMsg(0x540, true), msgs[3], keepaliveMsg(0x550, false))
		for _, want := range []event.Record{
			{Kind: event.Row},
			{Kind: event.Commit, Confirm: 0x530},
			{Kind: event.Keepalive, Confirm: 0x550},
		} {
			if r := next(t, s); r.Kind != want.Kind || r.Confirm != want.Confirm {
				t.Errorf("got %+v, want %+v", r, want)
			}
		}
	})
}

func TestNextDoesNotWaitBehindWhatMakesNoRecord(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		msgs := transaction(0x500)
		p.stream(msgs[0], msgs[1], msgs[2], keepaliveMsg(0x540, false))
		if r := next(t, s); r.Kind != event.Row {
			t.Errorf("got %+v, want the row", r)
		}
		// The caller has not flushed the row, since bytes were at hand.
		if r := next(t, s); r.Kind != 0 || r.Confirm != 0 {
			t.Errorf("got %+v, want a record without content", r)
		}
	})
}

func TestConfirmKeepsItsMaximum(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		for _, c := range []struct{ give, want event.LSN }{{0, 0}, {0x200, 0x200}, {0x100, 0x200}, {0, 0x200}, {0x200, 0x200}, {0x300, 0x300}} {
			if err := s.Confirm(c.give); err != nil {
				t.Fatal(err)
			}
			if got := <-p.statuses; got != (status{c.want, c.want, c.want}) {
				t.Errorf("after Confirm(%v): status %+v, want %v in all three", c.give, got, c.want)
			}
		}
	})
}

func TestConfirmWhileNextBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		got := make(chan event.Record)
		go func() {
			rec, err := s.Next()
			if err != nil {
				t.Errorf("next: %v", err)
				rec = new(event.Record)
			}
			got <- *rec
		}()
		synctest.Wait() // Next is blocked
		for i := range event.LSN(3) {
			if err := s.Confirm(0x100 + i); err != nil {
				t.Fatal(err)
			}
			<-p.statuses
		}
		p.stream(keepaliveMsg(0x300, false))
		if r := <-got; r.Confirm != 0x300 {
			t.Errorf("got %+v", r)
		}
	})
}

func TestConfirmWhileNobodyReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		p.stream(transaction(0x500)...)
		synctest.Wait() // the peer is blocked in its write
		if err := s.Confirm(0x200); err != nil {
			t.Fatal(err)
		}
		if got := <-p.statuses; got.flushed != 0x200 {
			t.Errorf("status %+v", got)
		}
		next(t, s)
	})
}

func TestConfirmGivesUpOnPeerThatTakesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		p.statuses = make(chan status) // nobody receives, so after one status the peer reads no more
		s := p.open(t)
		if err := s.Confirm(0x100); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := s.Confirm(0x200); err == nil {
			t.Error("status went out to a peer that does not read")
		}
		if took := time.Since(began); took != statusTimeout {
			t.Errorf("took %v, want %v", took, statusTimeout)
		}
		if err := s.Confirm(0x300); err == nil {
			t.Error("wrote behind half a status")
		}
		<-p.statuses
	})
}

func TestSkippedPublicationIsFatal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		cfg := p.config(t)
		cfg.Publications = []string{"other", "My-Pub, x"}
		s, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		go p.send(
			&pgproto3.CopyData{Data: keepaliveMsg(0x100, false)},
			&pgproto3.NoticeResponse{Severity: "NOTICE", Code: "00000", Message: "of no interest"},
			&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: "55000", File: "slot.c", Message: `replication slot "standby" does not have active_pid`},
			&pgproto3.NoticeResponse{Severity: "WARNING", SeverityUnlocalized: "WARNING", Code: "55000", File: "pgoutput.c", Message: `skipped loading publication "My-Pub, x"`},
			&pgproto3.CopyData{Data: keepaliveMsg(0x900, false)},
		)
		if r := next(t, s); r.Confirm != 0x100 {
			t.Errorf("got %+v, want what came before", r)
		}
		err = nextError(t, s)
		if event.ClassOf(err) != event.Precondition || !strings.Contains(err.Error(), "My-Pub, x") {
			t.Errorf("got %v of class %d, want a Precondition that names the publication", err, event.ClassOf(err))
		}
		if hint := event.HintOf(err); !strings.Contains(hint, `CREATE PUBLICATION "My-Pub, x"`) || !strings.Contains(hint, "walrelay init") {
			t.Errorf("hint %q", hint)
		}
	})
}

func TestServerErrorsEndTheStream(t *testing.T) {
	for _, c := range []struct {
		code, message string
		class         event.Class
		hint          string
	}{
		{"57P01", "terminating connection due to administrator command", event.Transient, ""},
		{"42704", `publication "orders" does not exist`, event.Precondition, `CREATE PUBLICATION "orders"`},
		{"22012", "division by zero", event.Precondition, "row filter"},
		{"XX000", "something else", event.Transient, ""},
	} {
		t.Run(c.code, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPeer()
				s := p.open(t)
				go func() {
					p.send(refusal(c.code, c.message))
					p.conn.Close()
				}()
				err := nextError(t, s)
				var pg *pgconn.PgError
				if !errors.As(err, &pg) || pg.Code != c.code {
					t.Errorf("got %v, want SQLSTATE %s in it", err, c.code)
				}
				if got := event.ClassOf(err); got != c.class {
					t.Errorf("class %d, want %d", got, c.class)
				}
				if hint := event.HintOf(err); !strings.Contains(hint, c.hint) || (c.hint == "") != (hint == "") {
					t.Errorf("hint %q, want %q in it", hint, c.hint)
				}
			})
		})
	}
}

func TestEOFIsTransient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		go p.conn.Close()
		err := nextError(t, s)
		if !errors.Is(err, io.ErrUnexpectedEOF) || event.ClassOf(err) != event.Transient {
			t.Errorf("got %v of class %d", err, event.ClassOf(err))
		}
		_ = s.Confirm(0x100) // fails or not, beside a reader that has failed
	})
}

func TestInterruptUnblocksNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		done := make(chan error)
		go func() {
			_, err := s.Next()
			done <- err
		}()
		synctest.Wait()
		began := time.Now()
		s.Interrupt()
		s.Interrupt()
		if err := <-done; !errors.Is(err, ErrInterrupted) {
			t.Errorf("got %v, want ErrInterrupted", err)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("took %v", took)
		}
		if err := s.Confirm(0x100); err != nil {
			t.Errorf("confirm after interrupt: %v", err)
		}
	})
}

func TestInterruptOvertakesWhatIsBuffered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		p.stream(transaction(0x500)...)
		next(t, s)
		s.Interrupt()
		if err := nextError(t, s); !errors.Is(err, ErrInterrupted) {
			t.Errorf("got %v, want ErrInterrupted", err)
		}
	})
}

// beats lets the peer ask for a reply n times, each time right after a status,
// and returns the error that ends it, or nil.
func beats(t *testing.T, p *peer, s *Stream, n int, after time.Duration, end func(i int) event.LSN) error {
	for i := range n {
		if err := s.Confirm(0x100); err != nil {
			t.Fatal(err)
		}
		<-p.statuses
		<-time.After(after) // by the clock of the bubble
		p.stream(keepaliveMsg(end(i), true))
		if _, err := s.Next(); err != nil {
			return err
		}
	}
	return nil
}

func TestRepeatedKeepalivesMeanShutdown(t *testing.T) {
	same := func(int) event.LSN { return 0x900 }
	t.Run("prompt, of the same WAL end", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newPeer()
			s := p.open(t)
			if err := beats(t, p, s, shutdownBeats, time.Millisecond, same); !errors.Is(err, ErrShutdown) || event.ClassOf(err) != event.Transient {
				t.Errorf("got %v, want ErrShutdown", err)
			}
		})
	})
	t.Run("not when the WAL moves on", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newPeer()
			s := p.open(t)
			if err := beats(t, p, s, 20, time.Millisecond, func(i int) event.LSN { return 0x900 + event.LSN(i) }); err != nil {
				t.Errorf("got %v", err)
			}
		})
	})
	t.Run("not when they are routine", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newPeer()
			s := p.open(t)
			if err := beats(t, p, s, 20, 30*time.Second, same); err != nil {
				t.Errorf("got %v", err)
			}
		})
	})
	t.Run("not when data comes between", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newPeer()
			s := p.open(t)
			for i := range event.LSN(20) {
				if err := beats(t, p, s, shutdownBeats-1, time.Millisecond, same); err != nil {
					t.Fatalf("got %v", err)
				}
				p.stream(transaction(0x1000 * (i + 1))...)
				next(t, s)
				next(t, s)
			}
		})
	})
	t.Run("not before any status", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newPeer()
			s := p.open(t)
			for range 20 {
				p.stream(keepaliveMsg(0x900, true))
				next(t, s)
			}
		})
	})
	t.Run("or the end of the copy", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := newPeer()
			s := p.open(t)
			go p.send(&pgproto3.CommandComplete{CommandTag: []byte("COPY 0")})
			if err := nextError(t, s); !errors.Is(err, ErrShutdown) {
				t.Errorf("got %v, want ErrShutdown", err)
			}
		})
	})
}

func TestCloseTakesLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		s := p.open(t)
		done := make(chan error)
		go func() {
			_, err := s.Next()
			done <- err
		}()
		synctest.Wait()
		if err := s.Confirm(0x100); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if err := <-done; !errors.Is(err, ErrInterrupted) {
			t.Errorf("next: %v, want ErrInterrupted", err)
		}
		if !<-p.over {
			t.Error("the peer was not told")
		}
		if err := s.Confirm(0x200); err == nil {
			t.Error("confirmed on a closed stream")
		}
		if err := s.Close(); err != nil {
			t.Errorf("close again: %v", err)
		}
	})
}

func TestCloseDoesNotWaitForDeadPeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		p.statuses = make(chan status) // nobody receives, so after one status the peer reads no more
		s := p.open(t)
		if err := s.Confirm(0x100); err != nil {
			t.Fatal(err)
		}
		stuck := make(chan error)
		go func() { stuck <- s.Confirm(0x200) }()
		synctest.Wait()
		began := time.Now()
		_ = s.Close()
		if took := time.Since(began); took > closeTimeout {
			t.Errorf("took %v, want %v at most", took, closeTimeout)
		}
		if err := <-stuck; err == nil {
			t.Error("stuck status went out")
		}
		<-p.statuses
	})
}

func TestOpenAsksForCommittedTextOnly(t *testing.T) {
	start := func(p *peer) string { return p.commands[len(p.commands)-1] }
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		cfg := p.config(t)
		cfg.Conn.RuntimeParams["DateStyle"] = "German"
		cfg.Slot, cfg.Publications = `a"b`, []string{"My-Pub, x", `it's "q"`}
		cfg.WALSenderTimeout = 20 * time.Second
		s, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		want := `START_REPLICATION SLOT "a""b" LOGICAL 0/0 (proto_version '1', publication_names '"My-Pub, x","it''s ""q"""')`
		if got := start(p); got != want {
			t.Errorf("got  %s\nwant %s", got, want)
		}
		for name, want := range map[string]string{
			"replication": "database", "DateStyle": "", "application_name": "walrelay",
			"wal_sender_timeout": "20000ms", "user": "relay", "database": "orders",
		} {
			if got := p.startup[name]; got != want {
				t.Errorf("%s is %q, want %q", name, got, want)
			}
		}
		for _, want := range []string{
			"client_encoding = 'UTF8'", "datestyle = 'ISO'", "intervalstyle = 'postgres'", "extra_float_digits = '3'",
			"timezone = 'UTC'", "bytea_output = 'hex'", "idle_session_timeout = '0'",
		} {
			if !strings.Contains(p.commands[0], "SET "+want) {
				t.Errorf("the session began with %s, want %s", p.commands[0], want)
			}
		}
		if got := cfg.Conn.RuntimeParams; len(got) != 1 {
			t.Errorf("the caller's configuration became %v", got)
		}
		want2 := event.Origin{SystemID: "7123456789012345678", Database: "orders", Slot: `a"b`, Timeline: 1, WALEnd: 0x9000, Fingerprint: "f"}
		if got := s.Origin(); !reflect.DeepEqual(got, want2) {
			t.Errorf("origin %+v, want %+v", got, want2)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		p.version = "18.4"
		cfg := p.config(t)
		cfg.Messages = true
		cfg.Conn.RuntimeParams["application_name"] = "mine"
		s, err := Open(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		if got := start(p); !strings.Contains(got, "messages 'true'") || strings.Contains(got, "origin") {
			t.Errorf("got %s, want messages, and rows of any origin", got)
		}
		if got := p.startup["application_name"]; got != "mine" {
			t.Errorf("application_name %q, want mine", got)
		}
	})
}

func TestOpenReadsTimelineHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		p.timeline, p.history = "3", "1\t0/580\tno recovery target specified\n2\t0/680\tno recovery target specified\n"
		s := p.open(t)
		if got := s.Origin().Timeline; got != 3 {
			t.Errorf("session's timeline %d, want 3", got)
		}
		if got, want := s.Origin().History, []event.Switch{{Timeline: 1, End: 0x580}, {Timeline: 2, End: 0x680}}; !slices.Equal(got, want) {
			t.Errorf("history %v, want %v", got, want)
		}
		var msgs [][]byte
		for _, commit := range []event.LSN{0x500, 0x600, 0x700} {
			msgs = append(msgs, transaction(commit)...)
		}
		p.stream(msgs...)
		for want := range uint32(3) {
			if got := next(t, s).Position.Timeline; got != want+1 {
				t.Errorf("timeline %d, want %d", got, want+1)
			}
			next(t, s)
		}
	})
}

func TestOpenFailures(t *testing.T) {
	refuse := func(word, code, message string) func(*peer) {
		return func(p *peer) {
			p.refuse = map[string]*pgproto3.ErrorResponse{word: refusal(code, message)}
		}
	}
	for name, c := range map[string]struct {
		peer  func(*peer)
		class event.Class
		text  string // in the message
		hint  string // in the hint; "" means none
		is    error
	}{
		"slot missing":      {refuse("START_REPLICATION", "42704", `replication slot "orders" does not exist`), event.Precondition, `slot "orders"`, "walrelay slot create", nil},
		"slot active":       {refuse("START_REPLICATION", "55006", `replication slot "orders" is active for PID 4711`), event.Transient, "4711", "taken over", ErrSlotActive},
		"slot invalidated":  {refuse("START_REPLICATION", "55000", "cannot read from logical replication slot"), event.Transient, "cannot read", "", nil},
		"other plugin":      {refuse("START_REPLICATION", "22023", `option "proto_version" = "1" is unknown`), event.Precondition, "proto_version", "pgoutput", nil},
		"may not replicate": {refuse("START_REPLICATION", "42501", "permission denied"), event.Precondition, "permission", `ALTER ROLE "relay" REPLICATION`, nil},
		"no walsender":      {refuse("", "53300", "number of requested standby connections exceeds max_wal_senders"), event.Transient, "max_wal_senders", "max_wal_senders", nil},
		"no slots":          {refuse("START_REPLICATION", "53400", "all replication slots are in use"), event.Transient, "in use", "max_replication_slots", nil},
		"pooler, refusing":  {refuse("", "08P01", "unsupported startup parameter: replication"), event.Precondition, "unsupported", "pooler", nil},
		"pooler, ignoring":  {refuse("IDENTIFY_SYSTEM", "42601", "syntax error"), event.Precondition, "identify", "pooler", nil},
		"wrong password":    {refuse("", "28P01", `password authentication failed for user "relay"`), event.Precondition, "authentication", "password", nil},
		"not in pg_hba":     {refuse("", "28000", "no pg_hba.conf entry"), event.Precondition, "pg_hba", "pg_hba.conf", nil},
		"no such database":  {refuse("", "3D000", `database "orders" does not exist`), event.Precondition, "orders", "database", nil},
		"role":              {refuse("", "42501", "must be superuser or replication role to start walsender"), event.Precondition, "walsender", `ALTER ROLE "relay" REPLICATION`, nil},
		"starting up":       {refuse("", "57P03", "the database system is starting up"), event.Transient, "starting up", "", nil},
		"wal_level":         {func(p *peer) { p.level = "replica" }, event.Precondition, "replica", "ALTER SYSTEM SET wal_level = logical", nil},
		"old server":        {func(p *peer) { p.version = "13.9" }, event.Precondition, "13", "14", nil},
		"standby":           {func(p *peer) { p.standby = true }, event.Transient, "standby", "target_session_attrs", nil},
		"no version":        {func(p *peer) { p.version = "?" }, event.Precondition, "version", "pooler", nil},
		"bad timeline file": {func(p *peer) { p.timeline, p.history = "2", "x" }, event.Unexpected, "history", "report", nil},
		"settings refused":  {func(p *peer) { p.version = "17.1"; refuse("SET", "42501", "no")(p) }, event.Precondition, "connect", "ALTER ROLE", nil},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := newPeer()
				c.peer(p)
				s, err := Open(t.Context(), p.config(t))
				if err == nil {
					s.Close()
					t.Fatal("opened")
				}
				if got := event.ClassOf(err); got != c.class {
					t.Errorf("%v: class %d, want %d", err, got, c.class)
				}
				if !strings.Contains(err.Error(), c.text) || strings.Contains(err.Error(), "\n") {
					t.Errorf("error %q, want one line with %q", err, c.text)
				}
				if hint := event.HintOf(err); !strings.Contains(hint, c.hint) || (c.hint == "") != (hint == "") {
					t.Errorf("hint %q, want %q in it", hint, c.hint)
				}
				if strings.Contains(err.Error()+event.HintOf(err), secret) {
					t.Errorf("the password is in %v", err)
				}
				if c.is != nil && !errors.Is(err, c.is) {
					t.Errorf("%v is not %v", err, c.is)
				}
				if _, ok := <-p.over; ok {
					<-p.over
				}
			})
		})
	}
}

func TestOpenRejectsBadConfig(t *testing.T) {
	_, err := Open(t.Context(), Config{WALSenderTimeout: -1})
	if event.ClassOf(err) != event.Usage {
		t.Fatalf("got %v, want a Usage failure", err)
	}
	for _, want := range []string{"connection", "slot", "publication", "wal_sender_timeout"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
}

func TestOpenEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		cfg := p.config(t)
		cfg.Conn.ValidateConnect = func(ctx context.Context, _ *pgconn.PgConn) error {
			<-ctx.Done()
			return ctx.Err()
		}
		if _, err := Open(ctx, cfg); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want the context's error", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		p := newPeer()
		ctx, cancel := context.WithCancel(t.Context())
		s, err := Open(ctx, p.config(t))
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		cancel() // bounds Open only
		p.stream(keepaliveMsg(0x100, false))
		next(t, s)
	})
}
