package replication

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/charset"
	"github.com/walrelay/walrelay/event"
)

// The walsender converts each value to client_encoding before it sends it
// (logicalrep_write_tuple, pq_sendcountedtext), and an error there ends the session at every
// try. So a database whose bytes may be no UTF-8 is read with client_encoding = SQL_ASCII,
// which sends them unconverted: SQL_ASCII itself always, and one of another encoding in
// the session after one that ended on such an error.

// Unconverted says, from one session to the next, that the server could not convert a value.
type Unconverted struct{ next atomic.Bool }

var errUnconverted = errors.New("a value cannot be converted to UTF8")

// encode chooses the encoding of the session, once the server has told its own.
func (s *Stream) encode(ctx context.Context, cfg Config, conf *pgconn.Config) error {
	c := charset.New(s.pg, cfg.Conn)
	refused := cfg.Unconverted != nil && cfg.Unconverted.next.Swap(false)
	if c == nil || !c.Unconverted() && !refused {
		s.convertible = c != nil
		return nil
	}
	if _, err := s.pg.Exec(ctx, "SET client_encoding = 'SQL_ASCII'").ReadAll(); err != nil {
		return startFailure(conf, cfg.Slot, "set client_encoding", err)
	}
	s.decoder.charset = c
	return nil
}

// unconverted is the failure of a session for a value that the next one reads as it is stored;
// nil when err is another one.
func (s *Stream) unconverted(err error) error {
	if !s.convertible || s.remember == nil || !charset.Refused(err) {
		return nil
	}
	s.remember.next.Store(true)
	return event.Fail(event.Transient, "the next session reads it as it is stored, and its event is parked",
		"read the replication stream: %w: %w", errUnconverted, err)
}

// translate makes UTF-8 of the names of a relation.
func (d *decoder) translate(rel *event.Relation) (err error) {
	names := []*string{&rel.Schema, &rel.Name}
	for i := range rel.Columns {
		names = append(names, &rel.Columns[i].Name)
	}
	for _, name := range names {
		if *name, err = d.charset.Name([]byte(*name)); err != nil {
			return fmt.Errorf("read the names of a table: %w", err)
		}
	}
	return nil
}

// Convert makes UTF-8 of values that come as the database stores them, where the database is not
// UTF8. pg is the connection that reads them; conf is for another one, which done closes.
func (d *Decoder) Convert(pg *pgconn.PgConn, conf *pgconn.Config) (done func()) {
	d.d.charset = charset.New(pg, conf)
	return d.d.charset.Close
}
