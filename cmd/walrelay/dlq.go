package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
)

func dlqCommand(p *process) *cobra.Command {
	cmd := group("dlq", "Look at dead letters, publish or remove them",
		`Events that could never be stored are parked in the dead-letter stream. Once what was wrong is
mended they can be published after all, by the relay.`,
		`  walrelay dlq list
  walrelay dlq replay --all --reason too_large`)
	cmd.AddCommand(dlqListCommand(p), dlqShowCommand(p), dlqReplayCommand(p), dlqPurgeCommand(p))
	return cmd
}

// letterFilter chooses dead letters.
type letterFilter struct {
	reasons      []string
	types        []string
	aggregate    string
	since, until string

	kind, id    string // of the aggregate
	from, to    time.Time
	byAggregate bool
}

func (f *letterFilter) addFlags(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&f.reasons, "reason", nil, "only for this reason, such as too_large; repeatable")
	cmd.Flags().StringSliceVar(&f.types, "type", nil, "only of this event type, as EVENT_TYPE or AGGREGATE_TYPE/EVENT_TYPE; repeatable")
	cmd.Flags().StringVar(&f.aggregate, "aggregate", "", "only of this aggregate, as ID or TYPE/ID")
	cmd.Flags().StringVar(&f.since, "since", "", "only parked at this time or later: RFC 3339, a date, or a duration ago such as 24h")
	cmd.Flags().StringVar(&f.until, "until", "", "only parked before this time")
	_ = cmd.RegisterFlagCompletionFunc("reason", cobra.FixedCompletions(reasonNames(), cobra.ShellCompDirectiveNoFileComp))
}

func reasonNames() []string {
	names := make([]string, len(event.Reasons))
	for i, r := range event.Reasons {
		names[i] = string(r)
	}
	return names
}

func (f *letterFilter) check(cmd *cobra.Command) (err error) {
	for _, r := range f.reasons {
		if !slices.Contains(event.Reasons, event.Reason(r)) {
			return event.Fail(event.Usage, "the reasons are "+strings.Join(reasonNames(), ", "), "--reason %q is none", r)
		}
	}
	now := time.Now()
	if f.from, err = parseTime("--since", f.since, now); err != nil {
		return err
	}
	if f.to, err = parseTime("--until", f.until, now); err != nil {
		return err
	}
	f.byAggregate = cmd.Flags().Changed("aggregate")
	f.kind, f.id, err = parseAggregate(f.aggregate, f.byAggregate)
	return err
}

// narrow reports whether the filter leaves out anything.
func (f *letterFilter) narrow() bool {
	return len(f.reasons) > 0 || len(f.types) > 0 || f.byAggregate || !f.from.IsZero() || !f.to.IsZero()
}

func (f *letterFilter) takes(l *publisher.DeadLetter) bool {
	ofType := func(t string) bool {
		kind, typ, both := strings.Cut(t, "/")
		if !both {
			return t == l.EventType
		}
		return kind == l.AggregateType && typ == l.EventType
	}
	switch {
	case len(f.reasons) > 0 && !slices.Contains(f.reasons, string(l.Reason)),
		len(f.types) > 0 && !slices.ContainsFunc(f.types, ofType),
		f.byAggregate && (f.id != l.AggregateID || f.kind != "" && f.kind != l.AggregateType),
		!f.from.IsZero() && l.Parked.Before(f.from), !f.to.IsZero() && !l.Parked.Before(f.to):
		return false
	}
	return true
}

// withLetters runs do with the dead letters. It needs the broker only.
func withLetters(cmd *cobra.Command, cfg *config.Config, do func(context.Context, *publisher.Publisher, *publisher.DeadLetters) error) error {
	connect, err := natsOptions(cfg)
	if err != nil {
		return err
	}
	pub, err := publisher.New(publisher.Options{
		URL: cfg.NATS.URL.Reveal(), Connect: connect, Stream: cfg.Stream.Name, DeadLetters: cfg.Stream.DeadLetters,
		Bucket: cfg.Stream.CheckpointBucket, Subjects: []string{">"}, // nothing is published
	})
	if err != nil {
		return err
	}
	letters, err := pub.OpenDeadLetters(cmd.Context())
	if err != nil {
		return err
	}
	defer letters.Close()
	return do(cmd.Context(), pub, letters)
}

