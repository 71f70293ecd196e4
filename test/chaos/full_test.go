package chaos

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"
)

// A broker whose disk is full takes neither events nor checkpoints. The relay
// says so, waits without spinning, and goes on by itself when there is room.
// The disk is the server's max_file_store, which holds for the stream, the dead
// letters and the checkpoints together.
func TestBrokerWithoutRoom(t *testing.T) {
	for _, c := range []struct {
		name     string
		replicas int
	}{{"R1", 1}, {"R3", 3}} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			p := calm()
			p.replicas, p.store, p.padding, p.rate = c.replicas, 2<<20, 2000, 400
			s := newScene(t, p)
			s.commit(50)
			s.recovered(10 * time.Second)
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			var writing sync.WaitGroup
			writing.Go(func() { s.writers.Run(ctx, -1) })
			took := s.await(60*time.Second, "the relay says that the broker is full", func() bool {
				return s.logged("raise its limits") > 0
			})
			t.Logf("full and told after %s", took.Round(time.Millisecond))

			const watched = 6 * time.Second
			before := len(s.relay.Lines())
			pg, nc := s.accepted()
			pause(t.Context(), watched)
			pgNow, ncNow := s.accepted()
			lines := s.told(before)
			t.Logf("in %s: %d connections to postgres, %d to the broker, %d lines", watched, pgNow-pg, ncNow-nc, len(lines))
			// As in TestFailuresAreNeitherSpunOnNorRepeated.
			if pgNow-pg > 4*4*int64(watched.Seconds()) || ncNow-nc > 4*2*int64(watched.Seconds()) {
				t.Errorf("%d and %d connections in %s, want no more than four attempts a second", pgNow-pg, ncNow-nc, watched)
			}
			if len(lines) > 5 {
				t.Errorf("%d lines in %s:\n%s", len(lines), watched, strings.Join(lines, "\n"))
			}

			for _, n := range s.nodes {
				if err := n.SetMaxStore(1 << 30); err != nil {
					t.Fatal(err)
				}
			}
			stop()
			writing.Wait()
			s.commit(20)
			s.recovered(time.Minute)
		})
	}
}

// accepted counts the connections that the relay has made to each side.
func (s *scene) accepted() (postgres, broker int64) {
	for _, p := range s.relay.toNATS {
		broker += p.Accepted()
	}
	return s.relay.toPostgres.Accepted(), broker
}
