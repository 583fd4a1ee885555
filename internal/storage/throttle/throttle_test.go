package throttle

import (
	"math/rand/v2"
	"testing"
	"time"
)

// waitMin is the shortest wait that writers of the model make; they owe less until their next commit.
const waitMin = 500 * time.Microsecond

// model has writers that fill memory as fast as the throttle lets them, and of merges that empty it, each taking in what is there when it begins,
// up to what a merge takes at once. Time is virtual.
type model struct {
	Throttle
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
	longest                time.Duration
	stops                  int // writes that memory had no room for
	merge                  struct {
		start, ends int64 // of the merge under way; ends is 0 without one
		total       int64 // time of all merges
		looked      int64
	}
	apart struct { // of the writers, the last ones, which share a part of their own
		writers int
		written int64
	}
}

const modelStart = int64(1_700_000_000 * time.Second)

func (p *model) at(now int64) time.Time { return time.Unix(0, modelStart+now) }

// run lets the model work for so long, and reports bytes a second.
func (p *model) run(d time.Duration) float64 {
	if p.ready == nil {
		p.ready, p.debts = make([]int64, p.writers), make([]time.Duration, p.writers)
		p.random = rand.New(rand.NewPCG(1, 2))
	}
	p.stops, p.longest, p.written, p.apart.written, p.merge.total = 0, 0, 0, 0, 0
	for p.end = p.now + int64(d); p.now < p.end; {
		w := 0
		for i := range p.ready {
			if p.ready[i] < p.ready[w] {
				w = i
			}
		}
		p.now = max(p.now, p.ready[w])
		p.advance(p.now)
		if p.used+p.record > p.limit {
			p.stops++
			p.now = p.merge.ends
			p.advance(p.now)
		}
		p.used, p.written = p.used+p.record, p.written+p.record
		if p.ends(w) {
			p.apart.written += p.record
		}
		if p.used-p.rotated >= p.table {
			p.rotated = p.used
			p.UpdateLocked(p.used, p.limit, p.at(p.now))
		}
		p.ready[w] = p.now + int64(2*time.Microsecond) + int64(p.wait(w))
	}
	return float64(p.written) / d.Seconds()
}

func (p *model) ends(w int) bool { return w >= p.writers-p.apart.writers }

// wait is how long writer w waits.
func (p *model) wait(w int) (wait time.Duration) {
	if p.delay.Load() == 0 {
		return 0
	}
	waiting := int64(0)
	for other, at := range p.ready {
		if at > p.now+int64(2*time.Microsecond) && p.ends(other) == p.ends(w) {
			waiting++
		}
	}
	if p.debts[w] = p.Owed(p.debts[w], p.record, waiting); p.debts[w] >= waitMin {
		wait, p.debts[w] = p.debts[w], 0
	}
	p.longest = max(p.longest, wait)
	return wait
}

// merge is what merges do at this time.
func (p *model) advance(now int64) {
	if p.merge.ends > 0 && now >= p.merge.ends {
		p.used, p.rotated, p.merge.ends = p.used-p.bytes, p.rotated-p.bytes, 0
		p.MeasureMergeLocked(p.at(now))
		p.EndMergeLocked()
		p.UpdateLocked(p.used, p.limit, p.at(now))
	}
	switch {
	case p.merge.ends == 0 && p.used >= Free(p.limit):
		takes := min(p.used, p.limit/2)
		p.BeginMergeLocked(takes, takes/p.record, p.at(now))
		factor := 1 + p.varies*(2*p.random.Float64()-1)
		p.merge.start, p.merge.ends = now, now+p.fixed+int64(float64(takes/1024*p.perKiB)*factor)
		p.merge.total += p.merge.ends - p.merge.start
		p.UpdateLocked(p.used, p.limit, p.at(now))
	case p.merge.ends > 0 && now-p.merge.looked > int64(updateEvery):
		// The last tenth of a merge's time are syncs.
		p.Merged.Store(min(int64(float64(p.versions)*float64(now-p.merge.start)/float64(p.merge.ends-p.merge.start)/0.9), p.versions))
		p.UpdateLocked(p.used, p.limit, p.at(now))
		p.merge.looked = now
	}
}

// TestWritersAreDelayedAndNotStopped: for any cost of merges, any variation of it, and any number of writers and size of commits, no writer
// finds memory full after the first ones, each waits for its share only, and merges are kept busy.
func TestWritersAreDelayedAndNotStopped(t *testing.T) {
	for _, limit := range []int64{12 << 20, 64 << 20} {
		testDelays(t, limit)
	}
}

