package server

import (
	"cmp"
	"context"
	"sync"
	"time"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/transport"
)

// directAcks are the answers of a connection that wait until a crash cannot take back what they
// reveal, in the order of their requests. One goroutine waits for the first of them, and answers
// all that one sync has made durable. Requests that are cancelled, or too late, leave before: that
// goroutine may be in a sync which does not end. Admission bounds the answers.
type directAcks struct {
	mu      sync.Mutex // a leaf
	waiting []directAnswer
	pooled  *[]directAnswer // of answerLists: whose memory waiting uses; nil while no goroutine is running
	running bool            // a goroutine waits
	timer   *time.Timer     // ends what is late
	due     time.Time       // when the timer fires; zero: never
	closed  bool            // the connection has ended
}

// await answers a when it may be told.
func (c *directClient) await(a *directAnswer) {
	q := &c.acks
	q.mu.Lock()
	if q.pooled == nil {
		q.pooled = answerLists.Get().(*[]directAnswer) //nolint:forcetypeassert // there is no other kind
		q.waiting = (*q.pooled)[:0]
	}
	q.waiting = append(q.waiting, *a)
	q.watchLocked(c, a.deadline)
	start := !q.running
	q.running = true
	q.mu.Unlock()
	if start {
		c.server.drain.receivers.Go(c.acknowledge)
	}
	if a.request.Ended() { // before it was in the queue
		q.cancel(c, a.request)
	}
}

// watchLocked sets the timer, if no earlier one is set.
func (q *directAcks) watchLocked(c *directClient, deadline time.Time) {
	if deadline.IsZero() || !q.due.IsZero() && !deadline.Before(q.due) || q.closed {
		return
	}
	q.due = deadline
	if q.timer == nil {
		q.timer = time.AfterFunc(time.Until(deadline), func() { q.expire(c) })
	} else {
		q.timer.Reset(time.Until(deadline))
	}
}

// close stops the timer, which would keep the connection's memory up to a deadline of hours.
func (q *directAcks) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	if q.timer != nil {
		q.timer.Stop()
	}
}

// expire answers the requests that are too late.
func (q *directAcks) expire(c *directClient) {
	q.mu.Lock()
	q.due = time.Time{}
	now := time.Now()
	late := q.takeLocked(func(a *directAnswer) bool { return !a.deadline.IsZero() && !now.Before(a.deadline) })
	for i := range q.waiting {
		q.watchLocked(c, q.waiting[i].deadline)
	}
	q.mu.Unlock()
	for i := range late {
		late[i].err = context.DeadlineExceeded
	}
	c.answerAll(late)
}

// cancel drops a request. What it has written stays.
func (q *directAcks) cancel(c *directClient, r transport.Request) {
	q.mu.Lock()
	gone := q.takeLocked(func(a *directAnswer) bool { return a.request == r })
	q.mu.Unlock()
	for i := range gone {
		c.drop(&gone[i])
	}
}

// takeLocked removes what leaves says.
func (q *directAcks) takeLocked(leaves func(*directAnswer) bool) (taken []directAnswer) {
	kept := q.waiting[:0]
	for i := range q.waiting {
		if a := &q.waiting[i]; leaves(a) {
			taken = append(taken, *a)
		} else {
			kept = append(kept, *a)
		}
	}
	clear(q.waiting[len(kept):])
	q.waiting = kept
	return taken
}

// answerLists are the lists of connections whose answers wait, and of acknowledge, which begins anew whenever a connection has had no
// answer that waits. They hold no answer while they are pooled.
var answerLists = sync.Pool{New: func() any { return new([]directAnswer) }}

// acknowledge answers what waits, until nothing does.
func (c *directClient) acknowledge() {
	q, store := &c.acks, c.server.store
	pooled := answerLists.Get().(*[]directAnswer) //nolint:forcetypeassert // there is no other kind
	defer answerLists.Put(pooled)
	ready := (*pooled)[:0]
	for {
		q.mu.Lock()
		if len(q.waiting) == 0 {
			q.running = false
			*q.pooled = q.waiting // a long one does not stay with the connection
			answerLists.Put(q.pooled)
			q.pooled, q.waiting = nil, nil
			q.mu.Unlock()
			*pooled = ready
			return
		}
		oldest := q.waiting[0].ackWait
		q.mu.Unlock()
		failed := oldest.wait(c.ctx, store)

		q.mu.Lock()
		kept := 0
		for i := range q.waiting {
			if a := &q.waiting[i]; failed != nil || a.ackWait.ready(store) {
				ready = append(ready, *a)
			} else {
				q.waiting[kept] = *a
				kept++
			}
		}
		clear(q.waiting[kept:])
		q.waiting = q.waiting[:kept]
		var last ackWait
		if kept > 0 {
			last = q.waiting[kept-1].ackWait
		}
		q.mu.Unlock()
		if last.epoch != 0 && failed == nil {
			store.RequestDurable(last.epoch) // while the answers before it are sent
		}
		for i := range ready {
			if failed != nil { // the log, or the connection has ended
				ready[i].err = cmp.Or(ready[i].ackWait.wait(c.ctx, store), ready[i].err)
			}
		}
		c.answerAll(ready)
		clear(ready)
		ready = ready[:0]
	}
}

// answerAll answers requests that have waited.
func (c *directClient) answerAll(list []directAnswer) {
	written := pb.PutResponse{} // one for the list: a request allocates nothing
	for i := range list {
		c.answer(&list[i], &written)
	}
	if len(list) > 0 {
		list[0].request.Flush()
	}
}
