package publisher

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/sock"
)

const (
	readBufferSize = 64 << 10
	maxLine        = 32 << 10 // INFO of a large cluster is the longest line

	ackSubscription = "1" // the id of the only subscription
)

// wire is one NATS client connection that publishes frames written by its
// owner and hands replies to a callback. nats.go serves everything else: its
// buffering across reconnects would let a frame of one session out in the next.
//
// Writes may come from several goroutines, read runs in one.
// The protocol is that of https://docs.nats.io/reference/reference-protocols/nats-protocol.
type wire struct {
	conn       net.Conn
	r          *bufio.Reader
	mu         sync.Mutex // orders writes
	maxPayload int
	pings      int       // PINGs without PONG; guarded by mu
	pinged     time.Time // when the first of them was sent; guarded by mu
	subject    [256]byte // scratch of read
	gather     gather    // between conn and r

	// usual consumes a reply that needs no reading, if there is one; may be nil.
	usual func(*bufio.Reader) bool
}

type serverInfo struct {
	Version      string `json:"version"`
	MaxPayload   int    `json:"max_payload"`
	Headers      bool   `json:"headers"`
	Nonce        string `json:"nonce"`
	TLSRequired  bool   `json:"tls_required"`
	TLSAvailable bool   `json:"tls_available"`
}

type connectOptions struct {
	Verbose      bool   `json:"verbose"`
	Pedantic     bool   `json:"pedantic"`
	JWT          string `json:"jwt,omitempty"`
	NKey         string `json:"nkey,omitempty"`
	Sig          string `json:"sig,omitempty"`
	User         string `json:"user,omitempty"`
	Pass         string `json:"pass,omitempty"`
	Token        string `json:"auth_token,omitempty"`
	TLSRequired  bool   `json:"tls_required"`
	Name         string `json:"name"`
	Lang         string `json:"lang"`
	Version      string `json:"version"`
	Protocol     int    `json:"protocol"`
	Echo         bool   `json:"echo"`
	Headers      bool   `json:"headers"`
	NoResponders bool   `json:"no_responders"`
}

// dial connects to the server that u names, with the credentials and TLS
// settings that nats.go would use for o.
func dial(ctx context.Context, u *url.URL, tlsName string, o nats.Options) (*wire, error) {
	switch u.Scheme {
	case "nats", "tls", "":
	default:
		return nil, event.Fail(event.Usage, "use nats:// or tls://", "scheme %q of %s is not supported", u.Scheme, u.Redacted())
	}
	d := net.Dialer{Timeout: o.Timeout, KeepAlive: 15 * time.Second}
	conn, err := d.DialContext(ctx, "tcp", u.Host)
	if err != nil {
		return nil, err
	}
	w := &wire{conn: sock.Lean(conn)}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err = w.handshake(u, tlsName, o)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		w.conn.Close()
		return nil, err
	}
	return w, nil
}

func (w *wire) handshake(u *url.URL, tlsName string, o nats.Options) error {
	if o.Timeout > 0 {
		if err := w.conn.SetDeadline(time.Now().Add(o.Timeout)); err != nil {
			return err
		}
	}
	secure := o.Secure || u.Scheme == "tls"
	if o.TLSHandshakeFirst {
		if err := w.startTLS(tlsName, o); err != nil {
			return err
		}
	}
	w.gather.w = w
	w.r = bufio.NewReaderSize(&w.gather, readBufferSize)
	line, err := w.r.ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("read INFO: %w", err)
	}
	var info serverInfo
	rest, ok := bytes.CutPrefix(line, []byte("INFO "))
	if !ok {
		return errors.New("the server does not speak the NATS protocol")
	}
	if err := json.Unmarshal(rest, &info); err != nil {
		return fmt.Errorf("read INFO: %w", err)
	}
	if !info.Headers {
		return errors.New("the server does not support message headers")
	}
	if (info.TLSRequired || secure) && !o.TLSHandshakeFirst {
		if secure && !info.TLSRequired && !info.TLSAvailable {
			return nats.ErrSecureConnWanted
		}
		if err := w.startTLS(tlsName, o); err != nil {
			return err
		}
		w.r.Reset(&w.gather)
	}
	w.maxPayload = info.MaxPayload

	c, err := connectLine(u, info, o, secure)
	if err != nil {
		return err
	}
	if _, err := w.conn.Write(append(c, "PING\r\n"...)); err != nil {
		return err
	}
	if err := w.awaitPong(); err != nil {
		return err
	}
	return w.conn.SetDeadline(time.Time{})
}

