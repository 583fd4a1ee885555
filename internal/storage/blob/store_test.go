package blob

import (
	"errors"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestValuesOfEveryLengthComeBack writes values around each length at which the form changes, and reads them
// before and after reopening.
func TestValuesOfEveryLengthComeBack(t *testing.T) {
	for _, size := range []int{512, 4096, 8192, 65536} {
		c := change{}
		add := func(n int) {
			if n >= 0 {
				c[len(c)] = value(len(c), size, n)
			}
		}
		for d := -16; d <= 16; d++ {
			for _, n := range []int{
				0, size / 4, size, fragmentMax(size), capacity(size), overflowBytes(size), 2 * overflowBytes(size),
				overflowBytes(size) + fragmentMax(size) - headFixed - extentsMax*headExtent,
			} {
				add(n + d)
			}
		}
		add(9*overflowBytes(size) + 1)
		add(1<<20 + 3)
		mem := vfs.NewMem()
		b := mustCreate(t, mem, size)
		must(t, b.checkpoint(c))
		want := c.apply(nil)
		must(t, checkContents(b, want))
		must(t, b.audit())
		must(t, b.p.Close())
		b, err := openBag(mem)
		must(t, err)
		must(t, checkContents(b, want))
		must(t, b.p.Close())
	}
}

func TestSixteenMebibytes(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 8192)
	c := change{0: value(0, 0, 16<<20), 1: value(1, 1, 16<<20+1)}
	must(t, b.checkpoint(c))
	must(t, checkContents(b, c.apply(nil)))
	if s := b.p.Stats(); s.Submissions > s.PagesWritten/16 {
		t.Fatalf("%d pages went out in %d pieces", s.PagesWritten, s.Submissions)
	}
}

// TestReaderOfOldRootFindsItsBlobs: blobs that later checkpoints dropped or moved stay readable until their
// reuse is allowed.
func TestReaderOfOldRootFindsItsBlobs(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	first := change{}
	for i := range 60 {
		first[i] = value(i, 0, 100+i*29)
	}
	must(t, b.checkpoint(first))
	old := &bag{p: b.p, s: b.s, refs: b.refs}
	rootCheckpoint := b.p.Checkpoint()
	for round := 1; round < 8; round++ {
		c := change{}
		for i := range 60 {
			switch i % 3 {
			case 0:
				c[i] = nil
			case 1:
				c[i] = value(i, round, 50+(i*round*7)%400)
			}
		}
		must(t, b.checkpoint(c))
		must(t, b.audit())
		must(t, checkContents(old, first.apply(nil)))
	}
	b.p.ReuseAllFreed(rootCheckpoint) // nothing that the old root needs
	must(t, b.checkpoint(change{100: value(1, 1, 300)}))
	must(t, checkContents(old, first.apply(nil)))
	pending := b.p.Stats().Pending
	b.p.ReuseAllFreed(b.p.Checkpoint())
	must(t, b.checkpoint(change{101: value(1, 1, 300)}))
	must(t, b.audit())
	if s := b.p.Stats(); s.Pending >= pending {
		t.Fatalf("%d pages pending before the release, %d after", pending, s.Pending)
	}
}

// TestSparsePagesAreEvacuated: deleting most values frees most blob pages, although no page loses all its blobs
// at once.
func TestSparsePagesAreEvacuated(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 4096)
	c, del := change{}, change{}
	for i := range 1000 {
		c[i] = value(i, 0, 600)
		if i%10 != 0 {
			del[i] = nil
		}
	}
	must(t, b.checkpoint(c))
	full := b.s.Stats()
	if full.FillFactor < 0.85 {
		t.Fatalf("fill factor %.2f after one batch", full.FillFactor)
	}
	must(t, b.checkpoint(del))
	for i := range 40 {
		b.p.ReuseAllFreed(b.p.Checkpoint())
		must(t, b.p.Shrink(nothing))
		must(t, b.checkpoint(change{-i - 1: value(i, 0, 600)}))
		must(t, b.audit())
	}
	if s := b.s.Stats(); s.FillFactor < fillMin || s.BlobPages > full.BlobPages/4 {
		t.Fatalf("before %+v, after %+v", full, s)
	}
	must(t, checkContents(b, b.model(t)))
}

