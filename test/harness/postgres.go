package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// PostgresOptions chooses what a cluster is like. The zero value is right for most tests.
type PostgresOptions struct {
	Bin      string            // folder of the server programs; "" looks for them
	Encoding string            // of every database; "" is UTF8
	WALLevel string            // "" is logical
	Password string            // when set, TCP connections need SCRAM and this is the superuser's password
	TLS      bool              // offer TLS, with the certificates of TLSFiles
	Fsync    bool              // survive more than the death of processes
	Settings map[string]string // further settings of postgresql.conf
}

// Postgres is a cluster of its own on 127.0.0.1 with the superuser postgres.
type Postgres struct {
	Dir  string // holds the data folder, the log and the socket
	Bin  string // folder of the server programs
	Port int

	opts PostgresOptions
	cred *syscall.Credential
	tls  *TLSFiles
	proc *process
}

// RunPostgres makes and starts a cluster that ends with the test.
func RunPostgres(t testing.TB, opts PostgresOptions) *Postgres {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	pg, err := CreatePostgres(ctx, opts)
	if err != nil {
		t.Fatalf("create postgres: %v", err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("postgres log, last lines:\n%s", tail(pg.Log(), 40))
		}
		if err := pg.Remove(); err != nil {
			t.Errorf("remove postgres: %v", err)
		}
	})
	if err := pg.Start(ctx); err != nil {
		t.Fatalf("start postgres: %v", err)
	}
	return pg
}

// CreatePostgres lays out a data folder without starting the server. The first
// call for a version and encoding takes seconds for initdb; its result is kept in the
// user's cache folder and copied from then on.
func CreatePostgres(ctx context.Context, opts PostgresOptions) (*Postgres, error) {
	if opts.Bin == "" {
		bin, err := FindPostgres(ctx)
		if err != nil {
			return nil, err
		}
		opts.Bin = bin
	}
	if opts.Encoding == "" {
		opts.Encoding = "UTF8"
	}
	if opts.WALLevel == "" {
		opts.WALLevel = "logical"
	}
	cred, err := unprivileged()
	if err != nil {
		return nil, err
	}
	template, err := initdbTemplate(ctx, opts.Bin, opts.Encoding, cred)
	if err != nil {
		return nil, err
	}
	dir, err := Folder("pg")
	if err != nil {
		return nil, err
	}
	pg := &Postgres{Dir: dir, Bin: opts.Bin, opts: opts, cred: cred}
	if err := pg.layOut(template); err != nil {
		os.RemoveAll(dir)
		return nil, fmt.Errorf("lay out cluster: %w", err)
	}
	return pg, nil
}

func (pg *Postgres) layOut(template string) error {
	if err := copyTree(template, pg.Data()); err != nil {
		return err
	}
	if pg.opts.TLS {
		files, err := NewTLSFiles(pg.Dir)
		if err != nil {
			return err
		}
		pg.tls = files
		for from, to := range map[string]string{files.Cert: "server.crt", files.Key: "server.key", files.CA: "root.crt"} {
			if err := copyFile(from, filepath.Join(pg.Data(), to), 0o600); err != nil {
				return err
			}
		}
	}
	hba := "local all all trust\nhost all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\nlocal replication all trust\n"
	if pg.opts.Password != "" {
		hba = strings.ReplaceAll(hba, "127.0.0.1/32 trust", "127.0.0.1/32 scram-sha-256")
	}
	if err := os.WriteFile(filepath.Join(pg.Data(), "pg_hba.conf"), []byte(hba), 0o600); err != nil {
		return err
	}
	if err := pg.configure(); err != nil {
		return err
	}
	return pg.giveAway(pg.Dir)
}

