package storage

import (
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
)

// view is what a reader uses, immutable: the active generation, the frozen ones (newest first), and the tree's root. A reader
// loads it inside its slot's protection; whoever replaces it retires what it no longer names.
//
// Invariant: a view loaded after a snapshot was taken holds every version that the snapshot sees.
type view struct {
	active     *generation
	immutables []*generation
	root       btree.Root
	repairTree *repairtree.Tree // nil unless pages of the tree are lost

	quarantine *quarantined // nil unless the tree has refused something

	checkpoint uint64     // that wrote root
	inTree     keys.Epoch // every commit up to it is in the tree at root
}

// Version is what one commit did to a key. Its value lies in the engine and lives as long as the slot's protection.
type Version struct {
	Epoch keys.Epoch
	Kind  keys.Kind
	Sync  bool // written by a SYNC commit, and still in a memtable; what is in the tree is durable
	large bool // value is a reference into the row store
	value []byte
}

// Size is the length of v's value.
func (v *Version) Size() int {
	if v.large {
		return blob.Length(page.Ref(v.value))
	}
	return len(v.value)
}

// Inline is v's value where it lies, or nil if it has to be read from pages of its own, or is empty.
func (v *Version) Inline() []byte {
	if v.large {
		return nil
	}
	return v.value
}
