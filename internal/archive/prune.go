package archive

import (
	"context"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// Pruned is what Prune has deleted, or would delete.
type Pruned struct {
	Files   int
	Bytes   int64
	Through keys.Epoch // the last epoch that was deleted; zero if none was
}

// Prune deletes the files that no restore from a backup of an epoch, or of a later one, needs, the oldest first. The file before those
// stays, as the base is compared with it, and so does the newest one, after which the archiver goes on.
func Prune(ctx context.Context, store objectstore.Store, lineage keys.Lineage, oldest keys.Epoch, dryRun bool) (r Pruned, err error) {
	p := place{store, lineage}
	all, err := p.files(ctx)
	if err != nil {
		return r, err
	}
	var old []file
	newest := keys.Epoch(0)
	for _, f := range all {
		newest = max(newest, f.last)
		if f.last < oldest {
			old = append(old, f)
		}
	}
	for i, f := range old {
		if i == len(old)-1 || f.last == newest {
			break
		}
		if !dryRun {
			if err := store.Delete(ctx, f.name); err != nil {
				return r, err
			}
		}
		r.Files, r.Bytes, r.Through = r.Files+1, r.Bytes+f.size, max(r.Through, f.last)
	}
	return r, nil
}
