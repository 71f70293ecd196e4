package inbox

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walrelay/walrelay/event"
)

var errHandler = errors.New("no")

func nothing(context.Context, pgx.Tx) error { return nil }

func note(text string) func(context.Context, pgx.Tx) error {
	return func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "INSERT INTO notes VALUES ($1)", text)
		return err
	}
}

func notes(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	return ask[string](t, pool, "SELECT coalesce(string_agg(note, ' ' ORDER BY note), '') FROM notes")
}

func begin(t *testing.T, pool *pgxpool.Pool, o pgx.TxOptions) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(t.Context(), o)
	check(t, err)
	t.Cleanup(func() { tx.Rollback(context.Background()) })
	return tx
}

func TestOnce(t *testing.T) {
	pool := database(t)
	exec(t, pool, "CREATE TABLE notes (note text)")
	handle := func(consumer, id string, fn func(context.Context, pgx.Tx) error) (first bool, err error) {
		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			first, err = Once(t.Context(), tx, consumer, id, fn)
			return err
		})
		return first, err
	}
	for _, c := range []struct {
		consumer, id string
		first        bool
	}{{"mail", "1", true}, {"mail", "1", false}, {"mail", "2", true}, {"stock", "1", true}, {"mail", "2", false}} {
		if first, err := handle(c.consumer, c.id, note(c.consumer+c.id)); first != c.first || err != nil {
			t.Errorf("%s %s: first %v, %v", c.consumer, c.id, first, err)
		}
	}
	if _, err := handle("mail", "3", func(ctx context.Context, tx pgx.Tx) error {
		return errors.Join(note("lost")(ctx, tx), errHandler)
	}); !errors.Is(err, errHandler) {
		t.Errorf("got %v", err)
	}
	if first, err := handle("mail", "3", note("mail3")); !first || err != nil {
		t.Errorf("after a failure: first %v, %v", first, err)
	}
	if got, want := notes(t, pool), "mail1 mail2 mail3 stock1"; got != want {
		t.Errorf("effects are %q, want %q", got, want)
	}
}

// A caller who commits in spite of the error must not keep the record without the effects.
func TestFailedHandlerCannotBeCommitted(t *testing.T) {
	pool := database(t)
	exec(t, pool, "CREATE TABLE notes (note text)")
	tx := begin(t, pool, pgx.TxOptions{})
	if _, err := Once(t.Context(), tx, "mail", "1", func(context.Context, pgx.Tx) error { return errHandler }); !errors.Is(err, errHandler) {
		t.Errorf("got %v", err)
	}
	if err := tx.Commit(t.Context()); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("commit: %v", err)
	}

	// With a savepoint the transaction around it goes on.
	outer := begin(t, pool, pgx.TxOptions{})
	check(t, note("outer")(t.Context(), outer))
	for _, id := range []string{"1", "2"} {
		inner, err := outer.Begin(t.Context())
		check(t, err)
		_, err = Once(t.Context(), inner, "mail", id, func(ctx context.Context, tx pgx.Tx) error {
			check(t, note("inner"+id)(ctx, tx))
			if id == "1" {
				return errHandler
			}
			return nil
		})
		if (err != nil) != (id == "1") {
			t.Errorf("event %s: %v", id, err)
		}
		if err == nil {
			check(t, inner.Commit(t.Context()))
		}
	}
	check(t, outer.Commit(t.Context()))
	if got, want := notes(t, pool), "inner2 outer"; got != want {
		t.Errorf("effects are %q, want %q", got, want)
	}
	if got := ask[string](t, pool, "SELECT string_agg(id, ' ') FROM inbox"); got != "2" {
		t.Errorf("recorded are %q", got)
	}
}

func TestSecondDeliveryWaitsForTheFirst(t *testing.T) {
	for _, c := range []struct {
		name   string
		commit bool
		first  bool
	}{{"commit", true, false}, {"rollback", false, true}} {
		t.Run(c.name, func(t *testing.T) {
			pool := database(t)
			one := begin(t, pool, pgx.TxOptions{})
			_, err := Once(t.Context(), one, "mail", "1", nothing)
			check(t, err)
			two := begin(t, pool, pgx.TxOptions{})
			pid := two.Conn().PgConn().PID()
			type result struct {
				first bool
				err   error
			}
			done := make(chan result, 1)
			go func() {
				first, err := Once(t.Context(), two, "mail", "1", nothing)
				done <- result{first, err}
			}()
			await(t, "the second one waits", func() bool {
				return ask[bool](t, pool, "SELECT cardinality(pg_blocking_pids($1)) > 0", pid)
			})
			if c.commit {
				check(t, one.Commit(t.Context()))
			} else {
				check(t, one.Rollback(t.Context()))
			}
			if r := <-done; r.err != nil || r.first != c.first {
				t.Errorf("the second one: first %v, %v", r.first, r.err)
			}
		})
	}
}

