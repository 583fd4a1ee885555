package vfs

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// faultyFileOf is a file of 4 sectors of '.', on a Faulty over a Mem.
func faultyFileOf(t *testing.T) (*Faulty, *Mem, File) {
	m := NewMem()
	faulty := NewFaulty(m)
	f := mustCreate(t, faulty, "dir.log", strings.Repeat(".", 4*sectorSize))
	mustSync(t, f)
	mustSyncDir(t, m, ".")
	return faulty, m, f
}

func TestRuleFiresByOperationNameAndOccurrence(t *testing.T) {
	faulty, _, f := faultyFileOf(t)
	other := mustCreate(t, faulty, "other", "")
	third := faulty.Inject(Rule{Op: OpSyncData, Name: "*.log", Nth: 3})
	for i := 1; i <= 5; i++ {
		mustSync(t, other)
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
		if err := f.SyncData(); (err != nil) != (i == 3) || i == 3 && !errors.Is(err, syscall.EIO) {
			t.Errorf("sync %d: %v", i, err)
		}
	}
	if third.Fired() != 1 {
		t.Errorf("Fired() = %d", third.Fired())
	}
	sticky := faulty.Inject(Rule{Op: OpAnySync, Nth: 2, Sticky: true, Err: syscall.ENOSPC})
	for i := 1; i <= 4; i++ {
		if err := f.Sync(); (err != nil) != (i >= 2) || i >= 2 && !errors.Is(err, ErrNoSpace) {
			t.Errorf("sync %d: %v", i, err)
		}
	}
	sticky.Remove()
	mustSync(t, f)
}

func TestEveryOperationCanFail(t *testing.T) {
	faulty, m, f := faultyFileOf(t)
	lock, err := faulty.Lock("LOCK")
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, lock)
	calls := map[Op]func() error{
		OpOpen:        func() error { _, err := faulty.Open("dir.log", ReadOnly); return err },
		OpCreate:      func() error { _, err := faulty.Open("new", Create); return err },
		OpRead:        func() error { _, err := f.ReadAt(make([]byte, 1), 0); return err },
		OpWrite:       func() error { _, err := f.WriteAt(make([]byte, 1), 0); return err },
		OpTruncate:    func() error { return f.Truncate(1) },
		OpPreallocate: func() error { return f.Preallocate(1 << 20) },
		OpSync:        f.Sync,
		OpSyncData:    f.SyncData,
		OpRename:      func() error { return faulty.Rename("dir.log", "x") },
		OpRemove:      func() error { return faulty.Remove("dir.log") },
		OpMkdir:       func() error { return faulty.MkdirAll("d") },
		OpSyncDir:     func() error { return faulty.SyncDir(".") },
		OpList:        func() error { _, err := faulty.List("."); return err },
		OpSize:        func() error { _, err := faulty.Size("dir.log"); return err },
		OpLock:        func() error { _, err := faulty.Lock("LOCK2"); return err },
		OpFree:        func() error { _, err := faulty.Free("."); return err },
		OpClose:       func() error { return f.Close() },
	}
	before := m.Mutations()
	for op := OpOpen; op < opEnd; op <<= 1 {
		rule := faulty.Inject(Rule{Op: op})
		wantError(t, op.String(), calls[op](), syscall.EIO)
		if rule.Fired() != 1 {
			t.Errorf("%v: Fired() = %d", op, rule.Fired())
		}
		rule.Remove()
	}
	if m.Mutations() != before {
		t.Error("a failed operation was done")
	}
	if f.Close() == nil {
		t.Error("a failed Close left the file open")
	}
}

