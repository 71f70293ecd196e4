package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"
)

// width is what every line keeps to.
const width = 80

// looks is what a terminal can do.
type looks struct {
	moves  bool // it understands cursor movements
	colour bool
	utf8   bool
}

// lookOf finds out about the process's terminal. NO_COLOR is that of
// no-color.org; a terminal that is called dumb does not move its cursor either.
func lookOf(p *process) looks {
	env := func(name string) string {
		value := ""
		for _, line := range p.environ {
			if v, ok := strings.CutPrefix(line, name+"="); ok {
				value = v
			}
		}
		return value
	}
	term := env("TERM")
	locale := env("LC_ALL")
	if locale == "" {
		locale = env("LC_CTYPE")
	}
	if locale == "" {
		locale = env("LANG")
	}
	locale = strings.ToLower(locale)
	var l looks
	l.moves = isTerminal(p.out) && term != "" && term != "dumb"
	l.colour = l.moves && env("NO_COLOR") == ""
	l.utf8 = strings.Contains(locale, "utf-8") || strings.Contains(locale, "utf8")
	return l
}

// screen shows looks, one after the other, and keeps what the sparklines need.
type screen struct {
	out  io.Writer
	look looks
	json bool

	begun bool
	ended bool
	past  struct{ events, lag, bytes, inFlight []float64 }
}

// sparks is the number of looks that a sparkline shows.
const sparks = 32

// print shows one look and nothing moves.
func (v *screen) print(s *status) error {
	if v.json {
		return writeJSON(v.out, s)
	}
	_, err := io.WriteString(v.out, strings.Join(v.lines(s), "\n")+"\n")
	return err
}

// show replaces the look before. Where that cannot be, it adds one line.
func (v *screen) show(s *status) error {
	v.remember(s)
	var text string
	switch {
	case v.json:
		line, err := json.Marshal(s)
		if err != nil {
			return err
		}
		text = string(line) + "\n"
	case !v.look.moves:
		text = v.brief(s) + "\n"
	default:
		var b strings.Builder
		if !v.begun {
			b.WriteString("\x1b[?25l\x1b[2J") // hide the cursor, clear
		}
		b.WriteString("\x1b[H")
		for _, line := range v.lines(s) {
			b.WriteString(line + "\x1b[K\r\n")
		}
		b.WriteString("\x1b[J")
		text = b.String()
	}
	v.begun = true
	_, err := io.WriteString(v.out, text)
	return err
}

// end gives the terminal back.
func (v *screen) end() {
	if v.begun && !v.ended && v.look.moves && !v.json {
		_, _ = io.WriteString(v.out, "\x1b[?25h") // to a terminal that may be gone
	}
	v.ended = true
}

func (v *screen) remember(s *status) {
	add := func(list *[]float64, value float64) {
		*list = append(*list, value)
		if extra := len(*list) - sparks; extra > 0 {
			*list = (*list)[extra:]
		}
	}
	add(&v.past.events, orZero(s.EventsPerSecond))
	add(&v.past.lag, orZero(s.LagSeconds))
	add(&v.past.bytes, float64(s.Postgres.LagBytes))
	inFlight := 0.0
	if r := s.Relay.Report; r != nil {
		inFlight = float64(r.InFlight)
	}
	add(&v.past.inFlight, inFlight)
}

func orZero(v *float64) float64 {
	if v == nil {
		return 0
	}
	return *v
}

// sparkline draws values from zero up to the largest of them.
func (v *screen) sparkline(values []float64) string {
	steps := []rune("_.-:=+*#")
	if v.look.utf8 {
		steps = []rune("▁▂▃▄▅▆▇█")
	}
	top := 0.0
	for _, x := range values {
		top = max(top, x)
	}
	var b strings.Builder
	for _, x := range values {
		i := 0
		if top > 0 && x > 0 {
			i = min(1+int(x/top*float64(len(steps)-1)), len(steps)-1)
		}
		b.WriteRune(steps[i])
	}
	return b.String()
}

