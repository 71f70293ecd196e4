package harness

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// sandbox is what this process must leave behind no trace of: one folder with
// everything in it, and the servers it started. A reaper, a shell that reads
// from a pipe, ends and removes them when the pipe closes, which happens also
// when this process is killed or a test binary runs into its timeout.
var sandbox struct {
	sync.Mutex
	root   string
	reaper *exec.Cmd
	pipe   io.WriteCloser
	count  int
	ports  map[int]bool
}

// reap reads "+pid", "-pid" and "keep". Stopped processes are woken first, since
// they could not act on SIGQUIT, and Postgres leaves no shared memory behind
// when it gets the time to shut down.
const reap = `
trap '' INT TERM HUP QUIT
# A process that only waits for its new parent to notice its end is not alive.
alive() { kill -0 "$1" 2>/dev/null && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null; }
pids=
while read -r line; do
	case $line in
	keep) exit 0 ;;
	+*) pids="$pids ${line#+}" ;;
	-*) left=; for p in $pids; do [ "$p" = "${line#-}" ] || left="$left $p"; done; pids=$left ;;
	esac
done
all=
for p in $pids; do
	all="$all $p $(cat /proc/$p/task/$p/children 2>/dev/null || ps -A -o pid=,ppid= | awk -v p=$p '$2 == p { print $1 }')"
done
[ -z "$all" ] || kill -CONT $all 2>/dev/null
[ -z "$pids" ] || kill -QUIT $pids 2>/dev/null
n=0
while [ $n -lt 30 ]; do
	some=
	for p in $pids; do alive $p && some=1; done
	[ -n "$some" ] || break
	sleep 0.1
	n=$((n + 1))
done
[ -z "$all" ] || kill -KILL $all 2>/dev/null
rm -rf "$1"
`

// Root is the folder that holds everything this process makes.
func Root() (string, error) {
	sandbox.Lock()
	defer sandbox.Unlock()
	return openSandbox()
}

func openSandbox() (string, error) {
	if sandbox.root != "" {
		return sandbox.root, nil
	}
	root, err := os.MkdirTemp(reachableTemp(), "walrelay-")
	if err != nil {
		return "", fmt.Errorf("create test folder: %w", err)
	}
	// Postgres runs as another user when we are root and must get through.
	if err := os.Chmod(root, 0o711); err != nil {
		return "", fmt.Errorf("open test folder: %w", err)
	}
	// Postgres puts its socket's path through realpath-like limits; links would only make it longer.
	if real, err := filepath.EvalSymlinks(root); err == nil {
		root = real
	}
	cmd := exec.Command("/bin/sh", "-c", reap, "sh", root)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Dir = "/"
	pipe, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		os.RemoveAll(root)
		return "", fmt.Errorf("start reaper: %w", err)
	}
	sandbox.root, sandbox.reaper, sandbox.pipe = root, cmd, pipe
	return root, nil
}

// reachableTemp is the temp folder, unless another user cannot get through to it.
func reachableTemp() string {
	dir := os.TempDir()
	if os.Getuid() != 0 {
		return dir
	}
	for p := dir; ; p = filepath.Dir(p) {
		info, err := os.Stat(p)
		if err != nil || info.Mode().Perm()&0o001 == 0 {
			return "/tmp"
		}
		if p == filepath.Dir(p) {
			return dir
		}
	}
}

// Folder makes a new, empty folder that lives until the process ends at the latest.
func Folder(name string) (string, error) {
	sandbox.Lock()
	defer sandbox.Unlock()
	root, err := openSandbox()
	if err != nil {
		return "", err
	}
	sandbox.count++
	dir := filepath.Join(root, name+strconv.Itoa(sandbox.count))
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", fmt.Errorf("create test folder: %w", err)
	}
	return dir, nil
}

// watch tells the reaper of a process; unwatch that it is gone.
func watch(pid int)   { tellReaper("+" + strconv.Itoa(pid)) }
func unwatch(pid int) { tellReaper("-" + strconv.Itoa(pid)) }

func tellReaper(line string) {
	sandbox.Lock()
	defer sandbox.Unlock()
	if sandbox.pipe != nil {
		io.WriteString(sandbox.pipe, line+"\n")
	}
}

// Shutdown ends every server that is still running and removes every folder.
// It blocks until that is done.
func Shutdown() error { return closeSandbox("") }

// Main runs a package's tests, ends what they left behind, and returns the exit
// code for TestMain.
func Main(m interface{ Run() int }) int {
	code := m.Run()
	if err := Shutdown(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// Leave keeps the running servers and the folders beyond the end of this
// process. The caller tells the user how to end them.
func Leave() error { return closeSandbox("keep\n") }

func closeSandbox(word string) error {
	sandbox.Lock()
	defer sandbox.Unlock()
	if sandbox.pipe == nil {
		return nil
	}
	io.WriteString(sandbox.pipe, word)
	sandbox.pipe.Close()
	err := sandbox.reaper.Wait()
	sandbox.root, sandbox.reaper, sandbox.pipe = "", nil, nil
	if err != nil {
		return fmt.Errorf("clean up: %w", err)
	}
	return nil
}

// FreePort picks a port of the loopback interface that nobody listens on and
// that was not given out before. It stays below the range from which systems
// pick the ports of outgoing connections, so that a server that is down for a
// while finds its port free again.
func FreePort() (int, error) {
	sandbox.Lock()
	defer sandbox.Unlock()
	if sandbox.ports == nil {
		sandbox.ports = make(map[int]bool)
	}
	for range 1000 {
		port := 12000 + rand.IntN(20000)
		if sandbox.ports[port] {
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err != nil {
			continue
		}
		l.Close()
		sandbox.ports[port] = true
		return port, nil
	}
	return 0, fmt.Errorf("no free port on 127.0.0.1 found")
}
