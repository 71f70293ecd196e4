package outbox

import (
	"context"
	"errors"
	"fmt"

	"github.com/walrelay/walrelay/event"
)

// maxShards bounds how many walsenders decode the same log.
const maxShards = 64

// Shard is the name of a shard's publication.
func Shard(publication string, i int) string { return fmt.Sprintf("%s_%d", publication, i) }

func (s Schema) checkShards() []error {
	var errs []error
	if s.Shards < 2 || s.Shards > maxShards {
		return append(errs, fmt.Errorf("--shards %d: want 2 to %d", s.Shards, maxShards))
	}
	if last := Shard(s.Publication, s.Shards-1); checkName(s.Publication) == nil && checkName(last) != nil {
		errs = append(errs, fmt.Errorf("publication %q: %w", last, checkName(last)))
	}
	if s.Table.column(roleAggregateID) == "" {
		errs = append(errs, errors.New("--shards: they need a column with the role aggregate_id"))
	}
	return errs
}

// shardsBlock makes the publications. A row filter may call built-in functions
// only, and none to convert a type, so the hash is that of the column's type:
// those of hash partitioning, which gave the same from 15 to 18. The mask makes
// it positive. A row without aggregate goes to the first shard and not to none.
func (s Schema) shardsBlock() string {
	return fmt.Sprintf("DO %s;\n", dollarQuoted(fmt.Sprintf(`
DECLARE
    hash text := (SELECT CASE atttypid
        WHEN 'uuid'::regtype THEN 'uuid_hash_extended' WHEN 'bigint'::regtype THEN 'hashint8extended'
        WHEN 'integer'::regtype THEN 'hashint4extended' WHEN 'smallint'::regtype THEN 'hashint2extended' ELSE 'hashtextextended' END
        FROM pg_attribute WHERE attrelid = %[1]s::regclass AND attname = %[2]s);
    root text := (SELECT CASE relkind WHEN 'p' THEN ', publish_via_partition_root = true' ELSE '' END FROM pg_class WHERE oid = %[1]s::regclass);
    name text;
    rows text;
BEGIN
    IF current_setting('server_version_num')::int < 150000 THEN
        RAISE EXCEPTION 'row filters of publications need Postgres 15' USING ERRCODE = 'feature_not_supported';
    END IF;
    FOR shard IN 0..%[4]d LOOP
        name := %[3]s || '_' || shard;
        rows := format('TABLE %%s WHERE ((coalesce(%%s(%%I, 0), 0) & 9223372036854775807) %%%% %[5]d = %%s)', %[1]s, hash, %[2]s, shard);
        IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = name) THEN
            EXECUTE format('CREATE PUBLICATION %%I FOR %%s WITH (publish = ''insert''%%s)', name, rows, root);
        ELSIF NOT EXISTS (SELECT FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = name AND r.prrelid = %[1]s::regclass) THEN
            EXECUTE format('ALTER PUBLICATION %%I ADD %%s', name, rows);
        END IF;
    END LOOP;
END
`, quote(s.table()), quote(s.Table.column(roleAggregateID)), quote(s.Publication), s.Shards-1, s.Shards)))
}

// ensureShards makes the publications that are missing, and refuses those that
// have the table in another way.
func (a *applier) ensureShards(ctx context.Context, rel *relation) error {
	if since15, err := a.since15(ctx); err != nil || !since15 {
		if err == nil {
			err = event.Fail(event.Precondition, "upgrade Postgres, or do without --shards", "row filters of publications need Postgres 15")
		}
		return err
	}
	publishes := func(name string) (yes bool, err error) {
		return a.holds(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid WHERE p.pubname = $1 AND r.prrelid = $2)", name, rel.oid)
	}
	var missing []string
	for i := range a.Shards {
		name := Shard(a.Publication, i)
		there, err := publishes(name)
		if err != nil {
			return err
		}
		if !there {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		if _, err := a.tx.Exec(ctx, a.shardsBlock()); err != nil {
			return err
		}
	}
	for i := range a.Shards {
		name := Shard(a.Publication, i)
		good, err := a.holds(ctx, `
			SELECT p.pubinsert AND (p.pubviaroot OR $3) AND coalesce(pg_catalog.pg_get_expr(r.prqual, r.prrelid) LIKE $4, false)
			FROM pg_catalog.pg_publication_rel r JOIN pg_catalog.pg_publication p ON p.oid = r.prpubid
			WHERE p.pubname = $1 AND r.prrelid = $2`, name, rel.oid, !rel.partitioned(), fmt.Sprintf(`%%hash%%\%% (%d)::bigint) = %d)`, a.Shards, i))
		if err != nil {
			return err
		}
		if !good {
			return event.Fail(event.Precondition, "choose other names with --publication; slots go on with the publications that they have",
				"publication %s has table %s in another way than shard %d of %d", ident(name), a.Table, i, a.Shards)
		}
	}
	for _, name := range missing {
		a.changes = append(a.changes, fmt.Sprintf("publication %s created for its shard of table %s", ident(name), a.table()))
	}
	return nil
}
