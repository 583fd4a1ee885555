package vfs

import (
	"sync"
	"sync/atomic"
)

const (
	// poolWidth is how many requests of one batch the pool has in flight.
	poolWidth = 8
	// poolHelpersMax bounds the helpers of all batches together, and so the threads blocked in preads and pwrites.
	poolHelpersMax = 32
)

// pool runs batches with plain system calls. The caller of a batch works on it too, so that a batch makes progress
// without helpers, and all helpers have ended when the batch is done.
type pool struct {
	helpers atomic.Int64 // running helpers of all batches
}

// poolRun is one running batch.
type poolRun struct {
	file *osFile
	op   Op
	reqs []Request
	next atomic.Int64 // index of the next request that is not taken
	wg   sync.WaitGroup
}

func (p *pool) run(f *osFile, op Op, reqs []Request) {
	run := &poolRun{file: f, op: op, reqs: reqs}
	for range min(poolWidth, len(reqs)) - 1 {
		if p.helpers.Add(1) > poolHelpersMax {
			p.helpers.Add(-1)
			break
		}
		run.wg.Go(func() {
			run.work()
			p.helpers.Add(-1)
		})
	}
	run.work()
	run.wg.Wait()
}

func (r *poolRun) work() {
	for {
		i := int(r.next.Add(1)) - 1
		if i >= len(r.reqs) {
			return
		}
		runOne(r.file, r.op, &r.reqs[i], 0)
	}
}