func TestFaultsChangeTransfersAsDocumented(t *testing.T) {
	faulty, _, f := faultyFileOf(t)
	data := bytes.Repeat([]byte("x"), 4*sectorSize)
	buf := make([]byte, len(data))
	shape := func() string {
		if _, err := f.ReadAt(buf, 0); err != nil {
			t.Fatal(err)
		}
		return string([]byte{buf[0], buf[sectorSize], buf[2*sectorSize], buf[3*sectorSize]})
	}

	rule := faulty.Inject(Rule{Op: OpWrite, Fault: Torn})
	if n, err := f.WriteAt(data, 0); n != 0 || err == nil || shape() != ".x.x" {
		t.Errorf("torn write: %d, %v, %s", n, err, shape())
	}
	rule.Remove()

	rule = faulty.Inject(Rule{Op: OpWrite, Fault: Short, Bytes: sectorSize, Err: io.ErrShortWrite})
	if n, err := f.WriteAt(data, 0); n != sectorSize || !errors.Is(err, io.ErrShortWrite) || shape() != "xx.x" {
		t.Errorf("short write: %d, %v, %s", n, err, shape())
	}
	rule.Remove()

	rule = faulty.Inject(Rule{Op: OpWrite, Fault: LostSync})
	if n, err := f.WriteAt(data, 0); n != len(data) || err != nil || shape() != "xx.x" {
		t.Errorf("lost write: %d, %v, %s", n, err, shape())
	}
	rule.Remove()

	rule = faulty.Inject(Rule{Op: OpRead, Fault: FlipBit, Bytes: 2 * sectorSize})
	if got := shape(); got != "xx/x" {
		t.Errorf("flipped bit: %s", got)
	}
	rule.Remove()

	rule = faulty.Inject(Rule{Op: OpRead, Fault: Short, Bytes: 7, Err: io.ErrUnexpectedEOF})
	if n, err := f.ReadAt(buf, 0); n != 7 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("short read: %d, %v", n, err)
	}
	rule.Remove()

	faulty.Inject(Rule{Fault: Slow, Delay: 20 * time.Millisecond})
	if start := time.Now(); shape() == "" || time.Since(start) < 20*time.Millisecond {
		t.Error("no delay")
	}
}

func TestLostSyncReportsSuccessAndACrashLosesTheData(t *testing.T) {
	faulty, m, f := faultyFileOf(t)
	rule := faulty.Inject(Rule{Op: OpAnySync, Fault: LostSync})
	mustWrite(t, f, "acknowledged", 0)
	mustSync(t, f)
	if rule.Fired() != 1 {
		t.Fatal("the sync was not lost")
	}
	if got := contents(t, m.Crash(0, SurviveNone), "dir.log"); strings.Contains(got, "acknowledged") {
		t.Error("a lost sync made its file durable")
	}
}

func TestBatchFaultAffectsItsRequestOnly(t *testing.T) {
	faulty, _, f := faultyFileOf(t)
	faulty.Inject(Rule{Op: OpWrite, Nth: 2})
	reqs := make([]Request, 4)
	for i := range reqs {
		reqs[i] = Request{Buf: []byte("abcd"[i : i+1]), Offset: int64(i)}
	}
	err := f.WriteBatch(reqs)
	wantError(t, "batch", err, syscall.EIO)
	for i := range reqs {
		if (reqs[i].Err != nil) != (i == 1) {
			t.Errorf("request %d: %v", i, reqs[i].Err)
		}
	}
	buf := make([]byte, 5)
	if _, err := f.ReadAt(buf, 0); err != nil || string(buf) != "a.cd." {
		t.Errorf("after the batch: %q, %v", buf, err)
	}
}

