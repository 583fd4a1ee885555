package server

import (
	"runtime"
	"sync/atomic"

	"google.golang.org/grpc/mem"

	pb "github.com/epochkv/epochkv/api/proto/epochkv/v1"
	"github.com/epochkv/epochkv/internal/mvcc"
)

// admission bounds the requests that are executed at once, their bytes, and the bytes of their
// answers. A request above a bound is refused at once with advice to retry: a queue would only turn
// overload into latency and memory.
//
// Small and large reads, small and large writes, scans, watches and answers have shares of their own, so
// that none of them starves another. Watches wait for room in theirs: no request asks for their responses,
// so that none could be refused. A connection that has bytes of a share gets more only if
// afterwards at least as many bytes are free as the connection has. That is half of the share for
// the only connection, and less if other connections have bytes. So connections with unread answers
// cannot take a whole share, and a connection without bytes in the share finds room. A request that
// is alone in its share is admitted whatever its size; other limits bound its size.
type admission struct {
	deduplicated atomic.Uint64 // requests whose answer is that of an earlier attempt

	words    [shareCount]admissionWord
	refused  atomic.Uint64
	sessions heldSessions
	decoding decoding
	watches  watchLine
}

// share is one part of --max-inflight-bytes. Each request and each answer is counted in one share.
type share uint8

const (
	shareSmallReads  share = iota // until they are answered
	shareSmallWrites              // until they are durable
	shareLargeReads
	shareLargeWrites
	shareScans   // from begin to end of the stream: two pages, one being filled and one being sent
	shareWatches // large responses of watches, until the transport has sent them, but for one beside them; see watchLine
	shareAnswers // from execution until the transport has sent them
	shareCount
)

// sixteenths of --max-inflight-bytes for each share.
var sixteenths = [shareCount]uint64{1, 1, 2, 4, 4, 1, 3}

const (
	// smallRequestMax is the largest request in the small shares.
	smallRequestMax = 16 << 10
	// countedBytesMin is the smallest size that is counted in a connection's part of a share. The
	// number of streams bounds the sum of smaller sizes, so that they need no shared write.
	countedBytesMin = 4 << 10
)

// shareOf is the share of a request.
func shareOf(write bool, size int) share {
	sh := shareSmallReads
	if size > smallRequestMax {
		sh = shareLargeReads
	}
	if write {
		sh++
	}
	return sh
}

// admissionWord is one share. Both its counts are in one word, so that admitting is one atomic add:
//
//	63            40 39             0
//	+---------------+----------------+
//	| requests (24) |   bytes (40)   |
//	+---------------+----------------+
//
// Invariant: neither half overflows, because each limit is below half of its range and a refused
// add is undone.
type admissionWord struct {
	_     [128]byte // the word alone on its lines: every request writes it
	word  atomic.Uint64
	_     [120]byte
	limit admissionLimit
}

type admissionLimit struct{ requests, bytes uint64 }

const (
	admissionShift = 40
	admissionOne   = 1 << admissionShift
	admissionBytes = admissionOne - 1
)

// init sets the limits.
func (a *admission) init(requests int, bytes uint64) {
	for sh := range a.words {
		a.words[sh].limit = admissionLimit{requests: uint64(requests), bytes: min(bytes*sixteenths[sh]/16, admissionBytes/2)}
	}
	a.words[shareScans].limit.requests = uint64(scansMax(requests))
	a.sessions.init(requests)
	for _, sh := range []share{shareWatches, shareAnswers} {
		a.words[sh].limit.requests = admissionBytes >> 17 // no effective bound: the bytes bound them
	}
	a.watches.admission = a
}

// scanBytesMin is what a scan counts at least, so that the bytes which a connection leaves free leave room for as many scans: each has a session for
// as long as its client likes.
func (a *admission) scanBytesMin() int {
	l := &a.words[shareScans].limit
	return max(int(l.bytes/l.requests), countedBytesMin)
}

func (l *admissionLimit) allows(word uint64) bool {
	n := word >> admissionShift
	return n <= l.requests && (word&admissionBytes <= l.bytes || n == 1)
}

// free is the number of bytes of the share that are not in use.
func (l *admissionLimit) free(word uint64) int64 {
	return max(int64(l.bytes)-int64(word&admissionBytes), 0)
}

