package memtable

import (
	"unsafe"

	"github.com/epochkv/epochkv/internal/keys"
)

// Ref is a reference to a version in the table: one word, where a Version is seven. Half of a
// transaction's time with one read went into copying Versions from one caller to the next. The zero
// Ref is no version. It is valid as long as the version that it names.
type Ref struct{ at unsafe.Pointer }

// Found reports whether there is a version.
func (r Ref) Found() bool { return r.at != nil }

func (r Ref) trailer() keys.Trailer { return *(*keys.Trailer)(r.at) }

func (r Ref) length() uint32 { return *(*uint32)(unsafe.Add(r.at, versionLenOffset)) }

// Epoch is the commit that wrote the version.
func (r Ref) Epoch() keys.Epoch { return r.trailer().Epoch() }

// Kind is what that commit did to the key.
func (r Ref) Kind() keys.Kind { return r.trailer().Kind() }

// Sync reports whether it was a SYNC commit.
func (r Ref) Sync() bool { return r.length()&versionSync != 0 }

// Value aliases the table's memory. A tombstone has none.
func (r Ref) Value() []byte {
	return unsafe.Slice((*byte)(unsafe.Add(r.at, versionHeaderBytes)), r.length()&^versionFlags)
}

// Version is the same, unpacked.
func (r Ref) Version() Version {
	v := Version{Epoch: r.Epoch(), Kind: r.Kind(), Sync: r.Sync()}
	if v.Kind != keys.KindDelete {
		v.Value = r.Value()
	}
	return v
}

// refAt is the version at an offset.
func refAt(base unsafe.Pointer, off uint32) Ref {
	return Ref{unsafe.Add(base, uintptr(off)*wordBytes)}
}
