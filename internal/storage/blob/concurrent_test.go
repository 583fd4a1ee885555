package blob

import (
	"sync"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// roots is what an engine keeps: the newest root, and how many readers each root has.
type roots struct {
	mu      sync.Mutex
	refs    map[int]page.Ref
	want    map[int]string
	newest  uint64
	readers map[uint64]int
}

func (r *roots) pin() (refs map[int]page.Ref, want map[int]string, checkpoint uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.readers[r.newest]++
	return r.refs, r.want, r.newest
}

func (r *roots) unpin(checkpoint uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.readers[checkpoint]--; r.readers[checkpoint] == 0 {
		delete(r.readers, checkpoint)
	}
}

func (r *roots) publish(b *bag, want map[int]string) (oldest uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refs, r.want, r.newest = b.refs, want, b.p.Checkpoint()
	oldest = r.newest
	for c := range r.readers {
		oldest = min(oldest, c)
	}
	return oldest
}

// TestReadersRunDuringCheckpoints: readers follow their own roots through the newest table while blobs move,
// are dropped, and come under reused ids, and pages are reused and truncated.
func TestReadersRunDuringCheckpoints(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 512)
	want := map[int]string{}
	r := &roots{readers: map[uint64]int{}, newest: b.p.Checkpoint()}
	done := make(chan struct{})
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				refs, want, checkpoint := r.pin()
				if err := checkContents(&bag{p: b.p, s: b.s, refs: refs}, want); err != nil {
					t.Error(err)
					return
				}
				r.unpin(checkpoint)
			}
		})
	}
	for _, c := range churn(11, 60, 40, 4000) {
		must(t, b.checkpoint(c))
		want = c.apply(want)
		b.p.ReuseAllFreed(r.publish(b, want))
		must(t, b.p.Shrink(nothing))
	}
	close(done)
	wg.Wait()
	must(t, b.audit())
	must(t, checkContents(b, want))
}
