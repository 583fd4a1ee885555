// Package keys defines what every layer shares: epochs (commit sequence numbers), kinds, trailers,
// and the internal key.
//
// An internal key is a keyspace byte followed by the client's key. Keyspaces keep system records
// and user data apart in one ordered map. Keys of one space share the byte as a truncated prefix,
// so it costs next to nothing.
//
//	internal key            trailer (8 bytes, never stored before a shared prefix)
//	+-------+-----------+   +-----------------+------+
//	| space | user key  |   | epoch (56 bits) | kind |
//	+-------+-----------+   +-----------------+------+
//
// Versions order by (internal key ascending, epoch descending), which is Pebble's order with
// Pebble's trailer.
//
// The package imports no other package of the project and knows nothing of files, memory, or the
// network.
package keys

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
)

// Epoch is a commit sequence number: starting at 1, ascending, one per committed transaction, and
// never used twice. There are gaps before bulk loads and after an unclean end. Zero means "none".
type Epoch uint64

// MaxEpoch is the largest epoch that a trailer can hold (56 bits).
const MaxEpoch Epoch = 1<<56 - 1

// Term is the raft term in which an epoch was proposed. It is zero in a store that was never in a cluster.
type Term uint64

// Lineage names a history: (lineage, epoch) names one commit forever, an epoch alone does not. It is drawn
// at random when a store is created.
type Lineage [16]byte

// String is the lineage in hexadecimal digits.
func (l Lineage) String() string { return hex.EncodeToString(l[:]) }

// Kind says what a version does to its key.
type Kind uint8

const (
	// KindDelete is a tombstone; it carries no value.
	KindDelete Kind = 0
	// KindSet sets the key to a value.
	KindSet Kind = 1
	// KindNone is the kind of a no-op: a reserved epoch that changes nothing, because its
	// validation failed.
	KindNone Kind = 3
	// KindMetadata is a flag of kinds with a value: a metadata section is stored before the value
	// (see package metadata).
	KindMetadata Kind = 0x80
	// KindSetMetadata sets the key to a value with metadata.
	KindSetMetadata = KindSet | KindMetadata
)

// HasValue reports whether a version of the kind gives its key a value.
func (k Kind) HasValue() bool { return k&^KindMetadata == KindSet }

// HasMetadata reports whether a metadata section is stored before the value.
func (k Kind) HasMetadata() bool { return k&KindMetadata != 0 }

// Trailer packs an epoch and a kind so that a larger trailer sorts first.
type Trailer uint64

// MakeTrailer packs e and k. The epoch must not exceed MaxEpoch.
func MakeTrailer(e Epoch, k Kind) Trailer { return Trailer(uint64(e)<<8 | uint64(k)) }

// Epoch is the trailer's epoch.
func (t Trailer) Epoch() Epoch { return Epoch(t >> 8) }

// Kind is the trailer's kind.
func (t Trailer) Kind() Kind { return Kind(t) }

// Compare orders (key, trailer) pairs: key ascending, then trailer descending. It is negative, zero
// or positive.
func Compare(a []byte, at Trailer, b []byte, bt Trailer) int {
	if c := bytes.Compare(a, b); c != 0 {
		return c
	}
	switch {
	case at > bt:
		return -1
	case at < bt:
		return 1
	}
	return 0
}

// Space is the keyspace id, the first byte of every internal key.
type Space byte

// Keyspaces. All reserved key prefixes are here and nowhere else.
const (
	// SpaceRepairTree has the repair tree's records of skipped pages. It is before all other
	// spaces, and in no other tree.
	SpaceRepairTree Space = 0x00
	// SpaceSystem has the server's own records.
	SpaceSystem Space = 0x01
	// SpaceUser has what clients write.
	SpaceUser Space = 0x10
)

// SystemProbe is the key in SpaceSystem that the liveness probe deletes and that never exists.
// Other first bytes of system keys are reserved for records that do exist.
const SystemProbe = "p"