func (b *bag) model(t *testing.T) map[int]string {
	m, err := b.contents()
	must(t, err)
	return m
}

// TestFileReachesAPlateau puts and deletes everything again and again: the file stays within twice the peak of
// live bytes, and shrinks when the values are deleted.
func TestFileReachesAPlateau(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 4096)
	var peakLive, peakFile int64
	for round := range 5 {
		for part := range 10 {
			c := change{}
			for i := range 100 {
				c[part*100+i] = value(i, round, 1100+(i*(round+1)*397)%9000)
			}
			must(t, b.checkpoint(c))
			peakLive = max(peakLive, int64(b.s.Stats().Bytes))
			b.breathe(t, &peakFile)
		}
		for part := range 10 {
			c := change{}
			for i := range 100 {
				c[part*100+i] = nil
			}
			must(t, b.checkpoint(c))
			b.breathe(t, &peakFile)
		}
	}
	if peakFile > 2*peakLive {
		t.Fatalf("the file reached %d bytes for %d live ones", peakFile, peakLive)
	}
	for range 20 {
		must(t, b.checkpoint(change{0: value(0, 0, 1500)}))
		b.breathe(t, &peakFile)
	}
	if s := b.p.Stats(); s.FileBytes > 64*4096 {
		t.Fatalf("%d bytes are left for one value: %+v", s.FileBytes, s)
	}
}

func (b *bag) breathe(t *testing.T, peakFile *int64) {
	t.Helper()
	b.p.ReuseAllFreed(b.p.Checkpoint())
	must(t, b.p.Shrink(nothing))
	*peakFile = max(*peakFile, b.p.Stats().FileBytes)
}

// TestBatchesAreDeterministic: the same changes give the same bytes, also when an aborted checkpoint came in between.
func TestBatchesAreDeterministic(t *testing.T) {
	run := func(abort bool) *vfs.Mem {
		mem := vfs.NewMem()
		b := mustCreate(t, mem, 512)
		for round := range 12 {
			c := change{}
			for i := range 40 {
				if (i*7+round)%3 != 0 {
					c[i] = value(i, round, (i*131+round*977)%1800)
				} else if round > 2 {
					c[i] = nil
				}
			}
			if abort {
				ck, err := b.p.Begin()
				must(t, err)
				_, _, err = b.build(ck, b.s.Begin(ck), c)
				must(t, err)
				ck.Abort()
				must(t, b.audit())
			}
			must(t, b.checkpoint(c))
			b.p.ReuseAllFreed(b.p.Checkpoint() - 1)
		}
		return mem
	}
	want, got := fileBytes(t, run(false)), fileBytes(t, run(true))
	if string(want) != string(got) {
		t.Fatal("the files differ")
	}
}

// fileBytes is the live pages of the data file, except the superblocks, which hold a random identity.
func fileBytes(t *testing.T, mem *vfs.Mem) []byte {
	t.Helper()
	p, err := pager.Open(mem, bagFile, pager.Options{})
	must(t, err)
	ck, err := p.Begin()
	must(t, err)
	var all []byte
	buf := make([]byte, p.PageSize())
	for _, id := range ck.LiveFrom(2) {
		must(t, p.ReadPage(id, buf))
		if page.ReadHeader(buf).Type != page.TypeSuperblock {
			all = append(all, buf...)
		}
	}
	ck.Abort()
	must(t, p.Close())
	return all
}

