package relay

import (
	"context"
	"errors"
	"flag"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
)

var (
	seedFlag  = flag.Uint64("seed", 0, "run this seed of the random schedules only")
	seedsFlag = flag.Uint64("seeds", 500, "number of random schedules")
)

// TestRandomSchedules lets relays run, fail, crash and stop at random on the
// model, until the last one is left in peace and has to finish the work. A seed
// takes the same way again, unless the race detector shuffles the goroutines.
func TestRandomSchedules(t *testing.T) {
	from, to := uint64(1), *seedsFlag
	if *seedFlag != 0 {
		from, to = *seedFlag, *seedFlag
	}
	for seed := from; seed <= to; seed++ {
		synctest.Test(t, func(t *testing.T) { runSchedule(t, seed) })
		if t.Failed() {
			return
		}
	}
}

func runSchedule(t *testing.T, seed uint64) {
	w := newWorld(t, seed)
	d := w.dice()
	lives := d.IntN(8)
	for !w.failed() {
		w.calm.Store(lives <= 0)
		lives--
		if w.live(t, d) {
			break
		}
	}
	w.serving.Wait()
	if w.failed() {
		if *seedFlag != 0 && testing.Verbose() {
			for _, line := range w.trace {
				t.Log(line)
			}
		}
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.stream) != len(w.events) || w.confirmed != w.origin.WALEnd {
		w.brokenLocked("ends with %d of %d events and %s of %s", len(w.stream), len(w.events), w.confirmed, w.origin.WALEnd)
	}
	for _, c := range w.events {
		if c.redelivered {
			if w.open[c.pos] != c.fate.poison() {
				w.brokenLocked("%s of fate %d: its dead letter is there: %v", c.name, c.fate, w.open[c.pos])
			}
			continue
		}
		if n := w.letters[c.pos]; (n > 0) != c.fate.poison() {
			w.brokenLocked("%s of fate %d has %d dead letters", c.name, c.fate, n)
		}
	}
}

// live runs one relay. It reports whether all the work is done.
func (w *world) live(t *testing.T, d dice) (done bool) {
	var crashAt int64
	stopAfter := 10 * time.Minute // longer than any calm run
	if !w.calm.Load() {
		switch d.IntN(3) {
		case 0:
			crashAt = 1 + d.Int64N(400)
		case 1:
			stopAfter = d.upTo(8 * time.Second)
		case 2:
			stopAfter = d.upTo(time.Minute)
		}
	}
	l := w.newLife(crashAt)
	r, err := New(Options{
		OpenSource: l.openSource, OpenSink: l.openSink, Mapper: &mapper{w: w}, Watcher: watcher{w, l},
		Standby: func(err error) bool { return errors.Is(err, errStandby) },
		Halt:    w.halt, ConfirmDelay: w.delay, DrainTimeout: 4 * time.Second,
	})
	if err != nil {
		t.Fatal(err)
	}
	jitter := w.dice()
	r.jitter = func(d time.Duration) time.Duration { return jitter.upTo(d) - 1 }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()

	timer := time.NewTimer(stopAfter)
	defer timer.Stop()
	select {
	case err := <-ended:
		return w.ended(l, err)
	case <-l.dead:
		cancel()
		<-ended
		return false
	case <-timer.C:
		if w.calm.Load() {
			w.broken("the relay is stuck")
			l.kill()
			cancel()
			<-ended
			return false
		}
	case <-w.complete:
		done = true
	}
	w.note("told to stop")
	l.stopped.Store(true)
	told := time.Now()
	cancel()
	err = <-ended
	w.note("stopped: %v", err)
	if took := time.Since(told); took > 10*time.Second {
		w.broken("took %s to stop", took)
	}
	s := l.sink
	switch {
	case event.ClassOf(err) == event.Halted:
		return w.ended(l, err)
	case err != nil && event.ClassOf(err) != event.Undrained:
		w.broken("stopped with %v", err)
	case err == nil && s != nil && s.drained && s.acked.Load() != s.appended:
		w.broken("drained with %d of %d events settled", s.acked.Load(), s.appended)
	case err != nil && (s == nil || s.acked.Load() == s.appended && !s.redelivering):
		w.broken("undrained with nothing in flight: %v", err)
	}
	return done
}

// ended handles a relay that ended by itself, which only a poison event may bring about.
func (w *world) ended(l *life, err error) bool {
	select {
	case <-l.dead:
		return false
	default:
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	n := len(w.stream)
	if event.ClassOf(err) != event.Halted || !w.halt || n == len(w.events) || !w.events[n].fate.poison() ||
		w.settled != uint64(n) || event.HintOf(err) == "" {
		w.brokenLocked("ended by itself with %d events stored and %d settled: %v", n, w.settled, err)
		return false
	}
	// The operator mends the row.
	w.noteLocked("halted on %s: %v", w.events[n].name, err)
	w.events[n].fate = fine
	return false
}
