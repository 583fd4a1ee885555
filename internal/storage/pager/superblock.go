package pager

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// Superblock layout. A superblock is a page like others: its header carries checksum, type, id and
// checkpoint number. Header, magic, version and page size have the same offsets in every version of the
// format, so that an old program can tell a newer file from a damaged one.
//
//	0         32      40        44          48         64      72     80       84            88
//	+---------+-------+---------+-----------+----------+-------+------+--------+-------------+--
//	| header  | magic | version | page size | store id | epoch | root | height | map depth   | ...
//	|         |       |         |           |          |       |      |        | table depth |
//	+---------+-------+---------+-----------+----------+-------+------+--------+-------------+--
//	88           96         104          112          120       128           136     144
//	+------------+----------+------------+------------+---------+-------------+-------+--
//	| page count | map root | table root | blob slots | entries | entry bytes | blobs | ...
//	+------------+----------+------------+------------+---------+-------------+-------+--
//	144          152          160              168           296
//	+------------+------------+----------------+-------------+-- - - -
//	| blob bytes | blob pages | overflow pages | engine area |
//	+------------+------------+----------------+-------------+-- - - -
//	296    304         312                 page size
//	+------+-----------+-- - - - - - - - --+
//	| copy | next copy | reserved, zero    |
//	+------+-----------+-- - - - - - - - --+
const (
	sbMagic         = page.HeaderSize
	sbVersion       = sbMagic + 8
	sbPageSize      = sbVersion + 4
	sbStoreID       = sbPageSize + 4
	sbEpoch         = sbStoreID + 16
	sbRoot          = sbEpoch + 8
	sbHeight        = sbRoot + 8
	sbDepths        = sbHeight + 4 // map depth, table depth, two reserved bytes
	sbPageCount     = sbDepths + 4
	sbMapRoot       = sbPageCount + 8
	sbTableRoot     = sbMapRoot + 8
	sbBlobSlots     = sbTableRoot + 8
	sbEntries       = sbBlobSlots + 8
	sbEntryBytes    = sbEntries + 8
	sbBlobs         = sbEntryBytes + 8
	sbBlobBytes     = sbBlobs + 8
	sbBlobPages     = sbBlobBytes + 8
	sbOverflowPages = sbBlobPages + 8
	sbEngine        = sbOverflowPages + 8
	sbCopy          = sbEngine + EngineAreaSize
	sbNextCopy      = sbCopy + 8
	sbReserved      = sbNextCopy + 8

	magic = "EpochKV\n"
	// FormatNewest is the newest version of the format, and FormatOldest the oldest in which states are written:
	// the owner of the file chooses (State.Format). Since version 2 inner nodes store the dead-version ratios of
	// their children; older files have zeros there, which mean no dead versions. Since version 3 a superblock
	// has a copy. Since version 4 the engine's area may name the second quarantine file and a newest epoch, and
	// since version 5 it has a lineage and a feature level, and may say that the allocation map has no pages but
	// the reachable ones.
	FormatNewest  = 5
	FormatOldest  = 4
	copiesVersion = 3

	superblocks = 2 // pages 0 and 1

	// EngineAreaSize is the length of the part of a superblock that belongs to the engine.
	EngineAreaSize = 128
)

// Reasons why a file cannot be opened; errors.Is tells them apart.
var (
	// ErrNewerFormat means the file was written by a newer version of this program.
	ErrNewerFormat = errors.New("pager: data file has a newer format version")
	// ErrNotDataFile means that none of the pages of superblocks resembles one.
	ErrNotDataFile = errors.New("pager: not a data file")
	// ErrSuperblocks means that both superblocks and their copies are damaged.
	ErrSuperblocks = errors.New("pager: both superblocks are damaged")
	// ErrSuperblockMissing means that the newest superblock and its copy are damaged, and that pages of the
	// state before it have been reused since.
	ErrSuperblockMissing = errors.New("pager: the newest superblock and its copy are damaged, and the state before it is gone")
	// ErrSuperblockUnreadable means that the device fails to read a page that may hold a newer superblock than those that were read.
	ErrSuperblockUnreadable = errors.New("pager: the device fails to read what may be the newest superblock; nothing was changed")
	// ErrPageSize means that the file does not have the expected page size.
	ErrPageSize = errors.New("pager: data file has another page size")
	// ErrTruncated means that the file is shorter than its superblock says.
	ErrTruncated = errors.New("pager: data file is cut short")

	errTornSuperblock = errors.New("torn or damaged")
)

