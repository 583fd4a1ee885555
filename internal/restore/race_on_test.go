//go:build race

package restore

// exhaustiveStep thins out tests that try every place one after the other: the race detector finds in some what it finds in all, and makes
// them ten times as long.
const exhaustiveStep = 3
