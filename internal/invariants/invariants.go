// Package invariants says whether assertions that are too expensive for production are compiled in.
//
// An assertion stands behind `if invariants.Enabled { ... }`. Enabled is a constant, so that a build without the
// tag `invariants` carries neither the branch nor the code behind it. In a build with the tag a broken invariant
// panics; without it the cheap checks that remain stop the store (fail-stop) and bad input never panics.
//
// The package imports nothing of ours, so that every layer may use it.
package invariants