// awaitPong reads up to the PONG for a PING of ours. The server may send
// another INFO before or after it; read handles the latter.
func (w *wire) awaitPong() error {
	for {
		line, err := w.r.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("wait for PONG: %w", err)
		}
		switch line := string(bytes.TrimRight(line, "\r\n")); {
		case line == "PONG":
			return nil
		case line == "PING":
			if err := w.write([]byte("PONG\r\n")); err != nil {
				return err
			}
		case strings.HasPrefix(line, "-ERR"):
			return protocolError(line)
		}
	}
}

func (w *wire) startTLS(name string, o nats.Options) error {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if o.TLSConfig != nil {
		cfg = o.TLSConfig.Clone()
	}
	if o.TLSCertCB != nil {
		cert, err := o.TLSCertCB()
		if err != nil {
			return err
		}
		cfg.Certificates = []tls.Certificate{cert}
	}
	if o.RootCAsCB != nil {
		roots, err := o.RootCAsCB()
		if err != nil {
			return err
		}
		cfg.RootCAs = roots
	}
	if cfg.ServerName == "" {
		cfg.ServerName = name
	}
	c := tls.Client(w.conn, cfg)
	if err := c.Handshake(); err != nil {
		return fmt.Errorf("tls: %w", err)
	}
	w.conn = c
	return nil
}

func connectLine(u *url.URL, info serverInfo, o nats.Options, secure bool) ([]byte, error) {
	c := connectOptions{
		Name: o.Name, Lang: "go", Version: nats.Version, Protocol: 1,
		TLSRequired: secure, Headers: true, NoResponders: true,
	}
	if u.User != nil {
		if pass, ok := u.User.Password(); ok {
			c.User, c.Pass = u.User.Username(), pass
		} else {
			c.Token = u.User.Username()
		}
	} else {
		c.User, c.Pass, c.Token, c.NKey = o.User, o.Password, o.Token, o.Nkey
		if o.UserInfo != nil {
			c.User, c.Pass = o.UserInfo()
		}
		if o.TokenHandler != nil {
			c.Token = o.TokenHandler()
		}
	}
	if o.UserJWT != nil {
		jwt, err := o.UserJWT()
		if err != nil {
			return nil, err
		}
		c.JWT = jwt
	}
	if c.JWT != "" || c.NKey != "" {
		if o.SignatureCB == nil {
			return nil, nats.ErrNkeyButNoSigCB
		}
		sig, err := o.SignatureCB([]byte(info.Nonce))
		if err != nil {
			return nil, fmt.Errorf("sign nonce: %w", err)
		}
		c.Sig = base64.RawURLEncoding.EncodeToString(sig)
	}
	b, err := json.Marshal(c)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(nil, "CONNECT %s\r\n", b), nil
}

// write sends all parts as one uninterrupted piece. It blocks while the
// server's window is full; close unblocks it.
func (w *wire) write(parts ...[]byte) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, p := range parts {
		if _, err := w.conn.Write(p); err != nil {
			return err
		}
	}
	return nil
}

// pingPatience is a little less than two ticks of a second.
const pingPatience = 1900 * time.Millisecond

// ping sends a PING, and fails when an earlier one has not been answered for
// pingPatience, however often it was called since. It does nothing while a
// write is under way: the overdue ack tells then.
func (w *wire) ping() error {
	if !w.mu.TryLock() {
		return nil
	}
	defer w.mu.Unlock()
	if w.pings == 0 {
		w.pinged = time.Now()
	} else if time.Since(w.pinged) >= pingPatience {
		return errors.New("the server does not answer PING")
	}
	w.pings++
	// Whoever looks for overdue acks must not wait for a server that does not read.
	if err := w.conn.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := w.conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	return w.conn.SetWriteDeadline(time.Time{})
}

