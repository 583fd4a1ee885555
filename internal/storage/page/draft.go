package page

import (
	"encoding/binary"

	"github.com/epochkv/epochkv/internal/keys"
)

// Draft is a leaf that is not built yet. It has its entries in the form in which the page will have them, so that a
// run of an old leaf is taken over without decoding it: its fingerprints, heads and entries are three copies, and its
// offsets are moved.
//
// The entries leave out the first cut bytes of their keys. A page leaves out all that its keys share, which is known
// only when the last entry is. So Build, and an entry that shares less than cut, write the suffixes anew. That is rare:
// the next leaf mostly shares as much as the leaf before it.
//
// The zero Draft is empty and ready. A Draft keeps its buffers.
type Draft struct {
	size         LeafSize // its prefix is the beginning of first
	cut          int      // at most what the keys share
	guess        int      // cut of the next first entry
	first        []byte   // the key of the first entry
	continued    bool     // the first entry is a further version of the key before the leaf
	newest       keys.Epoch
	fingerprints []byte
	heads        []byte
	starts       []uint32 // of the entries in data
	data         []byte
	spare        []byte // the other buffer for data
}

// Reset makes d empty.
func (d *Draft) Reset() {
	d.size, d.newest, d.continued = LeafSize{}, 0, false
	d.fingerprints, d.heads, d.starts, d.data = d.fingerprints[:0], d.heads[:0], d.starts[:0], d.data[:0]
}

// Count is the number of entries.
func (d *Draft) Count() int { return d.size.count }

// Bytes is the size of the page so far, header included.
func (d *Draft) Bytes() int { return d.size.Bytes() }

// Add adds a copy of e after the entries so far, if the page is not larger than limit with it. An empty draft takes any
// entry.
func (d *Draft) Add(e *Entry, limit int) bool {
	if d.size.count == 0 {
		d.first = append(d.first[:0], e.Key...)
		d.cut, d.continued = min(d.guess, len(e.Key)), e.Same
		d.size = LeafSize{count: 1, keys: 1, bytes: len(e.Key) + len(e.Value), prefix: d.first}
		d.append(e, e.Key[d.cut:], head(e.Key[d.cut:]), Fingerprint(e.Key))
		return true
	}
	if e.Same {
		if d.size.With(e) > limit {
			return false
		}
		d.size.count++
		d.size.bytes += len(e.Value)
		n := len(d.fingerprints)
		d.append(e, nil, binary.LittleEndian.Uint32(d.heads[4*n-4:]), d.fingerprints[n-1])
		return true
	}
	prefix := shared(d.size.prefix, e.Key)
	next := LeafSize{count: d.size.count + 1, keys: d.size.keys + 1, bytes: d.size.bytes + len(e.Key) + len(e.Value), prefix: d.first[:prefix]}
	if next.Bytes() > limit {
		return false
	}
	d.size = next
	if prefix < d.cut || d.cut < prefix && len(d.data) > draftBytesMax {
		d.recut(prefix)
	}
	d.append(e, e.Key[d.cut:], head(e.Key[d.cut:]), Fingerprint(e.Key))
	return true
}

// draftBytesMax is how many bytes the entries of a draft may take until they leave out all that their keys share. It is several pages: thousands of the
// longest keys that share nearly all of their bytes fit into one.
const draftBytesMax = 256 << 10

// KeyBytes is more than what the keys of the entries take together.
func (d *Draft) KeyBytes() int { return len(d.data) + len(d.starts)*d.cut }

func (d *Draft) append(e *Entry, suffix []byte, h uint32, fingerprint byte) {
	d.fingerprints = append(d.fingerprints, fingerprint)
	d.heads = binary.LittleEndian.AppendUint32(d.heads, h)
	d.starts = append(d.starts, uint32(len(d.data)))
	d.data = appendEntry(d.data, e.Trailer, suffixWord(len(suffix), e.Large), nil, suffix)
	d.data = append(d.data, e.Value...)
	d.newest = max(d.newest, e.Trailer.Epoch())
}

// appendEntry appends an entry without its value. Its suffix comes in two parts.
func appendEntry(dst []byte, t keys.Trailer, word uint16, begin, rest []byte) []byte {
	dst = binary.LittleEndian.AppendUint64(dst, uint64(t))
	dst = binary.LittleEndian.AppendUint16(dst, word)
	return append(append(dst, begin...), rest...)
}

func suffixWord(n int, large bool) uint16 {
	w := uint16(n&suffixLenLow | n>>14<<15)
	if large {
		w |= flagLarge
	}
	return w
}

