package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Workload chooses what Writers commit. Zero values get the defaults in parentheses.
type Workload struct {
	DSN        string
	Table      string // SQL name of the outbox table (public.outbox)
	Writers    int    // connections at work (8)
	Aggregates int    // for each writer (20)
	Rows       int    // at most in a transaction (5)
	Padding    int    // bytes at most in a payload (200)
	Rate       int    // transactions a second of all writers together; 0 is as fast as it goes
	Seed       uint64 // of all choices

	// Plain leaves out what every tenth transaction or so does otherwise: roll back, roll
	// back to a savepoint, COPY, delete what it inserted.
	Plain bool

	// Also runs in every transaction before the events are inserted.
	Also func(ctx context.Context, tx pgx.Tx, aggregates []string) error

	// Init runs on every new connection.
	Init func(ctx context.Context, c *pgx.Conn) error
}

// Writers commit a known workload and remember it. An aggregate belongs to one
// writer, so its events have an order without any lock.
type Writers struct {
	Diary *Diary

	load Workload
	each []*writer
	txs  atomic.Int64
}

type writer struct {
	*Writers
	name int
	rng  *rand.Rand
	n    []int // last number of each aggregate
	conn *pgx.Conn
}

// NewWriters makes writers that do not write yet.
func NewWriters(load Workload) *Writers {
	if load.Table == "" {
		load.Table = "public.outbox"
	}
	for _, d := range []struct {
		v   *int
		def int
	}{{&load.Writers, 8}, {&load.Aggregates, 20}, {&load.Rows, 5}, {&load.Padding, 200}} {
		if *d.v == 0 {
			*d.v = d.def
		}
	}
	ws := &Writers{Diary: NewDiary(), load: load}
	for i := range load.Writers {
		ws.each = append(ws.each, &writer{
			Writers: ws,
			name:    i,
			rng:     rand.New(rand.NewPCG(load.Seed, uint64(i))),
			n:       make([]int, load.Aggregates),
		})
	}
	return ws
}

// SetRate changes the transactions a second for the next Run.
func (ws *Writers) SetRate(rate int) { ws.load.Rate = rate }

// Run blocks until at least n more events are committed, or until ctx ends; n
// below zero means only the latter. It rides out every loss of a connection.
// It returns an error when a statement is refused, and when n was not reached.
func (ws *Writers) Run(ctx context.Context, n int) error {
	goal := ws.Diary.Committed() + n
	run, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	reached := func() bool { return n >= 0 && ws.Diary.Committed() >= goal }
	var all sync.WaitGroup
	for _, w := range ws.each {
		all.Go(func() {
			if err := w.work(run, reached); err != nil {
				stop(err)
			}
			w.disconnect()
		})
	}
	all.Wait()
	if cause := context.Cause(run); cause != nil && ctx.Err() == nil {
		return cause
	}
	if n >= 0 && !reached() {
		return fmt.Errorf("write events: %d of %d committed: %w", ws.Diary.Committed()-goal+n, n, context.Cause(ctx))
	}
	return nil
}

// work commits transactions until done or ctx ends. Its error is a refusal.
func (w *writer) work(ctx context.Context, done func() bool) error {
	var tick <-chan time.Time
	if w.load.Rate > 0 {
		t := time.NewTicker(time.Second * time.Duration(w.load.Writers) / time.Duration(w.load.Rate))
		defer t.Stop()
		tick = t.C
	}
	for ctx.Err() == nil && !done() {
		if tick != nil {
			select {
			case <-tick:
			case <-ctx.Done():
				return nil
			}
		}
		if w.conn == nil && !w.connect(ctx) {
			continue
		}
		err := w.transaction(ctx)
		if err == nil {
			continue
		}
		w.disconnect()
		if refused(err) && ctx.Err() == nil {
			return fmt.Errorf("writer: %w", err)
		}
	}
	return nil
}

// refused reports an error that no new connection would mend: the classes of
// bad data, violated constraints and wrong statements.
func refused(err error) bool {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || len(pg.Code) != 5 {
		return false
	}
	switch pg.Code[:2] {
	case "22", "23", "42", "0A":
		return true
	}
	return false
}

func (w *writer) connect(ctx context.Context) bool {
	short, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := pgx.Connect(short, w.load.DSN)
	if err == nil && w.load.Init != nil {
		err = w.load.Init(short, c)
	}
	if err == nil {
		w.conn = c
		return true
	}
	if c != nil {
		c.Close(short)
	}
	pause := time.NewTimer(50 * time.Millisecond)
	defer pause.Stop()
	select {
	case <-pause.C:
	case <-ctx.Done():
	}
	return false
}

func (w *writer) disconnect() {
	if w.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer cancel()
	w.conn.Close(ctx)
	w.conn = nil
}

// transaction runs one transaction and writes it into the diary. The end of ctx
// gives it a moment to finish, so that its outcome is not needlessly unknown.
func (w *writer) transaction(ctx context.Context) error {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(2*time.Second, cancel) })()

	tx, err := w.conn.Begin(own)
	if err != nil {
		return err
	}
	id := w.txs.Add(1)
	entries := make([]Entry, 1+w.rng.IntN(w.load.Rows))
	aggregates := make([]string, len(entries))
	for i := range entries {
		entries[i] = w.event(id)
		aggregates[i] = entries[i].Aggregate
	}
	kind := w.rng.IntN(100)
	if w.load.Plain {
		kind = 100
	}
	err = w.fill(own, tx, entries, aggregates, kind)
	switch {
	case err != nil:
		tx.Rollback(own)
		w.remember(entries, RolledBack)
		return err
	case kind < 10:
		w.remember(entries, RolledBack)
		return tx.Rollback(own)
	}
	err = tx.Commit(own)
	outcome := committed(err)
	w.remember(entries, outcome)
	return err
}

