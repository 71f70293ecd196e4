package operate

import (
	"bytes"
	"hash/maphash"
)

// known is the set of the events in the stream. It keeps 16 bytes of each: with
// a hundred million of them a false hit has odds of one in 10^22.
type known struct {
	seeds [2]maphash.Seed
	set   map[[2]uint64]struct{}
}

func newKnown() *known {
	return &known{seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()}, set: map[[2]uint64]struct{}{}}
}

// What an event is known by: its Nats-Msg-Id, which tells tables apart; the id
// where the stream has no such header; the table and the id where it was parked.
const (
	byMsgID  = "m"
	byID     = "i"
	byParked = "p"
)

func (k *known) hash(kind, table string, id []byte) [2]uint64 {
	var sum [2]uint64
	var h maphash.Hash
	for i, seed := range k.seeds {
		h.SetSeed(seed)
		_, _ = h.WriteString(kind)
		_, _ = h.WriteString(table)
		_ = h.WriteByte(0)
		_, _ = h.Write(bytes.TrimSpace(id)) // a header keeps no spaces at its ends
		sum[i] = h.Sum64()
	}
	return sum
}

// add takes what Sink.Stored tells.
func (k *known) add(msgID, id, table string) {
	switch {
	case msgID != "":
		k.set[k.hash(byMsgID, "", []byte(msgID))] = struct{}{}
	case table != "":
		k.set[k.hash(byParked, table, []byte(id))] = struct{}{}
	case id != "":
		k.set[k.hash(byID, "", []byte(id))] = struct{}{}
	}
}

// has reports whether an event is among them.
func (k *known) has(msgID, id []byte, table string) bool {
	if len(k.set) == 0 || len(id) == 0 {
		return false
	}
	for _, key := range [...][2]uint64{k.hash(byMsgID, "", msgID), k.hash(byID, "", id), k.hash(byParked, table, id)} {
		if _, ok := k.set[key]; ok {
			return true
		}
	}
	return false
}
