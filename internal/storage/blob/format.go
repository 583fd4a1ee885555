package blob

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// Reference, as it stands in a leaf.
//
//	0        8        16         20         24
//	+--------+--------+----------+----------+
//	| row id | length | checksum | reserved |
//	+--------+--------+----------+----------+
//
// The checksum is the value's CRC-32C. It ties the leaf to the value end to end, across the table, a data page and bulk pages.

// ref is a decoded reference.
type ref struct {
	id       uint64
	length   uint64
	checksum uint32
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ErrBadRef means bytes that are no reference, or name a row that does not exist.
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

// ValueMax bounds a value. It is far above what the server lets in; a length beyond it is damage.
const ValueMax = 1 << 30

// Data page: a page of type rows.
//
//	0        32       34         40
//	+--------+--------+----------+---------+---------+-- - - --+-----------+-------+-------+-- - -
//	| header | count  | reserved | entry 0 | entry 1 |         | free      | row 1 | row 0 |
//	+--------+--------+----------+---------+---------+-- - - --+-----------+-------+-------+-- - -
//
//	entry:  row id (7 bytes) | kind (1) | offset (2) | length (2)
//
// Rows stand back to back from the end of the page downwards in the order of their entries, so that offsets are implied; they are
// stored and checked all the same. A row of kind whole is a value. A row that did not fit into what was left of a page is cut: the first
// part has the kind's top bit set and begins with the row id of the second, which has kind tail. A row of kind head is:
//
//	0        8         10        16
//	+--------+---------+---------+----------------------------+-- - - --+-----------+
//	| length | extents | zero    | first page (8) | count (4) |         | remainder |
//	+--------+---------+---------+----------------------------+-- - - --+-----------+
//
// Bulk page: a page of type bulk. The row id says whose it is, so that a page at the end of the file can be moved.
//
//	0        32       40
//	+--------+--------+-- - - - --+
//	| header | row id | value     |
//	+--------+--------+-- - - - --+
const (
	offCount   = page.HeaderSize
	offEntries = page.HeaderSize + 8
	entrySize  = 12

	headFixed       = 16
	headExtent      = 12
	extentsMax      = 9 // what pager.AllocPieces promises
	overflowPayload = page.HeaderSize + 8

	// slotsMax is bounded by the seven bits that a table entry has for a slot. Only remainders of a few bytes come near.
	slotsMax = 127
)

type fragmentKind uint8

const (
	fragmentWhole  fragmentKind = 1
	fragmentHead   fragmentKind = 2
	fragmentSecond fragmentKind = 3

	// fragmentContinued marks a row whole or head that goes on in a tail. Its first eight bytes are the tail's row id.
	fragmentContinued fragmentKind = 0x80
)

// secondIDSize is the length of the row id that a continued row begins with.
const secondIDSize = 8

// valid reports whether k is a kind that this program knows.
func (k fragmentKind) valid() bool {
	return k == fragmentSecond || k&^fragmentContinued == fragmentWhole || k&^fragmentContinued == fragmentHead
}

// capacity is how many bytes of entries and rows a data page takes.
func capacity(pageSize int) int { return pageSize - offEntries }

// fragmentMax is the longest row.
func fragmentMax(pageSize int) int { return capacity(pageSize) - entrySize }

// overflowBytes is how much of a value a bulk page takes.
func overflowBytes(pageSize int) int { return pageSize - overflowPayload }

// split says how many bulk pages a value takes and how much of it remains for the row. A remainder too long to
// share a page with the list of extents gets a bulk page too.
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

// cost is the bytes of a page's capacity that a row of n bytes is charged: never so few that a page could run out of slots before it
// runs out of bytes, so that room is one number.
func cost(n, pageSize int) int { return max(entrySize+max(n, 1), capacity(pageSize)/slotsMax+1) }

// blobPage builds a data page from its first row on.
type blobPage struct {
	buf   []byte
	count int
	low   int // where the last row begins
	cost  int // of all rows
}

func newBlobPage(buf []byte, id page.ID, checkpoint uint64) blobPage {
	page.PutHeader(buf, page.Header{Type: page.TypeBlobs, ID: id, Checkpoint: checkpoint})
	return blobPage{buf: buf, low: len(buf)}
}

// room is the largest cost that still fits.
func (d *blobPage) room() int { return capacity(len(d.buf)) - d.cost }

// add adds a row, which must fit, and returns its slot.
func (d *blobPage) add(id uint64, kind fragmentKind, row []byte) int {
	d.low -= max(len(row), 1) // an empty row takes a byte, so that no offset is the page's size, which two bytes cannot hold
	copy(d.buf[d.low:], row)
	e := d.buf[offEntries+d.count*entrySize:]
	binary.LittleEndian.PutUint64(e, id|uint64(kind)<<56)
	binary.LittleEndian.PutUint16(e[8:], uint16(d.low))
	binary.LittleEndian.PutUint16(e[10:], uint16(len(row)))
	d.cost += cost(len(row), len(d.buf))
	d.count++
	return d.count - 1
}

func (d *blobPage) seal() {
	binary.LittleEndian.PutUint16(d.buf[offCount:], uint16(d.count))
	page.Seal(d.buf)
}

// slotFragment is a row as it lies in a data page.
type slotFragment struct {
	id   uint64
	kind fragmentKind
	data []byte
}

var errMalformed = errors.New("malformed data page")

// fragmentCount is how many rows buf, a page that passed its checksum, holds.
func fragmentCount(buf []byte) (int, error) {
	if t := page.ReadHeader(buf).Type; t != page.TypeBlobs {
		return 0, fmt.Errorf("%w: page type %d", errMalformed, t)
	}
	n := int(binary.LittleEndian.Uint16(buf[offCount:]))
	if n == 0 || n > slotsMax || offEntries+n*entrySize > len(buf) {
		return 0, fmt.Errorf("%w: %d rows", errMalformed, n)
	}
	if [6]byte(buf[offCount+2:]) != [6]byte{} {
		return 0, fmt.Errorf("%w: reserved bytes are set", errMalformed)
	}
	return n, nil
}

// fragmentAt is the row in a slot below pageRows.
func fragmentAt(buf []byte, slot, rows int) (slotFragment, error) {
	e := buf[offEntries+slot*entrySize:]
	word := binary.LittleEndian.Uint64(e)
	at, n := int(binary.LittleEndian.Uint16(e[8:])), int(binary.LittleEndian.Uint16(e[10:]))
	r := slotFragment{id: word &^ (0xff << 56), kind: fragmentKind(word >> 56)}
	if at < offEntries+rows*entrySize || at+n > len(buf) || !r.kind.valid() || r.kind&fragmentContinued != 0 && n < secondIDSize {
		return slotFragment{}, fmt.Errorf("%w: slot %d: kind %d, %d bytes at %d", errMalformed, slot, r.kind, n, at)
	}
	r.data = buf[at : at+n : at+n]
	return r, nil
}

// head is the decoded form of a row that goes on in bulk pages.
type head struct {
	length    int
	extents   []pager.Extent
	remainder []byte
}

// encode is the head row.
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

func decodeHead(row []byte, pageSize int) (head, error) {
	if len(row) < headFixed {
		return head{}, fmt.Errorf("%w: head of %d bytes", errMalformed, len(row))
	}
	length, n := binary.LittleEndian.Uint64(row), int(binary.LittleEndian.Uint16(row[8:]))
	if length > ValueMax || n > extentsMax || [6]byte(row[10:]) != [6]byte{} || len(row) < headFixed+n*headExtent {
		return head{}, fmt.Errorf("%w: head of %d bytes: length %d, %d extents", errMalformed, len(row), length, n)
	}
	h := head{length: int(length), remainder: row[headFixed+n*headExtent:]}
	pages := 0
	for e := row[headFixed:]; n > 0; n, e = n-1, e[headExtent:] {
		x := pager.Extent{First: page.ID(binary.LittleEndian.Uint64(e)), Count: int(binary.LittleEndian.Uint32(e[8:]))}
		h.extents = append(h.extents, x)
		pages += x.Count
	}
	if p, r := split(h.length, pageSize); p != pages || r != len(h.remainder) {
		return head{}, fmt.Errorf("%w: %d bytes in %d bulk pages and a remainder of %d", errMalformed, length, pages, len(h.remainder))
	}
	return h, nil
}

// pages calls each for every bulk page, in the order of the value.
func (h *head) pages(each func(page.ID)) {
	for _, e := range h.extents {
		for i := range e.Count {
			each(e.First + page.ID(i))
		}
	}
}

// has reports whether page id is one of the value's bulk pages.
func (h *head) has(id page.ID) bool {
	for _, e := range h.extents {
		if e.First <= id && id < e.First+page.ID(e.Count) {
			return true
		}
	}
	return false
}

// below reports whether all bulk pages lie below limit.
func (h *head) below(limit page.ID) bool {
	for _, e := range h.extents {
		if e.First+page.ID(e.Count) > limit {
			return false
		}
	}
	return true
}

// overflowOwner is the row that a bulk page belongs to.
func overflowOwner(buf []byte) uint64 { return binary.LittleEndian.Uint64(buf[page.HeaderSize:]) }

// putOverflow completes and seals a bulk page that has its header.
func putOverflow(buf []byte, owner uint64, value []byte) {
	binary.LittleEndian.PutUint64(buf[page.HeaderSize:], owner)
	copy(buf[overflowPayload:], value)
	page.Seal(buf)
}