// letter is a dead letter as JSON.
type letter struct {
	ID            string       `json:"id"`
	Table         string       `json:"table"`
	AggregateType string       `json:"aggregate_type"`
	AggregateID   string       `json:"aggregate_id"`
	EventType     string       `json:"event_type"`
	Subject       string       `json:"subject"`
	Position      string       `json:"position"`
	Reason        event.Reason `json:"reason"`
	Detail        string       `json:"detail"`
	Parked        time.Time    `json:"parked"`
	Sequence      uint64       `json:"sequence"`
	Bytes         int          `json:"bytes"` // of the body
	Omitted       bool         `json:"body_omitted"`
}

func letterOf(l *publisher.DeadLetter) letter {
	return letter{
		ID: l.ID, Table: l.Table, AggregateType: l.AggregateType, AggregateID: l.AggregateID, EventType: l.EventType,
		Subject: l.EventSubject, Position: l.Position.String(), Reason: l.Reason, Detail: l.Detail,
		Parked: l.Parked.UTC(), Sequence: l.Sequence, Bytes: len(l.Body) + l.Omitted, Omitted: l.Omitted > 0,
	}
}

var lookers = []config.Group{config.Postgres, config.Slot, config.Publications, config.Tables, config.Broker, config.Streams}

func dlqListCommand(p *process) *cobra.Command {
	var f letterFilter
	cmd := &cobra.Command{
		Use: "list [flags]", Short: "List dead letters, oldest first",
		Long: `Lists the events in the dead-letter stream, in the order in which they were parked. ID or
POSITION names one for the other commands.`,
		Example: `  walrelay dlq list
  walrelay dlq list --reason too_large --since 24h -o json`,
		Args: atMost(0),
	}
	f.addFlags(cmd)
	output := outputFlag(cmd)
	return command(p, cmd, []config.Group{config.Broker, config.Streams}, func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
		if err := f.check(cmd); err != nil {
			return err
		}
		return withLetters(cmd, cfg, func(ctx context.Context, _ *publisher.Publisher, letters *publisher.DeadLetters) error {
			list := newLetterList(cmd.OutOrStdout(), *output)
			for l, err := range letters.All(ctx) {
				if err != nil {
					return err
				}
				if !f.takes(l) {
					continue
				}
				if err := list.add(letterOf(l)); err != nil {
					return err
				}
			}
			if err := list.end(); err != nil {
				return err
			}
			if *output == formTable {
				cmd.PrintErrf("%d dead letters\n", list.n)
			}
			return nil
		})
	})
}

// letterList writes a list as it comes, so that it may be longer than memory.
type letterList struct {
	w    io.Writer
	form form
	n    int
	rows [][]string
}

// listRows is how many rows are aligned with each other.
const listRows = 500

var letterHead = []string{"PARKED", "REASON", "AGGREGATE", "TYPE", "ID", "TABLE", "POSITION", "SIZE"}

func newLetterList(w io.Writer, f form) *letterList {
	return &letterList{w: w, form: f, rows: [][]string{letterHead}}
}

func (t *letterList) add(l letter) error {
	t.n++
	if t.form == formJSON {
		open := ",\n  "
		if t.n == 1 {
			open = "[\n  "
		}
		text, err := json.Marshal(l)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(t.w, "%s%s", open, text)
		return err
	}
	aggregate := l.AggregateID
	if l.AggregateType != "" {
		aggregate = l.AggregateType + "/" + aggregate
	}
	t.rows = append(t.rows, []string{
		l.Parked.Format(time.RFC3339), string(l.Reason), orDash(head(aggregate)), orDash(head(l.EventType)),
		orDash(head(l.ID)), orDash(head(l.Table)), l.Position, size(int64(l.Bytes)),
	})
	if len(t.rows) < listRows {
		return nil
	}
	rows := t.rows
	t.rows = nil
	return writeTable(t.w, rows)
}

func (t *letterList) end() error {
	if t.form == formJSON {
		text := "\n]\n"
		if t.n == 0 {
			text = "[]\n"
		}
		_, err := io.WriteString(t.w, text)
		return err
	}
	return writeTable(t.w, t.rows)
}