// TestLongLivedBlobsMoveDown: unchanged values at the file end do not keep the file long.
func TestLongLivedBlobsMoveDown(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 4096)
	c, del := change{}, change{}
	for i := range 300 {
		c[i] = value(i, 0, 500+i*97)
		del[i] = nil
	}
	must(t, b.checkpoint(c))
	must(t, b.checkpoint(change{1000: value(1, 1, 100_000), 1001: value(1, 2, 900), 1002: value(1, 3, 50_000)}))
	must(t, b.checkpoint(del))
	peak := int64(0)
	for i := range 30 {
		b.breathe(t, &peak)
		must(t, b.checkpoint(change{1: value(i, 0, 700)}))
		must(t, b.audit())
	}
	if s := b.p.Stats(); s.FileBytes > 100*4096 {
		t.Fatalf("%d bytes of file for %d of values: %+v", s.FileBytes, s.Blobs.Bytes, s)
	}
}

// TestValuesThatCannotMoveDownAreReadOnce: where all holes are too small for the values at the file end, a checkpoint looks at
// each of these once, and not at each of their pages.
func TestValuesThatCannotMoveDownAreReadOnce(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	small, large, del := change{}, change{}, change{}
	for i := range 600 {
		small[i] = value(i, 0, 3*overflowBytes(512)+10)
		if i%2 == 0 {
			del[i] = nil
		}
	}
	for i := range 4 {
		large[1000+i] = value(i, 1, 100*overflowBytes(512)+10)
	}
	must(t, b.checkpoint(small))
	must(t, b.checkpoint(large))
	must(t, b.checkpoint(del))
	b.p.ReuseAllFreed(b.p.Checkpoint())
	b.relocate = 400
	read := b.p.PagesRead()
	must(t, b.checkpoint(change{-1: value(1, 2, 200)}))
	if n := b.p.PagesRead() - read; n > 100 {
		t.Fatalf("%d pages were read to move none of 4 values", n)
	}
	must(t, b.audit())
}

// TestWrongBlobsAreRefused: references and table entries that are valid in themselves and lead to another value
// give errors.
func TestWrongBlobsAreRefused(t *testing.T) {
	mem := vfs.NewMem()
	b := mustCreate(t, mem, 512)
	must(t, b.checkpoint(change{0: value(0, 0, 140), 1: value(1, 0, 140), 2: value(2, 0, 2000), 3: value(3, 0, 2000)}))
	for name, spoil := range map[string]func(r ref) ref{
		"other blob":     func(r ref) ref { r.id ^= 1; return r },
		"no such blob":   func(r ref) ref { r.id += 1 << 20; return r },
		"other length":   func(r ref) ref { r.length++; return r },
		"other checksum": func(r ref) ref { r.checksum++; return r },
		"absurd length":  func(r ref) ref { r.length = 1 << 40; return r },
	} {
		for i := range 4 {
			r, err := decodeRef(b.refs[i])
			must(t, err)
			_, err = b.s.Append(nil, spoil(r).encode(), b.s.Direct())
			if !errors.Is(err, ErrBadRef) && !errors.Is(err, pager.ErrCorrupt) {
				t.Fatalf("%s, value %d: %v", name, i, err)
			}
		}
	}
	// The two short blobs share a page. A table that confuses them must be noticed without the value's checksum,
	// too, because relocation does not read it.
	for id := range uint64(2) {
		other := b.s.table.locationOf(id ^ 1)
		buf := make([]byte, 512)
		must(t, b.p.ReadPage(other.page(), buf))
		if _, err := b.s.fragmentIn(buf, id, other); !errors.Is(err, pager.ErrCorrupt) {
			t.Fatalf("blob %d in the place of blob %d: %v", id, id^1, err)
		}
	}
}

// TestPageArraysAreNotMixedUp: a superblock whose roots are exchanged is damaged, even if both page arrays have
// one page.
func TestPageArraysAreNotMixedUp(t *testing.T) {
	mem := vfs.NewMem()
	b := mustCreate(t, mem, 512)
	must(t, b.checkpoint(change{0: value(0, 0, 140)}))
	fragments := b.p.Blobs()
	if fragments.Table.Depth != 1 {
		t.Fatalf("table of depth %d", fragments.Table.Depth)
	}
	_, err := b.p.ReadArray(pager.ArrayAllocationMap, fragments.Table, 1, func(int, []byte) error { return nil })
	if !errors.Is(err, pager.ErrCorrupt) {
		t.Fatalf("the indirection table loaded as the map: %v", err)
	}
}

