package quarantine

import (
	"errors"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/vfs"
)

var testPaths = [2]string{"db/q1", "db/q2"}

func newTestFS(t *testing.T) *vfs.Mem {
	t.Helper()
	fs := vfs.NewMem()
	if err := fs.MkdirAll("db"); err != nil {
		t.Fatal(err)
	}
	return fs
}

// mustWrite writes versions, and lets a superblock use them.
func mustWrite(t *testing.T, f *Files, versions []Version) int {
	t.Helper()
	number, err := f.Write(versions)
	if err != nil {
		t.Fatal(err)
	}
	f.Use(number, versions)
	return number
}

// TestUsedFileSurvivesEveryCrash cuts the power at each operation of a Write: the used file stays as it is, and the
// other one has the new contents once Write has returned.
func TestUsedFileSurvivesEveryCrash(t *testing.T) {
	for k := int64(1); ; k++ {
		fs := newTestFS(t)
		f := NewFiles(fs, "db", testPaths, 0, nil)
		mustWrite(t, f, examples()[:2])
		used := mustWrite(t, f, examples()[:1])
		fs.CrashAt(fs.Mutations() + k)
		number, err := f.Write(examples())
		for _, keep := range []vfs.Survival{vfs.SurviveNone, vfs.SurviveSome, vfs.SurviveAll} {
			disk := fs.Crash(uint64(k), keep)
			got, fault, readErr := Read(disk, testPaths[used-1])
			if readErr != nil || fault != nil {
				t.Fatalf("operation %d: %v, %v", k, fault, readErr)
			}
			mustEqual(t, got, examples()[:1])
			if err != nil {
				continue
			}
			if got, fault, readErr = Read(disk, testPaths[number-1]); readErr != nil || fault != nil || number == used {
				t.Fatalf("operation %d: file %d beside %d: %v, %v", k, number, used, fault, readErr)
			}
			mustEqual(t, got, examples())
		}
		if err == nil {
			return
		}
	}
}

// TestContentsAfterAFailedSyncAreMadeAnew: a failed sync of the file or of its name may mark what is not on the device
// as clean; what Write says is durable then survives a crash all the same.
func TestContentsAfterAFailedSyncAreMadeAnew(t *testing.T) {
	for _, op := range []vfs.Op{vfs.OpSync, vfs.OpSyncDir} {
		fs := newTestFS(t)
		faulty := vfs.NewFaulty(fs)
		f := NewFiles(faulty, "db", testPaths, 0, nil)
		f.Use(0, nil)
		fault := vfs.Fail
		if op == vfs.OpSync {
			fault = vfs.DiscardDirty
		}
		faulty.Inject(vfs.Rule{Op: op, Nth: 1, Fault: fault})
		created := faulty.Inject(vfs.Rule{Op: vfs.OpCreate, Fault: vfs.Slow})
		if err := f.Reserve(); err == nil {
			t.Fatal("the fault was not injected")
		}
		if _, err := f.Write(examples()); err != nil {
			t.Fatal(err)
		}
		got, damage, err := Read(fs.Crash(1, vfs.SurviveNone), testPaths[0])
		if err != nil || damage != nil || created.Fired() != 2 {
			t.Fatalf("%v: %v, %v, %d files were created", op, damage, err, created.Fired())
		}
		mustEqual(t, got, examples())
	}
}

// TestReserveWhoseSyncFailedIsMadeAnew: after a failed sync nothing says that the space is there. The next Reserve makes
// the file anew, while the disk has space for it.
func TestReserveWhoseSyncFailedIsMadeAnew(t *testing.T) {
	for _, op := range []vfs.Op{vfs.OpSync, vfs.OpSyncDir} {
		fs := newTestFS(t)
		faulty := vfs.NewFaulty(fs)
		f := NewFiles(faulty, "db", testPaths, 0, nil)
		f.Use(0, nil)
		faulty.Inject(vfs.Rule{Op: op, Nth: 1, Fault: vfs.Fail})
		if err := f.Reserve(); err == nil {
			t.Fatal("the fault was not injected")
		}
		if err := f.Reserve(); err != nil {
			t.Fatal(err)
		}
		if size, err := fs.Crash(1, vfs.SurviveNone).Size(testPaths[0]); err != nil || size != reserveFor(0) {
			t.Fatalf("%v: %d bytes are reserved: %v", op, size, err)
		}
	}
}

