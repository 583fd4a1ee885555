//go:build race

package server

// exhaustiveStep thins out tests that try every place or every seed one after the other with one goroutine: the race detector finds nothing in
// them and makes them ten times as slow.
const exhaustiveStep = 10
