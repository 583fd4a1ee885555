package pagesource

import (
	"errors"

	"github.com/epochkv/epochkv/internal/storage/blob"
	"github.com/epochkv/epochkv/internal/storage/btree"
	"github.com/epochkv/epochkv/internal/storage/pager"
)

// IsDamage reports whether an error says that a page is damaged, and not that it could not be read.
func IsDamage(err error) bool {
	for _, kind := range []error{pager.ErrCorrupt, pager.ErrBroken, pager.ErrTruncated, btree.ErrStructure, blob.ErrBadRef, blob.ErrAccounts} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}