// TestPageWithOtherFragmentsIsLeftAlone: a page whose live fragments disagree with the accounts, as after a write that the device has lost, is neither
// filled nor freed, and stops no checkpoint.
func TestPageWithOtherFragmentsIsLeftAlone(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	must(t, b.checkpoint(change{0: value(0, 0, 140)}))
	at := b.s.table.locationOf(0).page()
	b.s.fill.put(at, uint16(b.s.fill.of(at)+20))
	want := change{0: value(0, 0, 140)}.apply(nil)
	for i := 1; i < 4; i++ {
		c := change{i: value(i, 0, 140)}
		must(t, b.checkpoint(c))
		want = c.apply(want)
	}
	if now := b.s.table.locationOf(0).page(); now != at {
		t.Errorf("the fragment has moved from page %d to page %d", at, now)
	}
	must(t, checkContents(b, want))
}

// TestPagesAreFilledWhateverTheLength: a batch of values of one length leaves at most a quarter of its pages unused.
func TestPagesAreFilledWhateverTheLength(t *testing.T) {
	for _, n := range []int{1030, 1100, 1400, 2000, 2050, 2700, 4000, 4056, 4060, 5000, 6100} {
		b := mustCreate(t, vfs.NewMem(), 4096)
		c := change{}
		for i := range 400 {
			c[i] = value(i, 0, n)
		}
		must(t, b.checkpoint(c))
		must(t, b.audit())
		if f := b.s.Stats().FillFactor; f < 0.74 {
			t.Errorf("values of %d bytes: fill factor %.2f", n, f)
		}
	}
}

// TestBatchDropsWhatItStored: several merges may share a checkpoint, and a later one drops what an earlier one
// stored.
func TestBatchDropsWhatItStored(t *testing.T) {
	for _, size := range []int{512, 8192} {
		mem := vfs.NewMem()
		b := mustCreate(t, mem, size)
		b.wasteful = true
		var want map[int]string
		for round := range 6 {
			c := change{}
			for i := range 60 {
				n := (i*7 + round*13) % 60
				if c[n] = value(n, round, 20+n*n*size/512); i%5 == round {
					c[n] = nil
				}
			}
			must(t, b.checkpoint(c))
			must(t, b.audit())
			want = c.apply(want)
			must(t, checkContents(b, want))
			b.p.ReuseAllFreed(b.p.Checkpoint() - 1)
		}
		must(t, b.p.Close())
		b, err := openBag(mem)
		must(t, err)
		must(t, b.audit())
		must(t, checkContents(b, want))
		must(t, b.p.Close())
	}
}

// TestBatchDropsWhatItHasHalfWritten: a value is dropped while its first fragment has a page and its second one is still
// queued, as when a bulk load stores values and a later round finds newer ones. Nothing of it stays.
func TestBatchDropsWhatItHasHalfWritten(t *testing.T) {
	for _, length := range []int{250, 330, 750, 1150} { // the last two have overflow pages
		for count := 12; count < 26; count++ {
			b := mustCreate(t, vfs.NewMem(), 512)
			ck, err := b.p.Begin()
			must(t, err)
			batch := b.s.Begin(ck)
			var refs []page.Ref
			for i := range count {
				ref, err := batch.Store(value(i, 0, length))
				must(t, err)
				refs = append(refs, ref)
			}
			for _, ref := range refs {
				must(t, batch.Drop(ref))
			}
			must(t, batch.Finish(t.Context(), 0))
			must(t, ck.Commit(t.Context(), b.p.State()))
			if err := b.audit(); err != nil {
				t.Errorf("after %d values of %d bytes: %v", count, length, err)
			}
			must(t, b.p.Close())
		}
	}
}
