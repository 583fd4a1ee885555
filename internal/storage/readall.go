package storage

import (
	"epochkv/internal/storage/btree"
	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/memtable"
)

// Finder keeps what GetAll needs from call to call.
type Finder struct {
	tree    btree.Finder
	missing [][]byte // keys that no memtable has
	places  []int    // their places in the batch
	sorted  [][]byte // missing, in order
	sorter  keys.Sorter
}

// GetAll is Get for many keys, and calls visit with each outcome, in no certain order. Tree pages that are not in memory are read
// together, level by level. The caller stays inside its slot's protection; a version lives until visit returns.
func (r *Reader) GetAll(f *Finder, list [][]byte, at keys.Epoch, visit func(i int, v Version, ok bool) error) error {
	p := r.engine.Pin()
	f.missing, f.places = f.missing[:0], f.places[:0]
	for from := 0; from < len(list); from += memtable.FindWindow {
		window := list[from:min(from+memtable.FindWindow, len(list))]
		var refs [memtable.FindWindow]memtable.Ref
		p.findAll(window, at, refs[:len(window)])
		for i, key := range window {
			if !refs[i].Found() {
				f.missing, f.places = append(f.missing, key), append(f.places, from+i)
				continue
			}
			if err := visit(from+i, fromMemtable(refs[i]), true); err != nil {
				return err
			}
		}
	}
	if p.view.side != nil {
		if err := r.besideAll(f, p, at, visit); err != nil {
			return err
		}
	}
	if len(f.missing) == 0 {
		return nil
	}
	order := f.sorter.Sort(len(f.missing), func(i int) []byte { return f.missing[i] })
	f.sorted = f.sorted[:0]
	for _, i := range order {
		f.sorted = append(f.sorted, f.missing[i])
	}
	err := f.tree.FindAll(r, p.view.root, f.sorted, at, func(i int, v btree.Version, ok bool) error {
		return visit(f.places[order[i]], fromTree(&v), ok)
	})
	if err != nil {
		return r.engine.damage(err, p.view.root, nil)
	}
	return nil
}

// besideAll visits those of the missing keys that the side tree has, and keeps the others.
func (r *Reader) besideAll(f *Finder, p Pinned, at keys.Epoch, visit func(i int, v Version, ok bool) error) error {
	n := 0
	for i, key := range f.missing {
		v, ok, err := r.beside(p, key, at)
		if err == nil && ok {
			err = visit(f.places[i], v, true)
		}
		if err != nil {
			return err
		}
		if !ok {
			f.missing[n], f.places[n] = key, f.places[i]
			n++
		}
	}
	f.missing, f.places = f.missing[:n], f.places[:n]
	return nil
}

// findAll is Find for a window of keys.
func (p Pinned) findAll(window [][]byte, at keys.Epoch, refs []memtable.Ref) {
	if !p.view.active.mem.Empty() {
		p.view.active.mem.FindAll(window, at, refs)
	}
	for _, g := range p.view.frozen {
		g.mem.FindAll(window, at, refs)
	}
}
