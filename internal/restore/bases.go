package restore

import (
	"context"
	"errors"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// Bases are the backups in the directory of a history, without those that lack damaged pages unless they are allowed. A manifest that cannot be read hides no other
// backup.
func Bases(ctx context.Context, store objectstore.Store, dir string, allowDamaged bool) ([]Base, error) {
	all, broken, err := backup.List(ctx, store, dir)
	if err != nil {
		return nil, err
	}
	if len(all) == 0 && len(broken) > 0 {
		return nil, errors.Join(broken...)
	}
	var list []Base
	for _, m := range all {
		if len(m.Damaged) > 0 && !allowDamaged {
			continue
		}
		p := archive.Point{Epoch: keys.Epoch(m.State.Epoch), Term: keys.Term(m.State.Term)}
		if m.State.CommitTimeUs != 0 {
			p.Time = time.UnixMicro(m.State.CommitTimeUs)
		}
		list = append(list, Base{Point: p, ID: m.ID, PageSize: m.State.PageSize, Write: func(ctx context.Context, dir string) error {
			return backup.RestoreBase(ctx, store, m, vfs.NewOS(), dir, backup.RestoreOptions{AllowDamaged: allowDamaged})
		}})
	}
	return list, nil
}
