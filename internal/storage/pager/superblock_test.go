package pager

import (
	"bytes"
	"encoding/binary"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
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

func wholeFile(t *testing.T, mem *vfs.Mem) (whole []byte) {
	t.Helper()
	edit(t, mem, func(data []byte) { whole = bytes.Clone(data) })
	return whole
}

// TestRefusedFileNamesItsReason: each reason has its own error.
func TestRefusedFileNamesItsReason(t *testing.T) {
	const size = 1024
	at := func(data []byte, id int) []byte { return data[id*size : (id+1)*size] }
	copies := []int{copyPagesMax, copyPagesMax + 1}
	both := func(each func(sb []byte)) func(data []byte) {
		return func(data []byte) {
			for _, id := range append([]int{0, 1}, copies...) {
				each(at(data, id))
				page.Seal(at(data, id))
			}
		}
	}
	for name, c := range map[string]struct {
		change func(data []byte)
		want   error
	}{
		"zeros": {func(data []byte) { clear(data) }, ErrNotDataFile},
		"text":  {func(data []byte) { copy(data, "#!/bin/sh\n"); clear(data[10:]) }, ErrNotDataFile},
		"all torn": {func(data []byte) {
			for _, id := range append([]int{0, 1}, copies...) {
				at(data, id)[200]++
			}
		}, ErrSuperblocks},
		"newer version":    {both(func(sb []byte) { binary.LittleEndian.PutUint32(sb[sbVersion:], FormatNewest+1) }), ErrNewerFormat},
		"newer page flags": {both(func(sb []byte) { sb[6] = 1 }), ErrNewerFormat},
		"version 0":        {both(func(sb []byte) { binary.LittleEndian.PutUint32(sb[sbVersion:], 0) }), ErrSuperblocks},
		"odd page size":    {both(func(sb []byte) { binary.LittleEndian.PutUint32(sb[sbPageSize:], 1000) }), ErrSuperblocks},
		"reserved byte":    {both(func(sb []byte) { sb[sbReserved] = 1 }), ErrSuperblocks},
		"root behind end":  {both(func(sb []byte) { binary.LittleEndian.PutUint64(sb[sbRoot:], 1<<20) }), ErrSuperblocks},
		"swapped numbers": {func(data []byte) {
			for id := range superblocks {
				sb := at(data, id)
				binary.LittleEndian.PutUint64(sb[16:], page.ReadHeader(sb).Checkpoint+1)
				page.Seal(sb)
				at(data, copies[id])[200]++
			}
		}, ErrSuperblocks},
		"two stores": {func(data []byte) { data[sbStoreID]++; page.Seal(data[:size]) }, ErrSuperblocks},
		"newer beside older": {func(data []byte) {
			binary.LittleEndian.PutUint32(data[sbVersion:], FormatNewest+1)
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
			f, err := mem.Open(toyFile, vfs.ReadWrite)
			must(t, err)
			must(t, errors.Join(f.Truncate(y.p.fileSize.Load()+size), f.Close(), y.p.Close()))
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

// TestSecondSuperblockIsFoundWithoutTheFirst: its offset depends on the page size, and only the missing
// superblock has a fixed offset. The same is true of the copies, which are found without either.
func TestSecondSuperblockIsFoundWithoutTheFirst(t *testing.T) {
	for size := page.SizeMin; size <= page.SizeMax; size *= 2 {
		for lost := 1; lost <= superblocks; lost++ {
			mem := vfs.NewMem()
			y := createToy(t, mem, size)
			must(t, y.checkpoint(1, []int{0}, nil, 5)) // checkpoint 2, in slot 0
			must(t, y.checkpoint(2, []int{1}, nil, 6)) // checkpoint 3, in slot 1
			must(t, y.p.Close())
			edit(t, mem, func(data []byte) { clear(data[:lost*size]) })
			y, err := openToy(mem)
			must(t, err)
			if y.p.PageSize() != size || len(y.leaves) != 2 || y.p.SuperblocksRepaired() != lost || y.p.SuperblockMissing() {
				t.Fatalf("page size %d: got %d, %v, %v", size, y.p.PageSize(), y.leaves, y.p.SuperblockDamage())
			}
			must(t, y.p.Close())
		}
	}
}

// TestUnreadableSuperblockIsNotSkipped: if the device fails to read the newest superblock, the previous state
// must not be opened. A root of the allocation map that could be read once is no older one if it cannot be read again.
func TestUnreadableSuperblockIsNotSkipped(t *testing.T) {
	for nth := 1; ; nth++ {
		mem := vfs.NewMem()
		y := createToy(t, mem, 512)
		must(t, y.checkpoint(1, []int{0}, nil, 1))
		must(t, y.p.Close())
		faulty := vfs.NewFaulty(mem)
		rule := faulty.Inject(vfs.Rule{Op: vfs.OpRead, Nth: nth})
		y, err := openToy(faulty)
		if rule.Fired() == 0 {
			return
		}
		if err == nil && y.p.State().Epoch != 1 {
			t.Fatalf("read %d failed: opened at epoch %d", nth, y.p.State().Epoch)
		}
		if err != nil && strings.Contains(err.Error(), "wrote the map") {
			t.Errorf("read %d failed: %v", nth, err)
		}
	}
}

// TestOpenWaitsForANewestSuperblockThatMayBeThere: the device fails to read the slot of the newest superblock and its copy, or the one that is not
// damaged. A file that was refused has not changed, and reads are tried again first.
func TestOpenWaitsForANewestSuperblockThatMayBeThere(t *testing.T) {
	const size = 4096
	for damaged := range 3 {
		mem, want, newest, _ := spread(t, size)
		unreadable := newest[:]
		if damaged > 0 {
			flipIn(t, mem, size, 800, newest[damaged-1])
			unreadable = newest[2-damaged : 3-damaged]
		}
		before, faulty := wholeFile(t, mem), vfs.NewFaulty(mem)
		var rules []*vfs.Injected
		for _, id := range unreadable {
			rules = append(rules, faulty.Inject(vfs.Rule{Op: vfs.OpRead, Fault: vfs.Unreadable, Bytes: int(id) * size}))
		}
		if _, err := openToy(faulty); !errors.Is(err, ErrSuperblockUnreadable) || !errors.Is(err, vfs.ErrDevice) {
			t.Fatalf("place %d is damaged: %v", damaged, err)
		}
		if !bytes.Equal(before, wholeFile(t, mem)) {
			t.Error("the file has changed")
		}
		tries := 0
		p, err := Open(faulty, toyFile, Options{ReadAgain: func(int) bool {
			if tries++; tries == 3 {
				for _, r := range rules {
					r.Remove()
				}
			}
			return true
		}})
		must(t, err)
		if tries < 3 || p.SuperblockMissing() {
			t.Errorf("place %d is damaged: %d tries, %v", damaged, tries, p.SuperblockDamage())
		}
		must(t, p.Close())
		y, err := openToy(mem)
		must(t, err)
		if !maps.Equal(y.contents(), want) {
			t.Errorf("place %d is damaged: %v", damaged, y.contents())
		}
		must(t, y.p.Close())
	}
}

// TestASuperblockThatWasGivenUpDoesNotComeBack: slot and copy of the newest superblock were read with another bit, and the state before it went on. Its
// next checkpoint, which a crash ends, has the same number, and overwrites its pages.
func TestASuperblockThatWasGivenUpDoesNotComeBack(t *testing.T) {
	const size = 512
	mem := vfs.NewMem()
	y := createToy(t, mem, size)
	must(t, y.checkpoint(1, []int{0}, nil, 1))
	before := y.contents()
	must(t, y.checkpoint(2, []int{0}, nil, 2))
	newest := *y.p.current()
	must(t, y.p.Close())
	flipIn(t, mem, size, 800, newest.slot(), newest.copy)
	y, err := openToy(mem)
	must(t, err)
	ck, err := y.p.Begin()
	must(t, err)
	left := mem.Crash(1, vfs.SurviveNone)
	ck.Abort()
	_ = y.p.Close()
	mem = left
	flipIn(t, mem, size, 800, newest.slot(), newest.copy)
	y, err = openToy(mem)
	must(t, err)
	if !maps.Equal(y.contents(), before) {
		t.Errorf("checkpoint %d, %v", y.p.Checkpoint(), y.contents())
	}
	must(t, y.p.Close())
	flipIn(t, mem, size, 800, newest.copy)
	if y, err = openToy(mem); err != nil || y.p.SuperblockMissing() {
		t.Errorf("it is not certain that checkpoint %d is the newest: %v", y.p.Checkpoint(), err)
	}
}

// spread is a store after checkpoints that have reused freed pages. It returns its files, and the pages of the
// superblocks: slot and copy of the newest, slot and copy of its predecessor.
func spread(t *testing.T, size int) (mem *vfs.Mem, want map[int]uint64, newest, older [2]page.ID) {
	t.Helper()
	mem = vfs.NewMem()
	y := createToy(t, mem, size)
	for n := range uint64(7) {
		must(t, y.checkpoint(n+1, []int{int(n % 3), 3}, nil, n))
		y.p.ReuseAllFreed(y.p.Checkpoint())
	}
	want = y.contents()
	sb := y.p.current()
	newest = [2]page.ID{sb.slot(), sb.copy}
	older = [2]page.ID{1 - sb.slot(), sb.nextCopy}
	must(t, y.p.Close())
	return mem, want, newest, older
}

// flipIn flips one bit of each of these pages.
func flipIn(t *testing.T, mem *vfs.Mem, size int, bit int, ids ...page.ID) {
	t.Helper()
	edit(t, mem, func(data []byte) {
		for _, id := range ids {
			data[int(id)*size+bit/8] ^= 1 << (bit % 8)
		}
	})
}

// TestDamagedSuperblocksAreRepairedFromTheirCopies flips bits in one page of either superblock, in one of
// both, and in both pages of the older one. Each time the newest state is opened, and the next open finds no
// damage.
func TestDamagedSuperblocksAreRepairedFromTheirCopies(t *testing.T) {
	const size = 512
	_, _, newest, older := spread(t, size)
	for _, c := range []struct {
		name   string
		places []page.ID
	}{
		{"slot of the newest", newest[:1]},
		{"copy of the newest", newest[1:]},
		{"slot of the older", older[:1]},
		{"copy of the older", older[1:]},
		{"both slots", []page.ID{newest[0], older[0]}},
		{"both copies", []page.ID{newest[1], older[1]}},
		{"slot of the newest, copy of the older", []page.ID{newest[0], older[1]}},
		{"copy of the newest, slot of the older", []page.ID{newest[1], older[0]}},
	} {
		for bit := 0; bit < size*8; bit += 31 {
			mem, want, _, _ := spread(t, size)
			flipIn(t, mem, size, bit, c.places...)
			y, err := openToy(mem)
			if err != nil {
				t.Fatalf("%s, bit %d: %v", c.name, bit, err)
			}
			if !maps.Equal(y.contents(), want) || y.p.SuperblockDamage() == nil || y.p.SuperblocksRepaired() != len(c.places) || y.p.SuperblockMissing() {
				t.Fatalf("%s, bit %d: %v, %d repaired: %v", c.name, bit, y.contents(), y.p.SuperblocksRepaired(), y.p.SuperblockDamage())
			}
			must(t, y.p.Close())
			y, err = openToy(mem)
			if err != nil || y.p.SuperblockDamage() != nil || !maps.Equal(y.contents(), want) {
				t.Fatalf("%s, bit %d: opened again: %v", c.name, bit, errors.Join(err, y.p.SuperblockDamage()))
			}
			must(t, y.p.Close())
		}
	}
}

// TestOlderSuperblockIsNotTakenForTheNewestOne: if both pages of the newest are damaged, the previous state is
// opened only if none of its pages has been freed.
func TestOlderSuperblockIsNotTakenForTheNewestOne(t *testing.T) {
	for _, reused := range []bool{true, false} {
		mem := vfs.NewMem()
		y := createToy(t, mem, 512)
		must(t, y.checkpoint(1, []int{0}, nil, 1)) // checkpoint 2
		before, lost := y.contents(), y.leaves[0].id
		must(t, y.checkpoint(2, []int{0}, nil, 2)) // checkpoint 3
		newest := *y.p.current()
		if reused { // checkpoint 4 begins to use the pages of checkpoint 2
			y.p.ReuseAllFreed(3)
			ck, err := y.p.Begin()
			must(t, err)
			for id := page.ID(0); id != lost; {
				id = ck.AllocExtent(1).First
				must(t, writeToyPage(ck, page.TypeLeaf, id, func(p []byte) { binary.LittleEndian.PutUint64(p, 1) }))
			}
			ck.Abort()
		}
		must(t, y.p.Close())
		flipIn(t, mem, 512, 800, newest.slot(), newest.copy)
		y, err := openToy(mem)
		if reused {
			if !errors.Is(err, ErrSuperblockMissing) {
				t.Fatalf("opened on pages of a later state: %v", err)
			}
			continue
		}
		must(t, err)
		if !y.p.SuperblockMissing() || !maps.Equal(y.contents(), before) {
			t.Fatalf("%t, %v", y.p.SuperblockMissing(), y.contents())
		}
		must(t, y.checkpoint(3, []int{1}, nil, 3))
		must(t, y.p.Close())
		y, err = openToy(mem)
		must(t, err)
		if y.p.SuperblockMissing() || y.p.State().Epoch != 3 {
			t.Fatalf("after the next checkpoint: %t, epoch %d", y.p.SuperblockMissing(), y.p.State().Epoch)
		}
		must(t, y.p.Close())
	}
}

// TestLostWriteOfASuperblockIsFound: the device acknowledged both writes and did one.
func TestLostWriteOfASuperblockIsFound(t *testing.T) {
	for place := range 2 {
		mem := vfs.NewMem()
		y := createToy(t, mem, 512)
		must(t, y.checkpoint(1, []int{0}, nil, 1))
		must(t, y.checkpoint(2, []int{0}, nil, 2))
		id := []page.ID{1 - y.p.current().slot(), y.p.current().nextCopy}[place]
		was := make([]byte, 512)
		_, err := y.p.file.ReadAt(was, y.p.offset(id))
		must(t, err)
		must(t, y.checkpoint(3, []int{0, 1}, nil, 3))
		want := y.contents()
		must(t, y.p.Close())
		edit(t, mem, func(data []byte) { copy(data[int(id)*512:], was) })
		y, err = openToy(mem)
		must(t, err)
		if !maps.Equal(y.contents(), want) {
			t.Fatalf("place %d: %v", place, y.contents())
		}
		must(t, y.p.Close())
	}
}

// TestCheckpointSyncsTwice: once for its pages, once for its superblock and the copy.
func TestCheckpointSyncsTwice(t *testing.T) {
	faulty := vfs.NewFaulty(vfs.NewMem())
	y := createToy(t, faulty, 512)
	rule := faulty.Inject(vfs.Rule{Op: vfs.OpSyncData, Nth: 3, Err: errors.New("a third sync")})
	must(t, y.checkpoint(1, []int{0, 1}, nil, 1))
	if rule.Fired() != 0 {
		t.Fatal("a third sync")
	}
	if err := y.checkpoint(2, []int{0}, nil, 2); err == nil {
		t.Fatal("the rule counts nothing")
	}
}

// TestFilesWithoutCopiesGetThem opens files of version 2, and continues.
func TestFilesWithoutCopiesGetThem(t *testing.T) {
	const size, n = 512, 50
	mem := vfs.NewMem()
	p, err := Create(mem, toyFile, Options{PageSize: size})
	must(t, err)
	fillPages(t, p, n) // the copies are after them
	sb, leaf := *p.current(), p.allocation.levels[0][0]
	must(t, p.Close())
	edit(t, mem, func(data []byte) {
		for id := range superblocks {
			p := data[id*size : (id+1)*size]
			binary.LittleEndian.PutUint32(p[sbVersion:], 2)
			clear(p[sbCopy:sbReserved])
			page.Seal(p)
		}
		bits := data[int(leaf)*size : int(leaf+1)*size]
		for _, id := range []page.ID{sb.copy, sb.nextCopy} {
			clear(data[int(id)*size : int(id+1)*size])
			bits[arrPayload+id/8] &^= 1 << (id % 8)
		}
		page.Seal(bits)
	})
	p, err = Open(mem, toyFile, Options{})
	must(t, err)
	if old := p.current(); old.state.Format != 2 || old.copy != 0 || p.SuperblockDamage() != nil {
		t.Fatalf("%+v, %v", old, p.SuperblockDamage())
	}
	fillPages(t, p, 1)
	now := *p.current()
	must(t, p.Close())
	flipIn(t, mem, size, 800, now.slot())
	p, err = Open(mem, toyFile, Options{})
	must(t, err)
	if p.Checkpoint() != now.checkpoint || p.SuperblocksRepaired() != 1 || now.state.Format != FormatOldest {
		t.Fatalf("checkpoint %d of %d, %v", p.Checkpoint(), now.checkpoint, p.SuperblockDamage())
	}
	must(t, p.Close())
}