// lines are the whole screen.
func (v *screen) lines(s *status) []string {
	var all []string
	row := func(label, format string, args ...any) {
		all = append(all, clip(fmt.Sprintf("%-13s%s", label, fmt.Sprintf(format, args...))))
	}
	graph := func(label, value string, past []float64) {
		if len(past) > 1 {
			value = fmt.Sprintf("%-34s %s", value, v.sparkline(past))
		}
		row(label, "%s", value)
	}
	verdict, colour := "healthy", "\x1b[32m"
	if !s.Healthy {
		verdict, colour = "NOT HEALTHY", "\x1b[1;31m"
	}
	head := clip(fmt.Sprintf("walrelay  %s.%s > %s  %s  ", s.Database, s.Slot, s.Stream, s.At.Format("15:04:05")))
	if over := utf8.RuneCountInString(head) + len(verdict) - width; over > 0 {
		head = string([]rune(head)[:width-len(verdict)-2]) + "  "
	}
	if v.look.colour {
		verdict = colour + verdict + "\x1b[0m"
	}
	all = append(all, head+verdict)
	for _, p := range s.Problems {
		all = append(all, wrapped("  ! ", p)...)
	}
	all = append(all, "")

	r, p, h := s.Relay.Report, s.Postgres, s.NATS.Holds
	switch {
	case r != nil:
		row("relay", "%s, %s for %s, version %s", s.Role, r.State, span(s.At.Sub(r.Since).Seconds()), r.Version)
	case s.Relay.Address != "":
		row("relay", "does not answer; asked the servers")
	default:
		row("relay", "not asked, no --http-addr; asked the servers")
	}
	graph("throughput", perSecond(s.EventsPerSecond), v.past.events)
	graph("lag, age", age(s), v.past.lag)
	if p.Up {
		graph("lag, log", size(p.LagBytes), v.past.bytes)
	} else {
		row("lag, log", "unknown")
	}
	if r != nil {
		flying := fmt.Sprint(r.InFlight)
		if r.Window > 0 {
			flying += fmt.Sprintf(" of %d", r.Window)
		}
		graph("in flight", flying, v.past.inFlight)
		if r.PublishMode != "" {
			row("publishing", "%s: %s", r.PublishMode, r.PublishWhy)
		}
	}
	row("drained", "%s", drained(s))

	if p.Up {
		active := "nobody reads it"
		if p.SlotActive {
			active = "active"
		}
		row("slot", "%s, %s, confirmed %s, keeps %s", active, orDash(p.WALStatus), position(p.Confirmed), size(p.RetainedBytes))
		row("slot loss", "%s", loss(s))
	} else if s.missing {
		row("slot", "does not exist")
	} else if r != nil && p.Error != "" {
		row("slot", "unknown: %s", p.Error)
	} else {
		row("slot", "unknown: Postgres does not answer")
	}
	switch {
	case h != nil:
		last := "empty"
		if t := h.Stream.LastTime; t != nil {
			last = fmt.Sprintf("last %d, %s ago", h.Stream.LastSequence, span(s.At.Sub(*t).Seconds()))
		}
		row("stream", "%d messages, %s, %s", h.Stream.Messages, size(int64(h.Stream.Bytes)), last)
		if c := h.Checkpoint; c != nil && c.CommitTime.IsZero() {
			row("checkpoint", "sequence %d, no event yet", c.Sequence)
		} else if c != nil {
			row("checkpoint", "sequence %d, at %s, committed %s ago", c.Sequence, c.Position, span(s.At.Sub(c.CommitTime).Seconds()))
		} else {
			row("checkpoint", "none")
		}
		if d := h.DeadLetters; d != nil {
			row("dead letters", "%d in %s", d.Messages, d.Name)
		} else {
			row("dead letters", "no such stream")
		}
	default:
		row("stream", "not read: %s", s.NATS.Error)
	}
	if r != nil {
		row("reconnects", "Postgres %d, NATS %d", r.Reconnects["postgres"], r.Reconnects["nats"])
		if r.Error != "" {
			all = append(all, wrapped("last error   ", r.Error)...)
		}
		if r.Hint != "" {
			all = append(all, wrapped("hint         ", r.Hint)...)
		}
	}
	return all
}