func testDelays(t *testing.T, limit int64) {
	for _, perKiB := range []time.Duration{2 * time.Microsecond, 50 * time.Microsecond, 800 * time.Microsecond} {
		for _, load := range []struct {
			writers int
			record  int64
		}{{1, 512}, {3, 512}, {64, 512}, {16, 16 << 10}, {64, 16 << 10}, {4, 256 << 10}, {16, 64 << 10}} {
			for _, varies := range []float64{0, 0.6} {
				p := &model{limit: limit, table: limit / 24, perKiB: int64(perKiB), writers: load.writers, record: load.record, varies: varies}
				whole := time.Duration(p.limit / 1024 * p.perKiB)
				p.fixed = int64(whole) / 20
				p.run(2 * whole) // learns
				const rounds = 8
				rate := p.run(rounds * whole)
				sustained := 1024 / perKiB.Seconds()
				busy := float64(p.merge.total) / float64(rounds*whole)
				turn := time.Duration(load.record/1024+1) * perKiB * time.Duration(load.writers) // what a round of all writers costs merges
				t.Logf("%d MiB, %v a KiB, varying by %.1f, %d writers of %d: %.2f of what merges can take, busy %.2f, longest wait %v, a round %v, stopped %d times",
					limit>>20, perKiB, varies, load.writers, load.record, rate/sustained, busy, p.longest, turn, p.stops)
				if p.longest > 12*turn+2*waitMin || p.stops > 0 || busy < 0.8 && rate < 0.8*float64(p.writers)*float64(p.record)/2e-6 {
					t.Errorf("%d MiB, %v a KiB, varying by %.1f, %d writers of %d: busy %.2f, longest wait %v, a round %v, stopped %d times",
						limit>>20, perKiB, varies, load.writers, load.record, busy, p.longest, turn, p.stops)
				}
			}
		}
	}
}

// TestDelayBecomesSteady: writers that are faster than merges become as fast as merges at all times, and not fast and slow by turns.
func TestDelayBecomesSteady(t *testing.T) {
	p := &model{limit: 46 << 20, table: 2 << 20, perKiB: int64(800 * time.Microsecond), writers: 3, record: 512}
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

// TestNoDelayWhileMemoryIsFree: the throttle costs nothing then, not even the clock.
func TestNoDelayWhileMemoryIsFree(t *testing.T) {
	f := slow(30 << 20)
	if debt := f.Owed(0, 1<<30, 10); debt != 0 || f.delay.Load() != 0 {
		t.Fatalf("a wait of %v", debt)
	}
}

// TestFloorHoldsUntilTheMergeEnds: whatever memory is in use, the delay is no less, and the floor is bounded.
func TestFloorHoldsUntilTheMergeEnds(t *testing.T) {
	const floor = 3 * time.Millisecond
	for used, without := range map[int64]time.Duration{30 << 20: 0, 40 << 20: slow(40 << 20).Delay()} {
		f, now := slow(used), time.Now()
		f.SetFloorLocked(floor)
		f.UpdateLocked(used, 100<<20, now)
		if d := f.Delay(); d != max(floor, without) {
			t.Errorf("%d bytes in use: a delay of %v, without the floor %v", used, d, without)
		}
		f.SetFloorLocked(time.Hour)
		f.UpdateLocked(used, 100<<20, now)
		if d := f.Delay(); d != max(FloorMax, without) {
			t.Errorf("%d bytes in use: a delay of %v with the largest floor", used, d)
		}
		f.EndMergeLocked()
		f.UpdateLocked(used, 100<<20, now)
		if d := f.Delay(); d != without {
			t.Errorf("%d bytes in use: a delay of %v after the merge, without the floor %v", used, d, without)
		}
	}
}

// slow is the throttle of an engine whose merges took a millisecond a KiB, with so much memory in use of 100 MiB.
func slow(used int64) *Throttle {
	f, now := new(Throttle), time.Now()
	f.BeginMergeLocked(10<<20, 1000, now)
	f.MeasureMergeLocked(now.Add(10240 * time.Millisecond))
	f.EndMergeLocked()
	f.UpdateLocked(used, 100<<20, now)
	return f
}

// TestWritersShareByBytes: a writer of many bytes waits long, and a writer of few bytes does not wait for it.
func TestWritersShareByBytes(t *testing.T) {
	f := slow(Free(100<<20) + (100<<20)/16) // where writers and merges keep step
	if got := f.Owed(0, 1<<20, 0); got < 1000*time.Millisecond || got > 1050*time.Millisecond {
		t.Errorf("a lone writer waits %v for a MiB", got)
	}
	if got := f.Owed(0, 1<<10, 1); got < 2*time.Millisecond || got > 2100*time.Microsecond {
		t.Errorf("beside another, a writer waits %v for a KiB", got)
	}
	if got := f.Owed(0, 64<<20, 100); got > WaitMax {
		t.Errorf("a writer waits %v", got)
	}
}

// TestSlowerMergesStopNoWriter: a merge that takes eight times as long as those before is noticed while it goes on.
func TestSlowerMergesStopNoWriter(t *testing.T) {
	for _, writers := range []int{1, 64} {
		p := &model{limit: 12 << 20, table: 512 << 10, perKiB: int64(50 * time.Microsecond), writers: writers, record: 512}
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

// TestAPartOfTheirOwn: few writers with a part of their own write as much as all others together, and none is stopped.
func TestAPartOfTheirOwn(t *testing.T) {
	for _, clients := range []int{1, 64} {
		for _, ending := range []int{1, 4} {
			p := &model{limit: 12 << 20, table: 512 << 10, perKiB: int64(50 * time.Microsecond), writers: clients + ending, record: 2048}
			p.apart.writers = ending
			whole := time.Duration(p.limit / 1024 * p.perKiB)
			p.run(4 * whole)
			p.run(8 * whole)
			part := float64(p.apart.written) / float64(p.written)
			t.Logf("%d clients, and %d others: these wrote %.2f of all; longest wait %v, stopped %d times", clients, ending, part, p.longest, p.stops)
			if part < 0.4 || part > 0.6 || p.stops > 0 {
				t.Errorf("%d clients, and %d others: these wrote %.2f of all; stopped %d times", clients, ending, part, p.stops)
			}
		}
	}
}
