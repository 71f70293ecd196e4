package publisher

import (
	"errors"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walrelay/walrelay/event"
)

// role is what the relay keeps in a stream. Each of the three breaks a promise
// when it loses what was acked.
type role uint8

const (
	ofEvents      role = iota
	ofLetters          // the dead-letter stream
	ofCheckpoints      // the stream of the bucket
)

// leastHistory is how many checkpoints a confirm delay needs: those of the time
// that it spans.
const leastHistory = jetstream.KeyValueMaxHistory

// leastLetter is about what a dead letter takes without its body and the event's own headers.
const leastLetter = 1 << 10

// leastCheckpoint is enough for a checkpoint of a few tables.
const leastCheckpoint = 4 << 10

// roomyCheckpoint is a size that no checkpoint comes near, however many tables it names.
const roomyCheckpoint = 64 << 10

// judge finds what in a stream's settings breaks or weakens a promise. main are
// the settings of the stream of the events.
func (o *Options) judge(r role, c, main *jetstream.StreamConfig) event.Findings {
	j := judgement{o: o, role: r, c: c, main: main}
	j.takesMessages()
	j.keepsMessages()
	switch r {
	case ofEvents:
		j.events()
	case ofLetters:
		j.letters()
	case ofCheckpoints:
		j.checkpoints()
	}
	return j.found
}

// judgement is one in the making.
type judgement struct {
	o       *Options
	role    role
	c, main *jetstream.StreamConfig
	found   event.Findings
}

// add takes a finding. Its name says which of the streams it is about.
func (j *judgement) add(level event.Level, bad bool, name, what, remedy string) {
	if !bad {
		return
	}
	prefix := ""
	switch j.role {
	case ofEvents:
	case ofLetters:
		prefix = "dead_letters_"
	case ofCheckpoints:
		prefix = "bucket_"
	}
	j.found = append(j.found, event.Finding{Name: prefix + name, Level: level, Detail: j.subject() + " " + what, Remedy: remedy})
}

func (j *judgement) subject() string {
	switch j.role {
	case ofLetters:
		return fmt.Sprintf("dead-letter stream %q", j.c.Name)
	case ofCheckpoints:
		return fmt.Sprintf("stream %q of the checkpoint bucket", j.c.Name)
	case ofEvents:
	}
	return fmt.Sprintf("stream %q", j.c.Name)
}

// edit is a command of the nats CLI that changes the stream.
func (j *judgement) edit(flags string) string { return "nats stream edit " + j.c.Name + " " + flags }

// other is the remedy for what the server never changes in a stream. events is
// the one for the stream of the events.
func (j *judgement) other(events string) string {
	switch j.role {
	case ofLetters:
		return j.o.otherLetters(j.c)
	case ofCheckpoints:
		return j.o.otherBucket()
	case ofEvents:
	}
	return events
}

// otherLetters says how the relay gets another dead-letter stream: no two
// streams may have its subjects.
func (o *Options) otherLetters(c *jetstream.StreamConfig) string {
	next := c.Name + "_2"
	start := fmt.Sprintf("start with --dead-letter-stream %s --create-stream; what is parked in %s stays there", next, c.Name)
	if c.Mirror != nil || !bound(c.Subjects, o.deadLetterPrefix()+"a.b") {
		return start
	}
	return fmt.Sprintf("nats stream edit %s --subjects 'unused.%s', then %s", c.Name, c.Name, start)
}

// otherBucket says how the relay gets another bucket with the checkpoint of this one.
func (o *Options) otherBucket() string {
	next := o.Bucket + "_2"
	return fmt.Sprintf("stop the relay, nats kv add %s --history %d --storage file, nats kv get %s %s --raw | nats kv put %s %s, then start with --checkpoint-bucket %s",
		next, leastHistory, o.Bucket, o.Stream, next, o.Stream, next)
}

