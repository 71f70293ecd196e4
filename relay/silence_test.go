package relay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/walrelay/walrelay/event"
)

func TestDeadSessionIsToldFromAQuietLog(t *testing.T) {
	const silence = 10 * time.Second
	for _, c := range []struct {
		name string
		ask  func(n int) (event.LSN, bool, error) // n-th question, from 1
		want string                               // why the session ends; "" when it does not
	}{
		{"quiet", func(int) (event.LSN, bool, error) { return 200, true, nil }, ""},
		{"busy with a large transaction", func(int) (event.LSN, bool, error) { return 900, true, nil }, ""},
		{"the role may not see", func(int) (event.LSN, bool, error) { return 0, true, nil }, ""},
		{"no connection to be had", func(int) (event.LSN, bool, error) { return 0, false, errors.New("too many clients") }, ""},
		{"sent and lost on the way", func(n int) (event.LSN, bool, error) { return event.LSN(100 * n), true, nil }, "nothing after"},
		{"given up", func(int) (event.LSN, bool, error) { return 0, false, nil }, "given this session up"},
		{"stopped", nil, "nor answers"},
	} {
		t.Run(c.name, func(t *testing.T) {
			story(t, func(b *bench) {
				var asked atomic.Int64
				b.Silence = silence
				b.Sent = func(ctx context.Context) (event.LSN, bool, error) {
					n := int(asked.Add(1))
					if c.ask == nil {
						<-ctx.Done()
						return 0, false, fmt.Errorf("connect: %w", ctx.Err())
					}
					return c.ask(n)
				}
				b.run()
				b.after(silence / 2)
				if asked.Load() > 0 {
					t.Errorf("asked after %s already", silence/2)
				}
				b.after(3 * silence)
				if n := asked.Load(); n < 1 || n > 4 {
					t.Errorf("asked %d times in %s", n, 7*silence/2)
				}
				ended := b.lines.with("session ended")
				if c.want == "" && len(ended) > 0 || c.want != "" && (len(ended) == 0 || !strings.Contains(ended[0], c.want)) {
					t.Errorf("got %q, want %q", ended, c.want)
				}
			})
		})
	}
}

func TestLogThatGoesOnIsNotAskedAfter(t *testing.T) {
	story(t, func(b *bench) {
		b.Silence = 10 * time.Second
		b.Sent = func(context.Context) (event.LSN, bool, error) {
			t.Error("asked")
			return 0, true, nil
		}
		b.run()
		for range 10 {
			b.source.beat()
			b.after(6 * time.Second)
		}
	})
}
