package inbox

import (
	"strings"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestIdentity(t *testing.T) {
	const uuid = "0198c2a4-5a1e-7d0b-9d35-0c6f7c1a2b3d"
	meta := &jetstream.MsgMetadata{Stream: "OUTBOX", Sequence: jetstream.SequencePair{Stream: 7}}
	for _, c := range []struct{ id, msgID, want string }{
		{uuid, uuid, uuid},
		{uuid, "", uuid},
		{uuid, uuid + ":r:1", uuid},
		{"42", "public.outbox:42", "public.outbox:42"},
		{"42", "public.outbox:42:r:run42", "public.outbox:42"},
		{"42", "public.outbox:421", "42"},
		{"a:b", "public.outbox:a:b", "public.outbox:a:b"},
		{"", "theirs", "theirs"},
		{"", "", "OUTBOX:7"},
	} {
		h := nats.Header{}
		for name, v := range map[string]string{"Outbox-Id": c.id, "Nats-Msg-Id": c.msgID} {
			if v != "" {
				h.Set(name, v)
			}
		}
		if got := identify(h, meta); got != c.want {
			t.Errorf("%q %q is %q, want %q", c.id, c.msgID, got, c.want)
		}
	}
	for _, id := range []string{strings.Repeat("x", 5000), "a\x00b", "\xff"} {
		if got := storable(id); !strings.HasPrefix(got, "sha256:") || got == storable(id+"x") {
			t.Errorf("%q is %q", id, got)
		}
	}
}