// takesMessages: where it does not, nothing could be published, or nobody would know.
func (j *judgement) takesMessages() {
	c := j.c
	j.add(event.FAIL, c.NoAck, "no_ack", "has no_ack set: nothing could be confirmed", j.edit("--ack"))
	j.add(event.FAIL, c.Sealed, "sealed", "is sealed: it takes no messages", j.other("use another stream"))
	j.add(event.FAIL, c.Mirror != nil, "mirror", "is a mirror: it takes no messages", j.other("publish to the stream that it mirrors"))
	j.add(event.FAIL, c.AllowMsgCounter, "counter", "has allow_msg_counter set: it takes nothing but counters", j.other("use a stream without counters"))
	if t := c.SubjectTransform; t != nil {
		own := map[role]string{ofEvents: j.o.markerSubject(), ofLetters: j.o.letterSubjects(), ofCheckpoints: j.o.subjectOf(">")}[j.role]
		j.add(event.FAIL, t.Source == "" || collide(t.Source, own), "transform",
			fmt.Sprintf("has a subject transform for %s: walrelay would not find its own messages again", own),
			j.edit("--no-transform"))
	}
}

// keepsMessages: an ack has to mean that the message survives a restart.
func (j *judgement) keepsMessages() {
	c := j.c
	j.add(event.FAIL, c.Storage == jetstream.MemoryStorage, "storage", "keeps its messages in memory: a restart would lose them", j.other("use a stream with file storage"))
	j.add(event.FAIL, c.PersistMode == jetstream.AsyncPersistMode, "persist_mode", "has persist_mode async: acked messages could be lost", j.other("use the default persist mode"))
	j.add(event.WARN, j.role != ofEvents && c.Replicas < j.main.Replicas, "replicas",
		fmt.Sprintf("has %s, stream %q has %d: it is lost with a server that the events survive", replicas(c.Replicas), j.main.Name, j.main.Replicas),
		j.edit(fmt.Sprintf("--replicas %d", j.main.Replicas)))
}

func replicas(n int) string {
	if n <= 1 {
		return "1 replica"
	}
	return fmt.Sprintf("%d replicas", n)
}

// discards names the limits at which the stream deletes its oldest messages; "" without one.
func discards(c *jetstream.StreamConfig) string {
	if c.Discard != jetstream.DiscardOld {
		return ""
	}
	var limits []string
	if c.MaxMsgs > 0 {
		limits = append(limits, "max_msgs")
	}
	if c.MaxBytes > 0 {
		limits = append(limits, "max_bytes")
	}
	return strings.Join(limits, " and ")
}

func (j *judgement) events() {
	o, c := j.o, j.c
	j.add(event.FAIL, len(c.Sources) > 0 && !o.Shared, "sources", "has sources: walrelay must be its only writer", "let another stream source both, or share it with --shared-stream")
	j.add(event.FAIL, c.AllowMsgSchedules && !o.Shared, "schedules", "allows message schedules: the server would write to it, too", "use a stream without schedules")
	j.add(event.FAIL, c.SubjectDeleteMarkerTTL > 0 && !o.Shared, "delete_markers", "has subject_delete_marker_ttl: the server would write to it, too", "use a stream without delete markers")
	j.add(event.FAIL, o.Park && !bound(c.Subjects, o.markerSubject()), "marker",
		fmt.Sprintf("does not bind %s, the place of parked events", o.markerSubject()),
		fmt.Sprintf("nats stream edit %s --subjects '%s,%s', or run with --on-poison halt", c.Name, strings.Join(c.Subjects, ","), o.markerSubject()))

	j.add(event.WARN, c.AllowRollup, "rollup", "allows rollup headers: another client could purge it", "use a stream without --allow-rollup")
	j.add(event.WARN, c.Retention == jetstream.InterestPolicy, "retention", "has interest retention: a message without a consumer is acked and not kept", "make the consumers before the relay starts, or use limits retention")
	j.add(event.WARN, discards(c) != "", "discard", "discards old messages at "+discards(c)+", whether or not they were consumed", j.edit("--discard new")+", which makes the relay wait instead")
	j.add(event.WARN, o.Shared && c.Duplicates < sharedDedup, "shared",
		fmt.Sprintf("is shared and has a dedup window of only %s: an event that is published again later than that is stored twice", c.Duplicates),
		fmt.Sprintf("nats stream edit %s --dupe-window %s", c.Name, sharedDedup))
	j.found = append(j.found, o.judgeMode(c)...)
	for _, f := range o.Subjects {
		remedy := fmt.Sprintf("nats stream edit %s --subjects '%s'", c.Name, strings.Join(widened(c.Subjects, f), ","))
		if impossible([]string{f}, o.markerSubject()) != "" {
			remedy = ownToken
		}
		j.add(event.WARN, !covered(c.Subjects, f), "subjects", fmt.Sprintf("does not bind all subjects of the mapping, such as %s: such events are poison", f), remedy)
	}
}

