package slotmgr

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"
)

// clientEncoding is the one in which the changes of a slot can be read whatever they hold: of
// a database that is not UTF8 the values as they are stored, since one that the
// server cannot convert would fail the whole read. The names of publications are then not
// converted either, so that they have to be ASCII.
func clientEncoding(conn *pgx.Conn, plugin []string) string {
	switch serverEncoding(conn) {
	case "UTF8":
		return "UTF8"
	case "SQL_ASCII":
		return "SQL_ASCII"
	}
	for _, option := range plugin {
		if strings.ContainsFunc(option, func(r rune) bool { return r > unicode.MaxASCII }) {
			return "UTF8"
		}
	}
	return "SQL_ASCII"
}

func serverEncoding(conn *pgx.Conn) string { return conn.PgConn().ParameterStatus("server_encoding") }

// encoding finds whether the text of the database may be no UTF-8.
func (p *preflight) encoding() {
	if p.err != nil {
		return
	}
	f := Finding{Name: "encoding", Detail: fmt.Sprintf("the database is encoded in %s", serverEncoding(p.conn))}
	if serverEncoding(p.conn) == "SQL_ASCII" {
		f.Level = WARN
		f.Detail = "the database is encoded in SQL_ASCII, which checks nothing: events with bytes that are not UTF-8 are parked"
		f.Remedy = "let every writer set client_encoding to UTF8, or move to a database WITH ENCODING 'UTF8'; bytea takes any bytes"
	}
	p.add(f)
}
