package vfs

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/testseed"
)

func mustSync(t testing.TB, f File) {
	t.Helper()
	if err := f.SyncData(); err != nil {
		t.Fatal(err)
	}
}

func mustSyncDir(t testing.TB, fsys FS, dir string) {
	t.Helper()
	if err := fsys.SyncDir(dir); err != nil {
		t.Fatal(err)
	}
}

const crashSeeds = 300

func TestSyncedContentsAndNamesSurviveEveryCrash(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	f := mustCreate(t, m, "f", strings.Repeat("durable.", 2000))
	mustSync(t, f)
	mustClose(t, mustCreate(t, m, "old", "old name"))
	g, err := m.Open("old", ReadWrite)
	if err != nil {
		t.Fatal(err)
	}
	mustSync(t, g)
	mustSyncDir(t, m, ".")
	mustClose(t, mustCreate(t, m, "gone", ""))
	if err := errors.Join(m.Rename("old", "new"), m.Remove("gone")); err != nil {
		t.Fatal(err)
	}
	mustSyncDir(t, m, ".")
	for round := range uint64(crashSeeds) {
		seed := base + round
		for _, survival := range []Survival{SurviveSome, SurviveNone, SurviveAll} {
			disk := m.Crash(seed, survival)
			if got := contents(t, disk, "f"); got != strings.Repeat("durable.", 2000) {
				t.Fatalf("seed %d: synced contents lost", seed)
			}
			if names, _ := disk.List("."); fmt.Sprint(names) != "[f new]" || contents(t, disk, "new") != "old name" {
				t.Fatalf("seed %d: names after the crash: %q", seed, names)
			}
		}
	}
}

func TestSurviveNoneLosesAndSurviveAllKeepsUnsyncedChanges(t *testing.T) {
	m := NewMem()
	f := mustCreate(t, m, "f", "durable")
	mustSync(t, f)
	mustSyncDir(t, m, ".")
	mustWrite(t, f, "DURABLE and more", 0)
	mustClose(t, mustCreate(t, m, "created", "x"))
	if err := m.Rename("f", "renamed"); err != nil {
		t.Fatal(err)
	}
	none, all := m.Crash(1, SurviveNone), m.Crash(1, SurviveAll)
	if names, _ := none.List("."); fmt.Sprint(names) != "[f]" || contents(t, none, "f") != "durable" {
		t.Errorf("SurviveNone left %q", names)
	}
	if names, _ := all.List("."); fmt.Sprint(names) != "[created renamed]" || contents(t, all, "renamed") != "DURABLE and more" {
		t.Errorf("SurviveAll left %q", names)
	}
}

// Each sector after a crash is as it was before or after one of the writes; across sectors, every order occurs.
func TestCrashTearsAtSectorsAndReordersAcrossThem(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	const sectors = 4
	f := mustCreate(t, m, "f", strings.Repeat("0", sectors*sectorSize))
	mustSync(t, f)
	mustSyncDir(t, m, ".")
	mustWrite(t, f, strings.Repeat("1", sectors*sectorSize), 0)
	mustWrite(t, f, strings.Repeat("2", 2*sectorSize), sectorSize)
	seen := map[string]bool{}
	for round := range uint64(crashSeeds * 10) {
		seed := base + round
		got := contents(t, m.Crash(seed, SurviveSome), "f")
		var shape []byte
		for s := range sectors {
			sector := got[s*sectorSize : (s+1)*sectorSize]
			if sector != strings.Repeat(sector[:1], sectorSize) {
				t.Fatalf("seed %d: sector %d is torn inside", seed, s)
			}
			shape = append(shape, sector[0])
		}
		seen[string(shape)] = true
	}
	for _, shape := range []string{
		"0000",         // nothing
		"1221",         // everything
		"1111",         // a prefix of the writes
		"0100", "1000", // torn first write
		"1211",         // torn second write
		"0220", "0020", // the later write without the earlier one
	} {
		if !seen[shape] {
			t.Errorf("no crash in %d left %s", crashSeeds*10, shape)
		}
	}
	if seen["2000"] || len(seen) > 2*3*3*2 {
		t.Errorf("impossible outcome among %v", seen)
	}
}

