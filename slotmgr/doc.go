// Package slotmgr is the life of slots and publications by SQL: create, list,
// inspect, peek, advance, drop, diagnose, watch, and the preflight of a server. It knows
// neither NATS nor the stream protocol.
//
// Callers open an ordinary connection with [Connect] and own it: every
// function that takes a connection uses it alone until it returns. Only a
// [Watcher] opens connections of its own.
//
// The order that loses nothing is publication first, then slot: a slot reads
// the log with the catalog of that place in the log, where a publication made
// later does not exist.
//
// What is wrong with a slot is decided from pg_replication_slots, never from
// the text of an error: SQLSTATE 55000, 57P01 and a bare EOF each have many
// causes.
package slotmgr
