package restore

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAnUnfinishedRestoreSaysSo: at every step of a restore its directory is one that a server refuses, and the finished one is not.
func TestAnUnfinishedRestoreSaysSo(t *testing.T) {
	b := newBench(t)
	b.commits(30)
	b.archived()
	dir := filepath.Join(t.TempDir(), "restored")
	steps := 0
	_, err := Run(t.Context(), Options{Store: b.target, Dir: dir, PageSize: 1024, Memory: 64 << 20, Lineage: b.lineage(), Progress: func(p Progress) {
		if p.Step == "plan" {
			return
		}
		steps++
		if err := CheckFinished(dir + partialSuffix); !errors.Is(err, ErrUnfinished) {
			t.Errorf("at the step %q: %v", p.Step, err)
		}
	}})
	check(t, err)
	if err := CheckFinished(dir); err != nil || steps < 2 {
		t.Errorf("after %d steps: %v", steps, err)
	}
}

// TestTheMarkIsRemovedAfterAllElse: when a restore that has failed is killed while it removes what it made, the rest has the mark.
func TestTheMarkIsRemovedAfterAllElse(t *testing.T) {
	dir := t.TempDir()
	check(t, markUnfinished(dir))
	for _, name := range []string{"A", "data.ekv", "wal"} {
		check(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	killed := errors.New("killed")
	for left := 3; ; left-- {
		removals := 0
		err := removeUnfinished(dir, func(name string) error {
			if removals++; removals > 1 {
				return killed
			}
			return os.RemoveAll(name)
		})
		entries, _ := os.ReadDir(dir)
		if left == 0 {
			if _, missing := os.Stat(dir); err != nil || !errors.Is(missing, fs.ErrNotExist) {
				t.Errorf("%v; %v", err, missing)
			}
			return
		}
		if !errors.Is(err, killed) || len(entries) != left || !errors.Is(CheckFinished(dir), ErrUnfinished) {
			t.Fatalf("%v; %d entries are left, with the mark: %v", err, len(entries), CheckFinished(dir))
		}
	}
}

// TestADirectoryThatGetsNoNameIsUnfinished: a file that has appeared in the data directory is not overwritten, and the disk may fail before the name is
// given. What is removed then has the mark.
func TestADirectoryThatGetsNoNameIsUnfinished(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "restored")
	for _, name := range []string{dir, dir + partialSuffix} {
		check(t, os.Mkdir(name, 0o700))
	}
	check(t, markUnfinished(dir+partialSuffix))
	other := filepath.Join(dir, "other")
	check(t, os.WriteFile(other, nil, 0o600))
	works, broken := vfs.NewOS().SyncDir, errors.New("broken")
	for _, sync := range []func(string) error{works, func(string) error { return broken }} {
		if err := giveName(dir+partialSuffix, dir, sync); err == nil || !errors.Is(CheckFinished(dir+partialSuffix), ErrUnfinished) {
			t.Errorf("%v; with the mark: %v", err, CheckFinished(dir+partialSuffix))
		}
	}
	check(t, os.Remove(other))
	check(t, giveName(dir+partialSuffix, dir, works))
	check(t, CheckFinished(dir))
}
