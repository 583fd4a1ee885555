package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/storage/throttle"
	"github.com/epochkv/epochkv/internal/testseed"
	"github.com/epochkv/epochkv/internal/vfs"
)

// TestDelayIsSmoothAcrossAMerge: neither the end of a merge nor the view that it publishes makes the delay jump, though memory falls.
func TestDelayIsSmoothAcrossAMerge(t *testing.T) {
	b := newBench(t)
	e := b.engine
	b.put(0, 2000, 60)
	if err := e.Rotate(context.Background()); err != nil {
		t.Fatal(err)
	}
	e.memory.immutableBytes.Store(e.immutableBytesOf(e.view.Load()) * 10 / 9)
	job := &mergeJob{immutables: e.view.Load().immutables}
	e.throttleBegin(job)
	e.mu.Lock()
	e.throttling.BeginMergeLocked(residentBytes(job.immutables), versionsOf(job.immutables), time.Now().Add(-time.Second))
	e.updateThrottleLocked(time.Now())
	e.mu.Unlock()
	begun := e.ThrottleDelayPerKiB()
	for _, g := range job.immutables {
		e.throttling.Merged.Add(int64(g.mem.Versions()))
	}
	e.signalRoom()
	merged := e.ThrottleDelayPerKiB()
	e.throttleMeasure()
	e.signalRoom()
	measured := e.ThrottleDelayPerKiB()
	if begun == 0 || merged > begun/10 || measured > merged {
		t.Errorf("the delay is %v when the merge begins, %v when all is merged, %v before the new view", begun, merged, measured)
	}
}

// versionsOf is the number of versions in generations.
func versionsOf(generations []*generation) (n int64) {
	for _, g := range generations {
		n += int64(g.mem.Versions())
	}
	return n
}

// fillMemory makes the limit so small that the delay is the longest one.
func (b *bench) fillMemory() {
	b.engine.memory.immutableBytes.Store(1 - b.engine.memory.memtableBytes)
	b.engine.mu.Lock()
	defer b.engine.mu.Unlock()
	b.engine.updateThrottleLocked(time.Now())
}

// damageLeaf overwrites the first leaf of a tree that was written in one go.
func (b *bench) damageLeaf() {
	b.t.Helper()
	f, err := b.fs.Open("db/data.ekv", vfs.ReadWrite)
	if err != nil {
		b.t.Fatal(err)
	}
	buf := make([]byte, b.engine.pager.PageSize())
	for id := page.ID(2); ; id++ {
		if err := b.engine.pager.ReadPage(id, buf); err != nil {
			b.t.Fatal(err)
		}
		if page.IsTree(buf, 0) {
			_, err := f.WriteAt(bytes.Repeat([]byte{0xff}, 64), int64(id)*int64(len(buf))+200)
			if err := errors.Join(err, f.Close()); err != nil {
				b.t.Fatal(err)
			}
			return
		}
	}
}

// TestMergeCountsWhatItTakesInOnce: progress ends at the number of versions, with few of them in each
// partition, and with a second attempt, which adds the record of a skipped page.
func TestMergeCountsWhatItTakesInOnce(t *testing.T) {
	for _, every := range []int{1, 7, 100} {
		if exhaustiveStep > 1 && every == 1 {
			continue
		}
		for _, damaged := range []bool{false, true} {
			b := newBench(t)
			var all batch.Builder
			for i := range 20_000 {
				all.Set(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i), make([]byte, 60))
			}
			b.commit(&all)
			b.checkpoint()
			versions := int64(0)
			var some batch.Builder
			for i := 0; i < 20_000; i += every {
				some.Set(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i), make([]byte, 60))
				versions++
			}
			b.commit(&some)
			if damaged {
				b.damageLeaf()
			}
			b.checkpoint()
			if got := b.engine.throttling.Merged.Load(); got > versions+1 || !damaged && got != versions || got < versions*9/10 {
				t.Errorf("every %dth key, damaged %v: %d versions of %d were counted", every, damaged, got, versions)
			}
			if lost := b.engine.Stats().Damage.SkippedPages; damaged != (lost > 0) {
				t.Errorf("%d pages are lost", lost)
			}
		}
	}
}