// Two unsynced writes to one sector never survive in the wrong order: the device writes the sector, not the change.
func TestWritesWithinASectorSurviveInOrder(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	f := mustCreate(t, m, "f", strings.Repeat(".", sectorSize))
	mustSync(t, f)
	mustSyncDir(t, m, ".")
	for i := range 8 {
		mustWrite(t, f, "x", int64(i))
	}
	lengths := map[int]bool{}
	for round := range uint64(crashSeeds) {
		seed := base + round
		got := contents(t, m.Crash(seed, SurviveSome), "f")
		n := strings.Count(got, "x")
		if got[:n] != strings.Repeat("x", n) {
			t.Fatalf("seed %d: %q", seed, got[:8])
		}
		lengths[n] = true
	}
	if len(lengths) != 9 {
		t.Errorf("only %d of 9 prefixes occurred", len(lengths))
	}
}

// The size may be on the disk before the data, which then reads as zeros, and the data without the size is gone.
func TestUnsyncedSizeSurvivesIndependentlyOfData(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	f := mustCreate(t, m, "f", "")
	mustSyncDir(t, m, ".")
	for i := range int64(3) {
		mustWrite(t, f, strings.Repeat("x", sectorSize), i*sectorSize)
	}
	seen := map[string]bool{}
	for round := range uint64(crashSeeds) {
		seed := base + round
		got := contents(t, m.Crash(seed, SurviveSome), "f")
		shape := ""
		for ; len(got) > 0; got = got[sectorSize:] {
			shape += strings.ReplaceAll(got[:1], "\x00", "0")
		}
		seen[shape] = true
	}
	for _, shape := range []string{"", "x", "xx", "xxx", "000", "xx0", "0x", "x0x"} {
		if !seen[shape] {
			t.Errorf("no crash in %d left %q", crashSeeds, shape)
		}
	}
}

func TestUnsyncedNamesMayOrMayNotSurvive(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	for _, name := range []string{"renamed", "removed", "replaced"} {
		f := mustCreate(t, m, name, name)
		mustSync(t, f)
		mustClose(t, f)
	}
	mustSyncDir(t, m, ".")
	mustClose(t, mustCreate(t, m, "created", ""))
	fresh := mustCreate(t, m, "tmp", "fresh")
	mustSync(t, fresh)
	if err := errors.Join(m.Rename("renamed", "elsewhere"), m.Remove("removed"), m.Rename("tmp", "replaced")); err != nil {
		t.Fatal(err)
	}
	outcomes := map[string]int{}
	for round := range uint64(crashSeeds) {
		seed := base + round
		disk := m.Crash(seed, SurviveSome)
		names, _ := disk.List(".")
		present := map[string]bool{}
		for _, name := range names {
			present[name] = true
			outcomes[name]++
		}
		if present["renamed"] == present["elsewhere"] {
			t.Fatalf("seed %d: a rename is not atomic: %q", seed, names)
		}
		switch contents(t, disk, "replaced") {
		case "fresh":
			outcomes["new contents"]++
		case "replaced":
			outcomes["old contents"]++
		default:
			t.Fatalf("seed %d: replaced file is neither old nor new", seed)
		}
	}
	for _, what := range []string{"created", "renamed", "elsewhere", "removed", "new contents", "old contents"} {
		if n := outcomes[what]; n == 0 || n == crashSeeds {
			t.Errorf("%s: in %d of %d crashes", what, n, crashSeeds)
		}
	}
}

