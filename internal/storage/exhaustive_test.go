package storage

import "github.com/epochkv/epochkv/internal/testseed"

// exhaustiveStep thins out tests that try every place or every seed one after the other with one goroutine: the race detector finds nothing in
// them and makes them ten times as slow. It is 10 under the detector.
const exhaustiveStep = 1 + 9*testseed.RaceDetector
