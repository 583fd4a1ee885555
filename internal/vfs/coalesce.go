package vfs

import (
	"sync"
	"sync/atomic"
	"time"
)

// gatherer joins single reads of a file that come while others are under way.
//
//	read ─► nobody else is reading: pread
//	     └► fewer than gatherLeaders batches are on their way: lead one, of all that wait
//	     └► else wait: to be told that it was read, or to lead the next batch
//
// A pread holds a processor until the scheduler takes it away, and knocks at the device by itself, which in a virtual machine is a quarter
// of what it costs. Over a ring a waiting reader holds nothing, and several knock once. There is no timer: who waits, waits for a batch that is on
// its way. Random cold gets by 8 goroutines on 2 processors, medians of 3: 33k for 18k/s with direct I/O, 36k for 24k/s without, at 10 to 30 %
// less processor time each; by 2 and 3 goroutines neither gains.
type coalescer struct {
	reading atomic.Int32 // reads under way, of either kind

	mu      sync.Mutex
	leaders int
	waiting []*coalescedRead // in order of arrival, one for each goroutine
}

// gatherLeaders is how many batches are on their way at a time. One leaves the device idle between two, more share the knocking less.
const coalesceLeaders = 4

// gathered is a read that waits.
type coalescedRead struct {
	req    Request
	read   bool          // when signalled: it was read; else it is to lead
	signal chan struct{} // capacity 1

	// Of the batch that it leads.
	group [ringWindow]*coalescedRead
	reqs  [ringWindow]Request
}

var coalescedReads = sync.Pool{New: func() any { return &coalescedRead{signal: make(chan struct{}, 1)} }}

// readAt reads all of p, together with others.
func (g *coalescer) readAt(f *osFile, p []byte, off int64) error {
	r := coalescedReads.Get().(*coalescedRead)
	defer coalescedReads.Put(r)
	r.req, r.read = Request{Buf: p, Offset: off}, false
	if g.mayLead(r) {
		g.lead(f, r)
	} else if <-r.signal; !r.read {
		g.lead(f, r)
	}
	err := r.req.Err
	r.req = Request{}
	return err
}

// mayLead reports whether r is to lead now. Else it waits.
func (g *coalescer) mayLead(r *coalescedRead) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.leaders < coalesceLeaders {
		g.leaders++
		return true
	}
	g.waiting = append(g.waiting, r)
	return false
}

// lead reads r and what waits, and hands over.
func (g *coalescer) lead(f *osFile, r *coalescedRead) {
	group, reqs := &r.group, &r.reqs
	group[0] = r
	g.mu.Lock()
	n := 1 + copy(group[1:], g.waiting)
	g.drop(n - 1)
	g.mu.Unlock()
	for i := range n {
		reqs[i] = group[i].req
	}
	f.fs.batches.runCoalesced(f, reqs[:n])
	r.req.Err = reqs[0].Err
	for i := 1; i < n; i++ {
		group[i].req.Err, group[i].read = reqs[i].Err, true
		group[i].signal <- struct{}{}
	}
	clear(group[:n])
	clear(reqs[:n])
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.waiting) == 0 {
		g.leaders--
		return
	}
	next := g.waiting[0]
	g.drop(1)
	next.signal <- struct{}{}
}

// drop takes the first n out of those that wait.
func (g *coalescer) drop(n int) {
	rest := copy(g.waiting, g.waiting[n:])
	clear(g.waiting[rest:])
	g.waiting = g.waiting[:rest]
}

// runGathered does reads that were joined, a single one over the ring too.
func (b *batcher) runCoalesced(f *osFile, reqs []Request) {
	if len(reqs) > 1 {
		b.run(f, OpRead, reqs)
		return
	}
	driver := b.rings.take()
	if driver == nil {
		b.runSingle(f, OpRead, &reqs[0])
		return
	}
	start := time.Now()
	b.ringReads.Add(1)
	b.repeated.Add(uint64(driver.run(f, OpRead, reqs)))
	b.rings.put(driver)
	b.watches[PathRing].since(start)
}
