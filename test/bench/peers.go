package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// peer is a contender that is written here, in the process that runs it.
type peer struct {
	role, dsn, natsURL, slot string
	events, size             int
}

const (
	pendingAcks = 1000 // of asynchronous publishing
	batchSize   = 1000 // of the polling relay
)

// run works until ctx ends, and returns nil then.
func (p peer) run(ctx context.Context) error {
	nc, err := nats.Connect(p.natsURL)
	if err != nil {
		return err
	}
	defer nc.Close()
	switch p.role {
	case publishOnly:
		err = p.publish(ctx, nc)
	case polling:
		err = p.poll(ctx, nc)
	case listener:
		err = p.listen(ctx, nc)
	default:
		err = fmt.Errorf("unknown role %q", p.role)
	}
	if ctx.Err() != nil {
		return nil
	}
	if err == nil {
		<-ctx.Done()
	}
	return err
}

// message has the headers of a relay's message, but for those of the chain.
func message(id, aggregateID string, payload []byte, pos, at string) *nats.Msg {
	return &nats.Msg{Subject: "outbox.order.created", Data: payload, Header: nats.Header{
		jetstream.MsgIDHeader:     {id},
		event.HeaderID:            {id},
		event.HeaderPos:           {pos},
		event.HeaderAggregateType: {"order"},
		event.HeaderAggregateID:   {aggregateID},
		event.HeaderEventType:     {"created"},
		event.HeaderTime:          {at},
		event.HeaderContentType:   {"application/json"},
	}}
}

// publish is JetStream alone: messages like those of the backlog, made on the way.
func (p peer) publish(ctx context.Context, nc *nats.Conn) error {
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(pendingAcks))
	if err != nil {
		return err
	}
	fmt.Println("streaming")
	pos := event.Position{Timeline: 1, Commit: 0x1_5000_0000, Change: 0x1_5000_0000}
	at := time.Now().UTC().Format(time.RFC3339Nano)
	for n := range p.events {
		pos.Change += 400
		head := `{"n": ` + strconv.Itoa(n) + `, "pad": "`
		body := head + strings.Repeat("x", max(p.size-len(head)-2, 1)) + `"}`
		if _, err := js.PublishMsgAsync(message(uuid(), "order-"+strconv.Itoa(n%1000), []byte(body), pos.String(), at)); err != nil {
			return err
		}
	}
	return settled(ctx, js)
}

func settled(ctx context.Context, js jetstream.JetStream) error {
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// poll is a good polling relay: a batch is locked, published with many
// messages in flight, and marked by one update once every ack is there.
func (p peer) poll(ctx context.Context, nc *nats.Conn) error {
	conn, err := pgx.Connect(ctx, p.dsn)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(pendingAcks))
	if err != nil {
		return err
	}
	fmt.Println("streaming")
	for {
		n, err := p.batch(ctx, conn, js)
		if err != nil {
			return err
		}
		if n == 0 {
			if err := pause(ctx, 100*time.Millisecond); err != nil {
				return err
			}
		}
	}
}

func (p peer) batch(ctx context.Context, conn *pgx.Conn, js jetstream.JetStream) (int, error) {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	rows, err := tx.Query(ctx, `SELECT seq, id::text, aggregate_type, aggregate_id, event_type, payload, created_at FROM `+pollTable+`
		WHERE published_at IS NULL ORDER BY seq LIMIT $1 FOR UPDATE SKIP LOCKED`, batchSize)
	if err != nil {
		return 0, err
	}
	var seqs []int64
	var acks []jetstream.PubAckFuture
	for rows.Next() {
		var seq int64
		var id, aggregateType, aggregateID, eventType string
		var payload []byte
		var at time.Time
		if err := rows.Scan(&seq, &id, &aggregateType, &aggregateID, &eventType, &payload, &at); err != nil {
			return 0, err
		}
		m := message(id, aggregateID, payload, strconv.FormatInt(seq, 10), at.UTC().Format(time.RFC3339Nano))
		m.Subject = "outbox." + aggregateType + "." + eventType
		ack, err := js.PublishMsgAsync(m)
		if err != nil {
			return 0, err
		}
		seqs, acks = append(seqs, seq), append(acks, ack)
	}
	if err := rows.Err(); err != nil || len(seqs) == 0 {
		return 0, err
	}
	if err := settled(ctx, js); err != nil {
		return 0, err
	}
	for _, ack := range acks {
		select {
		case <-ack.Ok():
		case err := <-ack.Err():
			return 0, err
		}
	}
	if _, err := tx.Exec(ctx, "UPDATE "+pollTable+" SET published_at = now() WHERE seq = ANY($1)", seqs); err != nil {
		return 0, err
	}
	return len(seqs), tx.Commit(ctx)
}

