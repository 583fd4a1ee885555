package page

import (
	"encoding/binary"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
)

// payloadEnd is where the payload of a page of this size must end. Offsets have 16 bits, so the last byte
// of a 64 KiB page stays unused.
func payloadEnd(pageSize int) int { return min(pageSize, 1<<16-1) }

// LeafSize computes the size of a leaf, one entry at a time. The zero LeafSize is an empty leaf.
type LeafSize struct {
	count  int
	keys   int // entries that store a suffix
	bytes  int // whole keys of those, and all values
	prefix []byte
}

// Add counts e, which must follow the entries counted so far. The key must not change while the LeafSize is
// used.
func (s *LeafSize) Add(e *Entry) {
	switch {
	case s.count == 0:
		s.prefix = e.Key
		s.addKey(e)
	case !e.Same:
		s.prefix = s.prefix[:shared(s.prefix, e.Key)]
		s.addKey(e)
	}
	s.count++
	s.bytes += len(e.Value)
}

func (s *LeafSize) addKey(e *Entry) {
	s.keys++
	s.bytes += len(e.Key)
}

// shared is the length of what prefix and key share. It is fast if key begins with prefix.
func shared(prefix, key []byte) int {
	if pl := len(prefix); len(key) >= pl && string(key[:pl]) == string(prefix) {
		return pl
	}
	return sharedPrefix(prefix, key)
}

// Bytes is the size of the leaf so far, header included.
func (s *LeafSize) Bytes() int { return leafBytes(s.count, s.keys, s.bytes, len(s.prefix)) }

// With is what Bytes would be with e added.
func (s *LeafSize) With(e *Entry) int {
	switch {
	case s.count == 0:
		return leafBytes(1, 1, len(e.Key)+len(e.Value), len(e.Key))
	case e.Same:
		return leafBytes(s.count+1, s.keys, s.bytes+len(e.Value), len(s.prefix))
	}
	return leafBytes(s.count+1, s.keys+1, s.bytes+len(e.Key)+len(e.Value), shared(s.prefix, e.Key))
}

func leafBytes(count, suffixes, bytes, prefix int) int {
	return offsetsAt(count, prefix) + 2*(count+1) + 4*count + entryHeader*count + bytes - suffixes*prefix
}

// Payload is how large Bytes may be for a page of this size.
func Payload(pageSize int) int { return payloadEnd(pageSize) }

func putTreeHeader(p []byte, count, prefix, level int) {
	binary.LittleEndian.PutUint16(p[offCount:], uint16(count))
	binary.LittleEndian.PutUint16(p[offPrefix:], uint16(prefix))
	p[offLevel] = byte(level)
}

// RefOffset is where the Ref of entry i, which is Large, begins in the page. A Ref that was not known when the
// leaf was built is written there.
func (p Leaf) RefOffset(i int) int {
	v := p.Layout()
	return int(binary.LittleEndian.Uint16(v.offsets[2*i+2:])) - RefSize
}

// InnerSize computes the size of an inner node, one child at a time. The zero InnerSize is an empty node.
type InnerSize struct {
	count  int
	bytes  int // whole separators, trailers included, except the first
	prefix []byte
}

// Add counts c, which must follow the children counted so far. The first child's separator is not stored.
func (s *InnerSize) Add(c *Child) {
	switch s.count {
	case 0:
		s.count = 1
		return
	case 1:
		s.prefix = c.Key
	default:
		s.prefix = s.prefix[:shared(s.prefix, c.Key)]
	}
	s.count++
	s.bytes += separatorBytes(c)
}

func separatorBytes(c *Child) int {
	if c.Trailer == NoTrailer {
		return 1 + len(c.Key)
	}
	return 1 + len(c.Key) + trailerSize
}

// Bytes is the size of the node so far, header included.
func (s *InnerSize) Bytes() int {
	if s.count == 0 {
		return treeHeaderSize
	}
	return innerBytes(s.count, s.bytes, len(s.prefix))
}

// With is what Bytes would be with c added.
func (s *InnerSize) With(c *Child) int {
	switch s.count {
	case 0:
		return innerBytes(1, 0, 0)
	case 1:
		return innerBytes(2, separatorBytes(c), len(c.Key))
	}
	return innerBytes(s.count+1, s.bytes+separatorBytes(c), shared(s.prefix, c.Key))
}

func innerBytes(count, bytes, prefix int) int {
	return layoutInner(count, prefix).separators + bytes - (count-1)*prefix
}

// BuildInner fills p with the children, which must fit (InnerSize), and returns the newest epoch below
// them. The page has no id yet: SetID sets it and seals the page.
func BuildInner(p []byte, checkpoint uint64, level int, children []Child) keys.Epoch {
	n := len(children)
	pl := 0
	if n > 1 {
		pl = sharedPrefix(children[1].Key, children[n-1].Key)
	}
	l := layoutInner(n, pl)
	clear(p[:l.separators])
	if n > 1 {
		copy(p[treeHeaderSize:], children[1].Key[:pl])
	}
	var newest keys.Epoch
	at := l.separators
	for i := range children {
		c := &children[i]
		if i > 0 {
			suffix := c.Key[pl:]
			binary.LittleEndian.PutUint32(p[l.heads+4*(i-1):], head(suffix))
			binary.LittleEndian.PutUint16(p[l.offsets+2*(i-1):], uint16(at))
			at = putSeparator(p, at, suffix, c.Trailer)
		}
		binary.LittleEndian.PutUint64(p[l.children+8*i:], uint64(c.ID))
		binary.LittleEndian.PutUint64(p[l.newest+8*i:], uint64(c.Newest)|uint64(c.DeadVersions)<<deadShift)
		newest = max(newest, c.Newest)
	}
	binary.LittleEndian.PutUint16(p[l.offsets+2*(n-1):], uint16(at))
	clear(p[at:])
	PutHeader(p, Header{Type: TypeInner, Checkpoint: checkpoint, Newest: newest})
	putTreeHeader(p, n, pl, level)
	return newest
}

func putSeparator(p []byte, at int, suffix []byte, t keys.Trailer) (end int) {
	if t == NoTrailer {
		p[at] = 0
		return at + 1 + copy(p[at+1:], suffix)
	}
	p[at] = trailerSize
	at++
	at += copy(p[at:], suffix)
	binary.LittleEndian.PutUint64(p[at:], uint64(t))
	return at + trailerSize
}

// Shortest is the shortest key that is greater than left and not greater than right, where left < right.
// It aliases right.
func Shortest(left, right []byte) []byte { return right[:sharedPrefix(left, right)+1] }

// String returns the key, and the epoch if the separator has a trailer.
func (s Separator) String() string {
	if s.Trailer == NoTrailer {
		return fmt.Sprintf("%q", s.Key)
	}
	return fmt.Sprintf("%q@%d", s.Key, s.Trailer.Epoch())
}
