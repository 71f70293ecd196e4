// Command walrelay turns committed outbox rows of Postgres into messages of
// NATS JetStream, straight from the write-ahead log.
//
// One file a command; run has relay.go, http.go and level.go besides. wire.go
// builds the parts from the configuration; errors.go maps errors to text and
// exit codes.
package main
