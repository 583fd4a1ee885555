// Package peers measures EpochKV over the wire beside what its users would take instead: etcd, Redis, and as the protocol's ceiling
// a gRPC server that stores nothing.
//
//	load generator (this process)          servers (a process each, on 127.0.0.1, data on the same disk)
//	  callers ── official Go client ──►  kvserver | etcd | redis-server | echoserver
//	                                      running     stopped    stopped       stopped
//
// A server is started when an arm first needs it, loaded, and kept for the scenarios of a stage. Only the server of the running arm
// runs: the others are stopped (SIGSTOP), so that what a server has left to do (a checkpoint, a rewritten file) falls into its own
// time and not into that of the next. Rounds alternate between servers, and the harness takes ratios within a round.
//
// # What is equal, and what is not
//
// Every record has a key of 16 bytes (or of 24, table/00000000042/column: -keys table) and a value of 100. Every server is the
// newest that its own channel has (modules through the Go proxy, Redis from Debian), with default settings but these: EpochKV
// has its direct transport (an arm shows that of grpc-go); etcd may grow to 8 GiB; Redis has its append-only file on and its
// snapshots off. Every client is the official one with default settings; the gRPC clients use two connections, Redis' pool one
// for each caller, because a caller keeps a connection to itself there. The load generator takes its share of the same
// processors ("client CPU ns/op"), which flatters the slower server; it collects its garbage rarely.
//
// Durability is compared like with like: epochkv, etcd and redis-always answer a write once it is synced, and counters show
// that they did sync; epochkv-async and redis-everysec answer before, and sync every 50 ms and every second. Reads are
// linearizable, by default in each.
//
//	            EpochKV                    etcd                         Redis
//	get         Get                        Range of one key             GET
//	put         Put                        Put                          SET
//	batch       BatchWrite of 100 puts     Txn of 100 puts              MSET of 100
//	stream      Pipeline                   calls on one connection      pipelines, one after the other
//	range       Scan of 100                Range of 100                 ZRANGE BYLEX of an index, then MGET; not one snapshot
//	swap        Execute: value is, put     Txn: value is, put           a Lua script: value is, SET
//
// Ranges have an end, but those of YCSB E, which have only a limit: there etcd counts all keys that follow, for each answer.
// Redis has no ordered keys. Where ranges are read, a sorted set of all keys is kept together with the records, and inserts add to it. Nor
// does MSET tell whether a key was there; none of the workloads asks.
//
// # Loads
//
// Closed loops: so many callers, each of which waits for its answer. Open loops: requests arrive at a fixed rate, which is a share of
// what the slowest durable server does in a closed loop, and latencies count from the arrival that was intended. The mixed loads are
// YCSB's A to F with one field of 100 bytes; F modifies what it read by compare-and-swap, so that no modification is lost.
//
// Every record carries its number and a version that only grows. A read must bring at least the version that was acknowledged when it
// began; after each run, what the run wrote is read back and must be there exactly, so that lost, stale and doubled writes fail the run.
package peers
