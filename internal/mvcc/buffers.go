package mvcc

import (
	"sync/atomic"
	"unsafe"

	"github.com/epochkv/epochkv/internal/storage"
)

// pooledBytesMax bounds the buffers that a session keeps from one request to the next. There may be
// thousands of sessions, so none of them may keep the memory of one huge request.
const pooledBytesMax = 1 << 20

// pausedBytesMax bounds the value that is in memory while a cursor or a difference is paused, which may be for as long as a client
// takes to read.
const pausedBytesMax = 64 << 10

// sessionBuffers are the parts of a session that grow with its requests, one for each kind of request.
type sessionBuffers struct {
	cursor  Cursor
	batch   batchRead
	txn     Txn
	ranged  rangeDelete
	invoked []byte        // values of InvokeAll, first those of before
	before  []readVersion // see readBefore
	alone   [][]byte      // those of before that are in memory of their own, see place
	system  storage.Cursor
	last    []byte // of a ScanReadable

	aloneBytes int // of alone
	kept       int // bytes that keptBytes counts
}

// forgetAlone drops the values that are in memory of their own.
func (b *sessionBuffers) forgetAlone() {
	clear(b.alone)
	b.alone, b.aloneBytes = b.alone[:0], 0
}

// memoryBytes is about how much memory the session's buffers take.
func (x *Session) memoryBytes() int {
	b := &x.buffers
	return b.txn.write.MemoryBytes() + b.txn.own.held() + b.txn.reads.held() + cap(b.txn.old) + cap(b.txn.fresh) +
		b.ranged.write.MemoryBytes() + b.ranged.reads.held() + cap(b.invoked) + cap(b.before)*int(unsafe.Sizeof(readVersion{})) +
		cap(b.cursor.long) + b.batch.memoryBytes() + cap(x.committing.writer.Scratch)
}

// keyReadBytes is what a session keeps of each key that is read with others, beside the key.
const keyReadBytes = 80

// inUse reports whether a transaction or a cursor is open in the buffers.
func (b *sessionBuffers) inUse() bool { return b.txn.open || b.cursor.open }

// Trim publishes what the session has counted, and gives up its buffers if they have become large and nothing is open in
// it. Close does so, too. A caller that keeps a session calls Trim after each request.
func (x *Session) Trim() { x.TrimBeside(0) }

// TrimBeside is Trim for a caller that has buffers of so many bytes of its own from one request to the next. They count with those of the session
// until the next Trim. It reports false if the caller has to give them up.
func (x *Session) TrimBeside(bytes int) bool {
	x.reader.Flush()
	if x.buffers.inUse() {
		return true
	}
	counts, own := &x.store.sessions.kept, x.memoryBytes()
	if own <= pooledBytesMax && counts.keep(&x.buffers.kept, own+bytes) {
		return true
	}
	counts.keep(&x.buffers.kept, 0)
	x.buffers = sessionBuffers{txn: Txn{session: x}}
	x.committing.writer.Scratch = nil
	return false
}

// keptBytes bounds what the buffers of all sessions, and those beside them, take together between their requests, beside what each may keep. A session may wait for its next
// request for ever, in the pool or with its stream, and one that is taken for something small keeps what it has.
type keptBytes struct {
	total atomic.Int64 // of the sessions that keep more than keptUncounted
	most  int64
}

const (
	// keptUncounted is what any session may keep: more than requests for a few keys need.
	keptUncounted = 2 << 10
	keptBytesMin  = 8 << 20
	keptPart      = 64 // of the memory
)

func (k *keptBytes) init(memory int64) { k.most = max(keptBytesMin, memory/keptPart) }

// keep counts what a session keeps, of which so much is counted already. It reports false if that is too much.
func (k *keptBytes) keep(counted *int, bytes int) bool {
	if bytes <= keptUncounted {
		bytes = 0
	}
	more := bytes - *counted
	if more == 0 {
		return true
	}
	if k.total.Add(int64(more)) > k.most && more > 0 {
		k.total.Add(-int64(more))
		return false
	}
	*counted = bytes
	return true
}
