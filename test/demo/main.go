// Command demo shows walrelay at work on scratch servers: orders are committed
// and rolled back, the relay is killed half way, and in the end the whole stream
// is compared with what was committed. It leaves nothing behind.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

func main() {
	bin := flag.String("walrelay", "", "the program to show; built when not given")
	keep := flag.Bool("keep", false, "leave everything running in the end")
	flag.Parse()

	// A make that is interrupted as well must not end us before we have cleaned up.
	signalled, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	ctx, cancel := context.WithTimeout(signalled, 5*time.Minute)
	defer cancel()

	d := &demo{keep: *keep, bin: *bin}
	err := d.run(ctx)
	interrupted := signalled.Err() != nil
	if err == nil && d.keep {
		if err = d.leave(); err == nil {
			fmt.Println(d.summary)
			return
		}
	}
	if err != nil {
		d.explain(err, interrupted)
	}
	if err := harness.Shutdown(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
	}
	if d.summary != "" {
		fmt.Println(d.summary)
	}
	switch {
	case err != nil && interrupted:
		os.Exit(130)
	case err != nil:
		os.Exit(1)
	}
}

// explain tells why the demo ended before its time.
func (d *demo) explain(err error, interrupted bool) {
	if interrupted {
		fmt.Fprintln(os.Stderr, "\ninterrupted; stopping the servers and removing their folders")
		return
	}
	fmt.Fprintln(os.Stderr, "\nerror:", err)
	if d.relay != nil && !errors.Is(err, errFaults) {
		if b, err := os.ReadFile(d.relay.Detach); err == nil && len(b) > 0 {
			fmt.Fprintf(os.Stderr, "the relay's log:\n%s\n", b[max(0, len(b)-4000):])
		}
	}
}

// stopScript takes the pids of relay, broker and Postgres, and the folder. It does not
// wait for what only waits for its new parent to notice its end.
const stopScript = `#!/bin/sh
# Ends the servers of the demo and removes their folders.
kill -TERM %[1]d %[2]d 2>/dev/null
kill -INT %[3]d 2>/dev/null
for pid in %[1]d %[2]d %[3]d; do
	while kill -0 $pid 2>/dev/null && ! grep -q '^State:.Z' /proc/$pid/status 2>/dev/null; do sleep 0.1; done
done
rm -rf '%[4]s'
`

// leave keeps the servers running and says how to use and to end them.
func (d *demo) leave() error {
	root, err := harness.Root()
	if err != nil {
		return err
	}
	end := filepath.Join(root, "stop")
	script := fmt.Sprintf(stopScript, d.relay.PID(), d.nats.PID(), d.pg.PID(), root)
	if err := os.WriteFile(end, []byte(script), 0o755); err != nil {
		return err
	}
	if err := harness.Leave(); err != nil {
		return err
	}
	d.step("Yours to play with")
	say("Postgres, JetStream and the relay keep running:")
	fmt.Printf(`
     DSN        %[1]s
     NATS URL   %[2]s
     relay log  %[3]s

`, d.dsn, d.nats.URL(), d.relay.Detach)
	say("Listen in one terminal, commit an event in another, and see what the slot holds:")
	fmt.Printf(`
     nats --server %[2]s subscribe 'outbox.>'
     %[4]s '%[1]s' -c "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload)
       VALUES (gen_random_uuid(), 'order', 'mine-1', 'paid', '{\"total\": 19.90}')"
     %[3]s slot list --dsn '%[1]s'

`, d.dsn, d.nats.URL(), d.bin, d.psql())
	say("End it all and remove every folder:")
	fmt.Printf("\n     sh %s\n\n", end)
	return nil
}

// psql is the name under which the user finds it.
func (d *demo) psql() string {
	if _, err := exec.LookPath("psql"); err == nil {
		return "psql"
	}
	return filepath.Join(d.pg.Bin, "psql")
}
