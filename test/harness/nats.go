package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nkeys"
)

// NATSOptions chooses what a server is like. The zero value is a JetStream
// server with the defaults of nats-server.
type NATSOptions struct {
	Bin          string // the program; "" is that of NATSServer
	MaxPayload   int    // bytes
	MaxStore     int64  // bytes of JetStream file storage
	SyncInterval string // of JetStream: always, or a duration
	JetStream    string // further lines of its block
	TLS          bool   // clients need TLS, with the certificates of TLSFiles
	VerifyClient bool   // and a client certificate

	// At most one of these.
	User, Password string
	Token          string
	NKey           bool // clients sign with the seed of NKeySeed

	Config string // further lines of the configuration
}

// NATS is a JetStream server of its own on 127.0.0.1.
type NATS struct {
	Dir  string // holds the configuration, the log and the store
	Port int
	Name string

	opts    NATSOptions
	monitor int // port of the HTTP endpoints
	routes  []int
	route   int
	tls     *TLSFiles
	seed    []byte
	nkey    string
	proc    *process
}

// RunNATS makes and starts a server that ends with the test.
func RunNATS(t testing.TB, opts NATSOptions) *NATS {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	n, err := CreateNATS(ctx, opts)
	if err != nil {
		t.Fatalf("create nats-server: %v", err)
	}
	n.cleanUp(t)
	if err := n.Start(ctx); err != nil {
		t.Fatalf("start nats-server: %v", err)
	}
	return n
}

func (n *NATS) cleanUp(t testing.TB) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s, last lines:\n%s", n.Name, tail(n.Log(), 30))
		}
		if err := n.Remove(); err != nil {
			t.Errorf("remove nats-server: %v", err)
		}
	})
}

// CreateNATS writes the configuration without starting the server.
func CreateNATS(ctx context.Context, opts NATSOptions) (*NATS, error) {
	n, err := newNATS(ctx, opts)
	if err != nil {
		return nil, err
	}
	return n, n.configure()
}

func newNATS(ctx context.Context, opts NATSOptions) (*NATS, error) {
	if opts.Bin == "" {
		bin, err := NATSServer(ctx)
		if err != nil {
			return nil, err
		}
		opts.Bin = bin
	}
	dir, err := Folder("nats")
	if err != nil {
		return nil, err
	}
	n := &NATS{Dir: dir, Name: filepath.Base(dir), opts: opts}
	if opts.TLS {
		if n.tls, err = NewTLSFiles(dir); err != nil {
			return nil, err
		}
	}
	if opts.NKey {
		pair, err := nkeys.CreateUser()
		if err != nil {
			return nil, fmt.Errorf("create nkey: %w", err)
		}
		if n.seed, err = pair.Seed(); err != nil {
			return nil, fmt.Errorf("create nkey: %w", err)
		}
		if n.nkey, err = pair.PublicKey(); err != nil {
			return nil, fmt.Errorf("create nkey: %w", err)
		}
		if err := os.WriteFile(n.NKeySeed(), n.seed, 0o600); err != nil {
			return nil, fmt.Errorf("write nkey seed: %w", err)
		}
	}
	return n, n.takePorts()
}

func (n *NATS) takePorts() (err error) {
	for _, p := range []*int{&n.Port, &n.monitor, &n.route} {
		if *p, err = FreePort(); err != nil {
			return err
		}
	}
	return nil
}

// configure writes the configuration file.
func (n *NATS) configure() error {
	var b strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	line("server_name: %s", n.Name)
	line("listen: %q", n.Addr())
	line("http: \"127.0.0.1:%d\"", n.monitor)
	line("jetstream {")
	line("  store_dir: %q", n.Store())
	if n.opts.MaxStore > 0 {
		line("  max_file_store: %d", n.opts.MaxStore)
	}
	if n.opts.SyncInterval != "" {
		line("  sync_interval: %s", n.opts.SyncInterval)
	}
	if n.opts.JetStream != "" {
		line("  %s", n.opts.JetStream)
	}
	line("}")
	if n.opts.MaxPayload > 0 {
		line("max_payload: %d", n.opts.MaxPayload)
	}
	if n.tls != nil {
		line("tls {\n  cert_file: %q\n  key_file: %q\n  ca_file: %q\n  verify: %t\n}",
			n.tls.Cert, n.tls.Key, n.tls.CA, n.opts.VerifyClient)
	}
	switch {
	case n.opts.User != "":
		line("authorization { users: [{user: %q, password: %q}] }", n.opts.User, n.opts.Password)
	case n.opts.Token != "":
		line("authorization { token: %q }", n.opts.Token)
	case n.nkey != "":
		line("authorization { users: [{nkey: %s}] }", n.nkey)
	}
	if len(n.routes) > 0 {
		line("cluster {\n  name: walrelay\n  listen: \"127.0.0.1:%d\"\n  routes: [", n.route)
		for _, port := range n.routes {
			line("    \"nats://127.0.0.1:%d\"", port)
		}
		line("  ]\n}")
	}
	line("%s", n.opts.Config)
	if err := os.WriteFile(n.configFile(), []byte(b.String()), 0o600); err != nil {
		return fmt.Errorf("write configuration of nats-server: %w", err)
	}
	return nil
}