func TestSnapshotsAreToldToTryAgain(t *testing.T) {
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		pool := database(t)
		tx := begin(t, pool, pgx.TxOptions{IsoLevel: level})
		exec(t, tx, "SELECT 1 FROM inbox") // the snapshot
		check(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := Once(t.Context(), tx, "mail", "1", nothing)
			return err
		}))
		_, err := Once(t.Context(), tx, "mail", "1", nothing)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != "40001" || !collided(err) {
			t.Errorf("%s: %v", level, err)
		}
		tx = begin(t, pool, pgx.TxOptions{IsoLevel: level})
		if first, err := Once(t.Context(), tx, "mail", "1", nothing); first || err != nil {
			t.Errorf("%s again: first %v, %v", level, first, err)
		}
	}
}

func TestPrune(t *testing.T) {
	pool := database(t)
	exec(t, pool, "INSERT INTO inbox SELECT 'mail', n::text, now() - n * interval '1 hour' FROM generate_series(0, 2999) n")
	exec(t, pool, "INSERT INTO inbox_tries SELECT 'mail', n::text, 1, now() - n * interval '1 day' FROM generate_series(0, 9) n")
	held := begin(t, pool, pgx.TxOptions{})
	exec(t, held, "SELECT FROM inbox WHERE id = '2000' FOR UPDATE") // and nobody waits for it
	n, err := Prune(t.Context(), pool, 100*time.Hour+30*time.Minute)
	if err != nil || n != 2898 {
		t.Errorf("pruned %d, %v", n, err)
	}
	check(t, held.Rollback(t.Context()))
	if got := ask[int](t, pool, "SELECT count(*) FROM inbox"); got != 102 {
		t.Errorf("%d are left", got)
	}
	if got := ask[int](t, pool, "SELECT count(*) FROM inbox_tries"); got != 5 {
		t.Errorf("%d tries are left", got)
	}
	if _, err := Prune(t.Context(), pool, 0); err == nil {
		t.Error("pruned everything")
	}
}

func TestSchema(t *testing.T) {
	pool := database(t)
	conn, err := pool.Acquire(t.Context())
	check(t, err)
	defer conn.Release()
	exec(t, pool, `CREATE ROLE "my consumer" LOGIN`)
	s := Schema{Table: Table{Schema: "Shop", Name: `in"box`}, Roles: []string{"my consumer"}}
	changes, err := s.Apply(t.Context(), conn.Conn())
	check(t, err)
	want := []string{
		"schema Shop created", `table "Shop"."in""box" created`, `table "Shop"."in""box_tries" created`, `index in"box_processed_at_idx created`,
		`GRANT USAGE ON SCHEMA "Shop" TO "my consumer"`, `GRANT SELECT, INSERT, UPDATE, DELETE ON "Shop"."in""box" TO "my consumer"`,
		`GRANT SELECT, INSERT, UPDATE, DELETE ON "Shop"."in""box_tries" TO "my consumer"`,
	}
	if !slices.Equal(changes, want) {
		t.Errorf("changes:\n%s\nwant:\n%s", strings.Join(changes, "\n"), strings.Join(want, "\n"))
	}
	if changes, err := s.Apply(t.Context(), conn.Conn()); len(changes) != 0 || err != nil {
		t.Errorf("again: %q, %v", changes, err)
	}
	exec(t, pool, s.SQL()) // the script, too
	role := connect(t, strings.Replace(pool.Config().ConnString(), "postgres@", "my%20consumer@", 1))
	check(t, pgx.BeginFunc(t.Context(), role, func(tx pgx.Tx) error {
		check(t, s.Table.checkRights(t.Context(), tx))
		first, err := s.Table.Once(t.Context(), tx, "mail", "1", nothing)
		if !first {
			t.Error("not the first")
		}
		return err
	}))
	if _, err := s.Table.Prune(t.Context(), role, time.Hour); err != nil {
		t.Error(err)
	}

	for _, c := range []struct {
		sql  string
		s    Schema
		want string
	}{
		{"CREATE TABLE other (id text)", Schema{Table: Table{Name: "other"}}, "no column consumer"},
		{"CREATE TABLE keyless (consumer text, id text, processed_at timestamptz)", Schema{Table: Table{Name: "keyless"}}, "no unique key"},
		{"", Schema{Roles: []string{"nobody"}}, `role "nobody" does not exist`},
		{"", Schema{Table: Table{Name: strings.Repeat("x", 50)}}, "longer than 63"},
	} {
		if c.sql != "" {
			exec(t, pool, c.sql)
		}
		_, err := c.s.Apply(t.Context(), conn.Conn())
		if err == nil || !strings.Contains(err.Error(), c.want) || event.ClassOf(err) == event.Transient {
			t.Errorf("%+v: %v", c.s, err)
		}
	}
}
