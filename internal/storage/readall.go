package storage

import (
	"errors"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
)

// Finder keeps what GetAll needs from call to call.
type Finder struct {
	tree      btree.Finder
	missing   [][]byte // keys that no memtable has
	locations []int    // their places in the batch
	sorted    [][]byte // missing, in order
	sorter    keys.Sorter
	large     []largeValue
	stored    []byte // what the leaves store of these values
}

// largeValue is a version that was found, and whose value is read once its neighbours have been visited.
type largeValue struct {
	index   int
	version Version
	end     int // of its part of Finder.stored
}

// Forget drops the keys of the last call.
func (f *Finder) Forget() {
	clear(f.missing[:cap(f.missing)]) // the repair tree may have had some of them
	clear(f.sorted)
}

// Visits is what GetAll calls back.
type Visits struct {
	// Each is called with each outcome, in no certain order. The version lives until it returns.
	Each func(i int, v Version, ok bool) error
	// Pause, if set, is called between windows of keys, so that no more than one submission of reads is waited for without it: it may leave the slot's protection and take it up again. An error ends the batch.
	Pause func() error
}

func (v *Visits) pause() error {
	if v.Pause == nil {
		return nil
	}
	return v.Pause()
}

// GetAll is Get for many keys. Tree pages that are not in memory are read together, level by level. The caller is inside its slot's protection,
// and may leave it for a moment in each pause: the snapshot keeps what is to be found, in a memtable or, later, in the tree, and the state that
// is looked at is taken anew.
func (r *Reader) GetAll(f *Finder, list [][]byte, at keys.Epoch, visit Visits) error {
	p := r.engine.Pin()
	f.missing, f.locations = f.missing[:0], f.locations[:0]
	for from := 0; from < len(list); from += memtable.FindWindow {
		if from > 0 {
			if err := visit.pause(); err != nil {
				return err
			}
			p = r.engine.Pin()
		}
		window := list[from:min(from+memtable.FindWindow, len(list))]
		var refs [memtable.FindWindow]memtable.Ref
		p.findAll(window, at, refs[:len(window)])
		for i, key := range window {
			if !refs[i].Found() {
				f.missing, f.locations = append(f.missing, key), append(f.locations, from+i)
				continue
			}
			if err := visit.Each(from+i, fromMemtable(refs[i]), true); err != nil {
				return err
			}
		}
	}
	if err := r.repairTreeGetAll(f, at, visit); err != nil || len(f.missing) == 0 {
		return err
	}
	return r.treeAll(f, at, visit)
}

// treeAll visits the missing keys, which only the tree can have, window by window.
func (r *Reader) treeAll(f *Finder, at keys.Epoch, visit Visits) error {
	order := f.sorter.Sort(len(f.missing), func(i int) []byte { return f.missing[i] })
	f.sorted = f.sorted[:0]
	for _, i := range order {
		f.sorted = append(f.sorted, f.missing[i])
	}
	for from := 0; from < len(f.sorted); from += btree.FindWindow {
		if from > 0 {
			if err := visit.pause(); err != nil {
				return err
			}
		}
		window := f.sorted[from:min(from+btree.FindWindow, len(f.sorted))]
		if err := r.treeWindow(f, window, order[from:], at, visit); err != nil {
			return err
		}
	}
	return nil
}

// treeWindow looks up a window of keys. Blobs are read last, each after a pause: they may have megabytes.
func (r *Reader) treeWindow(f *Finder, window [][]byte, order []uint64, at keys.Epoch, visit Visits) error {
	v, large := r.engine.view.Load(), f.large[:0]
	f.stored = f.stored[:0]
	var visited error
	err := f.tree.FindAll(r.source(v), v.root, window, at, func(i int, found btree.Version, ok bool) error {
		place, version := f.locations[order[i]], fromTree(&found)
		if ok && version.large {
			f.stored = append(f.stored, version.value...)
			large = append(large, largeValue{index: place, version: version, end: len(f.stored)})
			return nil
		}
		visited = visit.Each(place, version, ok)
		return visited
	})
	f.large = large
	switch {
	case visited != nil:
		return visited
	case errors.Is(err, ErrWouldWait):
		return err
	case err != nil:
		return r.blame(err, v, window, at)
	}
	from := 0
	for i := range large {
		if err := visit.pause(); err != nil {
			return err
		}
		l := &large[i]
		l.version.value, from = f.stored[from:l.end], l.end
		if err := visit.Each(l.index, l.version, true); err != nil {
			return err
		}
	}
	return nil
}

// blame finds out which keys of a window a damaged page hides, so that the error names them.
func (r *Reader) blame(err error, v *view, window [][]byte, at keys.Epoch) error {
	for _, key := range window {
		if _, _, found := btree.Get(r.source(v), v.root, key, at); found != nil {
			return r.engine.damage(found, v.root, key)
		}
	}
	return r.engine.damage(err, v.root, nil)
}

// repairTreeGetAll visits those of the missing keys that the repair tree has, and keeps the others.
func (r *Reader) repairTreeGetAll(f *Finder, at keys.Epoch, visit Visits) error {
	p := r.engine.Pin()
	if p.view.repairTree == nil {
		return nil
	}
	n := 0
	for i, key := range f.missing {
		if i > 0 && i%btree.FindWindow == 0 {
			if err := visit.pause(); err != nil {
				return err
			}
			p = r.engine.Pin()
		}
		v, ok, err := r.repairTreeGet(p, key, at)
		if err == nil && ok {
			err = visit.Each(f.locations[i], v, true)
		}
		if err != nil {
			return err
		}
		if !ok {
			f.missing[n], f.locations[n] = key, f.locations[i]
			n++
		}
	}
	f.missing, f.locations = f.missing[:n], f.locations[:n]
	return nil
}

// findAll is Find for a window of keys.
func (p Pinned) findAll(window [][]byte, at keys.Epoch, refs []memtable.Ref) {
	if !p.view.active.mem.Empty() {
		p.view.active.mem.FindAll(window, at, refs)
	}
	for _, g := range p.view.immutables {
		g.mem.FindAll(window, at, refs)
	}
	if q := p.view.quarantine; q != nil {
		q.mem.FindAll(window, at, refs)
	}
}
