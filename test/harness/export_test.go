package harness

import (
	"context"
	"os"
	"strconv"
	"time"
)

// AwaitGone waits until a folder and processes are gone.
func AwaitGone(ctx context.Context, dir string, pids ...string) error {
	return until(ctx, 10*time.Millisecond, "servers and folder to be gone", func() bool {
		for _, s := range pids {
			if pid, err := strconv.Atoi(s); err != nil || alive(pid) {
				return false
			}
		}
		_, err := os.Stat(dir)
		return os.IsNotExist(err)
	})
}
