package storage

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/epochkv/epochkv/internal/keys"
	"github.com/epochkv/epochkv/internal/storage/batch"
	"github.com/epochkv/epochkv/internal/storage/page"
	"github.com/epochkv/epochkv/internal/vfs"
)

// paced is a model of writers that fill memory as fast as they may, and of merges that empty it, each taking in what is there when it begins,
// up to what a merge takes at once. Time is virtual.
type paced struct {
	flow
	limit, table int64 // bytes: of memory, of a memtable
	perKiB       int64 // nanoseconds that a merge takes
	fixed        int64 // nanoseconds that it takes on top, whatever it takes in
	varies       float64
	writers      int
	record       int64
	random       *rand.Rand

	now, end               int64
	ready                  []int64         // by writer: when it writes next
	debts                  []time.Duration // by writer
	used, rotated, written int64
	start, ends            int64 // of the merge under way; ends is 0 without one
	looked                 int64
	longest                time.Duration
	stops                  int // writes that memory had no room for
	merging                int64
}

const pacedStart = int64(1_700_000_000 * time.Second)

func (p *paced) at(now int64) time.Time { return time.Unix(0, pacedStart+now) }

// run lets the model work for so long, and reports bytes a second.
func (p *paced) run(d time.Duration) float64 {
	if p.ready == nil {
		p.ready, p.debts = make([]int64, p.writers), make([]time.Duration, p.writers)
		p.random = rand.New(rand.NewPCG(1, 2))
	}
	p.stops, p.longest, p.written, p.merging = 0, 0, 0, 0
	for p.end = p.now + int64(d); p.now < p.end; {
		w := 0
		for i := range p.ready {
			if p.ready[i] < p.ready[w] {
				w = i
			}
		}
		p.now = max(p.now, p.ready[w])
		p.merge(p.now)
		if p.used+p.record > p.limit {
			p.stops++
			p.now = p.ends
			p.merge(p.now)
		}
		p.used, p.written = p.used+p.record, p.written+p.record
		if p.used-p.rotated >= p.table {
			p.rotated = p.used
			p.pressLocked(p.used, p.limit, p.at(p.now))
		}
		p.ready[w] = p.now + int64(2*time.Microsecond) + int64(p.pay(w))
	}
	return float64(p.written) / d.Seconds()
}

// pay is how long writer w waits.
func (p *paced) pay(w int) (wait time.Duration) {
	if p.pace.Load() == 0 {
		return 0
	}
	waiting := int64(0)
	for _, at := range p.ready {
		if at > p.now+int64(2*time.Microsecond) {
			waiting++
		}
	}
	if p.debts[w] = p.owes(p.debts[w], p.record, waiting); p.debts[w] >= paceWaitMin {
		wait, p.debts[w] = p.debts[w], 0
	}
	p.longest = max(p.longest, wait)
	return wait
}

// merge is what merges do at this time.
func (p *paced) merge(now int64) {
	if p.ends > 0 && now >= p.ends {
		p.used, p.rotated, p.ends = p.used-p.taking, p.rotated-p.taking, 0
		p.measureLocked(p.at(now))
		p.endLocked()
		p.pressLocked(p.used, p.limit, p.at(now))
	}
	switch {
	case p.ends == 0 && p.used >= int64(slack*float64(p.limit)):
		takes := min(p.used, p.limit/mergeShare)
		p.beginLocked(takes, takes/p.record, p.at(now))
		factor := 1 + p.varies*(2*p.random.Float64()-1)
		p.start, p.ends = now, now+p.fixed+int64(float64(takes/1024*p.perKiB)*factor)
		p.merging += p.ends - p.start
		p.pressLocked(p.used, p.limit, p.at(now))
	case p.ends > 0 && now-p.looked > int64(pressEvery):
		// The last tenth of a merge's time are syncs.
		p.merged.Store(min(int64(float64(p.versions)*float64(now-p.start)/float64(p.ends-p.start)/0.9), p.versions))
		p.pressLocked(p.used, p.limit, p.at(now))
		p.looked = now
	}
}

