package orphans

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/pagesource"
	"github.com/epochkv/epochkv/internal/vfs"
)

// topsMax bounds the tops whose keys Find keeps: children of a hundred lost nodes of large pages.
const topsMax = 1 << 16

// nodesMax bounds the nodes that one search finds, and one checkpoint rebuilds, but for those below the last
// of them: a merge compares each child that it meets with all of them.
const nodesMax = 1000

// Search says where to search.
type Search struct {
	Pages  *pager.Snapshot // with its allocation map
	Tree   btree.Root
	Beside []btree.Root // the repair tree and its mirror
	Newest keys.Epoch   // of all versions in the tree
	// Exact says that every live page of the allocation map that is part of a tree is reachable.
	Exact bool
	// Skipped reports whether checkpoints skip a page. An inner node that they skip and that can be read again is
	// rebuilt from itself.
	Skipped func(page.ID) bool
	// Blobs calls each for the pages of the blob store.
	Blobs func(each func(page.ID) error) error
	// Pause is called before each read, to keep to a rate; may be nil.
	Pause func(ctx context.Context) error
}

// Found is the result of a search.
type Found struct {
	Nodes   []btree.RebuiltNode
	Refused []Refusal
	Reads   int // pages read
}

// Refusal is a lost node whose children are not proved.
type Refusal struct {
	Page   page.ID
	Level  int
	Reason string
}

// errUnproved is wrapped by the reason why a node stays lost. Find does not return it.
var errUnproved = errors.New("not proved")

func unproved(format string, args ...any) error {
	return fmt.Errorf("%w: %w", errUnproved, fmt.Errorf(format, args...))
}

// Find searches the state for lost nodes and their children. Damage is in the result; an error ended the search.
func Find(ctx context.Context, s *Search) (*Found, error) {
	f := &finder{Search: s, ctx: ctx, buf: vfs.AlignedBuffer(s.Pages.PageSize())}
	orphans, err := s.Pages.Unreached(f.reach)
	if err != nil && !pagesource.IsDamage(err) {
		return nil, err
	}
	if err != nil {
		f.healed = nil // one of them may be an older version, whose children are elsewhere now
	}
	if len(f.lost) == 0 {
		return f.result(nil), nil
	}
	if err == nil {
		err = f.checkExact()
	} else {
		err = unproved("the state does not agree with its allocation map: %w", err)
	}
	if err == nil {
		f.orphans = orphans
		err = f.sortOrphans()
	}
	if err == nil {
		err = f.assign()
	}
	if err != nil && !errors.Is(err, errUnproved) {
		return nil, err
	}
	return f.result(err), nil
}

// finder is one search.
type finder struct {
	*Search
	ctx   context.Context
	buf   []byte
	reads int

	lost   []*lostNode         // in key order
	hidden []*lostNode         // below readable orphans: a later search rebuilds them
	healed []btree.RebuiltNode // skipped nodes that can be read again
	beside error               // damage of an inner node of the repair tree, whose pages are orphans, too

	orphans    *bitset.Set
	referenced bitset.Set // by readable orphans
	inner      bitset.Set // readable orphans of level 2 and above
	unread     bitset.Set // orphans that cannot be read
	tops       map[page.ID]*top
}

// lostNode is an inner node that cannot be read. Its parent is intact, or another lost node.
type lostNode struct {
	id           page.ID
	level        int
	lower, upper *page.Separator // nil: no upper bound; no lower bound is known, and no upper one
	newest       keys.Epoch
	ordered      bool             // children are in the order of the node's remains, else not in order
	separators   []page.Separator // of the children, as they were; nil if the remains do not prove that
	children     []*top
	rebuilt      []page.Child
}

// read reads and verifies a page into f.buf. If it fails, the buffer has what the device returned, or zeros.
func (f *finder) read(id page.ID) error {
	if err := f.ctx.Err(); err != nil {
		return err
	}
	if f.Pause != nil {
		if err := f.Pause(f.ctx); err != nil {
			return err
		}
	}
	f.reads++
	clear(f.buf)
	return pagesource.Read(&f.Pages.Reader, id, f.buf)
}

