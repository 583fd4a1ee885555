package pager

import (
	"encoding/binary"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// A copy-on-write page array is an array of bytes in pages below one root. A checkpoint rewrites the leaves
// that changed, and their ancestors. Leaves hold the owner's bytes; inner nodes hold the page ids of their
// children. The shape follows from the number of leaves: every node except the last of a level is full.
//
//	node: a page of type array
//	0         32     33      34         36      40                    page size
//	+---------+------+-------+----------+-------+-- - - - - - - - - --+
//	| header  | kind | level | reserved | index | bytes, or child ids |
//	+---------+------+-------+----------+-------+-- - - - - - - - - --+
const (
	arrKind    = page.HeaderSize
	arrLevel   = arrKind + 1
	arrIndex   = arrLevel + 3
	arrPayload = arrIndex + 4
)

// ArrayKind distinguishes the page arrays of a file, so that a page of one is never taken for a page of
// another.
type ArrayKind uint8

// The page arrays of a data file.
const (
	ArrayAllocationMap    ArrayKind = 1 // the allocation map: one bit for each page, set if live
	ArrayIndirectionTable ArrayKind = 2 // the indirection table
)

// ArrayRoot is the root of a stored page array. The zero value is an empty one.
type ArrayRoot struct {
	Page  page.ID
	Depth uint8 // levels, leaves included
}

// PageArray is the page ids of a stored page array, all in memory: eight bytes for each leaf, and a little
// for the levels above.
type PageArray struct {
	kind   ArrayKind
	size   int // of a page
	levels [][]page.ID
}

// ArrayLeafBytes is how many bytes of the owner a leaf holds.
func ArrayLeafBytes(pageSize int) int { return pageSize - arrPayload }

func (v *PageArray) fanout() int { return ArrayLeafBytes(v.size) / 8 }

// Root is the root that ReadArray needs to read the page array.
func (v *PageArray) Root() ArrayRoot {
	if len(v.levels) == 0 {
		return ArrayRoot{}
	}
	return ArrayRoot{v.levels[len(v.levels)-1][0], uint8(len(v.levels))}
}

// Pages calls each for every page of the page array.
func (v *PageArray) Pages(each func(page.ID)) {
	for _, ids := range v.levels {
		for _, id := range ids {
			if id != 0 { // zero if damage hides it
				each(id)
			}
		}
	}
}

// leaves is the number of leaves of the page array.
func (v *PageArray) leaves() int {
	if len(v.levels) == 0 {
		return 0
	}
	return len(v.levels[0])
}

// PageCount is the number of pages of the page array.
func (v *PageArray) PageCount() int {
	n := 0
	for _, ids := range v.levels {
		n += len(ids)
	}
	return n
}

// shape is the number of nodes of each level for this many leaves.
func (v *PageArray) shape(leaves int) []int {
	if leaves == 0 {
		return nil
	}
	sizes := []int{leaves}
	for n := leaves; n > 1; {
		n = (n + v.fanout() - 1) / v.fanout()
		sizes = append(sizes, n)
	}
	return sizes
}

// arrayUpdate is a page array on its way to its next state. Nodes are allocated first and written later,
// because the allocation map must contain the new locations of its own nodes.
type arrayUpdate struct {
	next  PageArray
	dirty []bitset.Set // of each level: nodes to be written
	moved []bitset.Set // of each level: nodes that have a new page
}

// nodeAllocator allocates and frees the nodes of an update.
type nodeAllocator interface {
	takeNode() (page.ID, error)
	freeNode(page.ID) error
}

// update starts a new state with this many leaves, of which those in dirty change. If limit is not zero,
// nodes at or past it move.
func (v *PageArray) update(nodes nodeAllocator, leaves int, dirty *bitset.Set, limit page.ID) (*arrayUpdate, error) {
	u := &arrayUpdate{next: PageArray{kind: v.kind, size: v.size}}
	for _, ids := range v.levels {
		u.next.levels = append(u.next.levels, append([]page.ID(nil), ids...))
	}
	if err := u.resize(nodes, leaves); err != nil {
		return nil, err
	}
	for i := dirty.Next(0); i < leaves; i = dirty.Next(i + 1) {
		u.dirty[0].Add(i)
	}
	if limit > 0 {
		for level, ids := range u.next.levels {
			for i, id := range ids {
				if id >= limit {
					u.dirty[level].Add(i)
				}
			}
		}
	}
	return u, nil
}

// resize gives the update the shape for this many leaves. New nodes are dirty; superfluous ones are freed.
func (u *arrayUpdate) resize(nodes nodeAllocator, leaves int) error {
	sizes := u.next.shape(leaves)
	for level, ids := range u.next.levels {
		keep := 0
		if level < len(sizes) {
			keep = min(sizes[level], len(ids))
		}
		for i, id := range ids[keep:] {
			if id != 0 {
				if err := nodes.freeNode(id); err != nil {
					return err
				}
			}
			if level < len(u.dirty) {
				u.dirty[level].Remove(keep + i)
				u.moved[level].Remove(keep + i)
			}
		}
		if 0 < keep && keep < len(ids) && level+1 < len(sizes) {
			u.grow(level + 1)
			u.dirty[level+1].Add((keep - 1) / u.next.fanout()) // its last child was removed
		}
		u.next.levels[level] = ids[:keep]
	}
	if len(sizes) < len(u.next.levels) {
		u.next.levels = u.next.levels[:len(sizes)]
	}
	for level, n := range sizes {
		u.grow(level)
		if level == len(u.next.levels) {
			u.next.levels = append(u.next.levels, nil)
		}
		for i := len(u.next.levels[level]); i < n; i++ {
			u.next.levels[level] = append(u.next.levels[level], 0)
			u.dirty[level].Add(i)
		}
	}
	return nil
}

func (u *arrayUpdate) grow(level int) {
	for len(u.dirty) <= level {
		u.dirty = append(u.dirty, bitset.Set{})
		u.moved = append(u.moved, bitset.Set{})
	}
}

// allocate gives every dirty node a new page, unless it has one, and makes its parent dirty.
func (u *arrayUpdate) allocate(nodes nodeAllocator) error {
	for level := range u.next.levels {
		ids := u.next.levels[level]
		for i := u.dirty[level].Next(0); i < len(ids); i = u.dirty[level].Next(i + 1) {
			if !u.moved[level].Add(i) {
				continue
			}
			id, err := nodes.takeNode()
			if err != nil {
				return err
			}
			if ids[i] != 0 {
				if err := nodes.freeNode(ids[i]); err != nil {
					return err
				}
			}
			ids[i] = id
			if level+1 < len(u.next.levels) {
				u.dirty[level+1].Add(i / u.next.fanout())
			}
		}
	}
	return nil
}

// write writes the moved nodes. leaf fills the zeroed bytes of a leaf.
func (u *arrayUpdate) write(w *Writer, leaf func(i int, payload []byte)) error {
	for level, ids := range u.next.levels {
		for i := u.moved[level].Next(0); i < len(ids); i = u.moved[level].Next(i + 1) {
			buf, err := w.compose(ids[i])
			if err != nil {
				return err
			}
			u.next.putNode(buf, w.ck.number, level, i, leaf)
		}
	}
	return nil
}

func (v *PageArray) putNode(buf []byte, checkpoint uint64, level, index int, leaf func(i int, payload []byte)) {
	page.PutHeader(buf, page.Header{Type: page.TypeArray, ID: v.levels[level][index], Checkpoint: checkpoint})
	buf[arrKind], buf[arrLevel] = byte(v.kind), byte(level)
	binary.LittleEndian.PutUint32(buf[arrIndex:], uint32(index))
	payload := buf[arrPayload:]
	if level == 0 {
		leaf(index, payload)
	} else {
		below := v.levels[level-1]
		for c := index * v.fanout(); c < min((index+1)*v.fanout(), len(below)); c++ {
			binary.LittleEndian.PutUint64(payload, uint64(below[c]))
			payload = payload[8:]
		}
	}
	page.Seal(buf)
}

// arrayNodes allocates the nodes of a page array that is not the allocation map, like other pages of the
// checkpoint.
type arrayNodes struct{ ck *Checkpoint }

func (o arrayNodes) takeNode() (page.ID, error) {
	id := o.ck.AllocExtent(1).First
	return id, o.ck.noteWritten(id)
}

func (o arrayNodes) freeNode(id page.ID) error {
	o.ck.Free(id)
	return nil
}

// UpdateArray writes the next state of a page array with this many leaves. Those in dirty are new or have
// changed; leaf fills their zeroed bytes. If limit is not zero, nodes at or past it move. v remains the
// previous state.
func (ck *Checkpoint) UpdateArray(v *PageArray, leaves int, dirty *bitset.Set, limit page.ID, leaf func(i int, payload []byte)) (*PageArray, error) {
	nodes := arrayNodes{ck}
	u, err := v.update(nodes, leaves, dirty, limit)
	if err != nil {
		return nil, err
	}
	if err := u.allocate(nodes); err != nil {
		return nil, err
	}
	w := ck.Writer()
	if err := u.write(w, leaf); err != nil {
		return nil, err
	}
	return &u.next, w.Flush()
}

// ReadArray reads a page array of the newest durable state, which has this many leaves. It calls leaf with
// the bytes of each leaf, in order.
func (r *Reader) ReadArray(kind ArrayKind, root ArrayRoot, leaves int, leaf func(i int, payload []byte) error) (*PageArray, error) {
	v := &PageArray{kind: kind, size: r.pageSize}
	sizes := v.shape(leaves)
	if len(sizes) != int(root.Depth) || (root.Page == 0) != (leaves == 0) {
		return nil, r.corrupt(root.Page, fmt.Sprintf("page array %d has depth %d, %d leaves need %d", kind, root.Depth, leaves, len(sizes)))
	}
	v.levels = make([][]page.ID, len(sizes))
	for level, n := range sizes {
		v.levels[level] = make([]page.ID, n)
	}
	if leaves == 0 {
		return v, nil
	}
	v.levels[len(sizes)-1][0] = root.Page
	for level := len(sizes) - 1; level >= 0; level-- {
		err := r.readEach(v.levels[level], func(i int, buf []byte) error {
			if err := v.checkNode(buf, level, i); err != nil {
				return r.corrupt(v.levels[level][i], err.Error())
			}
			if level == 0 {
				return leaf(i, buf[arrPayload:])
			}
			return v.readChildren(r, level, i, buf[arrPayload:])
		})
		if err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (v *PageArray) checkNode(buf []byte, level, index int) error {
	if t := page.ReadHeader(buf).Type; t != page.TypeArray {
		return fmt.Errorf("page of type %d where page array %d has a node", t, v.kind)
	}
	kind, l, i := ArrayKind(buf[arrKind]), int(buf[arrLevel]), int(binary.LittleEndian.Uint32(buf[arrIndex:]))
	if kind != v.kind || l != level || i != index || !zero(buf[arrLevel+1:arrIndex]) {
		return fmt.Errorf("node %d of level %d of page array %d where node %d of level %d of page array %d belongs",
			i, l, kind, index, level, v.kind)
	}
	return nil
}

func (v *PageArray) readChildren(r *Reader, level, index int, payload []byte) error {
	below := v.levels[level-1]
	for c := index * v.fanout(); c < min((index+1)*v.fanout(), len(below)); c++ {
		below[c] = page.ID(binary.LittleEndian.Uint64(payload))
		if below[c] < superblocks || below[c] >= r.current().pageCount {
			return r.corrupt(v.levels[level][index], fmt.Sprintf("child %d is page %d of %d", c, below[c], r.current().pageCount))
		}
		payload = payload[8:]
	}
	return nil
}
