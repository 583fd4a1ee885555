//go:build !ablation

package btree

import "github.com/epochkv/epochkv/internal/storage/page"

// invoker is empty: only the baselines of bench merge functions of values.
type invoker struct{} //nolint:unused // the linter does not see the other build

func (invoker) invoke(*worker, *page.LeafLayout, int) {}
