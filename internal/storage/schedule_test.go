package storage

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestImmutableMemtablesWaitWhileCommitsCome: they are merged together with those to come, and soon when no more come.
func TestImmutableMemtablesWaitWhileCommitsCome(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, CheckpointBytes: 32 << 20})
	schedule := func() Work { return b.engine.Schedule(time.Hour, nil) }
	b.put(0, 2000, 100)
	if len(b.engine.view.Load().immutables) == 0 {
		t.Fatal("nothing is immutable")
	}
	rotated := func(ago time.Duration) {
		at := time.Now().Add(-ago)
		b.engine.memory.rotated.Store(&at)
	}
	rotated(immutableWaitIdle + time.Second)
	if work := schedule(); work != WorkNone {
		t.Errorf("while commits come: %v", work)
	}
	if work := schedule(); work != WorkMerge {
		t.Errorf("when none came since the last call: %v", work)
	}
	b.put(2000, 2001, 100)
	rotated(immutableWaitMax + time.Second)
	if work := schedule(); work != WorkMerge {
		t.Errorf("while commits come, after the longest wait: %v", work)
	}
	rotated(0)
	if work := schedule(); work != WorkNone {
		t.Errorf("just after a rotation: %v", work)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestMergesWaitForAsMuchAsTheOneBefore: what is being merged counts no more, so that the next merge takes as much and not what
// happens to be there.
func TestMergesWaitForAsMuchAsTheOneBefore(t *testing.T) {
	const most = 512 << 10
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, CheckpointBytes: most})
	e, next := b.engine, 0
	asked := func() (bytes int64) { // the size of the immutable memtables when a merge is asked for
		t.Helper()
		for ; next < 100_000; next++ {
			b.put(next, next+1, 100)
			select {
			case <-e.CheckpointRequests():
				return residentBytes(e.view.Load().immutables)
			default:
			}
		}
		t.Fatal("no merge is asked for")
		return 0
	}
	first := asked()
	if first < most || first > 2*most {
		t.Errorf("the first merge begins with %d bytes, want about %d", first, most)
	}
	merging := &mergeJob{immutables: e.view.Load().immutables}
	e.throttleBegin(merging)
	if second := asked() - first; second < most {
		t.Errorf("while %d bytes are merged, the next merge is asked for with %d more, want %d", first, second, most)
	}
	e.throttleFail()
}

// TestWorkOfAnIdleStoreEnds: after large deletions each merge that is scheduled makes a checkpoint, and soon none is
// scheduled: also if a damaged page at the end of the file cannot be moved, so that the file stays as long as it is.
func TestWorkOfAnIdleStoreEnds(t *testing.T) {
	for _, damaged := range []bool{false, true} {
		b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 256 << 10, SegmentBytes: 256 << 10})
		b.put(0, 3000, 50)
		b.checkpoint()
		if damaged {
			b.damageLastLeaf()
		}
		for i := range 3000 {
			var w batch.Builder
			w.Delete(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i))
			b.commit(&w)
		}
		b.checkpoint()
		at := []keys.Epoch{keys.Epoch(b.visible.Load())}
		for round := 0; ; round++ {
			work, before := b.engine.Schedule(time.Hour, at), b.engine.Stats().Checkpoints.Finished
			if work == WorkNone {
				break
			}
			if err := b.engine.Checkpoint(context.Background(), GCWatermarks{Visible: at[0], Snapshots: at}); err != nil {
				t.Fatal(err)
			}
			if finished := b.engine.Stats().Checkpoints.Finished; finished == before || round == 200 {
				t.Fatalf("damaged %v, round %d: work %v, %d checkpoints, then %d", damaged, round, work, before, finished)
			}
		}
		st := b.engine.Stats()
		if long := st.Pages.FileBytes/512 > 2*int64(st.Pages.Live)+128; long != damaged || long != (st.Damage.SkippedPages == 1) {
			t.Errorf("damaged %v: %+v, %d skipped pages: the test tests nothing", damaged, st.Pages, st.Damage.SkippedPages)
		}
		if err := b.engine.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestAnEmptyStoreWithADiskReserveIsLeftAlone: the file has pages for the reserve, and for the memtables, which are
// not the remains of a larger tree. A checkpoint every second found nothing to move, for ever.
func TestAnEmptyStoreWithADiskReserveIsLeftAlone(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 256 << 10, SegmentBytes: 256 << 10, DiskReserve: 1 << 20})
	b.put(0, 10, 50)
	b.engine.CheckSpace()
	at := []keys.Epoch{keys.Epoch(b.visible.Load())}
	schedule := func() Work {
		b.engine.Schedule(time.Hour, at) // a store is idle if nothing was committed since the last call
		return b.engine.Schedule(time.Hour, at)
	}
	for round := 0; schedule() != WorkNone; round++ {
		if round == 5 {
			t.Fatalf("%d checkpoints of an idle store: %+v", round, b.engine.Stats().Pages)
		}
		if err := b.engine.Checkpoint(context.Background(), GCWatermarks{Visible: at[0], Snapshots: at}); err != nil {
			t.Fatal(err)
		}
	}
	if s := b.engine.pager.Stats(); s.FileBytes-b.engine.reservedPages() <= 2*relocatePagesMin*512 {
		t.Errorf("the file has no pages but those of the reserve: the test tests nothing: %+v", s)
	}
	if err := b.engine.Close(); err != nil {
		t.Fatal(err)
	}
}

// damageLastLeaf overwrites the live leaf that is the farthest from the beginning of the file.
func (b *bench) damageLastLeaf() {
	b.t.Helper()
	size := b.engine.pager.PageSize()
	buf := make([]byte, size)
	for id := b.engine.pager.PageCount() - 1; ; id-- {
		if !b.engine.pager.IsLive(id) || b.engine.pager.ReadPage(id, buf) != nil || !page.IsTree(buf, 0) {
			continue
		}
		b.clearPage(id)
		return
	}
}

// clearPage overwrites a page with zeros.
func (b *bench) clearPage(id page.ID) { b.writePage(id, make([]byte, b.engine.pager.PageSize())) }

// writePage overwrites a page.
func (b *bench) writePage(id page.ID, content []byte) {
	b.t.Helper()
	f, err := b.fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		b.t.Fatal(err)
	}
	_, err = f.WriteAt(content, int64(id)*int64(len(content)))
	if err := errors.Join(err, f.Close()); err != nil {
		b.t.Fatal(err)
	}
}
