package btree

import "github.com/epochkv/epochkv/internal/testseed"

// exhaustiveStep thins out tests that try many seeds one after the other: what the race detector can find in them, the workers of a merge,
// it finds with few. It is 4 under the detector.
const exhaustiveStep = 1 + 3*testseed.RaceDetector
