package enginetest

import "github.com/epochkv/epochkv/internal/testseed"

// exhaustiveStep thins out tests that try every place or every seed one after the other with one goroutine: the race detector finds nothing in
// them and makes them ten times as slow. It is 10 under the detector.
const exhaustiveStep = 1 + 9*testseed.RaceDetector

// thinned divides rounds of tests that the race detector makes long, and in which it needs few to find what there is. It is 4 under the
// detector.
const thinned = 1 + 3*testseed.RaceDetector

// shortOverhead is what the short form of the mixed soak may take beside budget and earlier tests: the heap's garbage between two
// collections, and stacks. The detector shadows every byte of heap, and keeps a history of each goroutine: 256 MiB.
const shortOverhead = (8 + 248*testseed.RaceDetector) << 20

// crowdRuns is how often TestCrowd runs in its short form: twice under the detector.
const crowdRuns = 4 - 2*testseed.RaceDetector
