package lease

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// record is what is stored of a lease.
//
//	0       1        4         8           16              20
//	+-------+--------+---------+-----------+---------------+-------+
//	| flags | 0      | TTL (s) | granted   | remaining (s) | owner |
//	+-------+--------+---------+-----------+---------------+-------+
//	                            ms since 1970               the rest
//
// Flag 1 says that the revocation has begun. A remaining TTL of zero is not recorded.
type record struct {
	ttl       time.Duration
	granted   time.Time
	remaining time.Duration
	owner     string
	revoking  bool
}

const (
	recordHeaderBytes = 20
	flagRevoking      = 1
)

var errMalformed = errors.New("malformed record")

func (r *record) encode() []byte {
	var header [recordHeaderBytes]byte
	if r.revoking {
		header[0] = flagRevoking
	}
	binary.LittleEndian.PutUint32(header[4:], wholeSeconds(r.ttl))
	binary.LittleEndian.PutUint64(header[8:], uint64(max(r.granted.UnixMilli(), 0)))
	binary.LittleEndian.PutUint32(header[16:], wholeSeconds(r.remaining))
	return append(header[:], r.owner...)
}

// wholeSeconds rounds up: no lease must end early.
func wholeSeconds(d time.Duration) uint32 {
	return uint32(min((d+time.Second-1)/time.Second, math.MaxUint32))
}

func (r *record) decode(value []byte) error {
	if len(value) < recordHeaderBytes || value[0]&^flagRevoking != 0 || value[1]|value[2]|value[3] != 0 {
		return errMalformed
	}
	granted := binary.LittleEndian.Uint64(value[8:])
	*r = record{
		ttl:       time.Duration(binary.LittleEndian.Uint32(value[4:])) * time.Second,
		granted:   time.UnixMilli(int64(min(granted, math.MaxInt64))),
		remaining: time.Duration(binary.LittleEndian.Uint32(value[16:])) * time.Second,
		owner:     string(value[recordHeaderBytes:]),
		revoking:  value[0]&flagRevoking != 0,
	}
	if r.ttl < TTLMin || len(r.owner) > OwnerBytesMax {
		return errMalformed
	}
	return nil
}

// All leases are in [leasesLower, leasesUpper).
var (
	leasesLower = []byte{keys.SystemLease}
	leasesUpper = []byte{keys.SystemLease + 1}
)

// leaseKey is the key of a lease, without the keyspace.
func leaseKey(id ID) []byte {
	return binary.BigEndian.AppendUint64([]byte{keys.SystemLease}, uint64(id))
}

// leaseLatch is the internal key of a lease.
func leaseLatch(id ID) []byte { return mvcc.LeaseLatch(nil, uint64(id)) }

// leaseOf is the id in the key of a lease.
func leaseOf(key []byte) ID {
	if len(key) != 9 {
		return 0
	}
	return ID(binary.BigEndian.Uint64(key[1:]))
}

// attachmentBounds are the bounds of the attachments of a lease.
func attachmentBounds(id ID) (lower, upper []byte) {
	lower = keys.AppendOwned(nil, keys.SystemAttachment, uint64(id), nil)
	upper, _ = keys.Successor(nil, lower)
	return lower, upper
}

// attached is the internal key in the key of an attachment.
func attached(key []byte) []byte { return key[9:] }

// lockKey is the key of a lock, without the keyspace.
func lockKey(name []byte) []byte { return append([]byte{keys.SystemLock}, name...) }

// lockName is the name of the lock with an internal key; false if it is not that of a lock.
func lockName(internal []byte) (name []byte, ok bool) {
	if len(internal) < 3 || keys.SpaceOf(internal) != keys.SpaceSystem || internal[1] != keys.SystemLock {
		return nil, false
	}
	return internal[2:], true
}
