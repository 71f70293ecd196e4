package publisher

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"

	"github.com/walrelay/walrelay/event"
)

// Error codes of the JetStream API, from the server's errors.json.
const (
	codeNoPeers           = 10005
	codeAccountFull       = 10002
	codeStreamNotFound    = 10059
	codeWrongStream       = 10060
	codeWrongLastSeq      = 10071
	codeTooLarge          = 10054
	codeHeaderTooLarge    = 10097
	codeStoreFailed       = 10077
	codeMessageNotFound   = 10037
	codeDeleteFailed      = 10057
	codeStreamSealed      = 10109
	codeDuplicateAsync    = 10158
	codeWrongLastMsgID    = 10070
	codeMaxBytes          = 10047
	codeInsufficient      = 10023
	codeUnavailable       = 10008
	codeNotLeader         = 10009
	codeMirrorPublish     = 10055
	codeMessageTTLInvalid = 10165
	codeSubjectOverlap    = 10065
	codeInvalidStream     = 10052
	codeBatchTooLarge     = 10199
)

// apiError is the error object of a JetStream reply.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

func (e *apiError) Error() string {
	return fmt.Sprintf("%s (%d)", e.Description, e.ErrCode)
}

type pubAck struct {
	Stream    string    `json:"stream"`
	Sequence  uint64    `json:"seq"`
	Duplicate bool      `json:"duplicate"`
	Error     *apiError `json:"error"`
}

// ackSequence reads the usual ack without a JSON decoder. The server writes it
// in one form (mset.pubAck in its stream.go): {"stream":"S","seq":1}, with
// "domain":"D" in between where JetStream has one, and with a space after the
// comma in older versions. That of a batch goes on with ,"batch":"id","count":1}.
// Whatever differs is left to the decoder.
func ackSequence(p []byte) (stream []byte, seq uint64, ok bool) {
	stream, rest, ok := cutString(p, `{"stream":"`)
	if !ok {
		return nil, 0, false
	}
	if _, r, ok := cutString(rest, `"domain":"`); ok {
		rest = r
	}
	const key = `"seq":`
	if len(rest) < len(key)+2 || string(rest[:len(key)]) != key || rest[len(rest)-1] != '}' {
		return nil, 0, false
	}
	digits := rest[len(key) : len(rest)-1]
	if i := bytes.IndexByte(digits, ','); i > 0 {
		if !batchOf(digits[i+1:]) {
			return nil, 0, false
		}
		digits = digits[:i]
	}
	if len(digits) > 19 || digits[0] == '0' {
		return nil, 0, false
	}
	for _, c := range digits {
		if c < '0' || c > '9' {
			return nil, 0, false
		}
		seq = seq*10 + uint64(c-'0')
	}
	return stream, seq, true
}

// batchOf reports whether p is what an ack says of a batch.
func batchOf(p []byte) bool {
	_, count, ok := cutString(p, `"batch":"`)
	if ok {
		count, ok = bytes.CutPrefix(count, countKey)
	}
	for _, c := range count {
		ok = ok && c >= '0' && c <= '9'
	}
	return ok && len(count) > 0
}

var countKey = []byte(`"count":`)

// cutString cuts prefix, a string without escapes, its closing quote and the
// comma off the front of p.
func cutString(p []byte, prefix string) (text, rest []byte, ok bool) {
	if len(p) < len(prefix) || string(p[:len(prefix)]) != prefix {
		return nil, nil, false
	}
	for i := len(prefix); i < len(p); i++ {
		switch c := p[i]; {
		case c < ' ' || c == '\\':
			return nil, nil, false
		case c == '"':
			text, rest = p[len(prefix):i], p[i+1:]
			if len(rest) == 0 || rest[0] != ',' {
				return nil, nil, false
			}
			return text, bytes.TrimPrefix(rest[1:], space), true
		}
	}
	return nil, nil, false
}

var space = []byte{' '}

// usualAck is the next ack as it comes when all goes well: like the one before
// it, with its numbers one higher. Comparing the bytes costs a tenth of
// reading them; whatever differs is read.
type usualAck struct {
	text   []byte // nil until an ack was read
	ends   []int  // of the sequence, in the subject unless that is the same for all, and in the payload
	digits int
}

// learn takes the form of the ack that was read for sequence seq.
func (u *usualAck) learn(seq uint64, subject, header, payload []byte) {
	u.text = u.text[:0]
	if _, got, ok := ackSequence(payload); !ok || got != seq || len(header) > 0 {
		return
	}
	var number [20]byte
	digits := strconv.AppendUint(number[:0], seq, 10)
	u.digits, u.ends = len(digits), u.ends[:0]
	u.text = append(append(u.text, "MSG "...), subject...)
	if bytes.HasSuffix(subject, digits) {
		u.ends = append(u.ends, len(u.text))
	} else if !bytes.HasSuffix(subject, []byte("."+replyInTurn)) {
		u.text = u.text[:0]
		return
	}
	u.text = append(append(u.text, ' '), ackSubscription...)
	u.text = strconv.AppendInt(append(u.text, ' '), int64(len(payload)), 10)
	u.text = append(append(u.text, "\r\n"...), payload...)
	u.ends = append(u.ends, len(u.text)-len("}"))
	u.text = append(u.text, "\r\n"...)
	u.advance()
}

// advance makes the text that of the next sequence, or empty when that has one
// digit more: then the size differs, too.
func (u *usualAck) advance() {
	for _, end := range u.ends {
		i := end - 1
		for ; i >= end-u.digits && u.text[i] == '9'; i-- {
			u.text[i] = '0'
		}
		if i < end-u.digits {
			u.text = u.text[:0]
			return
		}
		u.text[i]++
	}
}

