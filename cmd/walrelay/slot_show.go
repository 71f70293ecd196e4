package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/slotmgr"
)

// shown is what slot show knows, and the form of its JSON.
type shown struct {
	slotmgr.Detail
	Database string         `json:"-"` // that we are connected to
	Stream   *shownStream   `json:"stream"`
	Findings event.Findings `json:"findings"`
}

// shownStream is the other end; Error says why it is not known.
type shownStream struct {
	Name       string                      `json:"name"`
	Error      string                      `json:"error,omitempty"`
	Sequence   uint64                      `json:"last_sequence"`
	Messages   uint64                      `json:"messages"`
	Checkpoint *publisher.StoredCheckpoint `json:"checkpoint"`
	Distance   *operate.Distance           `json:"distance"`
}

func slotShowCommand(p *process) *cobra.Command {
	cmd := &cobra.Command{
		Use: "show [name] [flags]", Short: "Show everything about one slot",
		Long: `Shows the slot, who reads it, what log Postgres keeps for it and why, how far the
relay and the stream are, and says in plain words what is wrong and what to do. It
changes nothing, and works while the relay runs.`,
		Example: `  walrelay slot show
  walrelay slot show orders -o json`,
		Args: atMost(1),
	}
	output := outputFlag(cmd)
	return command(p, cmd, bothEnds, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		name, err := slotOf(cmd, args, cfg)
		if err != nil {
			return err
		}
		return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
			s, err := show(ctx, cfg, conn, name)
			if err != nil {
				return err
			}
			if *output == formJSON {
				return writeJSON(cmd.OutOrStdout(), s)
			}
			return s.write(cmd.OutOrStdout(), time.Now())
		})
	})
}

func show(ctx context.Context, cfg *config.Config, conn *pgx.Conn, name string) (*shown, error) {
	d, err := slotmgr.Show(ctx, conn, name)
	if err != nil {
		return nil, err
	}
	s := &shown{Detail: d, Findings: event.Findings{}}
	if s.Database, err = currentDatabase(ctx, conn); err != nil {
		return nil, err
	}
	s.Findings = append(s.Findings, d.Findings(s.Database)...)
	if d.Plugin != slotmgr.Plugin || d.Slot.Database != s.Database {
		return s, nil // no relay reads it
	}
	s.Stream = &shownStream{Name: cfg.Stream.Name}
	survey, err := surveyOf(ctx, cfg, d.Slot)
	if err != nil {
		s.Stream.Error = err.Error()
		s.Findings = append(s.Findings, event.Finding{Name: "stream", Level: event.WARN, Detail: "the stream is not known: " + err.Error(), Remedy: event.HintOf(err)})
		return s, nil
	}
	s.Stream.Sequence, s.Stream.Messages, s.Stream.Checkpoint = survey.Sequence, survey.Messages, survey.Checkpoint
	standing := operate.Standing{WALEnd: d.WALEnd, Confirmed: d.ConfirmedFlush, Active: d.Active, StreamSequence: survey.Sequence}
	if c := survey.Checkpoint; c != nil && c.Slot == name && c.Database == s.Database {
		standing.Known, standing.Confirm, standing.Sequence, standing.Written = true, c.Confirm, c.Sequence, c.Written
	}
	distance := standing.Distance()
	s.Stream.Distance = &distance
	if !d.Lost() && survey.Err != nil {
		s.Findings = append(s.Findings, operate.Start(survey.Resume, nil, survey.Err))
	}
	s.Findings = append(s.Findings, standing.Findings(time.Now())...)
	return s, nil
}

// surveyOf looks at the stream as a relay of the slot would.
func surveyOf(ctx context.Context, cfg *config.Config, slot slotmgr.Slot) (publisher.Survey, error) {
	e, err := newEnds(cfg, nil)
	if err != nil {
		return publisher.Survey{}, err
	}
	origin, err := e.origin(ctx, slot)
	if err != nil {
		return publisher.Survey{}, err
	}
	return e.pub.Survey(ctx, origin)
}

