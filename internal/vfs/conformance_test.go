package vfs

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"slices"
	"sync"
	"testing"
)

// conformers is every implementation, each with an empty directory to work in.
var conformers = []struct {
	name string
	open func(t *testing.T) (FS, string)
}{
	{"os", func(t *testing.T) (FS, string) { return NewOS(), t.TempDir() }},
	{"os-uring", func(t *testing.T) (FS, string) { return mustOpenOS(t, IOUring), t.TempDir() }},
	{"mem", func(t *testing.T) (FS, string) { return NewMem(), "." }},
	{"faulty", func(t *testing.T) (FS, string) { return NewFaulty(NewMem()), "/" }},
	{"mem-survivor", func(t *testing.T) (FS, string) {
		m := NewMem()
		mustMkdir(t, m, "data/dir")
		return m.Crash(1, SurviveNone), "data/dir"
	}},
}

// TestConformance checks the promises of the package for every implementation.
func TestConformance(t *testing.T) {
	promises := []struct {
		name string
		keep func(t *testing.T, fsys FS, dir string)
	}{
		{"CreateIsExclusiveAndOpenNeedsTheFile", conformOpen},
		{"ReadsReturnWhatWasWritten", conformReadWrite},
		{"HolesReadAsZero", conformHoles},
		{"TruncateCutsAndExtends", conformTruncate},
		{"PreallocateExtendsWithZeros", conformPreallocate},
		{"PreallocateZeroedIsForNewFiles", conformZeroed},
		{"NamesAreListedSorted", conformNames},
		{"RenameReplaces", conformRename},
		{"RemovedFileStaysReadable", conformRemove},
		{"LockIsExclusive", conformLock},
		{"ClosedFileRefusesEverything", conformClosed},
		{"BatchEqualsSingleOperations", conformBatch},
		{"BatchReportsEachRequest", conformBatchErrors},
		{"FilesServeManyGoroutines", conformConcurrent},
		{"AgreesWithAByteSlice", conformRandom},
	}
	for _, impl := range conformers {
		for _, promise := range promises {
			t.Run(impl.name+"/"+promise.name, func(t *testing.T) {
				fsys, dir := impl.open(t)
				promise.keep(t, fsys, dir)
			})
		}
	}
}

// mustOpenOS is an OS that is closed when the test ends.
func mustOpenOS(t testing.TB, method IO) *OS {
	t.Helper()
	o, err := OpenOS(method)
	if err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { mustClose(t, o) })
	return o
}

func mustMkdir(t testing.TB, fsys FS, dir string) {
	t.Helper()
	if err := fsys.MkdirAll(dir); err != nil {
		t.Fatal(err)
	}
}

func mustCreate(t testing.TB, fsys FS, name string, contents string) File {
	t.Helper()
	f, err := fsys.Open(name, Create)
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, f, contents, 0)
	return f
}

func mustWrite(t testing.TB, f File, data string, off int64) {
	t.Helper()
	if n, err := f.WriteAt([]byte(data), off); n != len(data) || err != nil {
		t.Fatalf("WriteAt(%d bytes, %d) = %d, %v", len(data), off, n, err)
	}
}

// contents reads a whole file.
func contents(t testing.TB, fsys FS, name string) string {
	t.Helper()
	f, err := fsys.Open(name, ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, f)
	size, err := f.Size()
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, size)
	if _, err := f.ReadAt(buf, 0); err != nil {
		t.Fatal(err)
	}
	return string(buf)
}

func mustClose(t testing.TB, c io.Closer) {
	t.Helper()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
}

func wantError(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got %v, want %v", what, err, want)
	}
}

func conformOpen(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	_, err := fsys.Open(name, ReadWrite)
	wantError(t, "open absent", err, fs.ErrNotExist)
	_, err = fsys.Size(name)
	wantError(t, "size of absent", err, fs.ErrNotExist)
	wantError(t, "remove absent", fsys.Remove(name), fs.ErrNotExist)
	mustClose(t, mustCreate(t, fsys, name, "x"))
	_, err = fsys.Open(name, Create)
	wantError(t, "create existing", err, fs.ErrExist)
	_, err = fsys.Open(path.Join(dir, "no/such"), Create)
	wantError(t, "create in absent directory", err, fs.ErrNotExist)

	f, err := fsys.Open(name, ReadOnly)
	if err != nil {
		t.Fatal(err)
	}
	defer mustClose(t, f)
	if _, err := f.WriteAt([]byte("y"), 0); err == nil {
		t.Error("write to a file opened for reading succeeded")
	}
	if f.Name() != name {
		t.Errorf("Name() = %q, want %q", f.Name(), name)
	}
}

