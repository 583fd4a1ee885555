package vfs

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"syscall"

	"github.com/epochkv/epochkv/internal/vfs/uring"
)

const (
	// ringWindow is how many requests of a batch the device has at once: enough to keep it busy, few enough that a
	// single read meanwhile does not wait for a long queue. 64 gave 13% more without other readers.
	ringWindow = 32
	// ringsMax bounds the batches that use a ring at once; other batches use the pool. Each batch uses a ring of its own,
	// so that there is no lock, no reaper, and no hand-over between goroutines.
	ringsMax = 8
)

// ringPool lends rings to batches. It makes rings on demand and keeps them.
type ringPool struct {
	idle chan *ringDriver

	mu     sync.Mutex
	all    []*ringDriver
	closed bool
}

// newRingPool makes the first ring, so that a kernel without io_uring is detected at the start.
func newRingPool() (*ringPool, error) {
	p := &ringPool{idle: make(chan *ringDriver, ringsMax)}
	driver, err := p.grow()
	if err != nil {
		return nil, err
	}
	p.put(driver)
	return p, nil
}

// grow makes one more ring; nil without an error means that there are enough.
func (p *ringPool) grow() (*ringDriver, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.all) == ringsMax {
		return nil, nil
	}
	ring, err := uring.New(ringWindow)
	if err != nil {
		return nil, err
	}
	driver := &ringDriver{ring: ring}
	p.all = append(p.all, driver)
	return driver, nil
}

// take returns a free ring, or nil if all are busy.
func (p *ringPool) take() *ringDriver {
	select {
	case driver := <-p.idle:
		return driver
	default:
	}
	driver, err := p.grow()
	if err != nil {
		return nil // out of descriptors or memory: the batch uses the pool, and is counted there
	}
	return driver
}

func (p *ringPool) put(driver *ringDriver) { p.idle <- driver }

// close waits for the batches that use a ring and closes all rings.
func (p *ringPool) close() error {
	p.mu.Lock()
	all := p.all
	alreadyClosed := p.closed
	p.closed = true
	p.mu.Unlock()
	if alreadyClosed {
		return nil
	}
	var errs []error
	for range all {
		driver := <-p.idle
		errs = append(errs, driver.ring.Close())
	}
	return errors.Join(errs...)
}

func (p *ringPool) addStats(s *Stats) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s.Rings = len(p.all)
	for _, driver := range p.all {
		ring := driver.ring.Stats()
		s.InFlight += ring.InFlight
		s.Submissions += ring.Submissions
		s.Wakeups += ring.Wakeups
		s.UnexpectedCompletions += ring.UnexpectedCompletions
		s.LostCompletions += ring.LostCompletions
	}
}

// ringDriver is a ring and the state of its batch.
type ringDriver struct {
	ring        *uring.Ring
	file        *osFile
	op          Op
	reqs        []Request
	done        []int // bytes transferred of each request
	completions []uring.Completion
	withdrawn   []int
	repeated    int // requests that were finished without the ring

	// tap, for tests, changes completions before they are processed.
	tap func(uring.Completion) uring.Completion
}

// run does a batch and returns how many of its requests were finished without the ring.
func (d *ringDriver) run(f *osFile, op Op, reqs []Request) (repeated int) {
	d.file, d.op, d.reqs, d.repeated = f, op, reqs, 0
	d.done = slices.Grow(d.done[:0], len(reqs))[:len(reqs)]
	clear(d.done)
	for next := 0; next < len(reqs) || d.ring.InFlight() > 0; {
		for next < len(reqs) && d.ring.InFlight() < d.ring.Depth() {
			if checkRequest(f, op, &reqs[next]) {
				d.prepare(next)
			}
			next++
		}
		d.submit()
		if d.ring.InFlight() > 0 {
			d.completions = d.ring.Wait(d.completions[:0])
			for _, c := range d.completions {
				if d.tap != nil {
					c = d.tap(c)
				}
				d.complete(c)
			}
		}
	}
	d.file, d.reqs = nil, nil
	return d.repeated
}

func (d *ringDriver) prepare(i int) {
	op, req := uring.Read, &d.reqs[i]
	if d.op == OpWrite {
		op = uring.Write
	}
	d.ring.Prepare(op, d.file.fd, req.Buf[d.done[i]:], req.Offset+int64(d.done[i]), i)
}

// submit submits the window to the kernel. Requests that the kernel does not take (it may be out of memory) are done
// here.
func (d *ringDriver) submit() {
	if d.ring.Submit() == nil {
		return
	}
	d.withdrawn = d.ring.Withdraw(d.withdrawn[:0])
	for _, i := range d.withdrawn {
		d.repeat(i)
	}
}

// repeat finishes a request by a plain system call.
func (d *ringDriver) repeat(i int) {
	d.repeated++
	runOne(d.file, d.op, &d.reqs[i], d.done[i])
}

// complete processes the completion of a request, and continues a short transfer.
func (d *ringDriver) complete(c uring.Completion) {
	i := c.Tag
	req := &d.reqs[i]
	switch {
	case c.Err == nil:
		d.advance(i, c.N)
	case errors.Is(c.Err, uring.ErrLost), c.Err == syscall.EINTR, c.Err == syscall.EAGAIN, c.Err == syscall.ECANCELED:
		d.repeat(i)
	default:
		req.Err = batchError(d.file, d.op, c.Err)
	}
}

// advance counts n transferred bytes of request i, as preadFull and pwriteFull do.
func (d *ringDriver) advance(i, n int) {
	req := &d.reqs[i]
	d.done[i] += n
	rest := len(req.Buf) - d.done[i]
	switch {
	case rest == 0:
	case rest < 0:
		req.Err = batchError(d.file, d.op, fmt.Errorf("uring: %d bytes too many", -rest))
	case d.op == OpWrite && n == 0:
		req.Err = batchError(d.file, d.op, io.ErrShortWrite)
	case n == 0:
		req.Err = io.EOF
	default:
		d.prepare(i)
	}
}
