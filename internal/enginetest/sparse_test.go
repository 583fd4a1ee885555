package enginetest

import (
	"errors"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/mvcc"
	"github.com/epochkv/epochkv/internal/storage"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
	"github.com/epochkv/epochkv/internal/wal"
)

// sparseCopy copies a store that is closed. What the data file has between and after its live pages becomes a hole, as in a file that was restored, and
// as programs that copy files make one of what was allocated and never written. There are more free pages than the reserve needs.
func sparseCopy(t *testing.T, from *vfs.Mem, more int64) *vfs.Mem {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	to := vfs.NewMem()
	must(to.MkdirAll(wal.Dir("db")))
	names, err := from.List(wal.Dir("db"))
	must(err)
	for _, name := range names {
		name = path.Join(wal.Dir("db"), name)
		must(copyInto(to, name, strings.NewReader(string(readFile(t, from, name)))))
	}
	state, err := storage.Files{FS: from, Dir: "db"}.OpenState()
	must(err)
	must(state.Pages.ReadMap())
	content, size := readFile(t, from, dataFile), state.Pages.PageSize()
	f, err := to.Open(dataFile, vfs.Create)
	must(err)
	for at := 0; at+size <= len(content); at += size {
		if id := page.ID(at / size); id < state.Pages.PageCount() && state.Pages.IsLive(id) {
			_, err := f.WriteAt(content[at:at+size], int64(at))
			must(err)
		}
	}
	must(f.Truncate(int64(len(content)) + more))
	must(errors.Join(f.Sync(), f.Close(), to.SyncDir("db"), state.Close()))
	return to
}

// TestASparseCopyHasItsReserve: a start allocates the blocks of free pages, before other files take the rest of the disk. Otherwise deletions could not
// be merged on a full disk, and nothing but space elsewhere would help.
func TestASparseCopyHasItsReserve(t *testing.T) {
	original := vfs.NewMem()
	s := mustOpen(t, reserving(original))
	want := map[string]string{}
	value := strings.Repeat("v", 1000)
	x := mustSession(t, s)
	for i := range 600 {
		if _, err := put(x, numbered(i), value, mvcc.DurabilityAsync); err != nil {
			t.Fatal(err)
		}
		want[numbered(i)] = value
	}
	x.Close()
	mustClose(t, s)

	disk := sparseCopy(t, original, 8<<20)
	s = mustOpen(t, reserving(disk))
	disk.LeaveFree(0)
	for i := 0; i < 600; i += 8 { // one in each leaf
		mustDelete(t, s, numbered(i))
		delete(want, numbered(i))
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		err := s.Checkpoint(t.Context())
		if err == nil {
			break
		}
		if !errors.Is(err, vfs.ErrNoSpace) || time.Now().After(deadline) {
			t.Fatalf("a checkpoint of deletions on a full disk: %v; pages %+v", err, s.Stats().Storage.Pages)
		}
	}
	if err := equalMaps(want, dump(t, s)); err != nil {
		t.Fatal(err)
	}
	disk.SetCapacity(0)
}
