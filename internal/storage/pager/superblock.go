package pager

import (
	"encoding/binary"
	"errors"
	"fmt"

	"epochkv/internal/storage/keys"
	"epochkv/internal/storage/page"
	"epochkv/internal/vfs"
)

// Superblock layout. It is a page like others: its header carries checksum, type, id and checkpoint number. Header, magic, version
// and page size keep their places in every version of the format, so that an old program can tell a newer file from a damaged one.
//
//	0         32      40        44          48         64      72     80       84          88
//	+---------+-------+---------+-----------+----------+-------+------+--------+-----------+--
//	| header  | magic | version | page size | store id | epoch | root | height | map depth | ...
//	|         |       |         |           |          |       |      |        | rows depth|
//	+---------+-------+---------+-----------+----------+-------+------+--------+-----------+--
//	88           96         104         112           120       128          136       144
//	+------------+----------+-----------+-------------+---------+------------+---------+--
//	| page count | map root | rows root | row slots   | entries | entry bytes| rows    | ...
//	+------------+----------+-----------+-------------+---------+------------+---------+--
//	144         152          160          168          296                 page size
//	+-----------+------------+------------+------------+-- - - - - - - - --+
//	| row bytes | data pages | bulk pages | engine area| reserved, zero    |
//	+-----------+------------+------------+------------+-- - - - - - - - --+
const (
	sbMagic      = page.HeaderSize
	sbVersion    = sbMagic + 8
	sbPageSize   = sbVersion + 4
	sbStoreID    = sbPageSize + 4
	sbEpoch      = sbStoreID + 16
	sbRoot       = sbEpoch + 8
	sbHeight     = sbRoot + 8
	sbDepths     = sbHeight + 4 // map depth, rows depth, two reserved bytes
	sbPageCount  = sbDepths + 4
	sbMapRoot    = sbPageCount + 8
	sbRowsRoot   = sbMapRoot + 8
	sbRowSlots   = sbRowsRoot + 8
	sbEntries    = sbRowSlots + 8
	sbEntryBytes = sbEntries + 8
	sbRows       = sbEntryBytes + 8
	sbRowBytes   = sbRows + 8
	sbDataPages  = sbRowBytes + 8
	sbBulkPages  = sbDataPages + 8
	sbEngine     = sbBulkPages + 8
	sbReserved   = sbEngine + EngineAreaSize

	magic = "EpochKV\n"
	// formatVersion is what new states carry. Since version 2 inner nodes tell their children's stale shares; an older file has zeros
	// there, which claim nothing.
	formatVersion = 2

	superblocks = 2 // pages 0 and 1

	// EngineAreaSize is the length of the part of a superblock that the pager keeps for the engine.
	EngineAreaSize = 128
)

// Reasons why a file cannot be opened. They are told apart with errors.Is.
var (
	// ErrNewerFormat means the file was written by a newer version of this program.
	ErrNewerFormat = errors.New("pager: data file has a newer format version")
	// ErrNotDataFile means that neither superblock place holds anything like one.
	ErrNotDataFile = errors.New("pager: not a data file")
	// ErrSuperblocks means that both superblocks are damaged.
	ErrSuperblocks = errors.New("pager: both superblocks are damaged")
	// ErrPageSize means that the file has another page size than was asked for.
	ErrPageSize = errors.New("pager: data file has another page size")
	// ErrTruncated means that the file is shorter than its superblock says.
	ErrTruncated = errors.New("pager: data file is cut short")

	errTornSuperblock = errors.New("torn or damaged")
)

// State is what the engine makes durable with a checkpoint.
type State struct {
	Epoch      keys.Epoch // every commit up to it is in the tree; log replay starts behind it
	Root       page.ID    // of the tree; zero when the tree is empty
	Height     uint32     // levels of the tree
	Entries    uint64     // live entries in the tree
	EntryBytes uint64     // their keys and values
	Engine     [EngineAreaSize]byte
}

// RowState is what the row store makes durable with a checkpoint.
type RowState struct {
	Table     VectorRoot
	Slots     uint64 // length of the table; row ids are below it
	Rows      uint64 // rows in use
	Bytes     uint64 // of their values
	DataPages uint64
	BulkPages uint64
}

// superblock is the decoded form of a superblock page.
type superblock struct {
	version    uint32
	checkpoint uint64
	pageSize   int
	storeID    [16]byte
	pageCount  page.ID
	allocation VectorRoot
	state      State
	rows       RowState
}

