package server

import (
	"runtime"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// answersFull reports whether a connection has too many answers, or answers to writes, which may exceed their share by a part, have all of
// that. Then a request whose answer must not be refused is itself refused. What those add that are executed meanwhile is bounded: values, old and
// new, and results are counted, and may be refused, before the request commits, but for less than 64 KiB, which each stream may always have.
func (a *admission) answersFull(conn *connection) bool {
	w := &a.words[shareAnswers]
	word := w.word.Load()
	if has := conn.answerBytes(); word&admissionBytes >= w.limit.bytes+w.limit.bytes/mustPart || has > mustOwn && !w.limit.leaves(has, word) {
		a.refused.Add(1)
		return true
	}
	return false
}

// charge counts the bytes of an answer until the charge is released. Like a request, an answer may
// be refused, but not if must is set: the answer to a write must be sent, because the write has
// happened. For a small answer, which is not counted, charge returns nil and nil. The release of
// nil does nothing.
func (a *admission) charge(conn *connection, bytes int, must bool) (*memoryCharge, error) {
	if bytes < countedBytesMin || conn == nil {
		return nil, nil
	}
	if !conn.charge(a, int64(bytes), must) {
		a.refused.Add(1)
		return nil, errOverloaded
	}
	c := &memoryCharge{counted: &chargedBytes{admission: a, conn: conn, bytes: int64(bytes)}}
	runtime.AddCleanup(c, (*chargedBytes).release, c.counted)
	return c, nil
}

// chargeAnswer is charge for an answer whose large values held counts already, or nil. It takes held
// over: to release it and to charge the answer would let another request take the room meanwhile,
// and of two requests, for one of which there is room, both would be refused.
func (a *admission) chargeAnswer(held *memoryCharge, conn *connection, bytes int, must bool) (*memoryCharge, error) {
	switch {
	case held == nil:
		return a.charge(conn, bytes, must)
	case bytes < countedBytesMin:
		held.release()
		return nil, nil
	case !conn.resize(held.counted, int64(bytes), must):
		a.refused.Add(1)
		held.release()
		return nil, errOverloaded
	}
	return held, nil
}

// grownBytes is the least number of bytes by which the charge of a growing answer grows.
const grownBytes = 256 << 10

// grow makes c, which may be nil, count at least a number of bytes. If that is refused, grow releases c.
func (a *admission) grow(c *memoryCharge, conn *connection, bytes int) (*memoryCharge, error) {
	if bytes < countedBytesMin || c != nil && int64(bytes) <= c.counted.bytes {
		return c, nil
	}
	if c != nil {
		bytes += grownBytes
	}
	return a.chargeAnswer(c, conn, bytes, false)
}

// memoryCharge counts the bytes of one answer against the share of answers until it is released. It
// is also the pool of the buffer into which the answer is encoded, so the transport releases the
// charge when it has sent the answer and gives the buffer back. gRPC loses some buffers of streams
// that break; their charges are released when the garbage collector finds them unreachable.
type memoryCharge struct{ counted *chargedBytes }

// chargedBytes is the part of a memoryCharge that outlives it, for the cleanup.
type chargedBytes struct {
	admission  *admission
	conn       *connection
	bytes      int64 // guarded by the connection's mutex once the charge is shared
	handedOver bool  // to the transport; guarded by the connection's mutex
	released   atomic.Bool
}

// release ends the charge. Only the first call has an effect.
func (c *memoryCharge) release() {
	if c != nil {
		c.counted.release()
	}
}

func (d *chargedBytes) release() {
	if !d.released.Swap(true) {
		d.conn.releaseCharge(d)
	}
}

// handOver says that the answer waits for its client from now on. Only the first call has an effect.
func (c *memoryCharge) handOver() {
	if c != nil {
		c.counted.conn.handOver(c.counted)
	}
}

// queue says that the answer waits for the disk in the queue of a pipeline, and for its client once it may be sent: those before it may do so, too.
func (c *memoryCharge) queue(w ackWait, s *mvcc.Store) {
	if c != nil {
		c.counted.conn.queue(c.counted, func() bool { return w.ready(s) })
	}
}

// Get implements mem.BufferPool.
func (c *memoryCharge) Get(length int) *[]byte { return pb.Buffers.Get(length) }

// Put implements mem.BufferPool.
func (c *memoryCharge) Put(b *[]byte) {
	pb.Buffers.Put(b)
	c.release()
}

// encoder is a message of the generated code.
type encoder interface {
	SizeVT() int
	MarshalToSizedBufferVT(buf []byte) (int, error)
}

// chargedMessage is a message whose encoding is counted.
type chargedMessage struct {
	encoder
	charge *memoryCharge
}

// BufferPool is the pool from which the codec takes the message's buffer.
func (c *chargedMessage) BufferPool() mem.BufferPool { return c.charge }

// Sent implements transport.Counted.
func (c *chargedMessage) Sent() { c.charge.release() }

// of returns the message to hand to the transport instead of m.
func (c *memoryCharge) of(m encoder) any {
	if c == nil {
		return m
	}
	c.handOver()
	return &chargedMessage{encoder: m, charge: c}
}

// charge counts an answer for the connection and in its share. Answers for a closed connection are
// not sent, and not counted.
func (c *connection) charge(a *admission, bytes int64, must bool) bool {
	w := &a.words[shareAnswers]
	c.mu.Lock()
	defer c.mu.Unlock()
	switch delta := admissionOne + uint64(bytes); {
	case c.ended:
		return must
	case c.leavesAnswers(w, bytes) && w.add(delta, c.answers+bytes):
		c.countAnswers(bytes)
	case w.takeLarge(c, bytes):
		w.word.Add(admissionOne)
	case must:
		w.word.Add(delta)
		c.countAnswers(bytes)
	default:
		return false
	}
	c.charges++
	return true
}

// takeLarge takes the large slot for an answer that finds no room in the share.
func (w *admissionWord) takeLarge(c *connection, bytes int64) bool {
	return w.limit.isLarge(bytes) && w.large.take(c, &c.claims[shareAnswers], bytes)
}

// countAnswers counts more bytes of answers. The connection's mutex is held.
func (c *connection) countAnswers(bytes int64) {
	c.answers += bytes
	c.owns(ownedKind(shareAnswers)).add(bytes)
}

// leavesAnswers reports whether the client leaves enough of the share to others with more bytes of the connection, whose mutex is held.
func (c *connection) leavesAnswers(w *admissionWord, more int64) bool {
	own := c.owns(ownedKind(shareAnswers))
	_, ofClient := own.add(0)
	return own.leaves(more, c.answers+more, ofClient+more, w.limit.free(w.word.Load()+uint64(more)), int64(w.limit.bytes))
}

// resize changes the bytes of a charge. More may be refused, like a charge; but a number that a
// charge need not count is not refused either.
func (c *connection) resize(d *chargedBytes, bytes int64, must bool) bool {
	w := &d.admission.words[shareAnswers]
	c.mu.Lock()
	defer c.mu.Unlock()
	switch more := bytes - d.bytes; {
	case c.ended || more >= 0 && more < countedBytesMin:
		return true
	case w.large.change(c, d.bytes, bytes):
	case more > 0 && c.leavesAnswers(w, more) && w.add(uint64(more), c.answers+more):
		c.countAnswers(more)
	case more > 0 && w.takeLarge(c, bytes):
		w.word.Add(-uint64(d.bytes))
		c.countAnswers(-d.bytes)
	case more < 0 || must:
		w.word.Add(uint64(more))
		c.countAnswers(more)
	default:
		return false
	}
	d.bytes = bytes
	return true
}

func (c *connection) releaseCharge(d *chargedBytes) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	w, delta := &d.admission.words[shareAnswers], uint64(admissionOne)
	if !w.large.leave(c, d.bytes) {
		delta += uint64(d.bytes)
		c.countAnswers(-d.bytes)
	}
	w.word.Add(-delta)
	c.charges--
	if d.handedOver {
		c.waiting -= d.bytes
	}
	delete(c.queued, d)
}

