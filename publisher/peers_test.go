package publisher

import (
	"errors"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// A stream cannot be made while a server of the cluster is down, which passes
// although the server calls it a bad request.
func TestClassOfStreamErrors(t *testing.T) {
	for _, c := range []struct {
		name string
		err  error
		want event.Class
	}{
		{"no peers", &jetstream.APIError{Code: 400, ErrorCode: 10005}, event.Transient},
		{"subjects overlap", &jetstream.APIError{Code: 400, ErrorCode: 10065}, event.Precondition},
		{"unavailable", &jetstream.APIError{Code: 503, ErrorCode: 10008}, event.Transient},
		{"no answer", errors.New("timeout"), event.Transient},
	} {
		if got := event.ClassOf(streamError("S", c.err)); got != c.want {
			t.Errorf("%s: got class %d, want %d", c.name, got, c.want)
		}
	}
}
