package storage

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestAWriterWaitsForACheckThatBeginsLater: a check that has begun before the log took a file of the reserve says nothing of what is left.
func TestAWriterWaitsForACheckThatBeginsLater(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	e, waits := b.engine, (chan struct{})(nil)
	e.pager.SetReserve(2 << 20) // so that there is something to fill
	b.fs.SetHook(func(op vfs.Op, _ string) {
		if op == vfs.OpPreallocate && waits == nil {
			waits = *e.reserve.checked.Load()
		}
	})
	for check, want := range []bool{false, true} {
		e.CheckSpace()
		if waits == nil {
			t.Fatal("the check has filled nothing")
		}
		ended := false
		select {
		case <-waits:
			ended = true
		default:
		}
		if ended != want {
			t.Errorf("check %d: the wait that began during the first one has ended: %v", check, ended)
		}
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestALargeRecordWithoutRoomLeavesTheOthersTheirPages: the disk has room for what the memtables need, and not for the record beside them.
func TestALargeRecordWithoutRoomLeavesTheOthersTheirPages(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	e := b.engine
	e.CheckSpace()
	e.pager.SetReserve(2 << 20) // as memtables that have grown, it needs more pages than are free
	b.fs.LeaveFree(8 << 20)
	e.reserve.large.Store(32 << 20)
	e.CheckSpace()
	if err := e.Shortage(); err != nil || !e.reserve.noRoom.Load() || !e.covers(e.unmerged()) {
		t.Errorf("%v; no room for the record: %v; room for the others: %v", err, e.reserve.noRoom.Load(), e.covers(e.unmerged()))
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestTwoLargeRecordsDoNotUseTheSamePages: each was told that there are pages for it, which are there once. The second one asks again. It is accepted
// without an answer, because there are no checks any more; a deletion, which has the reserve, does not ask.
func TestTwoLargeRecordsDoNotUseTheSamePages(t *testing.T) {
	const size = 1 << 20
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	e, x, y := b.engine, new(Writer), new(Writer)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	e.RunSpace(ended)
	var builder batch.Builder
	builder.Set(keys.SpaceUser, []byte("large"), make([]byte, size))
	body, err := builder.Finish()
	if err != nil {
		t.Fatal(err)
	}
	e.reserve.large.Store(size)
	e.CheckSpace()
	for _, w := range []*Writer{x, y} {
		if err := e.AwaitReserve(t.Context(), w, body); err != nil || !w.covered {
			t.Fatal(err, w.covered)
		}
	}
	for i, test := range []struct {
		w    *Writer
		asks bool
	}{{x, false}, {y, true}, {x, false}} {
		e.reserve.large.Store(0)
		if reserved, err := e.AdvanceGeneration(t.Context(), test.w, body, keys.MaxEpoch); !reserved || err != nil {
			t.Fatal(i, reserved, err)
		}
		if asked := e.reserve.large.Load() > 0; asked != test.asks {
			t.Errorf("record %d asked for pages: %v", i, asked)
		}
		e.NoOp(test.w)
	}
	b.faults.Inject(vfs.Rule{Op: vfs.OpPreallocate, Name: "data.ekv"})
	e.reserve.large.Store(32 << 20)
	if e.CheckSpace(); !e.reserve.failed.Load() || e.reserve.noRoom.Load() {
		t.Error("a device that fails is full")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestAFileThatShrinksLeavesThePagesForTheMemtables: writers were accepted because these pages are free, and others would take the space.
func TestAFileThatShrinksLeavesThePagesForTheMemtables(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 8 << 20, SegmentBytes: 8 << 20, DiskReserve: 17 << 20})
	e := b.engine
	b.put(0, 2000, 2000)
	e.CheckSpace()
	if !e.covers(e.unmerged()) {
		t.Fatal("the check has not made room")
	}
	e.releasePages()
	if !e.covers(e.unmerged()) {
		t.Error("the pages for the memtables are gone")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestAShortageEndsWithNothingToMerge: a checkpoint that only removed dead versions found the disk full, and when there is space again there is
// nothing left for the next one to do.
func TestAShortageEndsWithNothingToMerge(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 8 << 20, SegmentBytes: 8 << 20, DiskReserve: 8 << 20})
	e := b.engine
	checkpoint := func(snapshots ...keys.Epoch) error {
		if err := e.Rotate(t.Context()); err != nil {
			t.Fatal(err)
		}
		at := keys.Epoch(b.visible.Load())
		return e.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: append(snapshots, at)})
	}
	b.put(0, 2000, 20)
	b.checkpoint()
	before := keys.Epoch(b.visible.Load())
	b.put(0, 2000, 20)
	for again := true; again; again = e.shrinkable() {
		if err := checkpoint(before); err != nil {
			t.Fatal(err)
		}
	}
	full := b.faults.Inject(vfs.Rule{Op: vfs.OpWrite, Name: dataName, Err: vfs.ErrNoSpace})
	if err := checkpoint(); err == nil || e.Shortage() == nil {
		t.Fatalf("checkpoint: %v, shortage: %v", err, e.Shortage())
	}
	full.Remove()
	if err := checkpoint(before); err != nil {
		t.Fatal(err)
	}
	e.CheckSpace()
	if err := e.Shortage(); err != nil {
		t.Error(err)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestARefusedRecordLeavesNothingToTheNextDeletion: a session is pooled, and so its writer. A large record of a client was refused for want of pages;
// the large deletion of another one needs none and does not ask.
func TestARefusedRecordLeavesNothingToTheNextDeletion(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	e, w := b.engine, new(Writer)
	var large, deletion batch.Builder
	large.Set(keys.SpaceUser, []byte("large"), make([]byte, 32<<20))
	record, err := large.Finish()
	if err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(vfs.ErrNoSpace)
	if err := e.AwaitReserve(ended, w, record); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatal(err)
	}
	for i := range 400 {
		deletion.Delete(keys.SpaceUser, fmt.Appendf(nil, "%0100d", i))
	}
	body, err := deletion.Finish()
	if err != nil {
		t.Fatal(err)
	}
	b.fs.LeaveFree(0)
	e.pager.SetReserve(64 << 20) // of which nothing is there
	if !e.oversized(body.Size()) || e.covers(e.unmerged()) {
		t.Fatal("the test tests nothing")
	}
	soon, cancel2 := context.WithTimeout(t.Context(), time.Second)
	defer cancel2()
	if reserved, err := e.AdvanceGeneration(soon, w, body, keys.MaxEpoch); !reserved || err != nil {
		t.Fatal(reserved, err)
	}
	e.NoOp(w)
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestAShortageKeepsNoExpiredKeys: they are records of requests, which deletions leave.
func TestAShortageKeepsNoExpiredKeys(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	e := b.engine
	b.put(0, 2000, 20)
	b.checkpoint()
	b.put(2000, 2001, 20)
	if err := e.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	e.reserve.note(vfs.ErrNoSpace)
	at := keys.Epoch(b.visible.Load())
	expired := Expired{KeyRange: KeyRange{
		Lower: keys.Append(nil, keys.SpaceUser, []byte("key-00000")), Upper: keys.Append(nil, keys.SpaceUser, []byte("key-01000")),
	}}
	if err := e.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}, Expired: []Expired{expired}}); err != nil {
		t.Fatal(err)
	}
	if n := e.Stats().Tree.Entries; n != 1001 {
		t.Errorf("the tree has %d entries", n)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestAShortageGivesBackASegmentThatNoRecordFollows: all of it was durable before it was sealed, as with a large deletion that a client has waited for.
func TestAShortageGivesBackASegmentThatNoRecordFollows(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 1 << 20})
	e := b.engine
	b.put(0, 1, 20)
	if err := e.log.Flush(keys.Epoch(b.visible.Load())); err != nil {
		t.Fatal(err)
	}
	b.checkpoint()
	e.releasePages()
	if n := e.Stats().Log.Segments; n != 1 {
		t.Errorf("the log has %d segments", n)
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestADeletionWaitsForTheSegmentsThatACheckpointRecycles: it finds none, and no memtable that is to be merged any more, because the tree is published, and the
// checkpoint is about to recycle.
func TestADeletionWaitsForTheSegmentsThatACheckpointRecycles(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, DiskReserve: 4 << 20})
	e := b.engine
	b.put(0, 1, 20)
	b.checkpoint()
	b.fs.LeaveFree(0)
	for i, full := 1, false; !full; i++ {
		b.put(i, i+1, 20)
		switch err := e.Rotate(t.Context()); {
		case errors.Is(err, vfs.ErrNoSpace):
			full = true
		case err != nil:
			t.Fatal(err)
		}
	}
	if kept, _ := e.log.Reserve(); kept > 0 {
		t.Fatalf("the reserve of the log has %d files", kept)
	}
	var room <-chan struct{}
	recycles := false
	b.fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpRename && strings.Contains(name, ".log") && !recycles {
			recycles = true
			if n := len(e.view.Load().immutables); n > 0 {
				t.Errorf("%d memtables are to be merged", n)
			}
			room = e.recycledSegment()
		}
	})
	at := keys.Epoch(b.visible.Load())
	if err := e.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); err != nil {
		t.Fatal(err)
	}
	b.fs.SetHook(nil)
	if !recycles || room == nil {
		t.Fatalf("segments are recycled: %v; a deletion waits: %v", recycles, room != nil)
	}
	select {
	case <-room:
	default:
		t.Error("a deletion that waits is not woken")
	}
	if err := e.Close(); err != nil {
		t.Fatal(err)
	}
}
