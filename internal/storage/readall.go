package storage

import (
	"bytes"
	"encoding/binary"
	"slices"

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
	order   []uint64 // what missing is sorted by
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
	f.sort()
	err := f.tree.FindAll(r, p.view.root, f.sorted, at, func(i int, v btree.Version, ok bool) error {
		return visit(f.places[f.order[i]], fromTree(&v), ok)
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

// placeBits are the low bits of a word to sort by, which say where the key stands; the rest is the beginning of what tells the
// keys apart. Sorting such words takes a third of the time of sorting the keys.
const placeBits = 16

// sort orders the missing keys: order becomes their places among missing, sorted the keys themselves.
func (f *Finder) sort() {
	f.order, f.sorted = f.order[:0], f.sorted[:0]
	skip := 0
	if len(f.missing) <= 1<<placeBits {
		skip = commonPrefix(f.missing)
	}
	for i, key := range f.missing {
		f.order = append(f.order, headAfter(key, skip)>>placeBits<<placeBits|uint64(i)&(1<<placeBits-1))
	}
	if len(f.missing) > 1<<placeBits {
		f.sortWhole()
	} else {
		f.sortHeads()
	}
	for _, i := range f.order {
		f.sorted = append(f.sorted, f.missing[i])
	}
}

// sortHeads sorts by heads, and then by key where heads are equal.
func (f *Finder) sortHeads() {
	slices.Sort(f.order)
	for from := 0; from < len(f.order); {
		head, to := f.order[from]>>placeBits, from
		for ; to < len(f.order) && f.order[to]>>placeBits == head; to++ {
			f.order[to] &= 1<<placeBits - 1
		}
		f.byKey(f.order[from:to])
		from = to
	}
}

// sortWhole sorts more keys than a word can number.
func (f *Finder) sortWhole() {
	for i := range f.order {
		f.order[i] = uint64(i)
	}
	f.byKey(f.order)
}

func (f *Finder) byKey(places []uint64) {
	if len(places) > 1 {
		slices.SortFunc(places, func(i, j uint64) int { return bytes.Compare(f.missing[i], f.missing[j]) })
	}
}

// commonPrefix is how many bytes all keys begin with alike.
func commonPrefix(list [][]byte) int {
	first, n := list[0], len(list[0])
	for _, key := range list[1:] {
		n = min(n, len(key))
		i := 0
		for i < n && key[i] == first[i] {
			i++
		}
		n = i
	}
	return n
}

// headAfter is the eight bytes of key behind its first skip ones, as a number that orders as they do; zeros stand for what it has not.
func headAfter(key []byte, skip int) uint64 {
	rest := key[skip:]
	if len(rest) >= 8 {
		return binary.BigEndian.Uint64(rest)
	}
	var padded [8]byte
	copy(padded[:], rest)
	return binary.BigEndian.Uint64(padded[:])
}