func conformReadWrite(t *testing.T, fsys FS, dir string) {
	f := mustCreate(t, fsys, path.Join(dir, "f"), "hello, world")
	defer mustClose(t, f)
	mustWrite(t, f, "W", 7)
	buf := make([]byte, 20)
	if n, err := f.ReadAt(buf[:5], 7); n != 5 || err != nil || string(buf[:5]) != "World" {
		t.Errorf("read inside: %d, %v, %q", n, err, buf[:n])
	}
	if n, err := f.ReadAt(buf, 7); n != 5 || err != io.EOF || string(buf[:5]) != "World" {
		t.Errorf("read over the end: %d, %v, %q", n, err, buf[:n])
	}
	if n, err := f.ReadAt(buf, 12); n != 0 || err != io.EOF {
		t.Errorf("read at the end: %d, %v", n, err)
	}
	if n, err := f.ReadAt(nil, 0); n != 0 || err != nil {
		t.Errorf("read of nothing: %d, %v", n, err)
	}
	if _, err := f.ReadAt(buf, -1); err == nil || err == io.EOF {
		t.Errorf("read at -1: %v", err)
	}
	if _, err := f.WriteAt(buf, -1); err == nil {
		t.Error("write at -1 succeeded")
	}
	if err := errors.Join(f.SyncData(), f.Sync(), fsys.SyncDir(dir)); err != nil {
		t.Error(err)
	}
	if size, err := fsys.Size(f.Name()); size != 12 || err != nil {
		t.Errorf("Size = %d, %v", size, err)
	}
	if free, err := fsys.Free(dir); free <= 0 || err != nil {
		t.Errorf("Free = %d, %v", free, err)
	}
}

func conformHoles(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	f := mustCreate(t, fsys, name, "")
	mustWrite(t, f, "end", 10000)
	mustClose(t, f)
	if got := contents(t, fsys, name); got != string(make([]byte, 10000))+"end" {
		t.Errorf("%d bytes, not a hole and then the end", len(got))
	}
}

func conformTruncate(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	f := mustCreate(t, fsys, name, string(bytes.Repeat([]byte("x"), 9000)))
	defer mustClose(t, f)
	for _, size := range []int64{5000, 4096, 100, 0, 3, 8192} {
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		if got, err := f.Size(); got != size || err != nil {
			t.Fatalf("Size after Truncate(%d) = %d, %v", size, got, err)
		}
	}
	if got := contents(t, fsys, name); got != string(make([]byte, 8192)) {
		t.Error("bytes cut off came back")
	}
	if f.Truncate(-1) == nil {
		t.Error("Truncate(-1) succeeded")
	}
}

func conformPreallocate(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	f := mustCreate(t, fsys, name, "abc")
	defer mustClose(t, f)
	if err := f.Preallocate(10000); err != nil {
		t.Fatal(err)
	}
	if err := f.Preallocate(2); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, fsys, name); got != "abc"+string(make([]byte, 9997)) {
		t.Errorf("%d bytes, not abc and zeros up to 10000", len(got))
	}
}

func conformZeroed(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	f := mustCreate(t, fsys, name, "")
	defer mustClose(t, f)
	const size = zeroFillChunk + 5
	if err := PreallocateZeroed(f, size, nil); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, fsys, name); got != string(make([]byte, size)) {
		t.Errorf("%d bytes, not %d zeros", len(got), size)
	}
	if PreallocateZeroed(f, size, nil) == nil {
		t.Error("a file with contents was zeroed")
	}
}

