// Package e2e holds tests of the real binaries from the outside: processes, signals, sockets and
// files, nothing mocked.
//
// What can be tested inside one process is tested next to the code. The tests here need a process
// to die.
package e2e
