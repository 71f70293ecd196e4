package relay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/walrelay/walrelay/event"
)

func TestNewNeedsBothSides(t *testing.T) {
	if _, err := New(Options{}); err == nil {
		t.Error("no options are enough")
	}
}

func TestBackoffStaysWithinItsBounds(t *testing.T) {
	for _, c := range []struct{ min, max time.Duration }{
		{100 * time.Millisecond, 5 * time.Second},
		{time.Second, time.Second},
		{time.Minute, time.Second},
		{time.Hour, 24 * time.Hour},
		{1, 2},
	} {
		r := &Relay{o: Options{BackoffMin: c.min, BackoffMax: c.max}, jitter: rand.N[time.Duration]}
		for tries := range 200 {
			want := min(c.max, time.Duration(float64(c.min)*float64(int64(1)<<min(tries, 20))))
			for range 20 {
				if d := r.backoff(tries, c.max); d < want/2 || d > want {
					t.Fatalf("%s to %s, try %d: waits %s, want %s to %s", c.min, c.max, tries, d, want/2, want)
				}
			}
		}
	}
}

// TestRetriesForAsLongAsItTakes fails to open for a day.
func TestRetriesForAsLongAsItTakes(t *testing.T) {
	story(t, func(b *bench) {
		var tries []time.Time
		b.OpenSource = func(context.Context) (Source, error) {
			tries = append(tries, time.Now())
			if time.Since(b.start) > 24*time.Hour {
				return b.newSource(), nil
			}
			return nil, errFault
		}
		b.run()
		b.after(24*time.Hour + 6*time.Second)
		if len(b.opened) != 2 {
			t.Fatalf("opened %v after a day", b.opened)
		}
		for i, at := range tries[1:] {
			wait := at.Sub(tries[i])
			if i > 6 && (wait < 2500*time.Millisecond || wait > 5*time.Second) || wait > 5*time.Second {
				t.Fatalf("try %d after %s", i+1, wait)
			}
		}
	})
}

func TestBackoffBeginsAnewAfterProgress(t *testing.T) {
	story(t, func(b *bench) {
		broken := true
		b.OpenSource = func(context.Context) (Source, error) {
			if b.is(&broken) {
				return nil, errFault
			}
			return b.newSource(), nil
		}
		b.run()
		b.after(time.Minute)
		b.set(func() { broken = false })
		b.after(6 * time.Second)
		src := b.source
		src.commit("a")
		b.sink.ack(1)
		src.errs <- errFault
		b.after(100 * time.Millisecond) // the shortest wait
		if b.source == src {
			t.Error("waits longer, though an event was settled")
		}
	})
}

// A session that fails as soon as it is open is no progress.
func TestBackoffGrowsWhenSessionsGetNowhere(t *testing.T) {
	story(t, func(b *bench) {
		b.OpenSource = func(context.Context) (Source, error) {
			s := b.newSource()
			s.errs <- errFault
			return s, nil
		}
		b.run()
		b.after(time.Minute)
		if n := len(b.opened) / 2; n < 12 || n > 40 {
			t.Errorf("%d sessions in a minute", n)
		}
	})
}

func TestSideThatFailedLastIsOpenedFirst(t *testing.T) {
	story(t, func(b *bench) {
		var sinkDown, sourceDown bool
		b.OpenSink = func(_ context.Context, fail func(error)) (Sink, error) {
			if b.is(&sinkDown) {
				b.set(func() { b.opened = append(b.opened, "no sink") })
				return nil, errFault
			}
			return b.newSink(fail), nil
		}
		b.OpenSource = func(context.Context) (Source, error) {
			if b.is(&sourceDown) {
				b.set(func() { b.opened = append(b.opened, "no source") })
				return nil, errFault
			}
			return b.newSource(), nil
		}
		b.BackoffMin, b.BackoffMax = time.Second, time.Second
		b.run()
		step := func(name string, want ...string) {
			t.Helper()
			synctest.Wait()
			if !slices.Equal(b.opened, want) {
				t.Errorf("%s: %v, want %v", name, b.opened, want)
			}
			b.set(func() { b.opened = nil })
		}
		step("start", "source", "sink")
		b.set(func() { sinkDown = true })
		b.sink.breakWith(errors.New("down"))
		b.after(time.Second)
		step("sink down", "no sink")
		b.after(time.Second)
		step("still", "no sink")
		b.set(func() { sinkDown = false })
		b.after(time.Second)
		step("sink up", "sink", "source")
		b.set(func() { sourceDown = true })
		b.source.errs <- errFault
		b.after(time.Second)
		step("source down", "no source")
		b.set(func() { sinkDown, sourceDown = true, false })
		b.after(time.Second)
		step("now the sink is", "source", "no sink")
		b.after(time.Second)
		step("still", "no sink")
		b.set(func() { sinkDown = false })
		b.after(time.Second)
		step("both up", "sink", "source")
	})
}

func TestStandbyTriesOftenAndSaysSo(t *testing.T) {
	story(t, func(b *bench) {
		tries := 0
		b.Standby = func(err error) bool { return errors.Is(err, errStandby) }
		b.diagnose = func(_ context.Context, err error) error { return fmt.Errorf("slot %q: %w", "orders", err) }
		b.OpenSource = func(context.Context) (Source, error) {
			if tries++; time.Since(b.start) < 30*time.Second {
				return nil, errStandby
			}
			return b.newSource(), nil
		}
		b.run()
		b.after(30*time.Second + standbyBackoff)
		if b.source == nil {
			t.Error("a free slot is not taken over within half a second")
		}
		if tries > 150 {
			t.Errorf("%d tries in half a minute", tries)
		}
		if got := b.lines.with("standing by"); len(got) != 1 || !strings.Contains(got[0], "level=INFO") || !strings.Contains(got[0], `slot \"orders\": slot is active`) {
			t.Errorf("logged %q", got)
		}
		if got := b.lines.with("level=WARN"); len(got) != 0 {
			t.Errorf("logged %q", got)
		}
	})
}

