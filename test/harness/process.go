package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a started program in a session of its own, so that a terminal's
// Ctrl-C reaches us and not the servers.
type process struct {
	cmd  *exec.Cmd
	pid  int
	done chan struct{} // closed when the program has ended and was waited for
}

func startProcess(cmd *exec.Cmd) (*process, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid = true
	// Without this, Wait would hang on a pipe that a grandchild keeps open.
	cmd.WaitDelay = 2 * time.Second
	if _, err := Root(); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", filepath.Base(cmd.Path), err)
	}
	p := &process{cmd: cmd, pid: cmd.Process.Pid, done: make(chan struct{})}
	watch(p.pid)
	go func() {
		cmd.Wait()
		unwatch(p.pid)
		close(p.done)
	}()
	return p, nil
}

// ended reports whether the process is gone. A nil process is.
func (p *process) ended() bool {
	if p == nil {
		return true
	}
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

func (p *process) signal(sig syscall.Signal) error {
	if p.ended() {
		return os.ErrProcessDone
	}
	return p.cmd.Process.Signal(sig)
}

// wait blocks until the process is gone or ctx ends.
func (p *process) wait(ctx context.Context) error {
	if p == nil {
		return nil
	}
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// waitFor is wait with a time limit, and returns how long it took.
func (p *process) waitFor(limit time.Duration) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	start := time.Now()
	if err := p.wait(ctx); err != nil {
		return time.Since(start), fmt.Errorf("%s (pid %d) still runs after %s", filepath.Base(p.cmd.Path), p.pid, limit)
	}
	return time.Since(start), nil
}

// kill ends the process and its descendants with SIGKILL and returns when they are gone.
func (p *process) kill() error {
	if p.ended() {
		return nil
	}
	// Stopped, it cannot fork while its children are counted.
	all := p.stop()
	for _, pid := range all {
		syscall.Kill(pid, syscall.SIGKILL)
	}
	if _, err := p.waitFor(10 * time.Second); err != nil {
		return err
	}
	return eventually(10*time.Second, "children to end", func() bool {
		for _, pid := range all[1:] {
			if alive(pid) {
				return false
			}
		}
		return true
	})
}

// stop sends SIGSTOP to the process and all its descendants, returns when they
// stand still, and returns their pids, the process first.
func (p *process) stop() []int {
	all := halt(p.pid)
	// A fork may have been under way, so look again until nothing is new.
	for {
		next := append([]int{p.pid}, descendants(p.pid)...)
		if len(next) == len(all) {
			return all
		}
		all = halt(next...)
	}
}

// halt sends SIGSTOP to processes and returns them when none of their threads
// runs any more: the signal alone leaves each a while to go on.
func halt(pids ...int) []int {
	for _, pid := range pids {
		syscall.Kill(pid, syscall.SIGSTOP)
	}
	for _, pid := range pids {
		// One that cannot stop, as it ends or waits for a disk, does nothing either.
		_ = eventually(time.Second, "threads to stop", func() bool { return still(pid) })
	}
	return pids
}

// still reports whether no thread of a process can run. It takes one for still where /proc does not tell.
func still(pid int) bool {
	threads, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/[0-9]*/stat")
	for _, name := range threads {
		if _, _, state := procStat(name); state == "R" || state == "S" {
			return false
		}
	}
	return true
}

// resume sends SIGCONT to the process and all its descendants.
func (p *process) resume() {
	for _, pid := range descendants(p.pid) {
		syscall.Kill(pid, syscall.SIGCONT)
	}
	syscall.Kill(p.pid, syscall.SIGCONT)
}

// descendants lists the processes below pid.
func descendants(pid int) []int {
	children := make(map[int][]int)
	if dirs, _ := filepath.Glob("/proc/[0-9]*/stat"); len(dirs) > 0 {
		for _, name := range dirs {
			if id, parent, state := procStat(name); id > 0 && state != "Z" {
				children[parent] = append(children[parent], id)
			}
		}
	} else {
		out, _ := exec.Command("ps", "-A", "-o", "pid=,ppid=").Output()
		for line := range strings.Lines(string(out)) {
			f := strings.Fields(line)
			if len(f) == 2 {
				id, _ := strconv.Atoi(f[0])
				parent, _ := strconv.Atoi(f[1])
				children[parent] = append(children[parent], id)
			}
		}
	}
	var all []int
	queue := []int{pid}
	for len(queue) > 0 {
		below := children[queue[0]]
		all, queue = append(all, below...), append(queue[1:], below...)
	}
	return all
}

// procStat reads pid, parent and state from a /proc/<pid>/stat file (proc(5)).
func procStat(name string) (pid, parent int, state string) {
	b, err := os.ReadFile(name)
	if err != nil {
		return 0, 0, ""
	}
	// The second field is the program's name in parentheses and may hold anything.
	s := string(b)
	end := strings.LastIndexByte(s, ')')
	if end < 0 {
		return 0, 0, ""
	}
	f := strings.Fields(s[end+1:])
	if len(f) < 2 {
		return 0, 0, ""
	}
	id, _, _ := strings.Cut(s, " ")
	pid, _ = strconv.Atoi(id)
	parent, _ = strconv.Atoi(f[1])
	return pid, parent, f[0]
}

// alive reports whether a process runs; one that only waits to be reaped does not.
func alive(pid int) bool {
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return false
	}
	_, _, state := procStat("/proc/" + strconv.Itoa(pid) + "/stat")
	return state != "Z" && state != "X"
}

// eventually asks for a condition of the operating system that gives no signal.
func eventually(limit time.Duration, what string, ok func() bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	return until(ctx, 2*time.Millisecond, what, ok)
}

func until(ctx context.Context, every time.Duration, what string, ok func() bool) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if ok() {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", what, ctx.Err())
		}
	}
}

// rss is the peak of the resident memory in bytes.
func (p *process) rss() (int64, error) {
	if p.ended() {
		usage, ok := p.cmd.ProcessState.SysUsage().(*syscall.Rusage)
		if !ok {
			return 0, errors.New("no resource usage")
		}
		if runtime.GOOS == "darwin" {
			return usage.Maxrss, nil // bytes there, kilobytes elsewhere (getrusage(2))
		}
		return usage.Maxrss * 1024, nil
	}
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.pid) + "/status")
	if err != nil {
		return 0, fmt.Errorf("read peak memory: %w", err)
	}
	_, after, _ := strings.Cut(string(b), "VmHWM:")
	line, _, _ := strings.Cut(after, "\n")
	kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(line), " kB"), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read peak memory: %w", err)
	}
	return kb * 1024, nil
}