// enter admits a request of a number of bytes, or refuses it. For an admitted request the caller
// calls leave with the same arguments.
func (a *admission) enter(conn *connection, sh share, bytes int) bool {
	return a.enterBeside(conn, sh, 0, bytes)
}

// enterBeside is enter for what a request makes that has own bytes in the share already, with which it is one: alone it may have any size. It is
// enter without own bytes. For what is admitted the caller calls leaveBeside.
func (a *admission) enterBeside(conn *connection, sh share, own, bytes int) bool {
	if a.tryEnter(conn, sh, own, bytes) {
		return true
	}
	a.refused.Add(1)
	return false
}

func (a *admission) leaveBeside(conn *connection, sh share, own, bytes int) {
	if own == 0 {
		a.leave(conn, sh, bytes)
	} else {
		a.shrink(conn, sh, own+bytes, own)
	}
}

// tryEnter is enterBeside for what is not refused but waits.
func (a *admission) tryEnter(conn *connection, sh share, own, bytes int) bool {
	w, delta := &a.words[sh], uint64(bytes)
	if own == 0 {
		delta += admissionOne
	}
	if after := w.word.Add(delta); w.limit.allows(after) {
		if bytes < countedBytesMin || conn.enter(sh, int64(own), int64(bytes), w.limit.free(after)) {
			return true
		}
	}
	w.word.Add(-delta)
	return false
}

// enterKind is enter for a request of a kind. A request whose answer cannot be refused once it exists
// is refused while no answer would be admitted.
func (a *admission) enterKind(conn *connection, k kind, sh share, bytes int) bool {
	if !a.enter(conn, sh, bytes) {
		return false
	}
	if k == kindWriteAndRead && a.answersFull(conn) {
		a.leave(conn, sh, bytes)
		return false
	}
	return true
}

func (a *admission) leave(conn *connection, sh share, bytes int) {
	if bytes >= countedBytesMin {
		conn.leave(sh, int64(bytes))
	}
	a.words[sh].word.Add(-(uint64(admissionOne) + uint64(bytes)))
}

// shrink leaves an admitted request with fewer bytes.
func (a *admission) shrink(conn *connection, sh share, from, to int) {
	if from == to {
		return
	}
	if from >= countedBytesMin {
		left := 0
		if to >= countedBytesMin {
			left = to
		}
		conn.leave(sh, int64(from-left))
	}
	a.words[sh].word.Add(-uint64(from - to))
}

// must admits a request without bytes whatever the limits are. A scan that could not get more bytes
// uses it, and then ends.
func (a *admission) must(sh share) { a.words[sh].word.Add(admissionOne) }

// inflight is the current number of requests, of their bytes, and of the bytes of their answers.
func (a *admission) inflight() (requests int, bytes, answers int64) {
	for sh := range a.words {
		word := a.words[sh].word.Load()
		if sh := share(sh); sh == shareWatches || sh == shareAnswers {
			answers += int64(word & admissionBytes)
			continue
		}
		requests += int(word >> admissionShift)
		bytes += int64(word & admissionBytes)
	}
	return requests, bytes, answers + a.watches.beside.bytes()
}

// answersFull reports whether an answer of any size would be refused, for one connection or for
// all. Then a request whose answer must not be refused is itself refused.
func (a *admission) answersFull(conn *connection) bool {
	w := &a.words[shareAnswers]
	free := w.limit.free(w.word.Load())
	if held := conn.answerBytes(); free == 0 || held > 0 && held >= free {
		a.refused.Add(1)
		return true
	}
	return false
}

// holdSession counts a session that a read of the connection holds while it waits, or refuses it.
// After nil the caller must release the session from a.sessions.
func (a *admission) holdSession(conn *connection) error {
	if !a.sessions.hold(conn) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
}

// holdWrite is holdSession for a write, while it commits. Of one that reads first, own is what its connection has. After nil the caller must
// release the session from a.sessions.writes.
func (a *admission) holdWrite(own *atomic.Int64) error {
	if !a.sessions.writes.hold(own, 1) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
}

// holdWalk counts the sessions of one more walk of a watch, or refuses it. After nil the caller must release
// them from a.sessions.walks.
func (a *admission) holdWalk(conn *connection, sessions int) error {
	if !a.sessions.walks.hold(&conn.walks, int64(sessions)) {
		a.refused.Add(1)
		return mvcc.ErrTooManySessions
	}
	return nil
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
	c.counted.conn.handOver(c.counted)
	return &chargedMessage{encoder: m, charge: c}
}