// AddRun adds copies of entries [from, to) of v after the entries so far, as many as fit into a page of limit bytes, and
// returns how many. An empty draft takes at least one. None may be a further version of a key.
func (d *Draft) AddRun(v *LeafLayout, from, to, limit int) (n int) {
	if d.size.count == 0 {
		suffix, _, _, _ := v.At(from)
		d.first = append(append(d.first[:0], v.prefix...), suffix...)
		d.size.prefix, d.cut = d.first, len(v.prefix)
	}
	size, n := d.fitting(v, from, to, limit)
	if n == 0 {
		return 0
	}
	d.size = size
	if fits := min(len(size.prefix), sharedPrefix(d.first[:d.cut], v.prefix)); fits < d.cut {
		d.recut(fits)
	}
	if cut := min(len(size.prefix), len(v.prefix)); d.cut < cut && len(d.data)+n*(cut-d.cut) > draftBytesMax {
		d.recut(cut)
	}
	d.copyRun(v, from, from+n)
	return n
}

// fitting is how many entries of [from, to) of v fit, and the size with them.
func (d *Draft) fitting(v *LeafLayout, from, to, limit int) (LeafSize, int) {
	if size := d.withRun(v, from, to); size.Bytes() <= limit {
		return size, to - from
	}
	fit, over := 0, to-from
	if d.size.count == 0 {
		fit = 1
	}
	for fit+1 < over {
		m := (fit + over) / 2
		if size := d.withRun(v, from, from+m); size.Bytes() <= limit {
			fit = m
		} else {
			over = m
		}
	}
	if fit == 0 {
		return d.size, 0
	}
	return d.withRun(v, from, from+fit), fit
}

// withRun is the size with entries [from, to) of v.
func (d *Draft) withRun(v *LeafLayout, from, to int) LeafSize {
	n, last := to-from, v.suffixAt(to-1)
	s := d.size
	s.count += n
	s.keys += n
	s.bytes += v.start(to) - v.start(from) + n*(len(v.prefix)-entryHeader)
	s.prefix = s.prefix[:sharedTwo(s.prefix, v.prefix, last)]
	return s
}

// sharedTwo is the length of what prefix and the key of the two parts share.
func sharedTwo(prefix, a, b []byte) int {
	n := shared(prefix, a)
	if n < len(a) {
		return n
	}
	return n + shared(prefix[n:], b)
}

// copyRun appends entries [from, to) of v, which share the first cut bytes with the others.
func (d *Draft) copyRun(v *LeafLayout, from, to int) {
	tables := v.tables()
	d.fingerprints = append(d.fingerprints, tables.fingerprints[from:to]...)
	for i := from; i < to; i++ {
		d.newest = max(d.newest, v.Trailer(i).Epoch())
	}
	if d.cut == len(v.prefix) {
		move := uint32(len(d.data) - v.start(from))
		for i := from; i < to; i++ {
			d.starts = append(d.starts, uint32(v.start(i))+move)
		}
		d.heads = append(d.heads, tables.heads[4*from:4*to]...)
		d.data = append(d.data, v.page[v.start(from):v.start(to)]...)
		return
	}
	begin := v.prefix[d.cut:]
	for i := from; i < to; i++ {
		suffix, t, value, large := v.At(i)
		d.starts = append(d.starts, uint32(len(d.data)))
		at := len(d.data) + entryHeader
		d.data = appendEntry(d.data, t, suffixWord(len(begin)+len(suffix), large), begin, suffix)
		d.heads = binary.LittleEndian.AppendUint32(d.heads, head(d.data[at:]))
		d.data = append(d.data, value...)
	}
}

// entry is entry i. The suffix of a further version is empty.
func (d *Draft) entry(i int) (t keys.Trailer, word uint16, suffix, value []byte) {
	end := len(d.data)
	if i+1 < len(d.starts) {
		end = int(d.starts[i+1])
	}
	e := d.data[d.starts[i]:end]
	word = binary.LittleEndian.Uint16(e[8:])
	n := entryHeader + suffixLen(word)
	return keys.Trailer(binary.LittleEndian.Uint64(e)), word, e[entryHeader:n], e[n:]
}

// recut makes the entries leave out the first so many bytes of their keys.
func (d *Draft) recut(to int) {
	if to == d.cut {
		return
	}
	dst := d.spare[:0]
	begin, skip := d.first[min(to, d.cut):d.cut], max(to-d.cut, 0)
	for i := range d.starts {
		t, word, suffix, value := d.entry(i)
		d.starts[i] = uint32(len(dst))
		if i > 0 && len(suffix) == 0 {
			dst = appendEntry(dst, t, word, nil, nil)
			copy(d.heads[4*i:], d.heads[4*i-4:4*i])
		} else {
			at := len(dst) + entryHeader
			dst = appendEntry(dst, t, suffixWord(len(begin)+len(suffix)-skip, word&flagLarge != 0), begin, suffix[skip:])
			binary.LittleEndian.PutUint32(d.heads[4*i:], head(dst[at:]))
		}
		dst = append(dst, value...)
	}
	d.cut = to
	d.data, d.spare = dst, d.data
}

