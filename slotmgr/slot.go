package slotmgr

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Plugin is the output plugin that the relay reads.
const Plugin = "pgoutput"

// Slot is a row of pg_replication_slots, and who reads it. A pointer is nil
// when the server has no such column or no value for it.
type Slot struct {
	Name      string `json:"name"`
	Plugin    string `json:"plugin"`    // empty for a physical slot
	SlotType  string `json:"slot_type"` // logical or physical
	Database  string `json:"database"`
	Temporary bool   `json:"temporary"`
	TwoPhase  bool   `json:"two_phase"`

	Active            bool   `json:"active"`
	ActivePID         *int   `json:"active_pid"`
	ActiveApplication string `json:"active_application"`
	ActiveClient      string `json:"active_client"` // address; empty for a local socket or without pg_read_all_stats

	RestartLSN     event.LSN `json:"restart_lsn"`         // zero when the WAL is gone
	ConfirmedFlush event.LSN `json:"confirmed_flush_lsn"` // zero when there is none
	WALEnd         event.LSN `json:"wal_end"`             // end of the server's WAL at the same moment
	WALStatus      string    `json:"wal_status"`          // reserved, extended, unreserved, lost
	SafeWALSize    *int64    `json:"safe_wal_size"`       // bytes until the slot may be lost; nil without a limit
	RetainedBytes  int64     `json:"retained_bytes"`      // from the restart LSN to the end of the WAL
	LagBytes       int64     `json:"lag_bytes"`           // from the confirmed flush LSN to the end of the WAL

	Conflicting        *bool      `json:"conflicting"`         // 16
	InvalidationReason *string    `json:"invalidation_reason"` // 17
	InactiveSince      *time.Time `json:"inactive_since"`      // 17
	Failover           *bool      `json:"failover"`            // 17
	Synced             *bool      `json:"synced"`              // 17
}

// Lost reports whether the slot can never be read again.
func (s Slot) Lost() bool {
	return s.WALStatus == "lost" || s.InvalidationReason != nil || s.Conflicting != nil && *s.Conflicting
}

// LostReason says in words why the slot is lost, or "".
func (s Slot) LostReason() string {
	if !s.Lost() {
		return ""
	}
	reason := ""
	if s.InvalidationReason != nil {
		reason = *s.InvalidationReason
	} else if s.WALStatus == "lost" {
		reason = "wal_removed"
	}
	switch reason {
	case "wal_removed":
		return "its WAL was removed, more than max_slot_wal_keep_size was retained"
	case "rows_removed":
		return "catalog rows that it needs were removed"
	case "wal_level_insufficient":
		return "wal_level was set below logical"
	case "idle_timeout":
		return "it was idle longer than idle_replication_slot_timeout"
	case "":
		return "it conflicts with recovery"
	}
	return reason
}

// Holder names the session that reads the slot, or "".
func (s Slot) Holder() string {
	if !s.Active || s.ActivePID == nil {
		return ""
	}
	var about []string
	if s.ActiveApplication != "" {
		about = append(about, fmt.Sprintf("application %q", s.ActiveApplication))
	}
	if s.ActiveClient != "" {
		about = append(about, "client "+s.ActiveClient)
	}
	holder := fmt.Sprintf("pid %d", *s.ActivePID)
	if len(about) > 0 {
		holder += " (" + strings.Join(about, ", ") + ")"
	}
	return holder
}

// since says when the slot fell out of use, as far as the server tells.
func (s Slot) since() string {
	if s.InactiveSince == nil {
		return ""
	}
	return ", unused since " + s.InactiveSince.UTC().Format(time.RFC3339)
}

// List reads the slots, by name: those of the connection's database with
// plugin pgoutput, or with all every slot of the server, since any of them can
// fill the disk.
func List(ctx context.Context, conn *pgx.Conn, all bool) ([]Slot, error) {
	where := "s.plugin = '" + Plugin + "' and s.database = current_database()"
	if all {
		where = "true"
	}
	slots, err := readSlots(ctx, conn, where)
	if err != nil {
		return nil, sqlFailure(conn, err, "list slots")
	}
	return slots, nil
}

// Inspect reads one slot of any kind. A missing slot is a Precondition failure.
func Inspect(ctx context.Context, conn *pgx.Conn, name string) (Slot, error) {
	slot, ok, err := find(ctx, conn, name)
	if err != nil {
		return Slot{}, sqlFailure(conn, err, fmt.Sprintf("read slot %q", name))
	}
	if !ok {
		return Slot{}, missing(name)
	}
	return slot, nil
}

