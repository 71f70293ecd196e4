package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Relay is a run of the relay's program, or of any other, as a process. It may
// be started again after it ended; its lines then begin anew.
type Relay struct {
	Bin  string
	Args []string
	Env  []string // NAME=value, on top of our environment without what configures a relay

	// Detach sends the output to the file instead of to Await and Lines, so that the
	// process can outlive us.
	Detach string

	out  *output
	proc *process
}

// RunRelay builds and starts walrelay with args. It ends with the test, which
// shows its output when it failed.
func RunRelay(t testing.TB, args ...string) *Relay {
	t.Helper()
	r := NewRelay(t, args...)
	r.MustStart(t)
	return r
}

// NewRelay is RunRelay without the start.
func NewRelay(t testing.TB, args ...string) *Relay {
	t.Helper()
	bin, err := BuildRelay(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	r := &Relay{Bin: bin, Args: args}
	t.Cleanup(func() {
		if err := r.Kill(); err != nil {
			t.Errorf("kill relay: %v", err)
		}
		if t.Failed() && r.out != nil {
			t.Logf("output of the relay, last lines:\n%s", tail(r.Output(), 60))
		}
	})
	return r
}

// Start starts the program and does not wait for anything.
func (r *Relay) Start() error {
	if r.Running() {
		return errors.New("relay runs already")
	}
	cmd := exec.Command(r.Bin, r.Args...)
	cmd.Env = append(relayEnv(), r.Env...)
	r.out = newOutput()
	if r.Detach == "" {
		cmd.Stdout, cmd.Stderr = &lineWriter{out: r.out}, &lineWriter{out: r.out}
	} else {
		log, err := os.OpenFile(r.Detach, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			return fmt.Errorf("open log: %w", err)
		}
		defer log.Close()
		cmd.Stdout, cmd.Stderr = log, log
	}
	var err error
	if r.proc, err = startProcess(cmd); err != nil {
		return err
	}
	go func(p *process, out *output) {
		<-p.done
		out.close()
	}(r.proc, r.out)
	return nil
}

// MustStart is Start for tests.
func (r *Relay) MustStart(t testing.TB) {
	t.Helper()
	if err := r.Start(); err != nil {
		t.Fatalf("start relay: %v", err)
	}
}

// relayEnv is our environment without what would configure a relay.
func relayEnv() []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "NATS_") || strings.HasPrefix(kv, "WALRELAY_")
	})
}

// Running reports whether the process runs, or is frozen.
func (r *Relay) Running() bool { return !r.proc.ended() }

// PID is the process id, 0 when it does not run.
func (r *Relay) PID() int {
	if !r.Running() {
		return 0
	}
	return r.proc.pid
}

// Lines are the lines of stdout and stderr since the last start.
func (r *Relay) Lines() []string { return r.out.snapshot() }

// Output is Lines as one text.
func (r *Relay) Output() string { return strings.Join(r.Lines(), "\n") }

// Await blocks until a line since the last start satisfies ok and returns it. It
// is an error when the process ends without one.
func (r *Relay) Await(ctx context.Context, ok func(line string) bool) (string, error) {
	for i := 0; ; i++ {
		line, err := r.out.line(ctx, i)
		if err != nil {
			return "", err
		}
		if ok(line) {
			return line, nil
		}
	}
}

// AwaitText blocks until a line since the last start contains text.
func (r *Relay) AwaitText(ctx context.Context, text string) (string, error) {
	line, err := r.Await(ctx, func(line string) bool { return strings.Contains(line, text) })
	if err != nil {
		return "", fmt.Errorf("wait for %q in the relay's output: %w", text, err)
	}
	return line, nil
}

// MustAwait is AwaitText for tests, with a time limit.
func (r *Relay) MustAwait(t testing.TB, limit time.Duration, text string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	line, err := r.AwaitText(ctx, text)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return line
}

// Kill ends the process with SIGKILL and returns when it is gone.
func (r *Relay) Kill() error { return r.proc.kill() }

// Term sends SIGTERM and does not wait.
func (r *Relay) Term() error { return r.Signal(syscall.SIGTERM) }

// Signal sends any signal.
func (r *Relay) Signal(sig syscall.Signal) error {
	if r.proc == nil {
		return os.ErrProcessDone
	}
	return r.proc.signal(sig)
}

// Freeze stops the process with SIGSTOP.
func (r *Relay) Freeze() {
	if r.Running() {
		r.proc.stop()
	}
}