func dlqShowCommand(p *process) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show ID [flags]", Short: "Show a dead letter with its headers and body",
		Long: `Shows a dead letter: why it was parked, what the last try to publish it came to, its headers and its body. ID
is the event's id, or its position as dlq list shows it; of several with one id the oldest is shown.`,
		Example: `  walrelay dlq show 0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d
  walrelay dlq show 1:0/16B3748:0/16B3700:0 -o json`,
		Args: exactly("name one dead letter by its id or position"),
	}
	output := outputFlag(cmd)
	return command(p, cmd, []config.Group{config.Broker, config.Streams}, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		return withLetters(cmd, cfg, func(ctx context.Context, pub *publisher.Publisher, letters *publisher.DeadLetters) error {
			for l, err := range letters.All(ctx) {
				if err != nil {
					return err
				}
				if !named(l, args[0]) {
					continue
				}
				fate, err := fateOf(ctx, pub, l)
				if err != nil {
					return err
				}
				return writeLetter(cmd.OutOrStdout(), l, fate, *output)
			}
			return noSuchLetter(args[0], cfg)
		})
	})
}

func named(l *publisher.DeadLetter, id string) bool {
	return id != "" && (l.ID == id || l.Position.String() == id)
}

func noSuchLetter(id string, cfg *config.Config) error {
	return event.Fail(event.Precondition, "walrelay dlq list shows what there is; --stream and --dead-letter-stream say where",
		"no dead letter of stream %q has the id or position %.100q", cfg.Stream.Name, id)
}

// fateOf is what became of the last try to publish a letter; nil without one.
func fateOf(ctx context.Context, pub *publisher.Publisher, l *publisher.DeadLetter) (*publisher.Fate, error) {
	replays, err := pub.OpenReplays(ctx)
	if err != nil {
		return nil, err
	}
	defer replays.Close()
	f, noted, _, err := replays.Fate(ctx, l)
	if err != nil || !noted {
		return nil, err
	}
	return &f, nil
}

