//go:build ablation

package btree

import "github.com/epochkv/epochkv/internal/storage/page"

// invoker makes a merge compute values from those that the tree has, in the same descent.
type invoker struct {
	// Invoke, if set, gets each entry of the input with the newest version that the tree has of its
	// key. It returns the entry to take instead, with the same key; the kind KindNone in its trailer
	// stands for no entry. Workers call it concurrently.
	Invoke func(e Entry, old Version, found bool) Entry
}

// invoke replaces the entry of the input by what Invoke makes of it and of the newest old version.
func (in invoker) invoke(w *worker, v *page.LeafLayout, i int) {
	if in.Invoke == nil {
		return
	}
	var old Version
	found := v != nil
	if found {
		_, t, value, large := v.At(i)
		old = Version{Epoch: t.Epoch(), Kind: t.Kind(), Large: large, Value: value}
	}
	w.in.entry = in.Invoke(w.in.entry, old, found)
}