// Thaw wakes what Freeze stopped.
func (r *Relay) Thaw() {
	if r.Running() {
		r.proc.resume()
	}
}

// Done is closed when the process has ended and all its output was read.
func (r *Relay) Done() <-chan struct{} { return r.out.closed }

// Wait blocks until the process has ended and returns its exit code, -1 when a signal ended it.
func (r *Relay) Wait(ctx context.Context) (int, error) {
	if r.proc == nil {
		return -1, errors.New("relay was not started")
	}
	if err := r.proc.wait(ctx); err != nil {
		return -1, fmt.Errorf("wait for relay to end: %w", err)
	}
	return r.proc.cmd.ProcessState.ExitCode(), nil
}

// MustStop sends SIGTERM and returns the exit code, which must come within limit.
func (r *Relay) MustStop(t testing.TB, limit time.Duration) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	if err := r.Term(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatalf("stop relay: %v", err)
	}
	code, err := r.Wait(ctx)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return code
}

// RSS is the peak of the resident memory so far, in bytes.
func (r *Relay) RSS() (int64, error) {
	if r.proc == nil {
		return 0, errors.New("relay was not started")
	}
	return r.proc.rss()
}

// CPU is the processor time the last run has used; it is known once it has ended.
func (r *Relay) CPU() time.Duration {
	if r.proc == nil || !r.proc.ended() {
		return 0
	}
	s := r.proc.cmd.ProcessState
	return s.UserTime() + s.SystemTime()
}

// Ran is the outcome of a program that was run to its end.
type Ran struct {
	Code           int
	Stdout, Stderr string
}

// Run runs the program with args to its end. The error tells that it could not
// be run, or not within ctx; a bad exit code is none.
func Run(ctx context.Context, bin string, env []string, args ...string) (Ran, error) {
	var out, errOut bytes.Buffer
	cmd := exec.Command(bin, args...)
	cmd.Env = append(relayEnv(), env...)
	cmd.Stdout, cmd.Stderr = &out, &errOut
	p, err := startProcess(cmd)
	if err != nil {
		return Ran{Code: -1}, err
	}
	if err := p.wait(ctx); err != nil {
		p.kill()
		return Ran{Code: -1, Stdout: out.String(), Stderr: errOut.String()}, fmt.Errorf("run %s: %w", args[0], err)
	}
	return Ran{Code: cmd.ProcessState.ExitCode(), Stdout: out.String(), Stderr: errOut.String()}, nil
}

// MustRun runs walrelay with args to its end, within a minute.
func MustRun(t testing.TB, env []string, args ...string) Ran {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	bin, err := BuildRelay(context.Background())
	if err != nil {
		t.Fatalf("%v", err)
	}
	ran, err := Run(ctx, bin, env, args...)
	if err != nil {
		t.Fatalf("%v\n%s%s", err, ran.Stdout, ran.Stderr)
	}
	return ran
}

// output collects lines and lets readers wait for the next.
type output struct {
	mu     sync.Mutex
	lines  []string
	more   chan struct{} // closed and replaced by every new line
	closed chan struct{}
}

func newOutput() *output {
	return &output{more: make(chan struct{}), closed: make(chan struct{})}
}

func (o *output) add(line string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lines = append(o.lines, line)
	close(o.more)
	o.more = make(chan struct{})
}

func (o *output) close() { close(o.closed) }

func (o *output) snapshot() []string {
	if o == nil {
		return nil
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return slices.Clone(o.lines)
}

// line returns line i as soon as there is one.
func (o *output) line(ctx context.Context, i int) (string, error) {
	if o == nil {
		return "", errors.New("not started")
	}
	for ended := false; ; {
		o.mu.Lock()
		if i < len(o.lines) {
			line := o.lines[i]
			o.mu.Unlock()
			return line, nil
		}
		more := o.more
		o.mu.Unlock()
		if ended {
			return "", errors.New("the process ended")
		}
		select {
		case <-more:
		case <-o.closed:
			ended = true
		case <-ctx.Done():
			return "", ctx.Err()
		}
	}
}

// lineWriter cuts what a process writes into lines.
type lineWriter struct {
	out  *output
	rest []byte
}

func (w *lineWriter) Write(b []byte) (int, error) {
	w.rest = append(w.rest, b...)
	for {
		i := bytes.IndexByte(w.rest, '\n')
		if i < 0 {
			return len(b), nil
		}
		w.out.add(string(w.rest[:i]))
		w.rest = w.rest[i+1:]
	}
}
