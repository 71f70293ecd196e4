package main

import (
	"context"
	"errors"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	// First of all: a signal that comes earlier ends the process as it ends any other.
	sigs := make(chan os.Signal, 2)
	signal.Notify(sigs, os.Interrupt, syscall.SIGTERM)
	collectOften()
	forgetPages()
	ctx, stop := onSignal(context.Background(), sigs, func() { os.Exit(report(os.Stderr, errForced)) })
	code := execute(ctx, &process{
		args: os.Args[1:], environ: os.Environ(),
		in: os.Stdin, out: os.Stdout, err: os.Stderr,
	})
	stop()
	os.Exit(code)
}

// process is what a run of the program has from outside.
type process struct {
	args    []string
	environ []string
	in      io.Reader
	out     io.Writer
	err     io.Writer
}

// errSignal is the cause of a context that a signal ended.
var errSignal = errors.New("interrupted")

// echo is how long after a signal another one means the same. timeout(1) and
// some supervisors signal a process and then its group, which reaches it twice.
const echo = 100 * time.Millisecond

// onSignal returns a context that the first signal ends, so that commands stop
// in order; a second one, unless it is an echo of the first, calls force.
func onSignal(ctx context.Context, sigs <-chan os.Signal, force func()) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		var first time.Time
		for {
			select {
			case <-sigs:
				switch {
				case first.IsZero():
					first = time.Now()
					cancel(errSignal)
				case time.Since(first) >= echo:
					force()
					return
				}
			case <-done:
				return
			}
		}
	}()
	return ctx, func() {
		close(done)
		cancel(nil)
	}
}

// execute runs a command line and returns the exit code.
func execute(ctx context.Context, p *process) int {
	root := newRoot(p)
	root.SetArgs(p.args)
	err := unknownCommand(root, p.args)
	if err == nil {
		err = root.ExecuteContext(ctx)
	}
	return report(p.err, classify(ctx, err))
}

// isTerminal reports whether v is a terminal.
func isTerminal(v any) bool {
	f, ok := v.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull) // a character device, too
	return err != nil || !os.SameFile(info, null)
}
