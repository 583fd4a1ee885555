//go:build invariants

package storage

// Starve makes the installation of the commit that w has reserved find no memory, provided that
// Options.Obtain refuses from then on. It is for tests, and only in builds with the tag `invariants`.
func (w *Writer) Starve() { w.inserter.Starve() }
