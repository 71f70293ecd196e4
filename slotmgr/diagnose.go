package slotmgr

import (
	"context"
	"errors"
	"fmt"

	"github.com/walrelay/walrelay/event"
)

// Diagnose reads the state of the slot after a session ended with err, and
// returns err with the class and hint that follow from that state. It blocks
// three seconds at most. When the server cannot be asked or nothing is wrong
// with the slot, err is returned as it is. The result always wraps err.
func (w *Watcher) Diagnose(ctx context.Context, err error) error {
	if err == nil || ctx.Err() != nil || !slotMayBeWhy(err) {
		return err
	}
	ask, cancel := context.WithTimeout(ctx, diagnosePatience)
	defer cancel()
	v, lookErr := w.look(ask)
	if lookErr != nil {
		return err
	}
	if verdict := w.judge(v, err); verdict != nil {
		return verdict
	}
	if sqlstate(err) == codeInUse {
		// Without a holder it was given free in the meantime.
		if by := v.slot.Holder(); by != "" {
			return event.Fail(event.Transient, "that relay goes on; this one takes over when it ends", "slot %q is in use by %s: %w", w.slot, by, err)
		}
	}
	return err
}

// slotMayBeWhy leaves out what is known to have another reason.
func slotMayBeWhy(err error) bool {
	if errors.Is(err, context.Canceled) {
		return false
	}
	switch event.ClassOf(err) {
	case event.Transient:
		return true
	case event.Unexpected, event.Precondition:
		switch sqlstate(err) {
		case codeNotInState, codeInUse, codeUndefinedObject, codeInvalidParameter, codeAdminShutdown, codeCrashShutdown:
			return true
		}
	}
	return false
}

// judge turns a view of the slot into a failure that wraps cause, or nil when
// the slot can be read.
func (w *Watcher) judge(v view, cause error) error {
	if v.exists {
		w.seen.Store(true)
		if v.standby && v.slot.Synced != nil && *v.slot.Synced && !v.slot.Lost() {
			return failed(event.Transient, "it can be read once this server is promoted", cause, "slot %q is a copy on a standby", w.slot)
		}
		return unfit(v.slot, v.database, cause)
	}
	switch {
	case v.standby:
		return failed(event.Transient, "connect to the primary; this goes on by itself when the server is promoted", cause, "slot %q does not exist on this server, which is a standby", w.slot)
	case w.seen.Load():
		return failed(event.Lost, createCommand(w.slot)+" makes a new one; events committed since are in the table only", cause, "slot %q is gone: it was dropped, or this is another server", w.slot)
	}
	return failed(event.Precondition, createCommand(w.slot), cause, "slot %q does not exist", w.slot)
}

// failed makes a Failure that wraps cause when there is one.
func failed(class event.Class, hint string, cause error, format string, args ...any) error {
	text := fmt.Sprintf(format, args...)
	if cause == nil {
		return event.Fail(class, hint, "%s", text)
	}
	return event.Fail(class, hint, "%s: %w", text, cause)
}

// unfit is the failure of a slot that the relay can not read, wrapping cause.
func unfit(s Slot, database string, cause error) error {
	f := fitness(s, database)
	if f.Level != FAIL {
		return nil
	}
	return failed(f.Class, f.Remedy, cause, "%s", f.Detail)
}

// fitness finds whether the relay can read the slot from the database.
func fitness(s Slot, database string) Finding {
	f := Finding{Name: "slot", Level: FAIL, Class: event.Precondition}
	another := "choose another name: " + createCommand("NAME")
	switch {
	case s.SlotType != "logical":
		f.Detail = fmt.Sprintf("slot %q is a %s slot, not a logical one", s.Name, s.SlotType)
		f.Remedy = another
	case s.Plugin != Plugin:
		f.Detail = fmt.Sprintf("slot %q uses the plugin %s, not %s", s.Name, s.Plugin, Plugin)
		f.Remedy = another
	case s.Database != database:
		f.Detail = fmt.Sprintf("slot %q belongs to database %q, not to %q", s.Name, s.Database, database)
		f.Remedy = another + ", or connect to database " + quote(s.Database)
	case s.Lost():
		f.Class = event.Lost
		f.Detail = fmt.Sprintf("slot %q is lost: %s%s", s.Name, s.LostReason(), s.since())
		f.Remedy = fmt.Sprintf("walrelay slot drop %s, then %s; events committed since are in the table only", s.Name, createCommand(s.Name))
	default:
		f.Level, f.Class = OK, 0
		f.Detail = fmt.Sprintf("slot %q, %s", s.Name, s.WALStatus)
	}
	return f
}