// A crash that loses a rename does not lose the file that had the new name before, even if a later file took the name.
func TestNameChangesSurviveInOrderPerName(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	f := mustCreate(t, m, "log", "precious")
	mustSync(t, f)
	mustSyncDir(t, m, ".")
	if err := m.Rename("log", "archive"); err != nil {
		t.Fatal(err)
	}
	mustClose(t, mustCreate(t, m, "log", ""))
	for round := range uint64(crashSeeds) {
		seed := base + round
		disk := m.Crash(seed, SurviveSome)
		name := "archive"
		if _, err := disk.Size(name); err != nil {
			name = "log"
		}
		if got := contents(t, disk, name); got != "precious" {
			t.Fatalf("seed %d: %s holds %q", seed, name, got)
		}
	}
}

func TestSyncDirAffectsItsDirectoryOnly(t *testing.T) {
	m := NewMem()
	mustMkdir(t, m, "a/b")
	mustClose(t, mustCreate(t, m, "a/synced", ""))
	mustClose(t, mustCreate(t, m, "a/b/unsynced", ""))
	mustSyncDir(t, m, "a")
	disk := m.Crash(0, SurviveNone)
	if _, err := disk.Size("a/synced"); err != nil {
		t.Error(err)
	}
	_, err := disk.Size("a/b/unsynced")
	wantError(t, "name in another directory", err, fs.ErrNotExist)
}

// A rename between directories is durable after the sync of either one, with the earlier changes of its names.
func TestSyncDirIncludesWhatARenameDependsOn(t *testing.T) {
	base := testseed.Base(t)
	m := NewMem()
	mustMkdir(t, m, "a")
	mustMkdir(t, m, "b")
	mustClose(t, mustCreate(t, m, "a/f", ""))
	if err := m.Rename("a/f", "b/f"); err != nil {
		t.Fatal(err)
	}
	mustSyncDir(t, m, "b")
	for round := range uint64(crashSeeds) {
		seed := base + round
		for _, survival := range []Survival{SurviveSome, SurviveNone, SurviveAll} {
			disk := m.Crash(seed, survival)
			_, err := disk.Size("b/f")
			if _, old := disk.Size("a/f"); err != nil || old == nil {
				t.Fatalf("seed %d: new name: %v, old name: %v", seed, err, old)
			}
		}
	}
}

func TestCrashedFileSystemRefusesEverything(t *testing.T) {
	m := NewMem()
	f := mustCreate(t, m, "f", "x")
	lock, err := m.Lock("LOCK")
	if err != nil {
		t.Fatal(err)
	}
	disk := m.Crash(0, SurviveAll)
	_, read := f.ReadAt(make([]byte, 1), 0)
	_, write := f.WriteAt([]byte("y"), 0)
	_, size := f.Size()
	_, open := m.Open("f", ReadOnly)
	_, create := m.Open("g", Create)
	_, list := m.List(".")
	_, length := m.Size("f")
	_, relock := m.Lock("LOCK")
	_, newlock := m.Lock("LOCK2")
	_, free := m.Free(".")
	for what, err := range map[string]error{
		"read": read, "write": write, "size": size, "sync": f.Sync(), "syncdata": f.SyncData(), "truncate": f.Truncate(0),
		"preallocate": f.Preallocate(9), "close": f.Close(), "open": open, "create": create, "list": list, "length": length,
		"remove": m.Remove("f"), "rename": m.Rename("f", "g"), "mkdir": m.MkdirAll("d"), "syncdir": m.SyncDir("."),
		"lock": relock, "new lock": newlock, "unlock": lock.Close(), "free": free,
	} {
		wantError(t, what, err, ErrCrashed)
	}
	if got := contents(t, disk, "f"); got != "x" {
		t.Errorf("a write after the crash reached the disk: %q", got)
	}
	again, err := disk.Lock("LOCK")
	if err != nil {
		t.Fatalf("the lock still exists after the crash: %v", err)
	}
	mustClose(t, again)
}