func conformNames(t *testing.T, fsys FS, dir string) {
	if names, err := fsys.List(dir); len(names) != 0 || err != nil {
		t.Fatalf("List of an empty directory = %q, %v", names, err)
	}
	for _, name := range []string{"b", "a", "c10", "c9"} {
		mustClose(t, mustCreate(t, fsys, path.Join(dir, name), ""))
	}
	mustMkdir(t, fsys, path.Join(dir, "sub/deeper"))
	mustMkdir(t, fsys, path.Join(dir, "sub"))
	mustClose(t, mustCreate(t, fsys, path.Join(dir, "sub/inner"), ""))
	names, err := fsys.List(dir)
	if want := []string{"a", "b", "c10", "c9", "sub"}; !slices.Equal(names, want) || err != nil {
		t.Errorf("List = %q, %v; want %q", names, err, want)
	}
	_, err = fsys.List(path.Join(dir, "absent"))
	wantError(t, "list absent", err, fs.ErrNotExist)
	wantError(t, "sync absent directory", fsys.SyncDir(path.Join(dir, "absent")), fs.ErrNotExist)
}

func conformRename(t *testing.T, fsys FS, dir string) {
	from, to := path.Join(dir, "from"), path.Join(dir, "to")
	f := mustCreate(t, fsys, from, "new")
	mustClose(t, mustCreate(t, fsys, to, "old"))
	if err := fsys.Rename(from, to); err != nil {
		t.Fatal(err)
	}
	if got := contents(t, fsys, to); got != "new" {
		t.Errorf("contents after rename = %q", got)
	}
	mustWrite(t, f, "N", 0)
	mustClose(t, f)
	if got := contents(t, fsys, to); got != "New" {
		t.Errorf("the handle no longer leads to the renamed file: %q", got)
	}
	if err := fsys.Rename(to, to); err != nil {
		t.Errorf("rename to itself: %v", err)
	}
	wantError(t, "rename absent", fsys.Rename(from, to), fs.ErrNotExist)
}

func conformRemove(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	f := mustCreate(t, fsys, name, "still here")
	if err := fsys.Remove(name); err != nil {
		t.Fatal(err)
	}
	again := mustCreate(t, fsys, name, "another")
	buf := make([]byte, 10)
	if _, err := f.ReadAt(buf, 0); err != nil || string(buf) != "still here" {
		t.Errorf("read of the removed file: %q, %v", buf, err)
	}
	mustClose(t, f)
	mustClose(t, again)
	mustMkdir(t, fsys, path.Join(dir, "d"))
	mustClose(t, mustCreate(t, fsys, path.Join(dir, "d/f"), ""))
	if fsys.Remove(path.Join(dir, "d")) == nil {
		t.Error("a directory with a file in it was removed")
	}
	if err := errors.Join(fsys.Remove(path.Join(dir, "d/f")), fsys.Remove(path.Join(dir, "d"))); err != nil {
		t.Error(err)
	}
}

func conformLock(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "LOCK")
	for range 2 {
		lock, err := fsys.Lock(name)
		if err != nil {
			t.Fatal(err)
		}
		_, err = fsys.Lock(name)
		wantError(t, "second lock", err, ErrLocked)
		mustClose(t, lock)
		if lock.Close() == nil {
			t.Error("lock closed twice")
		}
	}
}

func conformClosed(t *testing.T, fsys FS, dir string) {
	f := mustCreate(t, fsys, path.Join(dir, "f"), "abc")
	mustClose(t, f)
	_, read := f.ReadAt(make([]byte, 1), 0)
	_, write := f.WriteAt(make([]byte, 1), 0)
	_, size := f.Size()
	one := func() []Request { return []Request{{Buf: make([]byte, 1)}, {Buf: make([]byte, 1)}} }
	for what, err := range map[string]error{
		"read": read, "write": write, "size": size, "sync": f.Sync(), "syncdata": f.SyncData(), "truncate": f.Truncate(1),
		"preallocate": f.Preallocate(1), "readbatch": f.ReadBatch(one()), "writebatch": f.WriteBatch(one()), "close": f.Close(),
	} {
		wantError(t, what+" after close", err, fs.ErrClosed)
	}
}