// statusEvery is the bare listener's rhythm of statuses.
const statusEvery = 10 * time.Second

// listen is a bare listener: it publishes each row as it comes and waits for no
// ack, so it promises nothing. It is the least that a latency can be with these libraries.
func (p peer) listen(ctx context.Context, nc *nats.Conn) error {
	conf, err := pgconn.ParseConfig(p.dsn)
	if err != nil {
		return err
	}
	conf.RuntimeParams["replication"] = "database"
	conn, err := pgconn.ConnectConfig(ctx, conf)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	err = pglogrepl.StartReplication(ctx, conn, p.slot, 0, pglogrepl.StartReplicationOptions{PluginArgs: []string{
		"proto_version '1'", "publication_names '" + publication + "'",
	}})
	if err != nil {
		return err
	}
	fmt.Println("streaming")
	relations := map[uint32]*pglogrepl.RelationMessage{}
	var end pglogrepl.LSN
	for {
		wait, cancel := context.WithTimeout(ctx, statusEvery)
		for err = nil; err == nil; {
			var msg pgproto3.BackendMessage
			if msg, err = conn.ReceiveMessage(wait); err == nil {
				err = p.heard(nc, msg, relations, &end)
			}
		}
		cancel()
		if !pgconn.Timeout(err) || ctx.Err() != nil {
			return err
		}
		if err := pglogrepl.SendStandbyStatusUpdate(ctx, conn, pglogrepl.StandbyStatusUpdate{WALWritePosition: end}); err != nil {
			return err
		}
	}
}

func (p peer) heard(nc *nats.Conn, msg pgproto3.BackendMessage, relations map[uint32]*pglogrepl.RelationMessage, end *pglogrepl.LSN) error {
	data, ok := msg.(*pgproto3.CopyData)
	if !ok {
		return fmt.Errorf("unexpected %T", msg)
	}
	if data.Data[0] != pglogrepl.XLogDataByteID {
		return nil
	}
	x, err := pglogrepl.ParseXLogData(data.Data[1:])
	if err != nil {
		return err
	}
	m, err := pglogrepl.Parse(x.WALData)
	if err != nil {
		return err
	}
	switch m := m.(type) {
	case *pglogrepl.RelationMessage:
		relations[m.RelationID] = m
	case *pglogrepl.CommitMessage:
		*end = m.TransactionEndLSN
	case *pglogrepl.InsertMessage:
		rel := relations[m.RelationID]
		if rel == nil || len(rel.Columns) != len(m.Tuple.Columns) {
			return errors.New("row of an unknown table")
		}
		var id, aggregateID, at string
		var payload []byte
		for i, c := range rel.Columns {
			switch v := m.Tuple.Columns[i].Data; c.Name {
			case "id":
				id = string(v)
			case "aggregate_id":
				aggregateID = string(v)
			case "created_at":
				at = string(v)
			case "payload":
				payload = v
			}
		}
		return nc.PublishMsg(message(id, aggregateID, payload, x.WALStart.String(), at))
	}
	return nil
}

// uuid is a random one, version 4.
func uuid() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[0:4], b[4:6], b[6:8], b[8:10], b[10:16])
}
