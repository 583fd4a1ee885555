//go:build !race

package enginetest

const exhaustiveStep = 1

// shortOverhead is what the short form of the mixed soak may take beside budget and earlier tests: the heap's garbage between two
// collections, and stacks.
const shortOverhead = 8 << 20

const crowdRuns = 4

const thinned = 1