func TestWaitingIsLoggedOnceAChange(t *testing.T) {
	story(t, func(b *bench) {
		refused, wrong := errors.New("connection refused"), false
		b.diagnose = func(_ context.Context, err error) error {
			return event.Fail(event.Transient, "start it", "connect: %w", err)
		}
		b.OpenSource = func(context.Context) (Source, error) {
			if b.is(&wrong) {
				return nil, errors.New("wrong password")
			}
			return nil, refused
		}
		b.run()
		b.after(50 * time.Second)
		got := b.lines.with("trying again")
		if len(got) != 1 || !strings.Contains(got[0], `level=WARN msg="session ended, trying again" side=postgres err="connect: connection refused" hint="start it"`) {
			t.Errorf("logged %q", got)
		}
		b.after(20 * time.Second)
		if got = b.lines.with("trying again"); len(got) != 2 || !strings.Contains(got[1], "tries=") {
			t.Errorf("after a minute: logged %q", got)
		}
		b.set(func() { wrong = true })
		b.after(10 * time.Second)
		if got = b.lines.with("trying again"); len(got) != 3 || strings.Contains(got[2], "tries=") {
			t.Errorf("after a change: logged %q", got)
		}
	})
}

// A wait that is worded in two ways by turns is told once in each.
func TestWaitingInTwoWordsIsLoggedTwice(t *testing.T) {
	story(t, func(b *bench) {
		tries := 0
		b.OpenSource = func(context.Context) (Source, error) {
			tries++
			return nil, errors.New([]string{"dial: reset", "read: reset"}[tries%2])
		}
		b.run()
		b.after(50 * time.Second)
		if got := b.lines.with("trying again"); len(got) != 2 {
			t.Errorf("logged %q", got)
		}
		b.after(20 * time.Second)
		if got := b.lines.with("trying again"); len(got) != 4 || !strings.Contains(got[3], "tries=") {
			t.Errorf("after a minute: logged %q", got)
		}
	})
}

// The same loss is news again when there was work done in between.
func TestLossAfterProgressIsLoggedAgain(t *testing.T) {
	story(t, func(b *bench) {
		b.run()
		for range 3 {
			b.source.commit("a")
			b.sink.ack(1)
			b.source.errs <- errFault
			b.after(time.Second)
		}
		if got := b.lines.with("trying again"); len(got) != 3 {
			t.Errorf("logged %q", got)
		}
	})
}

func TestClassDecidesWhetherRunEnds(t *testing.T) {
	for class := event.Transient; class <= event.Undrained; class++ {
		for _, where := range []string{"source", "sink", "record", "mapper", "diagnosis"} {
			t.Run(fmt.Sprintf("%d of the %s", class, where), func(t *testing.T) {
				story(t, func(b *bench) {
					cause := event.Fail(class, "a hint", "a cause")
					switch where {
					case "source":
						b.OpenSource = func(context.Context) (Source, error) { return nil, cause }
					case "sink":
						b.OpenSink = func(context.Context, func(error)) (Sink, error) { return nil, cause }
					case "mapper":
						b.mapErr["a"] = cause
					case "diagnosis":
						b.diagnose = func(context.Context, error) error { return cause }
					}
					b.run()
					switch where {
					case "record":
						b.source.errs <- cause
					case "diagnosis":
						b.source.errs <- errFault
					case "mapper":
						b.source.commit("a")
					}
					if class == event.Transient {
						b.after(time.Minute)
						if !b.running() {
							t.Error("a failure that passes ends the relay")
						}
						return
					}
					if took, err := b.ended(); !errors.Is(err, cause) || event.HintOf(err) != "a hint" || took != 0 {
						t.Errorf("got %v after %s", err, took)
					}
				})
			})
		}
	}
}

func TestOnlyPostgresIsDiagnosed(t *testing.T) {
	story(t, func(b *bench) {
		asked := 0
		b.diagnose = func(_ context.Context, err error) error { asked++; return err }
		b.run()
		b.sink.breakWith(errFault)
		b.after(time.Second)
		if asked != 0 {
			t.Error("postgres is asked about the broker")
		}
		b.source.errs <- errFault
		b.after(time.Second)
		if asked != 1 {
			t.Errorf("asked %d times, want 1", asked)
		}
		close(b.shutdown) // known already
		b.after(time.Second)
		if asked != 1 {
			t.Errorf("asked %d times, want 1", asked)
		}
	})
}

func TestCancelledBeforeItStarts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := &bench{T: t}
		r, err := New(Options{
			OpenSource: func(context.Context) (Source, error) { t.Error("opens"); return nil, errFault },
			OpenSink:   func(context.Context, func(error)) (Sink, error) { t.Error("opens"); return nil, errFault },
			Mapper:     handMapper{b}, Watcher: handWatcher{b},
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		stop()
		if err := r.Run(ctx); err != nil {
			t.Errorf("got %v", err)
		}
	})
}
