package page

import (
	"encoding/binary"
	"hash/crc32"
)

// Remains is what a damaged inner node still seems to say. Its checksum is wrong, so that each of these
// bytes may be wrong, too: the caller compares all of it with what it knows from other pages.
type Remains struct {
	Level      int
	Children   []ID
	Separators []Separator // of each child; those that the bytes do not show, the first among them, have no key
}

// InnerRemains reads p, whatever its bytes are. It reports false if they do not look like inner node id.
func InnerRemains(p []byte, id ID) (r Remains, ok bool) {
	h, node := ReadHeader(p), Inner(p)
	n, pl := node.Count(), node.prefixLen()
	if h.Type != TypeInner || h.ID != id || p[offVersion] != version || n == 0 || node.Level() == 0 || node.Level() > LevelMax {
		return Remains{}, false
	}
	l := layoutInner(n, pl)
	if pl > KeySizeMax(len(p)) || l.separators > payloadEnd(len(p)) {
		return Remains{}, false
	}
	r = Remains{Level: node.Level(), Children: make([]ID, n), Separators: make([]Separator, n)}
	for i := range n {
		r.Children[i] = node.Child(i)
		if i > 0 {
			r.Separators[i] = node.separatorRemains(&l, i)
		}
	}
	return r, true
}

// separatorRemains is separator i, without a key if its bytes or its head are not those of a separator.
func (p Inner) separatorRemains(l *innerLayout, i int) Separator {
	at, end := int(binary.LittleEndian.Uint16(p[l.offsets+2*i-2:])), int(binary.LittleEndian.Uint16(p[l.offsets+2*i:]))
	if at < l.separators || at >= end || end > payloadEnd(len(p)) {
		return Separator{}
	}
	if t := int(p[at]); t != 0 && t != trailerSize || 1+t > end-at {
		return Separator{}
	}
	suffix, t := p.separator(p[l.offsets:], i)
	if binary.LittleEndian.Uint32(p[l.heads+4*(i-1):]) != head(suffix) || p.prefixLen()+len(suffix) > KeySizeMax(len(p)) {
		return Separator{}
	}
	return Separator{Key: append(append([]byte(nil), p.prefix()...), suffix...), Trailer: t}
}

// CorrectBit corrects p, which is damaged, if one wrong bit explains its checksum, and reports whether p then is the intact
// tree page id. One of 65,000 pages with other damage has such a checksum by chance; few of them pass for a page, and with
// those the bit that was changed is one more that is wrong. So the caller compares the page with others that it knows.
func CorrectBit(p []byte, id ID) bool {
	bit := wrongBit(p)
	if bit < 0 {
		return false
	}
	p[bit/8] ^= 1 << (bit % 8)
	if Check(p, id) == nil && Verify(p) == nil {
		return true
	}
	p[bit/8] ^= 1 << (bit % 8)
	return false
}

// wrongBit is the bit that makes the checksum of p right if it is flipped, or -1. Checksums are linear: a bit changes the
// checksum in the same way in every page of one size.
func wrongBit(p []byte) int {
	const polynomial = 0x82f63b78 // Castagnoli, bits reversed
	wrong := crc32.Checksum(p[offType:], castagnoli) ^ binary.LittleEndian.Uint32(p)
	if wrong&(wrong-1) == 0 && wrong != 0 { // of the checksum itself
		for i := range 32 {
			if wrong == 1<<i {
				return i
			}
		}
	}
	change := uint32(1) // moved one step for each bit, from the end of the page
	for i := len(p) - 1; i >= offType; i-- {
		for bit := 7; bit >= 0; bit-- {
			if change = change>>1 ^ -(change&1)&polynomial; change == wrong {
				return 8*i + bit
			}
		}
	}
	return -1
}