// take consumes the ack when it lies in r as expected.
func (u *usualAck) take(r *bufio.Reader) bool {
	n := len(u.text)
	if n == 0 || r.Buffered() < n {
		return false
	}
	if got, err := r.Peek(n); err != nil || !bytes.Equal(got, u.text) {
		return false
	}
	_, _ = r.Discard(n) // it is buffered
	u.advance()
	return true
}

// errNoResponders is the server's 503: nothing listens to the subject, which
// is a stream without leader, or a subject that no stream binds.
var errNoResponders = errors.New("no stream answers for the subject (503)")

var (
	errForeignWriter = errors.New("another client writes to the stream")
	errOverdue       = errors.New("no ack")
	errMoved         = errors.New("the subject was moved there meanwhile")
)

// surprise is anything but the expected ack for the message predicted to
// become sequence seq. It ends the session.
type surprise struct {
	seq       uint64
	duplicate uint64 // the sequence a duplicate ack named; 0 if it is none
	stream    string // and its stream, if it is known
	alone     bool   // nothing else was in flight
	err       error
}

func (s *surprise) Error() string {
	return fmt.Sprintf("message for stream sequence %d: %v", s.seq, s.err)
}

func (s *surprise) Unwrap() error { return s.err }

// parseReply reads the reply for the message predicted to become seq of a stream.
func parseReply(stream string, seq uint64, header, payload []byte) *surprise {
	if by, got, ok := ackSequence(payload); ok {
		if got == seq && string(by) == stream {
			return nil
		}
		return misplaced(stream, seq, string(by), got)
	}
	if len(header) > 0 && bytes.HasPrefix(header, []byte("NATS/1.0 503")) {
		return &surprise{seq: seq, err: errNoResponders}
	}
	var a pubAck
	if err := json.Unmarshal(payload, &a); err != nil {
		return &surprise{seq: seq, err: fmt.Errorf("reply that is no ack: %w", err)}
	}
	switch {
	case a.Error != nil:
		return &surprise{seq: seq, err: a.Error}
	case a.Duplicate && a.Sequence == 0:
		// A clustered 2.10 answers so after refusing the expected sequence.
		return &surprise{seq: seq, err: errors.New("duplicate without a sequence, which is no ack")}
	case a.Duplicate && a.Sequence != seq:
		return &surprise{
			seq: seq, duplicate: a.Sequence, stream: a.Stream,
			err: fmt.Errorf("taken for a duplicate of stream sequence %d", a.Sequence),
		}
	}
	return misplaced(stream, seq, a.Stream, a.Sequence)
}

// misplaced is nil when the message predicted to become seq of stream became that.
func misplaced(stream string, seq uint64, by string, got uint64) *surprise {
	switch {
	case by != stream && by != "":
		return &surprise{seq: seq, stream: by, err: fmt.Errorf("stored in stream %q: %w", by, errMoved)}
	case got != seq:
		return &surprise{seq: seq, err: fmt.Errorf("stored as sequence %d: %w", got, errForeignWriter)}
	}
	return nil
}

// poisonOf says whether the error of a message that was alone in flight is
// the message's own fault.
func poisonOf(err error) *event.Poison {
	var api *apiError
	if errors.As(err, &api) {
		switch api.ErrCode {
		case codeTooLarge:
			return &event.Poison{Reason: event.ReasonTooLarge, Detail: api.Description}
		case codeHeaderTooLarge:
			return &event.Poison{Reason: event.ReasonHeaders, Detail: api.Description}
		case codeWrongStream:
			return otherStream
		case codeMessageTTLInvalid:
			return &event.Poison{Reason: event.ReasonHeaders, Detail: api.Description}
		}
	}
	var p protocolError
	if errors.As(err, &p) && p.publishDenied() {
		return &event.Poison{Reason: event.ReasonNotAuthorized, Detail: p.Error()}
	}
	return nil
}

var otherStream = &event.Poison{Reason: event.ReasonSubject, Detail: "the subject belongs to another stream"}

const hintFull = "the stream, the account or the server is full: raise its limits or let consumers work it off"

// full reports whether an error code says that there is no room.
func full(code int) bool {
	switch code {
	case codeStoreFailed, codeMaxBytes, codeInsufficient, codeAccountFull:
		return true
	}
	return false
}

// classify gives an error of a publish its class and hint.
func classify(stream string, err error) error {
	var api *apiError
	var p protocolError
	switch {
	case errors.As(err, &api):
		switch api.ErrCode {
		case codeStreamNotFound:
			return event.Fail(event.Precondition, "was it deleted? nats stream ls shows what there is; --create-stream makes it anew", "stream %q: %w", stream, err)
		case codeStreamSealed, codeMirrorPublish:
			return event.Fail(event.Precondition, "the relay needs a stream that accepts messages", "stream %q: %w", stream, err)
		}
		if full(api.ErrCode) {
			return event.Fail(event.Transient, hintFull, "stream %q: %w", stream, err)
		}
	case errors.As(err, &p) && p.authorization():
		return event.Fail(event.Transient, "check the NATS credentials", "%w", err)
	}
	return err
}

// sequenceOf reads the last token of a reply subject.
func sequenceOf(subject []byte) (uint64, bool) {
	i := bytes.LastIndexByte(subject, '.')
	seq, err := strconv.ParseUint(string(subject[i+1:]), 10, 64)
	return seq, err == nil
}