// brief is a look in one line, for logs and dumb terminals.
func (v *screen) brief(s *status) string {
	verdict := "healthy"
	if !s.Healthy {
		verdict = "NOT HEALTHY"
	}
	line := fmt.Sprintf("%s %s %s %s lag %s", s.At.Format("15:04:05"), verdict, s.Role, perSecond(s.EventsPerSecond), age(s))
	if s.Postgres.Up {
		line += " " + size(s.Postgres.LagBytes)
	}
	if h := s.NATS.Holds; h != nil && h.DeadLetters != nil {
		line += fmt.Sprintf(" dead %d", h.DeadLetters.Messages)
	}
	return clip(line)
}

func perSecond(v *float64) string {
	if v == nil {
		return "unknown"
	}
	return fmt.Sprintf("%.0f events/s", *v)
}

func age(s *status) string {
	if s.LagSeconds == nil {
		return "unknown"
	}
	text := span(*s.LagSeconds)
	if *s.LagSeconds > 0 && s.LagBasis != "event" {
		text += " at most"
	}
	return text
}

func drained(s *status) string {
	switch e := s.DrainSeconds; {
	case !s.Postgres.Up:
		return "unknown"
	case e == nil && s.WALPerSecond == nil:
		return "not known yet"
	case e == nil && s.LagBasis == "event" && *s.LagSeconds < 5:
		return "keeps up with what is written"
	case e == nil && !s.Postgres.SlotActive:
		return "no: nobody reads the slot"
	case e == nil && s.EventsPerSecond == nil:
		return "not in sight: the lag does not shrink"
	case e == nil:
		return "not at this rate: the lag does not shrink"
	case *e == 0:
		return "yes"
	default:
		return "in about " + span(*e)
	}
}

func loss(s *status) string {
	safe := s.Postgres.SafeBytes
	switch {
	case s.Postgres.WALStatus == "lost":
		return "lost"
	case safe == nil:
		return "no limit (max_slot_wal_keep_size): it may fill the disk"
	case s.LossSeconds == nil && s.WALPerSecond == nil:
		return fmt.Sprintf("after %s more of log", size(*safe))
	case s.LossSeconds == nil:
		return fmt.Sprintf("after %s more of log, not coming nearer", size(*safe))
	default:
		return fmt.Sprintf("after %s more of log, in about %s", size(*safe), span(*s.LossSeconds))
	}
}

// span writes seconds for humans.
func span(seconds float64) string {
	d := time.Duration(max(seconds, 0) * float64(time.Second))
	if seconds > 100*365*24*3600 {
		return "centuries"
	}
	switch {
	case d == 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		return d.Round(time.Second).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%.0f days", d.Hours()/24)
}

// clip keeps a line to the width, and one line. What servers say may hold
// anything: control characters would be the terminal's.
func clip(line string) string {
	line = plain(line)
	if r := []rune(line); len(r) > width {
		return string(r[:width-3]) + "..."
	}
	return line
}

func plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, text)
}

// wrapped puts text on up to three lines behind a label.
func wrapped(label, text string) []string {
	const most = 3
	var lines []string
	line := ""
	indent := strings.Repeat(" ", utf8.RuneCountInString(label))
	room := width - len(indent)
	for _, word := range strings.Fields(plain(text)) {
		if line != "" && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > room {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	lines = append(lines, line)
	if len(lines) > most {
		lines = lines[:most]
		lines[most-1] += " ..."
	}
	for i := range lines {
		if i == 0 {
			lines[i] = clip(label + lines[i])
		} else {
			lines[i] = clip(indent + lines[i])
		}
	}
	return lines
}
