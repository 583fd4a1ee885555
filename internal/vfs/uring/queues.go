package uring

import (
	"errors"
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The kernel's interface, from linux/io_uring.h.
const (
	offsetRings = 0          // IORING_OFF_SQ_RING
	offsetSqes  = 0x10000000 // IORING_OFF_SQES

	featureSingleMmap = 1 << 0 // one mapping holds both rings (5.4)
	featureNoDrop     = 1 << 1 // completions are never dropped by the kernel (5.5)
	featureCurPos     = 1 << 3 // came with IORING_OP_READ and WRITE (5.6)

	registerEventfd = 4      // IORING_REGISTER_EVENTFD
	eventfdDisabled = 1 << 0 // IORING_CQ_EVENTFD_DISABLED (5.8)
	sqeDrain        = 1 << 1 // IOSQE_IO_DRAIN
)

// ringParams is struct io_uring_params.
type ringParams struct {
	sqEntries, cqEntries, flags, sqThreadCPU, sqThreadIdle, features, wqFD uint32

	_ [3]uint32

	sq struct {
		head, tail, ringMask, ringEntries, flags, dropped, array, _ uint32
		_                                                           uint64
	}
	cq struct {
		head, tail, ringMask, ringEntries, overflow, cqes, flags, _ uint32
		_                                                           uint64
	}
}

// sqe is struct io_uring_sqe.
type sqe struct {
	opcode   Op
	flags    uint8
	_        uint16
	fd       int32
	off      uint64
	addr     uint64
	length   uint32
	_        uint32
	userData uint64
	_        [3]uint64
}

// cqe is struct io_uring_cqe.
type cqe struct {
	userData uint64
	result   int32
	_        uint32
}

// The kernel reads these layouts, so the compiler checks their sizes.
var (
	_ [120]byte = [unsafe.Sizeof(ringParams{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(sqe{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(cqe{})]byte{}
)

// queues is the memory shared with the kernel.
//
// Four words are written by one side and read by the other; each is accessed atomically. Go's atomics are sequentially
// consistent, which contains what the protocol needs:
//
//	sqTail  ours: the store releases the entries before it to the kernel, which loads it inside io_uring_enter
//	sqHead  the kernel's: entries below it have been copied and may be used again
//	cqTail  the kernel's: the load acquires the completions before it
//	cqHead  ours: the store frees the entries before it
//
// Everything else is constant after setup, or belongs to one side between these words.
type queues struct {
	fd      int
	rings   []byte // mapping of both rings
	entries []byte // mapping of the submission entries

	sqHead, sqTail, cqHead, cqTail, cqFlags *uint32

	sqMask, cqMask, cqEntries uint32

	sqes []sqe
	cqes []cqe
}

func (q *queues) setup(entries uint32) error {
	var p ringParams
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return fmt.Errorf("setup: %w", errno)
	}
	q.fd = int(fd)
	const needed = featureSingleMmap | featureNoDrop | featureCurPos
	if p.features&needed != needed {
		return errors.Join(fmt.Errorf("kernel too old: features %#x: %w", p.features, unix.ENOSYS), unix.Close(q.fd))
	}
	if err := q.mapRings(&p); err != nil {
		return errors.Join(fmt.Errorf("map: %w", err), q.teardown())
	}
	return nil
}

func (q *queues) mapRings(p *ringParams) error {
	size := max(p.sq.array+p.sqEntries*4, p.cq.cqes+p.cqEntries*uint32(unsafe.Sizeof(cqe{})))
	const protection, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	var err error
	if q.rings, err = unix.Mmap(q.fd, offsetRings, int(size), protection, flags); err != nil {
		return err
	}
	sqeBytes := int(p.sqEntries) * int(unsafe.Sizeof(sqe{}))
	if q.entries, err = unix.Mmap(q.fd, offsetSqes, sqeBytes, protection, flags); err != nil {
		return err
	}
	q.sqHead, q.sqTail = q.word(p.sq.head), q.word(p.sq.tail)
	q.cqHead, q.cqTail, q.cqFlags = q.word(p.cq.head), q.word(p.cq.tail), q.word(p.cq.flags)
	q.sqMask, q.cqMask, q.cqEntries = *q.word(p.sq.ringMask), *q.word(p.cq.ringMask), p.cqEntries
	q.sqes = unsafe.Slice((*sqe)(unsafe.Pointer(&q.entries[0])), p.sqEntries)
	q.cqes = unsafe.Slice((*cqe)(unsafe.Pointer(&q.rings[p.cq.cqes])), p.cqEntries)
	// The indirection between ring and entries is not used: index i is always entry i.
	for i := range p.sqEntries {
		*q.word(p.sq.array + i*4) = i
	}
	q.signal(false)
	return nil
}

func (q *queues) word(offset uint32) *uint32 {
	return (*uint32)(unsafe.Pointer(&q.rings[offset]))
}

// teardown releases the mappings and the descriptor of setup, all or a part of them.
func (q *queues) teardown() error {
	var errs []error
	for _, mapping := range [][]byte{q.rings, q.entries} {
		if mapping != nil {
			errs = append(errs, unix.Munmap(mapping))
		}
	}
	return errors.Join(append(errs, unix.Close(q.fd))...)
}

func (q *queues) registerEventfd(eventfd int) error {
	fd := int32(eventfd)
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(q.fd), registerEventfd,
		uintptr(unsafe.Pointer(&fd)), 1, 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// push adds an entry. There is always room: Ring counts the entries.
func (q *queues) push(entry sqe) {
	tail := atomic.LoadUint32(q.sqTail)
	q.sqes[tail&q.sqMask] = entry
	atomic.StoreUint32(q.sqTail, tail+1)
}

// pop removes the newest entry, which the kernel must not have taken yet, and returns its user_data. The kernel reads
// the queue only inside io_uring_enter, so there is no race.
func (q *queues) pop() uint64 {
	tail := atomic.LoadUint32(q.sqTail) - 1
	atomic.StoreUint32(q.sqTail, tail)
	return q.sqes[tail&q.sqMask].userData
}

// enter submits count entries and returns how many the kernel took.
func (q *queues) enter(count uint32) (int, error) {
	n, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(q.fd), uintptr(count), 0, 0, 0, 0)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}

// pending reports whether there are completions.
func (q *queues) pending() bool {
	return atomic.LoadUint32(q.cqTail) != atomic.LoadUint32(q.cqHead)
}

// drain appends the completions in the queue to dst and frees their entries.
func (q *queues) drain(dst []cqe) []cqe {
	head, tail := atomic.LoadUint32(q.cqHead), atomic.LoadUint32(q.cqTail)
	for ; head != tail; head++ {
		dst = append(dst, q.cqes[head&q.cqMask])
	}
	atomic.StoreUint32(q.cqHead, head)
	return dst
}

// signal turns the eventfd on or off.
func (q *queues) signal(on bool) {
	if on {
		atomic.StoreUint32(q.cqFlags, 0)
	} else {
		atomic.StoreUint32(q.cqFlags, eventfdDisabled)
	}
}