// State is what the engine makes durable with a checkpoint.
type State struct {
	Epoch      keys.Epoch // every commit up to it is in the tree, and perhaps some of what the log has after it; log replay starts after it
	Root       page.ID    // of the tree; zero when the tree is empty
	Height     uint32     // levels of the tree
	Entries    uint64     // live entries in the tree
	EntryBytes uint64     // their keys and values
	Format     uint32     // version of the file's format. A state in which it is larger raises it; it never falls
	Engine     [EngineAreaSize]byte
}

// BlobState is what the blob store makes durable with a checkpoint.
type BlobState struct {
	Table         ArrayRoot
	Slots         uint64 // length of the table; blob ids are below it
	Blobs         uint64 // blob ids in use; a blob that was cut in two has two
	Bytes         uint64 // of their values
	BlobPages     uint64
	OverflowPages uint64
}

// superblock is the decoded form of a superblock page.
type superblock struct {
	checkpoint uint64
	pageSize   int
	storeID    [16]byte
	pageCount  page.ID
	allocation ArrayRoot
	state      State
	blobs      BlobState

	// copy is the page where this superblock is written a second time, and nextCopy the page where the copy of
	// its successor will be. Both are zero in a file without live pages, in which both superblocks are equal,
	// and in files of earlier versions. nextCopy is stored in advance so that the successor's copy is found
	// when the slot of the successor is damaged.
	copy, nextCopy page.ID
}

// slot is the page that holds the superblock of a checkpoint: the two alternate.
func (s *superblock) slot() page.ID { return page.ID(s.checkpoint % superblocks) }

// otherSlot is the slot of its predecessor and of its successor.
func (s *superblock) otherSlot() page.ID { return page.ID((s.checkpoint + 1) % superblocks) }

// encode fills buf, a whole page, for page at: the slot, the copy, or the successor's copy until that is
// written.
func (s *superblock) encode(buf []byte, at page.ID) {
	clear(buf)
	page.PutHeader(buf, page.Header{
		Type: page.TypeSuperblock, ID: at, Checkpoint: s.checkpoint, Newest: s.state.Epoch,
	})
	le := binary.LittleEndian
	copy(buf[sbMagic:], magic)
	le.PutUint32(buf[sbVersion:], s.state.Format)
	le.PutUint32(buf[sbPageSize:], uint32(s.pageSize))
	copy(buf[sbStoreID:], s.storeID[:])
	le.PutUint64(buf[sbEpoch:], uint64(s.state.Epoch))
	le.PutUint64(buf[sbRoot:], uint64(s.state.Root))
	le.PutUint32(buf[sbHeight:], s.state.Height)
	buf[sbDepths], buf[sbDepths+1] = s.allocation.Depth, s.blobs.Table.Depth
	le.PutUint64(buf[sbPageCount:], uint64(s.pageCount))
	le.PutUint64(buf[sbMapRoot:], uint64(s.allocation.Page))
	le.PutUint64(buf[sbTableRoot:], uint64(s.blobs.Table.Page))
	le.PutUint64(buf[sbBlobSlots:], s.blobs.Slots)
	le.PutUint64(buf[sbEntries:], s.state.Entries)
	le.PutUint64(buf[sbEntryBytes:], s.state.EntryBytes)
	le.PutUint64(buf[sbBlobs:], s.blobs.Blobs)
	le.PutUint64(buf[sbBlobBytes:], s.blobs.Bytes)
	le.PutUint64(buf[sbBlobPages:], s.blobs.BlobPages)
	le.PutUint64(buf[sbOverflowPages:], s.blobs.OverflowPages)
	copy(buf[sbEngine:], s.state.Engine[:])
	le.PutUint64(buf[sbCopy:], uint64(s.copy))
	le.PutUint64(buf[sbNextCopy:], uint64(s.nextCopy))
	page.Seal(buf)
}

