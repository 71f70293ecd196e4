// Package pgsession is the one home of the settings of sessions with Postgres:
// those of the role, the database or the server must neither end a session of
// walrelay, nor change the text that it reads, nor make it read-only.
//
// Ordinary connections get them from Prepare, before the configuration is used.
// A replication connection gets them from Replication, instead. Both set them
// with SET once the session has begun, not as parameters of the startup packet:
// a connection pooler refuses parameters that it does not know.
package pgsession
