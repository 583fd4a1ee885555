package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// answer is what a pipelined request is answered with, and what that has to wait for.
type answer struct {
	id     uint64
	settle settle
	start  time.Duration
	method telemetry.Method
	err    error          // of the wait: if set, it is what is told
	status *status.Status // if set, the answer is an error

	found     bool
	value     []byte // nil unless a get
	epoch     uint64
	readEpoch uint64

	batchGet    *pb.BatchGetResponse
	deleteRange *pb.DeleteRangeResponse
	invoke      *pb.InvokeResponse
	invokeAll   *pb.InvokeAllResponse

	charge *charge // what it counts; nil if little
}

// bytes is about the size of what the answer holds.
func (a *answer) bytes() int {
	switch {
	case a.batchGet != nil:
		return a.batchGet.SizeVT()
	case a.invoke != nil:
		return a.invoke.SizeVT()
	case a.invokeAll != nil:
		return a.invokeAll.SizeVT()
	}
	return len(a.value)
}

func releaseAll(answers []answer) {
	for i := range answers {
		answers[i].charge.release()
	}
}

// backlogMax bounds the answers of one pipeline that wait for durability. A sync takes some 100 us, in which a stream at full
// speed sends fewer than 100 requests; a slow disk may make it a hundred times that before the client is held back.
const backlogMax = 4096

// backlogBytesMax bounds the bytes of the same answers. A single larger one has its turn when it is alone.
const backlogBytesMax = 1 << 20

// backlog hands answers from a pipeline's receiver to its acker, in order. It is a list that is swapped out whole.
type backlog struct {
	wake  chan struct{} // a token when the acker sleeps and there is something to do
	space chan struct{} // a token when the receiver sleeps and there is room

	mu       sync.Mutex
	list     []answer
	bytes    int  // of the answers that were pushed and not sent
	sleeping bool // the acker waits for wake
	blocked  bool // the receiver waits for space
	closed   bool
	over     bool // nothing will be sent any more
}

func (b *backlog) init() {
	b.wake, b.space = make(chan struct{}, 1), make(chan struct{}, 1)
}

// push adds an answer, waiting for room if need be.
func (b *backlog) push(ctx context.Context, a *answer) error {
	size := a.bytes()
	b.mu.Lock()
	for len(b.list) >= backlogMax || b.bytes > 0 && b.bytes+size > backlogBytesMax {
		b.blocked = true
		b.mu.Unlock()
		select {
		case <-b.space:
		case <-ctx.Done():
			return ctx.Err()
		}
		b.mu.Lock()
	}
	if b.over {
		a.charge.release()
	}
	b.list = append(b.list, *a)
	b.bytes += size
	b.wakeLocked()
	b.mu.Unlock()
	return nil
}

// close tells the acker that nothing more comes.
func (b *backlog) close() {
	b.mu.Lock()
	b.closed = true
	b.wakeLocked()
	b.mu.Unlock()
}

func (b *backlog) wakeLocked() {
	if b.sleeping {
		b.sleeping = false
		b.wake <- struct{}{}
	}
}

// take moves everything into waiting. Without anything to return it sleeps until there is, the backlog is closed
// (open is then false), or stop is closed.
func (b *backlog) take(waiting []answer, stop <-chan struct{}) (_ []answer, open bool) {
	b.mu.Lock()
	if len(waiting) == 0 && len(b.list) == 0 && !b.closed {
		b.sleeping = true
		b.mu.Unlock()
		select {
		case <-b.wake:
		case <-stop:
		}
		b.mu.Lock()
		if b.sleeping { // stopped: nobody has woken us, and nobody shall
			b.sleeping = false
		} else {
			select { // woken and stopped at once: the token must not stay behind
			case <-b.wake:
			default:
			}
		}
	}
	switch {
	case len(waiting) == 0:
		waiting, b.list = b.list, waiting
	case len(waiting) < backlogMax:
		waiting = append(waiting, b.list...)
		clear(b.list)
		b.list = b.list[:0]
	}
	b.roomLocked()
	open = !b.closed
	b.mu.Unlock()
	return waiting, open
}

// roomLocked lets a receiver that waits for room look again.
func (b *backlog) roomLocked() {
	if b.blocked && len(b.list) < backlogMax {
		b.blocked = false
		b.space <- struct{}{}
	}
}

// sent tells that an answer of so many bytes is gone.
func (b *backlog) sent(size int) {
	if size == 0 {
		return
	}
	b.mu.Lock()
	b.bytes -= size
	b.roomLocked()
	b.mu.Unlock()
}

// release ends what the answers count that will not be sent any more, those to come among them.
func (b *backlog) release() {
	b.mu.Lock()
	b.over = true
	releaseAll(b.list)
	b.mu.Unlock()
}

func (b *backlog) empty() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.list) == 0
}
