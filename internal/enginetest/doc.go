// Package enginetest tests the behaviour of the storage engine through the transactional layer, as a client of the store sees it: what is
// read after checkpoints, restarts, crashes, damage, full disks and bulk loads. It has no code but tests.
//
// Behaviour that is a sequence of commands is a script in testdata: see TestScripts. Tests that repeat a sequence at every file operation,
// every byte or many seeds are Go code.
//
// Tests of one package's own mechanism are beside that package. Tests of transactions, conflicts and the commit protocol are in mvcc.
package enginetest
