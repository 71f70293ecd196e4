package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
)

func eventsCommand(p *process) *cobra.Command {
	cmd := group("events", "Look at events",
		"Shows what rows of the outbox become.",
		`  walrelay events preview --limit 3
  walrelay events preview --id 0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d -o json`)
	cmd.AddCommand(eventsPreviewCommand(p))
	return cmd
}

func eventsPreviewCommand(p *process) *cobra.Command {
	var sel outbox.Selection
	cmd := &cobra.Command{
		Use: "preview [flags]", Short: "Show what would be published for rows of the table",
		Long: `Reads rows of the outbox tables and shows the message that each becomes with these
flags: subject, headers and the begin of the body; or why it would be parked. It
publishes nothing and needs no broker, so limits of the broker are not looked at.
Without --id it takes the newest rows.`,
		Example: `  walrelay events preview --limit 3
  walrelay events preview --subject 'shop.{aggregate_type}.{event_type}'
  walrelay events preview --table public.outbox,preset=debezium --id 42 -o json`,
		Args: atMost(0),
	}
	cmd.Flags().IntVar(&sel.Limit, "limit", 10, "rows of each table at most")
	cmd.Flags().StringArrayVar(&sel.IDs, "id", nil, "id of a row; repeatable")
	output := outputFlag(cmd)
	return command(p, cmd, []config.Group{config.Postgres, config.Tables},
		func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
			if sel.Limit < 1 {
				return event.Fail(event.Usage, "write 1 or more", "--limit is below one")
			}
			sel.Limit = max(sel.Limit, len(sel.IDs))
			outboxes, err := tables(cfg)
			if err != nil {
				return err
			}
			if len(outboxes) == 0 {
				return event.Fail(event.Usage, "name one with --table", "there is no outbox table to read")
			}
			mapper, err := newMapper(cfg, outboxes, outbox.ReplayOptions{})
			if err != nil {
				return err
			}
			all := []preview{}
			err = connected(cmd.Context(), cfg, func(ctx context.Context, conn *pgx.Conn) error {
				if err := fit(ctx, conn, mapper, outboxes); err != nil {
					return err
				}
				for _, t := range outboxes {
					rows, err := outbox.Rows(ctx, conn, t, sel)
					if err != nil {
						return err
					}
					for _, row := range rows {
						v, err := previewOf(mapper, row)
						if err != nil {
							return err
						}
						all = append(all, v)
					}
				}
				return nil
			})
			if err != nil {
				return err
			}
			if *output == formJSON {
				return writeJSON(cmd.OutOrStdout(), all)
			}
			return writePreviews(cmd.OutOrStdout(), all)
		})
}

// preview is what a row becomes.
type preview struct {
	Table      string          `json:"table"`
	ID         string          `json:"id"`
	MsgID      string          `json:"msg_id,omitempty"`
	Subject    string          `json:"subject,omitempty"`
	Headers    []previewHeader `json:"headers"`
	Bytes      int             `json:"bytes"` // of the body
	Body       *string         `json:"body,omitempty"`
	BodyBase64 string          `json:"body_base64,omitempty"` // when it is no text
	Poison     *previewPoison  `json:"poison,omitempty"`
}

type previewHeader struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

type previewPoison struct {
	Reason event.Reason `json:"reason"`
	Detail string       `json:"detail"`
}

func previewOf(m *outbox.Mapper, rec *event.Record) (preview, error) {
	var ev event.Event
	_, err := m.Map(rec, &ev)
	poison, bad := errors.AsType[*event.Poison](err)
	if err != nil && !bad {
		return preview{}, err
	}
	v := preview{
		Table: ev.Table, ID: string(ev.ID), MsgID: string(ev.MsgID), Subject: string(ev.Subject),
		Headers: []previewHeader{}, Bytes: len(ev.Payload),
	}
	for _, h := range ev.Headers {
		v.Headers = append(v.Headers, previewHeader{h.Name, string(h.Value)})
	}
	if utf8.Valid(ev.Payload) {
		body := string(ev.Payload)
		v.Body = &body
	} else {
		v.BodyBase64 = base64.StdEncoding.EncodeToString(ev.Payload)
	}
	if bad {
		v.Poison = &previewPoison{poison.Reason, poison.Detail}
	}
	return v, nil
}

// bodyHead is how much of a body the table form shows.
const bodyHead = 100

func writePreviews(w io.Writer, all []preview) error {
	var b bytes.Buffer
	if len(all) == 0 {
		b.WriteString("no such rows\n")
	}
	for i, v := range all {
		if i > 0 {
			b.WriteByte('\n')
		}
		switch {
		case v.Poison != nil:
			fmt.Fprintf(&b, "poison, %s: %s\n", v.Poison.Reason, printable(v.Poison.Detail))
		default:
			fmt.Fprintf(&b, "%s\n", printable(v.Subject))
		}
		for _, h := range v.Headers {
			fmt.Fprintf(&b, "  %s: %s\n", h.Name, printable(h.Value))
		}
		switch {
		case v.Bytes == 0:
			b.WriteString("  empty body\n")
		case v.Body == nil:
			fmt.Fprintf(&b, "  body of %s, no text\n", size(int64(v.Bytes)))
		default:
			head := []rune((*v.Body)[:min(len(*v.Body), 4*bodyHead)])
			cut := ""
			if len(head) > bodyHead || len(*v.Body) > 4*bodyHead {
				head, cut = head[:min(len(head), bodyHead)], "…"
			}
			fmt.Fprintf(&b, "  body of %s: %s%s\n", size(int64(v.Bytes)), printable(string(head)), cut)
		}
	}
	_, err := w.Write(b.Bytes())
	return err
}

// printable keeps what a row holds from steering the terminal.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
