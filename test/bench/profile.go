package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/test/harness"
)

// stage is a part of an event's way with its share of the processor time.
type stage struct {
	Name  string  `json:"name"`
	Share float64 `json:"share"`
}

// sampling is in samples a second of processor time.
const sampling = 4999

// profile samples the relay in a drain with perf, which sees the kernel's part,
// too, where most of the time goes.
func (l *lab) profile(ctx context.Context, events int, dir string) ([]stage, error) {
	perf, err := exec.LookPath("perf")
	if err != nil {
		return nil, errors.New("the profile needs perf (Debian: linux-perf)")
	}
	if l.relay, err = withSymbols(ctx); err != nil {
		return nil, err
	}
	b, err := l.write(ctx, backlog{Events: 5 * events, Rows: 10, Size: 256})
	if err != nil {
		return nil, err
	}
	if err := l.newStream(ctx); err != nil {
		return nil, err
	}
	p, slot, err := l.streaming(ctx)
	if err != nil {
		return nil, err
	}
	defer p.Kill()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	data := under(dir, "perf.data")
	defer os.Remove(data)
	rec := exec.CommandContext(ctx, perf, "record", "-q", "-F", strconv.Itoa(sampling), "--call-graph", "fp", "-p", strconv.Itoa(p.PID()), "-o", data)
	var errOut strings.Builder
	rec.Stderr = &errOut
	if err := rec.Start(); err != nil {
		return nil, err
	}
	if _, err := l.state(ctx, b.Events); err != nil {
		return nil, err
	}
	_ = rec.Process.Signal(os.Interrupt)
	_ = rec.Wait() // ended by the signal; whether it wrote is seen below
	if err := l.finish(ctx, p, slot); err != nil {
		return nil, err
	}
	script := exec.CommandContext(ctx, perf, "script", "-i", data, "--no-inline", "-F", "ip,sym")
	out, err := script.Output()
	if err != nil {
		return nil, fmt.Errorf("perf: %w\n%s", err, errOut.String())
	}
	stacks := fold(strings.NewReader(string(out)))
	if len(stacks) == 0 {
		return nil, fmt.Errorf("perf took no samples\n%s", errOut.String())
	}
	if err := flameGraph(under(dir, "flame.svg"), fmt.Sprintf("The relay in a drain of %s", b), stacks); err != nil {
		return nil, err
	}
	return stages(stacks), nil
}

// withSymbols builds the relay as a release is, but with the names of its functions.
func withSymbols(ctx context.Context) (string, error) {
	repo, err := harness.Repo()
	if err != nil {
		return "", err
	}
	dir, err := harness.Folder("profiled")
	if err != nil {
		return "", err
	}
	bin := under(dir, "walrelay")
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", bin, "./cmd/walrelay")
	cmd.Dir = repo
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build walrelay: %w\n%s", err, out)
	}
	return bin, nil
}

// stack is a call chain, outermost first, with its number of samples.
type stack struct {
	frames []string
	n      int
}

// fold reads what perf script prints: blocks of "address symbol" lines,
// innermost first, with an empty line between.
func fold(r io.Reader) []stack {
	var frames []string
	found := map[string]int{}
	end := func() {
		if len(frames) > 0 {
			slices.Reverse(frames)
			found[strings.Join(frames, ";")]++
		}
		frames = nil
	}
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		_, symbol, ok := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		if !ok {
			end()
			continue
		}
		frames = append(frames, strings.ReplaceAll(symbol, ";", ","))
	}
	end()
	var all []stack
	for s, n := range found {
		all = append(all, stack{strings.Split(s, ";"), n})
	}
	slices.SortFunc(all, func(a, b stack) int { return slices.Compare(a.frames, b.frames) })
	return all
}

// stages of an event's way, by a function on the stack; the first match counts.
var stageOf = []struct{ name, function string }{
	{"acks: read and parsed", "publisher.(*Session).read"},
	{"publish: write to NATS", "publisher.(*wire).write"},
	{"publish: frame", "publisher.(*Session).Append"},
	{"publish: wait for the window", "publisher.(*Session).Wait"},
	{"map: row to event", "outbox.(*Mapper).Map"},
	{"read: from Postgres", "bufio.(*Reader)"},
	{"read: message and decode", "replication.(*Stream).Next"},
	{"ticker: checkpoint and status", "relay.(*session).keep"},
	{"loop", "relay.(*session).work"},
	{"garbage collector", "runtime.gcBgMarkWorker"},
	{"scheduler", "runtime.mcall"},
	{"scheduler", "runtime.mstart"},
}

func stages(all []stack) []stage {
	shares := map[string]int{}
	total := 0
	for _, s := range all {
		name := "other"
	search:
		for _, st := range stageOf {
			for _, f := range s.frames {
				if strings.Contains(f, st.function) {
					name = st.name
					break search
				}
			}
		}
		shares[name] += s.n
		total += s.n
	}
	var out []stage
	for name, n := range shares {
		out = append(out, stage{name, float64(n) / float64(total)})
	}
	slices.SortFunc(out, func(a, b stage) int { return cmp.Compare(b.Share, a.Share) })
	return out
}

const (
	flameWidth = 1200
	flameRow   = 17
)

// node is a box of a flame graph.
type node struct {
	name     string
	n        int
	children []*node
}

// flameGraph draws stacks as boxes, callers below their callees, as wide as
// their share of the samples. A box tells its name and share when pointed at.
func flameGraph(name, title string, all []stack) error {
	root := &node{name: "all"}
	depth := 1
	for _, s := range all {
		at := root
		at.n += s.n
		for _, f := range s.frames {
			// Stacks are sorted, so the box to go on with can only be the last one.
			if k := len(at.children); k == 0 || at.children[k-1].name != f {
				at.children = append(at.children, &node{name: f})
			}
			at = at.children[len(at.children)-1]
			at.n += s.n
		}
		depth = max(depth, len(s.frames)+1)
	}
	height := 50 + depth*flameRow
	s := newSVG(flameWidth, height, title)
	s.flame(root, root.n, 10, float64(height-10-flameRow))
	return s.save(name)
}

func (s *svg) flame(n *node, total int, x, y float64) {
	width := float64(n.n) / float64(total) * (flameWidth - 20)
	if width < 0.5 {
		return
	}
	fmt.Fprintf(s, `<g><title>%s, %.1f %%</title><rect x="%.1f" y="%.1f" width="%.1f" height="%d" fill="%s" stroke="white" stroke-width="0.5"/>`,
		escape(n.name), 100*float64(n.n)/float64(total), x, y, width, flameRow-1, flameColour(n.name))
	if letters := int(width / 6.5); letters > 3 {
		text := shortName(n.name)
		if len(text) > letters {
			text = text[:letters-2] + ".."
		}
		fmt.Fprintf(s, `<text x="%.1f" y="%.1f" font-size="11">%s</text>`, x+3, y+12, escape(text))
	}
	s.WriteString("</g>\n")
	for _, c := range n.children {
		s.flame(c, total, x, y-flameRow)
		x += float64(c.n) / float64(total) * (flameWidth - 20)
	}
}

// shortName leaves the import path out.
func shortName(name string) string { return name[strings.LastIndexByte(name, '/')+1:] }

// flameColour tells ours, libraries, the runtime and the kernel apart.
func flameColour(name string) string {
	switch {
	case strings.Contains(name, "walrelay/"):
		return "#fb923c"
	case strings.HasPrefix(name, "runtime."):
		return "#a7f3d0"
	case strings.ContainsAny(name, "."):
		return "#fde68a"
	}
	return "#bfdbfe"
}