func (s *shown) write(w io.Writer, now time.Time) error {
	var rows [][]string
	row := func(name, format string, args ...any) {
		rows = append(rows, []string{name + ":", fmt.Sprintf(format, args...)})
	}
	kind := s.SlotType
	if s.Plugin != "" {
		kind += ", plugin " + s.Plugin + ", database " + s.Slot.Database
	}
	for _, is := range []struct {
		flag bool
		text string
	}{
		{s.Temporary, "temporary"},
		{s.TwoPhase, "two_phase"},
		{s.Failover != nil && *s.Failover, "failover"},
		{s.Synced != nil && *s.Synced, "synced from the primary"},
	} {
		if is.flag {
			kind += ", " + is.text
		}
	}
	row("slot", "%s (%s)", s.Name, kind)
	switch {
	case s.Lost():
		row("state", "LOST: %s", s.LostReason())
	case s.Active:
		row("state", "in use by %s", s.Holder())
	default:
		row("state", "not in use")
	}
	if s.InactiveSince != nil {
		row("unused since", "%s (%s ago)", s.InactiveSince.UTC().Format(time.RFC3339), ago(now.Sub(*s.InactiveSince)))
	}
	if s.Sender != nil && s.Sender.Sent != 0 {
		row("walsender", "%s, sent up to %s", s.Sender.State, s.Sender.Sent)
	}
	row("log ends at", "%s", position(s.WALEnd))
	row("confirmed", "%s, %s behind", position(s.ConfirmedFlush), size(s.LagBytes))
	row("kept from", "%s, %s, %s", position(s.RestartLSN), size(s.RetainedBytes), orDash(s.WALStatus))
	switch {
	case s.Lost():
	case s.SafeWALSize != nil:
		row("room", "%s until it may be lost (max_slot_wal_keep_size %s)", size(*s.SafeWALSize), s.KeepLimit)
	default:
		row("room", "no limit but the disk (max_slot_wal_keep_size %s)", s.KeepLimit)
	}
	for i, b := range s.Holders {
		name := "held back by:"
		if i > 0 {
			name = ""
		}
		rows = append(rows, []string{name, b.String()})
	}
	if more := s.HolderCount - len(s.Holders); more > 0 {
		rows = append(rows, []string{"", fmt.Sprintf("and %d more open transactions", more)})
	}
	if d := s.Decoding; d != nil {
		row("decoded", "%d transactions, %s; %d spilled to disk, %s (logical_decoding_work_mem %s)", d.Transactions, size(d.Bytes), d.SpilledTxns, size(d.SpilledBytes), d.DecodingLimit)
	}
	if st := s.Stream; st != nil {
		s.writeStream(row, st, now)
	}
	if err := writeTable(w, rows); err != nil {
		return err
	}
	return writeVerdict(w, s.Findings)
}

func (s *shown) writeStream(row func(name, format string, args ...any), st *shownStream, now time.Time) {
	if st.Error != "" {
		row("stream", "%s, not known", st.Name)
		return
	}
	row("stream", "%s, %d messages, last sequence %d", st.Name, st.Messages, st.Sequence)
	c := st.Checkpoint
	if c == nil {
		row("checkpoint", "none")
		return
	}
	if c.Slot != s.Name || c.Database != s.Slot.Database {
		row("checkpoint", "of slot %s of database %s", c.Slot, c.Database)
		return
	}
	row("checkpoint", "%s, sequence %d, written %s ago", position(c.Confirm), c.Sequence, ago(now.Sub(c.Written)))
	if d := st.Distance; d != nil {
		row("distance", "Postgres to relay %s, relay to slot %s, checkpoint to stream %d messages", size(d.Relay), size(d.Confirm), d.Stream)
	}
}

// writeVerdict says what is wrong and what to do.
func writeVerdict(w io.Writer, found event.Findings) error {
	if len(found) == 0 {
		_, err := fmt.Fprintln(w, "\nNothing is wrong.")
		return err
	}
	var errs []error
	for _, f := range found {
		_, err := fmt.Fprintf(w, "\n%s: %s\n", f.Level, f.Detail)
		errs = append(errs, err)
		for line := range strings.SplitSeq(f.Remedy, "\n") {
			if line != "" {
				_, err := fmt.Fprintf(w, "  → %s\n", line)
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// ago rounds a time for humans.
func ago(d time.Duration) string {
	switch {
	case d < time.Minute:
		return max(d, 0).Round(100 * time.Millisecond).String()
	case d < 48*time.Hour:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	}
	return fmt.Sprintf("%d days", int(d.Hours()/24))
}