func writeLetter(w io.Writer, l *publisher.DeadLetter, fate *publisher.Fate, f form) error {
	v := struct {
		letter
		LastTry *publisher.Fate `json:"last_try,omitempty"`
		Headers []previewHeader `json:"headers"`
		Body    *string         `json:"body,omitempty"`
		Base64  string          `json:"body_base64,omitempty"` // when it is no text
	}{letter: letterOf(l), LastTry: fate, Headers: []previewHeader{}}
	for _, h := range l.Headers {
		v.Headers = append(v.Headers, previewHeader{h.Name, string(h.Value)})
	}
	text := utf8.Valid(l.Body)
	switch {
	case l.Omitted > 0:
	case text:
		body := string(l.Body)
		v.Body = &body
	default:
		v.Base64 = base64.StdEncoding.EncodeToString(l.Body)
	}
	if f == formJSON {
		return writeJSON(w, v)
	}
	rows := [][]string{
		{"id", orDash(printable(v.ID))},
		{"table", orDash(printable(v.Table))},
		{"aggregate", orDash(printable(strings.Trim(v.AggregateType+"/"+v.AggregateID, "/")))},
		{"type", orDash(printable(v.EventType))},
		{"subject", orDash(printable(v.Subject))},
		{"position", v.Position},
		{"parked", v.Parked.Format(time.RFC3339Nano)},
		{"reason", string(v.Reason) + ": " + printable(v.Detail)},
	}
	if fate != nil {
		rows = append(rows, []string{"last try", strings.TrimSpace(fmt.Sprintf("run %s, %s %s %s", fate.Run, fate.State, fate.Reason, printable(fate.Detail)))})
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	for _, h := range v.Headers {
		fmt.Fprintf(w, "  %s: %s\n", h.Name, printable(h.Value))
	}
	var err error
	switch {
	case l.Omitted > 0:
		_, err = fmt.Fprintf(w, "the body of %s was left out, the row has it\n", size(int64(l.Omitted)))
	case !text:
		_, err = fmt.Fprintf(w, "body of %s, no text: -o json has it\n", size(int64(len(l.Body))))
	default:
		_, err = fmt.Fprintf(w, "\n%s\n", strings.Map(func(r rune) rune {
			if r == '\n' || r == '\t' {
				return r
			}
			return []rune(printable(string(r)))[0]
		}, string(l.Body)))
	}
	return err
}

// picked chooses dead letters: those with the ids or positions, or all that the filter takes. It
// keeps neither bodies nor headers.
func picked(ctx context.Context, cfg *config.Config, letters *publisher.DeadLetters, ids []string, f *letterFilter) ([]*publisher.DeadLetter, error) {
	found := map[string]bool{}
	var all []*publisher.DeadLetter
	for l, err := range letters.All(ctx) {
		if err != nil {
			return nil, err
		}
		if len(ids) > 0 {
			i := slices.IndexFunc(ids, func(id string) bool { return named(l, id) })
			if i < 0 {
				continue
			}
			found[ids[i]] = true
		}
		if !f.takes(l) {
			continue
		}
		l.Headers, l.Body = nil, nil
		all = append(all, l)
	}
	for _, id := range ids {
		if !found[id] {
			return nil, noSuchLetter(id, cfg)
		}
	}
	return all, nil
}

// whichLetters refuses a command that does not say which.
func whichLetters(args []string, all bool, f *letterFilter) error {
	switch {
	case len(args) == 0 && !all && !f.narrow():
		return event.Fail(event.Usage, "name dead letters by id or position, or use --all, with filters if need be", "it is not said which dead letters")
	case len(args) == 0 && !all:
		return event.Fail(event.Usage, "add --all to take all that the filters let through", "it is not said which dead letters")
	case len(args) > 0 && all:
		return event.Fail(event.Usage, "give one of them", "dead letters are named, and --all is given")
	}
	return nil
}

func dlqReplayCommand(p *process) *cobra.Command {
	var f letterFilter
	var all, keepID, yes bool
	cmd := &cobra.Command{
		Use: "replay [ID…] [flags]", Short: "Publish the events of dead letters after all",
		Long: `Has the relay publish events of the dead-letter stream, oldest first, and waits until it has
dealt with them. An event is read again from its row when that is there, and mapped by the relay as it
is configured now, so that a mended row, mapping or limit helps; else what the dead letter holds is
published. Once it is stored the relay removes the dead letter. One that is refused again stays.

The events come behind all that is in the stream: out of order, unless their aggregate was held
with --on-poison park-aggregate. Then replay all of it; later events of it go on once the last is stored.

--subject on the command line sends them to another subject than the relay's mapping does.
Outbox-Id is the event's own. Nats-Msg-Id has the run's name behind it, so that the dedup
window does not swallow it; --keep-id leaves it as it was.`,
		Example: `  walrelay dlq replay 0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d
  walrelay dlq replay --all --reason subject --subject 'mended.{aggregate_type}.{event_type}' --yes`,
	}
	cmd.Flags().BoolVar(&all, "all", false, "all dead letters that the filters let through")
	f.addFlags(cmd)
	cmd.Flags().BoolVar(&keepID, "keep-id", false, "leave Nats-Msg-Id as it was")
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	output := outputFlag(cmd)
	return command(p, cmd, append(lookers, config.Logging), func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		if err := errors.Join(f.check(cmd), whichLetters(args, all, &f)); err != nil {
			return err
		}
		r := redelivery{output: *output, keepID: keepID, run: newRun(time.Now())}
		if cmd.Flags().Changed("subject") {
			r.subject = cfg.Subject
			if err := outbox.CheckSubject(r.subject); err != nil {
				return err
			}
		}
		e, err := newEnds(cfg, nil)
		if err != nil {
			return err
		}
		return withLetters(cmd, cfg, func(ctx context.Context, _ *publisher.Publisher, letters *publisher.DeadLetters) error {
			chosen, err := picked(ctx, cfg, letters, args, &f)
			if err != nil {
				return err
			}
			d, err := openDesk(ctx, e)
			if err != nil {
				return err
			}
			defer d.close()
			if len(chosen) > 0 {
				n := fmt.Sprintf("%d dead letters", len(chosen))
				err := consent{
					ask: "publish the events of " + n + ", behind what is in stream " + cfg.Stream.Name + "?", hint: "add --yes to do it without being asked",
					unasked: "dlq replay asks before it publishes " + n + ", and this is no terminal", refused: "nothing is done",
				}.get(cmd, isTerminal(p.in), yes)
				if err != nil {
					return err
				}
			}
			r.desk, r.letters = d, letters
			return r.perform(cmd, p, chosen)
		})
	})
}

// redelivery is one dlq replay.
type redelivery struct {
	*desk
	letters *publisher.DeadLetters
	output  form
	run     string
	keepID  bool
	subject string
}