// Store is the folder of the streams.
func (n *NATS) Store() string { return filepath.Join(n.Dir, "store") }

// TLSFiles are the certificates of a server with TLS.
func (n *NATS) TLSFiles() *TLSFiles { return n.tls }

// NKeySeed is the file with the seed of a server with NKey.
func (n *NATS) NKeySeed() string { return filepath.Join(n.Dir, "user.nk") }

func (n *NATS) configFile() string { return filepath.Join(n.Dir, "nats.conf") }
func (n *NATS) logFile() string    { return filepath.Join(n.Dir, "log") }

// Addr is host:port.
func (n *NATS) Addr() string { return "127.0.0.1:" + strconv.Itoa(n.Port) }

// URL is the server's URL, without any credentials.
func (n *NATS) URL() string {
	if n.tls != nil {
		return "tls://" + n.Addr()
	}
	return "nats://" + n.Addr()
}

// Log is the server's log so far.
func (n *NATS) Log() string {
	b, _ := os.ReadFile(n.logFile())
	return string(b)
}

// Running reports whether the server runs, or is frozen.
func (n *NATS) Running() bool { return !n.proc.ended() }

// PID is the server's process id, 0 when it does not run.
func (n *NATS) PID() int {
	if !n.Running() {
		return 0
	}
	return n.proc.pid
}

// Start starts the server on its port and store and blocks until JetStream answers.
func (n *NATS) Start(ctx context.Context) error {
	for retries := 3; ; {
		if err := n.Launch(); err != nil {
			return err
		}
		err := n.Ready(ctx)
		if err == nil {
			return nil
		}
		// Somebody else took a port between the look and the start.
		retries--
		if retries == 0 || len(n.routes) > 0 || n.Running() || !strings.Contains(tail(n.Log(), 5), "address already in use") {
			return err
		}
		if err := errors.Join(n.takePorts(), n.configure()); err != nil {
			return err
		}
	}
}

// Launch starts the server and does not wait for it.
func (n *NATS) Launch() error {
	if n.Running() {
		return errors.New("nats-server runs already")
	}
	log, err := os.OpenFile(n.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(n.opts.Bin, "-c", n.configFile())
	cmd.Dir = n.Dir
	cmd.Stdout, cmd.Stderr = log, log
	n.proc, err = startProcess(cmd)
	return err
}

// Ready blocks until a launched server's JetStream answers. A member of a
// cluster needs a majority for that.
func (n *NATS) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var last error
	err := until(ctx, 10*time.Millisecond, "nats-server", func() bool {
		if n.proc.ended() {
			return true
		}
		last = n.ping(ctx)
		return last == nil
	})
	switch {
	case n.proc.ended():
		return fmt.Errorf("nats-server ended at once: %s", tail(n.Log(), 5))
	case err != nil:
		return errors.Join(err, last)
	}
	return nil
}

func (n *NATS) ping(ctx context.Context) error {
	nc, err := n.Conn(nats.MaxReconnects(0), nats.Timeout(time.Second))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = js.AccountInfo(ctx)
	return err
}

// SetMaxStore gives a running server another limit of file storage. It can be
// raised only.
func (n *NATS) SetMaxStore(bytes int64) error {
	n.opts.MaxStore = bytes
	if err := n.configure(); err != nil {
		return err
	}
	if err := n.proc.signal(syscall.SIGHUP); err != nil { // reload
		return fmt.Errorf("reload nats-server: %w", err)
	}
	return nil
}

// Stop ends the server with SIGTERM and returns when it is gone.
func (n *NATS) Stop() error {
	if !n.Running() {
		return nil
	}
	if err := n.proc.signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop nats-server: %w", err)
	}
	_, err := n.proc.waitFor(20 * time.Second)
	return err
}

// Kill ends the server with SIGKILL and returns when it is gone.
func (n *NATS) Kill() error { return n.proc.kill() }

// Freeze stops the server with SIGSTOP: connections stay and nothing answers.
func (n *NATS) Freeze() {
	if n.Running() {
		n.proc.stop()
	}
}

// Thaw wakes what Freeze stopped.
func (n *NATS) Thaw() {
	if n.Running() {
		n.proc.resume()
	}
}

// Remove ends the server and removes its folder.
func (n *NATS) Remove() error {
	if err := n.Kill(); err != nil {
		return err
	}
	return os.RemoveAll(n.Dir)
}

// Auth are the client's options for the server's TLS and credentials.
func (n *NATS) Auth() []nats.Option {
	var opts []nats.Option
	if n.tls != nil {
		opts = append(opts, nats.RootCAs(n.tls.CA), nats.ClientCert(n.tls.ClientCert, n.tls.ClientKey))
	}
	switch {
	case n.opts.User != "":
		opts = append(opts, nats.UserInfo(n.opts.User, n.opts.Password))
	case n.opts.Token != "":
		opts = append(opts, nats.Token(n.opts.Token))
	case n.seed != nil:
		opts = append(opts, nats.Nkey(n.nkey, func(nonce []byte) ([]byte, error) {
			pair, err := nkeys.FromSeed(n.seed)
			if err != nil {
				return nil, err
			}
			return pair.Sign(nonce)
		}))
	}
	return opts
}

