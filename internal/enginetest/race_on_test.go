//go:build race

package enginetest

// exhaustiveStep thins out tests that try every place one after the other with one goroutine: the race detector finds nothing in them
// and makes them ten times as slow.
const exhaustiveStep = 10

// shortOverhead is what the short form of the mixed soak may take beside budget and earlier tests: the detector shadows every byte of heap
// and keeps an history of each goroutine.
const shortOverhead = 256 << 20

// crowdRuns is how often TestCrowd runs in its short form.
const crowdRuns = 2

// thinned divides rounds of tests that the race detector makes long, and in which it needs few to find what there is.
const thinned = 4