// slot is the page that holds the superblock of a checkpoint: the two alternate.
func (s *superblock) slot() page.ID { return page.ID(s.checkpoint % superblocks) }

// encode fills buf, a whole page.
func (s *superblock) encode(buf []byte) {
	clear(buf)
	page.PutHeader(buf, page.Header{
		Type: page.TypeSuperblock, ID: s.slot(), Checkpoint: s.checkpoint, Newest: s.state.Epoch,
	})
	le := binary.LittleEndian
	copy(buf[sbMagic:], magic)
	le.PutUint32(buf[sbVersion:], s.version)
	le.PutUint32(buf[sbPageSize:], uint32(s.pageSize))
	copy(buf[sbStoreID:], s.storeID[:])
	le.PutUint64(buf[sbEpoch:], uint64(s.state.Epoch))
	le.PutUint64(buf[sbRoot:], uint64(s.state.Root))
	le.PutUint32(buf[sbHeight:], s.state.Height)
	buf[sbDepths], buf[sbDepths+1] = s.allocation.Depth, s.rows.Table.Depth
	le.PutUint64(buf[sbPageCount:], uint64(s.pageCount))
	le.PutUint64(buf[sbMapRoot:], uint64(s.allocation.Page))
	le.PutUint64(buf[sbRowsRoot:], uint64(s.rows.Table.Page))
	le.PutUint64(buf[sbRowSlots:], s.rows.Slots)
	le.PutUint64(buf[sbEntries:], s.state.Entries)
	le.PutUint64(buf[sbEntryBytes:], s.state.EntryBytes)
	le.PutUint64(buf[sbRows:], s.rows.Rows)
	le.PutUint64(buf[sbRowBytes:], s.rows.Bytes)
	le.PutUint64(buf[sbDataPages:], s.rows.DataPages)
	le.PutUint64(buf[sbBulkPages:], s.rows.BulkPages)
	copy(buf[sbEngine:], s.state.Engine[:])
	page.Seal(buf)
}

// decodeSuperblock reads buf, which came from the place of page id. Checksum, magic and version fail separately.
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
	if v := le.Uint32(buf[sbVersion:]); v > formatVersion {
		return superblock{}, fmt.Errorf("%w: %d, this program knows up to %d", ErrNewerFormat, v, formatVersion)
	}
	s := superblock{
		version:    le.Uint32(buf[sbVersion:]),
		checkpoint: page.ReadHeader(buf).Checkpoint,
		pageSize:   int(le.Uint32(buf[sbPageSize:])),
		pageCount:  page.ID(le.Uint64(buf[sbPageCount:])),
		allocation: VectorRoot{Page: page.ID(le.Uint64(buf[sbMapRoot:])), Depth: buf[sbDepths]},
		state: State{
			Epoch:      keys.Epoch(le.Uint64(buf[sbEpoch:])),
			Root:       page.ID(le.Uint64(buf[sbRoot:])),
			Height:     le.Uint32(buf[sbHeight:]),
			Entries:    le.Uint64(buf[sbEntries:]),
			EntryBytes: le.Uint64(buf[sbEntryBytes:]),
		},
		rows: RowState{
			Table:     VectorRoot{Page: page.ID(le.Uint64(buf[sbRowsRoot:])), Depth: buf[sbDepths+1]},
			Slots:     le.Uint64(buf[sbRowSlots:]),
			Rows:      le.Uint64(buf[sbRows:]),
			Bytes:     le.Uint64(buf[sbRowBytes:]),
			DataPages: le.Uint64(buf[sbDataPages:]),
			BulkPages: le.Uint64(buf[sbBulkPages:]),
		},
	}
	copy(s.storeID[:], buf[sbStoreID:])
	copy(s.state.Engine[:], buf[sbEngine:])
	return s, s.validate(buf, id)
}

// validate looks at what the checksum cannot vouch for.
func (s *superblock) validate(buf []byte, id page.ID) error {
	bad := func(what string) error { return fmt.Errorf("%w: %s", errTornSuperblock, what) }
	switch {
	case s.version == 0:
		return bad("format version 0")
	case page.ReadHeader(buf).Type != page.TypeSuperblock:
		return bad("another type of page")
	case s.pageSize != len(buf):
		return bad("page size disagrees with its place")
	case page.ReadHeader(buf).Newest != s.state.Epoch:
		return bad("header and state name different epochs")
	case s.slot() != id:
		return bad("checkpoint number belongs into the other place")
	case s.pageCount < superblocks || s.state.Root >= s.pageCount || s.allocation.Page >= s.pageCount ||
		s.rows.Table.Page >= s.pageCount:
		return bad("a root lies behind the last page")
	case !zero(buf[sbDepths+2:sbPageCount]) || !zero(buf[sbReserved:]):
		return bad("reserved bytes are set")
	}
	return nil
}

