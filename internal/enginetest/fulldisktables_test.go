package enginetest

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestTablesThatAreRebuiltOnAFullDisk: a start on a full disk cannot read the tables of the data file. It takes deletions, and the next one, too,
// until there is space.
func TestTablesThatAreRebuiltOnAFullDisk(t *testing.T) {
	testseed.SkipUnderRace(t)
	fs := vfs.NewMem()
	fs.SetCapacity(fullDiskBytes)
	s, want := mustOpen(t, reserving(fs)), map[string]string{}
	for i := range 20 {
		want[fmt.Sprintf("large%02d", i)] = strings.Repeat(fmt.Sprint(i%10), 5000+500*i)
		mustPut(t, s, fmt.Sprintf("large%02d", i), want[fmt.Sprintf("large%02d", i)])
		mustCheckpoint(t, s)
	}
	_ = fillDisk(t, s, want)
	mustClose(t, s)
	p, err := pager.Open(fs, dataFile, pager.Options{})
	if err != nil {
		t.Fatal(err)
	}
	roots := []page.ID{p.MapRoot(), p.Blobs().Table.Page}
	_ = p.Close()
	faulty := vfs.NewFaulty(fs)
	for _, id := range roots {
		faulty.Inject(vfs.Rule{Op: vfs.OpRead, Name: "data.ekv", Fault: vfs.Unreadable, Bytes: int(id) * p.PageSize(), Err: syscall.EIO})
	}
	o := reserving(fs)
	o.Storage.FS, o.Storage.StartPatience = faulty, time.Millisecond
	if s = mustOpen(t, o); len(s.Recovery().Repaired) != 2 {
		t.Fatalf("repaired %q, incomplete %q", s.Recovery().Repaired, s.Recovery().Incomplete)
	}
	for i := range 40 {
		mustDelete(t, s, numbered(i*17))
		delete(want, numbered(i*17))
	}
	mustHold(t, s, want)
	fs = fs.Crash(1, vfs.SurviveAll)
	_ = s.Close()
	s = mustOpen(t, reserving(fs))
	mustHold(t, s, want)
	mustDeleteRange(t, s, want, numbered(0), numbered(1500))
	awaitSpace(t, s, "later")
	want["later"] = "v"
	mustHold(t, s, want)
	mustVerify(t, s)
	mustClose(t, s)
}