// told is what became of a letter.
type told struct {
	letter
	Fate   string `json:"fate"`
	Reason string `json:"why,omitempty"`
}

func (r *redelivery) perform(cmd *cobra.Command, p *process, chosen []*publisher.DeadLetter) error {
	log, _ := newLogger(p, r.cfg.Log)
	show := &progress{w: p.err, log: log, terminal: isTerminal(p.err), began: time.Now(), name: "dead letters", done: "stored"}
	results := []told{}
	job := operate.Redelivery[*publisher.DeadLetter]{
		Letters: chosen,
		Content: r.content,
		Emit:    func(ctx context.Context, contents [][]byte) error { return r.emit(ctx, contents, nil) },
		Fate:    r.fate,
		Relay:   r.relayed,
		Tell: func(l *publisher.DeadLetter, f operate.Fate) {
			if r.output == formJSON || f != (operate.Fate{State: operate.Stored}) {
				results = append(results, told{letterOf(l), f.State.String(), f.Reason})
			}
		},
		Progress: show.tell,
	}
	done, err := job.Run(cmd.Context())
	show.end()
	if werr := r.write(cmd.OutOrStdout(), results, done); werr != nil && err == nil {
		err = werr
	}
	if err != nil {
		return err
	}
	switch {
	case done.Awaited > 0:
		return event.Fail(event.Undrained, "start walrelay run: it deals with them first; walrelay dlq list shows what is left then",
			"%d dead letters wait in the log, because no relay reads slot %q", done.Awaited, r.cfg.Slot)
	case done.Refused+done.Useless > 0:
		return event.Fail(event.Precondition, "mend what the reasons say, then replay again; walrelay dlq show tells more of one",
			"%d dead letters were not stored and are left as they are", done.Refused+done.Useless)
	}
	return nil
}

