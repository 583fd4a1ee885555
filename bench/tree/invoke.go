//go:build !ablation

package tree

import (
	"context"

	"github.com/epochkv/epochkv/internal/ablation"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/btree"
)

// invokeAll needs the baseline of a build with the tag ablation.
func invokeAll(context.Context, btree.MergeInput, [][]byte, keys.Epoch, func([]byte, btree.Version, bool) btree.Version) (*btree.Result, error) {
	return nil, ablation.ErrNotBuilt
}
