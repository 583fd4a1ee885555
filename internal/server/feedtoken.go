package server

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"hash/fnv"

	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
)

// feedToken says where a watch continues, in which history, and for which ranges and kinds it is valid. Clients treat it as
// opaque. Nothing in it is used before its checksum matches. It names no node: every commit that was delivered is durable, so
// the token is valid wherever the history is.
//
//	0         1         17      24           28       36        40
//	+---------+---------+-------+------------+--------+---------+
//	| version | lineage | epoch | operations | filter | crc32c  |
//	+---------+---------+-------+------------+--------+---------+
//
// The first operations of the commit after the epoch have been delivered. In the middle of a snapshot or of a difference, which
// are sent in key order, the token has another version and two more fields before the checksum: the epoch of the snapshot, and
// the last key that was sent. Its epoch is the one after which the difference began; that of a snapshot is 0. A third version
// is that of a difference between the epochs before and after a bulk load, and a fourth one that of a difference from before
// the first commit, whose epoch is 0, too.
//
//	0         1         17      24           28       36         43         n-4
//	+---------+---------+-------+------------+--------+----------+----------+--------+
//	| version | lineage | epoch | 0          | filter | snapshot | last key | crc32c |
//	+---------+---------+-------+------------+--------+----------+----------+--------+
type feedToken struct {
	lineage  keys.Lineage
	position feed.Position
	filter   uint64     // see watchFilter
	snapshot keys.Epoch // not 0: within a snapshot or a difference at this epoch
	last     []byte     // the last key that was sent
	load     bool       // the difference is what a bulk load did
	first    bool       // it is a difference from before the first commit, and no snapshot
}

const (
	feedTokenVersion     = 1
	feedTokenWalkVersion = 2
	feedTokenLoadVersion = 3
	feedTokenAllVersion  = 4
	feedTokenBody        = 36
	feedTokenBytes       = feedTokenBody + 4
	feedTokenWalkBytes   = feedTokenBytes + 7 // and the last key
)

func (t *feedToken) encode() []byte {
	dst := make([]byte, 0, feedTokenWalkBytes+len(t.last))
	version := byte(feedTokenVersion)
	switch {
	case t.load:
		version = feedTokenLoadVersion
	case t.first:
		version = feedTokenAllVersion
	case t.snapshot != 0:
		version = feedTokenWalkVersion
	}
	dst = append(append(dst, version), t.lineage[:]...)
	dst = appendEpoch(dst, t.position.Epoch)
	dst = binary.LittleEndian.AppendUint32(dst, t.position.Operations)
	dst = binary.LittleEndian.AppendUint64(dst, t.filter)
	if t.snapshot != 0 {
		dst = append(appendEpoch(dst, t.snapshot), t.last...)
	}
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst, castagnoli))
}

func appendEpoch(dst []byte, e keys.Epoch) []byte {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], uint64(e))
	return append(dst, b[:7]...)
}

func epochOf(src []byte) keys.Epoch {
	var b [8]byte
	copy(b[:7], src)
	return keys.Epoch(binary.LittleEndian.Uint64(b[:]))
}

// decodeFeedToken reads a token. The key aliases src.
func decodeFeedToken(src []byte, keyBytesMax int) (t feedToken, err error) {
	if len(src) < feedTokenBytes || len(src) > feedTokenWalkBytes+keyBytesMax {
		return t, invalidToken("has an impossible length")
	}
	version := src[0]
	if version < feedTokenVersion || version > feedTokenAllVersion {
		return t, invalidToken("is not of a watch, or of a newer version of the server")
	}
	body, sum := src[:len(src)-4], binary.LittleEndian.Uint32(src[len(src)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return t, invalidToken("is damaged")
	}
	copy(t.lineage[:], body[1:])
	t.position = feed.Position{Epoch: epochOf(body[17:]), Operations: binary.LittleEndian.Uint32(body[24:])}
	t.filter = binary.LittleEndian.Uint64(body[28:])
	if t.position.Epoch >= keys.MaxEpoch { // no commit comes after it
		return t, invalidToken("is damaged")
	}
	if version == feedTokenVersion {
		if len(body) != feedTokenBody {
			return t, invalidToken("is damaged")
		}
		return t, nil
	}
	if len(src) < feedTokenWalkBytes {
		return t, invalidToken("is damaged")
	}
	t.snapshot, t.last = epochOf(body[feedTokenBody:]), body[feedTokenBody+7:]
	t.load, t.first = version == feedTokenLoadVersion, version == feedTokenAllVersion
	if t.position.Operations != 0 || t.snapshot == 0 || t.snapshot < t.position.Epoch || t.first && t.position.Epoch != 0 {
		return t, invalidToken("is damaged")
	}
	return t, nil
}

// watchFilter distinguishes ranges and kinds, so that a token is valid only for its own.
func watchFilter(ranges []feed.Range, kinds feed.Kinds) uint64 {
	h := fnv.New64a()
	field := func(b []byte) {
		var length [8]byte
		binary.LittleEndian.PutUint64(length[:], uint64(len(b)))
		_, _ = h.Write(length[:])
		_, _ = h.Write(b)
	}
	for _, r := range ranges {
		field(r.Lower)
		if r.Upper == nil {
			_, _ = h.Write([]byte{0})
			continue
		}
		_, _ = h.Write([]byte{1})
		field(r.Upper)
	}
	_, _ = fmt.Fprint(h, "kinds", uint64(kinds))
	return h.Sum64()
}
