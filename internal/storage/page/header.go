package page

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/epochkv/epochkv/internal/keys"
)

// ID names a page: its offset in the data file divided by the page size. IDs 0 and 1 are the superblocks,
// so that a zero ID in a tree means "none".
type ID uint64

// Type says what a page holds.
type Type uint8

// Page types. Zero is no type, so that a zeroed page is never mistaken for one.
const (
	TypeLeaf       Type = 1 // tree leaf: entries
	TypeInner      Type = 2 // tree inner node: separators and children
	TypeSuperblock Type = 3 // one of the two roots of the file
	TypeArray      Type = 4 // node of a copy-on-write page array
	TypeBlobs      Type = 5 // blob page: packed fragments of large values
	TypeOverflow   Type = 6 // overflow page: a part of one large value
)

// Page sizes: powers of two within these bounds. 512 is for tests, which need tall trees of few keys.
const (
	SizeMin     = 512
	SizeMax     = 64 << 10
	SizeDefault = 8 << 10
)

// HeaderSize is the length of the header that every page starts with.
//
//	0          4      5         6       8      16           24             32
//	+----------+------+---------+-------+------+------------+--------------+
//	| checksum | type | version | flags | id   | checkpoint | newest epoch | ...
//	+----------+------+---------+-------+------+------------+--------------+
//
// The checksum is the CRC-32C of all bytes after it, to the end of the page. Flags are for compression and
// encryption. None is defined yet, and readers refuse unknown ones.
const HeaderSize = 32

const (
	offType       = 4
	offVersion    = 5
	offFlags      = 6
	offID         = 8
	offCheckpoint = 16
	offNewest     = 24

	version = 1
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Reasons for refusing a page; errors.Is tells them apart.
var (
	// ErrChecksum means that the bytes are not those that were written.
	ErrChecksum = errors.New("page: checksum mismatch")
	// ErrMisplaced means an intact page at the offset of another page: a misdirected write.
	ErrMisplaced = errors.New("page: wrong id")
	// ErrUnknown means a type, version or flag that this program does not know; a newer program may have
	// written it.
	ErrUnknown = errors.New("page: unknown type, version or flags")
	// ErrMalformed means contents that break the format although the checksum is right.
	ErrMalformed = errors.New("page: malformed")
)

// Header is the part of a page that does not depend on its type.
type Header struct {
	Type       Type
	ID         ID
	Checkpoint uint64     // the checkpoint that wrote the page
	Newest     keys.Epoch // no version in or below the page is newer; zero for pages without versions
}

// ValidSize reports whether n can be a page size.
func ValidSize(n int) bool { return n >= SizeMin && n <= SizeMax && n&(n-1) == 0 }

// PutHeader writes h to the start of p. Seal sets the checksum.
func PutHeader(p []byte, h Header) {
	_ = p[HeaderSize-1]
	binary.LittleEndian.PutUint32(p, 0)
	p[offType] = byte(h.Type)
	p[offVersion] = version
	binary.LittleEndian.PutUint16(p[offFlags:], 0)
	binary.LittleEndian.PutUint64(p[offID:], uint64(h.ID))
	binary.LittleEndian.PutUint64(p[offCheckpoint:], h.Checkpoint)
	binary.LittleEndian.PutUint64(p[offNewest:], uint64(h.Newest))
}

// ReadHeader reads the header of p, which must have at least HeaderSize bytes. It checks nothing.
func ReadHeader(p []byte) Header {
	_ = p[HeaderSize-1]
	return Header{
		Type:       Type(p[offType]),
		ID:         ID(binary.LittleEndian.Uint64(p[offID:])),
		Checkpoint: binary.LittleEndian.Uint64(p[offCheckpoint:]),
		Newest:     keys.Epoch(binary.LittleEndian.Uint64(p[offNewest:])),
	}
}

// Seal stores the checksum of p, which must be complete: any later change breaks it.
func Seal(p []byte) {
	binary.LittleEndian.PutUint32(p, crc32.Checksum(p[offType:], castagnoli))
}

// SetID sets the id of a finished page, and seals it. A merge builds pages before their ids are known.
func SetID(p []byte, id ID) {
	binary.LittleEndian.PutUint64(p[offID:], uint64(id))
	Seal(p)
}

// Check decides whether p, read from the offset of page id, is that page, written completely: checksum,
// then version and flags, then id. It does not check what follows the header; for tree pages Verify does.
func Check(p []byte, id ID) error {
	if len(p) < HeaderSize {
		return fmt.Errorf("%w: %d bytes, header needs %d", ErrMalformed, len(p), HeaderSize)
	}
	if got, want := crc32.Checksum(p[offType:], castagnoli), binary.LittleEndian.Uint32(p); got != want {
		return fmt.Errorf("%w: computed %#08x, stored %#08x", ErrChecksum, got, want)
	}
	if v, f := p[offVersion], binary.LittleEndian.Uint16(p[offFlags:]); v != version || f != 0 {
		return fmt.Errorf("%w: version %d, flags %#04x", ErrUnknown, v, f)
	}
	if t := Type(p[offType]); t < TypeLeaf || t > TypeOverflow {
		return fmt.Errorf("%w: type %d", ErrUnknown, t)
	}
	if got := ID(binary.LittleEndian.Uint64(p[offID:])); got != id {
		return fmt.Errorf("%w: page %d at the offset of page %d", ErrMisplaced, got, id)
	}
	return nil
}
