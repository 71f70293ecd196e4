package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
	"github.com/walrelay/walrelay/outbox"
	"github.com/walrelay/walrelay/replication"
	"github.com/walrelay/walrelay/slotmgr"
)

// advise holds a table against the mapping. Where the table of today does not fit but the
// first of its rows that waits in the slot does, that is no reason to refuse: the column was
// renamed since, and these rows are to be published.
func advise(ctx context.Context, conn *pgx.Conn, m *outbox.Mapper, t outbox.Table, slot string, publications []string) (event.Findings, error) {
	found, err := outbox.Advise(ctx, conn, m, t, publications)
	if err != nil {
		return nil, err
	}
	for i := range found {
		f := &found[i]
		if f.Name == "mapping" && f.Level == event.FAIL && waitingFits(ctx, conn, m, t, slot, publications) {
			f.Level, f.Class = event.WARN, 0
			f.Detail += "; the rows that wait in the slot do: they are published, later ones are parked"
		}
	}
	return found, nil
}

// someChanges is how many changes the first look at a slot asks for.
const someChanges = 256

var errSeen = errors.New("seen")

// waitingFits reports whether the next row of a table that the slot sends fits the mapping.
// What cannot be read does not.
func waitingFits(ctx context.Context, conn *pgx.Conn, m *outbox.Mapper, t outbox.Table, slot string, publications []string) bool {
	for changes := someChanges; ; changes *= 4 {
		fits := false
		dec := replication.NewDecoder(event.Origin{Slot: slot, Timeline: 1})
		done := dec.Convert(conn.PgConn(), &conn.Config().Config)
		n, err := slotmgr.Peek(ctx, conn, slotmgr.PeekOptions{
			Slot: slot, Plugin: replication.PluginOptions(publications, true), Changes: changes,
		}, func(lsn event.LSN, data []byte) error {
			rec, err := dec.Decode(lsn, data)
			if err != nil || rec == nil || rec.Kind != event.Row || !m.Is(rec.Relation, t) {
				return err
			}
			_, err = m.Fits(rec.Relation)
			fits = err == nil
			return errSeen
		})
		done()
		if errors.Is(err, errSeen) {
			return fits
		}
		if err != nil || n < changes {
			return false
		}
	}
}