// script is a small workload with every kind of mutating operation. It returns the acknowledged generation: how many
// times the file was replaced durably.
func script(m *Mem) (acknowledged int, err error) {
	if err := m.MkdirAll("d"); err != nil {
		return 0, err
	}
	for generation := 1; generation <= 3; generation++ {
		f, err := m.Open("d/tmp", Create)
		if err != nil {
			return acknowledged, err
		}
		data := bytes.Repeat([]byte{byte(generation)}, 3000)
		steps := []func() error{
			func() error { return f.Preallocate(5000) },
			func() error { _, err := f.WriteAt(data, 0); return err },
			func() error { return f.Truncate(3000) },
			f.Sync,
			func() error { return m.Rename("d/tmp", "d/current") },
			func() error { return m.SyncDir("d") },
		}
		for _, step := range steps {
			if err := step(); err != nil {
				return acknowledged, err
			}
		}
		acknowledged = generation
	}
	return acknowledged, nil
}

// The pattern for all users of Mem: crash at each mutating operation, and check several possible disks.
func TestReplacedFileIsWholeAfterACrashAtEveryOperation(t *testing.T) {
	base := testseed.Base(t)
	whole := NewMem()
	if _, err := script(whole); err != nil {
		t.Fatal(err)
	}
	for k := int64(1); k <= whole.Mutations(); k++ {
		m := NewMem()
		m.CrashAt(k)
		acknowledged, err := script(m)
		wantError(t, "script", err, ErrCrashed)
		if m.Mutations() != k || !m.Crashed() {
			t.Fatalf("crash at operation %d came at %d", k, m.Mutations())
		}
		for round := range uint64(30) {
			seed := base + round
			disk := m.Crash(seed, SurviveSome)
			names, err := disk.List("d")
			if acknowledged == 0 && (err != nil || len(names) == 0 || names[0] == "tmp") {
				continue
			}
			got := contents(t, disk, "d/current")
			generation := int(got[0])
			if generation < acknowledged || got != strings.Repeat(got[:1], 3000) {
				t.Fatalf("crash at %d, seed %d: generation %d of %d, %d bytes", k, seed, generation, acknowledged, len(got))
			}
		}
	}
}

func TestCrashIsAFunctionOfTheSeed(t *testing.T) {
	build := func() *Mem {
		m := NewMem()
		rng := rand.New(rand.NewPCG(7, 7))
		for i := range 20 {
			f := mustCreate(t, m, fmt.Sprint(i), "")
			for range 20 {
				mustWrite(t, f, strings.Repeat(fmt.Sprint(i), rng.IntN(3000)), rng.Int64N(10000))
			}
		}
		return m
	}
	dump := func(m *Mem) string {
		names, err := m.List(".")
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for _, name := range names {
			fmt.Fprintf(&b, "%s=%s\n", name, contents(t, m, name))
		}
		return b.String()
	}
	one, two := build(), build()
	different := false
	for seed := range uint64(20) {
		a, b := dump(one.Crash(seed, SurviveSome)), dump(two.Crash(seed, SurviveSome))
		if a != b {
			t.Fatalf("seed %d: two runs differ", seed)
		}
		different = different || a != dump(one.Crash(seed+1, SurviveSome))
	}
	if !different {
		t.Error("all seeds leave the same disk")
	}
}

// A disk is independent of the system that crashed and of the other disks, though they share memory.
func TestSurvivorsShareNoMutableMemory(t *testing.T) {
	m := NewMem()
	f := mustCreate(t, m, "f", strings.Repeat("a", 20000))
	mustSync(t, f)
	mustSyncDir(t, m, ".")
	mustWrite(t, f, "b", 0)
	var wg sync.WaitGroup
	for seed := range uint64(8) {
		disk := m.Crash(seed, SurviveAll)
		wg.Go(func() {
			g, err := disk.Open("f", ReadWrite)
			if err != nil {
				t.Error(err)
				return
			}
			for round := range 50 {
				mark := strings.Repeat(string(rune('c'+seed)), 5000)
				if _, err := g.WriteAt([]byte(mark), int64(round*100)); err != nil {
					t.Error(err)
				}
				if err := errors.Join(g.Truncate(int64(19000-round)), g.Sync()); err != nil {
					t.Error(err)
				}
			}
			if got := contents(t, disk.Crash(seed, SurviveNone), "f"); strings.Count(got, string(rune('c'+seed))) != 9900 {
				t.Errorf("disk %d: foreign bytes", seed)
			}
		})
	}
	wg.Wait()
	if got := contents(t, m.Crash(0, SurviveAll), "f"); got != "b"+strings.Repeat("a", 19999) {
		t.Error("the crashed system changed after the crash")
	}
}

