package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// EmitFunction is the SQL function that writes an event as a logical message.
const EmitFunction = "walrelay_emit"

// Emitting is what `walrelay init` makes for logical messages.
type Emitting struct {
	Schema   string // of the function; "" is public
	Prefix   string // of the messages; "" is DefaultPrefix
	Function bool   // make the function
	// Emitters are the only roles that may emit logical messages; none leaves
	// the right with every role, as Postgres has it.
	Emitters []string
	// Publication is made, empty, where it is missing; "" makes none.
	Publication string
}

func (e Emitting) schema() string { return firstOf(e.Schema, "public") }

// Validate returns every mistake, joined in one Usage failure.
func (e Emitting) Validate() error {
	var errs []error
	if badValue([]byte(e.Prefix)) {
		errs = append(errs, fmt.Errorf("message prefix %q has a line break or NUL", e.Prefix))
	}
	for _, name := range append([]string{e.schema()}, e.Emitters...) {
		if err := checkName(name); err != nil {
			errs = append(errs, fmt.Errorf("name %q: %w", name, err))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return event.Fail(event.Usage, "", "logical messages: %w", errors.Join(errs...))
}

// SQL is a script that may be run again and again. Where nobody is named to
// emit messages, what would restrict it is a comment.
func (e Emitting) SQL() string {
	var b strings.Builder
	if e.Publication != "" {
		b.WriteString("-- Logical messages are in no publication; the slot needs one all the same.\n")
		b.WriteString(guarded(fmt.Sprintf("NOT EXISTS (SELECT FROM pg_publication WHERE pubname = %s)", quote(e.Publication)), e.createPublication()))
		b.WriteByte('\n')
	}
	if e.Function {
		b.WriteString("-- An event without a row: SELECT " + EmitFunction + "('order', '42', 'paid', '{\"total\": 19.90}');\n" +
			"-- It is part of the transaction. The relay takes it with --messages.\n")
		b.WriteString(e.createFunction() + ";\n\n")
	}
	if len(e.Emitters) > 0 {
		b.WriteString("-- Only these roles can emit logical messages, and so make events.\n")
		b.WriteString(e.restrict(e.Emitters))
		return b.String()
	}
	b.WriteString("-- Any role can emit logical messages, and so make events. To allow it to chosen roles only, as\n" +
		"-- `walrelay init --emit-grant my_service` does:\n")
	for line := range strings.Lines(e.restrict([]string{"my_service"})) {
		b.WriteString("-- " + line)
	}
	return b.String()
}

func (e Emitting) createPublication() string {
	return "CREATE PUBLICATION " + ident(e.Publication) + " WITH (publish = 'insert')"
}

func (e Emitting) function() string { return pgx.Identifier{e.schema(), EmitFunction}.Sanitize() }

const emitTypes = "text, text, text, jsonb, jsonb, uuid"

// createFunction refuses what would be poison where it can still roll back.
// The content goes out as UTF-8 in databases of every encoding.
func (e Emitting) createFunction() string {
	return "CREATE OR REPLACE FUNCTION " + e.function() + `(
    aggregate_type text, aggregate_id text, event_type text, payload jsonb,
    headers jsonb DEFAULT NULL, id uuid DEFAULT gen_random_uuid()
) RETURNS uuid LANGUAGE plpgsql VOLATILE AS ` + dollarQuoted(e.body())
}

func (e Emitting) body() string {
	return `
BEGIN
    IF aggregate_type IS NULL OR aggregate_id IS NULL OR event_type IS NULL OR id IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = '` + EmitFunction + `: only payload and headers may be NULL';
    END IF;
    IF pg_catalog.jsonb_typeof(headers) NOT IN ('object', 'null') THEN
        RAISE invalid_parameter_value USING MESSAGE = '` + EmitFunction + `: headers must be a JSON object';
    END IF;
    PERFORM pg_catalog.pg_logical_emit_message(true, ` + quote(firstOf(e.Prefix, DefaultPrefix)) + `, pg_catalog.convert_to(
        pg_catalog.jsonb_build_object('id', id, 'aggregate_type', aggregate_type, 'aggregate_id', aggregate_id,
            'event_type', event_type, 'payload', payload, 'headers', headers)::text, 'UTF8'));
    RETURN id;
END
`
}

// emitters finds Postgres's functions: from 17 they have an argument more.
const emitters = "SELECT oid::regprocedure FROM pg_catalog.pg_proc WHERE proname = 'pg_logical_emit_message' AND pronamespace = 'pg_catalog'::regnamespace"

func (e Emitting) restrict(roles []string) string {
	var b strings.Builder
	b.WriteString("    FOR f IN " + emitters + " LOOP\n        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f);\n")
	for _, role := range roles {
		fmt.Fprintf(&b, "        EXECUTE format('GRANT EXECUTE ON FUNCTION %%s TO %%I', f, %s);\n", quote(role))
	}
	b.WriteString("    END LOOP;\n")
	return "DO " + dollarQuoted("\nDECLARE f regprocedure;\nBEGIN\n"+b.String()+"END\n") + ";\n"
}

// Apply makes what is missing, in one transaction, and returns what it
// changed. It blocks for some round trips.
func (e Emitting) Apply(ctx context.Context, conn *pgx.Conn) (changes []string, err error) {
	if err := e.Validate(); err != nil {
		return nil, err
	}
	a := &applier{}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		a.tx = tx
		return e.apply(ctx, a)
	})
	if err != nil {
		return nil, classify(err, "set up logical messages")
	}
	return a.changes, nil
}

