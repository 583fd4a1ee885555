package server

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/telemetry"
)

// answer is the answer to a pipelined request, with its acknowledgement wait.
type answer struct {
	id      uint64
	ackWait ackWait
	start   time.Duration
	method  telemetry.Method
	err     error          // of the wait; it is sent instead of the answer
	status  *status.Status // if set, the answer is an error

	found     bool
	value     []byte // nil unless a get
	epoch     uint64
	readEpoch uint64
	expiresAt uint64

	deduplicated bool // of a write

	batchGet    *pb.BatchGetResponse
	deleteRange *pb.DeleteRangeResponse
	invoke      *pb.InvokeResponse
	invokeAll   *pb.InvokeAllResponse

	details details
	size    int // of the request

	charge *memoryCharge // for the memory of the answer; nil for a small answer

	alone bool // a read of directPipeline that was repeated alone
}

// bytes is the approximate size of the answer.
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

// queuedBytes is the approximate size of the answer in the queue, with what the audit log says of its request.
func (a *answer) queuedBytes() int { return a.bytes() + a.details.note.bytes() }

// committed is the epoch of the request's commit; 0 if it has none.
func (a *answer) committed() uint64 {
	switch {
	case a.deleteRange != nil:
		return a.deleteRange.GetEpoch()
	case a.invoke != nil:
		return a.invoke.GetEpoch()
	case a.invokeAll != nil:
		return a.invokeAll.GetEpoch()
	}
	return a.epoch
}

// drop gives back what an answer has collected.
func (a *answer) drop() {
	if a.batchGet != nil {
		a.batchGet.ReturnToVTPool()
		a.batchGet = nil
	}
}

// ackQueueMax bounds the answers of one pipeline that wait for durability; see waitingAnswers for those of all. A sync takes some 100
// us, in which a stream at full speed sends fewer than 100 requests; a sync of a slow disk may take
// a hundred times as long before flow control stops the client.
const ackQueueMax = 4096

// ackQueueBytesMax bounds the bytes of the same answers. A larger answer is queued when the queue
// is empty.
const ackQueueBytesMax = 1 << 20

// ackQueueKept is how many answers the lists of a queue keep room for while nothing waits.
const ackQueueKept = 64

// unlessLarge is an empty list, unless that is large.
func unlessLarge(list []answer) []answer {
	if cap(list) > ackQueueKept {
		return nil
	}
	return list
}

// ackQueue hands answers from a pipeline's receiver to its acker, in order. The acker swaps out the
// whole list.
type ackQueue struct {
	wake  chan struct{} // a token when the acker sleeps and has work
	space chan struct{} // a token when the receiver sleeps and the queue has room

	mu              sync.Mutex
	list            []answer
	pipelineAnswers      // that were pushed and not sent
	sleeping        bool // the acker waits for wake
	blocked         bool // the receiver waits for space
	closed          bool
	over            bool // no more answers will be sent

	abandon func(*answer) // is called for each answer that will not be sent
}

func (q *ackQueue) init(total *waitingAnswers, own owned, abandon func(*answer)) {
	q.pipelineAnswers.init(total, own)
	q.abandon = abandon
	q.wake, q.space = make(chan struct{}, 1), make(chan struct{}, 1)
}

// push adds an answer. It waits while the queue is full.
func (q *ackQueue) push(ctx context.Context, a *answer) error {
	size := a.queuedBytes()
	q.mu.Lock()
	for len(q.list) >= ackQueueMax || q.bytes > 0 && q.bytes+size > ackQueueBytesMax || q.hasEnough(waitingOwn) {
		q.blocked = true
		q.mu.Unlock()
		select {
		case <-q.space:
		case <-ctx.Done():
			return ctx.Err()
		}
		q.mu.Lock()
	}
	if q.over {
		unsent := *a // a itself need not be in the heap
		q.abandon(&unsent)
		q.mu.Unlock()
		return nil
	}
	q.list = append(q.list, *a)
	q.add(1, size)
	q.wakeLocked()
	q.mu.Unlock()
	return nil
}

// close tells the acker that no more answers will be pushed.
func (q *ackQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.wakeLocked()
	q.mu.Unlock()
}

func (q *ackQueue) wakeLocked() {
	if q.sleeping {
		q.sleeping = false
		q.wake <- struct{}{}
	}
}

// take moves all queued answers into waiting. If there are none, it sleeps until an answer comes,
// the queue is closed (open is then false), stop can be received from, or ctx ends.
func (q *ackQueue) take(ctx context.Context, waiting []answer, stop <-chan struct{}) (_ []answer, open bool) {
	q.mu.Lock()
	if len(waiting) == 0 && len(q.list) == 0 && !q.closed {
		q.sleeping = true
		waiting, q.list = unlessLarge(waiting), unlessLarge(q.list) // the stream may be idle for ever
		q.mu.Unlock()
		select {
		case <-q.wake:
		case <-stop:
		case <-ctx.Done():
		}
		q.mu.Lock()
		if q.sleeping { // stopped without a wake-up: a later wake-up must not send a token
			q.sleeping = false
		} else {
			select { // woken and stopped at the same time: remove the token
			case <-q.wake:
			default:
			}
		}
	}
	switch {
	case len(waiting) == 0:
		waiting, q.list = q.list, waiting
	case len(waiting) < ackQueueMax:
		waiting = append(waiting, q.list...)
		clear(q.list)
		q.list = q.list[:0]
	}
	q.roomLocked()
	open = !q.closed
	q.mu.Unlock()
	return waiting, open
}

// roomLocked wakes the receiver if it waits for room.
func (q *ackQueue) roomLocked() {
	if q.blocked && len(q.list) < ackQueueMax && !q.hasEnough(waitingOwn/2) {
		q.blocked = false
		q.space <- struct{}{}
	}
}

// sent records that an answer of a number of bytes has left the queue.
func (q *ackQueue) sent(size int) {
	q.mu.Lock()
	q.add(-1, -size)
	q.roomLocked()
	q.mu.Unlock()
}

// release releases the charges of all answers that will not be sent, also of those that are pushed
// later.
func (q *ackQueue) release() {
	q.mu.Lock()
	q.over = true
	for i := range q.list {
		q.abandon(&q.list[i])
	}
	q.drop()
	q.mu.Unlock()
}

func (q *ackQueue) empty() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.list) == 0
}
