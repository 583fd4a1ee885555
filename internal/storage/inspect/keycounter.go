package inspect

import (
	"github.com/epochkv/epochkv/internal/storage/page"
)

// keyCounter follows keys across leaves, so that a key with versions in several leaves counts once.
type keyCounter struct {
	key   []byte // internal key of the last entry
	valid bool   // key is the key before the next entry
	bytes uint64 // keys and inline values of all versions
}

// add takes entry i of a leaf and reports whether it is its key's newest version.
func (k *keyCounter) add(v *page.LeafLayout, i int) bool {
	suffix, _, value, _ := v.At(i)
	newest := false
	if i == 0 || len(suffix) > 0 {
		n := len(v.Prefix())
		same := k.valid && len(k.key) == n+len(suffix) && string(k.key[:n]) == string(v.Prefix()) && string(k.key[n:]) == string(suffix)
		k.key = append(append(k.key[:0], v.Prefix()...), suffix...)
		k.valid, newest = true, !same
	}
	k.bytes += uint64(len(k.key) + len(value))
	return newest
}

// interrupt must be called where entries were left out.
func (k *keyCounter) interrupt() { k.valid = false }

// skip must be called where newer versions of key were left out.
func (k *keyCounter) skip(key []byte) { k.key, k.valid = append(k.key[:0], key...), true }