func conformBatch(t *testing.T, fsys FS, dir string) {
	name := path.Join(dir, "f")
	for _, count := range []int{0, 1, 2, 31, 32, 33, 100} {
		f := mustCreate(t, fsys, name, "")
		writes, reads := make([]Request, count), make([]Request, count)
		for i := range writes {
			index := int64((i * 37) % count) // scattered
			writes[i] = Request{Buf: bytes.Repeat([]byte{byte(index)}, 1000), Offset: index * 1000, Err: io.ErrNoProgress}
			reads[i] = Request{Buf: make([]byte, 1000), Offset: index * 1000, Err: io.ErrNoProgress}
		}
		if count%37 == 0 && count > 0 {
			t.Fatal("37 must not divide the count")
		}
		if err := errors.Join(f.WriteBatch(writes), f.ReadBatch(reads)); err != nil {
			t.Fatal(err)
		}
		for i := range reads {
			if writes[i].Err != nil || reads[i].Err != nil || !bytes.Equal(reads[i].Buf, writes[i].Buf) {
				t.Fatalf("request %d of %d: %v, %v, or other bytes", i, count, writes[i].Err, reads[i].Err)
			}
		}
		if size, _ := f.Size(); size != int64(count*1000) {
			t.Fatalf("size after %d writes = %d", count, size)
		}
		mustClose(t, f)
		if err := fsys.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
}

func conformBatchErrors(t *testing.T, fsys FS, dir string) {
	f := mustCreate(t, fsys, path.Join(dir, "f"), string(make([]byte, 2500)))
	defer mustClose(t, f)
	reqs := make([]Request, 5)
	for i := range reqs {
		reqs[i] = Request{Buf: bytes.Repeat([]byte{1}, 1000), Offset: int64(i * 1000)}
	}
	reqs[1].Offset = -1
	err := f.ReadBatch(reqs)
	if reqs[0].Err != nil || reqs[1].Err == nil || reqs[2].Err != io.EOF || reqs[3].Err != io.EOF || reqs[4].Err != io.EOF {
		t.Errorf("errors: %v, %v, %v, %v, %v", reqs[0].Err, reqs[1].Err, reqs[2].Err, reqs[3].Err, reqs[4].Err)
	}
	if err != reqs[1].Err {
		t.Errorf("result %v is not the first error %v", err, reqs[1].Err)
	}
	if got := reqs[2].Buf; !bytes.Equal(got[:500], make([]byte, 500)) {
		t.Error("the front of a read over the end is missing")
	}
}

func conformConcurrent(t *testing.T, fsys FS, dir string) {
	f := mustCreate(t, fsys, path.Join(dir, "f"), "")
	defer mustClose(t, f)
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for round := range 20 {
				reqs := make([]Request, 40)
				for i := range reqs {
					reqs[i] = Request{Buf: bytes.Repeat([]byte{byte(g), byte(round)}, 64), Offset: int64(i*8+g) * 128}
				}
				if err := errors.Join(f.WriteBatch(reqs), f.SyncData()); err != nil {
					t.Error(err)
					return
				}
				for i := range reqs {
					clear(reqs[i].Buf)
				}
				if err := f.ReadBatch(reqs); err != nil {
					t.Error(err)
					return
				}
				for i := range reqs {
					if !bytes.Equal(reqs[i].Buf, bytes.Repeat([]byte{byte(g), byte(round)}, 64)) {
						t.Errorf("goroutine %d round %d request %d: foreign bytes", g, round, i)
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

func conformRandom(t *testing.T, fsys FS, dir string) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	name := path.Join(dir, "f")
	f := mustCreate(t, fsys, name, "")
	defer mustClose(t, f)
	var model []byte
	extend := func(size int) {
		if size > len(model) {
			model = append(model, make([]byte, size-len(model))...)
		}
	}
	for step := range 400 {
		off, n := rng.IntN(20000), rng.IntN(9000)
		var err error
		switch rng.IntN(9) {
		case 0:
			err = f.Truncate(int64(off))
			extend(off)
			model = model[:off]
		case 1:
			err = f.Preallocate(int64(off))
			extend(off)
		case 2:
			err = errors.Join(f.SyncData(), f.Sync())
		case 3:
			f.DropCache() // loses nothing, synced or not
		default:
			data := bytes.Repeat([]byte(fmt.Sprint(step, ".")), n)[:n]
			_, err = f.WriteAt(data, int64(off))
			if n > 0 {
				extend(off + n)
			}
			copy(model[min(off, len(model)):], data)
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := contents(t, fsys, name); got != string(model) {
			t.Fatalf("step %d: contents differ from the model", step)
		}
		// append after a truncation must not bring back old bytes of the model's slice after its length
		clear(model[len(model):cap(model)])
	}
}