// Conn connects. The connection reconnects for ever unless opts say otherwise.
func (n *NATS) Conn(opts ...nats.Option) (*nats.Conn, error) {
	return connect(n.URL(), append(n.Auth(), opts...))
}

func connect(url string, opts []nats.Option) (*nats.Conn, error) {
	opts = append([]nats.Option{
		nats.Name("harness"),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(50 * time.Millisecond),
		nats.ReconnectJitter(10*time.Millisecond, 10*time.Millisecond),
		nats.Timeout(5 * time.Second),
	}, opts...)
	nc, err := nats.Connect(url, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to nats-server: %w", err)
	}
	return nc, nil
}

// MustConn is Conn for tests; the connection is closed with the test.
func (n *NATS) MustConn(t testing.TB, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := n.Conn(opts...)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// JetStream is a JetStream context on a connection that is closed with the test.
func (n *NATS) JetStream(t testing.TB, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	return mustJetStream(t, n.MustConn(t, opts...))
}

func mustJetStream(t testing.TB, nc *nats.Conn) jetstream.JetStream {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatalf("jetstream: %v", err)
	}
	return js
}

// MustStart is Start for tests.
func (n *NATS) MustStart(t testing.TB) {
	t.Helper()
	if err := n.Start(context.Background()); err != nil {
		t.Fatalf("start nats-server: %v", err)
	}
}

// Cluster is a group of servers that hold streams together.
type Cluster struct {
	Nodes []*NATS
}

// RunCluster makes and starts a cluster of size servers that ends with the test.
func RunCluster(t testing.TB, size int, opts NATSOptions) *Cluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	c, err := CreateCluster(ctx, size, opts)
	if err != nil {
		t.Fatalf("create cluster: %v", err)
	}
	for _, n := range c.Nodes {
		n.cleanUp(t)
	}
	if err := c.Start(ctx); err != nil {
		t.Fatalf("start cluster: %v", err)
	}
	return c
}

// CreateCluster writes the configurations without starting the servers.
func CreateCluster(ctx context.Context, size int, opts NATSOptions) (*Cluster, error) {
	c := &Cluster{}
	var routes []int
	for range size {
		n, err := newNATS(ctx, opts)
		if err != nil {
			return nil, err
		}
		c.Nodes = append(c.Nodes, n)
		routes = append(routes, n.route)
	}
	for _, n := range c.Nodes {
		n.routes = routes
		// All take the same certificates and keys, so that a client needs only one set.
		n.tls, n.seed, n.nkey = c.Nodes[0].tls, c.Nodes[0].seed, c.Nodes[0].nkey
		if err := n.configure(); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// Start starts the servers that do not run and blocks until all have joined.
func (c *Cluster) Start(ctx context.Context) error {
	for _, n := range c.Nodes {
		if n.Running() {
			continue
		}
		if err := n.Launch(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	for _, n := range c.Nodes {
		if err := n.Ready(ctx); err != nil {
			return err
		}
	}
	return until(ctx, 20*time.Millisecond, "all servers to join the cluster", func() bool {
		for _, n := range c.Nodes {
			if n.joined() == len(c.Nodes) {
				return true
			}
		}
		return false
	})
}

// joined is the number of current servers as the leader of the meta group sees
// them, 0 when n is not the leader.
func (n *NATS) joined() int {
	var z struct {
		Meta *struct {
			Leader   string `json:"leader"`
			Replicas []struct {
				Current bool `json:"current"`
				Offline bool `json:"offline"`
			} `json:"replicas"`
		} `json:"meta_cluster"`
	}
	if err := n.Monitor("/jsz", &z); err != nil || z.Meta == nil || z.Meta.Leader != n.Name {
		return 0
	}
	count := 1
	for _, r := range z.Meta.Replicas {
		if r.Current && !r.Offline {
			count++
		}
	}
	return count
}

// Monitor reads one of the server's HTTP endpoints, such as /varz, into v.
func (n *NATS) Monitor(path string, v any) error {
	client := http.Client{Timeout: 2 * time.Second}
	resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d%s", n.monitor, path))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}

// URL lists the URLs of all servers.
func (c *Cluster) URL() string {
	urls := make([]string, len(c.Nodes))
	for i, n := range c.Nodes {
		urls[i] = n.URL()
	}
	return strings.Join(urls, ",")
}

// MustConn connects to any of the servers; the connection is closed with the test.
func (c *Cluster) MustConn(t testing.TB, opts ...nats.Option) *nats.Conn {
	t.Helper()
	nc, err := connect(c.URL(), append(c.Nodes[0].Auth(), opts...))
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// JetStream is a JetStream context on a connection that is closed with the test.
func (c *Cluster) JetStream(t testing.TB, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	return mustJetStream(t, c.MustConn(t, opts...))
}

// Node returns the server of a name, such as a stream's leader; nil when there is none.
func (c *Cluster) Node(name string) *NATS {
	for _, n := range c.Nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}
