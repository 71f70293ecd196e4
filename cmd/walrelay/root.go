package main

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/walrelay/walrelay/config"
)

func newRoot(p *process) *cobra.Command {
	root := group("walrelay", "Outbox rows of Postgres become messages of NATS JetStream",
		`walrelay turns committed outbox rows of Postgres into messages of NATS JetStream,
straight from the write-ahead log: once, and in commit order.

Every flag is a variable, too: --nats-url is WALRELAY_NATS_URL. Flags win over
variables (PG* and NATS_URL among them), variables over the file of --config,
the file over defaults.`,
		`  walrelay init --apply
  walrelay slot create
  walrelay run --create-stream`)
	root.SetIn(p.in)
	root.SetOut(p.out)
	root.SetErr(p.err)
	root.SilenceErrors = true
	root.SilenceUsage = true
	root.SetFlagErrorFunc(flagError)
	root.SetUsageFunc(usage)
	root.SetHelpCommand(helpCommand())
	root.AddCommand(runCommand(p), initCommand(p), checkCommand(p), statusCommand(p), slotCommand(p), eventsCommand(p), dlqCommand(p), replayCommand(p), pruneCommand(p), versionCommand())
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd(p.args...)
	return root
}

// group is a command that only holds others.
func group(use, short, long, example string) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return noSuchCommand(cmd, args[0])
			}
			return cmd.Help()
		},
	}
}

func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use: "help [command]", Short: "Help about a command",
		Long:    "Shows what a command does and which flags it has.",
		Example: "  walrelay help slot create",
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err != nil {
				return err
			}
			if len(rest) > 0 {
				return noSuchCommand(found, rest[0])
			}
			found.InitDefaultHelpFlag()
			return found.Help()
		},
	}
}

// command makes a command of a function that gets its configuration. The
// groups are the options that the command takes.
func command(p *process, cmd *cobra.Command, groups []config.Group, run func(*cobra.Command, []string, *config.Config) error) *cobra.Command {
	cmd.Flags().SortFlags = false
	config.AddFlags(cmd.Flags(), append(groups, config.General)...)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		cfg, err := config.Load(cmd.Flags(), p.environ)
		if err != nil {
			return err
		}
		warn(p, cmd, cfg)
		if err := run(cmd, args, cfg); err != nil {
			return begun{err}
		}
		return nil
	}
	return cmd
}

// warn prints what of the configuration has no effect, as a log line where the
// command logs.
func warn(p *process, cmd *cobra.Command, cfg *config.Config) {
	for _, text := range cfg.Warnings {
		if cmd.Flags().Lookup("log-format") != nil {
			log, _ := newLogger(p, cfg.Log)
			log.Warn(text)
			continue
		}
		_, _ = fmt.Fprintf(p.err, "warning: %s\n", text)
	}
}

// newLogger logs to the process's stderr, at a level that can be changed.
func newLogger(p *process, l config.Log) (*slog.Logger, *slog.LevelVar) {
	level := new(slog.LevelVar)
	level.Set(l.Level)
	o := &slog.HandlerOptions{Level: level}
	if l.Format == config.LogText || l.Format == config.LogAuto && isTerminal(p.err) {
		return slog.New(slog.NewTextHandler(p.err, o)), level
	}
	return slog.New(slog.NewJSONHandler(p.err, o)), level
}

// usage writes what comes below a command's description, with the flags in
// groups.
func usage(cmd *cobra.Command) error {
	var b strings.Builder
	line := cmd.UseLine()
	if cmd.HasAvailableSubCommands() {
		line = cmd.CommandPath() + " command"
	}
	fmt.Fprintf(&b, "Usage:\n  %s\n", line)
	if cmd.HasExample() {
		fmt.Fprintf(&b, "\nExamples:\n%s\n", cmd.Example)
	}
	if cmd.HasAvailableSubCommands() {
		b.WriteString("\nCommands:\n")
		w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		for _, c := range cmd.Commands() {
			if c.IsAvailableCommand() || c.Name() == "help" {
				fmt.Fprintf(w, "  %s\t%s\n", c.Name(), c.Short)
			}
		}
		_ = w.Flush() // to memory
	}
	sections := map[config.Group]*pflag.FlagSet{}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		g := config.GroupOf(f)
		if sections[g] == nil {
			sections[g] = pflag.NewFlagSet("", pflag.ContinueOnError)
			sections[g].SortFlags = false
		}
		sections[g].AddFlag(f)
	})
	for _, g := range slices.Concat([]config.Group{""}, config.Groups) {
		if fs := sections[g]; fs != nil && fs.HasAvailableFlags() {
			title := "Flags"
			if g != "" {
				title = string(g)
			}
			fmt.Fprintf(&b, "\n%s:\n%s", title, fs.FlagUsages())
		}
	}
	_, err := fmt.Fprint(cmd.OutOrStderr(), b.String())
	return err
}
