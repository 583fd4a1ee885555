package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	pb "epochkv/api/proto/epochkv/v1"
	"epochkv/internal/telemetry"
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
}

// backlogMax bounds the answers of one pipeline that wait for durability. A sync takes some 100 us, in which a stream at full
// speed sends fewer than 100 requests; a slow disk may make it a hundred times that before the client is held back.
const backlogMax = 4096

// backlog hands answers from a pipeline's receiver to its acker, in order. It is a list that is swapped out whole.
type backlog struct {
	wake  chan struct{} // a token when the acker sleeps and there is something to do
	space chan struct{} // a token when the receiver sleeps and there is room

	mu       sync.Mutex
	list     []answer
	sleeping bool // the acker waits for wake
	blocked  bool // the receiver waits for space
	closed   bool
}

func (b *backlog) init() {
	b.wake, b.space = make(chan struct{}, 1), make(chan struct{}, 1)
}

// push adds an answer, waiting for room if need be.
func (b *backlog) push(ctx context.Context, a *answer) error {
	b.mu.Lock()
	for len(b.list) >= backlogMax {
		b.blocked = true
		b.mu.Unlock()
		select {
		case <-b.space:
		case <-ctx.Done():
			return ctx.Err()
		}
		b.mu.Lock()
	}
	b.list = append(b.list, *a)
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
	if b.blocked && len(b.list) < backlogMax {
		b.blocked = false
		b.space <- struct{}{}
	}
	open = !b.closed
	b.mu.Unlock()
	return waiting, open
}

func (b *backlog) empty() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.list) == 0
}