// Page implements btree.Source.
func (f *finder) Page(id page.ID, _ int) ([]byte, error) { return f.buf, f.read(id) }

// reach calls each for every page that the intact part of the state reaches, and notes the lost nodes.
func (f *finder) reach(each func(page.ID) error) error {
	if err := f.reachTree(each); err != nil {
		return err
	}
	for _, root := range f.Beside {
		if root.Empty() {
			continue
		}
		c := rootChild(root, f.Newest)
		err := f.walk(&c, root.Level, nil, each, func(c *page.Child, _ int, _ *page.Separator) {
			f.beside = unproved("inner node %d of the repair tree cannot be read either", c.ID)
		})
		if err != nil {
			return err
		}
	}
	var seen bitset.Set
	return f.Blobs(func(id page.ID) error {
		if !seen.Add(int(id)) {
			return nil
		}
		return each(id)
	})
}

func (f *finder) reachTree(each func(page.ID) error) error {
	if f.Tree.Empty() {
		return nil
	}
	c := rootChild(f.Tree, f.Newest)
	return f.walk(&c, f.Tree.Level, nil, each, func(c *page.Child, level int, upper *page.Separator) {
		n := &lostNode{id: c.ID, level: level, lower: &page.Separator{Key: c.Key, Trailer: c.Trailer}, upper: upper, newest: c.Newest}
		f.lost = append(f.lost, n)
	})
}

func rootChild(root btree.Root, newest keys.Epoch) page.Child {
	return page.Child{Separator: page.Separator{Trailer: page.NoTrailer}, ID: root.ID, Newest: newest}
}

// walk calls each for the pages of a subtree. It reads inner nodes only, and calls lost for those that cannot be read.
func (f *finder) walk(
	c *page.Child, level int, upper *page.Separator, each func(page.ID) error, lost func(*page.Child, int, *page.Separator),
) error {
	if err := each(c.ID); err != nil || level == 0 {
		return err
	}
	children, err := btree.Children(f, c, level)
	if err != nil {
		if !pagesource.IsDamage(err) {
			return err
		}
		lost(c, level, upper)
		return nil
	}
	if f.Skipped(c.ID) {
		f.healed = append(f.healed, btree.RebuiltNode{ID: c.ID, Level: level, Children: children})
	}
	for i := range children {
		bound := upper
		if i+1 < len(children) {
			bound = &children[i+1].Separator
		}
		if err := f.walk(&children[i], level-1, bound, each, lost); err != nil {
			return err
		}
	}
	return nil
}

// checkExact refuses states in which pages may be live although nothing reaches them.
func (f *finder) checkExact() error {
	if !f.Exact {
		return unproved("the allocation map may have pages that no tree reaches: it was rebuilt beside damage, or by an earlier version")
	}
	return f.beside
}

// sortOrphans divides the orphans into those that readable orphans refer to, and tops.
func (f *finder) sortOrphans() error {
	var leaves bitset.Set // known to be leaves without reading them
	for i := f.orphans.Next(0); i != bitset.None; i = f.orphans.Next(i + 1) {
		if leaves.Has(i) {
			continue
		}
		switch err := f.read(page.ID(i)); {
		case err != nil && !pagesource.IsDamage(err):
			return err
		case err != nil:
			if f.unread.Add(i); f.unread.Count() > topsMax {
				return unproved("more than %d pages cannot be read", topsMax)
			}
		default:
			if err := f.sortReadable(i, &leaves); err != nil {
				return err
			}
		}
	}
	if err := f.findHidden(); err != nil {
		return err
	}
	return f.describeTops()
}

