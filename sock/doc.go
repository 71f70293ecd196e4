// Package sock makes TCP connections cheap for a program that waits for small
// reads most of the time. It uses the standard library only.
//
// An event takes a microsecond, a thread that is woken several. What is saved
// here is therefore wake-ups:
//
//   - Lean keeps reads and writes from waking the runtime's monitor thread.
//   - SetReadFloor lets one wake-up bring many messages.
//
// Both are for Linux; elsewhere connections work as they are.
package sock