// letters: the LSN of a parked event is confirmed, so its dead letter may be all that is left of it.
func (j *judgement) letters() {
	o, c := j.o, j.c
	j.add(event.FAIL, c.Mirror == nil && !covered(c.Subjects, o.letterSubjects()), "subjects", "does not bind "+o.deadLetterPrefix()+">, the place of dead letters",
		j.edit(fmt.Sprintf("--subjects '%s'", strings.Join(widened(c.Subjects, o.deadLetterPrefix()+">"), ","))))
	j.add(event.FAIL, c.Retention == jetstream.InterestPolicy, "retention",
		"has interest retention: a dead letter is acked and not kept without a consumer, and gone once the consumers acked it", j.edit("--retention limits"))
	j.add(event.FAIL, c.Retention == jetstream.WorkQueuePolicy, "retention",
		"has work-queue retention: a dead letter is gone once any consumer acked it, and walrelay prune cannot read them", o.otherLetters(c))
	j.add(event.FAIL, discards(c) != "", "discard", "discards old dead letters at "+discards(c)+", published or not", j.edit("--discard new")+", which makes the relay wait instead")

	j.add(event.WARN, c.MaxAge > 0, "max_age",
		fmt.Sprintf("has max_age %s: a dead letter that nobody replays within that time is gone, and its event with it once the row is deleted", c.MaxAge),
		j.edit("--max-age 0s")+", and remove what is not wanted with walrelay dlq purge")
	j.add(event.FAIL, c.MaxMsgSize > 0 && c.MaxMsgSize < leastLetter, "max_msg_size",
		fmt.Sprintf("has max_msg_size %d: a dead letter takes about %d bytes without its body", c.MaxMsgSize, leastLetter), j.edit("--max-msg-size -1"))
	j.add(event.WARN, c.MaxMsgSize >= leastLetter, "max_msg_size",
		fmt.Sprintf("has max_msg_size %d: of a larger event the body is left out of the dead letter, and only the row has it", c.MaxMsgSize), j.edit("--max-msg-size -1"))
	j.add(event.WARN, c.DenyDelete, "deny_delete", "denies deletes: walrelay dlq replay and dlq purge cannot remove dead letters", o.otherLetters(c))
	j.add(event.WARN, len(c.Sources) > 0, "sources", "has sources: what they bring may be taken for dead letters", "let another stream source both")
	j.add(event.WARN, c.SubjectDeleteMarkerTTL > 0, "delete_markers", "has subject_delete_marker_ttl: the server writes to it, too, and with --on-poison park-aggregate a marker holds its aggregate",
		j.edit("--subject-del-markers-ttl 0s"))
	j.add(event.WARN, c.AllowRollup, "rollup", "allows rollup headers: another client could purge it", j.edit("--no-allow-rollup"))
}

