package storage

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/memtable"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
)

// Cursor merges the sources of one view into a sequence of user keys with their version at a
// snapshot, forward or in reverse. It is reused by OpenCursor and valid only inside the slot's
// protection under which it was opened.
type Cursor struct {
	tables []memtable.Iter // newest first; kept for reuse, as each is large
	open   int             // tables in use
	tree   btree.Cursor    // the oldest source
	inTree bool            // tree is at an entry
	engine *Engine

	checkpoint uint64 // of the view
	root       btree.Root
	leaves     int // of the tree, entered since OpenCursor
	skipped    int // keys without a version at the snapshot, since OpenCursor
	paused     bool
	resume     []byte // where a paused walk continues
	readahead  pagesource.Readahead
	at         keys.Epoch
	lower      []byte
	upper      []byte
	key        []byte
	version    Version
	valid      bool
	err        error
}

// Bounds of the work of a cursor inside one guard of the slot.
const (
	// LeavesMax is the number of tree leaves that a cursor enters before it pauses. While the slot
	// is in its guard, frames that were evicted since cannot be reused. Without the bound, in a
	// scan of more than the cache nine of ten pages were not cached, and the same happened to other
	// readers.
	LeavesMax = 16
	// skippedMax is the number of memtable keys without a version at the snapshot that a cursor
	// passes before it pauses: some tenths of a millisecond.
	skippedMax = 2048
)

// OpenCursor prepares c over the current view, at a snapshot, within [lower, upper). It is not
// positioned. limit is how many entries its user will look at, or 0 if that is not known: it says
// how many pages to read at once.
func (r *Reader) OpenCursor(c *Cursor, at keys.Epoch, lower, upper []byte, limit int) {
	v := r.engine.view.Load()
	var source btree.Source = r.pages.Scanner()
	if v.repairTree != nil {
		source = v.repairTree.Skipping(source, &r.engine.pager.Reader)
	}
	r.open(c, v, source, v.root, at, lower, upper, limit)
}

// OpenCursorBeside prepares c as OpenCursor does, but for what is readable in a range that a damaged page hides: what the
// memtables, the quarantine and the repair tree have, and nothing of the tree. Where a page of the repair tree is damaged, too,
// its mirror has the same.
func (r *Reader) OpenCursorBeside(c *Cursor, at keys.Epoch, lower, upper []byte, mirror bool) {
	v := r.engine.view.Load()
	root, other := v.repairTree.Roots()
	if mirror && !other.Empty() {
		root = other
	}
	r.open(c, v, r.pages.Scanner(), root, at, lower, upper, 0)
}

func (r *Reader) open(c *Cursor, v *view, source btree.Source, root btree.Root, at keys.Epoch, lower, upper []byte, limit int) {
	e := r.engine
	c.open, c.at, c.lower, c.upper, c.valid, c.err = 0, at, lower, upper, false, nil
	c.addTable(v.active.mem)
	for _, g := range v.immutables {
		c.addTable(g.mem)
	}
	if v.quarantine != nil {
		c.addTable(v.quarantine.mem)
	}
	c.engine, c.root, c.checkpoint = e, root, v.checkpoint
	c.leaves, c.skipped, c.paused = 0, 0, false
	c.tree.LeavesMax = LeavesMax
	if e.prefetch != nil {
		c.readahead.Expect(e.leavesOf(limit))
	}
	if c.tree.BeforeLeaf == nil {
		c.tree.BeforeLeaf = c.beforeLeaf
	}
	c.tree.Reset(source, root, at, treeBound(lower, keys.SpaceUser), treeBound(upper, keys.SpaceUser+1))
	c.inTree = false
}

// addTable adds a source, unless it is empty: the caller's snapshot is older than what comes into
// it.
func (c *Cursor) addTable(t *memtable.Table) {
	if t.Empty() {
		return
	}
	if c.open == len(c.tables) {
		c.tables = append(c.tables, memtable.Iter{})
	}
	c.tables[c.open].Init(t)
	c.open++
}

// Close drops the references of the cursor.
func (c *Cursor) Close() {
	c.open, c.valid, c.key = 0, false, nil
}

// SeekGE positions on the first key >= key that has a version at the snapshot.
func (c *Cursor) SeekGE(key []byte) {
	for i := range c.open {
		c.tables[i].SeekGE(key)
	}
	c.inTree = c.tree.SeekGE(key)
	c.stepForward()
}

// SeekLT positions on the last key < key that has a version at the snapshot.
func (c *Cursor) SeekLT(key []byte) {
	for i := range c.open {
		c.tables[i].SeekKeyLT(key)
	}
	c.inTree = c.tree.SeekLT(key)
	c.stepBackward()
}

// Next moves on to the next key. It continues a forward walk.
func (c *Cursor) Next() {
	if c.open == 0 {
		c.inTree = c.tree.Next()
		c.stepTree()
		return
	}
	c.skipForward()
	c.stepForward()
}

// Prev moves back to the key before. It continues a backward walk.
func (c *Cursor) Prev() {
	if c.open == 0 {
		c.inTree = c.tree.Prev()
		c.stepTree()
		return
	}
	c.skipBackward()
	c.stepBackward()
}

// skipForward moves every source that is at the current key past it.
func (c *Cursor) skipForward() {
	for i := range c.open {
		if t := &c.tables[i]; t.Valid() && bytes.Equal(t.Key(), c.key) {
			t.NextKey()
		}
	}
	if c.inTree && bytes.Equal(c.tree.Key(), c.key) {
		c.inTree = c.tree.Next()
	}
}

