package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/slotmgr"
)

func slotPeekCommand(p *process) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use: "peek [name] [flags]", Short: "Show the events that are published next",
		Long: `Shows the events that the relay would publish next, and consumes none: those that the
slot sends and the stream does not hold. It works while the relay runs, on a temporary
copy of the slot, which takes one more of max_replication_slots.

A transaction that the server cannot decode, or a row that the mapping does not fit, is
shown as such, with the reason in the place of the payload.`,
		Example: `  walrelay slot peek
  walrelay slot peek orders --limit 100 -o json`,
		Args: atMost(1),
	}
	cmd.Flags().IntVar(&limit, "limit", 20, "show so many at most")
	output := outputFlag(cmd)
	return command(p, cmd, bothEnds, func(cmd *cobra.Command, args []string, cfg *config.Config) error {
		name, err := slotOf(cmd, args, cfg)
		if err != nil {
			return err
		}
		if limit < 1 || limit > 1_000_000 {
			return event.Fail(event.Usage, "write a number from 1 to 1000000", "--limit %d is out of range", limit)
		}
		e, err := newEnds(cfg, nil)
		if err != nil {
			return err
		}
		return connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
			slot, err := slotmgr.Inspect(ctx, conn, name)
			if err != nil {
				return err
			}
			origin, err := e.origin(ctx, slot)
			if err != nil {
				return err
			}
			// Without the stream there is still something to see.
			survey, err := e.pub.Survey(ctx, origin)
			if err == nil {
				err = survey.Err
			}
			if err != nil {
				survey.Resume = event.Resume{}
				cmd.PrintErrf("note: some of these may be stored already, because the stream does not tell: %v\n", err)
			}
			if n := survey.Resume.Gone; n > 0 {
				cmd.PrintErrf("note: %d messages are gone from the end of the stream: up to as many of the first events may be stored already\n", n)
			}
			events, more, err := operate.Peek(ctx, e.log(conn, origin), e.mapper, survey.Resume, limit)
			if err != nil {
				return err
			}
			if *output == formJSON {
				if events == nil {
					events = []*operate.Event{}
				}
				return writeJSON(cmd.OutOrStdout(), events)
			}
			if err := writeEvents(cmd.OutOrStdout(), events); err != nil {
				return err
			}
			switch {
			case len(events) == 0:
				cmd.PrintErrln("nothing is waiting")
			case more:
				cmd.PrintErrf("more are waiting than these %d\n", len(events))
			}
			return nil
		})
	})
}

// writeEvents is the table of events, with the head of their payloads.
func writeEvents(w io.Writer, events []*operate.Event) error {
	rows := [][]string{{"SUBJECT", "ID", "TYPE", "COMMITTED", "XID", "LSN", "SIZE", "PAYLOAD"}}
	for _, e := range events {
		at := "-"
		if !e.CommitTime.IsZero() {
			at = e.CommitTime.UTC().Format(time.RFC3339)
		}
		body := e.Body()
		text := head(string(body))
		if e.Payload == nil {
			text = "(no text)"
		}
		switch {
		case e.Undecoded:
			text = "(" + head(e.Poison) + ")"
		case e.Poison != "":
			text = "(" + head(e.Poison) + ") " + text
		}
		rows = append(rows, []string{
			orDash(head(e.Subject)), orDash(head(e.ID)), orDash(head(e.EventType)), at, fmt.Sprint(e.XID),
			e.Position.Commit.String(), fmt.Sprint(len(body)), text,
		})
	}
	return writeTable(w, rows)
}

// headLength is how much of a value a table shows.
const headLength = 60

// head is the begin of a value on one line.
func head(s string) string {
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return ' '
		}
		return r
	}, s)
	n := 0
	for i := range s {
		if n++; n > headLength {
			return s[:i] + "…"
		}
	}
	return s
}
