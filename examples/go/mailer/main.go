package main

import (
	"context"
	"encoding/json"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/inbox"
)

// handle runs in the transaction that also records that the event was handled.
func handle(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	var o struct {
		ID       int64  `json:"id"`
		Customer string `json:"customer"`
	}
	if err := json.Unmarshal(m.Data, &o); err != nil {
		return inbox.Reject(err) // no further try can mend it
	}
	if m.EventType != "paid" {
		return nil
	}
	_, err := tx.Exec(ctx, "INSERT INTO mails (recipient, text) VALUES ($1, format('Order %s is paid. Thank you!', $2::bigint))", o.Customer, o.ID)
	return err
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	db, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.Exec(ctx, "CREATE TABLE IF NOT EXISTS mails (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, recipient text NOT NULL, text text NOT NULL)"); err != nil {
		return err
	}

	url := os.Getenv("NATS_URL")
	if url == "" {
		url = nats.DefaultURL
	}
	nc, err := nats.Connect(url, nats.MaxReconnects(-1))
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	if _, err := js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "MAIL_DLQ", Subjects: []string{"dead.mail"}}); err != nil {
		return err
	}
	consumer, err := js.CreateOrUpdateConsumer(ctx, "OUTBOX", jetstream.ConsumerConfig{
		Durable: "mailer", FilterSubject: "outbox.order.>",
		AckPolicy: jetstream.AckExplicitPolicy, AckWait: 10 * time.Second, MaxAckPending: 500, MaxDeliver: -1,
	})
	if err != nil {
		return err
	}
	return inbox.Run(ctx, inbox.Options{JetStream: js, Consumer: consumer, DB: db, Handle: handle, DeadLetter: "dead.mail"})
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
