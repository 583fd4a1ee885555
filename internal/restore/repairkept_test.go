package restore

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestARepairOfWhatTheTreeHasBreaksTheArchive: the tree has commits that are not in the archive, the store is killed, a record of one of them is damaged, and the log
// is repaired. The store still has them; so the archive does not link what follows to what it has, and a restore says what is missing.
func TestARepairOfWhatTheTreeHasBreaksTheArchive(t *testing.T) {
	for _, archived := range []int{8, 28} {
		t.Run(fmt.Sprint(archived, " of 28 are archived"), func(t *testing.T) {
			b := newBench(t)
			b.commits(archived)
			b.archived()
			end := b.arch.Status().Archived
			b.stop()
			b.commits(28 - archived)
			check(t, b.store.Checkpoint(t.Context()))
			tree := b.store.Stats().Storage.Tree.Epoch
			killed := filepath.Join(t.TempDir(), "db")
			check(t, os.CopyFS(killed, os.DirFS(b.dir)))
			check(t, b.store.Close())
			b.dir = killed
			b.damageRecord(13)
			if s, err := mvcc.Open(b.options(b.dir)); err == nil {
				check(t, s.Close())
				t.Fatal("started with a damaged record")
			}
			dropped, err := inspect.RepairLog(vfs.NewOS(), b.dir)
			if err != nil || dropped.Cause == nil || dropped.From != tree+1 || dropped.Cause.Epoch != 13 {
				t.Errorf("the tree is at epoch %d: %+v, %v", tree, dropped, err)
			}
			b.open()
			b.commits(3)
			b.archived()
			if s := b.arch.Status(); s.Err != nil || s.Breaks != 1 || s.Break == nil || s.Break.First <= end || s.Break.First > tree+1 {
				t.Fatalf("archived up to epoch %d of %d, and then: %+v", end, tree, s)
			}
			for _, of := range []func() error{
				func() error { _, _, err := b.replayed(archive.Point{}, archive.Target{}); return err },
				func() error { _, _, err := b.restore(archive.Target{}); return err },
			} {
				if missing, is := errors.AsType[*archive.MissingError](of()); !is || missing.From > tree+1 {
					t.Errorf("the newest state of an archive without some commits: %v", of())
				}
			}
		})
	}
}
