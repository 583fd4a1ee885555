package storage

import (
	"testing"
	"time"
)

// paced is a model of writers that fill memory as fast as they may, and of checkpoints that empty it, each taking in what is there when it
// begins. Time is virtual.
type paced struct {
	flow
	limit, table, from int64 // bytes: of memory, of a memtable, at which a checkpoint begins
	perKiB             int64 // nanoseconds that a checkpoint takes
	writers            int
	record             int64

	now                    int64
	ready                  []int64 // by writer: when it writes next
	used, rotated, written int64
	ends                   int64 // of the checkpoint under way; 0 without one
	longest                time.Duration
	stops                  int // writes that memory had no room for
}

const pacedStart = int64(1_700_000_000 * time.Second)

func (p *paced) at(now int64) time.Time { return time.Unix(0, pacedStart+now) }

// run lets the model work for so long, and reports bytes a second.
func (p *paced) run(d time.Duration) float64 {
	if p.ready == nil {
		p.ready = make([]int64, p.writers)
	}
	p.stops, p.longest, p.written = 0, 0, 0
	for end := p.now + int64(d); p.now < end; {
		w := 0
		for i := range p.ready {
			if p.ready[i] < p.ready[w] {
				w = i
			}
		}
		p.now = max(p.now, p.ready[w])
		p.checkpoint(p.now)
		if p.used+p.record > p.limit {
			p.stops++
			p.now = p.ends
			p.checkpoint(p.now)
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

func (p *paced) checkpoint(now int64) {
	if p.ends > 0 && now >= p.ends {
		p.used, p.rotated, p.ends = p.used-p.taking, p.rotated-p.taking, 0
		p.endLocked(true, p.at(now))
		p.pressLocked(p.used, p.limit, p.at(now))
	}
	if p.ends == 0 && p.used >= p.from {
		p.beginLocked(p.used, p.at(now))
		p.ends = now + p.used/1024*p.perKiB
		p.pressLocked(p.used, p.limit, p.at(now))
	}
}

// TestWritersAreSlowedAndNotStopped: whatever a checkpoint costs and however many write, after the first ones nobody finds memory full, nobody waits
// longer than paceWaitMax, and checkpoints are kept busy.
func TestWritersAreSlowedAndNotStopped(t *testing.T) {
	for _, perKiB := range []time.Duration{2 * time.Microsecond, 50 * time.Microsecond, 400 * time.Microsecond} {
		for _, writers := range []int{1, 3, 64} {
			p := &paced{limit: 46 << 20, table: 2 << 20, from: 32 << 20, perKiB: int64(perKiB), writers: writers, record: 512}
			whole := time.Duration(p.limit / 1024 * p.perKiB)
			p.run(4 * whole) // learns
			rate := p.run(20 * whole)
			sustained := 1024 / perKiB.Seconds()
			t.Logf("%v a KiB, %d writers: %.1f of what checkpoints can take, longest wait %v, stopped %d times", perKiB, writers, rate/sustained, p.longest, p.stops)
			if p.longest > paceWaitMax || p.stops > 0 || rate < 0.4*min(sustained, float64(p.writers)*512/2e-6) {
				t.Errorf("%v a KiB, %d writers: %.0f KiB/s of %.0f, longest wait %v, stopped %d times", perKiB, writers, rate/1024, sustained/1024, p.longest, p.stops)
			}
		}
	}
}

// TestNobodyWaitsWhileMemoryIsHalfEmpty: pacing costs nothing then, not even the clock.
func TestNobodyWaitsWhileMemoryIsHalfEmpty(t *testing.T) {
	var f flow
	now := time.Now()
	f.beginLocked(10<<20, now)
	f.endLocked(true, now.Add(10*time.Second))
	f.pressLocked(40<<20, 100<<20, now)
	if wait := f.owed(1<<30, now.UnixNano()); wait != 0 || f.pace.Load() != 0 {
		t.Fatalf("a wait of %v", wait)
	}
}