// TestMergeTakesTheOldestThatFit: what one merge takes in is bounded, and at least one generation.
func TestMergeTakesTheOldestThatFit(t *testing.T) {
	b := newBench(t)
	var frozen []*generation
	for range 5 {
		b.put(0, 100, 50)
		if err := b.engine.Rotate(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	frozen = b.engine.view.Load().immutables
	one := int64(frozen[len(frozen)-1].mem.Resident())
	for _, c := range []struct {
		most int64
		want int
	}{{0, 1}, {one, 1}, {2*one + one/2, 2}, {100 * one, len(frozen)}} {
		got := atOnce(frozen, c.most)
		if len(got) != c.want || got[len(got)-1] != frozen[len(frozen)-1] {
			t.Errorf("of %d generations of %d bytes, %d within %d", len(frozen), one, len(got), c.most)
		}
	}
}

// TestMemoryComesFreeDuringAMerge: memory that a checkpoint retired while a reader was in its guard is
// freed when the reader has left, although the next merge, which may take seconds, has begun.
func TestMemoryComesFreeDuringAMerge(t *testing.T) {
	b := newBench(t)
	reader := b.engine.registry.Slot()
	defer reader.Free()
	reader.Enter()
	b.put(0, 1000, 50)
	b.checkpoint()
	if b.engine.memory.retired.bytes.Load() == 0 {
		t.Fatal("a memtable was freed under its reader")
	}
	if err := b.engine.checkpoints.mu.Lock(t.Context()); err != nil { // as the next merge does
		t.Fatal(err)
	}
	defer b.engine.checkpoints.mu.Unlock()
	reader.Leave()
	b.engine.Reclaim()
	if n := b.engine.memory.retired.bytes.Load(); n != 0 {
		t.Errorf("%d bytes stay until the merge has ended", n)
	}
}

// TestPagesHardlyMoveWhileWritersWait: while writers wait for a merge it does little of what can be done later.
func TestPagesHardlyMoveWhileWritersWait(t *testing.T) {
	testseed.SkipUnderRace(t)
	moved := func(behind bool) uint64 {
		b := newBench(t)
		b.holes(100, 45_000, 25_000)
		limit := b.engine.memory.immutableBytes.Load()
		before := b.engine.pager.Stats().PagesWritten
		b.put(0, 1, 1)
		if behind {
			b.engine.memory.immutableBytes.Store(1 - b.engine.memory.memtableBytes)
		}
		b.checkpoint()
		b.engine.memory.immutableBytes.Store(limit)
		return b.engine.pager.Stats().PagesWritten - before
	}
	idle, busy := moved(false), moved(true)
	t.Logf("%d pages written, %d while writers wait", idle, busy)
	if idle < 2*relocatePagesMin || busy > relocatePagesMin*3/2 {
		t.Errorf("%d pages written, %d while writers wait", idle, busy)
	}
}

// TestStalledWriterGetsCheckpointError: of a full disk, or of a store that failed, at once, and not that memory was full in the end.
func TestStalledWriterGetsCheckpointError(t *testing.T) {
	for _, c := range []struct {
		fault syscall.Errno
		want  error
	}{{syscall.ENOSPC, vfs.ErrNoSpace}, {syscall.EIO, ErrFailed}} {
		b := newBench(t)
		b.put(0, 100, 50)
		if err := b.engine.Rotate(context.Background()); err != nil {
			t.Fatal(err)
		}
		b.put(0, 100, 50)
		b.engine.memory.immutableBytes.Store(1 - b.engine.memory.memtableBytes)
		waited := make(chan error, 1)
		active := b.engine.view.Load().active
		active.seal()
		go func() {
			waited <- b.engine.awaitRoom(context.Background(), func() (obstacle, error) { return b.engine.advanceGeneration(active, 0, nil) })
		}()
		for b.engine.counters.stalls.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		b.faults.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: c.fault})
		at := keys.Epoch(b.visible.Load())
		if err := b.engine.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); err == nil {
			t.Fatalf("a checkpoint beside %v", c.fault)
		}
		select {
		case err := <-waited:
			if !errors.Is(err, c.want) {
				t.Errorf("beside %v, the stalled writer got %v", c.fault, err)
			}
		case <-time.After(defaultStallMax / 2):
			t.Errorf("beside %v, the stalled writer got nothing", c.fault)
		}
	}
}

