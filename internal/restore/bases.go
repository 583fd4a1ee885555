package restore

import (
	"context"
	"fmt"
	"time"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/backup"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
	"github.com/epochkv/epochkv/internal/vfs"
)

// basesOf are the backups in the directory of a history. Those that lack damaged pages, unless they are allowed, and those whose manifest cannot be
// read are left out: they hide no other.
func basesOf(ctx context.Context, store objectstore.Store, dir string, allowDamaged bool) (list []Base, out []leftOut, err error) {
	all, broken, err := backup.List(ctx, store, dir)
	if err != nil {
		return nil, nil, err
	}
	for _, m := range broken {
		out = append(out, leftOut{id: m.ID, epoch: m.Epoch, why: m, broken: m})
	}
	for _, m := range all {
		if len(m.Damaged) > 0 && !allowDamaged {
			out = append(out, leftOut{id: m.ID, epoch: m.Epoch(), why: fmt.Errorf("pages of the store were damaged when it was made, %d in all; --allow-damaged takes it", len(m.Damaged))})
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
	return list, out, nil
}
