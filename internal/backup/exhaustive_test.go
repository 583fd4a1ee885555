package backup

import "github.com/epochkv/epochkv/internal/testseed"

// exhaustiveStep thins out tests that try every place one after the other: the race detector finds in some what it finds in all, and makes
// them ten times as slow. It is 7 under the detector.
const exhaustiveStep = 1 + 6*testseed.RaceDetector
