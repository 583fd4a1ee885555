package enginetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/feed"
	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage/inspect"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAWatchIsToldOfARepairOfWhatTheTreeHas: the tree has twelve commits. One bit of the record of the seventh flips,
// the start is refused, and the log is repaired. Nothing of the tree is lost, and a watch that comes back before or among the commits that
// the log does not have any more is told so.
func TestAWatchIsToldOfARepairOfWhatTheTreeHas(t *testing.T) {
	fs := vfs.NewMem()
	o := keptLog(fs)
	s := mustOpen(t, o)
	value := strings.Repeat("v", 300)
	var epochs []keys.Epoch
	for i := range 12 {
		epochs = append(epochs, mustPut(t, s, fmt.Sprintf("k%02d", i), fmt.Sprintf("value-%02d-", i)+value))
	}
	if err := s.Checkpoint(context.Background()); err != nil {
		t.Fatal(err)
	}
	tree := s.Stats().Storage.Tree.Epoch
	o.Storage.FS = fs.Crash(1, vfs.SurviveAll)
	_ = s.Close()
	flipInFiles(t, o.Storage.FS, "value-06-")
	if s, err := mvcc.Open(o); err == nil {
		mustClose(t, s)
		t.Fatal("started with a damaged record")
	}
	dropped, err := inspect.RepairLog(o.Storage.FS, "db")
	if err != nil || dropped.Cause == nil || dropped.From != tree+1 || dropped.Cause.Epoch != epochs[6] {
		t.Errorf("the tree is at epoch %d: %+v, %v", tree, dropped, err)
	}
	s = mustOpen(t, o)
	defer mustClose(t, s)
	if all := dump(t, s); len(all) != 12 || all["k11"] != "value-11-"+value {
		t.Fatalf("%d keys", len(all))
	}
	x := mustSession(t, s)
	defer x.Close()
	for _, i := range []int{6, 11} {
		var gone *mvcc.SnapshotGoneError
		if _, err := x.OpenSnapshot(epochs[i]); !errors.As(err, &gone) || gone.Missing != (keys.EpochRange{}) {
			t.Errorf("a snapshot of a commit that is there: %v", err)
		}
	}
	last := mustPut(t, s, "z", "after")
	for _, i := range []int{4, 5, 6, 10} {
		f, c := feedOf(t, s)
		watchAfter(t, c, epochs[i])
		for got := epochs[i]; ; {
			d := nextDelivery(t, c)
			if gap, told := errors.AsType[*feed.GapError](d.Err); told {
				if got > epochs[max(i, 5)] || gap.ResumeAt < tree {
					t.Errorf("after commit %d: told after epoch %d: %v, %+v", i, got, gap, gap)
				}
				break
			}
			if got = d.Position.Epoch; d.Err != nil || got > epochs[5] {
				t.Fatalf("after commit %d, at epoch %d of %d: %v", i, got, last, d.Err)
			}
		}
		f.Close()
	}
	f, c := feedOf(t, s)
	defer f.Close()
	watchAfter(t, c, epochs[11])
	if got := deliveredKeys(t, c, last); len(got) != 1 || got[0] != "z" {
		t.Errorf("after the newest commit of the tree: %q", got)
	}
}

// flipInFiles changes a bit after a text, wherever the files of the log have it.
func flipInFiles(t *testing.T, fs vfs.FS, text string) {
	t.Helper()
	found := false
	for _, name := range segmentNames(mustRead(t, fs)) {
		f, err := fs.Open(name, vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		size, err := f.Size()
		all := make([]byte, size)
		if err == nil {
			_, err = f.ReadAt(all, 0)
		}
		if at := strings.Index(string(all), text); err == nil && at >= 0 {
			at, found = at+len(text), true
			_, err = f.WriteAt([]byte{all[at] ^ 4}, int64(at))
		}
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if !found {
		t.Fatalf("no file has %q", text)
	}
}