// configure writes the settings. initdb's postgresql.conf is replaced, so that
// nothing depends on its defaults for the machine.
func (pg *Postgres) configure() error {
	if pg.Port == 0 {
		port, err := FreePort()
		if err != nil {
			return err
		}
		pg.Port = port
	}
	set := map[string]string{
		"listen_addresses":           "127.0.0.1",
		"port":                       strconv.Itoa(pg.Port),
		"unix_socket_directories":    pg.Dir,
		"wal_level":                  pg.opts.WALLevel,
		"max_wal_senders":            "20",
		"max_replication_slots":      "20",
		"max_connections":            "100",
		"shared_buffers":             "64MB",
		"dynamic_shared_memory_type": "mmap", // nothing left in /dev/shm after SIGKILL
		"fsync":                      onOff(pg.opts.Fsync),
		"timezone":                   "UTC",
		"log_timezone":               "UTC",
		"log_line_prefix":            "%m [%p] %a ",
		"ssl":                        onOff(pg.opts.TLS),
	}
	if pg.opts.TLS {
		set["ssl_ca_file"] = "root.crt"
	}
	for name, value := range pg.opts.Settings {
		set[name] = value
	}
	var b strings.Builder
	for _, name := range sortedKeys(set) {
		fmt.Fprintf(&b, "%s = '%s'\n", name, strings.ReplaceAll(set[name], "'", "''"))
	}
	name := filepath.Join(pg.Data(), "postgresql.conf")
	if err := os.WriteFile(name, []byte(b.String()), 0o600); err != nil {
		return err
	}
	return pg.giveAway(name)
}

// giveAway makes the server's user the owner of everything below name.
func (pg *Postgres) giveAway(name string) error {
	if pg.cred == nil {
		return nil
	}
	return filepath.WalkDir(name, func(p string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(p, int(pg.cred.Uid), int(pg.cred.Gid))
	})
}

// Data is the data folder.
func (pg *Postgres) Data() string { return filepath.Join(pg.Dir, "data") }

// TLSFiles are the certificates of a cluster with TLS.
func (pg *Postgres) TLSFiles() *TLSFiles { return pg.tls }

// Running reports whether the postmaster runs, or is frozen.
func (pg *Postgres) Running() bool { return !pg.proc.ended() }

// PID is the postmaster's process id, 0 when it does not run.
func (pg *Postgres) PID() int {
	if !pg.Running() {
		return 0
	}
	return pg.proc.pid
}

// Start starts the server on its port and blocks until it takes connections.
func (pg *Postgres) Start(ctx context.Context) error {
	if err := pg.Launch(); err != nil {
		return err
	}
	return pg.Ready(ctx)
}

// Launch starts the server and does not wait for it.
func (pg *Postgres) Launch() error {
	if pg.Running() {
		return errors.New("postgres runs already")
	}
	log, err := os.OpenFile(pg.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("open log: %w", err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(pg.Bin, "postgres"), "-D", pg.Data())
	cmd.Dir = pg.Dir
	cmd.Env = cleanEnv()
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: pg.cred}
	pg.proc, err = startProcess(cmd)
	return err
}

// Ready blocks until a launched server takes connections.
func (pg *Postgres) Ready(ctx context.Context) error {
	for retries := 3; ; {
		err := pg.awaitConn(ctx)
		if err == nil {
			break
		}
		// Somebody else took the port between the look and the start.
		if retries--; retries == 0 || pg.Running() || !strings.Contains(tail(pg.Log(), 10), "Address already in use") {
			return err
		}
		pg.Port = 0
		if err := pg.configure(); err != nil {
			return err
		}
		if err := pg.Launch(); err != nil {
			return err
		}
	}
	if pg.opts.Password == "" {
		return nil
	}
	c, err := pgx.Connect(ctx, pg.socketDSN())
	if err != nil {
		return fmt.Errorf("connect to postgres: %w", err)
	}
	defer c.Close(ctx)
	var standby bool
	if err := c.QueryRow(ctx, "SELECT pg_is_in_recovery()").Scan(&standby); err != nil || standby {
		return err
	}
	_, err = c.Exec(ctx, "ALTER ROLE postgres PASSWORD '"+strings.ReplaceAll(pg.opts.Password, "'", "''")+"'")
	if err != nil {
		return errors.New("set the password of the superuser failed")
	}
	return nil
}

