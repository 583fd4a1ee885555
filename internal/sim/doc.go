// Package sim runs concurrent clients against the store, cuts the power, and decides from what the
// clients saw whether the store kept its promises.
//
//	clients ─► System (a store in process on a disk in memory, or the real server) ─► crash, reopen, go on
//	   └────► History: every transaction with its call, its return, what it read and wrote, and how it ended
//	                ├─► CheckLists    every cycle of dependencies that the isolation level forbids
//	                └─► CheckLinear   porcupine: one order of all transactions that explains everything and respects real time
//
// CheckRegisters judges another kind of history, that of requests for single keys: long ones too, because each key is
// checked by itself. The server's tests make such histories over the wire.
//
// TestCommotion needs no such search: there each commit has an epoch, so the commits in the order of their epochs are the history, and
// its ledger compares what every client saw with it. It is the one test in which all kinds of requests run at once.
//
// Terms. A transaction is committed, aborted (certainly without a trace), or unknown: the crash
// came while it waited for its commit. Both outcomes of an unknown one are correct as long as all
// clients agree on which.
//
// Lists make dependencies visible. Each write appends a number that no other write appends, so a
// list tells the order of its writes and which writes a reader saw. A final read after everything
// has ended finds lost writes.
//
// Invariants. A history has every transaction whose commit was called. Times come from one clock.
// Every run prints its seed when it fails, and is repeated with -sim.seed.
//
// What it does not do. The checkers know nothing of the store: they have tests of their own with
// histories that are wrong on purpose.
package sim
