package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/walrelay/walrelay/test/harness"
)

// results is all that was measured, as it goes into results.json.
type results struct {
	Machine  machine   `json:"machine"`
	Began    string    `json:"began"`
	Rounds   int       `json:"rounds"`
	Drains   []drains  `json:"drains,omitempty"`
	Start    drains    `json:"start,omitzero"`
	Steady   []paced   `json:"steady,omitempty"`
	Memory   []state   `json:"memory,omitempty"`
	Growth   []growth  `json:"growth,omitempty"`
	Stages   []stage   `json:"stages,omitempty"`
	Shards   *sharding `json:"shards,omitempty"`
	Sync     drains    `json:"sync,omitzero"`
	Measures []row     `json:"measures"`
}

type machine struct {
	CPU      string `json:"cpu"`
	Cores    int    `json:"cores"`
	Kernel   string `json:"kernel"`
	Go       string `json:"go"`
	Versions string `json:"servers"`
	Load     string `json:"load"` // when the run began
}

func thisMachine(versions string) machine {
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return machine{
		CPU: procLine("/proc/cpuinfo", "model name"), Cores: runtime.NumCPU(), Kernel: strings.TrimSpace(string(kernel)),
		Go: runtime.Version(), Versions: versions, Load: load(),
	}
}

// row is one line of the table: a measure with what is wanted of it.
type row struct {
	Measure string  `json:"measure"`
	Got     string  `json:"got"`
	Value   float64 `json:"value"`
	Unit    string  `json:"unit"`
	Target  float64 `json:"target,omitempty"`
	Stretch float64 `json:"stretch,omitempty"`
	AtMost  bool    `json:"at_most,omitempty"` // a smaller value is better
}

func (r row) verdict() string {
	better := func(limit float64) bool { return r.AtMost && r.Value <= limit || !r.AtMost && r.Value >= limit }
	switch {
	case r.Target == 0:
		return ""
	case better(r.Stretch):
		return "stretch"
	case better(r.Target):
		return "met"
	}
	return "MISSED"
}

// measures makes the table of what was measured.
func (r *results) measures() {
	r.Measures = nil
	for _, d := range r.Drains {
		r.drainRows(d)
	}
	if len(r.Start.Runs) > 0 {
		r.add(row{
			Measure: "first event stored after start", Value: r.Start.median(theRelay, func(r run) float64 { return ms(r.First) }),
			Unit: "ms", Target: 100, Stretch: 50, AtMost: true,
		})
	}
	if len(r.Steady) > 0 {
		r.steadyRows()
	}
	for _, s := range r.Memory {
		r.add(row{
			Measure: "memory, " + s.Name, Value: mb(s.Memory.Peak), Unit: "MB", Target: 20, Stretch: 14, AtMost: true,
			Got: fmt.Sprintf("%.1f MB at the end, %.1f MB anonymous", mb(s.Memory.RSS), mb(s.Memory.Anon)),
		})
	}
	for _, g := range r.Growth {
		r.growthRow(g)
	}
	if len(r.Sync.Runs) > 0 {
		r.syncRow()
	}
	if r.Shards != nil {
		r.Measures = append(r.Measures, r.Shards.rows()...)
	}
}

func (r *results) add(m row) { r.Measures = append(r.Measures, m) }

func (r *results) drainRows(d drains) {
	limits := map[int][2]float64{1: {1.8, 2.2}, 10: {1.15, 1.3}, 1000: {1.05, 1.2}}[d.Backlog.Rows]
	name := fmt.Sprintf("drain, %s a transaction: ", count(d.Backlog.Rows))
	against := func(what, contender string, target, stretch float64) {
		if len(d.of(contender)) == 0 {
			return
		}
		r.add(row{
			Measure: name + what, Value: d.ratio(contender, run.Rate), Unit: "×", Target: target, Stretch: stretch,
			Got: fmt.Sprintf("%.0fk/s to %.0fk/s; %.2f after the start", d.median(theRelay, run.Rate)/1000,
				d.median(contender, run.Rate)/1000, d.ratio(contender, run.Steady)),
		})
	}
	against("to pg_recvlogical", recvlogical, limits[0], limits[1])
	against("to JetStream publish alone", publishOnly, 0.95, 1.05)
	against("to a polling relay", polling, 2.7, 3.3)
	for _, bin := range d.Builds {
		against("to "+filepath.Base(bin), bin, 0, 0)
	}
	r.add(row{
		Measure: name + "processor time an event", Value: d.median(theRelay, run.PerEvent), Unit: "µs", Target: 1.2, Stretch: 0.7, AtMost: true,
		Got: fmt.Sprintf("NATS %.1f, Postgres %.1f", d.median(theRelay, run.natsPerEvent), d.median(theRelay, run.postgresPerEvent)),
	})
}

func (r *results) steadyRows() {
	p50 := func(p paced) float64 { return ms(p.P50) }
	p99 := func(p paced) float64 { return ms(p.P99) }
	core := func(p paced) float64 { return 100 * p.Core }
	got := func(v func(paced) float64) string {
		return fmt.Sprintf("%.3f ms to %.3f ms", steady(r.Steady, theRelay, v), steady(r.Steady, listener, v))
	}
	name := fmt.Sprintf("%s tx/s: ", count(rate))
	r.add(row{Measure: name + "p50 to a bare listener", Value: steadyRatio(r.Steady, p50), Unit: "×", Target: 1.2, Stretch: 1, AtMost: true, Got: got(p50)})
	r.add(row{Measure: name + "p99 to a bare listener", Value: steadyRatio(r.Steady, p99), Unit: "×", Target: 1.3, Stretch: 1, AtMost: true, Got: got(p99)})
	r.add(row{
		Measure: name + "processor", Value: steady(r.Steady, theRelay, core), Unit: "% of a core", Target: 10, Stretch: 8, AtMost: true,
		Got: fmt.Sprintf("the listener %.1f", steady(r.Steady, listener, core)),
	})
}

