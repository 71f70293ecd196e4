//go:build examples

package examples

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// program builds one of the examples and returns it, not yet started.
func program(t *testing.T, name string, env ...string) *harness.Relay {
	t.Helper()
	bin := filepath.Join(t.TempDir(), name)
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-buildvcs=false", "-o", bin, "./"+name).CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", name, err, out)
	}
	p := harness.NewRelay(t)
	p.Bin, p.Env = bin, env
	return p
}

func post(t *testing.T, url, body string) (answer struct {
	ID     int
	Status string
},
) {
	t.Helper()
	resp, err := http.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s", url, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	return answer
}

// What the README tells, with kills of the consumer and the relay.
func TestServiceAndConsumer(t *testing.T) {
	pg, n := harness.RunPostgres(t, harness.PostgresOptions{}), harness.RunNATS(t, harness.NATSOptions{})
	pg.MustExec(t, "CREATE DATABASE shop", "CREATE DATABASE mail")
	shop, mail := pg.DSN("shop"), pg.DSN("mail")
	for _, args := range [][]string{
		{"init", "--apply", "--dsn", shop},
		{"init", "--apply", "--inbox", "--dsn", mail},
		{"slot", "create", "--dsn", shop},
	} {
		if ran := harness.MustRun(t, nil, args...); ran.Code != 0 {
			t.Fatalf("walrelay %s: exit code %d\n%s", strings.Join(args, " "), ran.Code, ran.Stderr)
		}
	}
	relay := harness.RunRelay(t, "run", "--create-stream", "--dsn", shop, "--nats-url", n.URL())
	relay.MustAwait(t, 20*time.Second, "streaming")

	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprint("127.0.0.1:", port)
	orders := program(t, "orders", "DATABASE_URL="+shop, "ADDR="+addr)
	mailer := program(t, "mailer", "DATABASE_URL="+mail, "NATS_URL="+n.URL())
	orders.MustStart(t)
	mailer.MustStart(t)
	orders.MustAwait(t, 20*time.Second, "taking orders")
	waitUntilServed(t, addr)

	const customers = 60
	for i := range customers {
		o := post(t, "http://"+addr+"/orders", fmt.Sprintf(`{"customer": "c%d@example.org", "cents": %d}`, i, 100*i))
		if o := post(t, fmt.Sprintf("http://%s/orders/%d/pay", addr, o.ID), ""); o.Status != "paid" {
			t.Errorf("order %d is %s", o.ID, o.Status)
		}
		if i%20 == 10 {
			if err := mailer.Kill(); err != nil {
				t.Fatal(err)
			}
			mailer.MustStart(t)
		}
		if i == 30 {
			if err := relay.Kill(); err != nil {
				t.Fatal(err)
			}
			relay.MustStart(t)
		}
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	await(ctx, t, mail, fmt.Sprintf("SELECT count(*) = %d FROM inbox", 2*customers))
	await(ctx, t, mail, fmt.Sprintf("SELECT count(*) = %[1]d AND count(DISTINCT recipient) = %[1]d FROM mails", customers))
	for name, p := range map[string]*harness.Relay{"mailer": mailer, "orders": orders, "relay": relay} {
		if code := p.MustStop(t, 20*time.Second); code != 0 {
			t.Errorf("%s: exit code %d", name, code)
		}
	}
}

func waitUntilServed(t *testing.T, addr string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	poll(ctx, t, "the service answers", func() bool {
		resp, err := http.Get("http://" + addr + "/")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil
	})
}

// await polls until a condition of SQL holds.
func await(ctx context.Context, t *testing.T, dsn, condition string) {
	t.Helper()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	poll(ctx, t, condition, func() bool {
		var ok bool
		if err := conn.QueryRow(ctx, condition).Scan(&ok); err != nil {
			t.Fatalf("%s: %v", condition, err)
		}
		return ok
	})
}

func poll(ctx context.Context, t *testing.T, what string, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not in time: %s", what)
		}
	}
}
