package outbox

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/walrelay/walrelay/event"
)

// Schema is what `walrelay init` makes: a table, its place in a publication,
// and the rights of the relay's role. Several tables may share a publication:
// each has a Schema of its own.
type Schema struct {
	Table       Table
	Publication string
	Role        string // the relay's role; "" grants nothing
	Delete      bool   // it may delete rows, too, which pruning needs

	// Partitioned makes the table one of partitions by time, the first of them
	// that of now, and one for what fits none; "" makes a plain table.
	Partitioned Span

	// Shards makes that many publications, each with the rows of its share of the
	// aggregates, in the place of one; 0 makes one for all rows. It needs Postgres 15.
	Shards int
}

// Span is the time that a partition covers.
type Span string

// The spans.
const (
	Day   Span = "day"
	Week  Span = "week"
	Month Span = "month"
)

// format is that of a partition's suffix, for to_char.
func (s Span) format() string {
	switch s {
	case Week:
		return `IYYY"w"IW`
	case Month:
		return "YYYYMM"
	}
	return "YYYYMMDD"
}

// ahead is how many partitions are made beside that of now, so that nobody has
// to make one at once.
const ahead = 3

// Validate returns every mistake, joined in one Usage failure.
func (s Schema) Validate() error {
	errs := s.Table.check()
	if err := checkName(s.Publication); err != nil {
		errs = append(errs, fmt.Errorf("publication %q: %w", s.Publication, err))
	}
	if s.Role != "" {
		if err := checkName(s.Role); err != nil {
			errs = append(errs, fmt.Errorf("role %q: %w", s.Role, err))
		}
	}
	switch s.Partitioned {
	case "", Day, Week, Month:
	default:
		errs = append(errs, fmt.Errorf("--partitioned %q: want day, week or month", s.Partitioned))
	}
	if s.Partitioned != "" && s.Table.column(roleCreatedAt) == "" {
		errs = append(errs, errors.New("--partitioned: a partitioned table needs a column with the role created_at"))
	}
	if s.Shards != 0 {
		errs = append(errs, s.checkShards()...)
	}
	if len(errs) == 0 {
		return nil
	}
	return event.Fail(event.Usage, "", "outbox schema: %w", errors.Join(errs...))
}

// SQL is the DDL as a script of statements that may be run again and again.
// They are what Apply runs, except that a script cannot compare an existing
// table with the contract. The Schema must be valid.
func (s Schema) SQL() string {
	var b strings.Builder
	if s.Table.schema() != "public" {
		b.WriteString(guarded(
			fmt.Sprintf("NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = %s)", quote(s.Table.schema())),
			s.createSchema()))
		b.WriteByte('\n')
	}
	b.WriteString("-- The outbox: insert a row in the transaction whose event it is.\n" +
		"-- An existing table is left as it is; `walrelay init --apply` says where it differs.\n")
	b.WriteString(s.createTable(true))
	if s.Partitioned != "" {
		b.WriteString("\n-- The partitions of now and of the next time; run it again to make more. To prune, drop one that was\n" +
			"-- published, which costs no message. What fits none goes to the default.\n")
		b.WriteString(s.partitionsBlock())
	}
	b.WriteString("\n-- Inserts only, so that clean-up of the table costs no message.\n")
	if s.Shards > 0 {
		b.WriteString("-- An aggregate's rows are all in one publication; each is for a slot, a stream and a relay of its own.\n")
		b.WriteString(s.shardsBlock())
	} else {
		b.WriteString(s.publicationBlock())
	}
	if s.Role == "" {
		return b.String()
	}
	b.WriteString("\n-- The relay's role. LOGIN and REPLICATION let it read the slot; it has no password yet:\n" +
		"-- give it one with \\password, or a certificate.\n")
	b.WriteString(guarded(
		fmt.Sprintf("NOT EXISTS (SELECT FROM pg_roles WHERE rolname = %s)", quote(s.Role)),
		s.createRole()))
	b.WriteString("\n-- CONNECT, for the replication connection and the SQL connection that watches the slot.\n")
	b.WriteString(doBlock(fmt.Sprintf("    EXECUTE format('GRANT CONNECT ON DATABASE %%I TO %%I', current_database(), %s);\n", quote(s.Role))))
	b.WriteString("\n-- USAGE and SELECT, to read rows back: checks, backfill and replay. Streaming itself needs neither,\n" +
		"-- since REPLICATION reads every row of the publication. " + s.mayWrite() + "\n")
	b.WriteString(s.grantUsage() + ";\n" + s.grantSelect() + ";\n")
	if s.Delete {
		b.WriteString(s.grantDelete() + ";\n")
	}
	return b.String()
}

