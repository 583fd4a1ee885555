package storage

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
)

// The engine's area of the superblock:
//
//	0           8             12            20              24           25         64            72
//	+-----------+-------------+-------------+---------------+------------+----------+-------------+----------+
//	| side root | side height | mirror root | mirror height | quarantine | zero ... | log segment | zero ... |
//	+-----------+-------------+-------------+---------------+------------+----------+-------------+----------+
//
// quarantine: 1 if a quarantine file belongs to the state, else 0.
//
// log segment: the log has a segment with this number or a larger one (see wal.Log.Headed). Zero in files of earlier versions, and until the
// first segment of a new store has a durable header.
const (
	areaRepairTree = 0
	areaMirror     = 12
	areaQuarantine = 24
	areaReserved   = 25
	areaSegment    = 64
	areaRest       = 72

	areaHeight = 8 // within a root
)

// encodeRepairTreeRoots writes the roots of the repair tree and of its mirror into the state.
func encodeRepairTreeRoots(s *pager.State, root, mirror btree.Root) {
	clear(s.Engine[:areaQuarantine])
	for at, r := range map[int]btree.Root{areaRepairTree: root, areaMirror: mirror} {
		if !r.Empty() {
			binary.LittleEndian.PutUint64(s.Engine[at:], uint64(r.ID))
			binary.LittleEndian.PutUint32(s.Engine[at+areaHeight:], uint32(r.Level+1))
		}
	}
}

func decodeRepairTreeRoots(s *pager.State) (root, mirror btree.Root, err error) {
	root, ok := decodeRoot(s.Engine[areaRepairTree:])
	mirror, mirrored := decodeRoot(s.Engine[areaMirror:])
	if !ok || !mirrored || root.Empty() && !mirror.Empty() || s.Engine[areaQuarantine] > 1 || !allZero(s.Engine[areaReserved:areaSegment]) || !allZero(s.Engine[areaRest:]) {
		return btree.Root{}, btree.Root{}, fmt.Errorf("the engine's area of the superblock is malformed: % x", s.Engine)
	}
	return root, mirror, nil
}

// logSegment is the number of a segment of which the state knows that the log has it, or newer ones.
func logSegment(s *pager.State) uint64 { return binary.LittleEndian.Uint64(s.Engine[areaSegment:]) }

func setLogSegment(s *pager.State, number uint64) {
	binary.LittleEndian.PutUint64(s.Engine[areaSegment:], max(number, logSegment(s)))
}

// hasQuarantine reports whether a quarantine file belongs to the state.
func hasQuarantine(s *pager.State) bool { return s.Engine[areaQuarantine] != 0 }

func setQuarantine(s *pager.State, present bool) { s.Engine[areaQuarantine] = byte(boolToInt(present)) }

func decodeRoot(b []byte) (root btree.Root, ok bool) {
	id, height := binary.LittleEndian.Uint64(b), binary.LittleEndian.Uint32(b[areaHeight:])
	if id == 0 || height == 0 || height > page.LevelMax+1 {
		return btree.Root{}, id == 0 && height == 0
	}
	return btree.Root{ID: page.ID(id), Level: int(height) - 1}, true
}

func allZero(p []byte) bool { return len(bytes.TrimLeft(p, "\x00")) == 0 }

// repairTreeRoots are the roots of a state's repair tree and of its mirror.
func repairTreeRoots(p *pager.Reader) (root, mirror btree.Root, err error) {
	state := p.State()
	if root, mirror, err = decodeRepairTreeRoots(&state); err != nil {
		return btree.Root{}, btree.Root{}, p.Corrupt(page.ID(p.Checkpoint()%2), err.Error())
	}
	return root, mirror, nil
}

// readRepairTree reads the repair tree of a state, nil if it has none.
func readRepairTree(p *pager.Reader, store *blob.Store) (*repairtree.Tree, error) {
	root, mirror, err := repairTreeRoots(p)
	if err != nil {
		return nil, err
	}
	return repairtree.Read(p, store, root, mirror)
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}
