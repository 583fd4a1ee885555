package btree

import (
	"bytes"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Cursor walks the keys of a tree at one epoch, in both directions. Of each key it shows the newest
// version that is not newer than the epoch; it shows no key whose version is a tombstone. The zero
// Cursor is ready for Reset. A cursor that is used again allocates nothing.
//
// What the cursor shows, and all pages of its path, are valid as long as the pin under which it
// moves. To continue under another pin, call Reset and seek to the last key.
type Cursor struct {
	// BeforeLeaf, if set, is called before the cursor enters leaf id, by a seek or by a step, so
	// that the leaves that Ahead names can be read in advance.
	BeforeLeaf func(c *Cursor, id page.ID, forward, seek bool)
	// LeavesMax, if not zero, is how many leaves the cursor enters after Reset before it pauses
	// instead of entering another one. So one step does a bounded amount of work, however many
	// deleted keys are next to each other. It is at least two, so that each pause is further than
	// the one before.
	LeavesMax int

	src    Source
	root   Root
	at     keys.Epoch
	lo, hi []byte
	err    error
	valid  bool

	path       [page.LevelMax + 1]step // by level; path[0] is unused
	page       page.Leaf
	leaf       page.LeafLayout // of page
	first, end int             // the leaf's entries inside the bounds
	pos        int             // the current entry, or the newest version of its key
	key        []byte          // current, or last known not to exist; empty after a seek until then
	entered    bool            // key is not from this leaf
	scratch    []byte
	version    Version
	walk       walk
}

// walk is what bounds the work of one step, see LeavesMax.
type walk struct {
	visited int // leaves entered since Reset
	paused  bool
	resume  []byte // where the walk of a paused cursor continues
	unread  int    // level of the page that ended the walk with an error; -1 if that is not known
}

// step is the cursor's position in an inner node of its path.
type step struct {
	node  page.Inner
	index int // of the child taken
}

// Reset prepares the cursor for another tree, epoch, or range: keys in [lo, hi), where an empty
// bound means none. The cursor has no position until a seek. The bounds must not change while the
// cursor is used.
func (c *Cursor) Reset(src Source, root Root, at keys.Epoch, lo, hi []byte) {
	c.src, c.root, c.at, c.lo, c.hi = src, root, at, lo, hi
	if c.key == nil { // it is written for each entry
		c.key, c.scratch = keys.Scratch(), keys.Scratch()
	}
	c.err, c.valid, c.walk.paused, c.walk.visited, c.walk.unread = nil, false, false, 0, -1
}

// Paused reports whether the walk stopped because of LeavesMax. After a Reset it continues with
// SeekGE(Resume()) or, backward, with SeekLT(Resume()).
func (c *Cursor) Paused() bool { return c.walk.paused }

// Resume is where a paused walk continues. It is valid until the next Reset.
func (c *Cursor) Resume() []byte { return c.walk.resume }

// exhausted reports whether the cursor must not enter another leaf.
func (c *Cursor) exhausted() bool { return c.LeavesMax > 0 && c.walk.visited >= c.LeavesMax }

// pauseForward stops before the leaf whose lower bound is sep. All keys before the bound are
// decided. If the versions of one key continue after it, that key may be undecided, and a seek
// finds its versions; or it is the current key, which is decided.
func (c *Cursor) pauseForward(sep page.Separator) bool {
	decided := bytes.Equal(sep.Key, c.key)
	c.walk.resume = append(c.walk.resume[:0], sep.Key...)
	if decided {
		c.walk.resume = append(c.walk.resume, 0)
	}
	c.walk.paused = true
	return false
}

// pauseBackward stops after the leaf that ends at sep, the lower bound of the current leaf. If the
// bound says that a key's versions continue after it, and they do not, the key is still undecided.
func (c *Cursor) pauseBackward(sep page.Separator) bool {
	c.walk.resume = append(c.walk.resume[:0], sep.Key...)
	if sep.Trailer != page.NoTrailer {
		c.walk.resume = append(c.walk.resume, 0)
	}
	c.walk.paused = true
	return false
}

// Valid reports whether the cursor is on a key.
func (c *Cursor) Valid() bool { return c.valid }

// Err is what ended the walk early, or nil.
func (c *Cursor) Err() error { return c.err }

// Key is the current key. It is valid until the cursor moves.
func (c *Cursor) Key() []byte { return c.key }

// Version is the version of the current key at the cursor's epoch. Its value aliases the page.
func (c *Cursor) Version() *Version { return &c.version }

// First moves to the first key.
func (c *Cursor) First() bool { return c.SeekGE(c.lo) }

// Last moves to the last key.
func (c *Cursor) Last() bool { return c.SeekLT(nil) }

// SeekGE moves to the first key that is not less than key.
func (c *Cursor) SeekGE(key []byte) bool {
	if bytes.Compare(key, c.lo) < 0 {
		key = c.lo
	}
	c.key = c.key[:0]
	if !c.seek(key, newestBefore(c.at), true) {
		return false
	}
	c.pos = max(c.page.Search(key), c.first)
	return c.stepTo()
}

// SeekLT moves to the last key that is less than key. An empty key is after all others.
func (c *Cursor) SeekLT(key []byte) bool {
	if len(c.hi) != 0 && (len(key) == 0 || bytes.Compare(key, c.hi) > 0) {
		key = c.hi
	}
	c.key, c.valid = c.key[:0], false
	if len(key) == 0 {
		if !c.descendEdge(c.root.ID, c.root.Level, true, true) {
			return false
		}
		c.pos = c.end
	} else {
		if !c.seek(key, page.NoTrailer, false) {
			return false
		}
		c.pos = min(c.page.Search(key), c.end)
	}
	return c.stepBack()
}

// Next moves to the next key. The cursor must be on a key.
func (c *Cursor) Next() bool {
	c.pos = c.groupEnd(c.pos)
	return c.stepTo()
}

// Prev moves to the key before. The cursor must be on a key.
func (c *Cursor) Prev() bool {
	g := c.groupStart(c.pos)
	if g == 0 && c.continued() {
		if !c.descend(c.key) {
			return false
		}
		g = c.page.Search(c.key)
	}
	c.pos = g
	return c.stepBack()
}

// groupEnd is the entry after those of the key at i.
func (c *Cursor) groupEnd(i int) int {
	for i++; i < c.end && c.leaf.Same(i); {
		i++
	}
	return i
}

// groupStart is the first entry in this leaf of the key at i.
func (c *Cursor) groupStart(i int) int {
	for c.leaf.Same(i) {
		i--
	}
	return i
}

// stepTo shows the first key at or after pos that exists at the epoch. The entry at pos begins a
// key, or pos is the end of the leaf.
func (c *Cursor) stepTo() bool {
	for {
		for c.pos < c.end {
			suffix, t, value, large := c.leaf.At(c.pos)
			for t.Epoch() > c.at {
				if c.pos++; c.pos >= c.end || !c.leaf.Same(c.pos) {
					break
				}
				_, t, value, large = c.leaf.At(c.pos)
			}
			switch {
			case t.Epoch() > c.at: // not here, but perhaps in the next leaf, where the key then begins anew
			case t.Kind() != keys.KindDelete:
				c.show(suffix, t, value, large)
				return true
			default:
				if c.pos = c.groupEnd(c.pos); c.pos == c.end {
					c.setKey(suffix) // so that older versions in the next leaf are known to be hidden
				}
			}
		}
		if !c.nextLeaf() {
			return false
		}
	}
}

// stepBack shows the last key before pos that exists at the epoch.
func (c *Cursor) stepBack() bool {
	for {
		for c.pos > c.first {
			g := c.groupStart(c.pos - 1)
			if g == 0 && c.continued() {
				if shown := c.showAcross(); shown || c.err != nil {
					return shown
				}
				continue
			}
			suffix, t, value, large := c.leaf.At(g)
			i := g
			for t.Epoch() > c.at && i+1 < c.pos {
				i++
				_, t, value, large = c.leaf.At(i)
			}
			if c.pos = g; t.Epoch() <= c.at && t.Kind() != keys.KindDelete {
				c.show(suffix, t, value, large)
				return true
			}
		}
		if !c.prevLeaf() {
			return false
		}
	}
}

// showAcross shows the leaf's first key, which has newer versions in earlier leaves, or skips it if
// it does not exist. Either way the cursor is then at its newest version.
func (c *Cursor) showAcross() bool {
	suffix, _, _, _ := c.leaf.At(0)
	c.setKey(suffix)
	v, ok, err := Get(c.src, c.root, c.key, c.at)
	if err != nil {
		return c.fail(err)
	}
	if !c.descend(c.key) {
		return false
	}
	c.pos = c.page.Search(c.key)
	if !ok || v.Kind == keys.KindDelete {
		return false
	}
	c.version, c.valid = v, true
	return true
}

func (c *Cursor) show(suffix []byte, t keys.Trailer, value []byte, large bool) {
	c.setKey(suffix)
	c.version = Version{Epoch: t.Epoch(), Kind: t.Kind(), Large: large, Value: value}
	c.valid = true
}

// setKey makes the key with this suffix the current one. The prefix is copied once for each leaf.
func (c *Cursor) setKey(suffix []byte) {
	n := len(c.leaf.Prefix())
	if c.entered {
		c.key, c.entered = append(c.key[:0], c.leaf.Prefix()...), false
	}
	c.key = append(c.key[:n], suffix...)
}

func (c *Cursor) fail(err error) bool {
	c.err, c.valid = err, false
	return false
}

// failAt is fail because of a page at a level, below the path.
func (c *Cursor) failAt(level int, err error) bool {
	c.walk.unread = level
	return c.fail(err)
}

// UnreadPage is where a page that cannot be read is in the tree.
type UnreadPage struct {
	Lower, Upper *page.Separator // nil for no bound
	Level        int
	Newest       keys.Epoch // no version below the page is newer; keys.MaxEpoch if that is not known
}

// Enter narrows the place to child i of a node.
func (u *UnreadPage) Enter(node page.Inner, i int) {
	if i > 0 {
		sep := node.Separator(nil, i)
		u.Lower = &sep
	}
	if i+1 < node.Count() {
		sep := node.Separator(nil, i+1)
		u.Upper = &sep
	}
	u.Newest = node.Newest(i)
}

// Unread is the page whose error has ended the walk; false if that is not known.
func (c *Cursor) Unread() (u UnreadPage, known bool) {
	if c.err == nil || c.walk.unread < 0 {
		return u, false
	}
	u.Level, u.Newest = c.walk.unread, keys.MaxEpoch
	for level := c.root.Level; level > u.Level; level-- {
		u.Enter(c.path[level].node, c.path[level].index)
	}
	return u, true
}

// seek descends to key; the walk continues from there in the given direction. The trailer chooses
// among leaves with versions of key.
func (c *Cursor) seek(key []byte, t keys.Trailer, forward bool) bool {
	id, ok := c.pathTo(key, t)
	if !ok {
		return false
	}
	c.before(id, forward, true)
	return c.enter(id)
}

// descend enters the leaf where key begins, or would.
func (c *Cursor) descend(key []byte) bool {
	id, ok := c.pathTo(key, page.NoTrailer)
	return ok && c.enter(id)
}

// pathTo takes the path to the leaf with (key, t).
func (c *Cursor) pathTo(key []byte, t keys.Trailer) (leaf page.ID, ok bool) {
	c.valid = false
	id := c.root.ID
	if id == 0 {
		return 0, false
	}
	for level := c.root.Level; level > 0; level-- {
		p, err := fetch(c.src, id, level)
		if err != nil {
			return 0, c.failAt(level, err)
		}
		s := &c.path[level]
		s.node = p
		s.index = s.node.Search(key, t)
		id = s.node.Child(s.index)
	}
	return id, true
}

func (c *Cursor) before(id page.ID, forward, seek bool) {
	if c.BeforeLeaf != nil && c.root.Level > 0 {
		c.BeforeLeaf(c, id, forward, seek)
	}
}

// descendEdge enters the first or last leaf below page id.
func (c *Cursor) descendEdge(id page.ID, level int, last, seek bool) bool {
	if id == 0 {
		return false
	}
	for ; level > 0; level-- {
		p, err := fetch(c.src, id, level)
		if err != nil {
			return c.failAt(level, err)
		}
		s := &c.path[level]
		s.node, s.index = p, 0
		if last {
			s.index = s.node.Count() - 1
		}
		id = s.node.Child(s.index)
	}
	c.before(id, !last, seek)
	return c.enter(id)
}

// enter makes leaf id the current one.
func (c *Cursor) enter(id page.ID) bool {
	p, err := fetch(c.src, id, 0)
	if err != nil {
		return c.failAt(0, err)
	}
	c.walk.visited++
	c.page = p
	c.leaf = c.page.Layout()
	c.entered = true
	c.first, c.end = 0, c.leaf.Count()
	if len(c.lo) != 0 {
		c.first = c.page.Search(c.lo)
	}
	if len(c.hi) != 0 {
		c.end = c.page.Search(c.hi)
	}
	return true
}

// nextLeaf enters the next leaf, if it can hold keys inside the bounds, and moves to the first
// entry of a key that is not decided yet.
func (c *Cursor) nextLeaf() bool {
	c.valid = false
	if c.end < c.leaf.Count() {
		return false
	}
	level := 1
	for level <= c.root.Level && c.path[level].index == c.path[level].node.Count()-1 {
		level++
	}
	if level > c.root.Level {
		return false
	}
	s := &c.path[level]
	if len(c.hi) != 0 && c.separator(s, s.index+1).Compare(c.hi, page.NoTrailer) >= 0 {
		return false
	}
	if c.exhausted() {
		return c.pauseForward(c.separator(s, s.index+1))
	}
	s.index++
	if !c.descendEdge(s.node.Child(s.index), level-1, false, false) {
		return false
	}
	if c.pos = 0; c.firstIs(c.key) {
		c.pos = c.groupEnd(0)
	}
	return true
}

// prevLeaf enters the leaf before, if it can hold keys inside the bounds, and moves past its last
// entry.
func (c *Cursor) prevLeaf() bool {
	c.valid = false
	if c.first > 0 {
		return false
	}
	level := c.turn()
	if level > c.root.Level {
		return false
	}
	s := &c.path[level]
	if len(c.lo) != 0 && c.separator(s, s.index).Compare(c.lo, page.NoTrailer) <= 0 {
		return false
	}
	if c.exhausted() {
		return c.pauseBackward(c.separator(s, s.index))
	}
	s.index--
	if !c.descendEdge(s.node.Child(s.index), level-1, true, false) {
		return false
	}
	c.pos = c.end
	return true
}

// turn is the lowest level at which the path can move one child back.
func (c *Cursor) turn() int {
	level := 1
	for level <= c.root.Level && c.path[level].index == 0 {
		level++
	}
	return level
}

// separator reads a separator into the cursor's scratch space.
func (c *Cursor) separator(s *step, i int) page.Separator {
	sep := s.node.Separator(c.scratch[:0], i)
	c.scratch = sep.Key
	return sep
}

// continued reports whether the leaf's first key has newer versions in the leaf before.
func (c *Cursor) continued() bool {
	level := c.turn()
	if level > c.root.Level {
		return false
	}
	s := &c.path[level]
	sep := c.separator(s, s.index)
	return sep.Trailer != page.NoTrailer && c.firstIs(sep.Key)
}

// firstIs reports whether the leaf's first key is key.
func (c *Cursor) firstIs(key []byte) bool {
	suffix, _, _, _ := c.leaf.At(0)
	n := len(c.leaf.Prefix())
	return len(key) == n+len(suffix) && string(key[:n]) == string(c.leaf.Prefix()) && string(key[n:]) == string(suffix)
}

// Bounded reports whether the range ends somewhere in the given direction.
func (c *Cursor) Bounded(forward bool) bool {
	if forward {
		return len(c.hi) != 0
	}
	return len(c.lo) != 0
}

// Ahead fills ids with the leaf that the cursor is about to enter and the following ones in its
// direction, as far as they have the same parent and can hold keys inside the bounds. It returns
// how many there are. It is for BeforeLeaf.
func (c *Cursor) Ahead(ids []page.ID, forward bool) int {
	s := &c.path[1]
	n := 0
	if forward {
		last := s.node.Count() - 1
		if len(c.hi) != 0 {
			last = s.node.Search(c.hi, page.NoTrailer)
		}
		for i := s.index; i <= last && n < len(ids); i++ {
			ids[n] = s.node.Child(i)
			n++
		}
		return n
	}
	first := 0
	if len(c.lo) != 0 {
		first = s.node.Search(c.lo, page.NoTrailer)
	}
	for i := s.index; i >= first && n < len(ids); i-- {
		ids[n] = s.node.Child(i)
		n++
	}
	return n
}