// growthRow tells how much more an event, or a byte of it, costs at its dearest than at the median.
func (r *results) growthRow(g growth) {
	_, wall, cpu := g.costs()
	r.add(row{
		Measure: "dearest to median cost as the " + g.What + " grows", Value: slices.Max(wall) / median(wall), Unit: "×",
		Got: fmt.Sprintf("relay's processor time %.2f", slices.Max(cpu)/median(cpu)),
	})
}

// costs are time and processor time an event in µs, or a kilobyte where the
// payload grows, from the first stored event on.
func (g growth) costs() (x, wall, cpu []float64) {
	for _, d := range g.Points {
		units := 1.0
		v := float64(d.Backlog.Events)
		switch g.What {
		case "transaction":
			v = float64(d.Backlog.Rows)
		case "payload":
			v = float64(d.Backlog.Size)
			units = (v + headerSize) / 1000
		}
		x = append(x, v)
		wall = append(wall, d.median(theRelay, func(r run) float64 { return 1e6 / r.Steady() / units }))
		cpu = append(cpu, d.median(theRelay, func(r run) float64 { return r.PerEvent() / units }))
	}
	return x, wall, cpu
}

// headerSize is about what a message has beside its payload, which a cost a byte has to count.
const headerSize = 400

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// table writes the measures for a human.
func (r *results) table(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "measure\tgot\ttarget\tstretch\t\tdetail")
	for _, m := range r.Measures {
		sign := "≥"
		if m.AtMost {
			sign = "≤"
		}
		target, stretch := "", ""
		if m.Target != 0 {
			target, stretch = fmt.Sprintf("%s %g", sign, m.Target), fmt.Sprintf("%s %g", sign, m.Stretch)
		}
		fmt.Fprintf(t, "%s\t%.2f %s\t%s\t%s\t%s\t%s\n", m.Measure, m.Value, m.Unit, target, stretch, m.verdict(), m.Got)
	}
	for _, s := range r.Stages {
		fmt.Fprintf(t, "processor time: %s\t%.0f %%\t\t\t\t\n", s.Name, 100*s.Share)
	}
	t.Flush()
}

// save writes results.json and the plots.
func (r *results) save(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(under(dir, "results.json"), append(b, '\n'), 0o644); err != nil {
		return err
	}
	var text strings.Builder
	r.table(&text)
	if err := os.WriteFile(under(dir, "table.txt"), []byte(text.String()), 0o644); err != nil {
		return err
	}
	return r.plot(dir)
}

func (r *results) plot(dir string) error {
	if len(r.Drains) > 0 {
		names := []string{theRelay, recvlogical, publishOnly, polling}
		var labels []string
		var values [][]float64
		for _, d := range r.Drains {
			labels = append(labels, count(d.Backlog.Rows)+" rows a transaction")
			var vs []float64
			for _, n := range names {
				vs = append(vs, d.median(n, run.Rate))
			}
			values = append(values, vs)
		}
		legend := []string{"walrelay", "pg_recvlogical to /dev/null", "JetStream publish alone", "polling relay"}
		if err := plotBars(under(dir, "drain.svg"), "Drain of a backlog, medians", "events a second", labels, legend, values); err != nil {
			return err
		}
	}
	if r.Shards != nil {
		if err := r.Shards.plot(dir); err != nil {
			return err
		}
	}
	if len(r.Steady) > 0 {
		if err := r.plotLatency(dir); err != nil {
			return err
		}
	}
	for _, g := range r.Growth {
		x, wall, cpu := g.costs()
		unit := "µs an event"
		if g.What == "payload" {
			unit = "µs a kilobyte of message"
		}
		xLabel := map[string]string{"backlog": "events in the backlog", "transaction": "rows a transaction", "payload": "bytes of payload"}[g.What]
		err := plotLines(under(dir, "growth-"+g.What+".svg"), "Cost as the "+g.What+" grows", xLabel, unit, []series{
			{"time", x, wall}, {"relay's processor time", x, cpu},
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// plotLatency draws the latencies of all rounds up to each percentile.
func (r *results) plotLatency(dir string) error {
	var lines []series
	for _, c := range []string{theRelay, listener} {
		var all []time.Duration
		for _, p := range r.Steady {
			if p.Contender == c {
				all = append(all, p.Latencies...)
			}
		}
		slices.Sort(all)
		l := series{name: map[string]string{theRelay: "walrelay", listener: "bare listener"}[c]}
		// The axis is the share of slower events, 1 in x, so that the tail has room.
		for x := 1.2; x <= 1000; x *= 1.1 {
			l.x = append(l.x, x)
			l.y = append(l.y, max(ms(harness.Percentile(all, 1-1/x)), 0))
		}
		lines = append(lines, l)
	}
	return plotLines(under(dir, "latency.svg"), fmt.Sprintf("COMMIT to stored at %s tx/s", count(rate)),
		"one event in so many is slower", "ms", lines)
}