func (s Schema) table() string { return pgx.Identifier{s.Table.schema(), s.Table.Name}.Sanitize() }

func ident(name string) string { return pgx.Identifier{name}.Sanitize() }

func (s Schema) createSchema() string { return "CREATE SCHEMA " + ident(s.Table.schema()) }

func (s Schema) createTable(ifNotExists bool) string {
	var names, ddl, comments []string
	for _, role := range roles {
		name := s.Table.column(role)
		_, explicit := s.Table.Columns[role]
		if name == "" || role == roleContentType && !explicit || slices.Contains(names, ident(name)) {
			continue
		}
		names = append(names, ident(name))
		ddl = append(ddl, wanted[role].ddl)
		comments = append(comments, wanted[role].comment)
	}
	width := 0
	for _, n := range names {
		width = max(width, len(n))
	}
	columns := len(names)
	if s.Partitioned != "" {
		// Keys of a partitioned table have to include what it is partitioned by.
		key := ident(s.Table.column(roleCreatedAt))
		for i, n := range names {
			for _, unique := range []string{" PRIMARY KEY", " UNIQUE"} {
				if plain, ok := strings.CutSuffix(ddl[i], unique); ok {
					ddl[i] = plain
					names = append(names, strings.TrimSpace(unique)+" ("+n+", "+key+")")
					ddl, comments = append(ddl, ""), append(comments, "")
				}
			}
		}
	}
	var b strings.Builder
	b.WriteString("CREATE TABLE ")
	if ifNotExists {
		b.WriteString("IF NOT EXISTS ")
	}
	b.WriteString(s.table() + " (\n")
	for i, n := range names {
		comma := ","
		if i == len(names)-1 {
			comma = ""
		}
		if i >= columns {
			fmt.Fprintf(&b, "    %s%s\n", n, comma)
			continue
		}
		fmt.Fprintf(&b, "    %-*s %s%s -- %s\n", width, n, ddl[i], comma, comments[i])
	}
	if s.Partitioned != "" {
		fmt.Fprintf(&b, ") PARTITION BY RANGE (%s);\n", ident(s.Table.column(roleCreatedAt)))
		return b.String()
	}
	b.WriteString(");\n")
	return b.String()
}

// partitionsBlock makes the partitions of a table that is partitioned. Their
// bounds are in UTC. Rows may lie in the default already where a
// partition would begin; it is left out then.
func (s Schema) partitionsBlock() string {
	base := cut(s.Table.Name, maxName-len("_20060102"))
	root := s.table()
	return doBlock(fmt.Sprintf(`    IF (SELECT relkind = 'p' FROM pg_class WHERE oid = %[1]s::regclass) THEN
        EXECUTE format('CREATE TABLE IF NOT EXISTS %%I.%%I PARTITION OF %%s DEFAULT', %[2]s, %[3]s, %[1]s);
        FOR i IN 0..%[4]d LOOP
            BEGIN
                EXECUTE format('CREATE TABLE IF NOT EXISTS %%I.%%I PARTITION OF %%s FOR VALUES FROM (%%L) TO (%%L)', %[2]s,
                    %[5]s || to_char(date_trunc(%[6]s, now() AT TIME ZONE 'UTC') + i * interval %[7]s, %[8]s), %[1]s,
                    (date_trunc(%[6]s, now() AT TIME ZONE 'UTC') + i * interval %[7]s)::text || '+00',
                    (date_trunc(%[6]s, now() AT TIME ZONE 'UTC') + (i + 1) * interval %[7]s)::text || '+00');
            EXCEPTION WHEN check_violation THEN
                RAISE NOTICE 'rows of that time lie in the default partition';
            END;
        END LOOP;
    END IF;
`, quote(root), quote(s.Table.schema()), quote(base+"_default"), ahead, quote(base+"_"), quote(string(s.Partitioned)), quote("1 "+string(s.Partitioned)), quote(s.Partitioned.format())))
}