// TestWritersAreSlowedAndNotStopped: whatever a merge costs, how much that varies, and however many write however much, after the first ones nobody finds
// memory full, each waits for his share only, and merges are kept busy.
func TestWritersAreSlowedAndNotStopped(t *testing.T) {
	for _, perKiB := range []time.Duration{2 * time.Microsecond, 50 * time.Microsecond, 800 * time.Microsecond} {
		for _, load := range []struct {
			writers int
			record  int64
		}{{1, 512}, {3, 512}, {64, 512}, {16, 16 << 10}, {64, 16 << 10}, {4, 256 << 10}, {16, 64 << 10}} {
			for _, varies := range []float64{0, 0.6} {
				p := &paced{limit: 12 << 20, table: 512 << 10, perKiB: int64(perKiB), writers: load.writers, record: load.record, varies: varies}
				whole := time.Duration(p.limit / 1024 * p.perKiB)
				p.fixed = int64(whole) / 20
				p.run(2 * whole) // learns
				const laps = 8
				rate := p.run(laps * whole)
				sustained := 1024 / perKiB.Seconds()
				busy := float64(p.merging) / float64(laps*whole)
				turn := time.Duration(load.record/1024+1) * perKiB * time.Duration(load.writers) // what a round of all writers costs merges
				t.Logf("%v a KiB, varying by %.1f, %d writers of %d: %.2f of what merges can take, busy %.2f, longest wait %v, a round %v, stopped %d times",
					perKiB, varies, load.writers, load.record, rate/sustained, busy, p.longest, turn, p.stops)
				if p.longest > 12*turn+2*paceWaitMin || p.stops > 0 || busy < 0.8 && rate < 0.8*float64(p.writers)*float64(p.record)/2e-6 {
					t.Errorf("%v a KiB, varying by %.1f, %d writers of %d: busy %.2f, longest wait %v, a round %v, stopped %d times",
						perKiB, varies, load.writers, load.record, busy, p.longest, turn, p.stops)
				}
			}
		}
	}
}

// TestPaceSettles: writers that are faster than merges end up as fast as them at all times, and not fast and slow by turns.
func TestPaceSettles(t *testing.T) {
	p := &paced{limit: 46 << 20, table: 2 << 20, perKiB: int64(800 * time.Microsecond), writers: 3, record: 512}
	whole := time.Duration(p.limit / 1024 * p.perKiB)
	p.run(3 * whole)
	sustained := 1024 / (800 * time.Microsecond).Seconds()
	least, most := 9e9, 0.0
	for range 200 {
		rate := p.run(whole/100) / sustained
		least, most = min(least, rate), max(most, rate)
	}
	t.Logf("from %.2f to %.2f of what merges can take", least, most)
	if least < 0.5 || most > 2 {
		t.Errorf("writers got from %.2f to %.2f of what merges can take", least, most)
	}
}

// TestNobodyWaitsWhileMemoryIsFree: pacing costs nothing then, not even the clock.
func TestNobodyWaitsWhileMemoryIsFree(t *testing.T) {
	f := slow(30 << 20)
	if debt := f.owes(0, 1<<30, 10); debt != 0 || f.pace.Load() != 0 {
		t.Fatalf("a wait of %v", debt)
	}
}

// slow is the flow of an engine whose merges took a millisecond a KiB, with so much memory in use of 100 MiB.
func slow(used int64) *flow {
	f, now := new(flow), time.Now()
	f.beginLocked(10<<20, 1000, now)
	f.measureLocked(now.Add(10240 * time.Millisecond))
	f.endLocked()
	f.pressLocked(used, 100<<20, now)
	return f
}

// TestWritersShareByBytes: who writes much waits for much, and who writes little does not wait for him.
func TestWritersShareByBytes(t *testing.T) {
	f := slow(375 * (100 << 20) / 1000) // where writers and merges keep step
	if got := f.owes(0, 1<<20, 0); got < 1000*time.Millisecond || got > 1050*time.Millisecond {
		t.Errorf("a lone writer waits %v for a MiB", got)
	}
	if got := f.owes(0, 1<<10, 1); got < 2*time.Millisecond || got > 2100*time.Microsecond {
		t.Errorf("beside another, a writer waits %v for a KiB", got)
	}
	if got := f.owes(0, 64<<20, 100); got > paceWaitMax {
		t.Errorf("somebody waits %v", got)
	}
}