// handOver counts an answer as waiting for the transport from now on.
func (c *connection) handOver(d *chargedBytes) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handOverLocked(d)
}

func (c *connection) handOverLocked(d *chargedBytes) {
	if c.ended || d.handedOver {
		return
	}
	d.handedOver = true
	c.waiting += d.bytes
	d.admission.words[shareAnswers].large.handOver(c, d.bytes)
}

// queue notes what hands an answer over; see handOverReady.
func (c *connection) queue(d *chargedBytes, ready func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	if c.queued == nil {
		c.queued = make(map[*chargedBytes]func() bool)
	}
	c.queued[d] = ready
}

// handOverReady hands over the answers in queues that no longer wait for the disk: what sends them may wait for the client with one before them.
func (c *connection) handOverReady() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for d, ready := range c.queued {
		if ready() {
			c.handOverLocked(d)
		}
	}
}

// isOverdue reports whether the client has left its answer in a large slot for longer than it may, by more than a grace, while others wanted the slot.
func (c *connection) isOverdue(a *admission, grace time.Duration) bool {
	return a.words[shareAnswers].large.isOverdue(c, a.slotTime, grace) || a.words[shareScans].large.isOverdue(c, a.slotTime, grace)
}

func (c *connection) waitingBytes() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting
}

func (c *connection) answerBytes() int64 {
	if c == nil {
		return 0
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.answers
}

// end releases the charges of all answers of the connection, and the room of its pages: the transport discards them without a
// notification.
func (c *connection) end(a *admission) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	a.words[shareAnswers].word.Add(-(c.charges<<admissionShift + uint64(c.answers)))
	a.words[shareAnswers].large.drop(c)
	for room, scans := range c.pages {
		for range scans {
			a.leave(c, shareScans, room)
		}
	}
	c.countAnswers(-c.answers)
	c.waiting, c.charges, c.pages, c.queued = 0, 0, nil, nil
}
