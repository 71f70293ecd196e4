package replication

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walrelay/walrelay/event"
)

// Decoder makes records of changes that were read by SQL, as
// pg_logical_slot_peek_binary_changes returns them: each row has the LSN that
// the walsender would put before the same bytes (LogicalOutputWrite and
// WalSndPrepareWrite take the same write_location), so positions are those of a Stream.
type Decoder struct{ d *decoder }

// NewDecoder makes a Decoder for the log of an origin. A caller decodes every
// change of one read, in order, and makes another Decoder for the next read.
func NewDecoder(o event.Origin) *Decoder {
	d := newDecoder(o.Timeline, o.History)
	d.slot = o.Slot
	return &Decoder{d}
}

// Decode makes the record of one change, nil when it only tells the decoder
// something. The record is valid until the next call, and no longer than data.
func (d *Decoder) Decode(lsn event.LSN, data []byte) (*event.Record, error) {
	if len(data) == 0 {
		return nil, malformed("change")
	}
	rec, err := d.d.change(lsn, data[0], reader{b: data[1:]})
	if err != nil {
		return nil, d.d.past(lsn, err)
	}
	return rec, nil
}

// PluginOptions are the options of pgoutput as names and values in turn, as
// the SQL functions of logical decoding take them. They are those of a Stream.
func PluginOptions(publications []string, messages bool) []string {
	options := []string{"proto_version", "1", "publication_names", quoteList(publications)}
	if messages {
		options = append(options, "messages", "true")
	}
	return options
}

// Identify opens a replication connection, asks the server who it is, and
// closes the connection. It neither needs nor touches the slot; ConfirmedFlush
// of the Origin stays zero.
func Identify(ctx context.Context, cfg Config) (event.Origin, error) {
	if err := cfg.check(); err != nil {
		return event.Origin{}, err
	}
	conf := cfg.session()
	pg, err := pgconn.ConnectConfig(ctx, conf)
	if err != nil {
		return event.Origin{}, connectFailure(conf, err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_ = pg.Close(ctx) // what was asked is answered
	}()
	o, err := identify(ctx, pg)
	if err != nil {
		return event.Origin{}, startFailure(conf, cfg.Slot, "identify the server", err)
	}
	o.Slot, o.Fingerprint = cfg.Slot, cfg.Fingerprint
	return o, nil
}

// identify asks for the system, its timeline and the history of that.
func identify(ctx context.Context, pg *pgconn.PgConn) (event.Origin, error) {
	system, err := pglogrepl.IdentifySystem(ctx, pg)
	if err != nil {
		return event.Origin{}, err
	}
	o := event.Origin{
		SystemID: system.SystemID,
		Database: system.DBName,
		Timeline: uint32(system.Timeline),
		WALEnd:   event.LSN(system.XLogPos),
	}
	if system.Timeline > 1 {
		file, err := pglogrepl.TimelineHistory(ctx, pg, system.Timeline)
		if err != nil {
			return event.Origin{}, fmt.Errorf("read the history of timeline %d: %w", system.Timeline, err)
		}
		if o.History, err = parseHistory(string(file.Content)); err != nil {
			return event.Origin{}, event.Fail(event.Unexpected, hintProtocol, "read the history of timeline %d: %w", system.Timeline, err)
		}
	}
	return o, nil
}
