package pager

import (
	"encoding/binary"
	"errors"
	"testing"

	"epochkv/internal/storage/page"
	"epochkv/internal/vfs"
)

// edit changes the data file's bytes with change, whole.
func edit(t *testing.T, mem *vfs.Mem, change func(data []byte)) {
	t.Helper()
	f, err := mem.Open(toyFile, vfs.ReadWrite)
	must(t, err)
	size, err := f.Size()
	must(t, err)
	data := make([]byte, size)
	_, err = f.ReadAt(data, 0)
	must(t, err)
	change(data)
	_, err = f.WriteAt(data, 0)
	must(t, errors.Join(err, f.Close()))
}

// TestWhatCannotBeOpenedSaysWhy: each reason has its own error.
func TestWhatCannotBeOpenedSaysWhy(t *testing.T) {
	const size = 1024
	both := func(each func(sb []byte)) func(data []byte) {
		return func(data []byte) {
			for id := range superblocks {
				sb := data[id*size : (id+1)*size]
				each(sb)
				page.Seal(sb)
			}
		}
	}
	for name, c := range map[string]struct {
		change func(data []byte)
		want   error
	}{
		"zeros":            {func(data []byte) { clear(data) }, ErrNotDataFile},
		"text":             {func(data []byte) { copy(data, "#!/bin/sh\n"); clear(data[10:]) }, ErrNotDataFile},
		"both torn":        {func(data []byte) { data[200]++; data[size+200]++ }, ErrSuperblocks},
		"newer version":    {both(func(sb []byte) { binary.LittleEndian.PutUint32(sb[sbVersion:], formatVersion+1) }), ErrNewerFormat},
		"newer page flags": {both(func(sb []byte) { sb[6] = 1 }), ErrNewerFormat},
		"version 0":        {both(func(sb []byte) { binary.LittleEndian.PutUint32(sb[sbVersion:], 0) }), ErrSuperblocks},
		"odd page size":    {both(func(sb []byte) { binary.LittleEndian.PutUint32(sb[sbPageSize:], 1000) }), ErrSuperblocks},
		"reserved byte":    {both(func(sb []byte) { sb[sbReserved] = 1 }), ErrSuperblocks},
		"root behind end":  {both(func(sb []byte) { binary.LittleEndian.PutUint64(sb[sbRoot:], 1<<20) }), ErrSuperblocks},
		"swapped numbers": {both(func(sb []byte) {
			binary.LittleEndian.PutUint64(sb[16:], page.ReadHeader(sb).Checkpoint+1)
		}), ErrSuperblocks},
		"two stores": {func(data []byte) { data[sbStoreID]++; page.Seal(data[:size]) }, ErrSuperblocks},
		"newer beside older": {func(data []byte) {
			binary.LittleEndian.PutUint32(data[sbVersion:], formatVersion+1)
			page.Seal(data[:size])
		}, ErrNewerFormat},
		"map of another length": {both(func(sb []byte) {
			binary.LittleEndian.PutUint64(sb[sbPageCount:], binary.LittleEndian.Uint64(sb[sbPageCount:])+1)
		}), ErrCorrupt},
		"map of another depth": {both(func(sb []byte) { sb[sbDepths]++ }), ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			mem := vfs.NewMem()
			y := createToy(t, mem, size)
			must(t, y.checkpoint(1, []int{0}, nil, 1))
			must(t, y.checkpoint(2, []int{1}, nil, 1))
			must(t, y.p.Close())
			edit(t, mem, c.change)
			if y, err := openToy(mem); !errors.Is(err, c.want) {
				t.Fatalf("got %v, %v; want %v", y, err, c.want)
			}
		})
	}
}

func TestShortFileIsNotOpened(t *testing.T) {
	mem := vfs.NewMem()
	y := createToy(t, mem, 512)
	must(t, y.checkpoint(1, []int{0, 1, 2, 3}, nil, 1))
	end := y.p.offset(y.p.current().pageCount)
	must(t, y.p.Close())
	f, err := mem.Open(toyFile, vfs.ReadWrite)
	must(t, err)
	must(t, f.Truncate(end-1))
	if _, err := openToy(mem); !errors.Is(err, ErrTruncated) {
		t.Fatalf("one byte short: %v", err)
	}
	must(t, f.Truncate(100))
	if _, err := openToy(mem); !errors.Is(err, ErrNotDataFile) {
		t.Fatalf("100 bytes: %v", err)
	}
	must(t, f.Truncate(0))
	if _, err := openToy(mem); !errors.Is(err, ErrNotDataFile) {
		t.Fatalf("empty: %v", err)
	}
}

// TestSecondSuperblockIsFoundWithoutTheFirst: its place depends on the page size, which only the lost one stands at a fixed place for.
func TestSecondSuperblockIsFoundWithoutTheFirst(t *testing.T) {
	for size := page.SizeMin; size <= page.SizeMax; size *= 2 {
		mem := vfs.NewMem()
		y := createToy(t, mem, size)
		must(t, y.checkpoint(1, []int{0}, nil, 5)) // checkpoint 2, in place 0
		must(t, y.checkpoint(2, []int{1}, nil, 6)) // checkpoint 3, in place 1
		must(t, y.p.Close())
		edit(t, mem, func(data []byte) { clear(data[:size]) })
		y, err := openToy(mem)
		must(t, err)
		if y.p.PageSize() != size || len(y.leaves) != 2 || y.p.SuperblockDamage() == nil {
			t.Fatalf("page size %d: got %d, %v, %v", size, y.p.PageSize(), y.leaves, y.p.SuperblockDamage())
		}
	}
}

// TestUnreadableSuperblockIsNotSkipped: a device that fails to read the newest superblock must not bring back the state before.
func TestUnreadableSuperblockIsNotSkipped(t *testing.T) {
	for nth := 1; nth <= 3; nth++ {
		mem := vfs.NewMem()
		y := createToy(t, mem, 512)
		must(t, y.checkpoint(1, []int{0}, nil, 1))
		must(t, y.p.Close())
		faulty := vfs.NewFaulty(mem)
		faulty.Inject(vfs.Rule{Op: vfs.OpRead, Nth: nth})
		if _, err := openToy(faulty); err == nil || errors.Is(err, ErrCorrupt) || errors.Is(err, ErrSuperblocks) {
			t.Fatalf("read %d failed: %v", nth, err)
		}
	}
}

// TestPageFromTheFutureIsRefused: the newest superblock is lost after its successor's pages began to overwrite what the state before it
// reaches. Those pages are sound, but not for that state.
func TestPageFromTheFutureIsRefused(t *testing.T) {
	mem := vfs.NewMem()
	y := createToy(t, mem, 512)
	must(t, y.checkpoint(1, []int{0}, nil, 1)) // checkpoint 2
	lost := y.leaves[0].id
	must(t, y.checkpoint(2, []int{0}, nil, 2)) // checkpoint 3
	y.p.ReleaseThrough(3)
	ck, err := y.p.Begin()
	must(t, err)
	for {
		id := ck.AllocExtent(1).First
		must(t, writeToyPage(ck, page.TypeLeaf, id, func(p []byte) { binary.LittleEndian.PutUint64(p, 1) }))
		if id == lost {
			break
		}
	}
	ck.Abort()
	must(t, y.p.Close())
	edit(t, mem, func(data []byte) { data[512+100]++ }) // superblock 1 is checkpoint 3
	if _, err := openToy(mem); !errors.Is(err, ErrCorrupt) {
		t.Fatalf("opened on pages of a later state: %v", err)
	}
}