func (c *Cursor) skipBackward() {
	for i := range c.open {
		if t := &c.tables[i]; t.Valid() && bytes.Equal(t.Key(), c.key) {
			t.PrevKey()
		}
	}
	if c.inTree && bytes.Equal(c.tree.Key(), c.key) {
		c.inTree = c.tree.Prev()
	}
}

// stepForward picks the smallest key among the sources, and goes on while it has no version at the
// snapshot.
func (c *Cursor) stepForward() {
	if c.open == 0 {
		c.stepTree()
		return
	}
	for c.pick(-1) {
		if bytes.Compare(c.key, c.upper) >= 0 {
			c.valid = false
			return
		}
		if c.resolve() {
			return
		}
		if c.skipped++; c.skipped >= skippedMax {
			c.pause(append(append(c.resume[:0], c.key...), 0))
			return
		}
		c.skipForward()
	}
}

func (c *Cursor) stepBackward() {
	if c.open == 0 {
		c.stepTree()
		return
	}
	for c.pick(+1) {
		if bytes.Compare(c.key, c.lower) < 0 {
			c.valid = false
			return
		}
		if c.resolve() {
			return
		}
		if c.skipped++; c.skipped >= skippedMax {
			c.pause(append(c.resume[:0], c.key...))
			return
		}
		c.skipBackward()
	}
}

// stepTree takes over where the tree stands, while it is the only source. It keeps the bounds
// itself but for the end of the keyspace (treeBound).
func (c *Cursor) stepTree() {
	c.valid = c.inTree
	if c.inTree {
		v := c.tree.Version()
		c.version.Epoch, c.version.Kind, c.version.large, c.version.value = v.Epoch, v.Kind, v.Large, v.Value
		c.version.Sync = false
		c.key = c.tree.Key()
		c.valid = c.key[0] == c.lower[0]
		return
	}
	if c.tree.Err() != nil {
		c.err = c.engine.cursorDamage(&c.tree, c.root, c.key)
	} else if c.tree.Paused() {
		c.pause(append(c.resume[:0], c.tree.Resume()...))
	}
}

// pause ends the walk for now.
func (c *Cursor) pause(resume []byte) { c.paused, c.valid, c.resume = true, false, resume }

// Paused reports whether the cursor has no key because it has done enough inside one guard of the
// slot. The walk continues, inside a new guard, with SeekGE(Resume()) or, in reverse, with
// SeekLT(Resume()).
func (c *Cursor) Paused() bool { return c.paused }

// Resume is where a paused walk continues. It is valid until the next OpenCursor.
func (c *Cursor) Resume() []byte { return c.resume }

// pauseWithTree pauses where the cursor of the tree did, unless the current key comes before that: of the keys up to there the
// tree has nothing to show, so the memtables decide.
func (c *Cursor) pauseWithTree(sign int) {
	if resume := c.tree.Resume(); !c.valid || bytes.Compare(c.key, resume) < 0 != (sign < 0) {
		c.pause(append(c.resume[:0], resume...))
	}
}

// pick sets key to the smallest (sign -1) or largest (+1) among the sources.
func (c *Cursor) pick(sign int) bool {
	c.valid = false
	for i := range c.open {
		t := &c.tables[i]
		if !t.Valid() {
			continue
		}
		if !c.valid || bytes.Compare(t.Key(), c.key)*sign > 0 {
			c.key, c.valid = t.Key(), true
		}
	}
	if c.inTree && (!c.valid || bytes.Compare(c.tree.Key(), c.key)*sign > 0) {
		c.key, c.valid = c.tree.Key(), true
	}
	if c.tree.Err() != nil {
		c.err, c.valid = c.engine.cursorDamage(&c.tree, c.root, c.key), false
	} else if c.tree.Paused() {
		c.pauseWithTree(sign)
	}
	return c.valid
}

// resolve finds the version at the snapshot: the newest source that has one decides.
func (c *Cursor) resolve() bool {
	for i := range c.open {
		t := &c.tables[i]
		if !t.Valid() || !bytes.Equal(t.Key(), c.key) {
			continue
		}
		if r := t.VersionAt(c.at); r.Found() {
			c.version = fromMemtable(r)
			return true
		}
	}
	if c.inTree && bytes.Equal(c.tree.Key(), c.key) {
		c.version = fromTree(c.tree.Version())
		return true
	}
	return false
}

// Full reports whether the cursor has entered as many of the tree's leaves as it should inside one guard. A cursor whose tree
// has paused enters no more of them, and shows what the memtables have up to there.
func (c *Cursor) Full() bool { return c.leaves >= LeavesMax && !c.tree.Paused() }

// Restart prepares read-ahead for a new scan. Without it, OpenCursor continues the scan before.
func (c *Cursor) Restart() { c.readahead.Restart() }

// Valid reports whether the cursor is at a key.
func (c *Cursor) Valid() bool { return c.valid }

// Key is the internal key. It lives until the cursor moves.
func (c *Cursor) Key() []byte { return c.key }

// Version is the key's version at the snapshot, which may be a deletion. It lives until the cursor
// moves.
func (c *Cursor) Version() *Version { return &c.version }

// Err is what ended the walk early, or nil.
func (c *Cursor) Err() error { return c.err }

// treeBound is a bound as the tree wants it: none where it is only the end of the keyspace, so that
// a scan of everything is not taken for a bounded one. The cursor checks its bounds itself.
func treeBound(bound []byte, end keys.Space) []byte {
	if len(bound) == 1 && bound[0] == byte(end) {
		return nil
	}
	return bound
}