// TestADroppedCacheShowsNoDiscardedPages: they read as they are on the disk. What is to be written stays.
func TestADroppedCacheShowsNoDiscardedPages(t *testing.T) {
	fs := NewFaulty(NewMem())
	f, err := fs.Open("file", Create)
	if err != nil {
		t.Fatal(err)
	}
	write := func(text string, block int64) {
		t.Helper()
		if _, err := f.WriteAt([]byte(text), block*memBlockSize); err != nil {
			t.Fatal(err)
		}
	}
	write("old", 0)
	write("old", 1)
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	fs.Inject(Rule{Op: OpSyncData, Fault: DiscardDirty, Nth: 1})
	for _, block := range []int64{0, 1, 3} {
		write("new", block)
	}
	if err := f.SyncData(); err == nil {
		t.Fatal("the sync did not fail")
	}
	write("x", 1) // a page is dirty as a whole
	write("new", 4)
	f.DropCache()
	f.DropCache()
	for block, want := range map[int64]string{0: "old", 1: "xew", 3: "\x00\x00\x00", 4: "new"} {
		got := make([]byte, 3)
		if _, err := f.ReadAt(got, block*memBlockSize); err != nil || string(got) != want {
			t.Errorf("block %d is %q, %v; want %q", block, got, err, want)
		}
	}
}

// TestDiscardedPagesReadAsWrittenAndAreLostInACrash: a later sync does not write the pages that a failed sync discarded,
// unless they are written again.
func TestDiscardedPagesReadAsWrittenAndAreLostInACrash(t *testing.T) {
	for _, again := range []bool{false, true} {
		mem := NewMem()
		fs := NewFaulty(mem)
		f, err := fs.Open("file", Create)
		if err != nil {
			t.Fatal(err)
		}
		write := func(text string, off int64) {
			t.Helper()
			if _, err := f.WriteAt([]byte(text), off); err != nil {
				t.Fatal(err)
			}
		}
		write("one", 0)
		if err := errors.Join(f.Sync(), fs.SyncDir(".")); err != nil {
			t.Fatal(err)
		}
		rule := fs.Inject(Rule{Op: OpSyncData, Fault: DiscardDirty, Nth: 1})
		write("two", 0)
		write("far", 3*memBlockSize)
		if err := f.SyncData(); !errors.Is(err, syscall.EIO) || rule.Fired() != 1 {
			t.Fatal(err)
		}
		if again {
			write("t", 0) // a page is dirty as a whole
		}
		write("new", 5*memBlockSize)
		if err := f.SyncData(); err != nil {
			t.Fatal(err)
		}
		read := func(fs FS, off int64) string {
			t.Helper()
			f, err := fs.Open("file", ReadOnly)
			if err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 3)
			if _, err := f.ReadAt(b, off); err != nil {
				t.Fatal(err)
			}
			return string(b)
		}
		if got := read(mem, 0) + read(mem, 3*memBlockSize); got != "twofar" {
			t.Fatalf("before the crash: %q", got)
		}
		after := mem.Crash(1, SurviveAll)
		want := map[bool]string{false: "one", true: "two"}[again] + "\x00\x00\x00" + "new"
		if got := read(after, 0) + read(after, 3*memBlockSize) + read(after, 5*memBlockSize); got != want {
			t.Fatalf("after the crash: %q, want %q", got, want)
		}
	}
}

func TestEveryErrnoReachesTheCaller(t *testing.T) {
	for _, errno := range Errnos() {
		faulty := NewFaulty(NewMem())
		faulty.Inject(Rule{Op: OpCreate, Err: errno})
		_, err := faulty.Open("a", Create)
		full := errno == syscall.ENOSPC || errno == syscall.EDQUOT
		if !errors.Is(err, errno) || errors.Is(err, ErrNoSpace) != full {
			t.Errorf("%v: %v", errno, err)
		}
	}
}

// TestPreallocateWithoutFallocateWritesZeros: a file system that cannot allocate gets the same files, and after an error the old length.
func TestPreallocateWithoutFallocateWritesZeros(t *testing.T) {
	for name, allocate := range map[string]func(File, int64) error{"plain": Preallocate, "zeroed": func(f File, size int64) error { return PreallocateZeroed(f, size, nil) }} {
		mem := NewMem()
		faulty := NewFaulty(mem)
		faulty.Inject(Rule{Op: OpPreallocate, Err: syscall.EOPNOTSUPP})
		f, err := faulty.Open("a", Create)
		if err != nil {
			t.Fatal(err)
		}
		const size = 3<<20 + 4096
		mem.SetCapacity(1 << 20)
		if err := allocate(f, size); !errors.Is(err, ErrNoSpace) {
			t.Fatalf("%s on a full device: %v", name, err)
		}
		mem.SetCapacity(0)
		if err := f.Truncate(0); err != nil {
			t.Fatal(err)
		}
		if err := allocate(f, size); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if n, err := f.Size(); err != nil || n != size {
			t.Fatalf("%s: %d bytes, %v", name, n, err)
		}
	}
}

