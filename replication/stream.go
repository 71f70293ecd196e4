package replication

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"

	"github.com/walrelay/walrelay/event"
)

const (
	// statusTimeout bounds the write of one status: a peer that takes no 39
	// bytes for so long is gone.
	statusTimeout = 10 * time.Second

	// closeTimeout bounds how long Close waits for the server to let go.
	closeTimeout = time.Second

	// shutdownBeats is how many prompt requests for a reply mean a shutdown.
	shutdownBeats = 3
)

// Stream is one replication session.
//
// Next reads through the pgproto3.Frontend directly: pgconn.ReceiveMessage
// would, on a read error, send a cancel request and a Terminate from a
// goroutine of its own, which races with a status being sent. Receiving touches only the
// Frontend's read side and a status only its write side.
type Stream struct {
	pg     *pgconn.PgConn
	front  *pgproto3.Frontend
	conn   net.Conn
	buf    *bufio.Reader // between conn and front
	gather *gather       // between conn and buf

	publications []string
	warn         func(text, hint string)
	origin       event.Origin
	began        time.Time

	// Owned by the goroutine that calls Next.
	decoder *decoder
	err     error  // ended the session
	told    string // the last warning
	beats   int    // prompt requests for a reply since anything else came
	beatEnd event.LSN
	prompt  time.Duration

	convertible bool // the server converts values, and may refuse one
	remember    *Unconverted

	interrupted atomic.Bool
	closing     atomic.Bool
	ended       atomic.Bool  // the server has ended the stream, or reading failed
	status      atomic.Int64 // when the last status went out, in ns since began; 0 for never

	// writing holds a token while somebody writes to conn. It is a lock whose
	// waiters testing/synctest sees as blocked, which a mutex's are not.
	writing   chan struct{}
	confirmed event.LSN
	writeErr  error

	once     sync.Once
	closeErr error
}

// Origin says which log is read. ConfirmedFlush is not set.
func (s *Stream) Origin() event.Origin { return s.origin }

// nothing is returned instead of waiting for the network behind a message that
// makes no record, so that the caller can flush what came before it.
var nothing event.Record

// Next blocks until the next record. The record and its bytes are valid until
// the following call. Only one goroutine may call it. Every error ends the
// session and is returned again by every later call. A record of no kind says
// that there is nothing more at hand.
func (s *Stream) Next() (*event.Record, error) {
	for s.err == nil {
		if s.interrupted.Load() {
			s.err = ErrInterrupted
			break
		}
		msg, err := s.front.Receive()
		if err != nil {
			s.err = s.readError(err)
			break
		}
		copyData, ok := msg.(*pgproto3.CopyData)
		if !ok {
			s.err = s.control(msg)
			continue
		}
		rec, err := s.decode(copyData.Data)
		if err != nil {
			s.err = err
			break
		}
		if rec != nil {
			return rec, nil
		}
		if !s.Buffered() {
			return &nothing, nil
		}
	}
	return nil, s.err
}

func (s *Stream) decode(body []byte) (*event.Record, error) {
	if len(body) == 0 {
		return nil, malformed("CopyData")
	}
	switch body[0] {
	case 'w':
		s.beats = 0
		return s.decoder.data(body)
	case 'k':
		k, err := s.decoder.keepalive(body)
		if err != nil {
			return nil, err
		}
		if s.shuttingDown(k) {
			return nil, fmt.Errorf("read the replication stream: %w", ErrShutdown)
		}
		return s.decoder.beat(k), nil
	}
	return nil, unknown("replication message", body[0])
}

// shuttingDown recognises a server that waits for the end of this session.
//
// In normal times a server asks for a reply when half of wal_sender_timeout
// has passed without one. While it shuts down and not everything is confirmed,
// it asks again as soon as a status has come in (WalSndDone), for ever.
func (s *Stream) shuttingDown(k keepalive) bool {
	if !k.reply {
		return false
	}
	sent := time.Duration(s.status.Load())
	if sent == 0 || time.Since(s.began)-sent >= s.prompt {
		s.beats = 0
		return false
	}
	if k.end != s.beatEnd {
		s.beats, s.beatEnd = 0, k.end
	}
	s.beats++
	return s.beats >= shutdownBeats
}

// prompt is how soon after a status a request for another one is no routine.
func prompt(walSenderTimeout time.Duration) time.Duration {
	if walSenderTimeout > 0 {
		return min(time.Second, walSenderTimeout/4)
	}
	return time.Second
}

