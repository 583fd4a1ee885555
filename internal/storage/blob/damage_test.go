package blob

import (
	"encoding/binary"
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestDamageAtEveryByteIsFoundOrHarmless flips a bit in each byte of a small file. Opening and reading all of
// it returns an error that says what is damaged, or the right values. A damaged superblock or copy costs
// nothing, and Open reports it.
func TestDamageAtEveryByteIsFoundOrHarmless(t *testing.T) {
	mem := vfs.NewMem()
	b := mustCreate(t, mem, 512)
	first := change{0: value(0, 0, 3000), 1: value(1, 0, 200), 2: value(2, 0, 150)}
	must(t, b.checkpoint(first))
	second := change{1: value(1, 1, 1000), 3: value(3, 1, 0), 4: nil}
	must(t, b.checkpoint(second))
	want := second.apply(first.apply(nil))
	ck, err := b.p.Begin()
	must(t, err)
	pages := append([]page.ID{0, 1}, ck.LiveFrom(2)...)
	ck.Abort()
	must(t, b.p.Close())

	f, err := mem.Open(bagFile, vfs.ReadWrite)
	must(t, err)
	found, supers := 0, 0
	for _, id := range pages {
		var kind [1]byte
		_, err := f.ReadAt(kind[:], int64(id)*512+4)
		must(t, err)
		super := page.Type(kind[0]) == page.TypeSuperblock
		if super {
			supers++
		}
		for at := int64(id) * 512; at < int64(id+1)*512; at++ {
			var old [1]byte
			_, err := f.ReadAt(old[:], at)
			must(t, err)
			flip := []byte{old[0] ^ 1<<(at%8)}
			_, err = f.WriteAt(flip, at)
			must(t, err)
			damaged, err := readAll(mem, want)
			switch {
			case err == nil && damaged != super:
				t.Fatalf("page %d, byte %d: superblock damage %t", id, at%512, damaged)
			case err == nil && !super:
				t.Fatalf("page %d, byte %d: not noticed", id, at%512)
			case err != nil && !errors.Is(err, pager.ErrCorrupt):
				t.Fatalf("page %d, byte %d: %v", id, at%512, err)
			case err != nil:
				var damage *pager.CorruptError
				if errors.As(err, &damage); damage.Page != id || damage.File != bagFile || damage.Offset != int64(id)*512 {
					t.Fatalf("page %d, byte %d: the error is about page %d: %v", id, at%512, damage.Page, err)
				}
				found++
			}
			_, err = f.WriteAt(old[:], at)
			must(t, err)
		}
	}
	if supers != 4 || found != (len(pages)-supers)*512 {
		t.Fatalf("found %d of %d damaged bytes, %d superblocks", found, (len(pages)-supers)*512, supers)
	}
	must(t, f.Close())
}

// readAll opens the file, compares all values with want, and tells whether Open reported a superblock.
func readAll(fs vfs.FS, want map[int]string) (damaged bool, err error) {
	b, err := openBag(fs)
	if err != nil {
		return false, err
	}
	return b.p.SuperblockDamage() != nil, errors.Join(checkContents(b, want), b.p.Close())
}

// FuzzBlobPage feeds the decoders pages with right checksums and arbitrary contents: they answer with errors,
// never with a panic or with bytes from outside the page.
func FuzzBlobPage(f *testing.F) {
	buf := make([]byte, 512)
	d := newBlobPage(buf, 7, 1)
	d.add(3, fragmentWhole, value(3, 0, 100))
	d.add(4, fragmentHead, (&head{length: 1000, extents: []pager.Extent{{First: 9, Count: 2}}, remainder: value(1, 1, 56)}).encode())
	f.Add(buf[page.HeaderSize:], byte(0))
	f.Fuzz(func(t *testing.T, contents []byte, slot byte) {
		buf := make([]byte, 512)
		page.PutHeader(buf, page.Header{Type: page.TypeBlobs, ID: 7, Checkpoint: 1})
		copy(buf[page.HeaderSize:], contents)
		fragments, err := fragmentCount(buf)
		if err != nil || int(slot) >= fragments {
			return
		}
		r, err := fragmentAt(buf, int(slot), fragments)
		if err != nil || r.kind != fragmentHead {
			return
		}
		if h, err := decodeHead(r.data, 512); err == nil {
			pages, remainder := split(h.length, 512)
			n := 0
			for _, e := range h.extents {
				n += e.Count
			}
			if n != pages || len(h.remainder) != remainder {
				t.Fatalf("%d bytes decoded as %d pages and %d bytes", h.length, n, len(h.remainder))
			}
		}
	})
}

// TestAnOlderHeadFreesNoPage: where a device has lost the write of a blob page, there may be the head of a blob that had the id and the length
// before. The pages that it names were freed since, and others may have them.
func TestAnOlderHeadFreesNoPage(t *testing.T) {
	for _, has := range []string{"another blob", "the index", "nothing", "no page", "the blob itself, later"} {
		mem := vfs.NewMem()
		b := mustCreate(t, mem, 512)
		first := change{0: value(0, 0, 600), 1: value(1, 0, 600), 2: value(2, 0, 600)}
		second := change{2: nil}
		must(t, errors.Join(b.checkpoint(first), b.checkpoint(second)))
		b.p.ReuseAllFreed(b.p.Checkpoint())
		f, err := mem.Open(bagFile, vfs.ReadWrite)
		must(t, err)
		buf := make([]byte, 512)
		overflowOf := func(name int) (id uint64, at location, entry []byte) {
			r, err := decodeRef(b.refs[name])
			must(t, err)
			at = b.s.table.locationOf(r.id)
			must(t, b.p.ReadPage(at.page(), buf))
			head, err := fragmentAt(buf, at.slot(), at.slot()+1)
			must(t, err)
			return r.id, at, head.data[headFixed:]
		}
		_, _, entry := overflowOf(1)
		other := page.ID(binary.LittleEndian.Uint64(entry))
		names := other
		id, at, entry := overflowOf(0)
		h := page.ReadHeader(buf)
		switch has {
		case "the index":
			names = b.index[0]
		case "no page":
			names = 1 << 60
		case "nothing":
			for names = 2; b.p.IsLive(names); names++ {
			}
			p := make([]byte, 512)
			page.PutHeader(p, page.Header{Type: page.TypeOverflow, ID: names, Checkpoint: 1})
			putOverflow(p, id, nil)
			_, err := f.WriteAt(p, int64(names)*512)
			must(t, err)
		case "the blob itself, later":
			names = page.ID(binary.LittleEndian.Uint64(entry))
			h.Checkpoint = 1
			page.PutHeader(buf, h)
		}
		binary.LittleEndian.PutUint64(entry, uint64(names))
		page.Seal(buf)
		_, err = f.WriteAt(buf, int64(at.page())*512)
		must(t, errors.Join(err, f.Close()))
		live := b.p.IsLive(names)
		ck, err := b.p.Begin()
		must(t, err)
		batch := b.s.Begin(ck)
		batch.ReadAhead([]page.Ref{b.refs[0], b.refs[1]})
		must(t, batch.Drop(b.refs[0]))
		if has != "another blob" {
			must(t, batch.Drop(b.refs[1]))
		}
		must(t, batch.Finish(t.Context(), 0))
		if err := ck.Commit(t.Context(), pager.State{Epoch: 1, Root: b.index[0]}); err != nil {
			t.Fatalf("%s: %v", has, err)
		}
		if live && !b.p.IsLive(names) {
			t.Errorf("the page of %s was freed", has)
		}
		if shared := has == "another blob" || has == "the blob itself, later"; b.p.IsLive(other) != shared { // the heads are on one page
			t.Errorf("the page of the blob that was dropped beside one with the page of %s is live", has)
		}
		must(t, b.p.Close())
	}
}