// awaitConn asks until the server answers or ends.
func (pg *Postgres) awaitConn(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var last error
	err := until(ctx, 10*time.Millisecond, "postgres", func() bool {
		if pg.proc.ended() {
			return true
		}
		var c *pgx.Conn
		if c, last = pgx.Connect(ctx, pg.socketDSN()); last != nil {
			return false
		}
		c.Close(ctx)
		return true
	})
	switch {
	case pg.proc.ended():
		return fmt.Errorf("postgres ended at once: %s", tail(pg.Log(), 10))
	case err != nil:
		return errors.Join(err, last)
	}
	return nil
}

// StopMode says how a shutdown treats the sessions.
type StopMode syscall.Signal

// The modes of pg_ctl stop.
const (
	Smart     = StopMode(syscall.SIGTERM) // waits for the sessions to end
	Fast      = StopMode(syscall.SIGINT)  // ends the sessions, waits for walsenders
	Immediate = StopMode(syscall.SIGQUIT) // recovers on the next start
)

// Stop shuts the server down and returns how long it took. It is an error when
// the server still runs after limit.
func (pg *Postgres) Stop(mode StopMode, limit time.Duration) (time.Duration, error) {
	if !pg.Running() {
		return 0, nil
	}
	if err := pg.proc.signal(syscall.Signal(mode)); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return 0, fmt.Errorf("stop postgres: %w", err)
	}
	return pg.proc.waitFor(limit)
}

// Kill ends the postmaster and all its children with SIGKILL and returns when they are gone.
func (pg *Postgres) Kill() error { return pg.proc.kill() }

// Freeze stops the postmaster and all its children with SIGSTOP: connections
// stay and nothing answers.
func (pg *Postgres) Freeze() {
	if pg.Running() {
		pg.proc.stop()
	}
}

// Thaw wakes what Freeze stopped.
func (pg *Postgres) Thaw() {
	if pg.Running() {
		pg.proc.resume()
	}
}

// Remove ends the server and removes its folder.
func (pg *Postgres) Remove() error {
	if pg.Running() {
		pg.Thaw()
		// An immediate shutdown frees the shared memory, which SIGKILL does not.
		if _, err := pg.Stop(Immediate, 3*time.Second); err != nil {
			if err := pg.Kill(); err != nil {
				return err
			}
		}
	}
	pg.freeSharedMemory()
	return os.RemoveAll(pg.Dir)
}

// freeSharedMemory removes the segment of a postmaster that was killed; its id
// ends line 7 of postmaster.pid (miscadmin.h, LOCK_FILE_LINE_SHMEM_KEY).
func (pg *Postgres) freeSharedMemory() {
	b, err := os.ReadFile(filepath.Join(pg.Data(), "postmaster.pid"))
	if err != nil {
		return
	}
	lines := strings.Split(string(b), "\n")
	if len(lines) < 7 {
		return
	}
	if f := strings.Fields(lines[6]); len(f) == 2 {
		exec.Command("ipcrm", "-m", f[1]).Run()
	}
}

// Log is the server's log so far.
func (pg *Postgres) Log() string {
	b, _ := os.ReadFile(pg.logFile())
	return string(b)
}

func (pg *Postgres) logFile() string { return filepath.Join(pg.Dir, "log") }

// DSN is the URL of a database for the superuser over TCP.
func (pg *Postgres) DSN(database string) string {
	return pg.DSNFor(database, "postgres", pg.opts.Password)
}

