package publisher

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/walrelay/walrelay/event"
)

func TestAckSequence(t *testing.T) {
	for _, c := range []struct {
		in  string
		seq uint64
		ok  bool
	}{
		{`{"stream":"orders","seq":1}`, 1, true},
		{`{"stream":"orders", "seq":18446744073709551}`, 18446744073709551, true},
		{`{"stream":"orders","domain":"hub","seq":42}`, 42, true},
		{`{"stream":"orders", "domain":"hub", "seq":42}`, 42, true},
		{`{"stream":"o","seq":9999999999999999999}`, 9999999999999999999, true},
		{`{"stream":"o","seq":18446744073709551615}`, 0, false}, // left to the decoder
		{`{"stream":"orders","seq":7,"batch":"abc-1","count":3}`, 7, true},
		{`{"stream":"orders", "seq":7, "batch":"abc-1", "count":3}`, 0, false},
		{`{"stream":"orders","seq":7,"batch":"a\"b","count":3}`, 0, false},
		{`{"stream":"orders","seq":7,"batch":"abc-1","count":}`, 0, false},
		{`{"stream":"orders","seq":7,"batch":"abc-1"}`, 0, false},
		{`{"stream":"orders","seq":7,"duplicate":true}`, 0, false},
		{`{"stream":"orders","duplicate":true,"seq":7}`, 0, false},
		{`{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 4"},"stream":"orders","seq":0}`, 0, false},
		{`{"stream":"orders","error":{"code":400},"seq":5}`, 0, false},
		{`{"stream":"a\"seq":5}`, 0, false},
		{`{"stream":"a\u0022","seq":5}`, 0, false},
		{`{"stream":"orders","seq":05}`, 0, false},
		{`{"stream":"orders","seq":-5}`, 0, false},
		{`{"stream":"orders","seq":}`, 0, false},
		{`{"stream":"orders","seq":5`, 0, false},
		{`{"stream":"orders"}`, 0, false},
		{`{"stream":"orders",}`, 0, false},
		{`{"stream":"`, 0, false},
		{``, 0, false},
		{"\x00", 0, false},
	} {
		if _, seq, ok := ackSequence([]byte(c.in)); seq != c.seq || ok != c.ok {
			t.Errorf("%s: got %d, %t; want %d, %t", c.in, seq, ok, c.seq, c.ok)
		}
	}
	// What JSON libraries make of an ack must not be misread, whatever the names.
	for _, name := range []string{"orders", "Bestellungen-ÄÖ", `q"uote`, "a,b:c}"} {
		for _, seq := range []uint64{0, 1, 9, 10, 1 << 40} {
			b, _ := json.Marshal(pubAck{Stream: name, Sequence: seq})
			if stream, got, ok := ackSequence(b); ok && (got != seq || string(stream) != name) {
				t.Errorf("%s: got %d", b, got)
			}
			b = fmt.Appendf(nil, `{"stream":%q,"seq":%d}`, name, seq)
			if _, got, ok := ackSequence(b); ok && got != seq || !ok && seq > 0 && !strings.Contains(name, `"`) {
				t.Errorf("%s: got %d, %t", b, got, ok)
			}
		}
	}
}

