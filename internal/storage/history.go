package storage

import (
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// Versions calls visit with the versions of key at epochs up to one, newest first, until visit returns false. It shows the
// versions that are still there: all of those that snapshots see, but of others an unknown part. The caller is inside its slot's
// protection and keeps the epochs that it wants.
//
// A chain of a memtable is walked once, so that a key with a hundred thousand versions does not cost the square of that.
func (r *Reader) Versions(key []byte, at keys.Epoch, visit func(Version) bool) error {
	p := r.engine.Pin()
	tables := []*memtable.Table{p.view.active.mem}
	for _, g := range p.view.immutables {
		tables = append(tables, g.mem)
	}
	if q := p.view.quarantine; q != nil {
		tables = append(tables, q.mem)
	}
	for _, t := range tables {
		for v := t.Find(key, at); v.Found(); v = t.Older(v) {
			if !visit(fromMemtable(v)) {
				return nil
			}
			at = v.Epoch() - 1
		}
	}
	for {
		v, ok, err := r.FindInTree(p, key, at)
		if err != nil || !ok || !visit(v) {
			return err
		}
		at = v.Epoch - 1
	}
}