func (e Emitting) apply(ctx context.Context, a *applier) error {
	if _, err := a.tx.Exec(ctx, "SELECT pg_catalog.pg_advisory_xact_lock($1)", int64(applyLock)); err != nil {
		return err
	}
	if e.Publication != "" {
		there, err := a.holds(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = $1)", e.Publication)
		if err != nil {
			return err
		}
		if !there {
			if err := a.change(ctx, e.createPublication(), "publication %s created, without tables", ident(e.Publication)); err != nil {
				return err
			}
		}
	}
	if e.Function {
		same, err := a.holds(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE oid = pg_catalog.to_regprocedure($1) AND prosrc = $2)",
			e.function()+"("+emitTypes+")", e.body())
		if err != nil {
			return err
		}
		if !same {
			if err := a.change(ctx, e.createFunction(), "function %s created", e.function()); err != nil {
				return err
			}
		}
	}
	return e.applyGrants(ctx, a)
}

func (e Emitting) applyGrants(ctx context.Context, a *applier) error {
	if len(e.Emitters) == 0 {
		return nil
	}
	if err := a.rolesExist(ctx, e.Emitters); err != nil {
		return err
	}
	rows, err := a.tx.Query(ctx, strings.Replace(emitters, "oid::regprocedure", "oid::regprocedure::text", 1))
	if err != nil {
		return err
	}
	functions, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, f := range functions {
		public, err := a.holds(ctx, "SELECT pg_catalog.has_function_privilege('public', $1::text, 'EXECUTE')", f)
		if err != nil {
			return err
		}
		if public {
			sql := "REVOKE EXECUTE ON FUNCTION " + f + " FROM PUBLIC"
			if err := a.change(ctx, sql, "%s", sql); err != nil {
				return err
			}
		}
		for _, role := range e.Emitters {
			has, err := a.holds(ctx, "SELECT pg_catalog.has_function_privilege($1::text, $2::text, 'EXECUTE')", role, f)
			if err != nil {
				return err
			}
			if has {
				continue
			}
			sql := "GRANT EXECUTE ON FUNCTION " + f + " TO " + ident(role)
			if err := a.change(ctx, sql, "%s", sql); err != nil {
				return err
			}
		}
	}
	return nil
}