// committed tells an outcome from what COMMIT returned. A server that answers
// with an error has rolled back, unless the error also ends the session.
func committed(err error) Outcome {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return Committed
	case errors.Is(err, pgx.ErrTxCommitRollback):
		return RolledBack
	case errors.As(err, &pg) && pg.SeverityUnlocalized == "ERROR":
		return RolledBack
	}
	return Unknown
}

// fill runs the statements of a transaction. Entries that a savepoint rolls back
// are written into the diary there.
func (w *writer) fill(ctx context.Context, tx pgx.Tx, entries []Entry, aggregates []string, kind int) error {
	if w.load.Also != nil {
		if err := w.load.Also(ctx, tx, aggregates); err != nil {
			return err
		}
	}
	switch {
	case kind < 20 && kind >= 10:
		undone := []Entry{w.event(entries[0].Tx)}
		sub, err := tx.Begin(ctx) // a savepoint
		if err != nil {
			return err
		}
		if err := w.insert(ctx, sub, undone); err != nil {
			return err
		}
		if err := sub.Rollback(ctx); err != nil {
			return err
		}
		w.remember(undone, RolledBack)
		// After the rollback, so that the numbers are in the order of the log.
		for i := range entries {
			entries[i] = w.event(entries[i].Tx)
		}
	case kind < 25 && kind >= 20:
		return w.copy(ctx, tx, entries)
	case kind < 30 && kind >= 25:
		if err := w.insert(ctx, tx, entries); err != nil {
			return err
		}
		ids := make([]string, len(entries))
		for i := range entries {
			ids[i], entries[i].deleted = entries[i].ID, true
		}
		_, err := tx.Exec(ctx, "DELETE FROM "+w.load.Table+" WHERE id = ANY($1)", ids)
		return err
	}
	return w.insert(ctx, tx, entries)
}

func (w *writer) remember(entries []Entry, o Outcome) {
	now := time.Now()
	for i := range entries {
		entries[i].Outcome, entries[i].At = o, now
	}
	w.Diary.Add(entries...)
}

const outboxColumns = "(id, aggregate_type, aggregate_id, event_type, payload, headers)"

func (w *writer) insert(ctx context.Context, tx pgx.Tx, entries []Entry) error {
	var b pgx.Batch
	for _, e := range entries {
		b.Queue("INSERT INTO "+w.load.Table+" "+outboxColumns+" VALUES ($1, 'order', $2, $3, $4, $5)",
			e.ID, e.Aggregate, eventType(e.N), e.Payload, `{"writer": "`+strconv.Itoa(w.name)+`"}`)
	}
	return tx.SendBatch(ctx, &b).Close()
}

// copy sends the events in COPY's text format, which needs no types.
func (w *writer) copy(ctx context.Context, tx pgx.Tx, entries []Entry) error {
	var b bytes.Buffer
	escape := strings.NewReplacer("\\", "\\\\", "\n", "\\n", "\t", "\\t")
	for _, e := range entries {
		fmt.Fprintf(&b, "%s\torder\t%s\t%s\t%s\t\\N\n", e.ID, e.Aggregate, eventType(e.N), escape.Replace(string(e.Payload)))
	}
	_, err := tx.Conn().PgConn().CopyFrom(ctx, &b, "COPY "+w.load.Table+" "+outboxColumns+" FROM STDIN")
	return err
}

func eventType(n int) string {
	return [...]string{"created", "paid", "packed", "shipped"}[n%4]
}

// event makes the next event of one of the writer's aggregates.
func (w *writer) event(tx int64) Entry {
	i := w.rng.IntN(len(w.n))
	w.n[i]++
	aggregate := fmt.Sprintf("w%d-%d", w.name, i)
	return Entry{
		ID:        newID(),
		Aggregate: aggregate,
		N:         w.n[i],
		Payload:   payload(w.n[i], aggregate, w.rng.IntN(w.load.Padding+1)),
		Tx:        tx,
	}
}

// payload is written as jsonb writes it (shorter keys first, a space after
// colon and comma), so that it is the same in a json, jsonb or text column.
func payload(n int, aggregate string, padding int) []byte {
	b := make([]byte, 0, 64+padding)
	b = append(b, `{"n": `...)
	b = strconv.AppendInt(b, int64(n), 10)
	b = append(b, `, "pad": "`...)
	for i := range padding {
		b = append(b, 'a'+byte((n+i)%26))
	}
	b = append(b, `", "aggregate": "`...)
	b = append(b, aggregate...)
	return append(b, `"}`...)
}

// newID is a random UUID of version 4. It does not depend on the seed, since runs
// with the same seed may share a table.
func newID() string {
	hi, lo := rand.Uint64(), rand.Uint64()
	return fmt.Sprintf("%08x-%04x-4%03x-%04x-%012x",
		hi>>32, hi>>16&0xffff, hi&0xfff, 0x8000|lo>>48&0x3fff, lo&0xffffffffffff)
}
