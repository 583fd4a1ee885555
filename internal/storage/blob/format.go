package blob

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Reference, as stored in a leaf.
//
//	0         8        16         20         24
//	+---------+--------+----------+----------+
//	| blob id | length | checksum | reserved |
//	+---------+--------+----------+----------+
//
// The checksum is the CRC-32C of the value. It connects the leaf with the value end to end, across the
// table, a blob page and overflow pages.

// ref is a decoded reference.
type ref struct {
	id       uint64
	length   uint64
	checksum uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrBadRef means bytes that are no reference, or a reference to a blob that does not exist.
var ErrBadRef = errors.New("blob: bad reference")

func (r ref) encode() (dst page.Ref) {
	binary.LittleEndian.PutUint64(dst[:], r.id)
	binary.LittleEndian.PutUint64(dst[8:], r.length)
	binary.LittleEndian.PutUint32(dst[16:], r.checksum)
	return dst
}

func decodeRef(src page.Ref) (ref, error) {
	r := ref{
		id:       binary.LittleEndian.Uint64(src[:]),
		length:   binary.LittleEndian.Uint64(src[8:]),
		checksum: binary.LittleEndian.Uint32(src[16:]),
	}
	if r.length > ValueMax || binary.LittleEndian.Uint32(src[20:]) != 0 {
		return ref{}, fmt.Errorf("%w: % x", ErrBadRef, src)
	}
	return r, nil
}

// ValueMax bounds a value. It is far above the server's limit; a greater length is damage.
const ValueMax = 1 << 30

// Blob page: a page of type blobs.
//
//	0        32       34         40
//	+--------+--------+----------+---------+---------+-- - - --+------+------------+------------+
//	| header | count  | reserved | entry 0 | entry 1 |         | free | fragment 1 | fragment 0 |
//	+--------+--------+----------+---------+---------+-- - - --+------+------------+------------+
//
//	entry:  blob id (7 bytes) | kind (1) | offset (2) | length (2)
//
// Fragments are stored back to back from the end of the page downwards, in the order of their entries.
// Offsets are therefore implied; they are stored and checked all the same. A fragment of kind whole is a
// value. A fragment that did not fit into the rest of a page is cut: the first part has the top bit of
// the kind set and begins with the blob id of the second part, whose kind is second. A fragment of kind
// head is:
//
//	0        8         10        16
//	+--------+---------+---------+----------------------------+-- - - --+-----------+
//	| length | extents | zero    | first page (8) | count (4) |         | remainder |
//	+--------+---------+---------+----------------------------+-- - - --+-----------+
//
// Overflow page: a page of type overflow. The blob id names its owner, so that a page at the file end
// can be relocated.
//
//	0        32        40
//	+--------+---------+-- - - - --+
//	| header | blob id | value     |
//	+--------+---------+-- - - - --+
const (
	offCount   = page.HeaderSize
	offEntries = page.HeaderSize + 8
	entrySize  = 12

	headFixed       = 16
	headExtent      = 12
	extentsMax      = 9 // the promise of pager.AllocPieces
	overflowPayload = page.HeaderSize + 8

	// slotsMax is bounded by the seven bits that a table entry has for a slot. Only remainders of a few
	// bytes come near it.
	slotsMax = 127
)

type fragmentKind uint8

const (
	fragmentWhole  fragmentKind = 1
	fragmentHead   fragmentKind = 2
	fragmentSecond fragmentKind = 3

	// fragmentContinued is the flag of a whole or head fragment that continues in a second fragment. The
	// first eight bytes of such a fragment are the blob id of the second one.
	fragmentContinued fragmentKind = 0x80
)

// secondIDSize is the length of the blob id at the beginning of a continued fragment.
const secondIDSize = 8

// valid reports whether k is a kind that this program knows.
func (k fragmentKind) valid() bool {
	return k == fragmentSecond || k&^fragmentContinued == fragmentWhole || k&^fragmentContinued == fragmentHead
}

// capacity is how many bytes of entries and fragments a blob page takes.
func capacity(pageSize int) int { return pageSize - offEntries }

// fragmentMax is the longest fragment.
func fragmentMax(pageSize int) int { return capacity(pageSize) - entrySize }

// overflowBytes is how many bytes of a value an overflow page takes.
func overflowBytes(pageSize int) int { return pageSize - overflowPayload }

// split says how many overflow pages a value takes and how many of its bytes remain for the fragment. A
// remainder too long to share a page with the list of extents gets an overflow page too.
func split(length, pageSize int) (pages, remainder int) {
	if length <= fragmentMax(pageSize) {
		return 0, length
	}
	pages, remainder = length/overflowBytes(pageSize), length%overflowBytes(pageSize)
	if headFixed+extentsMax*headExtent+remainder > fragmentMax(pageSize) {
		return pages + 1, 0
	}
	return pages, remainder
}

// cost is the bytes of a page's capacity that a fragment of n bytes is charged. It is never so small
// that a page could run out of slots before it runs out of bytes. So room is one number.
func cost(n, pageSize int) int { return max(entrySize+max(n, 1), capacity(pageSize)/slotsMax+1) }

// blobPage builds a blob page from its first fragment on.
type blobPage struct {
	buf   []byte
	count int
	low   int // where the last fragment begins
	cost  int // of all fragments
}

func newBlobPage(buf []byte, id page.ID, checkpoint uint64) blobPage {
	page.PutHeader(buf, page.Header{Type: page.TypeBlobs, ID: id, Checkpoint: checkpoint})
	return blobPage{buf: buf, low: len(buf)}
}

// room is the largest cost that still fits.
func (d *blobPage) room() int { return capacity(len(d.buf)) - d.cost }

// add adds a fragment, which must fit, and returns its slot.
func (d *blobPage) add(id uint64, kind fragmentKind, fragment []byte) int {
	d.low -= max(len(fragment), 1) // an empty fragment takes a byte, so that no offset is the page size, which two bytes cannot hold
	copy(d.buf[d.low:], fragment)
	e := d.buf[offEntries+d.count*entrySize:]
	binary.LittleEndian.PutUint64(e, id|uint64(kind)<<56)
	binary.LittleEndian.PutUint16(e[8:], uint16(d.low))
	binary.LittleEndian.PutUint16(e[10:], uint16(len(fragment)))
	d.cost += cost(len(fragment), len(d.buf))
	d.count++
	return d.count - 1
}

func (d *blobPage) seal() {
	binary.LittleEndian.PutUint16(d.buf[offCount:], uint16(d.count))
	page.Seal(d.buf)
}

// slotFragment is a fragment as stored in a blob page.
type slotFragment struct {
	id   uint64
	kind fragmentKind
	data []byte
}

var errMalformed = errors.New("malformed blob page")

// fragmentCount is how many fragments buf, a page that passed its checksum, holds.
func fragmentCount(buf []byte) (int, error) {
	if t := page.ReadHeader(buf).Type; t != page.TypeBlobs {
		return 0, fmt.Errorf("%w: page type %d", errMalformed, t)
	}
	n := int(binary.LittleEndian.Uint16(buf[offCount:]))
	if n == 0 || n > slotsMax || offEntries+n*entrySize > len(buf) {
		return 0, fmt.Errorf("%w: %d fragments", errMalformed, n)
	}
	if [6]byte(buf[offCount+2:]) != [6]byte{} {
		return 0, fmt.Errorf("%w: reserved bytes are set", errMalformed)
	}
	return n, nil
}

// fragmentAt is the fragment in a slot below fragmentCount.
func fragmentAt(buf []byte, slot, fragments int) (slotFragment, error) {
	e := buf[offEntries+slot*entrySize:]
	word := binary.LittleEndian.Uint64(e)
	at, n := int(binary.LittleEndian.Uint16(e[8:])), int(binary.LittleEndian.Uint16(e[10:]))
	r := slotFragment{id: word &^ (0xff << 56), kind: fragmentKind(word >> 56)}
	if at < offEntries+fragments*entrySize || at+n > len(buf) || !r.kind.valid() || r.kind&fragmentContinued != 0 && n < secondIDSize {
		return slotFragment{}, fmt.Errorf("%w: slot %d: kind %d, %d bytes at %d", errMalformed, slot, r.kind, n, at)
	}
	r.data = buf[at : at+n : at+n]
	return r, nil
}

// head is the decoded form of a fragment whose value continues in overflow pages.
type head struct {
	length    int
	extents   []pager.Extent
	remainder []byte
}

// encode is the head fragment.
func (h *head) encode() []byte {
	dst := make([]byte, 0, headFixed+len(h.extents)*headExtent+len(h.remainder))
	dst = binary.LittleEndian.AppendUint64(dst, uint64(h.length))
	dst = binary.LittleEndian.AppendUint16(dst, uint16(len(h.extents)))
	dst = append(dst, 0, 0, 0, 0, 0, 0)
	for _, e := range h.extents {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(e.First))
		dst = binary.LittleEndian.AppendUint32(dst, uint32(e.Count))
	}
	return append(dst, h.remainder...)
}

