package restore

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/storage"
)

// The size of the pages bounds the keys of a store. A backup has that of the original. A store that is made of the archive alone takes it from the
// archive or, if that began before it was noted there, from any backup. Without one, sizes are tried until all keys fit.

// pageSizeTried is the first size: that of most stores.
const pageSizeTried = 8192

// errSmallPages means that the tree has refused keys, which would be in quarantine in the restored store.
var errSmallPages = errors.New("restore: keys of the archive are too long for the pages")

// emptyBase is a store without a commit; its page size is zero if nothing says that of the original.
func emptyBase(ctx context.Context, o *Options, bases []Base) (Base, error) {
	size := o.PageSize
	if size == 0 {
		noted, err := archive.PageSizeOf(ctx, o.Store, o.Lineage)
		if err != nil {
			return Base{}, err
		}
		if storage.ValidPageSize(noted) {
			size = noted
		}
	}
	if size == 0 && len(bases) > 0 {
		size = bases[0].PageSize
	}
	return Base{PageSize: size}, nil
}

// pageSize is that of the restored store.
func (o *Options) pageSize(b *Base) int { return cmp.Or(b.PageSize, o.tried, pageSizeTried) }

// checkKeys returns an error if keys did not fit pages of a size that is only tried.
func (o *Options) checkKeys(b *Base, quarantined int) error {
	if b.PageSize == 0 && quarantined > 0 && o.pageSize(b) < storage.PageSizeMax {
		return errSmallPages
	}
	return nil
}

// triesLarger reports whether a restore failed because of pages that are too small, and is tried again with larger ones.
func (o *Options) triesLarger(b *Base, err error) bool {
	size := o.pageSize(b)
	if b.PageSize != 0 || size >= storage.PageSizeMax || !errors.Is(err, errSmallPages) && !errors.Is(err, storage.ErrQuarantineFull) {
		return false
	}
	o.tried = 2 * size
	o.Progress(Progress{Step: fmt.Sprintf("keys are too long for pages of %d bytes, and nothing says which the store had: pages of %d bytes are tried", size, o.tried)})
	return true
}
