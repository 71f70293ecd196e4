package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/walrelay/walrelay/config"
	"github.com/walrelay/walrelay/event"
)

// Exit codes.
const (
	exitOK           = 0
	exitUnexpected   = 1
	exitUsage        = 2
	exitPrecondition = 3
	exitHalted       = 4
	exitLost         = 5
	exitUndrained    = 6
	exitForced       = 130
)

// errForced is told when a command was interrupted before its end.
var errForced = errors.New("interrupted before the end")

const seeHelp = "see walrelay help, or --help of the command"

// begun marks an error as one of a command that ran, against those that cobra
// returns before.
type begun struct{ error }

func (b begun) Unwrap() error { return b.error }

// classify makes sure that err has a class.
func classify(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	var mistakes *config.Error
	var failure *event.Failure
	var ran begun
	switch {
	case errors.As(err, &mistakes):
		return err
	case errors.Is(err, context.Canceled) && errors.Is(context.Cause(ctx), errSignal):
		return errForced
	case errors.As(err, &failure):
		return err
	case !errors.As(err, &ran):
		return event.Fail(event.Usage, seeHelp, "%w", err)
	case passing(err):
		return event.Fail(event.Transient, "try again; if it stays so, check the server's log", "%w", err)
	}
	return event.Fail(event.Unexpected, "", "%w", err)
}

// passing reports whether err is of a connection or a server, which a relay
// would ride out.
func passing(err error) bool {
	var ofNet net.Error
	var ofPostgres *pgconn.PgError
	var connecting *pgconn.ConnectError
	return errors.As(err, &ofNet) || errors.As(err, &ofPostgres) || errors.As(err, &connecting) ||
		errors.Is(err, context.DeadlineExceeded) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// report writes the error and its hint, and returns the exit code.
func report(w io.Writer, err error) int {
	if err == nil {
		return exitOK
	}
	var mistakes *config.Error
	if errors.As(err, &mistakes) {
		for _, p := range mistakes.Problems {
			tell(w, p.String(), p.Remedy)
		}
		return exitUsage
	}
	hint := event.HintOf(err)
	if hint == "" && event.ClassOf(err) == event.Usage {
		hint = seeHelp
	}
	tell(w, err.Error(), hint)
	if errors.Is(err, errForced) {
		return exitForced
	}
	switch event.ClassOf(err) {
	case event.Usage:
		return exitUsage
	case event.Transient, event.Precondition: // only run rides out what passes
		return exitPrecondition
	case event.Halted:
		return exitHalted
	case event.Lost:
		return exitLost
	case event.Undrained:
		return exitUndrained
	case event.Unexpected:
	}
	return exitUnexpected
}

func tell(w io.Writer, message, hint string) {
	_, _ = fmt.Fprintf(w, "error: %s\n", strings.ReplaceAll(strings.TrimSpace(message), "\n", "\n       "))
	for line := range strings.SplitSeq(hint, "\n") {
		if line != "" {
			_, _ = fmt.Fprintf(w, "hint: %s\n", line)
		}
	}
}

// flagError says what is wrong with a flag, without quoting its value's neighbours.
func flagError(cmd *cobra.Command, err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		return err
	}
	see := "see " + cmd.CommandPath() + " --help"
	var unknown *pflag.NotExistError
	var lacks *pflag.ValueRequiredError
	var invalid *pflag.InvalidValueError
	switch {
	case errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() != "":
		// pflag's text has the whole word, which may be -pPASSWORD.
		return event.Fail(event.Usage, see, "unknown flag -%s", unknown.GetSpecifiedName())
	case errors.As(err, &unknown):
		name := unknown.GetSpecifiedName()
		return event.Fail(event.Usage, flagHint(cmd, name, see), "unknown flag --%s", name)
	case errors.As(err, &lacks):
		return event.Fail(event.Usage, see, "--%s has no value", lacks.GetSpecifiedName())
	case errors.As(err, &invalid):
		why := errBadValue
		if errors.Is(err, errNoChoice) {
			why = errNoChoice
		}
		return event.Fail(event.Usage, flagRemedy(invalid.GetFlag(), see), "--%s: %q %w", invalid.GetFlag().Name, invalid.GetValue(), why)
	}
	return event.Fail(event.Usage, see, "malformed flag")
}

var (
	errBadValue = errors.New("is not valid")
	errNoChoice = errors.New("is no such choice")
)

func flagRemedy(f *pflag.Flag, see string) string {
	if of, ok := f.Value.(interface{ choices() []string }); ok {
		all := of.choices()
		return "write " + strings.Join(all[:len(all)-1], ", ") + " or " + all[len(all)-1]
	}
	switch f.Value.Type() {
	case "int":
		return "write a whole number"
	case "bool":
		return "write true or false, or nothing"
	case "duration":
		return "write a number with its unit, such as 200ms, 5s or 1m30s"
	case "age":
		return "write a number with its unit, such as 7d, 36h or 1d12h"
	}
	return see
}

// flagHint finds the flag that was meant: of this command, or of another.
func flagHint(cmd *cobra.Command, name, see string) string {
	var names []string
	cmd.Flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	if near := config.Nearest(name, names); near != "" {
		return "did you mean --" + near + "?"
	}
	var owners []string
	var visit func(*cobra.Command)
	visit = func(c *cobra.Command) {
		if c.LocalFlags().Lookup(name) != nil {
			owners = append(owners, c.CommandPath())
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(cmd.Root())
	if len(owners) > 0 {
		return "--" + name + " is a flag of " + strings.Join(owners, ", ")
	}
	if sub, _, err := cmd.Root().Find([]string{name}); err == nil && sub != cmd.Root() {
		return "it is a command: " + sub.CommandPath()
	}
	return see
}

// unknownCommand finds a command that does not exist, before its flags are
// judged by those of the command above it.
func unknownCommand(root *cobra.Command, args []string) error {
	cmd, rest, err := root.Find(args)
	if err != nil || !cmd.HasSubCommands() || len(rest) == 0 || strings.HasPrefix(rest[0], "-") || strings.HasPrefix(rest[0], "__complete") {
		return nil
	}
	return noSuchCommand(cmd, rest[0])
}

func noSuchCommand(cmd *cobra.Command, word string) error {
	var names []string
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() {
			names = append(names, c.Name())
		}
	}
	hint := "the commands are " + strings.Join(names, ", ")
	if near := config.Nearest(word, names); near != "" {
		hint = "did you mean " + cmd.CommandPath() + " " + near + "?"
	}
	return event.Fail(event.Usage, hint, "%s has no command %s", cmd.CommandPath(), safe(word))
}

// atMost accepts up to n arguments.
func atMost(n int) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) <= n {
			return nil
		}
		return event.Fail(event.Usage, "usage: "+cmd.UseLine(), "%s does not take the argument %s", cmd.CommandPath(), safe(args[n]))
	}
}

// exactly one argument; missing says which.
func exactly(missing string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return event.Fail(event.Usage, missing, "%s needs an argument", cmd.CommandPath())
		}
		return atMost(1)(cmd, args)
	}
}

// safe quotes a word of the command line, unless it may hold a secret.
func safe(word string) string {
	if strings.ContainsAny(word, "@:=") {
		return "that was given"
	}
	return fmt.Sprintf("%q", word)
}
