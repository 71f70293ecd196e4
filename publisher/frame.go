package publisher

import (
	"bytes"
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

// replyInTurn ends the reply subject of messages that are answered in turn, in
// place of the sequence; it is none.
//
// A server looks up who listens to a reply subject for each answer, and
// remembers it: a subject that it has never seen costs it a twelfth of all that
// it does for a message.
const replyInTurn = "0"

// framer writes events as HPUB frames. All but the event is fixed for a session.
type framer struct {
	expectStream []byte // header line
	reply        []byte // reply subject up to the sequence
	msgIDs       bool
	unchained    bool // no expected sequence, for a shared stream
	inTurn       bool // one reply subject for all, where replies come in turn

	header  []byte // scratch
	chained int    // where in it the expected sequence ends

	// Texts that change little from event to event.
	last, next counter
	pos        positionText
}

func newFramer(stream, inbox string, msgIDs bool) *framer {
	return &framer{
		expectStream: []byte(headerExpectedStream + ": " + stream + "\r\n"),
		reply:        []byte(inbox + "."),
		msgIDs:       msgIDs,
		header:       make([]byte, 0, 1024),
	}
}

// encode makes ev's header block, to become the message with sequence seq. It
// names the stream unless known. The block is valid until the next call.
func (f *framer) encode(ev *event.Event, seq uint64, known bool) []byte {
	h := append(f.header[:0], headerLine...)
	if !f.unchained {
		h = append(h, headerExpectedLastSeq+": "...)
		h = append(h, f.last.text(seq-1)...)
		h = append(h, "\r\n"...)
	}
	f.chained = len(h)
	if !known {
		h = append(h, f.expectStream...)
	}
	if f.msgIDs {
		h = appendHeader(h, headerMsgID, ev.MsgID)
	}
	h = appendHeader(h, event.HeaderPos, f.pos.text(ev.Position))
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
	if f.inTurn {
		out = append(out, replyInTurn...)
	} else {
		out = append(out, f.next.text(seq)...)
	}
	out = append(out, ' ')
	out = appendSize(out, len(header))
	out = append(out, ' ')
	out = appendSize(out, len(header)+payload)
	out = append(out, "\r\n"...)
	return append(out, header...)
}

// appendSize is strconv.AppendInt for what most sizes are: formatting numbers
// was nearly half of a frame's cost.
func appendSize(b []byte, n int) []byte {
	switch {
	case n < 100 || n > 9999:
		return strconv.AppendInt(b, int64(n), 10)
	case n > 999:
		b = append(b, '0'+byte(n/1000))
	}
	return append(b, '0'+byte(n/100%10), '0'+byte(n/10%10), '0'+byte(n%10))
}

// knownSubjects are those on which a session has published. The first message on a
// subject names the stream that it is for: a subject belongs to one stream of an
// account at a time, and each header that a server has to look at costs it a
// thirtieth of all that it does for a message. Should the subject move to another
// stream meanwhile, that one refuses what does not fit its last sequence, and
// where it fits by chance, the ack tells.
type knownSubjects struct {
	last  []byte
	known map[string]struct{}
}

// subjectsMost bounds the memory for streams whose subjects are as many as their messages.
const subjectsMost = 256

func (k *knownSubjects) has(subject []byte) bool {
	if len(subject) > 0 && bytes.Equal(subject, k.last) {
		return true // as most often
	}
	if _, ok := k.known[string(subject)]; !ok {
		return false
	}
	k.last = append(k.last[:0], subject...)
	return true
}

func (k *knownSubjects) add(subject []byte) {
	if k.has(subject) {
		return
	}
	k.last = append(k.last[:0], subject...)
	if k.known == nil {
		k.known = make(map[string]struct{})
	}
	if len(k.known) < subjectsMost {
		k.known[string(subject)] = struct{}{}
	}
}

// counter is the text of a number that goes up by one.
type counter struct {
	value  uint64
	digits []byte // nil at first
}

func (c *counter) text(v uint64) []byte {
	if v != c.value+1 || c.digits == nil {
		c.digits = strconv.AppendUint(c.digits[:0], v, 10)
		c.value = v
		return c.digits
	}
	c.value = v
	for i := len(c.digits) - 1; i >= 0; i-- {
		if c.digits[i] != '9' {
			c.digits[i]++
			return c.digits
		}
		c.digits[i] = '0'
	}
	c.digits = strconv.AppendUint(c.digits[:0], v, 10) // one digit more
	return c.digits
}

// positionText is the text of a position; most share their transaction with the
// one before.
type positionText struct {
	timeline uint32
	commit   event.LSN
	digits   []byte // nil at first
	prefix   int    // length of timeline and commit
}

func (p *positionText) text(pos event.Position) []byte {
	if pos.Timeline != p.timeline || pos.Commit != p.commit || p.digits == nil {
		p.timeline, p.commit = pos.Timeline, pos.Commit
		p.digits = event.Position{Timeline: pos.Timeline, Commit: pos.Commit}.Append(p.digits[:0])
		p.prefix = len(p.digits) - len("0/0:0")
	}
	p.digits = pos.Change.Append(p.digits[:p.prefix])
	p.digits = append(p.digits, ':')
	p.digits = strconv.AppendUint(p.digits, uint64(pos.N), 10)
	return p.digits
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
