package storage

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
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

// The record of a lost page. Its key is keyspace SpaceRepairTree and the page id, 8 bytes, big endian.
//
//	0       1            9              17             25      26          28          30           32
//	+-------+------------+--------------+--------------+-------+-----------+-----------+------------+-------+-------+--------+
//	| level | checkpoint | lower        | upper        | flags | lower key | upper key | reason     | lower | upper | reason |
//	|       |            | trailer      | trailer      |       | len       | len       | len        | key   | key   |        |
//	+-------+------------+--------------+--------------+-------+-----------+-----------+------------+-------+-------+--------+
//
// Flag 1: there is an upper bound. Without it upper key and trailer are zero.
const (
	lostCheckpoint = 1
	lostLower      = 9
	lostUpper      = 17
	lostFlags      = 25
	lostLowerLen   = 26
	lostUpperLen   = 28
	lostReasonLen  = 30
	lostKeys       = 32

	lostFlagUpper = 1

	// lostReasonMax bounds the reason: it is for people.
	lostReasonMax = 200
)

var errPageRecord = errors.New("malformed record of a lost page")

// encodeRepairTreeRoots writes the roots of the side tree and of its mirror into the state.
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

func pageRecordKey(id page.ID) []byte {
	return binary.BigEndian.AppendUint64([]byte{byte(keys.SpaceRepairTree)}, uint64(id))
}

func (p *quarantinedPage) encode() []byte {
	b := make([]byte, lostKeys, lostKeys+len(p.lower.Key)+len(p.reason)+64)
	b[0] = byte(p.level)
	binary.LittleEndian.PutUint64(b[lostCheckpoint:], p.checkpoint)
	binary.LittleEndian.PutUint64(b[lostLower:], uint64(p.lower.Trailer))
	binary.LittleEndian.PutUint16(b[lostLowerLen:], uint16(len(p.lower.Key)))
	binary.LittleEndian.PutUint16(b[lostReasonLen:], uint16(len(p.reason)))
	b = append(b, p.lower.Key...)
	if p.upper != nil {
		b[lostFlags] = lostFlagUpper
		binary.LittleEndian.PutUint64(b[lostUpper:], uint64(p.upper.Trailer))
		binary.LittleEndian.PutUint16(b[lostUpperLen:], uint16(len(p.upper.Key)))
		b = append(b, p.upper.Key...)
	}
	return append(b, p.reason...)
}

// decodePageRecord reads a record. It keeps neither slice.
func decodePageRecord(key, value []byte) (quarantinedPage, error) {
	if len(key) != 9 || keys.SpaceOf(key) != keys.SpaceRepairTree || len(value) < lostKeys {
		return quarantinedPage{}, fmt.Errorf("%w: %d bytes under a key of %d", errPageRecord, len(value), len(key))
	}
	p := quarantinedPage{
		id: page.ID(binary.BigEndian.Uint64(key[1:])), level: int(value[0]),
		checkpoint: binary.LittleEndian.Uint64(value[lostCheckpoint:]),
		lower:      page.Separator{Trailer: keys.Trailer(binary.LittleEndian.Uint64(value[lostLower:]))},
	}
	lower, upper := int(binary.LittleEndian.Uint16(value[lostLowerLen:])), int(binary.LittleEndian.Uint16(value[lostUpperLen:]))
	reason, flags := int(binary.LittleEndian.Uint16(value[lostReasonLen:])), value[lostFlags]
	rest := value[lostKeys:]
	if p.level > page.LevelMax || flags&^lostFlagUpper != 0 || len(rest) != lower+upper+reason ||
		flags == 0 && (upper != 0 || binary.LittleEndian.Uint64(value[lostUpper:]) != 0) {
		return quarantinedPage{}, fmt.Errorf("%w: level %d, flags %#x, %d+%d+%d bytes in %d", errPageRecord, p.level, flags, lower, upper, reason, len(rest))
	}
	p.lower.Key = bytes.Clone(rest[:lower])
	if flags&lostFlagUpper != 0 {
		p.upper = &page.Separator{
			Key: bytes.Clone(rest[lower : lower+upper]), Trailer: keys.Trailer(binary.LittleEndian.Uint64(value[lostUpper:])),
		}
		if compareLower(p.lower, *p.upper) >= 0 {
			return quarantinedPage{}, fmt.Errorf("%w: from %v to %v", errPageRecord, p.lower, p.upper)
		}
	}
	p.reason = string(rest[lower+upper:])
	return p, nil
}
