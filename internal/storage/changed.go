package storage

import (
	"bytes"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// ChangedKeys walks over the internal keys that may have changed between two epochs. It looks into every place that has
// versions: memtables, quarantine, repair tree and tree, and of the tree only into subtrees whose newest epoch is larger than
// the first of the two. What it finds are candidates: the caller reads each of them again at the second epoch, as every read
// does, and that read decides.
type ChangedKeys struct {
	Since, At keys.Epoch
	Bounds    ChangedBounds

	found  []foundKey
	bytes  []byte // the keys, one after the other
	keys   [][]byte
	cut    []byte // the walk continues here, if more is set
	more   bool
	tree   btree.Changed
	memory memtable.Iter
}

// foundKey is a key in ChangedKeys.bytes.
type foundKey struct{ from, to int }

// ChangedBounds bound the work of ChangedKeys inside one guard of the slot, for each place that has versions.
type ChangedBounds struct {
	Pages int // of a tree; more than its levels and two leaves
	Steps int // over keys of a memtable
	Bytes int // of keys, and of what each of them takes beside its bytes
}

// changedKeyBytes is what a key takes beside its bytes: foundKey, a slice, and what the slices of these have allocated ahead.
const changedKeyBytes = 48

// DefaultChangedBounds are some tenths of a millisecond. Of short keys they give about what one response of a watch has: the rest is collected again when
// its client has taken the response.
var DefaultChangedBounds = ChangedBounds{Pages: 2 * LeavesMax, Steps: skippedMax, Bytes: 64 << 10}

// Next collects the next keys of [lower, upper) in order, and reports where the walk continues, or nil at its end. There may
// be no keys although it continues. The keys are valid until the next call. The caller is inside its slot's protection, and
// has snapshots at both epochs.
func (c *ChangedKeys) Next(r *Reader, lower, upper []byte) (found [][]byte, next []byte, err error) {
	v := r.engine.view.Load()
	c.found, c.bytes, c.keys, c.more = c.found[:0], c.bytes[:0], c.keys[:0], false
	c.inTable(v.active.mem, lower, upper)
	for _, g := range v.immutables {
		if g.end.Load() <= uint64(c.Since)+1 {
			break // from here on every epoch is older
		}
		c.inTable(g.mem, lower, upper)
	}
	if v.quarantine != nil {
		c.inTable(v.quarantine.mem, lower, upper)
	}
	if err := c.inTrees(r, v, lower, upper); err != nil {
		return nil, nil, err
	}
	c.arrange()
	if c.more {
		next = c.cut
	}
	return c.keys, next, nil
}

// inTable collects the keys of a memtable.
func (c *ChangedKeys) inTable(t *memtable.Table, lower, upper []byte) {
	if t.Empty() {
		return
	}
	it, from := &c.memory, c.size()
	it.Init(t)
	steps := 0
	for ok := it.SeekGE(lower); ok && bytes.Compare(it.Key(), upper) < 0; ok = it.NextKey() {
		if steps++; steps > c.Bounds.Steps || c.size()-from > c.Bounds.Bytes {
			c.stopAt(it.Key())
			return
		}
		if found := it.VersionAt(c.At); found.Found() && found.Epoch() > c.Since {
			c.add(it.Key())
		}
	}
}

// inTrees collects the keys of the tree, and of the repair tree, which has newer versions of the keys of skipped pages.
func (c *ChangedKeys) inTrees(r *Reader, v *view, lower, upper []byte) error {
	c.tree.Lower, c.tree.Upper, c.tree.Since, c.tree.At, c.tree.PagesMax = lower, upper, c.Since, c.At, c.Bounds.Pages
	var source btree.Source = r.pages.Scanner()
	if v.repairTree != nil {
		root, mirror := v.repairTree.Roots()
		err := c.inTree(source, root)
		if err != nil && pagesource.IsDamage(err) && !mirror.Empty() {
			root = mirror
			err = c.inTree(source, root)
		}
		if err != nil {
			return r.engine.damage(err, root, lower)
		}
		source = v.repairTree.Skipping(source, &r.engine.pager.Reader)
	}
	if err := c.inTree(source, v.root); err != nil {
		return r.engine.damage(err, v.root, lower)
	}
	return nil
}

func (c *ChangedKeys) inTree(source btree.Source, root btree.Root) error {
	from := c.size()
	resume, err := c.tree.Visit(source, root, func(key []byte) bool {
		c.add(key)
		return c.size()-from <= c.Bounds.Bytes
	})
	if resume != nil {
		c.stopAt(resume)
	}
	return err
}

func (c *ChangedKeys) add(key []byte) {
	from := len(c.bytes)
	c.bytes = append(c.bytes, key...)
	c.found = append(c.found, foundKey{from, len(c.bytes)})
}

// size is what the keys take that were found.
func (c *ChangedKeys) size() int { return len(c.bytes) + changedKeyBytes*len(c.found) }

// Release gives up the memory of the keys, which become invalid.
func (c *ChangedKeys) Release() { c.found, c.bytes, c.keys = nil, nil, nil }

// stopAt records that keys from this one on have not been looked for everywhere.
func (c *ChangedKeys) stopAt(key []byte) {
	if !c.more || bytes.Compare(key, c.cut) < 0 {
		c.more, c.cut = true, append(c.cut[:0], key...)
	}
}

// arrange sorts the keys before the cut, each once.
func (c *ChangedKeys) arrange() {
	for _, s := range c.found {
		if key := c.bytes[s.from:s.to:s.to]; !c.more || bytes.Compare(key, c.cut) < 0 {
			c.keys = append(c.keys, key)
		}
	}
	slices.SortFunc(c.keys, bytes.Compare)
	c.keys = slices.CompactFunc(c.keys, bytes.Equal)
}