// sortReadable notes the children of orphan i, which is in the buffer. Pages of the blob store that its damaged parts
// would reach are no orphans.
func (f *finder) sortReadable(i int, leaves *bitset.Set) error {
	switch page.ReadHeader(f.buf).Type {
	case page.TypeLeaf:
		return nil
	case page.TypeInner:
	default:
		f.orphans.Remove(i)
		return nil
	}
	node := page.Inner(f.buf)
	for c := range node.Count() {
		id := int(node.Child(c))
		if !f.orphans.Has(id) || !f.referenced.Add(id) {
			return unproved("page %d has page %d, which has another parent or is not live", i, id)
		}
		if node.Level() == 1 {
			leaves.Add(id)
		}
	}
	if node.Level() > 1 {
		f.inner.Add(i)
	}
	return nil
}

// findHidden notes the inner nodes below readable orphans that cannot be read.
func (f *finder) findHidden() error {
	if !haveCommon(&f.unread, &f.referenced) {
		return nil
	}
	for i := f.inner.Next(0); i != bitset.None; i = f.inner.Next(i + 1) {
		if err := f.read(page.ID(i)); err != nil {
			return f.changed(page.ID(i), err)
		}
		node := page.Inner(f.buf)
		for c := range node.Count() {
			if !f.unread.Has(int(node.Child(c))) {
				continue
			}
			n := &lostNode{id: node.Child(c), level: node.Level() - 1}
			if c > 0 && c+1 < node.Count() {
				lower, upper := node.Separator(nil, c), node.Separator(nil, c+1)
				n.lower, n.upper = &lower, &upper
			}
			f.hidden = append(f.hidden, n)
		}
	}
	return nil
}

func haveCommon(a, b *bitset.Set) bool {
	for i := range a.Len() / 64 {
		if a.Word(i)&b.Word(i) != 0 {
			return true
		}
	}
	return false
}

// describeTops reads the keys of the tops.
func (f *finder) describeTops() error {
	f.tops = map[page.ID]*top{}
	for i := f.unread.Next(0); i != bitset.None; i = f.unread.Next(i + 1) {
		if id := page.ID(i); !f.referenced.Has(i) {
			f.tops[id] = &top{id: id, level: levelUnknown}
		}
	}
	for i := f.orphans.Next(0); i != bitset.None; i = f.orphans.Next(i + 1) {
		if id := page.ID(i); !f.referenced.Has(i) && f.tops[id] == nil {
			t, err := f.describe(id)
			if err != nil {
				return err
			}
			if f.tops[id] = t; len(f.tops) > topsMax {
				return unproved("more than %d pages have no parent", topsMax)
			}
		}
	}
	return nil
}

// result is what was found. A failure of the whole search concerns every lost node. The highest nodes come
// first, because a node is rebuilt only below nodes that can be read; those above nodesMax are left to the
// next search.
func (f *finder) result(failure error) *Found {
	byLevel := func(a, b btree.RebuiltNode) int { return cmp.Compare(b.Level, a.Level) }
	slices.SortStableFunc(f.healed, byLevel)
	found := &Found{Reads: f.reads, Nodes: f.healed[:min(len(f.healed), nodesMax)]}
	for _, n := range f.lost {
		if failure == nil && len(found.Nodes) >= nodesMax {
			break
		}
		err := failure
		if err == nil {
			err = f.arrange(n)
		}
		if err != nil {
			found.Refused = append(found.Refused, Refusal{Page: n.id, Level: n.level, Reason: err.Error()})
			continue
		}
		found.Nodes = n.appendTo(found.Nodes)
	}
	slices.SortFunc(found.Nodes, byLevel)
	return found
}

// appendTo appends the node and the lost nodes below it.
func (n *lostNode) appendTo(nodes []btree.RebuiltNode) []btree.RebuiltNode {
	nodes = append(nodes, btree.RebuiltNode{ID: n.id, Level: n.level, Children: n.rebuilt})
	for _, c := range n.children {
		if c.node != nil {
			nodes = c.node.appendTo(nodes)
		}
	}
	return nodes
}
