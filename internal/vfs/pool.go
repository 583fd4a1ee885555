package vfs

import (
	"io"
	"sync"
	"sync/atomic"
)

const (
	// poolWidth is how many requests of one batch the pool has in flight.
	poolWidth = 8
	// poolHelpersMax bounds the helpers of all batches together, and so the threads blocked in preads and pwrites.
	poolHelpersMax = 32
)

// batcher runs batches. The caller of a batch works on it too, so that a batch always makes progress, however
// few helpers it gets.
type batcher struct {
	helpers atomic.Int64 // running helpers of all batches
}

func newBatcher() *batcher { return &batcher{} }

// poolRun is one batch on its way through the pool.
type poolRun struct {
	file *osFile
	op   Op
	reqs []Request
	next atomic.Int64 // index of the next request that nobody has taken
	wg   sync.WaitGroup
}

func (b *batcher) run(f *osFile, op Op, reqs []Request) {
	if len(reqs) == 1 {
		runOne(f, op, &reqs[0])
		return
	}
	run := &poolRun{file: f, op: op, reqs: reqs}
	for range min(poolWidth, len(reqs)) - 1 {
		if b.helpers.Add(1) > poolHelpersMax {
			b.helpers.Add(-1)
			break
		}
		run.wg.Go(func() {
			run.work()
			b.helpers.Add(-1)
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
		runOne(r.file, r.op, &r.reqs[i])
	}
}

func runOne(f *osFile, op Op, req *Request) {
	var err error
	if op == OpRead {
		_, err = preadFull(f.fd, req.Buf, req.Offset, f.direct)
	} else {
		_, err = pwriteFull(f.fd, req.Buf, req.Offset)
	}
	if err != nil && err != io.EOF {
		err = pathError(op, f.name, err)
	}
	req.Err = err
}
