package replication

import (
	"encoding/binary"
	"testing"

	"github.com/walrelay/walrelay/event"
)

// Builders of the messages that a walsender puts into CopyData.

func be16(b []byte, v uint16) []byte { return binary.BigEndian.AppendUint16(b, v) }
func be32(b []byte, v uint32) []byte { return binary.BigEndian.AppendUint32(b, v) }
func be64(b []byte, v uint64) []byte { return binary.BigEndian.AppendUint64(b, v) }

func cstring(b []byte, s string) []byte { return append(append(b, s...), 0) }

func xlog(start event.LSN, body []byte) []byte {
	b := be64([]byte{'w'}, uint64(start))
	b = be64(b, uint64(start))
	b = be64(b, 0)
	return append(b, body...)
}

func keepaliveMsg(end event.LSN, reply bool) []byte {
	b := be64([]byte{'k'}, uint64(end))
	b = be64(b, 0)
	if reply {
		return append(b, 1)
	}
	return append(b, 0)
}

func beginMsg(commit event.LSN, xid uint32) []byte {
	b := be64([]byte{'B'}, uint64(commit))
	b = be64(b, 1000) // microseconds of the commit time
	return xlog(commit, be32(b, xid))
}

func commitMsg(commit, end event.LSN) []byte {
	b := be64([]byte{'C', 0}, uint64(commit))
	b = be64(b, uint64(end))
	return xlog(end, be64(b, 1000))
}

func relationMsg(id uint32, schema, name string, columns ...event.Column) []byte {
	b := be32([]byte{'R'}, id)
	b = cstring(b, schema)
	b = cstring(b, name)
	b = append(b, 'd')
	b = be16(b, uint16(len(columns)))
	for _, c := range columns {
		b = append(b, 0)
		b = cstring(b, c.Name)
		b = be32(b, c.Type)
		b = be32(b, 0xffffffff)
	}
	return xlog(0, b)
}

// insertMsg takes values of type string, or nil for NULL.
func insertMsg(start event.LSN, id uint32, values ...any) []byte {
	b := be32([]byte{'I'}, id)
	b = append(b, 'N')
	b = be16(b, uint16(len(values)))
	for _, v := range values {
		if v == nil {
			b = append(b, 'n')
			continue
		}
		b = append(b, 't')
		b = be32(b, uint32(len(v.(string))))
		b = append(b, v.(string)...)
	}
	return xlog(start, b)
}

func messageMsg(lsn event.LSN, transactional bool, prefix, content string) []byte {
	b := []byte{'M', 0}
	if transactional {
		b[1] = 1
	}
	b = be64(b, uint64(lsn))
	b = cstring(b, prefix)
	b = be32(b, uint32(len(content)))
	return xlog(lsn, append(b, content...))
}

var (
	idColumn   = event.Column{Name: "id", Type: event.TypeUUID}
	bodyColumn = event.Column{Name: "payload", Type: event.TypeJSONB}
)

// feed decodes a message that must be taken.
func feed(t testing.TB, s *Stream, body []byte) *event.Record {
	t.Helper()
	rec, err := s.decode(body)
	if err != nil {
		t.Fatalf("decode %q: %v", body, err)
	}
	return rec
}

// decoding is a Stream without a connection.
func decoding(timeline uint32, history []event.Switch) *Stream {
	return &Stream{decoder: newDecoder(timeline, history)}
}
