// Package metadata defines what a version can say beside its value: when it expires, which lease it
// belongs to, and what the etcd API shows of it.
//
// A version with metadata has a kind with the flag keys.KindMetadata. What is stored of it, in a
// batch, a memtable and a tree leaf alike, begins with a section:
//
//	0        1             1+n
//	+--------+-------------+-- - - --+
//	| length | tag, value  | value   |     in a leaf, the value may be a reference to a blob
//	| n (1)  | ... (uvar)  |         |
//	+--------+-------------+-- - - --+
//
// So log, memtable and merge treat section and value as one string of bytes, a version without
// metadata costs nothing, and the metadata of a blob is in the leaf, where a reader of keys finds
// it. Tags ascend. A reader that does not know an odd tag must refuse the version; it may skip an
// even one.
package metadata

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/keys"
)

// Tags of a section. All of them have one number, an unsigned varint.
const (
	tagExpiresAt      = 1 // milliseconds since 1970
	tagLease          = 3
	tagCreateRevision = 5
	tagKeyVersion     = 7
	tagModRevision    = 9
	tagPosition       = 11
)

// SectionBytesMax is the largest length of a section. A page of 512 bytes, with a key and a
// reference to a blob, has room for it.
const SectionBytesMax = 1 + 80

// DeadlineBytesMax is how much longer a deadline can make a section, which may not have been there before.
const DeadlineBytesMax = 1 + 1 + binary.MaxVarintLen64

// ErrMalformed means that bytes that should begin with a section do not.
var ErrMalformed = errors.New("metadata: malformed section")

// ErrUnknown means that a section has a field that a newer version of the program wrote, and that must
// be understood.
var ErrUnknown = errors.New("metadata: unknown field")

// Fields is the metadata of one version. A field with its zero value is absent.
type Fields struct {
	ExpiresAt      uint64 // milliseconds since 1970
	Lease          uint64 // id of the lease that the key is attached to
	CreateRevision uint64 // etcd: revision in which the key was created
	KeyVersion     uint64 // etcd: number of writes since then
	ModRevision    uint64 // etcd: revision of this version
	Position       uint64 // etcd: place among the operations of that revision, if it is not the sorted one
}

// Append appends the section to dst.
func (f *Fields) Append(dst []byte) []byte {
	at := len(dst)
	dst = append(dst, 0)
	for _, field := range [...]struct {
		tag   byte
		value uint64
	}{
		{tagExpiresAt, f.ExpiresAt},
		{tagLease, f.Lease},
		{tagCreateRevision, f.CreateRevision},
		{tagKeyVersion, f.KeyVersion},
		{tagModRevision, f.ModRevision},
		{tagPosition, f.Position},
	} {
		if field.value != 0 {
			dst = binary.AppendUvarint(append(dst, field.tag), field.value)
		}
	}
	dst[at] = byte(len(dst) - at - 1)
	return dst
}

// Read returns the metadata of a version. A version without any has the zero Fields. The error wraps
// ErrMalformed or ErrUnknown.
func Read(kind keys.Kind, stored []byte) (f Fields, err error) {
	if !kind.HasMetadata() {
		return f, nil
	}
	if err := Check(kind, stored); err != nil {
		return f, err
	}
	section := stored[1 : 1+stored[0]]
	for last := uint64(0); len(section) > 0; {
		tag, value, n := field(section)
		if n == 0 || tag <= last {
			return Fields{}, fmt.Errorf("%w: tag %d after %d", ErrMalformed, tag, last)
		}
		if into := f.of(tag); into != nil {
			*into = value
		} else if tag%2 == 1 {
			return Fields{}, fmt.Errorf("%w: tag %d", ErrUnknown, tag)
		}
		section, last = section[n:], tag
	}
	return f, nil
}

// field reads the first field of a section, of n bytes. It returns zero bytes if there is none.
func field(section []byte) (tag, value uint64, n int) {
	tag, a := binary.Uvarint(section)
	if a <= 0 {
		return 0, 0, 0
	}
	value, b := binary.Uvarint(section[a:])
	if b <= 0 {
		return tag, 0, 0
	}
	return tag, value, a + b
}

func (f *Fields) of(tag uint64) *uint64 {
	switch tag {
	case tagExpiresAt:
		return &f.ExpiresAt
	case tagLease:
		return &f.Lease
	case tagCreateRevision:
		return &f.CreateRevision
	case tagKeyVersion:
		return &f.KeyVersion
	case tagModRevision:
		return &f.ModRevision
	case tagPosition:
		return &f.Position
	}
	return nil
}

// Check reports whether what is stored of a version begins with a section, if its kind says so. It does
// not look into the section. A version that comes from a file is checked once; Size and Value rely on
// it.
func Check(kind keys.Kind, stored []byte) error {
	if !kind.HasMetadata() {
		return nil
	}
	if len(stored) == 0 || 1+int(stored[0]) > min(len(stored), SectionBytesMax) {
		return fmt.Errorf("%w: %d bytes", ErrMalformed, len(stored))
	}
	return nil
}

// Size is the length of the section that what is stored of a version begins with; zero without metadata.
func Size(kind keys.Kind, stored []byte) int {
	if !kind.HasMetadata() {
		return 0
	}
	return 1 + int(stored[0])
}

// Value is what is stored of a version without the section.
func Value(kind keys.Kind, stored []byte) []byte { return stored[Size(kind, stored):] }
