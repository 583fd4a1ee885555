//go:build race

package btree

// exhaustiveStep thins out tests that try many seeds one after the other: what the race detector can find in them, the workers of a merge,
// it finds with few.
const exhaustiveStep = 4