// TestAFailedSyncOfADirectoryLosesItsNames: names that a failed sync discarded are there until a crash, also after syncs that succeed,
// unless they change again.
func TestAFailedSyncOfADirectoryLosesItsNames(t *testing.T) {
	for _, again := range []bool{false, true} {
		mem := NewMem()
		fs := NewFaulty(mem)
		create := func(name string) {
			t.Helper()
			f, err := fs.Open(name, Create)
			if err == nil {
				err = errors.Join(f.Sync(), f.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		create("early")
		if err := fs.SyncDir("."); err != nil {
			t.Fatal(err)
		}
		create("lost")
		rule := fs.Inject(Rule{Op: OpSyncDir, Fault: DiscardDirty, Nth: 1})
		if err := fs.SyncDir("."); !errors.Is(err, syscall.EIO) || rule.Fired() != 1 {
			t.Fatal(err)
		}
		want := []string{"early", "late"}
		if again {
			if err := fs.Rename("lost", "found"); err != nil {
				t.Fatal(err)
			}
			want = []string{"early", "found", "late"}
		}
		create("late")
		if err := fs.SyncDir("."); err != nil {
			t.Fatal(err)
		}
		if seen, err := fs.List("."); err != nil || len(seen) != 3 {
			t.Fatalf("before the crash: %v, %v", seen, err)
		}
		restarted := mem.Crash(1, SurviveProcess)
		for _, survival := range []Survival{SurviveNone, SurviveSome, SurviveAll} {
			if got, err := restarted.Crash(1, survival).List("."); err != nil || !slices.Equal(got, want) {
				t.Errorf("changed again: %v, survival %d: %v, %v", again, survival, got, err)
			}
		}
	}
}

// TestUnreadablePageEndsReadsThatReachIt: what is before the page is read, and so is what is after it.
func TestUnreadablePageEndsReadsThatReachIt(t *testing.T) {
	faulty := NewFaulty(NewMem())
	f := mustCreate(t, faulty, "file", strings.Repeat(".", 3*memBlockSize))
	rule := faulty.Inject(Rule{Op: OpRead, Fault: Unreadable, Bytes: memBlockSize + 100})
	buf := make([]byte, memBlockSize)
	for _, one := range []struct{ off, n, read int }{
		{0, memBlockSize, memBlockSize},
		{0, 1, 1},
		{100, memBlockSize, memBlockSize - 100},
		{memBlockSize, 1, 0},
		{2*memBlockSize - 1, 2, 0},
		{2 * memBlockSize, memBlockSize, memBlockSize},
	} {
		n, err := f.ReadAt(buf[:one.n], int64(one.off))
		if n != one.read || errors.Is(err, ErrDevice) != (one.read < one.n) || err != nil && !errors.Is(err, ErrDevice) {
			t.Errorf("%d bytes at %d: %d, %v", one.n, one.off, n, err)
		}
	}
	if rule.Fired() != 3 {
		t.Errorf("fired %d times", rule.Fired())
	}
	reqs := []Request{{Buf: buf[:10]}, {Buf: buf[10:20], Offset: memBlockSize}, {Buf: buf[20:30], Offset: 2 * memBlockSize}}
	if err := f.ReadBatch(reqs); !errors.Is(err, ErrDevice) || reqs[0].Err != nil || reqs[1].Err == nil || reqs[2].Err != nil {
		t.Errorf("batch: %v", err)
	}
}