func TestFullFileSystemWritesWhatFitsAndFreesSpace(t *testing.T) {
	m := NewMem()
	m.SetCapacity(4 * memBlockSize)
	f := mustCreate(t, m, "f", strings.Repeat("x", 3*memBlockSize))
	g := mustCreate(t, m, "g", "")
	n, err := g.WriteAt(make([]byte, 2*memBlockSize), 100)
	if n != memBlockSize-100 {
		t.Errorf("wrote %d bytes into one free block from offset 100", n)
	}
	wantError(t, "write past the capacity", err, ErrNoSpace)
	wantError(t, "preallocate past the capacity", g.Preallocate(3*memBlockSize), ErrNoSpace)
	if size, _ := g.Size(); size != memBlockSize {
		t.Errorf("a refused Preallocate left %d bytes", size)
	}
	mustWrite(t, f, "overwriting needs no space", 0)
	if free, _ := m.Free("."); free != 0 {
		t.Errorf("Free of a full system = %d", free)
	}
	if err := f.Truncate(memBlockSize); err != nil {
		t.Fatal(err)
	}
	if free, _ := m.Free("."); free != 2*memBlockSize {
		t.Errorf("Free after Truncate = %d", free)
	}
	if err := m.Remove("f"); err != nil {
		t.Fatal(err)
	}
	if free, _ := m.Free("."); free != 2*memBlockSize {
		t.Errorf("the space of an open file was freed: Free = %d", free)
	}
	mustClose(t, f)
	if free, _ := m.Free("."); free != 3*memBlockSize {
		t.Errorf("Free after the last Close = %d", free)
	}
	if free, _ := m.Crash(0, SurviveAll).Free("."); free != 3*memBlockSize {
		t.Errorf("Free after a crash = %d", free)
	}
}

func TestHookSeesEveryMutatingOperation(t *testing.T) {
	m := NewMem()
	var seen Op
	count := int64(0)
	m.SetHook(func(op Op, _ string) { seen |= op; count++ })
	if _, err := script(m); err != nil {
		t.Fatal(err)
	}
	f := mustCreate(t, m, "f", "")
	mustSync(t, f)
	if err := m.Remove("f"); err != nil {
		t.Fatal(err)
	}
	if seen != OpMutating || count != m.Mutations() {
		t.Errorf("saw %v, not %v; %d of %d", seen, OpMutating, count, m.Mutations())
	}
	m.SetHook(func(op Op, _ string) { m.Crash(0, SurviveNone) })
	_, err := f.WriteAt([]byte("x"), 0)
	wantError(t, "write whose hook crashed", err, ErrCrashed)
}

// A crash test runs thousands of these.
func BenchmarkCrash(b *testing.B) {
	m := NewMem()
	f := mustCreate(b, m, "f", "")
	if err := f.Preallocate(16 << 20); err != nil {
		b.Fatal(err)
	}
	mustSync(b, f)
	mustSyncDir(b, m, ".")
	for i := range int64(100) {
		mustWrite(b, f, strings.Repeat("x", 300), i*300)
	}
	b.ReportAllocs()
	for seed := uint64(0); b.Loop(); seed++ {
		m.Crash(seed, SurviveSome)
	}
}
