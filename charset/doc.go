// Package charset makes UTF-8 of the bytes that a database stores, for readers that
// ask for them unconverted (client_encoding = SQL_ASCII) because the server would
// refuse the whole read for one value that it cannot convert.
//
// A caller makes a Charset with [New], gives every value to Text, and calls Close.
package charset