// checkpoints: without the last one the relay does not know what of the WAL is stored.
func (j *judgement) checkpoints() {
	o, c := j.o, j.c
	j.add(event.FAIL, c.Mirror == nil && !covered(c.Subjects, o.subjectOf(">")), "subjects", "does not bind "+o.subjectOf(">"),
		j.edit(fmt.Sprintf("--subjects '%s'", strings.Join(widened(c.Subjects, o.subjectOf(">")), ","))))
	j.add(event.FAIL, len(c.Sources) > 0, "sources", "has sources: walrelay must be the only writer of its checkpoint", o.otherBucket())
	j.add(event.FAIL, c.MaxAge > 0, "max_age", fmt.Sprintf("has max_age %s: the checkpoint of an idle relay is gone after that", c.MaxAge), j.edit("--max-age 0s"))
	j.add(event.FAIL, c.Retention == jetstream.InterestPolicy, "retention", "has interest retention: the checkpoint is acked and not kept", j.edit("--retention limits"))
	j.add(event.FAIL, c.Retention == jetstream.WorkQueuePolicy, "retention", "has work-queue retention: a consumer could take the checkpoint away", o.otherBucket())
	j.add(event.FAIL, discards(c) != "", "discard", "discards old keys at "+discards(c)+": the checkpoint may be the oldest", j.edit("--discard new"))
	j.add(event.FAIL, c.DiscardNewPerSubject, "discard", "has discard_new_per_subject set: it takes no further checkpoint once the history is full", j.edit("--no-discard-per-subject"))

	j.add(event.WARN, c.MaxMsgsPerSubject > 0 && c.MaxMsgsPerSubject < leastHistory, "history",
		fmt.Sprintf("keeps a history of %d: --confirm-delay needs %d checkpoints to publish again what a broker has lost", c.MaxMsgsPerSubject, leastHistory),
		j.edit(fmt.Sprintf("--max-msgs-per-subject %d", leastHistory)))
	j.add(event.FAIL, c.MaxMsgSize > 0 && c.MaxMsgSize < leastCheckpoint, "max_msg_size",
		fmt.Sprintf("has max_msg_size %d: a checkpoint takes up to %d bytes, and more with many tables", c.MaxMsgSize, leastCheckpoint), j.edit("--max-msg-size -1"))
	j.add(event.WARN, c.MaxMsgSize >= leastCheckpoint && c.MaxMsgSize < roomyCheckpoint, "max_msg_size",
		fmt.Sprintf("has max_msg_size %d: a checkpoint that names many tables may be larger", c.MaxMsgSize), j.edit("--max-msg-size -1"))
	j.add(event.WARN, c.DenyPurge || !c.AllowRollup, "purge", "denies purges or rollups: slot drop --with-checkpoint cannot remove the checkpoint", o.otherBucket())
}

// examine refuses what breaks a promise of the relay and warns about what weakens one.
func (s *Session) examine(r role, c *jetstream.StreamConfig) error {
	var errs []error
	for _, f := range s.o.judge(r, c, &s.config) {
		switch f.Level {
		case event.FAIL:
			errs = append(errs, event.Fail(event.Precondition, f.Remedy, "%s", f.Detail))
		case event.WARN:
			s.warn(true, f.Detail, "check", f.Name, "hint", f.Remedy)
		case event.OK:
		}
	}
	return errors.Join(errs...)
}

// fullAt names the limit that a stream that refuses new messages has reached; "" when it has room.
func fullAt(info *jetstream.StreamInfo) string {
	c, state := &info.Config, &info.State
	switch {
	case c.Discard != jetstream.DiscardNew:
	case c.MaxMsgs > 0 && state.Msgs >= uint64(c.MaxMsgs):
		return "max_msgs"
	case c.MaxBytes > 0 && state.Bytes >= uint64(c.MaxBytes):
		return "max_bytes"
	}
	return ""
}

// roomForLetters is what helps when the dead-letter stream is full.
func (o *Options) roomForLetters() string {
	return fmt.Sprintf("raise the limits of the stream %s, or make room with walrelay dlq replay or walrelay dlq purge", o.DeadLetters)
}