// DSNFor is the URL of a database for any user; password may be "".
func (pg *Postgres) DSNFor(database, user, password string) string {
	u := url.URL{
		Scheme: "postgres",
		User:   url.User(user),
		Host:   pg.Addr(),
		Path:   "/" + database,
	}
	if password != "" {
		u.User = url.UserPassword(user, password)
	}
	q := url.Values{"sslmode": {"disable"}}
	if pg.tls != nil {
		q = url.Values{"sslmode": {"verify-full"}, "sslrootcert": {pg.tls.CA}}
	}
	u.RawQuery = q.Encode()
	return u.String()
}

// Addr is host:port.
func (pg *Postgres) Addr() string { return "127.0.0.1:" + strconv.Itoa(pg.Port) }

func (pg *Postgres) socketDSN() string {
	return fmt.Sprintf("host=%s port=%d user=postgres database=postgres sslmode=disable connect_timeout=5", pg.Dir, pg.Port)
}

// Conn connects to the database postgres as superuser.
func (pg *Postgres) Conn(ctx context.Context) (*pgx.Conn, error) {
	c, err := pgx.Connect(ctx, pg.DSN("postgres"))
	if err != nil {
		return nil, fmt.Errorf("connect to postgres: %w", err)
	}
	return c, nil
}

// Exec runs statements in the database postgres as superuser, each in a
// transaction of its own.
func (pg *Postgres) Exec(ctx context.Context, statements ...string) error {
	c, err := pg.Conn(ctx)
	if err != nil {
		return err
	}
	defer c.Close(ctx)
	for _, s := range statements {
		if _, err := c.Exec(ctx, s, pgx.QueryExecModeSimpleProtocol); err != nil {
			return fmt.Errorf("exec %q: %w", s, err)
		}
	}
	return nil
}

// MustConn is Conn for tests; the connection is closed with the test.
func (pg *Postgres) MustConn(t testing.TB) *pgx.Conn {
	t.Helper()
	c, err := pg.Conn(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		c.Close(ctx)
	})
	return c
}

// MustExec is Exec for tests.
func (pg *Postgres) MustExec(t testing.TB, statements ...string) {
	t.Helper()
	if err := pg.Exec(context.Background(), statements...); err != nil {
		t.Fatalf("%v", err)
	}
}

// MustStart is Start for tests.
func (pg *Postgres) MustStart(t testing.TB) {
	t.Helper()
	if err := pg.Start(context.Background()); err != nil {
		t.Fatalf("start postgres: %v", err)
	}
}

// unprivileged is the user that the server runs as when we are root, which
// Postgres refuses to be; nil otherwise.
func unprivileged() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err1 == nil && err2 == nil {
			return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
		}
	}
	return nil, errors.New("postgres refuses to run as root, and there is neither a user postgres nor nobody")
}

// initdbTemplate returns the data folder of a fresh cluster to copy from,
// shared between processes.
func initdbTemplate(ctx context.Context, bin, encoding string, cred *syscall.Credential) (string, error) {
	version, err := exec.CommandContext(ctx, filepath.Join(bin, "postgres"), "--version").Output()
	if err != nil {
		return "", fmt.Errorf("postgres --version: %w", err)
	}
	return cached("initdb", []byte(string(version)+bin+encoding+"1"), func(dst string) error {
		dir, err := Folder("initdb")
		if err != nil {
			return err
		}
		defer os.RemoveAll(dir)
		if cred != nil {
			if err := os.Chown(dir, int(cred.Uid), int(cred.Gid)); err != nil {
				return err
			}
		}
		data := filepath.Join(dir, "data")
		cmd := exec.CommandContext(ctx, filepath.Join(bin, "initdb"),
			"-D", data, "-U", "postgres", "-A", "trust", "-E", encoding, "--locale=C", "--no-sync")
		cmd.Dir = dir
		cmd.Env = cleanEnv()
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("initdb: %w: %s", err, bytes.TrimSpace(out))
		}
		return copyTree(data, dst)
	})
}

// cleanEnv is our environment without what would change a server: libpq's
// variables and the locale.
func cleanEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_") || strings.HasPrefix(kv, "LANG")
	})
}
