package restore

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/epochkv/epochkv/internal/archive"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
)

// TestSecondRestoreIntoADirectoryIsRefused: of two restores into one directory, whatever the form of its name, one makes it, and the
// other one changes nothing.
func TestSecondRestoreIntoADirectoryIsRefused(t *testing.T) {
	b := newBench(t)
	b.commits(30)
	b.archived()
	for _, step := range []string{"base", "clean and verify"} {
		dir := filepath.Join(t.TempDir(), "restored")
		o := Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()}
		second := o
		second.Dir += "/"
		var refused error
		o.Progress = func(p Progress) {
			if p.Step == step {
				_, refused = Run(t.Context(), second)
			}
		}
		r, err := Run(t.Context(), o)
		check(t, err)
		if !errors.Is(refused, ErrDirNotEmpty) {
			t.Errorf("a restore at the step %q of another one: %v", step, refused)
		}
		s, err := mvcc.Open(mvcc.Options{Storage: storage.Options{Dir: dir, PageSize: 1024, MemoryBytes: 64 << 20}})
		check(t, err)
		if got := contents(t, s); got != hash(b.now) || s.ID() != r.StoreID {
			t.Errorf("a restore beside another one made a store with another state")
		}
		check(t, s.Close())
	}
}

// TestRestoredDirectoryIsTheOneThatWasWritten: if another program takes the place of the unfinished directory, there is no restored
// store, and not an empty one.
func TestRestoredDirectoryIsTheOneThatWasWritten(t *testing.T) {
	b := newBench(t)
	b.commits(30)
	b.archived()
	dir := filepath.Join(t.TempDir(), "restored")
	_, err := Run(t.Context(), Options{Store: b.target, Dir: dir, Target: archive.Target{}, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage(), Progress: func(p Progress) {
		if p.Step == "clean and verify" {
			check(t, os.RemoveAll(dir+partialSuffix))
		}
	}})
	if err == nil {
		t.Fatal("the unfinished directory was removed, and the restore was successful")
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("there is a restored directory: %v", err)
	}
}

// TestDirectoryThatCannotBeReplacedIsRefusedAtOnce: a symbolic link and a directory that is in use are found out before the restore.
func TestDirectoryThatCannotBeReplacedIsRefusedAtOnce(t *testing.T) {
	b := newBench(t)
	b.commits(1)
	b.archived()
	link := filepath.Join(t.TempDir(), "link")
	check(t, os.Symlink(t.TempDir(), link))
	for _, dir := range []string{link, "/proc"} {
		_, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage(), Progress: func(p Progress) {
			if p.Step != "plan" {
				t.Errorf("%s: the restore is at %s", dir, p.Step)
			}
		}})
		if !errors.Is(err, ErrDirNotEmpty) {
			t.Errorf("%s: %v", dir, err)
		}
	}
}

// TestARestoreByRootBelongsToTheOwnerOfTheDirectory that it replaces, or else of the one that it is in: the server of another account
// opens what is restored.
func TestARestoreByRootBelongsToTheOwnerOfTheDirectory(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root creates files for others")
	}
	b := newBench(t)
	b.commits(3)
	b.archived()
	const account = 61234
	parent := t.TempDir()
	empty := filepath.Join(parent, "empty")
	check(t, os.Mkdir(empty, 0o700))
	check(t, os.Chown(empty, account, account))
	owned := t.TempDir()
	check(t, os.Chown(owned, account, account))
	for _, dir := range []string{empty, filepath.Join(owned, "new"), filepath.Join(owned, "deeper", "new")} {
		_, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage()})
		check(t, err)
		check(t, filepath.WalkDir(dir, func(name string, _ os.DirEntry, err error) error {
			check(t, err)
			info, err := os.Lstat(name)
			check(t, err)
			if uid := info.Sys().(*syscall.Stat_t).Uid; uid != account {
				t.Errorf("%s belongs to %d", name, uid)
			}
			return nil
		}))
	}
}