func (r *redelivery) write(w io.Writer, results []told, done operate.Redelivered) error {
	if r.output == formJSON {
		return writeJSON(w, struct {
			Run     string `json:"run"`
			Stored  int    `json:"stored"`
			Refused int    `json:"refused"`
			Useless int    `json:"not_possible"`
			Gone    int    `json:"gone"`
			Waiting int    `json:"waiting"`
			Letters []told `json:"letters"`
		}{r.run, done.Stored, done.Refused, done.Useless, done.Vanished, done.Awaited, results})
	}
	for _, t := range results {
		line := fmt.Sprintf("%s  %s  %s", t.Fate, orDash(head(t.ID)), t.Position)
		if t.Reason != "" {
			line += "  " + printable(t.Reason)
		}
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	line := fmt.Sprintf("run %s: %d stored, %d refused", r.run, done.Stored, done.Refused)
	for _, more := range []struct {
		n    int
		text string
	}{{done.Useless, "not possible"}, {done.Vanished, "gone meanwhile"}, {done.Awaited, "waiting for a relay"}} {
		if more.n > 0 {
			line += fmt.Sprintf(", %d %s", more.n, more.text)
		}
	}
	_, err := fmt.Fprintln(w, line)
	return err
}

// content makes the message for the relay: of the row as it is now, or else of
// what the dead letter holds. It is nil when that is gone.
func (r *redelivery) content(ctx context.Context, chosen *publisher.DeadLetter) ([]byte, error) {
	l, err := r.letters.At(ctx, chosen.Sequence)
	if err != nil || l == nil {
		return nil, err
	}
	c := outbox.Replay{Run: r.run, KeepID: r.keepID, Subject: r.subject, Letter: l.Subject}
	for _, h := range l.Headers {
		if h.Name == event.HeaderTime {
			c.Time, _ = time.Parse(time.RFC3339Nano, string(h.Value)) // else it is not known
		}
	}
	rows, err := r.rows(ctx, l)
	if err != nil {
		return nil, err
	}
	lacking := func(format string, args ...any) ([]byte, error) {
		return nil, &operate.Unusable{Err: fmt.Errorf(format, args...)}
	}
	ofTable := "table " + l.Table
	_, known := r.table(l.Table)
	switch {
	case len(rows) == 1:
		c.Row = outbox.ReplayOf(rows[0])
	case l.Omitted == 0 && !known && l.ID == "" && l.EventSubject == "":
		c.Message = &outbox.ReplayMessage{Content: l.Body} // a logical message that nobody could read
	case l.Complete():
		c.Event = storedEvent(l)
	case !known:
		return lacking("the dead letter lacks part of the event, and %s is not given with --table", ofTable)
	case len(rows) > 1:
		return lacking("the dead letter lacks part of the event, and several rows of %s have its id %.100q", ofTable, l.ID)
	case l.Omitted > 0:
		return lacking("the body of %d bytes was left out of the dead letter, and %s has no row with id %.100q any more", l.Omitted, ofTable, l.ID)
	default:
		return lacking("the headers or part of the id were left out of the dead letter, and %s has no row with id %.100q", ofTable, l.ID)
	}
	return c.Sign(r.key)
}

func (r *redelivery) rows(ctx context.Context, l *publisher.DeadLetter) ([]*event.Record, error) {
	t, ok := r.table(l.Table)
	if !ok || l.ID == "" {
		return nil, nil
	}
	return outbox.Rows(ctx, r.conn, t, outbox.Selection{IDs: []string{l.ID}, Limit: 2})
}

func storedEvent(l *publisher.DeadLetter) *outbox.ReplayEvent {
	e := &outbox.ReplayEvent{
		ID: l.ID, Table: l.Table, Subject: l.EventSubject,
		AggregateType: l.AggregateType, AggregateID: l.AggregateID, EventType: l.EventType, Body: l.Body,
	}
	for _, h := range l.Headers {
		e.Headers = append(e.Headers, outbox.ReplayHeader{Name: h.Name, Value: h.Value})
	}
	return e
}

func (r *redelivery) fate(ctx context.Context, l *publisher.DeadLetter) (operate.Fate, error) {
	f, noted, there, err := r.replays.Fate(ctx, l)
	switch {
	case err != nil || !noted || f.Run != r.run:
		return operate.Fate{}, err
	case f.State == publisher.FateRefused:
		return operate.Fate{State: operate.Refused, Reason: strings.Trim(string(f.Reason)+": "+f.Detail, ": ")}, nil
	case f.State == publisher.FateStored && (!there || f.Detail != ""):
		return operate.Fate{State: operate.Stored, Reason: f.Detail}, nil
	}
	return operate.Fate{}, nil
}

func dlqPurgeCommand(p *process) *cobra.Command {
	var f letterFilter
	var all, yes bool
	cmd := &cobra.Command{
		Use: "purge [ID…] [flags]", Short: "Remove dead letters for good",
		Long: `Removes dead letters without publishing their events. What is in no table any more is then
gone for good. With --on-poison park-aggregate, an aggregate without dead letters is no
longer held: its later events are published, without those that were removed.`,
		Example: `  walrelay dlq purge 0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d
  walrelay dlq purge --all --until 720h --yes`,
	}
	cmd.Flags().BoolVar(&all, "all", false, "all dead letters that the filters let through")
	f.addFlags(cmd)
	cmd.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return command(p, cmd, []config.Group{config.Broker, config.Streams}, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		if err := errors.Join(f.check(cmd), whichLetters(args, all, &f)); err != nil {
			return err
		}
		return withLetters(cmd, cfg, func(ctx context.Context, _ *publisher.Publisher, letters *publisher.DeadLetters) error {
			chosen, err := picked(ctx, cfg, letters, args, &f)
			if err != nil {
				return err
			}
			aggregates := map[string]bool{}
			for _, l := range chosen {
				if key := l.Aggregate(); key != "" {
					aggregates[key] = true
				}
			}
			if len(chosen) > 0 {
				n := fmt.Sprintf("%d dead letters of %d aggregates", len(chosen), len(aggregates))
				err := consent{
					ask:  "remove " + n + " for good? Events that are in no table any more are lost, and held aggregates go on without them",
					hint: "add --yes to do it without being asked", unasked: "dlq purge asks before it removes " + n + ", and this is no terminal", refused: "nothing is done",
				}.get(cmd, isTerminal(p.in), yes)
				if err != nil {
					return err
				}
			}
			for i, l := range chosen {
				if err := letters.Remove(ctx, l); err != nil {
					return event.Fail(event.Precondition, "does the stream permit deletes? May the user publish to $JS.API.STREAM.MSG.DELETE.*?", "%d of %d dead letters removed: %w", i, len(chosen), err)
				}
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters removed\n", len(chosen))
			return err
		})
	})
}
