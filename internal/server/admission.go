package server

import (
	"runtime"
	"sync/atomic"

	"google.golang.org/grpc/mem"
)

// admission bounds the requests that are executed at once, their bytes, and those of their answers.
// Beyond a bound a request is refused at once with advice to retry: a queue would only turn
// overload into latency and memory.
//
// Reads and writes, small and large, scans and answers have shares of their own, so that none of
// them starves another. A connection that holds bytes of a share gets more only while it leaves as
// many free as it then has: half of the share if it is alone, and less the more others hold. So
// connections that leave their answers unread cannot take a share whole, and a connection that
// holds nothing finds room. A request that is alone in its share is admitted whatever its size,
// which other limits bound.
type admission struct {
	words   [shareCount]admissionWord
	refused atomic.Uint64
}

// share is what a request or an answer is counted in.
type share uint8

const (
	shareSmallReads  share = iota // until they are answered
	shareSmallWrites              // until they are durable
	shareLargeReads
	shareLargeWrites
	shareScans   // from begin to end of the stream: twice a page, the one that is filled and the one that is sent
	shareAnswers // from execution until the transport has sent them
	shareCount
)

// sixteenths of --max-inflight-bytes for each share.
var sixteenths = [shareCount]uint64{1, 1, 2, 4, 4, 4}

const (
	// smallRequestMax is the largest request in the small shares.
	smallRequestMax = 16 << 10
	// countedBytesMin is the size from which on a connection's part of a share is counted. Less
	// than that is bounded by the number of streams, and is not worth a shared write.
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
// Invariant: neither half overflows, because the limits stay below half its range and a refused add
// is taken back.
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

// init sets the limits. Scans hold a session for as long as their client reads, so they get a
// quarter of the requests.
func (a *admission) init(requests int, bytes uint64) {
	for sh := range a.words {
		a.words[sh].limit = admissionLimit{requests: uint64(requests), bytes: bytes * sixteenths[sh] / 16}
	}
	a.words[shareScans].limit.requests = uint64(max(1, requests/4))
	a.words[shareAnswers].limit.requests = admissionBytes >> 17 // bytes are their bound
}

func (l *admissionLimit) allows(word uint64) bool {
	n := word >> admissionShift
	return n <= l.requests && (word&admissionBytes <= l.bytes || n == 1)
}

// free is how many bytes of the share are left.
func (l *admissionLimit) free(word uint64) int64 {
	return max(int64(l.bytes)-int64(word&admissionBytes), 0)
}

// enter admits a request of so many bytes, or refuses it. An admitted one must leave with the same
// arguments.
func (a *admission) enter(conn *connection, sh share, bytes int) bool {
	w, delta := &a.words[sh], uint64(admissionOne)+uint64(bytes)
	if after := w.word.Add(delta); w.limit.allows(after) {
		if bytes < countedBytesMin || conn.enter(sh, int64(bytes), w.limit.free(after)) {
			return true
		}
	}
	w.word.Add(-delta)
	a.refused.Add(1)
	return false
}

func (a *admission) leave(conn *connection, sh share, bytes int) {
	if bytes >= countedBytesMin {
		conn.leave(sh, int64(bytes))
	}
	a.words[sh].word.Add(-(uint64(admissionOne) + uint64(bytes)))
}

// must admits a request of no bytes, whatever the limits: one that is on its way out.
func (a *admission) must(sh share) { a.words[sh].word.Add(admissionOne) }

// inflight is the number of requests, their bytes, and those of their answers at the moment.
func (a *admission) inflight() (requests int, bytes, answers int64) {
	for sh := range a.words {
		word := a.words[sh].word.Load()
		if share(sh) == shareAnswers {
			answers = int64(word & admissionBytes)
			continue
		}
		requests += int(word >> admissionShift)
		bytes += int64(word & admissionBytes)
	}
	return requests, bytes, answers
}

// answersFull reports whether an answer of any size would be refused, to a connection or to all.
// Requests with an answer that cannot be refused once it exists are refused then.
func (a *admission) answersFull(conn *connection) bool {
	w := &a.words[shareAnswers]
	free := w.limit.free(w.word.Load())
	if held := conn.answerBytes(); free == 0 || held > 0 && held >= free {
		a.refused.Add(1)
		return true
	}
	return false
}

// charge counts an answer of so many bytes until it is released. It is refused like a request,
// unless it must be: what a write answers has happened. A small answer is not counted; nil and nil
// then, and releasing nil is nothing.
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

// grownBytes is by how much the charge of an answer grows at least while the answer does.
const grownBytes = 256 << 10

// grow makes c count at least so many bytes. It releases c if that is refused.
func (a *admission) grow(c *memoryCharge, conn *connection, bytes int) (*memoryCharge, error) {
	if bytes < countedBytesMin || c != nil && int64(bytes) <= c.counted.bytes {
		return c, nil
	}
	if c != nil {
		c.release()
		bytes += grownBytes
	}
	return a.charge(conn, bytes, false)
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
	bytes      int64
	handedOver bool // to the transport; guarded by the connection's mutex
	released   atomic.Bool
}

// release ends the count, at the first call.
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

// pooledAnswerMax is the largest buffer that is used again. Pools of larger ones would hold on to
// more than the answers themselves.
const pooledAnswerMax = 1 << 20

// Get implements mem.BufferPool.
func (c *memoryCharge) Get(length int) *[]byte {
	if length <= pooledAnswerMax {
		return mem.DefaultBufferPool().Get(length)
	}
	b := make([]byte, length)
	return &b
}

// Put implements mem.BufferPool.
func (c *memoryCharge) Put(b *[]byte) {
	if cap(*b) <= pooledAnswerMax {
		mem.DefaultBufferPool().Put(b)
	}
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

// BufferPool is where the codec gets the message's buffer.
func (c *chargedMessage) BufferPool() mem.BufferPool { return c.charge }

// of is the message to hand to the transport instead of m.
func (c *memoryCharge) of(m encoder) any {
	if c == nil {
		return m
	}
	c.counted.conn.handOver(c.counted)
	return &chargedMessage{encoder: m, charge: c}
}
