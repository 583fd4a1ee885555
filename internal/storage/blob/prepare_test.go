package blob

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/pager"
	"github.com/epochkv/epochkv/internal/vfs"
)

// preparedBag is a bag with sparse pages and a checkpoint that has dropped, moved and stored many values, and is prepared.
func preparedBag(t *testing.T, fs vfs.FS) (b *bag, ck *pager.Checkpoint, batch *Batch, want map[int]string, next *bag) {
	t.Helper()
	b, want = mustCreate(t, fs, 512), map[int]string{}
	first, second, third := change{}, change{}, change{}
	for i := range 2000 {
		first[i] = value(i, 1, 100+i%90)
		if i%3 != 0 {
			second[i] = nil // two thirds of each page
		}
		if i%6 == 0 {
			third[i] = value(i, 3, 100+i%80)
		}
		third[5000+i] = value(i, 3, 120+i%500)
	}
	for _, c := range []change{first, second} {
		must(t, b.checkpoint(c))
		want = c.apply(want)
	}
	var err error
	ck, err = b.p.Begin()
	must(t, err)
	batch, next = b.s.Begin(ck), &bag{p: b.p, s: b.s}
	next.refs, next.index, err = b.build(ck, batch, third)
	must(t, err)
	must(t, errors.Join(batch.Prepare(t.Context()), ck.Prepare()))
	return b, ck, batch, want, next
}

// TestPreparedBatchLeavesNothingToTheCommit: before the commit and after an abort the blobs of the old state are read at
// their old locations. After the commit those of the new state are read, before and after Publish, and after a restart.
func TestPreparedBatchLeavesNothingToTheCommit(t *testing.T) {
	for _, abort := range []bool{false, true} {
		fs := vfs.NewMem()
		b, ck, batch, want, next := preparedBag(t, fs)
		if !batch.Prepared() {
			t.Errorf("after Prepare %d queued fragments, %d locations and %d pages are left to the commit", len(batch.queue), len(batch.changes), len(batch.fresh))
		}
		if len(batch.earlier)+batch.dropped.count < 500 {
			t.Fatalf("%d older blobs were dropped and moved, 500 are expected at least", len(batch.earlier)+batch.dropped.count)
		}
		must(t, checkContents(b, want))
		if abort {
			ck.Abort()
			must(t, checkContents(b, want))
			must(t, b.checkpoint(change{1: value(1, 4, 300), 6: value(6, 4, 130)})) // the ids are free again
			want = change{1: value(1, 4, 300), 6: value(6, 4, 130)}.apply(want)
		} else {
			must(t, ck.Commit(context.Background(), pager.State{Epoch: 1, Root: next.index[0]}))
			must(t, checkContents(b, want)) // a reader of the old state
			for i := range 2000 {
				if i%6 == 0 {
					want[i] = string(value(i, 3, 100+i%80))
				}
				want[5000+i] = string(value(i, 3, 120+i%500))
			}
			b = next
			must(t, checkContents(b, want))
			batch.Publish()
			must(t, checkContents(b, want))
		}
		must(t, b.audit())
		must(t, b.p.Close())
		reopened, err := openBag(fs)
		must(t, err)
		must(t, checkContents(reopened, want))
		must(t, reopened.p.Close())
	}
}

// TestABlobThatWasMovedIsDropped in the same checkpoint: its readers find it where it was, and the table is to be written again.
func TestABlobThatWasMovedIsDropped(t *testing.T) {
	b, ck, batch, want, next := preparedBag(t, vfs.NewMem())
	dropped := 0
	for _, r := range next.refs {
		ref, err := decodeRef(r)
		must(t, err)
		if _, moved := batch.earlier[ref.id]; moved && dropped < 10 {
			must(t, batch.Drop(r))
			dropped++
			if _, known := batch.earlier[ref.id]; known || batch.Prepared() {
				t.Fatalf("blob %d is known to be moved: %v; there is nothing to write: %v", ref.id, known, batch.Prepared())
			}
		}
	}
	if dropped == 0 {
		t.Fatal("no blob was moved: this tests nothing")
	}
	must(t, batch.Finish(t.Context(), 0))
	must(t, ck.Commit(t.Context(), pager.State{Epoch: 1, Root: next.index[0]}))
	batch.Publish()
	must(t, checkContents(b, want))
}

