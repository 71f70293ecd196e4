package slotmgr

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Detail is a slot with all that the server tells about it.
type Detail struct {
	Slot

	KeepLimit string  `json:"max_slot_wal_keep_size"` // as the server writes it; -1 is no limit
	Sender    *Sender `json:"sender"`                 // nil when nobody reads the slot, or it is not visible
	Decoding  *Stats  `json:"decoding"`               // nil for a physical slot

	// Holders are the open transactions that keep the restart LSN from moving
	// on, oldest first. Five at most, and their number.
	Holders     []Blocker `json:"holders"`
	HolderCount int       `json:"holder_count"`
}

// Sender is the walsender that reads the slot, from pg_stat_replication.
type Sender struct {
	State   string     `json:"state"`
	Sent    event.LSN  `json:"sent_lsn"` // zero without pg_read_all_stats
	Flushed event.LSN  `json:"flush_lsn"`
	Since   *time.Time `json:"backend_start"`
	Reply   *time.Time `json:"reply_time"` // the last status it got
}

// Stats are the counters of pg_stat_replication_slots since they were reset.
type Stats struct {
	Transactions  int64      `json:"total_txns"`
	Bytes         int64      `json:"total_bytes"`
	SpilledTxns   int64      `json:"spill_txns"` // larger than logical_decoding_work_mem, so written to disk
	SpilledTimes  int64      `json:"spill_count"`
	SpilledBytes  int64      `json:"spill_bytes"`
	Reset         *time.Time `json:"stats_reset"`
	DecodingLimit string     `json:"logical_decoding_work_mem"`
}

const holdersShown = 5

// Show reads a slot of any kind and what is around it. It asks about four short
// questions. A missing slot is a Precondition failure.
func Show(ctx context.Context, conn *pgx.Conn, name string) (Detail, error) {
	slot, err := Inspect(ctx, conn, name)
	if err != nil {
		return Detail{}, err
	}
	d := Detail{Slot: slot, Holders: []Blocker{}}
	doing := fmt.Sprintf("read what is around slot %q", name)
	if err := conn.QueryRow(ctx, "select current_setting('max_slot_wal_keep_size')").Scan(&d.KeepLimit); err != nil {
		return d, sqlFailure(conn, err, doing)
	}
	var sender Sender
	var sent, flushed int64
	err = conn.QueryRow(ctx, `select coalesce(state, ''), coalesce((sent_lsn - '0/0')::int8, 0), coalesce((flush_lsn - '0/0')::int8, 0), backend_start, reply_time
		from pg_stat_replication where pid = $1`, slot.ActivePID).Scan(&sender.State, &sent, &flushed, &sender.Since, &sender.Reply)
	switch {
	case err == nil:
		sender.Sent, sender.Flushed = event.LSN(sent), event.LSN(flushed)
		d.Sender = &sender
	case !errors.Is(err, pgx.ErrNoRows):
		return d, sqlFailure(conn, err, doing)
	}
	var s Stats
	err = conn.QueryRow(ctx, `select total_txns, total_bytes, spill_txns, spill_count, spill_bytes, stats_reset, current_setting('logical_decoding_work_mem')
		from pg_stat_replication_slots where slot_name = $1`, name).
		Scan(&s.Transactions, &s.Bytes, &s.SpilledTxns, &s.SpilledTimes, &s.SpilledBytes, &s.Reset, &s.DecodingLimit)
	switch {
	case err == nil:
		d.Decoding = &s
	case !errors.Is(err, pgx.ErrNoRows):
		return d, sqlFailure(conn, err, doing)
	}
	if slot.SlotType == "logical" && !slot.Lost() {
		if d.Holders, err = holders(ctx, conn); err != nil {
			return d, sqlFailure(conn, err, doing)
		}
		d.HolderCount = len(d.Holders)
		d.Holders = d.Holders[:min(len(d.Holders), holdersShown)]
	}
	return d, nil
}

// holders lists the write transactions that are open in any database, oldest
// first. The restart LSN stays before the first record of the oldest one that
// was running when the confirmed LSN was passed (SnapBuildProcessRunningXacts
// in snapbuild.c).
func holders(ctx context.Context, conn *pgx.Conn) ([]Blocker, error) {
	rows, err := conn.Query(ctx, `
select a.pid, coalesce(a.datname::text, '') as database, coalesce(a.usename::text, '') as "user", coalesce(a.application_name, '') as application,
	coalesce(a.state, '') as state, a.xact_start as since, extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds, a.query
from pg_stat_activity a
where a.backend_xid is not null and a.xact_start is not null and a.pid <> pg_backend_pid()
union all
select 0, p.database::text, p.owner::text, '', 'prepared', p.prepared, extract(epoch from clock_timestamp() - p.prepared)::float8, p.gid
from pg_prepared_xacts p
order by since, pid`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, blockerOf)
}

// Thresholds of what is worth a word.
const (
	muchLog = 1 << 30
	someLog = 64 << 20
	longAgo = time.Minute // of a transaction
)

// Findings say what is wrong with the slot and what to do, the worst first;
// none when nothing is.
func (d Detail) Findings(database string) Findings {
	if f := fitness(d.Slot, database); f.Level == FAIL {
		return Findings{f}
	}
	var found Findings
	add := func(name, detail, remedy string) {
		found = append(found, Finding{Name: name, Level: WARN, Detail: detail, Remedy: remedy})
	}
	if d.WALStatus == "unreserved" {
		add("retention", fmt.Sprintf("slot %q is lost at the next checkpoint, unless the relay catches up before", d.Name),
			"ALTER SYSTEM SET max_slot_wal_keep_size = -1; SELECT pg_reload_conf(); until the relay has caught up")
	} else if s := d.SafeWALSize; s != nil && *s < d.RetainedBytes/3 {
		add("retention", fmt.Sprintf("slot %q keeps three quarters of max_slot_wal_keep_size and more: beyond it the slot is lost", d.Name),
			"ALTER SYSTEM SET max_slot_wal_keep_size = '…'; with more, and SELECT pg_reload_conf();")
	}
	if !d.Active && !d.Temporary {
		risk := ""
		if d.SafeWALSize == nil {
			risk = ", without a limit"
		}
		add("active", fmt.Sprintf("nobody reads slot %q%s: Postgres keeps all log from %s on%s", d.Name, d.since(), d.RestartLSN, risk),
			"start the relay: walrelay run --slot "+d.Name+"; or, when it is gone for good: walrelay slot drop "+d.Name)
	}
	if d.Active && d.LagBytes > muchLog {
		add("lag", fmt.Sprintf("the session that reads slot %q is %d MiB behind", d.Name, d.LagBytes>>20),
			"look at the log and the metrics of the relay: the broker may be down or slow")
	}
	if kept := d.RetainedBytes - d.LagBytes; kept > someLog && len(d.Holders) > 0 && d.Holders[0].Age > longAgo {
		b := d.Holders[0]
		remedy := fmt.Sprintf("let it end, or end it: SELECT pg_terminate_backend(%d);", b.PID)
		if b.State == "prepared" {
			remedy = "COMMIT PREPARED or ROLLBACK PREPARED it: " + b.Query
		}
		add("restart", fmt.Sprintf("%d MiB of confirmed log are kept, for an open transaction: %s", kept>>20, b), remedy)
	}
	return found
}
