package main

import (
	"fmt"
	"html"
	"math"
	"os"
	"strings"
)

// series is one line of a plot.
type series struct {
	name string
	x, y []float64
}

const (
	plotWidth, plotHeight                 = 720, 400
	plotLeft, plotRight, plotTop, plotLow = 80, 20, 50, 60
)

var colours = []string{"#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed"}

// svg is a picture in the making.
type svg struct{ strings.Builder }

func newSVG(width, height int, title string) *svg {
	s := &svg{}
	fmt.Fprintf(s, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="12">
<rect width="%d" height="%d" fill="white"/>
`, width, height, width, height, width, height)
	s.text(float64(width)/2, 24, "middle", title, `font-size="15" font-weight="bold"`)
	return s
}

func (s *svg) text(x, y float64, anchor, text, more string) {
	fmt.Fprintf(s, `<text x="%.1f" y="%.1f" text-anchor="%s" %s>%s</text>`+"\n", x, y, anchor, more, html.EscapeString(text))
}

func (s *svg) line(x1, y1, x2, y2 float64, colour string) {
	fmt.Fprintf(s, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s"/>`+"\n", x1, y1, x2, y2, colour)
}

func (s *svg) save(name string) error {
	s.WriteString("</svg>\n")
	return os.WriteFile(name, []byte(s.String()), 0o644)
}

// axis places values between two pixels.
type axis struct {
	min, max, from, to float64
	log                bool
}

func (a axis) at(v float64) float64 {
	lo, hi := a.min, a.max
	if a.log {
		v, lo, hi = math.Log10(v), math.Log10(lo), math.Log10(hi)
	}
	return a.from + (v-lo)/(hi-lo)*(a.to-a.from)
}

// ticks are round values: powers of ten, or about five steps.
func (a axis) ticks() []float64 {
	var ts []float64
	if a.log {
		for v := math.Pow(10, math.Floor(math.Log10(a.min))); v <= a.max*1.001; v *= 10 {
			if v >= a.min*0.999 {
				ts = append(ts, v)
			}
		}
		return ts
	}
	step := math.Pow(10, math.Floor(math.Log10(a.max/2)))
	for a.max/step > 6 {
		step *= 2
	}
	for v := 0.0; v <= a.max*1.001; v += step {
		ts = append(ts, v)
	}
	return ts
}

func short(v float64) string {
	switch {
	case v >= 1e6:
		return fmt.Sprintf("%gM", v/1e6)
	case v >= 1000:
		return fmt.Sprintf("%gk", v/1000)
	}
	return fmt.Sprintf("%.3g", v)
}

// plotLines draws lines over a logarithmic x axis; the y axis begins at zero.
func plotLines(name, title, xLabel, yLabel string, lines []series) error {
	s := newSVG(plotWidth, plotHeight, title)
	x := axis{min: math.Inf(1), from: plotLeft, to: plotWidth - plotRight, log: true}
	y := axis{from: plotHeight - plotLow, to: plotTop}
	for _, l := range lines {
		for i := range l.x {
			x.min, x.max, y.max = min(x.min, l.x[i]), max(x.max, l.x[i]), max(y.max, l.y[i]*1.1)
		}
	}
	for _, v := range x.ticks() {
		s.line(x.at(v), y.from, x.at(v), y.to, "#e5e7eb")
		s.text(x.at(v), y.from+18, "middle", short(v), "")
	}
	for _, v := range y.ticks() {
		s.line(x.from, y.at(v), x.to, y.at(v), "#e5e7eb")
		s.text(x.from-8, y.at(v)+4, "end", short(v), "")
	}
	s.axes(xLabel, yLabel)
	for k, l := range lines {
		c := colours[k%len(colours)]
		var path []string
		for i := range l.x {
			path = append(path, fmt.Sprintf("%.1f,%.1f", x.at(l.x[i]), y.at(l.y[i])))
			if len(l.x) < 20 {
				fmt.Fprintf(s, `<circle cx="%.1f" cy="%.1f" r="3.5" fill="%s"/>`+"\n", x.at(l.x[i]), y.at(l.y[i]), c)
			}
		}
		fmt.Fprintf(s, `<polyline points="%s" fill="none" stroke="%s" stroke-width="2"/>`+"\n", strings.Join(path, " "), c)
		s.key(k, l.name)
	}
	return s.save(name)
}

func (s *svg) axes(xLabel, yLabel string) {
	s.line(plotLeft, plotTop, plotLeft, plotHeight-plotLow, "#111827")
	s.line(plotLeft, plotHeight-plotLow, plotWidth-plotRight, plotHeight-plotLow, "#111827")
	s.text((plotLeft+plotWidth-plotRight)/2, plotHeight-20, "middle", xLabel, "")
	s.text(0, 0, "middle", yLabel, fmt.Sprintf(`transform="translate(20 %d) rotate(-90)"`, (plotTop+plotHeight-plotLow)/2))
}

func (s *svg) key(k int, name string) {
	y := float64(plotTop + 8 + 18*k)
	fmt.Fprintf(s, `<rect x="%d" y="%.1f" width="12" height="12" fill="%s"/>`+"\n", plotLeft+12, y-10, colours[k%len(colours)])
	s.text(plotLeft+30, y, "start", name, "")
}

// plotBars draws a group of bars for each label; a value of 0 is left out.
func plotBars(name, title, yLabel string, labels, names []string, values [][]float64) error {
	s := newSVG(plotWidth, plotHeight, title)
	y := axis{from: plotHeight - plotLow, to: plotTop + 18*float64(len(names))}
	for _, vs := range values {
		for _, v := range vs {
			y.max = max(y.max, v*1.1)
		}
	}
	for _, v := range y.ticks() {
		s.line(plotLeft, y.at(v), plotWidth-plotRight, y.at(v), "#e5e7eb")
		s.text(plotLeft-8, y.at(v)+4, "end", short(v), "")
	}
	group := float64(plotWidth-plotLeft-plotRight) / float64(len(labels))
	bar := group * 0.8 / float64(len(names))
	for g, label := range labels {
		from := plotLeft + group*float64(g) + group*0.1
		for k := range names {
			if v := values[g][k]; v > 0 {
				x := from + bar*float64(k)
				fmt.Fprintf(s, `<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="%s"/>`+"\n", x, y.at(v), bar*0.92, y.from-y.at(v), colours[k%len(colours)])
				s.text(x+bar*0.46, y.at(v)-4, "middle", short(math.Round(v/1000)*1000), `font-size="11"`)
			}
		}
		s.text(from+group*0.4, y.from+18, "middle", label, "")
	}
	s.axes("", yLabel)
	for k, n := range names {
		s.key(k, n)
	}
	return s.save(name)
}

func escape(s string) string { return html.EscapeString(s) }
