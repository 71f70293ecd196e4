package main

import (
	"context"
	"encoding/json"
	"errors"
	"log"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

type order struct {
	ID       int64  `json:"id"`
	Customer string `json:"customer"`
	Cents    int64  `json:"cents"`
	Status   string `json:"status"`
}

// place stores an order together with the event that says so: both or neither.
func place(ctx context.Context, db *pgxpool.Pool, o *order) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "INSERT INTO orders (customer, cents) VALUES ($1, $2) RETURNING id, status", o.Customer, o.Cents).Scan(&o.ID, &o.Status)
		if err != nil {
			return err
		}
		return emit(ctx, tx, "placed", o)
	})
}

func pay(ctx context.Context, db *pgxpool.Pool, id int64) (o order, err error) {
	err = pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, "UPDATE orders SET status = 'paid' WHERE id = $1 AND status = 'placed' RETURNING id, customer, cents, status", id).
			Scan(&o.ID, &o.Customer, &o.Cents, &o.Status)
		if err != nil {
			return err
		}
		return emit(ctx, tx, "paid", &o)
	})
	return o, err
}

// emit is all that a service does to publish.
func emit(ctx context.Context, tx pgx.Tx, what string, o *order) error {
	payload, err := json.Marshal(o)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, "INSERT INTO outbox (id, aggregate_type, aggregate_id, event_type, payload) VALUES (gen_random_uuid(), 'order', $1, $2, $3)",
		strconv.FormatInt(o.ID, 10), what, payload)
	return err
}

func routes(db *pgxpool.Pool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", func(w http.ResponseWriter, r *http.Request) {
		var o order
		if err := json.NewDecoder(r.Body).Decode(&o); err != nil || o.Customer == "" {
			http.Error(w, `want {"customer": "…", "cents": 1990}`, http.StatusBadRequest)
			return
		}
		err := place(r.Context(), db, &o)
		answer(w, o, err)
	})
	mux.HandleFunc("POST /orders/{id}/pay", func(w http.ResponseWriter, r *http.Request) {
		id, err := strconv.ParseInt(r.PathValue("id"), 10, 64)
		if err != nil {
			http.Error(w, "an order's id is a number", http.StatusBadRequest)
			return
		}
		o, err := pay(r.Context(), db, id)
		answer(w, o, err)
	})
	return mux
}

func answer(w http.ResponseWriter, o order, err error) {
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		http.Error(w, "no such order, or paid already", http.StatusNotFound)
	case err != nil:
		log.Print(err)
		http.Error(w, "try again later", http.StatusServiceUnavailable)
	default:
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(o)
	}
}

func run() error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	db, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := db.Exec(ctx, `CREATE TABLE IF NOT EXISTS orders (
		id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text NOT NULL, cents bigint NOT NULL, status text NOT NULL DEFAULT 'placed')`); err != nil {
		return err
	}
	srv := &http.Server{Addr: os.Getenv("ADDR"), Handler: routes(db), ReadHeaderTimeout: 5 * time.Second}
	if srv.Addr == "" {
		srv.Addr = "127.0.0.1:8000"
	}
	context.AfterFunc(ctx, func() { _ = srv.Shutdown(context.Background()) })
	log.Print("taking orders at ", srv.Addr)
	if err := srv.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