// TestReserveTakesTheNextContents: with no block free, contents almost twice as large are written, and smaller ones again
// and again. The reserve says that it does not suffice for twice the large ones.
func TestReserveTakesTheNextContents(t *testing.T) {
	fs := newTestFS(t)
	f := NewFiles(fs, "db", testPaths, 0, nil)
	large := func(n int) (versions []Version) {
		for i := range n {
			versions = append(versions, Version{Key: []byte{0x10, byte(i / 256), byte(i)}, Trailer: 0x701, Value: []byte(strings.Repeat("v", 300))})
		}
		return versions
	}
	present := large(300)
	mustWrite(t, f, present)
	if err := f.Reserve(); err != nil {
		t.Fatal(err)
	}
	fs.LeaveFree(0)
	for round := range 4 {
		short := f.Reserve()
		before := fs.Mutations()
		if err := f.Reserve(); short != nil != (round == 2) || short == nil && (err != nil || fs.Mutations() > before) {
			t.Fatalf("round %d: %v, %v, %d operations", round, short, err, fs.Mutations()-before)
		}
		versions := large(300 + 280*(round%2))
		number := mustWrite(t, f, versions)
		got, damage, err := Read(fs, testPaths[number-1])
		if err != nil || damage != nil {
			t.Fatalf("round %d: %v, %v", round, damage, err)
		}
		mustEqual(t, got, versions)
	}
	if err := f.Reserve(); err != nil && !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatal(err)
	}
	if _, err := f.Write(large(4000)); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("far more than the reserve: %v", err)
	}
	got, damage, err := Read(fs, testPaths[f.used-1])
	if err != nil || damage != nil || len(got) != 580 {
		t.Fatalf("the used file after that: %d versions, %v, %v", len(got), damage, err)
	}
}

// TestReserveLeavesWhatASuperblockMayUse: a superblock that names the file may be durable although its commit failed.
func TestReserveLeavesWhatASuperblockMayUse(t *testing.T) {
	fs := newTestFS(t)
	f := NewFiles(fs, "db", testPaths, 0, nil)
	many := examples()[2:]
	many[0].Value = make([]byte, 1<<20)
	mustWrite(t, f, many)
	number, err := f.Write(examples())
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Reserve(); err != nil {
		t.Fatal(err)
	}
	got, damage, err := Read(fs, testPaths[number-1])
	if err != nil || damage != nil {
		t.Fatal(damage, err)
	}
	mustEqual(t, got, examples())
}

// TestFilesOfNothingAreRemoved leaves the reserve, if there is one.
func TestFilesOfNothingAreRemoved(t *testing.T) {
	for _, reserve := range []bool{false, true} {
		fs := newTestFS(t)
		f := NewFiles(fs, "db", testPaths, 0, nil)
		mustWrite(t, f, examples())
		mustWrite(t, f, examples())
		if err := f.Clean(reserve); err != nil {
			t.Fatal(err)
		}
		if names, _ := fs.List("db"); len(names) != 2 {
			t.Fatalf("while there are contents: %q", names)
		}
		f.Use(0, nil)
		if err := f.Clean(reserve); err != nil {
			t.Fatal(err)
		}
		if names, _ := fs.List("db"); len(names) != map[bool]int{true: 1}[reserve] {
			t.Fatalf("reserve %v: %q", reserve, names)
		}
		mustWrite(t, f, examples())
	}
}

// TestRestoreWritesTheDamagedCopy: the intact one is not touched, and what it holds is not interpreted.
func TestRestoreWritesTheDamagedCopy(t *testing.T) {
	for _, second := range []bool{false, true} {
		fs := newTestFS(t)
		f := NewFiles(fs, "db", testPaths, 0, nil)
		mustWrite(t, f, examples())
		size, err := fs.Size(testPaths[0])
		if err != nil {
			t.Fatal(err)
		}
		file, err := fs.Open(testPaths[0], vfs.ReadWrite)
		if err != nil {
			t.Fatal(err)
		}
		at := int64(40)
		if second {
			at += size / 2
		}
		if _, err := file.WriteAt([]byte("damage"), at); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(file.Sync(), file.Close(), Restore(fs, testPaths[0])); err != nil {
			t.Fatal(err)
		}
		got, damage, err := Read(fs.Crash(1, vfs.SurviveNone), testPaths[0])
		if err != nil || damage != nil {
			t.Fatal(damage, err)
		}
		mustEqual(t, got, examples())
	}
}

// TestReserveOfASparseCopyHasItsBlocks: the file has the length, and is a hole, as in a copy of what was allocated and never written.
func TestReserveOfASparseCopyHasItsBlocks(t *testing.T) {
	fs := newTestFS(t)
	file, err := fs.Open(testPaths[0], vfs.Create)
	if err == nil {
		err = errors.Join(file.Truncate(reserveFor(0)), file.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	f := NewFiles(fs, "db", testPaths, 0, nil)
	f.Use(0, nil)
	fs.SetCapacity(1)
	if err := f.Reserve(); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("the reserve of a full disk: %v", err)
	}
	fs.SetCapacity(reserveFor(0))
	if err := f.Reserve(); err != nil {
		t.Fatal(err)
	}
	if free, err := fs.Free("db"); err != nil || free != 0 {
		t.Fatalf("%d bytes are free, %v", free, err)
	}
	mustWrite(t, f, examples())
}
