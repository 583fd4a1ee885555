package inspect

import (
	"github.com/epochkv/epochkv/internal/storage/page"
)

// keyCounter follows keys across leaves, so that a key whose versions fill several counts once.
type keyCounter struct {
	key   []byte // internal key of the last entry
	known bool
	bytes uint64 // keys and inline values of all versions
}

// add takes entry i of a leaf and reports whether it is its key's newest version.
func (k *keyCounter) add(v *page.LeafLayout, i int) bool {
	suffix, _, value, _ := v.At(i)
	newest := false
	if i == 0 || len(suffix) > 0 {
		n := len(v.Prefix())
		same := k.known && len(k.key) == n+len(suffix) && string(k.key[:n]) == string(v.Prefix()) && string(k.key[n:]) == string(suffix)
		k.key = append(append(k.key[:0], v.Prefix()...), suffix...)
		k.known, newest = true, !same
	}
	k.bytes += uint64(len(k.key) + len(value))
	return newest
}

// interrupt says that entries were left out.
func (k *keyCounter) interrupt() { k.known = false }

// skip says that newer versions of key were left out.
func (k *keyCounter) skip(key []byte) { k.key, k.known = append(k.key[:0], key...), true }