// SystemRequest is the first byte of the keys in SpaceSystem of which each is the id of a client's request that was
// executed, and the begin of the record of the id cut-off.
const SystemRequest = 'q'

// SystemExpiry and SystemAttachment are the first bytes of the keys in SpaceSystem that belong to a key of another space,
// their owner: a number of eight bytes follows, most significant first, and then the owner's internal key. The number is
// the owner's deadline in milliseconds since 1970, or the id of its lease.
const (
	SystemExpiry     = 't'
	SystemAttachment = 'a'
)

// First bytes of the keys in SpaceSystem of which the records are about the past: samples of when epochs were, from which
// epoch on versions are kept, and holds.
const (
	SystemTimeSample = 'h'
	SystemRetention  = 'w'
	SystemHold       = 'j'
)

// SystemRemoved is the first byte of the keys in SpaceSystem of which each is the last epoch of some that a repair of the log
// removed, or a crash lost, in eight bytes, most significant first.
const SystemRemoved = 'x'

// EpochRange are epochs from First through Last.
type EpochRange struct{ First, Last Epoch }

// RemovedRecord is the record that epochs were removed or lost: its key in SpaceSystem, without the keyspace, and its value.
func RemovedRecord(r EpochRange) (key, value []byte) {
	return RemovedKey(r.Last), binary.LittleEndian.AppendUint64(nil, uint64(r.First))
}

// RemovedKey is the key of RemovedRecord.
func RemovedKey(last Epoch) []byte {
	return binary.BigEndian.AppendUint64([]byte{SystemRemoved}, uint64(last))
}

// ownedHeaderBytes is where the owner begins in the internal key of an owned record.
const ownedHeaderBytes = 1 + 1 + 8

// OwnedBytes is how much longer the internal key of an owned record is than its owner's.
const OwnedBytes = ownedHeaderBytes

// AppendOwned appends the key in SpaceSystem, without the keyspace, of an owned record.
func AppendOwned(dst []byte, first byte, number uint64, owner []byte) []byte {
	dst = binary.BigEndian.AppendUint64(append(dst, first), number)
	return append(dst, owner...)
}

// Owner is the internal key of the owner of a record; false if the internal key is not that of an owned record.
func Owner(internal []byte) (owner []byte, ok bool) {
	if len(internal) <= ownedHeaderBytes || SpaceOf(internal) != SpaceSystem ||
		internal[1] != SystemExpiry && internal[1] != SystemAttachment {
		return nil, false
	}
	return internal[ownedHeaderBytes:], true
}

// SystemLease and SystemLock are the first bytes of the keys in SpaceSystem of leases, followed by the id, and of locks
// that are held, followed by the name. Package lease defines the records.
const (
	SystemLease = 'l'
	SystemLock  = 'o'
)

// First bytes of the keys in SpaceSystem of users, roles and tokens: a user's or a role's name follows, or the SHA-256 of
// the token. SystemUser alone is whether users are checked. Package auth/users defines the records.
const (
	SystemUser  = 'u'
	SystemRole  = 'r'
	SystemToken = 'k'
)

// Append appends the internal key of user in space s to dst.
func Append(dst []byte, s Space, user []byte) []byte {
	dst = append(dst, byte(s))
	return append(dst, user...)
}

// User is the client's part of an internal key.
func User(internal []byte) []byte { return internal[1:] }

// SpaceOf is the keyspace of an internal key, which must not be empty.
func SpaceOf(internal []byte) Space { return Space(internal[0]) }

// Successor appends the smallest key greater than every key with the given prefix, and reports
// whether there is one. A prefix of only 0xff bytes has none.
func Successor(dst, prefix []byte) ([]byte, bool) {
	for i := len(prefix) - 1; i >= 0; i-- {
		if prefix[i] != 0xff {
			dst = append(dst, prefix[:i+1]...)
			dst[len(dst)-1]++
			return dst, true
		}
	}
	return dst, false
}
