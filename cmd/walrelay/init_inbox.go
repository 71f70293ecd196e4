package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/inbox"
	"github.com/walrelay/walrelay/outbox"
)

// inboxFlags make init one for consumers.
type inboxFlags struct {
	inbox bool
	table string
	roles []string
}

func (f *inboxFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.inbox, "inbox", false, "make the inbox of consumers, and nothing else")
	cmd.Flags().StringVar(&f.table, "inbox-table", "public."+inbox.DefaultName, "name of the inbox, as schema.table")
	cmd.Flags().StringArrayVar(&f.roles, "inbox-grant", nil, "role of a consumer that gets the rights on the inbox; repeatable")
}

func (f *inboxFlags) used(cmd *cobra.Command) bool {
	return f.inbox || len(f.roles) > 0 || cmd.Flags().Changed("inbox-table")
}

// schema refuses flags for what is not made beside an inbox.
func (f *inboxFlags) schema(cmd *cobra.Command) (inbox.Schema, error) {
	var others []string
	for _, name := range []string{"role", "partitioned", "shards", "emit-function", "emit-grant", "table", "publication", "messages"} {
		if flag := cmd.Flags().Lookup(name); flag != nil && flag.Changed {
			others = append(others, "--"+name)
		}
	}
	if len(others) > 0 {
		return inbox.Schema{}, event.Fail(event.Usage, "run init twice; the two need not be in one database",
			"--inbox makes the inbox and nothing else, and %s is given, too", strings.Join(others, ", "))
	}
	t, err := outbox.ParseTable(f.table)
	if err != nil {
		return inbox.Schema{}, fmt.Errorf("--inbox-table: %w", err)
	}
	s := inbox.Schema{Table: inbox.Table{Schema: t.Schema, Name: t.Name}, Roles: f.roles}
	return s, s.Validate()
}
