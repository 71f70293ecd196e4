package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version and commit are set by the linker.
var version, commit string

type build struct {
	Version  string `json:"version"`
	Commit   string `json:"commit"`
	Go       string `json:"go"`
	Platform string `json:"platform"`
}

// built says what this program was built from. What the linker did not set is
// taken from what go build recorded.
func built() build {
	b := build{Version: version, Commit: commit, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH}
	info, ok := debug.ReadBuildInfo()
	if ok && b.Version == "" {
		b.Version = info.Main.Version
	}
	if ok && b.Commit == "" {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				b.Commit = s.Value
			}
		}
	}
	if b.Version == "" {
		b.Version = "(devel)"
	}
	if b.Commit == "" {
		b.Commit = "unknown"
	}
	return b
}

func versionCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "version", Short: "Print the version",
		Long:    "Prints the version, the commit it was built from, and the version of Go.",
		Example: "  walrelay version -o json",
		Args:    atMost(0),
	}
	output := outputFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		b := built()
		var err error
		if *output == formJSON {
			err = writeJSON(cmd.OutOrStdout(), b)
		} else {
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "walrelay %s (commit %s, %s, %s)\n", b.Version, b.Commit, b.Go, b.Platform)
		}
		if err != nil {
			return begun{err}
		}
		return nil
	}
	return cmd
}
