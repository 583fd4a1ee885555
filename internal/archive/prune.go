package archive

import (
	"context"
	"encoding/hex"
	"maps"
	"path"
	"slices"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// Pruned is what Prune has deleted, or would delete.
type Pruned struct {
	Files   int // with those that have entries of bulk loads
	Bytes   int64
	Through keys.Epoch // the last epoch that was deleted; zero if none was
}

// PruneBefore is Prune for backup.PruneOptions: of the history whose backups a directory of the target has. It is nil if the directory is
// not named after a history: a store of the oldest feature level has no archive.
func PruneBefore(store objectstore.Store, dir string, dryRun bool, r *Pruned) func(ctx context.Context, oldest keys.Epoch) error {
	raw, err := hex.DecodeString(dir)
	if err != nil || len(raw) != len(keys.Lineage{}) {
		return nil
	}
	return func(ctx context.Context, oldest keys.Epoch) (err error) {
		*r, err = Prune(ctx, store, keys.Lineage(raw), oldest, dryRun)
		return err
	}
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
	gone := map[string]bool{}
	for i, f := range old {
		if i == len(old)-1 || f.last == newest {
			break
		}
		gone[f.name] = true
		if !dryRun {
			if err := store.Delete(ctx, f.name); err != nil {
				return r, err
			}
		}
		r.Files, r.Bytes, r.Through = r.Files+1, r.Bytes+f.size, max(r.Through, f.last)
	}
	stays := newest
	for _, f := range all {
		if !gone[f.name] {
			stays = min(stays, f.first)
		}
	}
	return r, p.pruneLoads(ctx, stays, dryRun, &r)
}

// pruneLoads deletes the entries of the bulk loads before the first epoch that stays.
func (p *place) pruneLoads(ctx context.Context, first keys.Epoch, dryRun bool, r *Pruned) error {
	objects, err := p.runs(ctx)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(objects)) {
		epoch, ok := parseRunName(path.Base(name))
		if !ok || epoch >= first {
			continue
		}
		if !dryRun {
			if err := p.store.Delete(ctx, name); err != nil {
				return err
			}
		}
		r.Files, r.Bytes = r.Files+1, r.Bytes+objects[name]
	}
	return nil
}
