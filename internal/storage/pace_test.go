package storage

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"epochkv/internal/storage/batch"
	"epochkv/internal/storage/keys"
	"epochkv/internal/vfs"
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
	ready                  []int64 // by writer: when it writes next
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
		p.ready = make([]int64, p.writers)
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
		wait := p.owed(p.record, pacedStart+p.now)
		p.longest = max(p.longest, wait)
		p.ready[w] = p.now + int64(2*time.Microsecond) + int64(wait)
	}
	return float64(p.written) / d.Seconds()
}

// merge is what merges do at this time.
func (p *paced) merge(now int64) {
	if p.ends > 0 && now >= p.ends {
		p.used, p.rotated, p.ends = p.used-p.taking, p.rotated-p.taking, 0
		p.endLocked(true, p.at(now))
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

// TestWritersAreSlowedAndNotStopped: whatever a merge costs, how much that varies, and however many write, after the first ones nobody finds memory
// full, nobody waits for long, and merges are kept busy.
func TestWritersAreSlowedAndNotStopped(t *testing.T) {
	for _, perKiB := range []time.Duration{2 * time.Microsecond, 50 * time.Microsecond, 800 * time.Microsecond} {
		for _, writers := range []int{1, 3, 64} {
			for _, varies := range []float64{0, 0.6} {
				p := &paced{limit: 12 << 20, table: 512 << 10, perKiB: int64(perKiB), writers: writers, record: 512, varies: varies}
				whole := time.Duration(p.limit / 1024 * p.perKiB)
				p.fixed = int64(whole) / 20
				p.run(2 * whole) // learns
				const laps = 8
				rate := p.run(laps * whole)
				sustained := 1024 / perKiB.Seconds()
				busy := float64(p.merging) / float64(laps*whole)
				t.Logf("%v a KiB, varying by %.1f, %d writers: %.2f of what merges can take, busy %.2f, longest wait %v, stopped %d times",
					perKiB, varies, writers, rate/sustained, busy, p.longest, p.stops)
				if p.longest > 200*time.Millisecond || p.stops > 0 || busy < 0.8 && rate < 0.9*float64(p.writers)*512/2e-6 {
					t.Errorf("%v a KiB, varying by %.1f, %d writers: busy %.2f, longest wait %v, stopped %d times",
						perKiB, varies, writers, busy, p.longest, p.stops)
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
	var f flow
	now := time.Now()
	f.beginLocked(10<<20, 1000, now)
	f.endLocked(true, now.Add(10*time.Second))
	f.pressLocked(30<<20, 100<<20, now)
	if wait := f.owed(1<<30, now.UnixNano()); wait != 0 || f.pace.Load() != 0 {
		t.Fatalf("a wait of %v", wait)
	}
}

// TestLargeCommitsWaitInProportion: a writer of large batches fills memory no faster than one of small ones.
func TestLargeCommitsWaitInProportion(t *testing.T) {
	var f flow
	now := time.Now()
	f.beginLocked(10<<20, 1000, now)
	f.endLocked(true, now.Add(10*time.Second)) // a millisecond a KiB
	f.pressLocked(40<<20, 100<<20, now)
	if small, large := f.owed(1<<10, now.UnixNano()), f.owed(1<<20, now.UnixNano()); small > paceWaitMax || large < 700*time.Millisecond {
		t.Fatalf("waits of %v and %v", small, large)
	}
}

// TestMergeTakesTheOldestThatFit: what one merge takes in is bounded, and at least one generation.
func TestMergeTakesTheOldestThatFit(t *testing.T) {
	b := newBench(t)
	var frozen []*generation
	for range 5 {
		b.put(0, 100, 50)
		if err := b.engine.Rotate(); err != nil {
			t.Fatal(err)
		}
	}
	frozen = b.engine.view.Load().frozen
	one := int64(frozen[len(frozen)-1].mem.Bytes())
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
	b.engine.checkpointing.Lock() // as the next merge does
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

// TestWhoWaitsForRoomHearsOfAFullDisk: at once, and not that memory was full in the end.
func TestWhoWaitsForRoomHearsOfAFullDisk(t *testing.T) {
	b := newBench(t)
	b.put(0, 100, 50)
	if err := b.engine.Rotate(); err != nil {
		t.Fatal(err)
	}
	b.put(0, 100, 50)
	b.engine.frozenBytes.Store(1)
	waited := make(chan error, 1)
	go func() { waited <- b.engine.Rotate() }()
	for b.engine.counters.stalls.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	b.fs.SetCapacity(1)
	at := keys.Epoch(b.visible.Load())
	if err := b.engine.Checkpoint(t.Context(), Horizon{Visible: at, Live: []keys.Epoch{at}}); !errors.Is(err, vfs.ErrNoSpace) {
		t.Fatalf("a checkpoint onto a full disk: %v", err)
	}
	select {
	case err := <-waited:
		if !errors.Is(err, vfs.ErrNoSpace) {
			t.Fatalf("who waited heard %v", err)
		}
	case <-time.After(defaultStallMax / 2):
		t.Fatal("who waits hears nothing")
	}
}
