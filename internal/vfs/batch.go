package vfs

import (
	"fmt"
	"io"
	"sync/atomic"
	"syscall"
	"time"
)

// IO is the method with which an OS does batches that several requests in flight make faster: reads, and scattered
// direct writes. Everything else is plain system calls in any case: a ring was measured to be slower there.
type IO uint8

// The methods.
const (
	// IOAuto uses io_uring if the kernel has it, and pread and pwrite if not.
	IOAuto IO = iota
	// IOUring uses io_uring or fails to open.
	IOUring
	// IOPread uses pread and pwrite.
	IOPread
)

var ioNames = [...]string{"auto", "uring", "pread"}

// String is the name that ParseIO reads.
func (method IO) String() string { return ioNames[method] }

// ParseIO reads auto, uring or pread.
func ParseIO(s string) (IO, error) {
	for i, name := range ioNames {
		if s == name {
			return IO(i), nil
		}
	}
	return 0, fmt.Errorf("vfs: unknown I/O method %q; expected one of %q", s, ioNames)
}

// batcher runs the batches of an OS and counts them by path.
type batcher struct {
	rings *ringPool // nil without io_uring
	pool  pool

	singleReads, ringReads, ringWrites, poolReads, poolWrites, vectorReads, vectorWrites, repeated atomic.Uint64

	watches [Paths]stopwatch
}

// Stats counts requests by path. It exists so that no benchmark compares a ring that was off without notice.
type Stats struct {
	SingleReads  uint64 // ReadAt calls and read batches of one, on the caller's thread
	RingReads    uint64 // requests of batches that went over io_uring
	RingWrites   uint64
	PoolReads    uint64 // requests of batches that went over several threads' preads and pwrites
	PoolWrites   uint64
	VectorReads  uint64 // requests of batches on the caller's thread, with one call for each run: see inPlace
	VectorWrites uint64
	Repeated     uint64 // requests of a ring that were finished by pread or pwrite

	Rings                 int    // rings that exist
	InFlight              int64  // requests in rings now
	Submissions           uint64 // io_uring_enter calls
	Wakeups               uint64 // times a batch was parked and woken
	UnexpectedCompletions uint64 // completions that matched no request
	LostCompletions       uint64 // requests whose completion never came

	Latencies [Paths]Latency
}

func (b *batcher) stats() Stats {
	s := Stats{
		SingleReads:  b.singleReads.Load(),
		RingReads:    b.ringReads.Load(),
		RingWrites:   b.ringWrites.Load(),
		PoolReads:    b.poolReads.Load(),
		PoolWrites:   b.poolWrites.Load(),
		VectorReads:  b.vectorReads.Load(),
		VectorWrites: b.vectorWrites.Load(),
		Repeated:     b.repeated.Load(),
	}
	for i := range s.Latencies {
		s.Latencies[i] = b.watches[i].latency()
	}
	if b.rings != nil {
		b.rings.addStats(&s)
	}
	return s
}

// run does every request of a batch and sets its error.
func (b *batcher) run(f *osFile, op Op, reqs []Request) {
	switch len(reqs) {
	case 0:
		return
	case 1:
		b.runSingle(f, op, &reqs[0])
		return
	}
	start := time.Now()
	if inPlace(f, op, reqs) {
		b.count(op, len(reqs), &b.vectorReads, &b.vectorWrites)
		doRuns(f, op, reqs)
		b.watches[PathVector].since(start)
		return
	}
	if b.rings != nil {
		if driver := b.rings.take(); driver != nil {
			b.count(op, len(reqs), &b.ringReads, &b.ringWrites)
			b.repeated.Add(uint64(driver.run(f, op, reqs)))
			b.rings.put(driver)
			b.watches[PathRing].since(start)
			return
		}
	}
	b.count(op, len(reqs), &b.poolReads, &b.poolWrites)
	b.pool.run(f, op, reqs)
	b.watches[PathPool].since(start)
}

func (b *batcher) runSingle(f *osFile, op Op, req *Request) {
	start := time.Now()
	runOne(f, op, req, 0)
	if op == OpRead {
		b.singleReads.Add(1)
		b.watches[PathSingleRead].since(start)
	}
}

// runLengthMin is the average length of runs from which one pwritev for each run is faster than a ring.
const runLengthMin = 8

// inPlace reports whether a batch is fastest on the caller's thread. Reads of neighbours are one request to the device:
// 64 KiB of them take 95 us and 8 KiB take 59, and with a ring the caller would also wait in the poller. A buffered
// write copies into the page cache and does not wait, and a long run is one request to the device. Windows of 32 pages
// of 8 KiB, fdatasync every 4, pages/s:
//
//	             direct, scattered   direct, contiguous   buffered, scattered   buffered, contiguous
//	in place           16k                  206k                  29k                   197k
//	pool               27k                   30k                  27k                   113k
//	ring               83k                  143k                  22k                   106k
func inPlace(f *osFile, op Op, reqs []Request) bool {
	if op == OpRead {
		return nextRun(reqs, 0).to == len(reqs)
	}
	return !f.direct || countRuns(reqs)*runLengthMin <= len(reqs)
}

func (b *batcher) count(op Op, n int, reads, writes *atomic.Uint64) {
	if op == OpRead {
		reads.Add(uint64(n))
	} else {
		writes.Add(uint64(n))
	}
}

// runOne finishes a request by pread or pwrite, of which the first done bytes are already transferred.
func runOne(f *osFile, op Op, req *Request, done int) {
	var err error
	if op == OpRead {
		_, err = preadFull(f.fd, req.Buf[done:], req.Offset+int64(done))
	} else {
		_, err = pwriteFull(f.fd, req.Buf[done:], req.Offset+int64(done))
	}
	req.Err = batchError(f, op, err)
}

// batchError names the file in a request's error, except in io.EOF, which readers compare.
func batchError(f *osFile, op Op, err error) error {
	if err == io.EOF {
		return err
	}
	return pathError(op, f.name, err)
}

// checkRequest refuses negative offsets: to io_uring, offset -1 is the file's current position.
func checkRequest(f *osFile, op Op, req *Request) bool {
	req.Err = nil
	if req.Offset < 0 {
		req.Err = pathError(op, f.name, syscall.EINVAL)
	}
	return req.Err == nil
}
