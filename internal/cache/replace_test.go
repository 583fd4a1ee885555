package cache

import "testing"

// written returns the bytes of a page that a merge has written.
func written(id ID) []byte {
	p := make([]byte, testPageSize)
	fill(p, id, 0)
	return p
}

// TestWrittenPagesTakeNoFreshMemory while no reader has asked for them, or for anything.
func TestWrittenPagesTakeNoFreshMemory(t *testing.T) {
	r := newRig(t, 256)
	for id := range ID(100) {
		if r.Replace(1000+id, id+1, written(id+1), Default) {
			t.Fatalf("page %d has a frame", id+1)
		}
	}
	if r.touched != 0 {
		t.Errorf("%d frames have been touched", r.touched)
	}
}

// TestWrittenPageTakesThePlaceOfACachedOne: the first read after a checkpoint finds what the last read before it found.
func TestWrittenPageTakesThePlaceOfACachedOne(t *testing.T) {
	r := newRig(t, 256)
	for id := range ID(100) {
		r.get(t, id+1, Default)
	}
	r.wanted = 0
	for id := range ID(200) {
		if admitted := r.Replace(id+1, id+1001, written(id+1001), Default); admitted != (id < 100) {
			t.Fatalf("page in the place of page %d: admitted %v", id+1, admitted)
		}
	}
	for id := range ID(100) {
		r.get(t, id+1, Default) // readers of the old state
		r.get(t, id+1001, Default)
	}
	if n := r.disk.loads.Load(); n != 100 {
		t.Errorf("%d pages were read, want 100", n)
	}
}

// TestMissesLetWrittenPagesTakeFreshMemory: keys that readers found in memtables are in pages that no reader has asked for.
func TestMissesLetWrittenPagesTakeFreshMemory(t *testing.T) {
	r := newRig(t, 256)
	for id := range ID(5) {
		r.get(t, id+1, Default)
	}
	for id := range ID(5*writtenPerMiss + 1) {
		if admitted := r.Replace(0, id+1001, written(id+1001), Default); admitted != (id < 5*writtenPerMiss) {
			t.Fatalf("written page %d after 5 misses: admitted %v", id, admitted)
		}
	}
}

// TestWrittenPageThatReplacesNoneEvictsNone but takes memory that is in use already.
func TestWrittenPageThatReplacesNoneEvictsNone(t *testing.T) {
	r := newRig(t, 256)
	for id := range ID(300) {
		r.get(t, id+1, Default)
	}
	evicted := r.Stats().Evicted
	for id := range ID(300) {
		r.Replace(0, id+1001, written(id+1001), Default)
	}
	if n := r.Stats().Evicted - evicted; n != 0 {
		t.Errorf("%d pages were evicted for pages that no reader has asked for", n)
	}
	r.wanted = 0
	for id := range ID(300) {
		r.Invalidate(id + 1)
	}
	r.get(t, 1, Default) // reclaims the frames
	r.wanted = 0
	admitted := 0
	for id := range ID(300) {
		if r.Replace(0, id+1001, written(id+1001), Default) {
			admitted++
		}
	}
	if admitted < 200 || admitted > 256-r.reserve {
		t.Errorf("%d pages got the frames of pages that were freed, of 256 with a reserve of %d", admitted, r.reserve)
	}
}

// TestWrittenPageKeepsTheUsageCount of the page that it replaces: a scan after a checkpoint leaves the hot set, although
// all of it was rewritten.
func TestWrittenPageKeepsTheUsageCount(t *testing.T) {
	r := newRig(t, 512)
	const hot = 200
	for range 8 {
		for id := range ID(hot) {
			r.get(t, id+1, Default)
		}
	}
	for id := range ID(hot) {
		r.Replace(id+1, id+1001, written(id+1001), Default)
	}
	if n := r.Stats().Hot; n != hot {
		t.Errorf("%d hot pages, want %d: the old ones are cold, the new ones hot", n, hot)
	}
	for id := range ID(hot) {
		r.Invalidate(id + 1)
	}
	for id := range ID(2048) {
		r.get(t, 5000+id, Low)
	}
	loads := r.disk.loads.Load()
	for id := range ID(hot) {
		r.get(t, id+1001, Default)
	}
	if n := r.disk.loads.Load() - loads; n != 0 {
		t.Errorf("%d of %d hot pages were evicted by a scan", n, hot)
	}
}

// TestReplacingEveryHotPageKeepsTheLimit of the hot set, also when readers of the old state make the old pages hot again.
func TestReplacingEveryHotPageKeepsTheLimit(t *testing.T) {
	r := newRig(t, 128)
	for range 8 {
		for id := range ID(120) {
			r.get(t, id+1, Default)
		}
	}
	for id := range ID(120) {
		r.Replace(id+1, id+1001, written(id+1001), Default)
		for range 4 {
			r.get(t, id+1, Default)
		}
	}
	if hot, most := r.Stats().Hot, uint64(r.clock.hotLimit.Load()); hot > most {
		t.Errorf("%d hot pages, at most %d may be", hot, most)
	}
}

// TestRevokedPageGivesTheUsageCountBack: a scan after an aborted checkpoint, which had rewritten the hot pages, some of them
// twice, leaves the hot set. A prefetched page that had been rewritten waits for its visit as before, so that its eviction counts.
func TestRevokedPageGivesTheUsageCountBack(t *testing.T) {
	r := newRig(t, 640)
	const hot = 200
	for range 8 {
		for id := range ID(hot) {
			r.get(t, id+1, Default)
		}
	}
	for id := range ID(hot) {
		r.Replace(id+1, id+1001, written(id+1001), Default)
	}
	for id := range ID(hot / 2) {
		r.Replace(id+1001, id+2001, written(id+2001), Default)
	}
	for id := range ID(hot / 2) {
		r.Revoke(id + 2001)
	}
	r.Prefetch([]ID{3001}, Default)
	r.Replace(3001, 3002, written(3002), Default)
	r.Revoke(3002)
	for id := range ID(hot) {
		r.Revoke(id + 1001)
	}
	if n := r.Stats().Hot; n != hot {
		t.Errorf("%d hot pages, want %d", n, hot)
	}
	for id := range ID(4096) {
		r.get(t, 5000+id, Low)
	}
	if s := r.Stats(); s.Prefetched != 1 || s.PrefetchedWasted+s.PrefetchedUsed != 1 {
		t.Errorf("of %d prefetched pages %d were visited, and %d evicted", s.Prefetched, s.PrefetchedUsed, s.PrefetchedWasted)
	}
	loads := r.disk.loads.Load()
	for id := range ID(hot) {
		r.get(t, id+1, Default)
	}
	if n := r.disk.loads.Load() - loads; n != 0 {
		t.Errorf("%d of %d hot pages were evicted by a scan", n, hot)
	}
}