// read delivers replies to onReply until the connection fails. idle is called
// whenever the buffered bytes are used up. The slices are valid during the call.
func (w *wire) read(onReply func(subject, header, payload []byte) error, idle func()) error {
	for {
		if w.r.Buffered() == 0 {
			idle()
		}
		if w.usual != nil && w.usual(w.r) {
			continue
		}
		line, err := w.r.ReadSlice('\n')
		if err != nil {
			return err
		}
		line = bytes.TrimRight(line, "\r\n")
		switch {
		case bytes.HasPrefix(line, []byte("MSG ")):
			err = w.message(line[4:], false, onReply)
		case bytes.HasPrefix(line, []byte("HMSG ")):
			err = w.message(line[5:], true, onReply)
		case bytes.Equal(line, []byte("PING")):
			err = w.write([]byte("PONG\r\n"))
		case bytes.Equal(line, []byte("PONG")):
			w.mu.Lock()
			w.pings = 0
			w.mu.Unlock()
		case bytes.HasPrefix(line, []byte("-ERR")):
			err = protocolError(string(line))
		case bytes.HasPrefix(line, []byte("INFO ")), bytes.HasPrefix(line, []byte("+OK")):
		default:
			err = fmt.Errorf("unexpected protocol line %.40q", line)
		}
		if err != nil {
			return err
		}
	}
}

// message reads the body of MSG subject sid [reply] size, or of
// HMSG subject sid [reply] header-size size.
func (w *wire) message(args []byte, headers bool, onReply func(subject, header, payload []byte) error) error {
	var f [5][]byte
	n := 0
	for rest := args; len(rest) > 0 && n < len(f); n++ {
		f[n], rest, _ = bytes.Cut(rest, []byte(" "))
	}
	minimum := 3
	if headers {
		minimum = 4
	}
	if n < minimum {
		return fmt.Errorf("malformed message line %.40q", args)
	}
	size, err := strconv.Atoi(string(f[n-1]))
	hdr := 0
	if err == nil && headers {
		hdr, err = strconv.Atoi(string(f[n-2]))
	}
	if err != nil || size < 0 || hdr < 0 || hdr > size || size > maxLine {
		return fmt.Errorf("malformed message line %.40q", args)
	}
	// Peek may move the buffer, and the subject lies in it.
	s := append(w.subject[:0], f[0]...)
	body, err := w.r.Peek(size + 2)
	if err != nil {
		return err
	}
	if err := onReply(s, body[:hdr], body[hdr:size]); err != nil {
		return err
	}
	_, err = w.r.Discard(size + 2)
	return err
}

// subscribe asks for everything on subject and waits until the server has
// agreed. It must not be called once read runs.
func (w *wire) subscribe(subject string, timeout time.Duration) error {
	if err := w.conn.SetDeadline(time.Now().Add(timeout)); err != nil {
		return err
	}
	if err := w.write(fmt.Appendf(nil, "SUB %s %s\r\nPING\r\n", subject, ackSubscription)); err != nil {
		return err
	}
	if err := w.awaitPong(); err != nil {
		return err
	}
	return w.conn.SetDeadline(time.Time{})
}

// close ends the connection and unblocks read and write.
func (w *wire) close() error { return w.conn.Close() }

// protocolError is a -ERR line of the server.
type protocolError string

func (e protocolError) Error() string {
	return strings.Trim(strings.TrimSpace(strings.TrimPrefix(string(e), "-ERR")), "'")
}

func (e protocolError) permissions() bool {
	return strings.HasPrefix(strings.ToLower(e.Error()), "permissions violation")
}

// publishDenied reports whether it names the subject of a message; the others
// deny a subscription.
func (e protocolError) publishDenied() bool {
	return strings.HasPrefix(strings.ToLower(e.Error()), "permissions violation for publish to")
}

func (e protocolError) authorization() bool {
	s := strings.ToLower(e.Error())
	return strings.Contains(s, "authorization violation") || strings.Contains(s, "authentication")
}
