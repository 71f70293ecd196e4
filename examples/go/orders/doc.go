// Command orders is a service that takes orders: it writes the order and the
// event about it in one transaction, and knows nothing of NATS or walrelay.
package main
