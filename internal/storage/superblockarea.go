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
//	0           8             12            20              24           25      26      27     64            72             80
//	+-----------+-------------+-------------+---------------+------------+-------+-------+------+-------------+--------------+--
//	| side root | side height | mirror root | mirror height | quarantine | exact | level | zero | log segment | newest epoch | ...
//	+-----------+-------------+-------------+---------------+------------+-------+-------+------+-------------+--------------+--
//	80        96             104    112           120
//	+---------+--------------+------+-------------+-------------+
//	| lineage | parent epoch | term | commit time | system keys |
//	+---------+--------------+------+-------------+-------------+
//
// quarantine: the number of the quarantine file that the state uses, 1 or 2; 0 for none.
//
// exact: 1 if every live tree page of the allocation map is reachable; 0 if that is not known. Orphans are then not
// searched (package orphans).
//
// log segment: the log has a segment with this number or a larger one (see wal.Log.Headed). Zero in files of earlier versions, and until the
// first segment of a new store has a durable header.
//
// level: the feature level. It and everything from byte 80 on is zero in files before format 5, whose level is the oldest.
// Parent epoch is the one at which the lineage began, zero for a store that was created. Term is that of the state's epoch.
// Commit time is in microseconds since 1970: the latest of all commits up to the state's epoch; zero if it is not known.
//
// system keys: one more than the number of live keys that are not the clients'; zero if it is not known.
//
// newest epoch: the tree and the quarantine have versions of no later epoch. It is after the epoch of the state while a merge in steps is
// incomplete, and zero otherwise.
const (
	areaRepairTree = 0
	areaMirror     = 12
	areaQuarantine = 24
	areaExact      = 25
	areaLevel      = 26
	areaReserved   = 27
	areaSegment    = 64
	areaNewest     = 72
	areaHistory    = 80
	areaLineage    = 80
	areaParent     = 96
	areaTerm       = 104
	areaTime       = 112
	areaSystemKeys = 120

	historyFormat = 5 // since this format of the data file the area has a level and a history

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
	if newest != 0 && newest <= s.Epoch || !ok || !mirrored || root.Empty() && !mirror.Empty() || s.Engine[areaQuarantine] > 2 || s.Engine[areaExact] > 1 || !allZero(s.Engine[areaReserved:areaSegment]) || !validHistory(s) {
		return btree.Root{}, btree.Root{}, fmt.Errorf("the engine's area of the superblock is malformed: % x", s.Engine)
	}
	return root, mirror, nil
}

// logProof is what the state knows of the log: a segment that it has, or newer ones, and that what the
// tree has was durable. Of a state without a superblock, which has no format, nothing is known.
func logProof(s *pager.State) wal.Proof {
	return wal.Proof{
		Segment: binary.LittleEndian.Uint64(s.Engine[areaSegment:]),
		Durable: keys.Epoch(binary.LittleEndian.Uint64(s.Engine[areaNewest:])),
		Lineage: lineageOf(s), Term: termOf(s), NoLineage: s.Format > 0 && s.Format < historyFormat,
	}
}

// validHistory checks the part of the area that only files of the newest format have.
func validHistory(s *pager.State) bool {
	if s.Format < historyFormat {
		return s.Engine[areaExact] == 0 && s.Engine[areaLevel] == 0 && allZero(s.Engine[areaHistory:])
	}
	return featureLevel(s) > keys.FeatureLevelOldest && lineageOf(s) != keys.Lineage{}
}

// featureLevel is the level of a state.
func featureLevel(s *pager.State) keys.FeatureLevel {
	if s.Format < historyFormat {
		return keys.FeatureLevelOldest
	}
	return keys.FeatureLevel(s.Engine[areaLevel])
}

// setFeatureLevel raises the level of a state. The lineage is for a state that has none.
func setFeatureLevel(s *pager.State, level keys.FeatureLevel, lineage keys.Lineage) {
	s.Format = dataFormats[level]
	if s.Format < historyFormat {
		return
	}
	s.Engine[areaLevel] = byte(level)
	if lineageOf(s) == (keys.Lineage{}) {
		copy(s.Engine[areaLineage:areaParent], lineage[:])
	}
}

// systemKeys is how many of the live keys are not the clients', if that is known: a file that had the newest format before
// this count does not say so.
func systemKeys(s *pager.State) (n uint64, known bool) {
	stored := binary.LittleEndian.Uint64(s.Engine[areaSystemKeys:])
	return max(stored, 1) - 1, stored > 0
}

func setSystemKeys(s *pager.State, n uint64) {
	if s.Format >= historyFormat {
		binary.LittleEndian.PutUint64(s.Engine[areaSystemKeys:], n+1)
	}
}

// addSystemKeys counts what a merge has added.
func addSystemKeys(s *pager.State, change int64) {
	if n, known := systemKeys(s); known {
		setSystemKeys(s, uint64(int64(n)+change))
	}
}

// userKeys is how many live keys are the clients'; all, if that is not known.
func userKeys(s *pager.State) uint64 {
	n, _ := systemKeys(s)
	return s.Entries - min(n, s.Entries)
}

// setNewLineage begins a history at the state's epoch. The log of the earlier one does not belong to it.
func setNewLineage(s *pager.State, lineage keys.Lineage) {
	copy(s.Engine[areaLineage:areaParent], lineage[:])
	binary.LittleEndian.PutUint64(s.Engine[areaParent:], uint64(s.Epoch))
	clear(s.Engine[areaSegment:areaNewest])
}

// parentEpoch is the epoch at which the lineage began; zero if the store was created with it.
func parentEpoch(s *pager.State) keys.Epoch {
	return keys.Epoch(binary.LittleEndian.Uint64(s.Engine[areaParent:]))
}

// lineageOf is the lineage of a state, zero before it has one.
func lineageOf(s *pager.State) keys.Lineage {
	return keys.Lineage(s.Engine[areaLineage:areaParent])
}

// termOf is the term of the state's epoch.
func termOf(s *pager.State) keys.Term {
	return keys.Term(binary.LittleEndian.Uint64(s.Engine[areaTerm:]))
}

// commitTime is the time of the state's epoch in microseconds since 1970: the latest of all commits up to it. Zero if it is not known.
func commitTime(s *pager.State) uint64 {
	return binary.LittleEndian.Uint64(s.Engine[areaTime:])
}

// setEpochHistory records the term and the commit time of the state's epoch. The time never falls.
func setEpochHistory(s *pager.State, term keys.Term, at uint64) {
	if s.Format < historyFormat {
		return
	}
	binary.LittleEndian.PutUint64(s.Engine[areaTerm:], uint64(term))
	binary.LittleEndian.PutUint64(s.Engine[areaTime:], max(at, commitTime(s)))
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
	if s.Engine[areaExact] = 0; exact && s.Format >= historyFormat {
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
