// Command bench measures the relay on scratch servers, end to end, against
// what users would pick instead and against the servers' own ceilings.
//
// The relay is the real program in a process of its own, and so is every
// contender. Contenders take turns in each round, so that a ratio compares
// what ran within the same minute; the tables show medians over the rounds.
//
//	main.go      flags, the order of the experiments
//	lab.go       servers, backlogs, slots on the same backlog
//	run.go       one run of a contender: rate, first event, processor time, memory
//	peers.go     the contenders that are written here: publish, poll, listen
//	drain.go     a backlog as fast as it goes, by transaction size; start; growth
//	latency.go   commit to stored at a steady rate
//	memory.go    resident memory in the four states
//	sync.go      chain against atomic batches on a server that syncs always
//	profile.go   processor profile of a drain, as flame graph and by stage
//	shards.go    relays that share a backlog, and what decoding for nothing costs
//	report.go    the table of ratios, JSON
//	svg.go       plots
//	proc.go      /proc
package main
