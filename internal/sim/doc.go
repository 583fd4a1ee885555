// Package sim runs concurrent clients against the store, cuts the power under them, and judges by what they saw whether the store kept
// its promises.
//
//	clients ─► System (a store in process on a disk in memory, or the real server) ─► crash, reopen, go on
//	   └────► History: every transaction with its call, its return, what it read and wrote, and how it ended
//	                ├─► CheckLists    every cycle of dependencies that the isolation level forbids
//	                └─► CheckLinear   porcupine: one order of all transactions that explains everything and respects real time
//
// Terms. A transaction is committed, aborted (certainly without a trace), or unknown: the crash came while it waited for its commit,
// and both are right as long as all clients agree on which.
//
// Lists are what makes dependencies visible: each write appends a number that nobody else appends, so that a list
// tells who wrote before whom, and who read what. A final read after everything has ended catches what was lost.
//
// Invariants: a history has every transaction whose commit was called; times come from one clock; every run prints its seed when it
// fails, and is repeated with -sim.seed.
//
// The checkers know nothing of the store: they have tests of their own with histories that are wrong on purpose.
package sim