// TestReclaimThatFreesNothingWakesNoWriter: while a reader protects all retired memory, Reclaim wakes no writer. Each would request a
// checkpoint, which reclaims again.
func TestReclaimThatFreesNothingWakesNoWriter(t *testing.T) {
	b := newBench(t)
	reader := b.engine.registry.Slot()
	defer reader.Free()
	reader.Enter()
	b.put(0, 100, 50)
	b.checkpoint()
	room := b.engine.memory.room
	b.engine.Reclaim()
	select {
	case <-room:
		t.Error("nothing came free, and writers were woken")
	default:
	}
	reader.Leave()
	b.engine.Reclaim()
	select {
	case <-room:
	default:
		t.Error("memory came free, and no writer was woken")
	}
}

// TestStopThrottlingEndsDelays: a server that drains does not wait for delayed writers.
func TestStopThrottlingEndsDelays(t *testing.T) {
	b := newBench(t)
	b.fillMemory()
	b.engine.checkpoints.merging.Store(true)
	done := make(chan struct{})
	go func() {
		b.engine.Throttle(context.Background(), &b.writer, 1, 1<<20)
		close(done)
	}()
	for b.engine.throttling.clients.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	b.engine.StopThrottling()
	select {
	case <-done:
	case <-time.After(throttle.WaitMax / 2):
		t.Fatal("a writer goes on waiting")
	}
}

// TestWritersWaitOnlyWhileAMergeRuns: until the active memtable is full there is nothing to merge, and a wait would only put off
// the merge.
func TestWritersWaitOnlyWhileAMergeRuns(t *testing.T) {
	b := newBench(t)
	b.fillMemory()
	if b.engine.ThrottleDelayPerKiB() == 0 {
		t.Fatal("there is no delay")
	}
	if waited := b.engine.Throttle(t.Context(), &b.writer, 1, 1<<20); waited != 0 || b.writer.delayOwed != 0 {
		t.Errorf("a writer waited %v and owes %v while nothing is merged", waited, b.writer.delayOwed)
	}
	b.engine.checkpoints.merging.Store(true)
	go func() {
		for b.engine.throttling.clients.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		b.engine.checkpoints.merging.Store(false)
	}()
	if waited := b.engine.Throttle(t.Context(), &b.writer, 1, 1<<20); waited == 0 {
		t.Error("no writer waits while memory is full and a merge runs")
	}
}

// TestMergesTakeTheProcessorsOfDelayedWriters: also while a merge goes on, and not against the configuration.
func TestMergesTakeTheProcessorsOfDelayedWriters(t *testing.T) {
	b := newBench(t)
	e, processors := b.engine, runtime.GOMAXPROCS(0)
	if n := e.mergeWorkers(); n > max(1, processors/2) {
		t.Errorf("%d workers while no writer is delayed", n)
	}
	b.fillMemory()
	if n := e.mergeWorkers(); n != processors {
		t.Errorf("%d workers on %d processors while writers are delayed", n, processors)
	}
	e.options.CheckpointWorkers = 1
	if n := e.mergeWorkers(); n != 1 {
		t.Errorf("%d workers where one is configured", n)
	}
}

