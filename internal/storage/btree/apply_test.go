package btree

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
)

// putAll merges entries, sorted by key and then newest first, instead of in's Input. Neighbours
// share one descent, and each page is read and written once.
func putAll(ctx context.Context, in MergeInput, entries []Entry) (*Result, error) {
	in.Input = func() Input { return &SliceInput{Entries: entries} }
	return Merge(ctx, &in)
}

// removeAll merges a tombstone at epoch e for each of the sorted keys.
func removeAll(ctx context.Context, in MergeInput, sorted [][]byte, e keys.Epoch) (*Result, error) {
	return putAll(ctx, in, stamped(sorted, e, keys.KindDelete))
}

// invokeAll is read-modify-write in one descent: for each of the sorted keys fn gets the newest
// version in the tree, if found, and returns the key's version at epoch e. A result of kind
// KindNone leaves the key as it is. The result's epoch is ignored; its value must not change until
// fn is called again, or, if it is longer than page.InlineMax, until invokeAll returns. Workers
// call fn concurrently.
func invokeAll(ctx context.Context, in MergeInput, sorted [][]byte, e keys.Epoch, fn func(key []byte, old Version, found bool) Version) (*Result, error) {
	in.Invoke = func(entry Entry, old Version, found bool) Entry {
		v := fn(entry.Key, old, found)
		return Entry{Key: entry.Key, Value: v.Value, Trailer: keys.MakeTrailer(e, v.Kind), Large: v.Large}
	}
	return putAll(ctx, in, stamped(sorted, e, keys.KindSet))
}

// stamped makes entries without values of sorted keys.
func stamped(sorted [][]byte, e keys.Epoch, kind keys.Kind) []Entry {
	entries := make([]Entry, len(sorted))
	for i, k := range sorted {
		entries[i] = Entry{Key: k, Trailer: keys.MakeTrailer(e, kind)}
	}
	return entries
}
