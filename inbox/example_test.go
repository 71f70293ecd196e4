package inbox_test

import (
	"context"
	"errors"
	"fmt"
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

func book(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	_, err := tx.Exec(ctx, "INSERT INTO bookings (event, body) VALUES ($1, $2)", m.ID, m.Data)
	return err
}

func ExampleRun() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	pool, err := pgxpool.New(ctx, "postgres://booker@localhost/books")
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	nc, err := nats.Connect(nats.DefaultURL, nats.MaxReconnects(-1))
	if err != nil {
		panic(err)
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		panic(err)
	}
	consumer, err := js.CreateOrUpdateConsumer(ctx, "OUTBOX", jetstream.ConsumerConfig{
		Durable: "books", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 10 * time.Second, MaxAckPending: 1000, MaxDeliver: -1,
	})
	if err != nil {
		panic(err)
	}
	err = inbox.Run(ctx, inbox.Options{JetStream: js, Consumer: consumer, DB: pool, Handle: book, DeadLetter: "dead.books"})
	if err != nil {
		panic(err)
	}
}

// A loop of one's own, whatever brings the events: ack after the commit.
func ExampleOnce() {
	handle := func(ctx context.Context, pool *pgxpool.Pool, msg jetstream.Msg) error {
		id := msg.Headers().Get("Outbox-Id")
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			first, err := inbox.Once(ctx, tx, "books", id, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "UPDATE accounts SET balance = balance + 1 WHERE id = 7")
				return err
			})
			if err == nil && !first {
				fmt.Println("handled before:", id)
			}
			return err
		})
		if err != nil {
			return errors.Join(err, msg.NakWithDelay(time.Second))
		}
		return msg.Ack()
	}
	_ = handle
}

func ExamplePrune() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://booker@localhost/books")
	if err != nil {
		panic(err)
	}
	defer pool.Close()
	n, err := inbox.Prune(ctx, pool, 30*24*time.Hour) // the stream keeps messages for three weeks
	fmt.Println(n, "deleted", err)
}

func ExampleLater() {
	_ = func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if err := charge(ctx, m); err != nil {
			return inbox.Later(err) // the payment service is away, and the event is as good as ever
		}
		return book(ctx, tx, m)
	}
}

func charge(context.Context, *inbox.Message) error { return nil }
