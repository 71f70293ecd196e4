package replication

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/walrelay/walrelay/event"
)

// owner returns the timeline whose log holds the record that starts at lsn, as
// tliOfPointInHistory of timeline.c does; session is the newest timeline.
func owner(history []event.Switch, lsn event.LSN, session uint32) uint32 {
	for _, s := range history {
		if lsn < s.End {
			return s.Timeline
		}
	}
	return session
}

// parseHistory reads a timeline history file: lines of parent timeline, LSN of
// the switch and a reason, as readTimeLineHistory of timeline.c takes them.
func parseHistory(content string) ([]event.Switch, error) {
	var history []event.Switch
	for line := range strings.Lines(content) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		fields := strings.Fields(line)
		if len(fields) < 2 {
			return nil, fmt.Errorf("timeline history line %q: want timeline and LSN", line)
		}
		id, err := strconv.ParseUint(fields[0], 10, 32)
		if err != nil {
			return nil, fmt.Errorf("timeline history line %q: %w", line, err)
		}
		end, err := event.ParseLSN(fields[1])
		if err != nil {
			return nil, fmt.Errorf("timeline history line %q: %w", line, err)
		}
		history = append(history, event.Switch{Timeline: uint32(id), End: end, Restored: chosen(strings.Join(fields[2:], " "))})
	}
	return history, nil
}

// chosen reports whether the reason of a switch names a recovery target, as
// getRecoveryStopReason of xlogrecovery.c writes it. A standby that is promoted
// has none and says "no recovery target specified".
func chosen(reason string) bool {
	for _, target := range []string{"before ", "after ", "at restore point ", "reached consistency"} {
		if strings.HasPrefix(reason, target) {
			return true
		}
	}
	return false
}
