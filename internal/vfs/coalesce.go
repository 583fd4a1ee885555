package vfs

import (
	"sync"
	"sync/atomic"
	"time"
)

// coalescer combines single reads of a file that come while other reads run.
//
//	read ─► no other read runs: pread
//	     └► fewer than coalesceLeaders batches run: lead a batch of all waiting reads
//	     └► else wait: until another leader has done the read, or until this read leads the next batch
//
// A pread holds a processor until the scheduler takes it away, and notifies the device by itself, which in a virtual
// machine is a quarter of its cost. With a ring, a waiting reader holds no processor, and several reads need one
// notification. There is no timer: a reader waits for a batch that runs. Random cold gets by 8 goroutines on 2
// processors, medians of 3: 33k instead of 18k/s with direct I/O, 36k instead of 24k/s without, with 10 to 30 % less
// processor time each; with 2 and 3 goroutines there is no gain.
type coalescer struct {
	reading atomic.Int32 // running reads, of either kind

	mu      sync.Mutex
	leaders int
	waiting []*coalescedRead // in order of arrival, one for each goroutine
}

// coalesceLeaders is how many batches run at a time. With one batch the device is idle between two batches; with more
// than four, fewer reads share a notification.
const coalesceLeaders = 4

// coalescedRead is a waiting read.
type coalescedRead struct {
	req    Request
	read   bool          // when signalled: the read is done; else it leads the next batch
	signal chan struct{} // capacity 1

	// The batch that it leads.
	group [ringWindow]*coalescedRead
	reqs  [ringWindow]Request
}

var coalescedReads = sync.Pool{New: func() any { return &coalescedRead{signal: make(chan struct{}, 1)} }}

// readAt reads all of p, together with other reads.
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

// mayLead reports whether r leads a batch now; otherwise it adds r to the waiting reads.
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

// lead does r and the waiting reads, and then lets the next waiting read lead.
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

// drop removes the first n waiting reads.
func (g *coalescer) drop(n int) {
	rest := copy(g.waiting, g.waiting[n:])
	clear(g.waiting[rest:])
	g.waiting = g.waiting[:rest]
}

// runCoalesced does coalesced reads, over a ring even if there is only one.
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
