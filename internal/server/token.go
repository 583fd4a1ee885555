package server

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/keys"
)

// A resume token says where a scan stopped, in which store and at which epoch, and for which range
// and direction it is valid. Clients treat it as opaque. Nothing in it is used before its checksum
// matches, and its content is checked again afterwards. The epochs of another store belong to
// another history, so its tokens are refused.
//
//	0         1       2       10           14      22         ...     n-4
//	+---------+-------+-------+------------+-------+----------+--------+
//	| version | flags | epoch | range hash | store | last key | crc32c |
//	+---------+-------+-------+------------+-------+----------+--------+
//
// The checksum covers everything before it. It detects accidents, not forgery. So the last key must be in
// the range of the request: a forged token reads nothing that the same client could not read without it.
type token struct {
	epoch   keys.Epoch
	reverse bool
	last    []byte // the last key that the client has; the scan continues after it
	bounds  uint32 // hash of the request's range
	store   uint64 // see Server.storeID
}

const (
	tokenVersion    = 2
	tokenReverse    = 1 << 0
	tokenHeaderSize = 22
	tokenSizeMin    = tokenHeaderSize + 4
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// appendToken appends t's encoding to dst.
func appendToken(dst []byte, t token) []byte {
	start := len(dst)
	var flags byte
	if t.reverse {
		flags |= tokenReverse
	}
	dst = append(dst, tokenVersion, flags)
	dst = binary.LittleEndian.AppendUint64(dst, uint64(t.epoch))
	dst = binary.LittleEndian.AppendUint32(dst, t.bounds)
	dst = binary.LittleEndian.AppendUint64(dst, t.store)
	dst = append(dst, t.last...)
	return binary.LittleEndian.AppendUint32(dst, crc32.Checksum(dst[start:], castagnoli))
}

// decodeToken reads a token of the given store. The key aliases src.
func decodeToken(src []byte, store uint64, keyBytesMax int) (token, error) {
	if len(src) < tokenSizeMin || len(src) > tokenSizeMin+keyBytesMax {
		return token{}, invalidToken("has an impossible length")
	}
	if src[0] != tokenVersion {
		return token{}, invalidToken("is of another version of the server; start the scan again")
	}
	body, sum := src[:len(src)-4], binary.LittleEndian.Uint32(src[len(src)-4:])
	if crc32.Checksum(body, castagnoli) != sum {
		return token{}, invalidToken("is damaged")
	}
	t := token{
		reverse: body[1]&tokenReverse != 0,
		epoch:   keys.Epoch(binary.LittleEndian.Uint64(body[2:])),
		bounds:  binary.LittleEndian.Uint32(body[10:]),
		store:   binary.LittleEndian.Uint64(body[14:]),
		last:    body[tokenHeaderSize:],
	}
	if body[1]&^tokenReverse != 0 || t.epoch == 0 || t.epoch > keys.MaxEpoch || len(t.last) == 0 {
		return token{}, invalidToken("is damaged")
	}
	if t.store != store {
		return token{}, foreignToken()
	}
	return t, nil
}

// hashBounds distinguishes ranges, so that a token is only valid for its own range.
func hashBounds(b bounds) uint32 {
	var length [4]byte
	binary.LittleEndian.PutUint32(length[:], uint32(len(b.lower)))
	h := crc32.Update(0, castagnoli, length[:])
	h = crc32.Update(h, castagnoli, b.lower)
	if b.upper == nil {
		return crc32.Update(h, castagnoli, []byte{0})
	}
	h = crc32.Update(h, castagnoli, []byte{1})
	return crc32.Update(h, castagnoli, b.upper)
}

// within reports whether a key is in a range; a nil upper bound is none.
func within(key, lower, upper []byte) bool {
	return bytes.Compare(key, lower) >= 0 && (upper == nil || bytes.Compare(key, upper) < 0)
}

func invalidToken(text string) error {
	return &argumentError{reason: pb.ErrorReason_ERROR_REASON_INVALID_RESUME_TOKEN, field: "resume_token", text: text}
}

func foreignToken() error {
	return &argumentError{
		reason: pb.ErrorReason_ERROR_REASON_FOREIGN_RESUME_TOKEN, field: "resume_token",
		text: "is of another store, whose epochs belong to another history; start the scan again",
	}
}
