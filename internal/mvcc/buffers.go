package mvcc

import (
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
}

// forgetAlone drops the values that are in memory of their own.
func (b *sessionBuffers) forgetAlone() {
	clear(b.alone)
	b.alone, b.aloneBytes = b.alone[:0], 0
}

// memoryBytes is about how much memory the session's buffers take.
func (x *Session) memoryBytes() int {
	b := &x.buffers
	return b.txn.write.MemoryBytes() + b.txn.reads.held() + cap(b.txn.old) + cap(b.txn.fresh) +
		b.ranged.write.MemoryBytes() + b.ranged.reads.held() + cap(b.invoked) + cap(b.before)*int(unsafe.Sizeof(readVersion{})) +
		cap(b.cursor.long) + b.batch.memoryBytes() + cap(x.committing.writer.Scratch)
}

// keyReadBytes is what a session keeps of each key that is read with others, beside the key.
const keyReadBytes = 80

// inUse reports whether a transaction or a cursor is open in the buffers.
func (b *sessionBuffers) inUse() bool { return b.txn.open || b.cursor.open }

// Trim publishes what the session has counted, and gives up its buffers if they have become large and nothing is open in
// it. Close does so, too. A caller that keeps a session calls Trim after each request.
func (x *Session) Trim() {
	x.reader.Flush()
	if x.memoryBytes() > pooledBytesMax && !x.buffers.inUse() {
		x.buffers = sessionBuffers{txn: Txn{session: x}}
		x.committing.writer.Scratch = nil
	}
}