func decodeHead(fragment []byte, pageSize int) (head, error) {
	if len(fragment) < headFixed {
		return head{}, fmt.Errorf("%w: head of %d bytes", errMalformed, len(fragment))
	}
	length, n := binary.LittleEndian.Uint64(fragment), int(binary.LittleEndian.Uint16(fragment[8:]))
	if length > ValueMax || n > extentsMax || [6]byte(fragment[10:]) != [6]byte{} || len(fragment) < headFixed+n*headExtent {
		return head{}, fmt.Errorf("%w: head of %d bytes: length %d, %d extents", errMalformed, len(fragment), length, n)
	}
	h := head{length: int(length), remainder: fragment[headFixed+n*headExtent:]}
	pages := 0
	for e := fragment[headFixed:]; n > 0; n, e = n-1, e[headExtent:] {
		x := pager.Extent{First: page.ID(binary.LittleEndian.Uint64(e)), Count: int(binary.LittleEndian.Uint32(e[8:]))}
		h.extents = append(h.extents, x)
		pages += x.Count
	}
	if p, r := split(h.length, pageSize); p != pages || r != len(h.remainder) {
		return head{}, fmt.Errorf("%w: %d bytes in %d overflow pages and a remainder of %d", errMalformed, length, pages, len(h.remainder))
	}
	return h, nil
}

// pages calls each for every overflow page, in the order of the value.
func (h *head) pages(each func(page.ID)) {
	for _, e := range h.extents {
		for i := range e.Count {
			each(e.First + page.ID(i))
		}
	}
}

// has reports whether page id is one of the value's overflow pages.
func (h *head) has(id page.ID) bool {
	for _, e := range h.extents {
		if e.First <= id && id < e.First+page.ID(e.Count) {
			return true
		}
	}
	return false
}

// below reports whether all overflow pages are below limit.
func (h *head) below(limit page.ID) bool {
	for _, e := range h.extents {
		if e.First+page.ID(e.Count) > limit {
			return false
		}
	}
	return true
}

// overflowOwner is the blob that an overflow page belongs to.
func overflowOwner(buf []byte) uint64 { return binary.LittleEndian.Uint64(buf[page.HeaderSize:]) }

// putOverflow completes and seals an overflow page that has its header.
func putOverflow(buf []byte, owner uint64, value []byte) {
	binary.LittleEndian.PutUint64(buf[page.HeaderSize:], owner)
	copy(buf[overflowPayload:], value)
	page.Seal(buf)
}
