package archive

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/objectstore"
)

// leaseEvery is how often a lease is renewed. What deletes objects waits until the newest lease object is several times older.
const leaseEvery = time.Minute

// Lease keeps backups and the archive of a history from being deleted while a restore reads them. It is an object under restores in the history's
// directory; objects are never replaced, so each renewal creates another one and deletes the one before.
type Lease struct {
	store objectstore.Store
	dir   string // of the history
	id    string
	n     int
	every time.Duration
}

// TakeLease takes a lease on what the directory of a history has. Keep renews and ends it.
func TakeLease(ctx context.Context, store objectstore.Store, dir string) (*Lease, error) {
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails: it ends the program instead
	l := &Lease{store: store, dir: dir, id: hex.EncodeToString(id[:]), every: leaseEvery}
	return l, l.create(ctx)
}

func (l *Lease) name() string { return path.Join(l.dir, restoresDir, fmt.Sprintf("%s-%d", l.id, l.n)) }

func (l *Lease) create(ctx context.Context) error {
	if err := objectstore.CreateOwn(ctx, l.store, l.name(), objectstore.Bytes("a restore reads this archive\n")); err != nil {
		return fmt.Errorf("take the lease of a restore: %w", err)
	}
	return nil
}

// Keep renews the lease until the context ends, and then deletes it. Without a renewal for several intervals, the restore must end:
// what it reads may be deleted.
func (l *Lease) Keep(ctx context.Context, lost context.CancelCauseFunc) {
	const attemptsMax = 3
	failures := 0
	for ctx.Err() == nil {
		sleep(ctx, l.every)
		if ctx.Err() != nil {
			break
		}
		before := l.name()
		l.n++
		if err := l.create(ctx); err != nil {
			if failures++; failures == attemptsMax {
				lost(err)
			}
			continue
		}
		failures = 0
		_ = l.store.Delete(ctx, before) // one that is left ends by its age
	}
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), flushTimeout)
	defer cancel()
	_ = l.store.Delete(end, l.name()) // the same
}

// Lineages are the histories of which a store of objects has anything, in ascending order.
func Lineages(ctx context.Context, store objectstore.Store) (all []keys.Lineage, err error) {
	err = store.List(ctx, "", func(o objectstore.Object) error {
		name, _, _ := strings.Cut(o.Name, "/")
		raw, err := hex.DecodeString(name)
		if err == nil && len(raw) == len(keys.Lineage{}) && !slices.Contains(all, keys.Lineage(raw)) {
			all = append(all, keys.Lineage(raw))
		}
		return nil
	})
	return all, err
}

// BeginsAtFirstEpoch reports whether the archive of a lineage has the first epoch of its store, so that a store without a commit is a
// base.
func BeginsAtFirstEpoch(ctx context.Context, store objectstore.Store, lineage keys.Lineage) (bool, error) {
	p := place{store, lineage}
	list, err := p.files(ctx)
	return len(list) > 0 && list[0].first == 1, err
}