func zero(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

// readSuperblocks finds the newest sound superblock of f. damaged says why the other one could not be used; it is nil when both
// are sound.
func readSuperblocks(f vfs.File) (newest superblock, damaged, err error) {
	size, err := f.Size()
	if err != nil {
		return superblock{}, nil, err
	}
	var found [superblocks]superblock
	var errs [superblocks]error
	found[0], errs[0] = readFirst(f, size)
	if errs[0] == nil {
		found[1], errs[1] = readSuperblock(f, size, 1, found[0].pageSize)
	} else {
		found[1], errs[1] = searchSecond(f, size)
	}
	for i, err := range errs {
		// A newer program wrote here last or will have converted both: never go back behind it.
		if errors.Is(err, ErrNewerFormat) {
			return superblock{}, nil, fmt.Errorf("%s: superblock %d: %w", f.Name(), i, err)
		}
		// A device that cannot be read says nothing about what was written.
		if err != nil && !errors.Is(err, errTornSuperblock) && !errors.Is(err, ErrNotDataFile) {
			return superblock{}, nil, fmt.Errorf("superblock %d: %w", i, err)
		}
	}
	switch {
	case errs[0] != nil && errs[1] != nil:
		if errors.Is(errs[0], ErrNotDataFile) && errors.Is(errs[1], ErrNotDataFile) {
			return superblock{}, nil, fmt.Errorf("%s: %w", f.Name(), ErrNotDataFile)
		}
		return superblock{}, nil, fmt.Errorf("%s: %w: 0: %w; 1: %w", f.Name(), ErrSuperblocks, errs[0], errs[1])
	case errs[0] != nil:
		return found[1], fmt.Errorf("superblock 0: %w", errs[0]), nil
	case errs[1] != nil:
		return found[0], fmt.Errorf("superblock 1: %w", errs[1]), nil
	case found[0].storeID != found[1].storeID:
		return superblock{}, nil, fmt.Errorf("%s: %w: they belong to different stores", f.Name(), ErrSuperblocks)
	case found[0].checkpoint > found[1].checkpoint:
		return found[0], nil, nil
	}
	return found[1], nil, nil
}

// readFirst reads superblock 0, whose place does not depend on the page size.
func readFirst(f vfs.File, size int64) (superblock, error) {
	head := vfs.AlignedBuffer(max(page.SizeMin, vfs.DirectAlignment))
	if size < page.SizeMin {
		return superblock{}, ErrNotDataFile
	}
	if err := readUpTo(f, head, size, 0); err != nil {
		return superblock{}, err
	}
	if string(head[sbMagic:sbMagic+len(magic)]) != magic {
		return superblock{}, ErrNotDataFile
	}
	pageSize := int(binary.LittleEndian.Uint32(head[sbPageSize:]))
	if !page.ValidSize(pageSize) {
		return superblock{}, fmt.Errorf("%w: page size %d", errTornSuperblock, pageSize)
	}
	return readSuperblock(f, size, 0, pageSize)
}

// searchSecond looks for superblock 1 at the place that each page size would give it.
func searchSecond(f vfs.File, size int64) (superblock, error) {
	err := ErrNotDataFile
	for pageSize := page.SizeMin; pageSize <= page.SizeMax; pageSize *= 2 {
		s, e := readSuperblock(f, size, 1, pageSize)
		if e == nil {
			return s, nil
		}
		if !errors.Is(e, ErrNotDataFile) && !errors.Is(err, ErrNewerFormat) {
			err = e
		}
	}
	return superblock{}, err
}

func readSuperblock(f vfs.File, size int64, id page.ID, pageSize int) (superblock, error) {
	if size < int64(id+1)*int64(pageSize) {
		return superblock{}, ErrNotDataFile
	}
	buf := vfs.AlignedBuffer(pageSize)
	if _, err := f.ReadAt(buf, int64(id)*int64(pageSize)); err != nil {
		return superblock{}, err
	}
	return decodeSuperblock(buf, id)
}

// readUpTo fills as much of buf as the file has.
func readUpTo(f vfs.File, buf []byte, size, off int64) error {
	_, err := f.ReadAt(buf[:min(int64(len(buf)), size-off)], off)
	return err
}
