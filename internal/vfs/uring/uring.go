// Package uring is an io_uring for one goroutine at a time. The goroutine submits reads and writes in windows and gets
// completions. While the device works, the goroutine is parked in the Go poller, so that it holds no thread.
//
//	Prepare ─► submission queue ─► Submit (one system call for all) ─► kernel
//	                                                                     │
//	Wait  ◄── generation check ◄── completion queue ◄── eventfd, poller ◄┘
//
// A slot is the entry of one request in flight. Its number and generation pass through the kernel as user_data and come
// back with the completion.
//
// Invariants:
//   - a completion ends the request of its slot and generation, once; any other completion is counted as unexpected
//     and ignored;
//   - every prepared request ends: Wait returns it with the kernel's result, or as lost after the kernel has confirmed
//     that it no longer has it (see barrier), or Withdraw returns it;
//   - a slot refers to its buffer until then, so that the buffer neither moves nor is collected while the kernel uses it;
//   - at most Depth requests are in flight, so the completion queue, twice as large, cannot overflow.
//
// The package does not know files, short transfers or retries, which are the task of its caller (package vfs).
// Goroutines do not share a ring: each uses its own.
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
	// stallAfter is how long a batch may wait for a completion before the ring submits a barrier. Devices sometimes take
	// seconds; an unnecessary barrier costs only one more entry.
	stallAfter = 2 * time.Second
	// barrierTag is the slot number of the barrier; real slots are below Depth.
	barrierTag = 1<<32 - 1
)

// Completion is the end of a request.
type Completion struct {
	// Tag is the caller's number for the request, from Prepare.
	Tag int
	// N is how many bytes were transferred; zero for a read means the end of the file.
	N int
	// Err is the kernel's error, a unix.Errno, or ErrLost.
	Err error
}

// ErrLost means that a completion never came although the kernel has ended the request. It is unknown whether the
// request was done; a read, or a write of the same bytes to the same offset, may be repeated.
var ErrLost = errors.New("uring: completion lost")

// slot is the entry of one request in flight.
type slot struct {
	generation uint32
	busy       bool
	suspect    bool // was busy when the barrier was submitted
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
	scratch  []cqe    // completions that are copied from the queue and not yet matched
	barrier  bool     // a barrier is in flight
	count    [8]byte  // the value of the eventfd, which is not used
	stall    time.Duration

	// tap, for tests, replaces completions before they are matched.
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
	UnexpectedCompletions uint64 // completions without a request in flight
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

// New sets up a ring for depth requests in flight. It fails if the kernel has no io_uring, has an old version, or forbids
// it.
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

// Prepare adds a request to the submission queue. There must be room: InFlight() < Depth().
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

// Submit submits all prepared requests to the kernel. After an error the kernel may not have taken some of them: Withdraw
// must follow.
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

// Withdraw removes the requests that the kernel has not taken and appends their tags to dst.
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

// Wait parks until requests complete and appends at least one completion to dst. At least one request must be in flight.
// Wait does not fail: as long as the kernel may use a buffer, the only choice is to wait.
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
			time.Sleep(time.Millisecond) // the poller is broken: check from time to time
		}
	}
	return dst
}

// park waits for the eventfd. The kernel signals it only while the goroutine is parked, so that completions that are
// already in the queue cost no system call.
func (r *Ring) park() error {
	var err error
	r.signal(true)
	// A completion that came before the signal was on does not wake the goroutine.
	if !r.pending() {
		_, err = r.wake.Read(r.count[:])
		r.stats.wakeups.Add(1)
	}
	r.signal(false)
	return err
}

// requestBarrier submits a request that the kernel starts only after all earlier requests have completed. When the
// barrier completes, an earlier request without a completion has lost it; until then the request may only be slow, and
// the kernel may use its buffer. If the kernel does not take the barrier, the next stall submits another.
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

// collect matches the completions in the queue to the slots.
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

// endLost ends the requests that were in flight before the barrier and have no completion, as lost.
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

// Close closes the ring. No request may be in flight: the caller of Submit waits for all completions.
func (r *Ring) Close() error {
	if n := r.InFlight(); n > 0 {
		return fmt.Errorf("uring: closed with %d requests in flight", n)
	}
	return errors.Join(r.wake.Close(), r.teardown())
}
