package storage

import (
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/metadata"
	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/repairtree"
)

// view is what a reader uses: the active generation, the immutable ones (newest first), and the root of the tree. It is never
// changed. A reader loads it inside the guard of its slot. The goroutine that replaces a view retires what the next one
// does not name.
//
// Invariant: a view loaded after a snapshot was taken holds every version that the snapshot sees.
type view struct {
	active     *generation
	immutables []*generation
	root       btree.Root
	repairTree *repairtree.Tree // nil unless checkpoints skip pages of the tree

	quarantine *quarantined // nil unless the tree has refused something

	checkpoint uint64     // that wrote root
	inTree     keys.Epoch // every commit up to it is in the tree at root
}

// Version is what one commit did to a key. What is stored of its value is in the memory of the engine, and is valid inside the guard of the
// slot.
type Version struct {
	Epoch keys.Epoch
	Kind  keys.Kind
	Sync  bool   // written by a SYNC commit, and still in a memtable; what is in the tree is durable
	large bool   // value is a reference to a blob
	value []byte // as it is stored: after the metadata, if there are any
	twice *twice // of a large value in the repair tree, which is in its mirror, too; else nil
}

// twice says of what version a repair tree and its mirror have a blob each.
type twice struct {
	tree *repairtree.Tree
	key  []byte
}

// Size is the length of v's value.
func (v *Version) Size() int {
	if v.large {
		return blob.Length(page.RefOf(v.value))
	}
	return len(metadata.Value(v.Kind, v.value))
}

// Metadata is what the version says beside its value. It reads no page.
func (v *Version) Metadata() (metadata.Fields, error) { return metadata.Read(v.Kind, v.value) }

// Section is v's metadata as it is stored; empty if there is none.
func (v *Version) Section() []byte { return v.value[:metadata.Size(v.Kind, v.value)] }

// Inline is v's value without a copy, or nil if it is a blob, or is empty.
func (v *Version) Inline() []byte {
	if v.large {
		return nil
	}
	return metadata.Value(v.Kind, v.value)
}
