// Package chaos runs the relay under schedules of faults and compares the whole
// stream with what was committed.
//
// A schedule is derived from one number, its seed: what the setup is like, which
// faults happen, when, and for how long. The moments at which they meet the
// processes are not repeatable to the microsecond, but a seed that fails tends to
// fail again.
//
//	make chaos SEED=17 N=10 REPLICAS=3
//
//	plan_test.go     seed → setup and faults     faults_test.go   what each fault does
//	world_test.go    servers, links, relays      witness_test.go  what is recorded and judged
//	chaos_test.go    the schedules that are run  alive_test.go    never stuck, never spinning
//	                                             full_test.go     a broker without room
package chaos
