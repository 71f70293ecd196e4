// Package event is the model that every other package speaks: records of the
// write-ahead log, the events they become, positions, and how failures and
// findings are classed. It uses the standard library only and knows no driver.
//
//	replication ──Record──▶ outbox ──Event──▶ publisher
//	                  └────────── relay ──────────┘
package event
