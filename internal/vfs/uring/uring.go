// Package uring is one io_uring that one goroutine drives: reads and writes go in by the window, completions come
// out, and while the device works the goroutine is parked in the Go poller, so that no thread is held.
//
//	Prepare ─► submission queue ─► Submit (one system call for all) ─► kernel
//	                                                                     │
//	Wait  ◄── generation check ◄── completion queue ◄── eventfd, poller ◄┘
//
// Slot: the place of one request in flight. Its number and generation travel through the kernel as user_data and come
// back with the completion.
//
// Invariants:
//   - a completion ends the request of its slot and generation, once; any other is counted as a stray and ignored;
//   - every prepared request ends: it is returned by Wait with what the kernel said, or as lost once the kernel has
//     confirmed that it holds it no more (see barrier), or it is returned by Withdraw;
//   - a buffer is referenced from its slot until then, so that it neither moves nor is collected under the kernel's hands;
//   - at most Depth requests are in flight, so the completion queue, twice as large, cannot overflow.
//
// The package knows nothing of files, short transfers, or retries: that is its caller's (package vfs). Rings are not
// shared: whoever has more goroutines takes more rings.
package uring

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Op is what a request does.
type Op uint8

// The operations, by their io_uring opcodes.
const (
	Read  Op = 22 // IORING_OP_READ
	Write Op = 23 // IORING_OP_WRITE

	nop Op = 0 // IORING_OP_NOP
)

const (
	// transferMax keeps a request's length inside the kernel's signed 32-bit result. More is a short transfer.
	transferMax = 1 << 30
	// stallAfter is how long a batch may go without a completion before the ring asks the kernel for a barrier. Devices do
	// take seconds now and then; a needless barrier costs nothing but one more entry.
	stallAfter = 2 * time.Second
	// barrierTag is the slot number of the barrier; real slots are below Depth.
	barrierTag = 1<<32 - 1
)

// Completion is the end of a request.
type Completion struct {
	// Tag is the caller's name for the request, from Prepare.
	Tag int
	// N is how many bytes were transferred; zero for a read means the end of the file.
	N int
	// Err is the kernel's error, a unix.Errno, or ErrLost.
	Err error
}

// ErrLost means that a completion never came although the kernel has finished with the request. Whether it was done
// is unknown; a read, or a write of the same bytes to the same place, may be repeated.
var ErrLost = errors.New("uring: completion lost")

// slot is the place of one request in flight.
type slot struct {
	generation uint32
	busy       bool
	suspect    bool // was busy when the barrier was asked for
	tag        int
	// buf keeps the memory alive and, by escaping to the heap through here, unmovable while the kernel uses it.
	buf []byte
}

// Ring is one io_uring. All methods are for one goroutine at a time, except Stats.
type Ring struct {
	queues

	wake     *os.File // the eventfd, in the Go poller
	slots    []slot
	free     []uint32 // slots that are not busy
	prepared int      // entries in the submission queue that the kernel has not taken
	scratch  []cqe    // completions on their way from the queue to their slots
	barrier  bool     // a barrier is in flight
	count    [8]byte  // what the eventfd says, which nobody needs
	stall    time.Duration

	// tap, for tests, sees completions before they are matched and returns what it wants to be seen instead.
	tap func([]cqe) []cqe

	stats struct {
		submissions, unexpected, lost, wakeups atomic.Uint64
		inFlight                               atomic.Int64
	}
}

// Stats counts what a ring has done.
type Stats struct {
	Submissions           uint64 // io_uring_enter calls
	Wakeups               uint64 // times the goroutine was parked and woken
	UnexpectedCompletions uint64 // completions that belonged to no request in flight
	LostCompletions       uint64 // requests whose completion never came
	InFlight              int64  // requests in flight now
}

// Stats may be called from any goroutine.
func (r *Ring) Stats() Stats {
	return Stats{
		Submissions:           r.stats.submissions.Load(),
		Wakeups:               r.stats.wakeups.Load(),
		UnexpectedCompletions: r.stats.unexpected.Load(),
		LostCompletions:       r.stats.lost.Load(),
		InFlight:              r.stats.inFlight.Load(),
	}
}

// New sets up a ring for depth requests in flight. It fails where the kernel has no io_uring, an old one, or forbids it.
func New(depth int) (*Ring, error) {
	r := &Ring{stall: stallAfter, slots: make([]slot, depth), free: make([]uint32, 0, depth)}
	for i := depth - 1; i >= 0; i-- {
		r.free = append(r.free, uint32(i))
	}
	// One more entry than slots, for the barrier.
	if err := r.queues.setup(uint32(depth + 1)); err != nil {
		return nil, fmt.Errorf("uring: %w", err)
	}
	r.scratch = make([]cqe, 0, r.cqEntries)
	eventfd, err := unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("uring: eventfd: %w", err), r.teardown())
	}
	r.wake = os.NewFile(uintptr(eventfd), "uring-eventfd")
	if err := r.registerEventfd(eventfd); err != nil {
		return nil, errors.Join(fmt.Errorf("uring: register eventfd: %w", err), r.wake.Close(), r.teardown())
	}
	return r, nil
}

// Depth is how many requests may be in flight.
func (r *Ring) Depth() int { return len(r.slots) }

// InFlight is how many requests are prepared or in flight.
func (r *Ring) InFlight() int { return len(r.slots) - len(r.free) }