// TestPaceIsSmoothAcrossAMerge: neither its end nor the view behind it makes the pace jump, though memory falls.
func TestPaceIsSmoothAcrossAMerge(t *testing.T) {
	b := newBench(t)
	e := b.engine
	b.put(0, 2000, 60)
	if err := e.Rotate(context.Background()); err != nil {
		t.Fatal(err)
	}
	e.frozenBytes.Store(e.frozenBytesOf(e.view.Load()) * 10 / 9)
	job := &mergeJob{frozen: e.view.Load().frozen}
	e.flowBegins(job)
	e.flow.began = e.flow.began.Add(-time.Second)
	begun := e.Pace()
	for _, g := range job.frozen {
		e.flow.merged.Add(int64(g.mem.Versions()))
	}
	e.roomMade()
	merged := e.Pace()
	e.flowMeasured()
	e.roomMade()
	measured := e.Pace()
	if begun == 0 || merged > begun/10 || measured > merged {
		t.Errorf("the pace is %v when the merge begins, %v when all is merged, %v before the new view", begun, merged, measured)
	}
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

// TestMergeCountsWhatItTakesInOnce: progress ends at the number of versions, with few of them in each part, and with a second attempt, which brings
// the record of a lost page.
func TestMergeCountsWhatItTakesInOnce(t *testing.T) {
	for _, every := range []int{1, 7, 100} {
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
			if got := b.engine.flow.merged.Load(); got > versions+1 || !damaged && got != versions || got < versions*9/10 {
				t.Errorf("every %dth key, damaged %v: %d versions of %d were counted", every, damaged, got, versions)
			}
			if lost := b.engine.Stats().Tree.LostPages; damaged != (lost > 0) {
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
	frozen = b.engine.view.Load().frozen
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

// TestMemoryComesFreeDuringAMerge: what a checkpoint retired while a reader was inside goes when he has left, though the next merge, which may take
// seconds, has begun.
func TestMemoryComesFreeDuringAMerge(t *testing.T) {
	b := newBench(t)
	reader := b.engine.registry.Slot()
	defer reader.Free()
	reader.Enter()
	b.put(0, 1000, 50)
	b.checkpoint()
	if b.engine.retired.bytes.Load() == 0 {
		t.Fatal("a memtable was freed under its reader")
	}
	if err := b.engine.checkpointing.LockOrEnd(t.Context()); err != nil { // as the next merge does
		t.Fatal(err)
	}
	defer b.engine.checkpointing.Unlock()
	reader.Leave()
	b.engine.Reclaim()
	if n := b.engine.retired.bytes.Load(); n != 0 {
		t.Errorf("%d bytes stay until the merge has ended", n)
	}
}

// TestNobodyWaitsForPagesThatMove: while writers wait for a merge it does little of what can be done later.
func TestNobodyWaitsForPagesThatMove(t *testing.T) {
	value := make([]byte, 100)
	moved := func(behind bool) uint64 {
		b := newBench(t)
		many := func(keysTo int, write func(w *batch.Builder, key []byte)) {
			for i := 0; i < keysTo; {
				var w batch.Builder
				for end := min(i+500, keysTo); i < end; i++ {
					write(&w, fmt.Appendf(nil, "key-%05d", i))
				}
				b.commit(&w)
			}
			b.checkpoint()
		}
		many(45_000, func(w *batch.Builder, key []byte) { w.Set(keys.SpaceUser, key, value) })
		many(25_000, func(w *batch.Builder, key []byte) { w.Delete(keys.SpaceUser, key) }) // in front, so that everything else could move
		b.put(0, 1, 1)
		b.checkpoint() // the pages that were freed can be used from here on
		limit := b.engine.frozenBytes.Load()
		before := b.engine.pager.Stats().PagesWritten
		b.put(0, 1, 1)
		if behind {
			b.engine.frozenBytes.Store(1)
		}
		b.checkpoint()
		b.engine.frozenBytes.Store(limit)
		return b.engine.pager.Stats().PagesWritten - before
	}
	idle, busy := moved(false), moved(true)
	t.Logf("%d pages written, %d while writers wait", idle, busy)
	if idle < 2*relocatePagesMin || busy > relocatePagesMin*3/2 {
		t.Errorf("%d pages written, %d while writers wait", idle, busy)
	}
}

// TestWhoWaitsForRoomHearsWhatIsWrong: of a full disk, or of a store that has failed, at once, and not that memory was full in the end.
func TestWhoWaitsForRoomHearsWhatIsWrong(t *testing.T) {
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
		b.engine.frozenBytes.Store(1)
		waited := make(chan error, 1)
		go func() { waited <- b.engine.Rotate(context.Background()) }()
		for b.engine.counters.stalls.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		b.faults.Inject(vfs.Rule{Op: vfs.OpWrite | vfs.OpPreallocate, Name: "data.ekv", Err: c.fault})
		at := keys.Epoch(b.visible.Load())
		if err := b.engine.Checkpoint(t.Context(), Horizon{Visible: at, Live: []keys.Epoch{at}}); err == nil {
			t.Fatalf("a checkpoint beside %v", c.fault)
		}
		select {
		case err := <-waited:
			if !errors.Is(err, c.want) {
				t.Errorf("beside %v, who waited heard %v", c.fault, err)
			}
		case <-time.After(defaultStallMax / 2):
			t.Errorf("beside %v, who waits hears nothing", c.fault)
		}
	}
}

// TestNobodyTriesAgainForNothing: while a reader protects what memory is full of, a look that frees nothing wakes nobody. Each would have a checkpoint
// made, which looks again.
func TestNobodyTriesAgainForNothing(t *testing.T) {
	b := newBench(t)
	reader := b.engine.registry.Slot()
	defer reader.Free()
	reader.Enter()
	b.put(0, 100, 50)
	b.checkpoint()
	room := b.engine.room
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
		t.Error("memory came free, and nobody was woken")
	}
}

// TestMergesThatSlowDownStopNobody: a merge that takes eight times as long as those before is noticed while it goes on.
func TestMergesThatSlowDownStopNobody(t *testing.T) {
	for _, writers := range []int{1, 64} {
		p := &paced{limit: 12 << 20, table: 512 << 10, perKiB: int64(50 * time.Microsecond), writers: writers, record: 512}
		whole := time.Duration(p.limit / 1024 * p.perKiB)
		p.run(4 * whole)
		p.perKiB *= 8
		p.run(8 * whole)
		t.Logf("%d writers: longest wait %v, stopped %d times", writers, p.longest, p.stops)
		if p.stops > 0 {
			t.Errorf("%d writers were stopped %d times", writers, p.stops)
		}
	}
}

// TestHurryEndsWaits: a server that drains does not wait for writers who wait for the pace.
func TestHurryEndsWaits(t *testing.T) {
	b := newBench(t)
	b.engine.flow.pace.Store(int64(time.Second))
	b.engine.merging.Store(true)
	done := make(chan struct{})
	go func() {
		b.engine.Pay(context.Background(), &b.writer, 1, 1<<20)
		close(done)
	}()
	for b.engine.flow.waiting.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	b.engine.Hurry()
	select {
	case <-done:
	case <-time.After(paceWaitMax / 2):
		t.Fatal("a writer goes on waiting")
	}
}

// TestMemoryTouchedAheadIsCounted: what a table has beyond what entries have taken is memory in use, too.
func TestMemoryTouchedAheadIsCounted(t *testing.T) {
	b := newBench(t)
	b.engine.memtableBytes = 32 << 20 // of the tables to come
	b.put(0, 1, 10)
	if err := b.engine.Rotate(context.Background()); err != nil {
		t.Fatal(err)
	}
	before := b.engine.frozenBytesOf(b.engine.view.Load())
	b.engine.touchActive(b.slot)
	active := b.engine.view.Load().active.mem
	if got := b.engine.frozenBytesOf(b.engine.view.Load()); got-before < 4<<20 || active.Resident()-active.Bytes() < 4<<20 {
		t.Errorf("%d bytes in use, %d before %d were touched ahead", got, before, active.Resident()-active.Bytes())
	}
}

// TestDeadlineEndsTheThrottle: a writer who is slowed down leaves when the context ends, and what is left of the wait is not the next one's.
func TestDeadlineEndsTheThrottle(t *testing.T) {
	var e Engine
	e.merging.Store(true)
	e.flow.pace.Store(int64(time.Hour))
	var w Writer
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Millisecond)
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		e.Pay(ctx, &w, 1, 1<<20)
	}()
	select {
	case <-done:
	case <-time.After(paceWaitMax - time.Second):
		t.Error("the deadline ended nothing")
		<-done
	}
	if w.debt > paceStep {
		t.Errorf("%v of the wait are left to the next commit", w.debt)
	}
	if waiting := e.flow.waiting.Load(); waiting != 0 {
		t.Errorf("%d writers count as waiting", waiting)
	}
}
