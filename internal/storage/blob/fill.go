package blob

import (
	"math/bits"

	"github.com/epochkv/epochkv/internal/storage/bitset"
	"github.com/epochkv/epochkv/internal/storage/page"
)

// fill knows how full each blob page is, and finds pages by free space. It is the free list of partly
// filled pages: sixteen buckets by free sixteenths, each a bitmap. So a page changes its bucket in a few
// stores, and the pages found do not depend on the history.
//
// Pages are grouped in regions of 4096. Only regions with blob pages have memory, 16 KiB each (half a
// byte for each KiB of file).
type fill struct {
	capacity int
	regions  []*region
	inBucket [buckets]int // pages
	pages    int
	live     uint64 // bytes of live fragments, entries included

	excluded bitset.Set // pages that cannot be read; they are in no bucket

	journal  []fillChange // the pages that changed since begin, for undo
	changed  bitset.Set   // the same pages
	relieved int          // pages that Relieve has entered since begin
}

const (
	buckets     = 16
	regionPages = 4096

	// bucketMin is the fullest bucket that is worth filling up: a quarter free.
	bucketMin = buckets / 4
	// bucketSparse is where pages begin to be evacuated: half free, so that two of them make one.
	bucketSparse = buckets / 2
)

type region struct {
	live   [regionPages]uint16 // bytes of live fragments
	counts [buckets]uint16
	bucket [buckets][regionPages / 64]uint64
}

type fillChange struct {
	id  page.ID
	old uint16
}

func (f *fill) begin() {
	for i := range f.journal {
		f.changed.Remove(int(f.journal[i].id))
	}
	f.journal, f.relieved = f.journal[:0], 0
}

// undo restores the state at begin.
func (f *fill) undo() {
	for _, c := range f.journal {
		f.put(c.id, c.old)
	}
	f.begin()
}

// of is the bytes of live fragments on page id, zero if it is no blob page.
func (f *fill) of(id page.ID) int {
	if int(id/regionPages) >= len(f.regions) || f.regions[id/regionPages] == nil {
		return 0
	}
	return int(f.regions[id/regionPages].live[id%regionPages])
}

// set records that page id has live bytes of live fragments. Zero means that it is no blob page any
// more.
func (f *fill) set(id page.ID, live int) {
	if f.changed.Add(int(id)) {
		f.journal = append(f.journal, fillChange{id, uint16(f.of(id))})
	}
	f.put(id, uint16(live))
}

func (f *fill) put(id page.ID, live uint16) {
	for int(id/regionPages) >= len(f.regions) {
		f.regions = append(f.regions, nil)
	}
	r := f.regions[id/regionPages]
	if r == nil {
		r = new(region)
		f.regions[id/regionPages] = r
	}
	i := int(id % regionPages)
	shunned := f.excluded.Has(int(id))
	if old := r.live[i]; old != 0 {
		if !shunned {
			b := f.bucketOf(int(old))
			r.bucket[b][i/64] &^= 1 << (i % 64)
			r.counts[b]--
			f.inBucket[b]--
		}
		f.pages--
		f.live -= uint64(old)
	}
	r.live[i] = live
	if live != 0 {
		if !shunned {
			b := f.bucketOf(int(live))
			r.bucket[b][i/64] |= 1 << (i % 64)
			r.counts[b]++
			f.inBucket[b]++
		}
		f.pages++
		f.live += uint64(live)
	} else if shunned {
		f.excluded.Remove(int(id)) // a later write to this page stores another page
	}
}

// exclude hides a blob page that cannot be read from best and sparsest until its fragments are gone.
func (f *fill) exclude(id page.ID) {
	live := f.of(id)
	f.put(id, 0)
	f.excluded.Add(int(id))
	f.put(id, uint16(live))
}

// pin keeps a blob page live that has fragments that are not in the table and may be needed. One byte more than its fragments
// take keeps it from becoming empty, and from passing checkFragments, so that no batch moves its fragments and frees it.
func (f *fill) pin(id page.ID) {
	f.exclude(id)
	f.put(id, uint16(f.of(id)+1))
}

func (f *fill) bucketOf(live int) int { return (f.capacity - live) * buckets / f.capacity }

// best is the fullest page that certainly has room for cost bytes and is worth filling.
func (f *fill) best(cost int) (page.ID, bool) {
	for b := max(bucketMin, (cost*buckets+f.capacity-1)/f.capacity); b < buckets; b++ {
		if id, ok := f.last(b); ok {
			return id, true
		}
	}
	return 0, false
}

// sparsest is one of the pages that should be evacuated, if there are two.
func (f *fill) sparsest() (page.ID, bool) {
	n := 0
	for b := bucketSparse; b < buckets; b++ {
		n += f.inBucket[b]
	}
	for b := buckets - 1; n >= 2 && b >= bucketSparse; b-- {
		if id, ok := f.last(b); ok {
			return id, true
		}
	}
	return 0, false
}

// last is the page of a bucket that is nearest to the file end, from where pages should move anyway.
func (f *fill) last(b int) (page.ID, bool) {
	if f.inBucket[b] == 0 {
		return 0, false
	}
	for i := len(f.regions) - 1; i >= 0; i-- {
		r := f.regions[i]
		if r == nil || r.counts[b] == 0 {
			continue
		}
		for w := len(r.bucket[b]) - 1; ; w-- {
			if word := r.bucket[b][w]; word != 0 {
				return page.ID(i*regionPages + w*64 + bits.Len64(word) - 1), true
			}
		}
	}
	return 0, false
}

// factor is the part of all blob pages that live fragments take; 1 without pages.
func (f *fill) factor() float64 {
	if f.pages == 0 {
		return 1
	}
	return float64(f.live) / (float64(f.pages) * float64(f.capacity))
}