// Prepare puts a request into the submission queue. There must be room: InFlight() < Depth().
func (r *Ring) Prepare(op Op, fd int, buf []byte, off int64, tag int) {
	i := r.free[len(r.free)-1]
	r.free = r.free[:len(r.free)-1]
	s := &r.slots[i]
	s.generation++
	s.busy, s.suspect, s.tag, s.buf = true, false, tag, buf
	r.push(sqe{
		opcode:   op,
		fd:       int32(fd),
		off:      uint64(off),
		addr:     uint64(uintptr(unsafe.Pointer(unsafe.SliceData(buf)))),
		length:   uint32(min(len(buf), transferMax)),
		userData: uint64(s.generation)<<32 | uint64(i),
	})
	r.prepared++
	r.stats.inFlight.Store(int64(r.InFlight()))
}

// Submit hands everything prepared to the kernel. After an error some may not have been taken: Withdraw must follow.
func (r *Ring) Submit() error {
	for r.prepared > 0 {
		n, err := r.enter(uint32(r.prepared))
		r.stats.submissions.Add(1)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if n == 0 {
			return unix.EAGAIN
		}
		r.prepared -= n
	}
	return nil
}

// Withdraw takes back what the kernel has not taken and returns its tags, appended to dst.
func (r *Ring) Withdraw(dst []int) []int {
	for ; r.prepared > 0; r.prepared-- {
		i := uint32(r.pop())
		dst = append(dst, r.slots[i].tag)
		r.release(i)
	}
	return dst
}

func (r *Ring) release(i uint32) {
	r.slots[i].busy, r.slots[i].buf = false, nil
	r.free = append(r.free, i)
	r.stats.inFlight.Store(int64(r.InFlight()))
}

// Wait parks until requests complete and appends at least one completion to dst. Something must be in flight. It does
// not fail: as long as the kernel may use a buffer, there is nothing to do but to wait.
func (r *Ring) Wait(dst []Completion) []Completion {
	before := len(dst)
	dst = r.collect(dst)
	for armed := false; len(dst) == before; dst = r.collect(dst) {
		if !armed {
			armed = r.wake.SetReadDeadline(time.Now().Add(r.stall)) == nil
		}
		err := r.park()
		switch {
		case err == nil:
		case errors.Is(err, os.ErrDeadlineExceeded):
			armed = false
			r.requestBarrier()
		default:
			time.Sleep(time.Millisecond) // the poller is broken, which leaves looking from time to time
		}
	}
	return dst
}

// park waits for the eventfd. The kernel signals it only while someone is parked, so that completions which are there
// already cost no system call.
func (r *Ring) park() error {
	var err error
	r.signal(true)
	// A completion that came before the signal was on would be slept over.
	if !r.pending() {
		_, err = r.wake.Read(r.count[:])
		r.stats.wakeups.Add(1)
	}
	r.signal(false)
	return err
}

// askBarrier submits a request that the kernel starts only when all earlier ones have completed. When it comes back, a
// request that was outstanding and still is has lost its completion; until then it may only be slow, and its buffer is
// the kernel's. If the kernel does not take the barrier now, the next stall asks again.
func (r *Ring) requestBarrier() {
	if r.barrier {
		return
	}
	for i := range r.slots {
		r.slots[i].suspect = r.slots[i].busy
	}
	r.push(sqe{opcode: nop, flags: sqeDrain, fd: -1, userData: barrierTag})
	r.prepared++
	r.barrier = true
	if r.Submit() != nil {
		r.pop()
		r.prepared--
		r.barrier = false
	}
}

// collect matches what the kernel has completed to the slots.
func (r *Ring) collect(dst []Completion) []Completion {
	r.scratch = r.drain(r.scratch[:0])
	if r.tap != nil {
		r.scratch = r.tap(r.scratch)
	}
	for _, c := range r.scratch {
		dst = r.match(dst, c)
	}
	return dst
}

func (r *Ring) match(dst []Completion, c cqe) []Completion {
	if c.userData == barrierTag && r.barrier {
		r.barrier = false
		return r.endLost(dst)
	}
	i, generation := uint32(c.userData), uint32(c.userData>>32)
	if int(i) >= len(r.slots) || !r.slots[i].busy || r.slots[i].generation != generation {
		r.stats.unexpected.Add(1)
		return dst
	}
	completion := Completion{Tag: r.slots[i].tag, N: int(c.result)}
	if c.result < 0 {
		completion.N, completion.Err = 0, unix.Errno(-c.result)
	}
	r.release(i)
	return append(dst, completion)
}

// giveUp ends as lost what was outstanding before the barrier and still is.
func (r *Ring) endLost(dst []Completion) []Completion {
	for i := range r.slots {
		if s := &r.slots[i]; s.busy && s.suspect {
			dst = append(dst, Completion{Tag: s.tag, Err: ErrLost})
			r.release(uint32(i))
			r.stats.lost.Add(1)
		}
	}
	return dst
}

// Close takes the ring down. Nothing may be in flight: whoever drives a ring waits for what it started.
func (r *Ring) Close() error {
	if n := r.InFlight(); n > 0 {
		return fmt.Errorf("uring: closed with %d requests in flight", n)
	}
	return errors.Join(r.wake.Close(), r.teardown())
}