// Build fills p with the entries, which must fit, and returns the newest epoch (commit sequence number) among them. The page
// has no id yet: SetID sets it and seals the page.
func (d *Draft) Build(p []byte, checkpoint uint64) keys.Epoch {
	n, prefix := d.size.count, len(d.size.prefix)
	d.recut(prefix)
	d.guess = prefix
	clear(p[:treeHeaderSize])
	at := treeHeaderSize + copy(p[treeHeaderSize:], d.fingerprints)
	at += copy(p[at:], d.size.prefix)
	offsets := offsetsAt(n, prefix)
	clear(p[at:offsets])
	heads := offsets + 2*(n+1)
	entries := heads + copy(p[heads:], d.heads)
	for i, start := range d.starts {
		binary.LittleEndian.PutUint16(p[offsets+2*i:], uint16(entries+int(start)))
	}
	end := entries + copy(p[entries:], d.data)
	binary.LittleEndian.PutUint16(p[offsets+2*n:], uint16(end))
	clear(p[end:])
	PutHeader(p, Header{Type: TypeLeaf, Checkpoint: checkpoint, Newest: d.newest})
	putTreeHeader(p, n, prefix, 0)
	return d.newest
}

// Join appends the entries of o, whose keys follow, if the page is not larger than limit with them. It changes o.
func (d *Draft) Join(o *Draft, limit int) bool {
	s := d.size
	s.count += o.size.count
	s.keys += o.size.keys
	s.bytes += o.size.bytes
	if o.continued {
		s.keys--
		s.bytes -= len(o.first)
	}
	s.prefix = s.prefix[:shared(s.prefix, o.LastKey(nil))]
	if s.Bytes() > limit {
		return false
	}
	cut := min(d.cut, o.cut, len(s.prefix))
	if d.KeyBytes()+o.KeyBytes() > draftBytesMax {
		cut = len(s.prefix)
	}
	d.recut(cut)
	o.recut(cut)
	if o.continued {
		o.dropFirstSuffix()
	}
	move := uint32(len(d.data))
	for _, start := range o.starts {
		d.starts = append(d.starts, start+move)
	}
	d.fingerprints = append(d.fingerprints, o.fingerprints...)
	d.heads = append(d.heads, o.heads...)
	d.data = append(d.data, o.data...)
	d.size, d.newest = s, max(d.newest, o.newest)
	return true
}

// dropFirstSuffix makes the first entry one that follows another version of its key.
func (d *Draft) dropFirstSuffix() {
	_, word, suffix, _ := d.entry(0)
	binary.LittleEndian.PutUint16(d.data[8:], suffixWord(0, word&flagLarge != 0))
	d.data = append(d.data[:entryHeader], d.data[entryHeader+len(suffix):]...)
	for i := 1; i < len(d.starts); i++ {
		d.starts[i] -= uint32(len(suffix))
	}
}

// Entries appends the entries to dst, and their keys to buf. The values alias d.
func (d *Draft) Entries(dst []Entry, buf []byte) ([]Entry, []byte) {
	var key []byte
	for i := range d.starts {
		t, word, suffix, value := d.entry(i)
		same := i > 0 && len(suffix) == 0
		if !same {
			at := len(buf)
			buf = append(append(buf, d.first[:d.cut]...), suffix...)
			key = buf[at:len(buf):len(buf)]
		}
		dst = append(dst, Entry{Key: key, Value: value, Trailer: t, Same: same || i == 0 && d.continued, Large: word&flagLarge != 0})
	}
	return dst, buf
}

// First is the key and the trailer of the first entry. The key aliases d.
func (d *Draft) First() (key []byte, t keys.Trailer) {
	t, _, _, _ = d.entry(0)
	return d.first, t
}

// LastTrailer is the trailer of the last entry.
func (d *Draft) LastTrailer() keys.Trailer {
	return keys.Trailer(binary.LittleEndian.Uint64(d.data[d.starts[len(d.starts)-1]:]))
}

// LastKey appends the key of the last entry to dst.
func (d *Draft) LastKey(dst []byte) []byte {
	for i := len(d.starts) - 1; i > 0; i-- {
		if _, _, suffix, _ := d.entry(i); len(suffix) > 0 {
			return append(append(dst, d.first[:d.cut]...), suffix...)
		}
	}
	return append(dst, d.first...)
}