// TestTheActiveTableAloneKeepsCheckpointsFromNothing: where there is memory for few memtables, the active one alone causes a delay, which ends with no
// merge. On a full disk the vacuum then makes the room that ends the refusal of writes.
func TestTheActiveTableAloneKeepsCheckpointsFromNothing(t *testing.T) {
	b := newBench(t)
	e := b.engine
	b.put(0, 2000, 20)
	b.checkpoint()
	kept := keys.Epoch(b.visible.Load())
	for i := range 2000 {
		var w batch.Builder
		w.Delete(keys.SpaceUser, fmt.Appendf(nil, "key-%05d", i))
		b.commit(&w)
	}
	at := keys.Epoch(b.visible.Load())
	if err := e.Rotate(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := e.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{kept, at}}); err != nil {
		t.Fatal(err)
	}
	b.fillMemory()
	if e.ThrottleDelayPerKiB() == 0 || len(e.view.Load().immutables) > 0 {
		t.Fatal("the active memtable causes no delay: the test tests nothing")
	}
	if err := e.Checkpoint(t.Context(), GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); err != nil {
		t.Fatal(err)
	}
	if v := e.Stats().Vacuum; v.Versions == 0 {
		t.Errorf("no dead version was removed: %+v", v)
	}
}

// TestOneTableThatIsMergedLeavesWritersTheSpeedOfTheMerge: with memory for two immutable memtables, the first is being merged as
// soon as it is full. Writers that were slower than that merge would leave the next one without work.
func TestOneTableThatIsMergedLeavesWritersTheSpeedOfTheMerge(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 4 << 20, SegmentBytes: 4 << 20})
	e := b.engine
	for i := 0; len(e.view.Load().immutables) == 0; i++ {
		b.put(i, i+1, 400)
	}
	full := e.view.Load().immutables
	e.memory.immutableBytes.Store(2 * residentBytes(full))
	now := time.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.throttling.BeginMergeLocked(1<<20, 1000, now.Add(-100*time.Millisecond))
	e.throttling.MeasureMergeLocked(now) // merges take a tenth of a millisecond for a KiB, about
	e.throttling.EndMergeLocked()
	e.throttling.BeginMergeLocked(residentBytes(full), versionsOf(full), now)
	e.updateThrottleLocked(now)
	if delay, merge := e.ThrottleDelayPerKiB(), 100*time.Millisecond/1024; delay > 2*merge { // part of the next table is touched already
		t.Errorf("the delay is %v a KiB, where a merge takes %v", delay, merge)
	}
}

// TestMemoryTouchedAheadIsCounted: what a table has beyond what entries have taken is memory in use, too.
func TestMemoryTouchedAheadIsCounted(t *testing.T) {
	b := newBench(t)
	b.engine.memory.memtableBytes = 32 << 20 // of the tables to come
	b.put(0, 1, 10)
	if err := b.engine.Rotate(context.Background()); err != nil {
		t.Fatal(err)
	}
	before := b.engine.immutableBytesOf(b.engine.view.Load())
	b.engine.prefaultActive(b.slot)
	active := b.engine.view.Load().active.mem
	if got := b.engine.immutableBytesOf(b.engine.view.Load()); got-before < 4<<20 || active.Resident()-active.Bytes() < 4<<20 {
		t.Errorf("%d bytes in use, %d before %d were touched ahead", got, before, active.Resident()-active.Bytes())
	}
}

// TestAWaitThatEndedIsRepaidByLargeCommits: a small commit of the next client waits no longer than twice what it costs itself.
func TestAWaitThatEndedIsRepaidByLargeCommits(t *testing.T) {
	b := newBench(t)
	b.fillMemory()
	e := b.engine
	e.checkpoints.merging.Store(true)
	var w Writer
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	e.Throttle(ended, &w, 1, 1<<20)
	if w.delayLeft != throttleStep {
		t.Fatalf("%v are left of a wait that ended, not %v", w.delayLeft, throttleStep)
	}
	cost := e.throttling.Owed(0, 100+nodeBytes, 0)
	before := w.delayLeft
	if 2*cost >= throttleWaitMin {
		t.Fatalf("a small commit costs %v: it waits", cost)
	}
	if waited := e.Throttle(ended, &w, 1, 100); waited != 0 || w.delayOwed != 2*cost || w.delayLeft != before-cost {
		t.Errorf("a small commit that costs %v has waited %v, owes %v, and has repaid %v", cost, waited, w.delayOwed, before-w.delayLeft)
	}
	w.delayOwed = 0
	e.Throttle(ended, &w, 1, 1<<20)
	if w.delayLeft > throttleStep {
		t.Errorf("%v are left after two waits that ended", w.delayLeft)
	}
}