// control handles the messages that carry no data.
func (s *Stream) control(msg pgproto3.BackendMessage) error {
	switch msg := msg.(type) {
	case *pgproto3.NoticeResponse:
		n := (*pgconn.Notice)(pgconn.ErrorResponseToPgError((*pgproto3.ErrorResponse)(msg)))
		switch {
		case n.Code != notInPrerequisite:
		case n.File == waitsForStandby:
			s.tell(n)
		default:
			return skippedPublication(s.origin.Slot, s.publications, n)
		}
		return nil
	case *pgproto3.ParameterStatus, *pgproto3.NotificationResponse:
		return nil
	case *pgproto3.ErrorResponse:
		s.ended.Store(true)
		pg := pgconn.ErrorResponseToPgError(msg)
		if err := s.unconverted(pg); err != nil {
			return err
		}
		return streamFailure(s.origin.Slot, s.publications, pg)
	case *pgproto3.CopyDone, *pgproto3.CommandComplete:
		// The last word of a walsender that has sent and seen confirmed
		// everything when the server shuts down (WalSndDone).
		s.ended.Store(true)
		return fmt.Errorf("read the replication stream: %w", ErrShutdown)
	}
	return event.Fail(event.Unexpected, hintProtocol, "read the replication stream: unexpected %T", msg)
}

// waitsForStandby is the source file of the warnings about a standby of
// synchronized_standby_slots that is away (StandbySlotsHaveCaughtup). The
// server sends nothing then that this standby has not. The other warnings with
// that code come from pgoutput.c.
const waitsForStandby = "slot.c"

// tell passes a warning on once, until another one comes.
func (s *Stream) tell(n *pgconn.Notice) {
	if s.warn != nil && n.Message != s.told {
		s.warn(n.Message, n.Hint)
	}
	s.told = n.Message
}

func (s *Stream) readError(err error) error {
	if s.interrupted.Load() {
		return ErrInterrupted
	}
	s.ended.Store(true)
	return fmt.Errorf("read the replication stream: %w", err)
}

// Buffered reports whether bytes are at hand, so that Next is not expected to
// wait for the network. It belongs to the goroutine that calls Next.
func (s *Stream) Buffered() bool {
	return s.front.ReadBufferLen() > 0 || s.buf.Buffered() > 0
}

// Confirm sends a status with the highest LSN it was ever given, as written,
// flushed and applied. Any goroutine may call it. It blocks for statusTimeout
// at most, and every error ends the session's writing side.
func (s *Stream) Confirm(lsn event.LSN) error {
	s.writing <- struct{}{}
	defer func() { <-s.writing }()
	s.confirmed = max(s.confirmed, lsn)
	if s.writeErr != nil {
		return s.writeErr
	}
	// Close sets closing before its own deadline, so the order here decides
	// that the shorter one stays.
	err := s.conn.SetWriteDeadline(time.Now().Add(statusTimeout))
	if err == nil && s.closing.Load() {
		err = net.ErrClosed
	}
	if err == nil {
		// Set all three: pglogrepl takes 0 for "as written".
		at := pglogrepl.LSN(s.confirmed)
		err = pglogrepl.SendStandbyStatusUpdate(context.Background(), s.pg, pglogrepl.StandbyStatusUpdate{
			WALWritePosition: at,
			WALFlushPosition: at,
			WALApplyPosition: at,
			// A server that gets on answers with a keepalive, so that one that
			// has stopped, or a dead connection, can be told from a quiet log.
			ReplyRequested: true,
		})
	}
	if err != nil {
		s.writeErr = fmt.Errorf("confirm %v: %w", s.confirmed, err)
		return s.writeErr
	}
	s.status.Store(max(int64(time.Since(s.began)), 1))
	return nil
}

// Interrupt makes a blocked or later Next return ErrInterrupted. It may be
// called from any goroutine, more than once.
func (s *Stream) Interrupt() {
	s.interrupted.Store(true)
	_ = s.conn.SetReadDeadline(time.Unix(1, 0)) // fails only when closed, which unblocks as well
}

// Close interrupts Next, ends the session and closes the connection. It waits
// up to a second for the server to let go of the slot, so that a session that
// is opened afterwards finds it free and sees what was confirmed.
func (s *Stream) Close() error {
	s.once.Do(func() { s.closeErr = s.close() })
	return s.closeErr
}

func (s *Stream) close() error {
	s.Interrupt()
	s.closing.Store(true)
	if s.decoder != nil {
		s.decoder.charset.Close()
	}
	deadline := time.Now().Add(closeTimeout)
	_ = s.conn.SetWriteDeadline(deadline) // also frees a Confirm that is stuck
	s.writing <- struct{}{}
	defer func() { <-s.writing }()
	if s.writeErr == nil && !s.ended.Load() {
		s.leave(deadline)
	}
	if s.writeErr == nil {
		s.writeErr = fmt.Errorf("confirm %v: %w", s.confirmed, net.ErrClosed)
	}
	if err := s.conn.Close(); err != nil {
		return fmt.Errorf("close replication connection: %w", err)
	}
	return nil
}

// leave says Terminate and reads on until the server hangs up. Closing with
// unread data would reset the connection, and the last status could be lost.
func (s *Stream) leave(deadline time.Time) {
	terminate, err := (&pgproto3.Terminate{}).Encode(nil)
	if err != nil {
		return
	}
	if _, err := s.conn.Write(terminate); err != nil {
		return
	}
	if s.conn.SetReadDeadline(deadline) == nil {
		_, _ = io.Copy(io.Discard, s.conn)
	}
}
