package tree

import (
	"context"

	"github.com/epochkv/epochkv/internal/storage/btree"
)

// putAll merges entries, sorted by key and then newest first, instead of in's Input. Neighbours share one descent, and each page
// is read and written once.
func putAll(ctx context.Context, in btree.MergeInput, entries []btree.Entry) (*btree.Result, error) {
	in.Input = func() btree.Input { return &btree.SliceInput{Entries: entries} }
	return btree.Merge(ctx, &in)
}