// TestDeadlineEndsTheThrottle: a delayed writer leaves when the context ends, and what is left of the wait is not the next one's.
func TestDeadlineEndsTheThrottle(t *testing.T) {
	b := newBench(t)
	b.fillMemory()
	e := b.engine
	e.checkpoints.merging.Store(true)
	var w Writer
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.Throttle(ctx, &w, 1, 1<<20)
	}()
	select {
	case <-done:
	case <-time.After(throttle.WaitMax - time.Second):
		t.Error("the deadline ended nothing")
		<-done
	}
	if w.delayOwed > throttleStep {
		t.Errorf("%v of the wait are left to the next commit", w.delayOwed)
	}
	if waiting := e.throttling.clients.Load(); waiting != 0 {
		t.Errorf("%d writers count as waiting", waiting)
	}
}

// TestWritersWaitWhileAMergeIsDue: after a merge the reserve of the disk is filled, and before the next one log and watermark are waited
// for. Writers that did not wait meanwhile would fill the memory, and be stopped.
func TestWritersWaitWhileAMergeIsDue(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, CheckpointBytes: 128 << 10})
	for i := 0; len(b.engine.CheckpointRequests()) == 0; i++ {
		b.put(i, i+1, 100)
	}
	b.fillMemory()
	if waited := b.engine.Throttle(t.Context(), &b.writer, 1, 1<<20); waited == 0 {
		t.Error("no writer waits while memory is full and a merge is due")
	}
}

// TestMergeThatEndsEarlyLeavesNothingDue: a checkpoint of an operator, which ends, has taken the memtables on which a merge was to begin.
// They wait for another one, for which writers wait, so it is asked for.
func TestMergeThatEndsEarlyLeavesNothingDue(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 1 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10, CheckpointBytes: 128 << 10})
	e, next := b.engine, 0
	for ; len(e.CheckpointRequests()) == 0; next++ {
		b.put(next, next+1, 100)
	}
	<-e.CheckpointRequests()
	ctx, cancel := context.WithCancel(t.Context())
	b.fs.SetHook(func(op vfs.Op, name string) {
		if op == vfs.OpWrite && strings.HasSuffix(name, ".ekv") {
			cancel()
		}
	})
	defer b.fs.SetHook(nil)
	at := keys.Epoch(b.visible.Load())
	if err := e.Checkpoint(ctx, GCWatermarks{Visible: at, Snapshots: []keys.Epoch{at}}); !errors.Is(err, context.Canceled) {
		t.Fatalf("the checkpoint: %v", err)
	}
	if due, asked := e.throttling.due.Load(), len(e.CheckpointRequests()) > 0; !due || !asked {
		t.Errorf("a merge is due: %v; one is asked for: %v", due, asked)
	}
}

// TestSmallerMemoryForMemtablesAsksForTheMergeThatIsDue: what waits already may have the size of a merge now.
func TestSmallerMemoryForMemtablesAsksForTheMergeThatIsDue(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 9 << 20, CacheBytes: 2 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10})
	for i := 0; residentBytes(b.engine.view.Load().immutables) < 1<<20; i++ {
		b.put(i, i+1, 100)
	}
	if len(b.engine.CheckpointRequests()) > 0 {
		t.Fatal("a merge is asked for too early")
	}
	if _, err := b.engine.ResizeCache(6 << 20); err != nil {
		t.Fatal(err)
	}
	if len(b.engine.CheckpointRequests()) == 0 {
		t.Error("no merge is asked for")
	}
}

