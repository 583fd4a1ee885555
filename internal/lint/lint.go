// Package lint holds tests in which the tree checks itself: that imports point downward only, that every package says
// what it is exactly once, that files are opened in one place, and that what the documents name is there.
//
// The rules are data (a table, a list of words) and the checks are functions over an fs.FS, so that each rule has two
// tests: one that runs it over this repository, and one that shows it failing on a small tree that breaks it.
// Nothing in this package is part of a binary.
package lint
