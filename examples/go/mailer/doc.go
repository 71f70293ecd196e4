// Command mailer is a consumer with a database of its own: for each paid order
// it queues one mail, whatever is delivered again or killed.
package main
