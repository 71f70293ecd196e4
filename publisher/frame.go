package publisher

import (
	"strconv"

	"github.com/walrelay/walrelay/event"
)

// Headers of the JetStream publish protocol, from the server's stream.go.
const (
	headerExpectedLastSeq     = "Nats-Expected-Last-Sequence"
	headerExpectedStream      = "Nats-Expected-Stream"
	headerExpectedLastSubject = "Nats-Expected-Last-Subject-Sequence"
	headerMsgID               = "Nats-Msg-Id"
)

const (
	headerLine = "NATS/1.0\r\n"

	// maxHeaderBytes is the server's limit (errHeaderTooLarge, 10097): the length is stored in 16 bits.
	maxHeaderBytes = 65535
	// maxSubjectBytes leaves room for the reply subject and the sizes in the
	// server's max_control_line, 4096 by default.
	maxSubjectBytes = 2048
	// directPayload is the size from which a payload is written from where it
	// lies instead of being copied to the out-buffer.
	directPayload = 32 << 10
)

// framer writes events as HPUB frames. All but the event is fixed for a session.
type framer struct {
	expectStream []byte // header line
	reply        []byte // reply subject up to the sequence
	msgIDs       bool

	header []byte // scratch
	pos    []byte // scratch
}

func newFramer(stream, inbox string, msgIDs bool) *framer {
	return &framer{
		expectStream: []byte(headerExpectedStream + ": " + stream + "\r\n"),
		reply:        []byte(inbox + "."),
		msgIDs:       msgIDs,
		header:       make([]byte, 0, 1024),
	}
}

// encode makes ev's header block, to become the message with sequence seq. The
// block is valid until the next call.
func (f *framer) encode(ev *event.Event, seq uint64) []byte {
	h := append(f.header[:0], headerLine...)
	h = append(h, headerExpectedLastSeq+": "...)
	h = strconv.AppendUint(h, seq-1, 10)
	h = append(h, "\r\n"...)
	h = append(h, f.expectStream...)
	if f.msgIDs {
		h = appendHeader(h, headerMsgID, ev.MsgID)
	}
	f.pos = ev.Position.Append(f.pos[:0])
	h = appendHeader(h, event.HeaderPos, f.pos)
	for i := range ev.Headers {
		h = appendHeader(h, ev.Headers[i].Name, ev.Headers[i].Value)
	}
	h = append(h, "\r\n"...)
	f.header = h
	return h
}

func appendHeader(h []byte, name string, value []byte) []byte {
	h = append(h, name...)
	h = append(h, ": "...)
	h = append(h, value...)
	return append(h, "\r\n"...)
}

// appendFrame appends the control line and the header block, after which
// payload and a line break have to follow.
func (f *framer) appendFrame(out []byte, subject, header []byte, seq uint64, payload int) []byte {
	out = append(out, "HPUB "...)
	out = append(out, subject...)
	out = append(out, ' ')
	out = append(out, f.reply...)
	out = strconv.AppendUint(out, seq, 10)
	out = append(out, ' ')
	out = strconv.AppendInt(out, int64(len(header)), 10)
	out = append(out, ' ')
	out = strconv.AppendInt(out, int64(len(header)+payload), 10)
	out = append(out, "\r\n"...)
	return append(out, header...)
}

// validSubject reports whether a message may be published to s: no empty
// token, no wildcard, no white space or control byte. The server itself takes
// wildcards for literals.
func validSubject(s []byte) bool {
	if len(s) == 0 || len(s) > maxSubjectBytes {
		return false
	}
	last := byte('.')
	for _, c := range s {
		if c <= ' ' || c == '*' || c == '>' || c == 0x7f || (c == '.' && last == '.') {
			return false
		}
		last = c
	}
	return last != '.'
}

// matches reports whether the filter of a stream binds subject.
func matches(filter string, subject []byte) bool {
	s := 0
	for f := 0; f < len(filter); {
		if filter[f] == '>' && f == len(filter)-1 {
			return s < len(subject)
		}
		if s >= len(subject) {
			return false
		}
		if filter[f] == '*' && (f+1 == len(filter) || filter[f+1] == '.') {
			for s < len(subject) && subject[s] != '.' {
				s++
			}
			f++
		} else {
			for f < len(filter) && filter[f] != '.' {
				if s >= len(subject) || subject[s] != filter[f] {
					return false
				}
				f++
				s++
			}
			if s < len(subject) && subject[s] != '.' {
				return false
			}
		}
		if f == len(filter) {
			return s == len(subject)
		}
		// Both must go on with another token.
		if s >= len(subject) {
			return false
		}
		f++
		s++
	}
	return false
}
