package mvcc

import "runtime"

// windowsPerTurn is how many windows of keys a list that is read has in a row: each has a few dozen keys, and not the work of a guard of a scan.
const windowsPerTurn = 16

// stepsPerTurn is how many keys a difference reads in a row, each in a guard of its own.
const stepsPerTurn = 256

// conditionsPerTurn is how many keys the conditions of a transaction read in a row.
const conditionsPerTurn = 64

// letOthersRun lets what is runnable have the processor before a walk over many keys goes on. Such a walk waits for nothing, and the scheduler ends
// its turn after 10 ms only: beside 16 of them that count, gets and puts of others waited 250 ms. It is called between two guards, without latches.
func letOthersRun() { runtime.Gosched() }
