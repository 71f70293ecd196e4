// Package outbox is the contract of the outbox table: its DDL, the column
// presets, and how a row or a logical message becomes an event.Event.
//
// It knows neither the stream protocol nor NATS. The mapping half needs the
// standard library only; the SQL half (Apply, Inspect) uses pgx.
//
// # What callers do
//
//  1. ParseTable for each table, add presets, columns and subjects, and make
//     one Mapper of the Mapping. All mistakes are reported at once.
//  2. Call Map from one goroutine. What it writes into the event lies in the
//     record or in the Mapper: it is valid until the next record or the next call.
//  3. Schema.SQL prints the DDL; Apply runs it and never alters a table. Emitting
//     is the same for logical messages.
//  4. Rows reads a table as the replication stream would send it, for Map to show.
//
// # Roles
//
// A role is what a column is for; a preset names the column of each role, and
// Table.Columns overrides it. A role that is mapped to "" is not used.
//
//	role            default          debezium        becomes
//	id              id               id              Outbox-Id, Nats-Msg-Id
//	aggregate_type  aggregate_type   aggregatetype   Outbox-Aggregate-Type, subject
//	aggregate_id    aggregate_id     aggregateid     Outbox-Aggregate-Id, partition
//	event_type      event_type       type            Outbox-Event-Type, subject
//	payload         payload          payload         body, byte for byte; NULL is an empty body
//	headers         headers          –               headers
//	schema_version  schema_version   –               Outbox-Schema-Version
//	created_at      created_at       –               Outbox-Time, else the commit time
//	content_type    content_type     –               Content-Type
//	seq             seq              seq             order of reads of the table; not published
//
// Needed are id, payload, what the subject asks for, and every column that
// Table.Columns names; all other roles may lack their column. Check and Fits tell a
// relation without one of them by a Precondition failure, and its rows are poison.
// Names that a column had before follow the present one after "|".
//
// # Subjects
//
// A template is literals and placeholders, dots between the tokens:
//
//	{aggregate_type} {aggregate_id} {event_type} {schema_version}
//	{header:NAME}    a header of the event's own, by its exact name
//	{partition:N}    FNV-1a, 64 bits, of the aggregate id's bytes, modulo N
//
// A value's dots separate tokens. Every other byte that a subject cannot hold
// becomes %XX: space, control characters, '*', '>', '%', white space of
// Unicode, bytes that are not UTF-8, and a '$' that would begin the subject. A
// token that would be empty becomes a lone '%'; so does NULL. Nothing is lost:
// split at the dots, read '%' as empty and decode %XX, and the template's
// text with its raw values is back. Subjects are at most 1024 bytes long.
//
// An Override has a template for one type of event. With a Route a template has
// groups of a regular expression, too, as $1 and ${name}; their text is encoded
// as that of other values. Debezium leaves a value that does not match as the
// topic; here it is poison, since no stream binds it but by accident.
//
// # Headers of the event's own
//
// The headers column holds a JSON object: strings as they are, numbers and
// booleans as their JSON text, nested values as compact JSON, null dropped.
// Names that control the server or that the relay sets are dropped and
// counted, in any case: Nats-*, Status, Description, KV-Operation, Outbox-*.
// Content-Type is replaced by the content_type column where there is one. A
// HeaderColumn makes a header of a column and wins over one of the same name.
//
// With CloudEvents the context attributes are added as ce- headers, with
// percent-encoded values. Names of the event's own that begin with ce- are then
// extension attributes; those that the relay sets are dropped and counted. An
// event whose content type is application/cloudevents… is one by itself.
//
// # Logical messages
//
// With Mapping.Messages, pg_logical_emit_message(true, 'walrelay', '{…}')
// needs no table. Its content is a JSON object in UTF-8 with the roles as
// keys, seq excepted. The body is payload (raw JSON), payload_text (a string)
// or payload_base64; null is the same as absent. Other keys are an error,
// since a misspelled one would lose data.
//
//	table.go    tables, roles, presets     schema.go   the DDL as text
//	misfit.go   rows that fit no mapping   published.go  columns that are not sent
//	mapper.go   rows to events             apply.go    running it, and what it found
//	message.go  logical messages           inspect.go  an existing table against the contract
//	subject.go  templates and filters      json.go     members of an object, unchanged
//	route.go    regular expressions        emit.go     the function of logical messages
//	cloudevents.go  ce- headers            rows.go     rows that are chosen
//	prune.go    deleting rows              archive.go  the file that gets them before
//	partition.go  dropping partitions      lock_*.go   one writer of that file
//	replay.go   events that are published again   range.go  the rows of them
//	reader.go   all rows, in one snapshot  sample.go   rows in the table, as events they would become
package outbox
