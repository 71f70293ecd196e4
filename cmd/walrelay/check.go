package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/operate"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/publisher"
	"github.com/walrelay/walrelay/slotmgr"
)

// checked is a finding with the side that it is about.
type checked struct {
	Side string `json:"side"` // postgres, nats, or both
	event.Finding
}

const (
	sidePostgres = "postgres"
	sideNATS     = "nats"
	sideBoth     = "both"
)

func checkCommand(p *process) *cobra.Command {
	cmd := &cobra.Command{
		Use: "check [flags]", Short: "Look whether both ends are ready",
		Long: `Looks at Postgres, at NATS, and whether the two fit: settings, rights, publication,
tables, slot, stream and checkpoint. Each finding is OK, WARN or FAIL, with what to do
about it. It changes nothing, and works while the relay runs. The exit code is 3 when
something FAILs, which would also keep walrelay run from starting.`,
		Example: `  walrelay check
  walrelay check --create-stream -o json`,
		Args: atMost(0),
	}
	output := outputFlag(cmd)
	return command(p, cmd, append(slices.Clone(bothEnds), config.Relay), func(cmd *cobra.Command, _ []string, cfg *config.Config) error {
		c, err := newChecker(cfg)
		if err != nil {
			return err
		}
		if err := c.run(cmd.Context()); err != nil {
			return err
		}
		if *output == formJSON {
			err = writeJSON(cmd.OutOrStdout(), c.found)
		} else {
			err = c.write(cmd.OutOrStdout())
		}
		if err != nil {
			return err
		}
		failed := 0
		for _, f := range c.found {
			if f.Level == event.FAIL {
				failed++
			}
		}
		if failed > 0 {
			return event.Fail(event.Precondition, "the findings say what to do", "%d of %d checks failed", failed, len(c.found))
		}
		return nil
	})
}

// checker gathers what is found at both ends.
type checker struct {
	*ends
	found []checked

	skew   time.Duration // of Postgres's clock
	report publisher.Report
	slot   slotmgr.Slot // empty when the relay cannot read it
}

func newChecker(cfg *config.Config) (*checker, error) {
	e, err := newEnds(cfg, nil)
	return &checker{ends: e, found: []checked{}}, err
}

func (c *checker) add(side string, found ...event.Finding) {
	for _, f := range found {
		c.found = append(c.found, checked{side, f})
	}
}

// fault is the finding of a question that could not be answered.
func fault(name string, level event.Level, err error) event.Finding {
	return event.Finding{Name: name, Level: level, Detail: err.Error(), Remedy: event.HintOf(err)}
}

func (c *checker) run(ctx context.Context) error {
	conn, err := slotmgr.Connect(ctx, c.pg)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		c.add(sidePostgres, fault("connect", event.FAIL, err))
	default:
		defer hangUp(conn)
		if err := c.postgres(ctx, conn); err != nil {
			return err
		}
	}
	reached := c.nats(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if conn == nil || !reached {
		return nil
	}
	c.both(ctx, conn)
	return ctx.Err()
}

// postgres checks the server, the publications, the tables and the slot.
func (c *checker) postgres(ctx context.Context, conn *pgx.Conn) error {
	found, err := slotmgr.Preflight(ctx, conn, wantOf(c.cfg, c.pg, c.outboxes))
	if err != nil {
		return err
	}
	c.add(sidePostgres, found...)
	if len(found) == 1 { // the server is too old to be asked more
		return nil
	}
	for _, t := range c.outboxes {
		advice, err := advise(ctx, conn, c.mapper, t, c.cfg.Slot, c.cfg.Publications)
		if err != nil {
			return err
		}
		c.add(sidePostgres, advice...)
	}
	var now time.Time
	asked := time.Now()
	if err := conn.QueryRow(ctx, "select clock_timestamp()").Scan(&now); err != nil {
		return fmt.Errorf("read the server's clock: %w", err)
	}
	way := time.Since(asked) / 2
	if c.skew = now.Sub(asked.Add(way)); c.skew.Abs() <= way {
		c.skew = 0 // no more than the way takes
	}
	if slot, err := slotmgr.Inspect(ctx, conn, c.cfg.Slot); err == nil && found.Err() == nil {
		c.slot = slot
	}
	return nil
}

// nats checks server and stream, and reports whether it was reached.
func (c *checker) nats(ctx context.Context) bool {
	report, err := c.pub.Check(ctx, c.cfg.ConfirmDelay)
	c.report = report
	c.add(sideNATS, report.Findings...)
	if err != nil {
		c.add(sideNATS, fault("connect", event.FAIL, err))
	}
	return err == nil
}

// both checks whether the two fit.
func (c *checker) both(ctx context.Context, conn *pgx.Conn) {
	if c.slot.Name != "" {
		origin, err := c.origin(ctx, c.slot)
		if err != nil {
			c.add(sidePostgres, fault("replication", level(err), err))
		} else if survey, err := c.pub.Survey(ctx, origin); err != nil {
			c.add(sideNATS, fault("checkpoint", level(err), err))
		} else {
			c.add(sideBoth, operate.Start(survey.Resume, survey.Notes, survey.Err))
		}
	}
	for _, t := range c.outboxes {
		if c.missing(t) {
			continue
		}
		var rows []operate.Row
		err := outbox.Sample(ctx, conn, c.mapper, t, func(ev *event.Event, poison *event.Poison) {
			r := operate.Row{Table: t.String(), Subject: string(ev.Subject), Bytes: int64(c.pub.Size(ev)), Bound: c.report.Limits.Binds(ev.Subject)}
			if poison != nil {
				r.Poison = poison.Error()
			}
			rows = append(rows, r)
		})
		if err != nil {
			f := fault("rows", event.WARN, err)
			f.Remedy = fmt.Sprintf("GRANT SELECT ON %s TO the relay's role, so that its rows can be looked at", t)
			c.add(sideBoth, f)
			continue
		}
		l := c.report.Limits
		c.add(sideBoth, operate.Fit(t.String(), rows, operate.Limits{MaxPayload: l.MaxPayload, MaxMsgSize: l.MaxMsgSize, MaxBytes: l.MaxBytes})...)
	}
	c.add(sideBoth, operate.Clocks(c.skew, c.report.Skew))
}

// level is that of a question that failed: what passes keeps nobody from starting.
func level(err error) event.Level {
	if event.ClassOf(err) == event.Transient {
		return event.WARN
	}
	return event.FAIL
}

// missing reports whether a finding says already that the table cannot be read.
func (c *checker) missing(t outbox.Table) bool {
	return slices.ContainsFunc(c.found, func(f checked) bool {
		return f.Level == event.FAIL && (f.Name == "table" || f.Name == "mapping") && strings.Contains(f.Detail, t.Name)
	})
}

func (c *checker) write(w io.Writer) error {
	var errs []error
	width := 0
	for _, f := range c.found {
		width = max(width, len(f.Name))
	}
	last := ""
	for _, f := range c.found {
		if f.Side != last {
			_, err := fmt.Fprintf(w, "%s\n", f.Side)
			errs = append(errs, err)
			last = f.Side
		}
		_, err := fmt.Fprintf(w, "  %-4s  %-*s  %s\n", f.Level, width, f.Name, strings.ReplaceAll(f.Detail, "\n", " "))
		errs = append(errs, err)
		for line := range strings.SplitSeq(f.Remedy, "\n") {
			if line != "" && f.Level != event.OK {
				_, err := fmt.Fprintf(w, "        %-*s  → %s\n", width, "", line)
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
