//go:build ablation

package tree

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
)

// invokeAll is read-modify-write in one descent: for each of the sorted keys fn gets the newest
// version in the tree, if found, and returns the key's version at epoch e. A result of kind
// KindNone leaves the key as it is. The result's epoch is ignored; its value must not change until
// fn is called again, or, if it is longer than page.InlineMax, until invokeAll returns. Workers
// call fn concurrently.
func invokeAll(ctx context.Context, in btree.MergeInput, sorted [][]byte, e keys.Epoch, fn func(key []byte, old btree.Version, found bool) btree.Version) (*btree.Result, error) {
	in.Invoke = func(entry btree.Entry, old btree.Version, found bool) btree.Entry {
		v := fn(entry.Key, old, found)
		return btree.Entry{Key: entry.Key, Value: v.Value, Trailer: keys.MakeTrailer(e, v.Kind), Large: v.Large}
	}
	return putAll(ctx, in, stamped(sorted, e, keys.KindSet))
}

// stamped makes entries without values of sorted keys.
func stamped(sorted [][]byte, e keys.Epoch, kind keys.Kind) []btree.Entry {
	entries := make([]btree.Entry, len(sorted))
	for i, k := range sorted {
		entries[i] = btree.Entry{Key: k, Trailer: keys.MakeTrailer(e, kind)}
	}
	return entries
}