// Lookup reads one slot of any kind; false when there is none.
func Lookup(ctx context.Context, conn *pgx.Conn, name string) (Slot, bool, error) {
	slot, ok, err := find(ctx, conn, name)
	if err != nil {
		return Slot{}, false, sqlFailure(conn, err, fmt.Sprintf("read slot %q", name))
	}
	return slot, ok, nil
}

// Gone is the failure of a slot that a relay has read before and that is not there any more.
func Gone(name string) error {
	return event.Fail(event.Lost, recoverCommand(name), "slot %q is gone: it was dropped, or this is another server", name)
}

// Drop drops a slot and gives its WAL free. A slot that is missing or in use
// is a Precondition failure.
func Drop(ctx context.Context, conn *pgx.Conn, name string) error {
	slot, err := Inspect(ctx, conn, name)
	if err != nil {
		return err
	}
	if slot.Active {
		return inUse(slot)
	}
	_, err = conn.Exec(ctx, "select pg_drop_replication_slot($1)", name)
	switch sqlstate(err) {
	case codeUndefinedObject:
		return missing(name)
	case codeInUse: // taken since it was read
		if slot, err := Inspect(ctx, conn, name); err != nil || slot.Active {
			return inUse(slot)
		}
	case codeNotInState:
		return event.Fail(event.Precondition, "drop the slot on the primary: this copy is kept in step with it", "drop slot %q: %w", name, err)
	}
	if err != nil {
		return sqlFailure(conn, err, fmt.Sprintf("drop slot %q", name))
	}
	return nil
}

func missing(name string) error {
	return event.Fail(event.Precondition, createCommand(name), "slot %q does not exist", name)
}

func inUse(s Slot) error {
	by := s.Holder()
	if by == "" {
		by = "another session"
	}
	return event.Fail(event.Precondition, "stop the relay that reads it first", "slot %q is in use by %s", s.Name, by)
}

func createCommand(name string) string {
	return fmt.Sprintf("walrelay slot create %s --publication PUBLICATION", name)
}

// recoverCommand is the way back from a lost slot.
func recoverCommand(name string) string {
	return fmt.Sprintf("walrelay slot recover %s makes a new one and publishes the rows that are missing in the stream", name)
}

// walEnd is the end of the log as SQL: where the server writes, or on a
// standby what it has received or replayed.
const walEnd = `case when pg_is_in_recovery()
	then coalesce(greatest(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()), '0/0')
	else pg_current_wal_lsn() end`

// walFlushed is how far the WAL can be read, as SQL. pg_current_wal_flush_lsn
// fails on a standby, whose walsenders send what is replayed.
const walFlushed = `case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end`

func find(ctx context.Context, conn *pgx.Conn, name string) (Slot, bool, error) {
	slots, err := readSlots(ctx, conn, "s.slot_name = $1", name)
	if err != nil || len(slots) == 0 {
		return Slot{}, false, err
	}
	return slots[0], true, nil
}

func readSlots(ctx context.Context, conn *pgx.Conn, where string, args ...any) ([]Slot, error) {
	rows, err := conn.Query(ctx, `
select s.slot_name::text as name, coalesce(s.plugin::text, '') as plugin, s.slot_type, coalesce(s.database::text, '') as database,
	s.temporary, s.two_phase, s.active, s.active_pid,
	coalesce(a.application_name, '') as active_application, coalesce(host(a.client_addr), '') as active_client,
	coalesce((s.restart_lsn - '0/0')::int8, 0) as restart_lsn,
	coalesce((s.confirmed_flush_lsn - '0/0')::int8, 0) as confirmed_flush,
	(w.lsn - '0/0')::int8 as wal_end,
	coalesce(s.wal_status, '') as wal_status, s.safe_wal_size,
	coalesce(greatest(w.lsn - s.restart_lsn, 0)::int8, 0) as retained_bytes,
	coalesce(greatest(w.lsn - s.confirmed_flush_lsn, 0)::int8, 0) as lag_bytes,
	`+columnsOf(major(conn))+`
from pg_replication_slots s
	left join pg_stat_activity a on a.pid = s.active_pid
	cross join (select `+walEnd+` as lsn) w
where `+where+`
order by s.slot_name`, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[Slot])
}

// columnsOf selects the columns of pg_replication_slots that came after 14.
func columnsOf(major int) string {
	conflicting := "null::bool as conflicting"
	if major >= 16 {
		conflicting = "s.conflicting"
	}
	later := `null::text as invalidation_reason, null::timestamptz as inactive_since, null::bool as failover, null::bool as synced`
	if major >= 17 {
		later = "s.invalidation_reason, s.inactive_since, s.failover, s.synced"
	}
	return conflicting + ", " + later
}
