package publisher

import "strconv"

// sparseEvery is the distance of messages that ask for an ack in ModeSparse.
// The last one of each write asks, too: nobody may wait for an ack that was not
// asked for.
const sparseEvery = 32

// appendSilent appends an event's frame without a reply subject, and keeps
// where it would be.
func (s *Session) appendSilent(subject, header []byte, seq uint64, payload int) {
	out := append(s.out, "HPUB "...)
	out = append(out, subject...)
	out = append(out, ' ')
	s.silent, s.silentSeq = len(out), seq
	out = appendSize(out, len(header))
	out = append(out, ' ')
	out = appendSize(out, len(header)+payload)
	out = append(out, "\r\n"...)
	s.out = append(out, header...)
}

// ask makes the last frame of the out-buffer ask for its ack.
func (s *Session) ask() {
	at := s.silent
	if at == 0 {
		return
	}
	s.silent = 0
	var number [21]byte
	digits := append(strconv.AppendUint(number[:0], s.silentSeq, 10), ' ')
	end := len(s.out)
	// Room for the reply subject, in which the rest moves back.
	s.out = append(append(s.out, s.frames.reply...), digits...)
	more := len(s.out) - end
	copy(s.out[at+more:], s.out[at:end])
	copy(s.out[at:], s.frames.reply)
	copy(s.out[at+more-len(digits):], digits)
}
