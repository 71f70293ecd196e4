package slotmgr

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Lag is one sample of how far a slot is behind its server.
type Lag struct {
	At            time.Time `json:"at"`             // when the sample was taken, by the clock of this machine
	Current       event.LSN `json:"current_lsn"`    // end of the WAL
	Confirmed     event.LSN `json:"confirmed_lsn"`  // confirmed flush LSN
	Restart       event.LSN `json:"restart_lsn"`    // oldest WAL that is kept for the slot
	Bytes         int64     `json:"lag_bytes"`      // Current − Confirmed
	RetainedBytes int64     `json:"retained_bytes"` // Current − Restart
	SafeWALSize   *int64    `json:"safe_wal_size"`  // bytes until the slot may be lost; nil without a limit
	Active        bool      `json:"active"`
	WALStatus     string    `json:"wal_status"`
	Lost          bool      `json:"lost"`
}

// Sample reads the lag of a slot. A missing slot is a Precondition failure.
func Sample(ctx context.Context, conn *pgx.Conn, name string) (Lag, error) {
	s, err := Inspect(ctx, conn, name)
	if err != nil {
		return Lag{}, err
	}
	return Lag{
		At:            time.Now(),
		Current:       s.WALEnd,
		Confirmed:     s.ConfirmedFlush,
		Restart:       s.RestartLSN,
		Bytes:         s.LagBytes,
		RetainedBytes: s.RetainedBytes,
		SafeWALSize:   s.SafeWALSize,
		Active:        s.Active,
		WALStatus:     s.WALStatus,
		Lost:          s.Lost(),
	}, nil
}