// TestSmallerMemoryForMemtablesFreesMergedOnes: the cache has the memory of those that wait to be used again.
func TestSmallerMemoryForMemtablesFreesMergedOnes(t *testing.T) {
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 9 << 20, CacheBytes: 2 << 20, MemtableBytes: 64 << 10, SegmentBytes: 64 << 10})
	e := b.engine
	for i := 0; residentBytes(e.view.Load().immutables) < 4<<20; i++ {
		b.put(i, i+1, 4000)
	}
	b.checkpoint()
	taken := func() int64 {
		return e.immutableBytesOf(e.view.Load()) + int64(len(e.memory.pool.pooled))*e.memory.memtableBytes
	}
	before := taken()
	if _, err := e.ResizeCache(7 << 20); err != nil {
		t.Fatal(err)
	}
	if most := e.memory.immutableBytes.Load(); before <= most || taken() > most {
		t.Errorf("tables take %d bytes, after %d before, of %d", taken(), before, most)
	}
}

// TestAMergedTableOfALargeRecordGivesItsMemoryBack: while it waits to be used again it counts as a table of ordinary size, and takes as much.
func TestAMergedTableOfALargeRecordGivesItsMemoryBack(t *testing.T) {
	const memtableBytes = 256 << 10
	b := openBench(t, Options{PageSize: 512, MemoryBytes: 64 << 20, CacheBytes: 2 << 20, MemtableBytes: memtableBytes, SegmentBytes: 64 << 10})
	e := b.engine
	b.put(0, 1, 8<<20)
	b.put(1, 2, 100)
	if got := residentBytes(e.view.Load().immutables); got < 8<<20 {
		t.Fatalf("the large record's table takes %d bytes", got)
	}
	b.checkpoint()
	pooled := 0
	for _, table := range e.memory.pool.pooled {
		pooled += table.Resident()
	}
	if n := len(e.memory.pool.pooled); n == 0 || pooled > n*memtableBytes*9/8 {
		t.Errorf("%d merged tables take %d bytes, with %d for each", n, pooled, memtableBytes)
	}
}

// TestThrottleKnowsWhereWritersAreStopped: the memory that it takes for free is never more than what writers can fill.
func TestThrottleKnowsWhereWritersAreStopped(t *testing.T) {
	const table = 1 << 20
	for _, immutable := range []int64{2 * table, 3*table - 1, 3 * table, 29 * table / 10, 100*table + 5} {
		m := memory{memtableBytes: table}
		m.immutableBytes.Store(immutable)
		stop := int64(table)
		for frozen := int64(0); frozen+table <= immutable; stop = frozen + table { // see advanceGeneration
			frozen += table
		}
		if got := m.throttleLimit(); got != stop {
			t.Errorf("%d for immutable memtables of %d: a limit of %d, and writers are stopped at %d", immutable, table, got, stop)
		}
	}
}

// TestWhatEndsHasAPartOfItsOwn: a writer that ends what clients have left waits for its own bytes, however many clients wait, and clients do not wait
// for it.
func TestWhatEndsHasAPartOfItsOwn(t *testing.T) {
	const pace, clients = 100 * time.Microsecond, 40
	b := newBench(t)
	e := b.engine
	e.throttleAtLeast(pace)
	e.checkpoints.merging.Store(true)
	owed := func(ends bool) time.Duration {
		w := Writer{Ends: ends}
		if waited := e.Throttle(t.Context(), &w, 1, 1<<10-nodeBytes); waited != 0 {
			return waited
		}
		return w.delayOwed
	}
	e.throttling.clients.Add(clients)
	if got := owed(true); got != pace {
		t.Errorf("beside %d clients it owes %v for a KiB that costs %v", clients, got, pace)
	}
	if got := owed(false); got < clients*pace-throttleWaitMin {
		t.Errorf("beside %d others, a client waits %v for a KiB that costs %v", clients, got, pace)
	}
	e.throttling.clients.Add(-clients)
	e.throttling.ending.Add(3)
	if got := owed(false); got != pace {
		t.Errorf("beside what ends, a client owes %v for a KiB that costs %v", got, pace)
	}
	if got := owed(true); got != 4*pace {
		t.Errorf("beside three others that end something, it owes %v for a KiB that costs %v", got, pace)
	}
}
