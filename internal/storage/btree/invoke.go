//go:build !ablation

package btree

import "github.com/epochkv/epochkv/internal/storage/page"

// invoker is empty: only the baselines of bench merge functions of values.
type invoker struct{}

func (invoker) invoke(*worker, *page.LeafLayout, int) {}
