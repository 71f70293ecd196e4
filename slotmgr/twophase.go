package slotmgr

import (
	"fmt"
	"strings"

	"github.com/walrelay/walrelay/event"
)

// twoPhase is the finding of a slot that sends prepared transactions, of any table, when
// they are prepared. Once on it stays on, whatever a session asks for
// (CreateDecodingContext: slot->data.two_phase).
func twoPhase(s Slot) Finding {
	return Finding{
		Name: "two_phase", Level: FAIL, Class: event.Precondition,
		Detail: fmt.Sprintf("slot %q was created with two_phase and sends prepared transactions, which the relay does not read", s.Name),
		Remedy: onePhase(s.Name),
	}
}

// onePhase is the SQL that takes two_phase from a slot and keeps its place: a copy never
// has it (copy_replication_slot in slotfuncs.c).
func onePhase(name string) string {
	const suffix, longest = "_one_phase", 63
	kept := name[:min(len(name), longest-len(suffix))] + suffix
	literal := func(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
	return fmt.Sprintf("SELECT pg_copy_logical_replication_slot(%[1]s, %[2]s); SELECT pg_drop_replication_slot(%[1]s); "+
		"SELECT pg_copy_logical_replication_slot(%[2]s, %[1]s); SELECT pg_drop_replication_slot(%[2]s); -- nothing that waits in it is lost",
		literal(name), literal(kept))
}
