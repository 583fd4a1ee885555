// Package e2e holds tests of the real binaries from the outside: processes, signals, sockets and files, nothing mocked.
//
// What can be tested inside one process is tested beside the code; here is what needs a process to die.
package e2e