func (s Schema) createPublication(partitioned bool) string {
	// Through the root, a partition's rows carry the name and the columns of the table they were inserted into.
	root := ""
	if partitioned {
		root = ", publish_via_partition_root = true"
	}
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s WITH (publish = 'insert'%s)", ident(s.Publication), s.table(), root)
}

func (s Schema) addTable() string {
	return fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s", ident(s.Publication), s.table())
}

func (s Schema) createRole() string { return "CREATE ROLE " + ident(s.Role) + " LOGIN REPLICATION" }

func (s Schema) grantUsage() string {
	return fmt.Sprintf("GRANT USAGE ON SCHEMA %s TO %s", ident(s.Table.schema()), ident(s.Role))
}

func (s Schema) grantSelect() string {
	return fmt.Sprintf("GRANT SELECT ON TABLE %s TO %s", s.table(), ident(s.Role))
}

func (s Schema) grantDelete() string {
	return fmt.Sprintf("GRANT DELETE ON TABLE %s TO %s", s.table(), ident(s.Role))
}

func (s Schema) mayWrite() string {
	if s.Delete {
		return "DELETE lets it prune."
	}
	return "Nothing lets the relay write."
}

func (s Schema) publicationBlock() string {
	table, pub := quote(s.table())+"::regclass", quote(s.Publication)
	var b strings.Builder
	fmt.Fprintf(&b, "    IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = %s) THEN\n", pub)
	fmt.Fprintf(&b, "        IF (SELECT relkind = 'p' FROM pg_class WHERE oid = %s) THEN\n", table)
	fmt.Fprintf(&b, "            %s;\n", s.createPublication(true))
	b.WriteString("        ELSE\n")
	fmt.Fprintf(&b, "            %s;\n", s.createPublication(false))
	b.WriteString("        END IF;\n")
	b.WriteString("    ELSIF NOT EXISTS (\n" +
		"        SELECT FROM pg_publication p\n" +
		"        LEFT JOIN pg_publication_rel r ON r.prpubid = p.oid AND r.prrelid = " + table + "\n" +
		"        WHERE p.pubname = " + pub + " AND (p.puballtables OR r.oid IS NOT NULL)\n" +
		"    ) THEN\n")
	fmt.Fprintf(&b, "        %s;\n    END IF;\n", s.addTable())
	return doBlock(b.String())
}

// guarded is a statement that runs only under a condition, for those that
// have no IF NOT EXISTS of their own.
func guarded(condition, statement string) string {
	return doBlock(fmt.Sprintf("    IF %s THEN\n        %s;\n    END IF;\n", condition, statement))
}

// doBlock wraps PL/pgSQL in a dollar quote that does not occur in it.
func doBlock(body string) string {
	return "DO " + dollarQuoted("\nBEGIN\n"+body+"END\n") + ";\n"
}

func dollarQuoted(body string) string {
	tag := "$walrelay$"
	for n := 0; strings.Contains(body, tag); n++ {
		tag = fmt.Sprintf("$walrelay%d$", n)
	}
	return tag + body + tag
}

// quote is a string literal, whatever standard_conforming_strings says.
func quote(s string) string {
	s = strings.ReplaceAll(s, "'", "''")
	if strings.Contains(s, `\`) {
		return " E'" + strings.ReplaceAll(s, `\`, `\\`) + "'"
	}
	return "'" + s + "'"
}

// cut shortens a name to at most n bytes, between two characters.
func cut(name string, n int) string {
	if len(name) <= n {
		return name
	}
	for n > 0 && !utf8.RuneStart(name[n]) {
		n--
	}
	return name[:n]
}
