//go:build invariants

package memtable

// Starve makes the rest of in's Apply find nothing of what was secured for it, nor of what is mapped ahead: it depends on Config.Obtain, which must
// refuse from then on. It is for tests, and only in builds with the tag `invariants`.
func (in *Inserter) Starve() {
	in.pos = in.end
	in.table.arena.mapped.Store(in.table.arena.tail.Load())
}