func FuzzAck(f *testing.F) {
	for _, s := range []string{
		`{"stream":"orders","seq":1}`, `{"stream":"orders", "seq":17}`, `{"stream":"S","domain":"hub","seq":42}`,
		`{"stream":"orders","seq":7,"duplicate":true}`, `{"error":{"code":400,"err_code":10071},"stream":"o","seq":0}`,
		`{"stream":"a\"seq":5}`, `{"stream":"","seq":0}`, `{"stream":"x","seq":99999999999999999999}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		stream, seq, ok := ackSequence(p)
		parseReply("orders", 5, nil, p)
		if !ok {
			return
		}
		var a pubAck
		if err := json.Unmarshal(p, &a); err != nil {
			t.Fatalf("%q: said %d, encoding/json says %v", p, seq, err)
		}
		if a.Stream != string(stream) && utf8.Valid(stream) || a.Sequence != seq || a.Duplicate || a.Error != nil {
			t.Fatalf("%q: said %d, encoding/json says %+v", p, seq, a)
		}
	})
}

func TestParseReply(t *testing.T) {
	for _, c := range []struct {
		name, header, payload string
		want                  string // part of the surprise; "" is an ack
		duplicate             uint64
		code                  int
	}{
		{name: "ack", payload: `{"stream":"orders","seq":5}`},
		{name: "ack of another form", payload: `{"seq":5,"stream":"orders"}`},
		{name: "duplicate with the predicted sequence", payload: `{"stream":"orders","seq":5,"duplicate":true}`},
		{name: "other sequence", payload: `{"stream":"orders","seq":6}`, want: "another client writes"},
		{name: "other sequence of another form", payload: `{"seq":4}`, want: "another client writes"},
		{name: "duplicate of an earlier message", payload: `{"stream":"orders","seq":3,"duplicate":true}`, want: "duplicate of stream sequence 3", duplicate: 3},
		{name: "duplicate without sequence", payload: `{"stream":"orders","seq":0,"duplicate":true}`, want: "no ack"},
		{name: "refused", payload: `{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 7"},"stream":"orders","seq":0}`, want: "wrong last sequence: 7 (10071)", code: codeWrongLastSeq},
		{name: "no responders", header: "NATS/1.0 503\r\n\r\n", want: "503"},
		{name: "empty", want: "no ack"},
		{name: "nonsense", payload: "+OK", want: "no ack"},
		{name: "other stream", payload: `{"stream":"bills","seq":5}`, want: `stored in stream "bills"`},
		{name: "other stream of another form", payload: `{"seq":5,"stream":"bills"}`, want: `stored in stream "bills"`},
		{name: "empty object", payload: "{}", want: "another client"},
	} {
		s := parseReply("orders", 5, []byte(c.header), []byte(c.payload))
		if (s == nil) != (c.want == "") {
			t.Errorf("%s: got %v, want %q", c.name, s, c.want)
			continue
		}
		if s == nil {
			continue
		}
		if s.seq != 5 || s.duplicate != c.duplicate || !strings.Contains(s.Error(), c.want) {
			t.Errorf("%s: got %+v, want %q and duplicate %d", c.name, s, c.want, c.duplicate)
		}
		var api *apiError
		if errors.As(s, &api) != (c.code != 0) || api != nil && api.ErrCode != c.code {
			t.Errorf("%s: got API error %v, want code %d", c.name, api, c.code)
		}
		if c.header != "" && !errors.Is(s, errNoResponders) {
			t.Errorf("%s: got %v", c.name, s)
		}
	}
}

func TestPoisonOf(t *testing.T) {
	api := func(code int) error {
		return &surprise{seq: 1, err: &apiError{Code: 400, ErrCode: code, Description: "why"}}
	}
	for _, c := range []struct {
		err  error
		want event.Reason
	}{
		{api(codeTooLarge), event.ReasonTooLarge},
		{api(codeHeaderTooLarge), event.ReasonHeaders},
		{api(codeMessageTTLInvalid), event.ReasonHeaders},
		{api(codeWrongStream), event.ReasonSubject},
		{api(codeWrongLastSeq), ""},
		{api(codeStoreFailed), ""},
		{errNoResponders, ""},
		{protocolError(`-ERR 'Permissions Violation for Publish to "a.b"'`), event.ReasonNotAuthorized},
		{protocolError(`-ERR 'Permissions Violation for Subscription to "_INBOX.x.*"'`), ""},
		{protocolError(`-ERR 'Permissions Violation for Publish with Reply of "$JS.ACK.x"'`), ""},
		{protocolError(`-ERR 'Slow Consumer'`), ""},
	} {
		p := poisonOf(c.err)
		if got := event.Reason(""); p != nil {
			got = p.Reason
			if got != c.want || p.Detail == "" {
				t.Errorf("%v: got %v, want %q", c.err, p, c.want)
			}
		} else if c.want != got {
			t.Errorf("%v: got none, want %q", c.err, c.want)
		}
	}
}

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		err  error
		want event.Class
	}{
		{&apiError{ErrCode: codeStreamNotFound}, event.Precondition},
		{&apiError{ErrCode: codeStreamSealed}, event.Precondition},
		{&apiError{ErrCode: codeMirrorPublish}, event.Precondition},
		{&apiError{ErrCode: codeStoreFailed}, event.Transient},
		{&apiError{ErrCode: codeInsufficient}, event.Transient},
		{&apiError{ErrCode: codeAccountFull}, event.Transient},
		{&apiError{ErrCode: codeWrongLastSeq}, event.Transient},
		{protocolError("-ERR 'User Authentication Expired'"), event.Transient},
		{errNoResponders, event.Transient},
	} {
		err := &surprise{seq: 3, err: c.err}
		got := classify("orders", err)
		if event.ClassOf(got) != c.want || !errors.Is(got, err) {
			t.Errorf("%v: got class %d of %v, want %d", c.err, event.ClassOf(got), got, c.want)
		}
	}
}

func TestSequenceOf(t *testing.T) {
	for _, c := range []struct {
		in  string
		seq uint64
		ok  bool
	}{{".5", 5, true}, {"a.b.17", 17, true}, {".", 0, false}, {".x", 0, false}, {".-1", 0, false}, {"12", 12, true}} {
		if seq, ok := sequenceOf([]byte(c.in)); seq != c.seq || ok != c.ok {
			t.Errorf("%q: got %d, %t", c.in, seq, ok)
		}
	}
}
