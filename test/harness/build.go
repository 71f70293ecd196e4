package harness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

// Repo is the root folder of the repository, found from the working folder.
func Repo() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(b), "module github.com/walrelay/walrelay\n") {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("run this inside walrelay's repository")
		}
		dir = filepath.Dir(dir)
	}
}

// NATSServer returns the server program: NATS_SERVER, else the version pinned in
// tools/go.mod, which go builds once and keeps in its build cache.
func NATSServer(ctx context.Context) (string, error) {
	if bin := os.Getenv("NATS_SERVER"); bin != "" {
		if _, err := exec.LookPath(bin); err != nil {
			return "", fmt.Errorf("NATS_SERVER: %w", err)
		}
		return filepath.Abs(bin)
	}
	bin, err := inRepo(ctx, "go", "tool", "-modfile="+filepath.Join("tools", "go.mod"), "-n", "nats-server")
	if err != nil {
		return "", fmt.Errorf("build nats-server: %w", err)
	}
	return bin, nil
}

// FindPostgres returns the folder of Postgres's server programs: PGBIN, or what
// tools/postgres.sh finds or installs.
func FindPostgres(ctx context.Context) (string, error) {
	bin, err := inRepo(ctx, "sh", filepath.Join("tools", "postgres.sh"))
	if err != nil {
		return "", fmt.Errorf("find postgres: %w", err)
	}
	return filepath.Abs(bin)
}

// inRepo runs a program in the repository's root folder and returns what it prints.
func inRepo(ctx context.Context, name string, args ...string) (string, error) {
	repo, err := Repo()
	if err != nil {
		return "", err
	}
	var out, errOut bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = repo
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, bytes.TrimSpace(errOut.Bytes()))
	}
	return strings.TrimSpace(out.String()), nil
}

var relayBuild struct {
	sync.Mutex
	bin string
}

// BuildRelay returns the relay's program: WALRELAY_BIN, else cmd/walrelay built once a
// process, with the race detector when WALRELAY_RACE=1.
func BuildRelay(ctx context.Context) (string, error) {
	if bin := os.Getenv("WALRELAY_BIN"); bin != "" {
		if _, err := exec.LookPath(bin); err != nil {
			return "", fmt.Errorf("WALRELAY_BIN: %w", err)
		}
		return filepath.Abs(bin)
	}
	relayBuild.Lock()
	defer relayBuild.Unlock()
	if relayBuild.bin != "" {
		return relayBuild.bin, nil
	}
	dir, err := Folder("bin")
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "walrelay")
	args := []string{"build", "-o", bin}
	if os.Getenv("WALRELAY_RACE") == "1" {
		args = append(args, "-race")
	}
	if _, err := inRepo(ctx, "go", append(args, "./cmd/walrelay")...); err != nil {
		return "", fmt.Errorf("build walrelay: %w", err)
	}
	relayBuild.bin = bin
	return bin, nil
}