// decodeSuperblock decodes buf, which was read from page id. Checksum, magic and version fail separately.
func decodeSuperblock(buf []byte, id page.ID) (superblock, error) {
	if string(buf[sbMagic:sbMagic+len(magic)]) != magic {
		return superblock{}, ErrNotDataFile
	}
	le := binary.LittleEndian
	switch err := page.Check(buf, id); {
	case errors.Is(err, page.ErrUnknown):
		return superblock{}, fmt.Errorf("%w: %w", ErrNewerFormat, err)
	case err != nil:
		return superblock{}, fmt.Errorf("%w: %w", errTornSuperblock, err)
	}
	if v := le.Uint32(buf[sbVersion:]); v > FormatNewest {
		return superblock{}, fmt.Errorf("%w: %d, this program knows up to %d", ErrNewerFormat, v, FormatNewest)
	}
	s := superblock{
		checkpoint: page.ReadHeader(buf).Checkpoint,
		pageSize:   int(le.Uint32(buf[sbPageSize:])),
		pageCount:  page.ID(le.Uint64(buf[sbPageCount:])),
		allocation: ArrayRoot{Page: page.ID(le.Uint64(buf[sbMapRoot:])), Depth: buf[sbDepths]},
		state: State{
			Epoch:      keys.Epoch(le.Uint64(buf[sbEpoch:])),
			Root:       page.ID(le.Uint64(buf[sbRoot:])),
			Height:     le.Uint32(buf[sbHeight:]),
			Entries:    le.Uint64(buf[sbEntries:]),
			EntryBytes: le.Uint64(buf[sbEntryBytes:]),
			Format:     le.Uint32(buf[sbVersion:]),
		},
		blobs: BlobState{
			Table:         ArrayRoot{Page: page.ID(le.Uint64(buf[sbTableRoot:])), Depth: buf[sbDepths+1]},
			Slots:         le.Uint64(buf[sbBlobSlots:]),
			Blobs:         le.Uint64(buf[sbBlobs:]),
			Bytes:         le.Uint64(buf[sbBlobBytes:]),
			BlobPages:     le.Uint64(buf[sbBlobPages:]),
			OverflowPages: le.Uint64(buf[sbOverflowPages:]),
		},
		copy:     page.ID(le.Uint64(buf[sbCopy:])),
		nextCopy: page.ID(le.Uint64(buf[sbNextCopy:])),
	}
	copy(s.storeID[:], buf[sbStoreID:])
	copy(s.state.Engine[:], buf[sbEngine:])
	return s, s.validate(buf, id)
}

// validate checks what the checksum cannot prove.
func (s *superblock) validate(buf []byte, id page.ID) error {
	bad := func(what string) error { return fmt.Errorf("%w: %s", errTornSuperblock, what) }
	switch {
	case s.state.Format == 0:
		return bad("format version 0")
	case page.ReadHeader(buf).Type != page.TypeSuperblock:
		return bad("wrong page type")
	case s.pageSize != len(buf):
		return bad("page size disagrees with its offset")
	case page.ReadHeader(buf).Newest != s.state.Epoch:
		return bad("header and state have different epochs")
	case s.slot() != id && (id < superblocks || s.copy != id && s.nextCopy != id):
		return bad("the checkpoint number belongs into the other slot")
	case s.pageCount < superblocks || s.state.Root >= s.pageCount || s.allocation.Page >= s.pageCount ||
		s.blobs.Table.Page >= s.pageCount:
		return bad("a root is past the last page")
	case s.state.Format < copiesVersion && (s.copy != 0 || s.nextCopy != 0):
		return bad("reserved bytes are set")
	case (s.copy == 0) != (s.nextCopy == 0) || s.copy != 0 && !s.validCopies():
		return bad("impossible pages of copies")
	case !zero(buf[sbDepths+2:sbPageCount]) || !zero(buf[sbReserved:]):
		return bad("reserved bytes are set")
	}
	return nil
}

func (s *superblock) validCopies() bool {
	return s.copy != s.nextCopy && min(s.copy, s.nextCopy) >= superblocks && max(s.copy, s.nextCopy) < s.pageCount
}

func zero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}