// TestABatchOfManyValuesTakesLittleMemory: what a bulk load knows of its new values is in the tables, wherever their ids are.
func TestABatchOfManyValuesTakesLittleMemory(t *testing.T) {
	b := mustCreate(t, vfs.NewMem(), 4096)
	must(t, b.checkpoint(change{1: value(1, 1, 300)}))
	var refs []page.Ref
	for range 2 { // the second batch has the ids of the first, which is aborted
		ck, err := b.p.Begin()
		must(t, err)
		batch := b.s.Begin(ck)
		refs = refs[:0]
		for i := range writeAt + 2000 {
			r, err := batch.Store(value(i, 2, 4))
			must(t, errors.Join(err, batch.Relieve()))
			refs = append(refs, r)
		}
		inLeaves := 0
		for _, ids := range batch.byLeaf {
			inLeaves += len(ids)
		}
		if len(batch.changes) > 3000 || inLeaves+len(batch.earlier) > 3000 || len(batch.newIDs) > 10 {
			t.Errorf("the batch has %d changes, %d of older blobs and %d by leaves, and %d runs of ids", len(batch.changes), len(batch.earlier), inLeaves, len(batch.newIDs))
		}
		must(t, batch.Prepare(t.Context()))
		if len(batch.earlier) > 500 {
			t.Errorf("%d values have two locations", len(batch.earlier))
		}
		for i := 0; i < len(refs); i += 1000 {
			got, err := b.s.Append(nil, refs[i], b.s.Direct())
			if must(t, err); string(got) != string(value(i, 2, 4)) {
				t.Fatalf("value %d is %q", i, got)
			}
		}
		ck.Abort()
		must(t, b.audit())
	}
	must(t, b.checkpoint(change{2: value(2, 3, 300)}))
	must(t, b.audit())
}

// TestPagesThatAreWrittenInBetweenCountForTheSparseOnes: a batch that has written its table in between empties as many sparse pages
// as one that has not.
func TestPagesThatAreWrittenInBetweenCountForTheSparseOnes(t *testing.T) {
	var left [2]int
	for i := range left {
		b := mustCreate(t, vfs.NewMem(), 4096)
		first, second := change{}, change{}
		for name := range 1000 {
			first[name] = value(name, 1, 1900) // two on a page
			if name%2 == 0 {
				second[name] = nil
			}
		}
		must(t, errors.Join(b.checkpoint(first), b.checkpoint(second)))
		ck, err := b.p.Begin()
		must(t, err)
		batch := b.s.Begin(ck)
		for name := range 100 {
			_, err := batch.Store(value(name, 2, 3000)) // on no page of the others
			must(t, err)
		}
		if i == 1 {
			must(t, batch.relieve())
		}
		must(t, batch.Prepare(t.Context()))
		for _, pages := range b.s.fill.inBucket[bucketSparse:] {
			left[i] += pages
		}
		ck.Abort()
	}
	if max(left[0], left[1]) > 340 || max(left[0]-left[1], left[1]-left[0]) > 3 {
		t.Errorf("%d and %d of 353 sparse pages are left", left[0], left[1])
	}
}

// TestABatchThatDropsManyValuesTakesLittleMemory: of a value that is dropped it keeps a bit, and of a page what was on it before.
func TestABatchThatDropsManyValuesTakesLittleMemory(t *testing.T) {
	const values = 50_000
	b := mustCreate(t, vfs.NewMem(), 4096)
	store := func(old []page.Ref, abort bool) (refs []page.Ref) {
		ck, err := b.p.Begin()
		must(t, err)
		batch := b.s.Begin(ck)
		for i := range values {
			r, err := batch.Store(value(i, 2, 4))
			must(t, err)
			if refs = append(refs, r); old == nil {
				continue
			}
			must(t, errors.Join(batch.Drop(old[i]), batch.Drop(r)))
			if i == values/2 {
				must(t, batch.Prepare(t.Context()))
			}
		}
		must(t, batch.Prepare(t.Context()))
		if old != nil {
			batch.mustBeSmall(t, 2*values)
		}
		must(t, batch.Finish(t.Context(), 0))
		if abort {
			ck.Abort()
			return refs
		}
		must(t, ck.Commit(t.Context(), b.p.State()))
		batch.Publish()
		return refs
	}
	readable := func(refs []page.Ref) (err error) {
		for i := 0; i < values; i += 500 {
			got, failed := b.s.Append(nil, refs[i], b.s.Direct())
			if err = failed; err == nil && string(got) != string(value(i, 2, 4)) {
				err = fmt.Errorf("value %d is %q", i, got)
			}
		}
		return err
	}
	first := store(nil, false)
	store(first, true)
	must(t, readable(first))
	store(first, false)
	must(t, readable(first)) // by a reader of the old state
	if s := b.s.Stats(); s.Blobs != 0 || s.BlobPages != 0 || s.Dropped != 2*values {
		t.Errorf("%+v are left", s)
	}
	b.p.ReuseAllFreed(b.p.Checkpoint())
	must(t, b.checkpoint(nil))
	if err := readable(first); !errors.Is(err, ErrBadRef) || b.s.Stats().Dropped != 0 {
		t.Errorf("without readers: %v, %+v", err, b.s.Stats())
	}
	must(t, b.audit())
}

// mustBeSmall checks what a batch keeps after so many values were dropped.
func (b *Batch) mustBeSmall(t *testing.T, dropped int) {
	t.Helper()
	inLeaves := 0
	for _, ids := range b.byLeaf {
		inLeaves += len(ids)
	}
	if n := len(b.earlier) + len(b.changes) + inLeaves; n > 1000 || b.dropped.count != dropped {
		t.Errorf("%d locations for %d dropped values", n, b.dropped.count)
	}
	if bytes := len(b.dropped.chunks) * chunkEntries / 8; bytes > dropped/4 {
		t.Errorf("%d bytes for %d dropped values", bytes, dropped)
	}
	if n := len(b.s.fill.journal); n > dropped/20 {
		t.Errorf("%d changes of pages for %d dropped values", n, dropped)
	}
}
