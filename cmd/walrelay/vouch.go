package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/slotmgr"
)

// publicationWatch looks whether the rows of the tables are sent, over a
// connection of its own. A table that was not for a while shows even when
// all is well again: its entry in the publication is another one then.
type publicationWatch struct {
	pg           *pgx.ConnConfig
	slot         string
	publications []string
	tables       []slotmgr.Table

	mu     sync.Mutex // a session ends while a look is under way
	conn   *pgx.Conn
	life   context.Context
	stop   context.CancelFunc
	before slotmgr.Published // when the session began
	seen   event.LSN         // end of the log at the last look
}

// begin looks for the first time in a session. It takes over a connection that
// is open already; nil for none.
func (w *publicationWatch) begin(ctx context.Context, conn *pgx.Conn) (slotmgr.Published, error) {
	w.end()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conn = conn
	w.life, w.stop = context.WithCancel(context.WithoutCancel(ctx))
	w.seen = 0
	was := w.before
	now, err := w.look(ctx, &was)
	if err != nil {
		return now, err
	}
	if now.Err != nil {
		return now, now.Err
	}
	w.before = now
	return now, nil
}

// Vouch implements relay.Options.Vouch.
func (w *publicationWatch) Vouch(ctx context.Context) (event.LSN, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(w.life, cancel)()
	now, err := w.look(ctx, &w.before)
	if err != nil {
		return 0, err
	}
	if now.Err != nil {
		return 0, now.Err
	}
	if table := now.Interrupted(w.before); table != "" {
		return 0, event.Fail(event.Lost,
			fmt.Sprintf("walrelay slot recover %s finds the rows that are missing in the stream and publishes them; to go on without use --accept-gap", w.slot),
			"table %s was made anew, or its publication was altered, or it was taken out and put back: rows committed in between may not be in the log", table)
	}
	good := w.seen
	w.seen = now.Flushed
	return good, nil
}

// moment is one at which the slot is there: its session is open.
func (w *publicationWatch) moment(ctx context.Context) (now *event.Mark, err error) {
	err = w.ask(func(conn *pgx.Conn) error {
		m, err := slotmgr.LookAtMoment(ctx, conn)
		now = &m
		return err
	})
	return now, err
}

// ask asks a question over the connection of a session that is open: a server
// takes longer to make a new one than to answer.
func (w *publicationWatch) ask(question func(*pgx.Conn) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conn == nil {
		return errors.New("the connection is lost")
	}
	return question(w.conn)
}

func (w *publicationWatch) look(ctx context.Context, before *slotmgr.Published) (now slotmgr.Published, err error) {
	if w.conn == nil || w.conn.IsClosed() {
		if w.conn, err = slotmgr.Connect(ctx, w.pg); err != nil {
			w.conn = nil
			return now, err
		}
	}
	return slotmgr.LookAtPublications(ctx, w.conn, w.publications, w.tables, before)
}

// end closes the connection: a smart shutdown of Postgres would wait for it.
func (w *publicationWatch) end() {
	if w.stop != nil {
		w.stop()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.conn != nil {
		hangUp(w.conn)
		w.conn = nil
	}
}

// watchedSource is a replication session whose publications are watched.
type watchedSource struct {
	*replication.Stream
	watch  *publicationWatch
	tables map[string][]string
	now    *event.Mark
}

func (s *watchedSource) Origin() event.Origin {
	o := s.Stream.Origin()
	o.Tables, o.Now = s.tables, s.now
	return o
}

func (s *watchedSource) Close() error {
	err := s.Stream.Close()
	s.watch.end()
	return err
}
