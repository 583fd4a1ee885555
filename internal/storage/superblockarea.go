package storage

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
	"github.com/epochkv/epochkv/internal/wal"
)

// The engine's area of the superblock:
//
//	0           8             12            20              24           25    26         64            72             80
//	+-----------+-------------+-------------+---------------+------------+-------+----------+-------------+--------------+----------+
//	| side root | side height | mirror root | mirror height | quarantine | exact | zero ... | log segment | newest epoch | zero ... |
//	+-----------+-------------+-------------+---------------+------------+-------+----------+-------------+--------------+----------+
//
// quarantine: the number of the quarantine file that the state uses, 1 or 2; 0 for none.
//
// exact: 1 if every live tree page of the allocation map is reachable; 0 if that is not known. Orphans are then not
// searched (package orphans).
//
// log segment: the log has a segment with this number or a larger one (see wal.Log.Headed). Zero in files of earlier versions, and until the
// first segment of a new store has a durable header.
//
// newest epoch: the tree and the quarantine have versions of no later epoch. It is after the epoch of the state while a merge in steps is
// incomplete, and zero otherwise.
const (
	areaRepairTree = 0
	areaMirror     = 12
	areaQuarantine = 24
	areaExact      = 25
	areaReserved   = 26
	areaSegment    = 64
	areaNewest     = 72
	areaRest       = 80

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
	newest := logProof(s).Durable
	if newest != 0 && newest <= s.Epoch || !ok || !mirrored || root.Empty() && !mirror.Empty() || s.Engine[areaQuarantine] > 2 || s.Engine[areaExact] > 1 || !allZero(s.Engine[areaReserved:areaSegment]) || !allZero(s.Engine[areaRest:]) {
		return btree.Root{}, btree.Root{}, fmt.Errorf("the engine's area of the superblock is malformed: % x", s.Engine)
	}
	return root, mirror, nil
}

// logProof is what the state knows of the log: a segment that it has, or newer ones, and that what the
// tree has was durable.
func logProof(s *pager.State) wal.Proof {
	return wal.Proof{
		Segment: binary.LittleEndian.Uint64(s.Engine[areaSegment:]),
		Durable: keys.Epoch(binary.LittleEndian.Uint64(s.Engine[areaNewest:])),
	}
}

func setLogSegment(s *pager.State, number uint64) {
	binary.LittleEndian.PutUint64(s.Engine[areaSegment:], max(number, logProof(s).Segment))
}

// newestEpoch is the newest epoch of which the tree and the quarantine of the state may have versions.
func newestEpoch(s *pager.State) keys.Epoch { return max(s.Epoch, logProof(s).Durable) }

// setNewestEpoch records in the state, of which the epoch is set, that the tree has versions of epochs up to this one.
func setNewestEpoch(s *pager.State, newest keys.Epoch) {
	if newest = max(newest, newestEpoch(s)); newest == s.Epoch {
		newest = 0
	}
	binary.LittleEndian.PutUint64(s.Engine[areaNewest:], uint64(newest))
}

// quarantineFile is the number of the quarantine file that the state uses, or zero.
func quarantineFile(s *pager.State) int { return int(s.Engine[areaQuarantine]) }

func setQuarantineFile(s *pager.State, number int) { s.Engine[areaQuarantine] = byte(number) }

// mapIsExact reports whether every live tree page of the state is reachable.
func mapIsExact(s *pager.State) bool { return s.Engine[areaExact] == 1 }

func setMapExact(s *pager.State, exact bool) {
	if s.Engine[areaExact] = 0; exact {
		s.Engine[areaExact] = 1
	}
}

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
