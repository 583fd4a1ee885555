//go:build race

package testseed

// RaceDetector is 1 in a program that the race detector watches, and 0 in others: a number, so that constants can be computed from it.
const RaceDetector = 1
