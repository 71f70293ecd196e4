package charset

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5/pgconn"
)

// Of the encodings of a database.
const (
	utf8Name  = "UTF8"
	asciiName = "SQL_ASCII"
)

// SQLSTATE of a value that a conversion refuses (report_invalid_encoding and
// report_untranslatable_char in mbutils.c).
const (
	notInRepertoire = "22021"
	untranslatable  = "22P05"
)

// Refused reports whether the server could not convert a value to the client's encoding.
func Refused(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == notInRepertoire || pg.Code == untranslatable)
}

// Charset makes UTF-8 of text in the encoding of one database. One goroutine uses it; any may
// close it.
type Charset struct {
	encoding string
	conf     *pgconn.Config
	foreign  []bool

	life context.Context // ends with Close
	end  context.CancelFunc

	mu sync.Mutex
	pg *pgconn.PgConn // opened for the first value that the server has to convert
}

// New makes the Charset of the database that pg is connected to: nil when it is
// UTF8, whose bytes need nothing. It opens nothing.
func New(pg *pgconn.PgConn, conf *pgconn.Config) *Charset {
	encoding := pg.ParameterStatus("server_encoding")
	if encoding == utf8Name || encoding == "" {
		return nil
	}
	conf = conf.Copy()
	maps.DeleteFunc(conf.RuntimeParams, func(name, _ string) bool {
		return strings.EqualFold(name, "replication") || strings.EqualFold(name, "client_encoding")
	})
	if conf.RuntimeParams == nil {
		conf.RuntimeParams = map[string]string{}
	}
	conf.RuntimeParams["client_encoding"] = utf8Name
	conf.AfterConnect, conf.ValidateConnect = nil, nil
	c := &Charset{encoding: encoding, conf: conf}
	c.life, c.end = context.WithCancel(context.Background())
	return c
}

// Unconverted reports whether the database has no encoding that the server converts from.
func (c *Charset) Unconverted() bool { return c != nil && c.encoding == asciiName }

// Reads reports whether a statement can be sent by a session that does not convert: its own
// text is not converted either. It is false for a nil Charset, which has nothing to convert.
func (c *Charset) Reads(sql string) bool {
	return c != nil && (c.Unconverted() || !strings.ContainsFunc(sql, func(r rune) bool { return r >= utf8.RuneSelf }))
}

// patience bounds the conversion of a value.
const patience = 10 * time.Second

// Row converts the values in place and reports which of them are no text, nil when all
// are; those keep the bytes of the database. What it returns, and the values, are valid
// until the next call. It asks the server for each value that is not ASCII, unless
// the database is SQL_ASCII.
func (c *Charset) Row(values [][]byte) (foreign []bool, err error) {
	for i, v := range values {
		text, ok, err := c.text(v)
		if err != nil {
			return nil, err
		}
		if ok {
			values[i] = text
			continue
		}
		if foreign == nil {
			foreign = slices.Grow(c.foreign[:0], len(values))[:len(values)]
			clear(foreign)
			c.foreign = foreign
		}
		foreign[i] = true
	}
	return foreign, nil
}

// Name is the text of a name, or its bytes when that is none.
func (c *Charset) Name(b []byte) (string, error) {
	text, ok, err := c.text(b)
	if !ok {
		text = b
	}
	return string(text), err
}

func (c *Charset) text(v []byte) (text []byte, ok bool, err error) {
	if !slices.ContainsFunc(v, func(b byte) bool { return b >= utf8.RuneSelf }) {
		return v, true, nil
	}
	if c.encoding == asciiName {
		return v, utf8.Valid(v), nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(c.life, patience)
	defer cancel()
	if c.pg == nil {
		if c.pg, err = pgconn.ConnectConfig(ctx, c.conf); err != nil {
			c.pg = nil
			return nil, false, fmt.Errorf("connect to Postgres to convert from %s: %w", c.encoding, err)
		}
	}
	const asText, binary = 0, 1
	r := c.pg.ExecParams(ctx, "select pg_catalog.convert_from($1::bytea, pg_catalog.getdatabaseencoding())",
		[][]byte{v}, nil, []int16{binary}, []int16{asText}).Read()
	switch {
	case Refused(r.Err):
		return v, false, nil
	case r.Err != nil:
		c.hangUp()
		return nil, false, fmt.Errorf("convert a value from %s: %w", c.encoding, r.Err)
	case len(r.Rows) != 1 || len(r.Rows[0]) != 1:
		return nil, false, errors.New("convert a value: no answer")
	}
	return r.Rows[0][0], true, nil
}

// Close ends its connection, and a conversion that is under way. A nil Charset has none.
func (c *Charset) Close() {
	if c == nil {
		return
	}
	c.end()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hangUp()
}

func (c *Charset) hangUp() {
	if c.pg == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = c.pg.Close(ctx) // all that was asked is answered
	c.pg = nil
}
